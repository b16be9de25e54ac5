//! The rules that must hold: for a call, at any time, and in the end.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::sync::Arc;

use tower_semaphore_protocol::TICKET_MIN;
use tower_semaphore_protocol::session::{AcquireOptions, OnUnavailable, Progress};
use tower_semaphore_protocol::{Call, LineId, Op, Session};

use super::Bug;
use super::process::{Kept, Link, Others, Phase, Process, Slot, reuse_ticks, time};
use super::server::{Id, Stored, cost};
use super::world::{Action, Rule, Seen, Snapshot, World};

/// The proof of a place that was admitted by policy.
const NEVER_ENDS: u64 = TICKET_MIN - 1;
/// The number of ticks in which everything comes to rest without further faults.
const REST: u8 = 24;
/// The number of rounds in which everything is done that can be done without time passing.
const ROUNDS: usize = 40;

/// Whether grants are paused until a time, as the process knows it.
fn is_paused(p: &Process) -> bool {
    p.session.as_ref().is_some_and(|session| session.paused_until().is_some())
}

fn line_of(stored: &Stored) -> Option<LineId> {
    stored.place.line()
}

impl World {
    /// The most permits that any process may know of.
    pub(crate) fn cap(&self) -> usize {
        let limits = self.config.limits.iter().copied();
        let sets = self.config.sets.iter().filter_map(|(limit, _)| *limit);
        limits.chain(sets).max().unwrap_or(0) as usize
    }

    pub(crate) fn compare(
        &self,
        s: &mut Snapshot,
        process: u8,
        call: &Call,
        before: &[Stored],
        after: &[Stored],
    ) {
        if let Op::Audit { .. } = call.op {
            return;
        }
        let (now, now_ms) = (s.now, s.server_now());
        let place = |list: &[Stored], id: Id| list.iter().find(|p| p.id == id).copied();
        let names = |new: &Stored| match &call.op {
            Op::Acquire { ids, .. } => ids.contains(&new.place),
            _ => false,
        };
        let proof = |new: &Stored| match &call.op {
            Op::Reassert { proofs, .. } => {
                proofs.iter().find(|(id, _)| *id == new.place).map(|(_, proof)| *proof)
            }
            _ => None,
        };
        let request = |s: &Snapshot, id: Id| {
            let slot = s.processes[usize::from(id.0)].slot_of(id);
            slot.map(|slot| (id.0, slot.request))
        };

        for old in before {
            if (old.end <= now_ms || place(after, old.id).is_none())
                && let Some(key) = request(s, old.id)
            {
                s.ghost.turns.remove(&key);
            }
        }
        let limit = call.limit as usize;
        // By the limit of its request, unless the call's limit applies to all places.
        let room = |stored: &Stored| match stored.place.bound.filter(|_| !call.for_all) {
            Some(bound) => bound.limit as usize,
            None => limit,
        };
        let (mut granted, mut room_of_granted) = (0, 0);
        for new in after {
            let key = request(s, new.id);
            let old = place(before, new.id);
            let came_back = old.is_some_and(|old| old.end <= now_ms) && new.end > now_ms;
            if came_back && !names(new) && proof(new).is_none() {
                s.breaks(Rule::DeadStayDead);
            }
            if let Some(ticket) = new.ticket {
                if old.is_none_or(|old| old.ticket.is_none()) {
                    s.ghost.grants.remove(&new.id);
                    if let Some(key) = key {
                        s.ghost.turns.entry(key).or_insert(ticket);
                    }
                }
                continue;
            }
            if old.is_some_and(|old| old.ticket.is_none()) {
                continue;
            }
            // It holds now, and did not before.
            if new.end <= now_ms {
                s.breaks(Rule::DeadStayDead);
            }
            if s.revoked[..usize::from(s.taken_out)].contains(&new.place) && proof(new).is_some() {
                s.breaks(Rule::Revoked);
            }
            match proof(new) {
                Some(end) if end < TICKET_MIN && old.is_none() => {
                    self.saw(Seen::Restored);
                    if end <= now_ms {
                        s.breaks(Rule::DeadStayDead);
                    } else if end != NEVER_ENDS && !s.ghost.forgotten.contains(&new.id) {
                        s.breaks(Rule::NoLeak);
                    }
                    s.ghost.restored.insert(new.id);
                    s.ghost.grants.insert(new.id, (s.epoch, now));
                    continue;
                }
                _ => {}
            }
            granted += 1;
            let is_newcomer = old.is_none() && proof(new).is_none();
            room_of_granted = room_of_granted.max(if is_newcomer { limit } else { room(new) });
            let known = key.and_then(|key| s.ghost.turns.get(&key).copied());
            let turn = match (known, proof(new)) {
                (Some(turn), _) => turn,
                (None, Some(ticket)) if ticket >= TICKET_MIN => ticket,
                _ => old.and_then(|old| old.ticket).unwrap_or(u64::MAX),
            };
            let passed = after.iter().any(|other| {
                let theirs = request(s, other.id).and_then(|key| s.ghost.turns.get(&key));
                let p = &s.processes[usize::from(other.id.0)];
                // A place that joins with this call comes after all others.
                let was_there = place(before, other.id).is_some() || proof(other).is_some();
                other.ticket.is_some()
                    && line_of(other) == line_of(new)
                    && other.end > now_ms
                    && was_there
                    && p.knows(other.id)
                    && theirs.is_some_and(|theirs| *theirs < turn)
            });
            if passed && s.step == 0 {
                s.breaks(Rule::Order);
            }
            // The last calls of this process promote without a message, and some promote nothing.
            if old.is_some()
                && !new.place.poll_only
                && new.id.0 != process
                && s.processes[usize::from(new.id.0)].dead
            {
                s.breaks(Rule::GonePassedOver);
            }
            s.ghost.grants.insert(new.id, (s.epoch, now));
        }

        let live = |p: &&Stored| p.end > now_ms;
        let held = after.iter().filter(live).filter(|p| p.ticket.is_none());
        let holders = held.map(|held| cost(&held.place)).sum::<usize>();
        let waiting = after.iter().filter(live).filter(|p| p.ticket.is_some()).count();
        if holders >= limit {
            self.saw(Seen::LimitReached);
        }
        if waiting > 0 {
            self.saw(Seen::SomeoneWaits);
        }
        let first = after.iter().filter(live).filter(|p| p.ticket.is_some());
        let first = first.min_by_key(|p| (p.ticket, p.place));
        let has_room = first.is_some_and(|first| holders < room(first));
        if holders < limit && has_room && !self.config.is_fair() {
            s.breaks(Rule::NoIdlePermit);
        }
        let restored = s.ghost.restored.iter().filter_map(|id| place(after, *id));
        let restored = restored.map(|restored| cost(&restored.place)).sum::<usize>();
        if granted > 0 && holders > room_of_granted + restored {
            s.breaks(Rule::CapByLedger);
        }
    }

    /// Checks whose turn it was, by the rule of tenants.
    pub(crate) fn judge_turns(&self, s: &mut Snapshot, call: &Call, before: &[Stored]) {
        let now_ms = s.server_now();
        let server = Arc::make_mut(&mut s.server);
        if let Some((rule, text)) = server.judge(before, call, now_ms) {
            if std::env::var_os("MODEL_SHOW").is_some() {
                eprintln!("{rule}: {text}");
            }
            s.breaks(match rule {
                "order" => Rule::Order,
                "each in the server" => Rule::Each,
                "rate in the server" => Rule::Rate,
                "cap in the server" => Rule::CapByLedger,
                "idle in the server" => Rule::NoIdlePermit,
                _ => Rule::Turn,
            });
            return;
        }
        let limit = call.limit as usize;
        let after = &s.server.places;
        let (mut waiting, held): (Vec<&Stored>, Vec<&Stored>) =
            after.iter().partition(|stored| stored.ticket.is_some());
        let units = held.iter().map(|held| cost(&held.place)).sum::<usize>();
        waiting.sort_unstable_by_key(|stored| line_of(stored));
        waiting.dedup_by_key(|stored| line_of(stored));
        if waiting.len() > 1 {
            self.saw(Seen::TenantsWait);
        }
        let of_rate = waiting.iter().filter_map(|stored| stored.place.rate());
        let is_full = |rate| s.server.ledger.usage_of(rate, now_ms * 1000).opens_at.is_some();
        if units < limit && of_rate.into_iter().any(is_full) {
            self.saw(Seen::RateWaits);
        }
        if units < limit && waiting.iter().any(|stored| units + cost(&stored.place) > limit) {
            self.saw(Seen::BigWaits);
        }
        if units < limit && s.server.ledger.turns().any(|(_, turn)| turn < 0.0) {
            self.saw(Seen::Parked);
        }
        if waiting.iter().any(|stored| stored.place.claim.is_some_and(|c| c.each().is_some()))
            && units < limit
        {
            self.saw(Seen::Capped);
        }
        // A place is granted whose request is younger than one that waits.
        let request_of = |s: &Snapshot, stored: &Stored| {
            let slot = s.processes[usize::from(stored.id.0)].slot_of(stored.id);
            slot.map(|slot| slot.began)
        };
        let was_waiting =
            |new: &&&Stored| before.iter().any(|old| old.id == new.id && old.ticket.is_some());
        let granted = held.iter().filter(was_waiting).filter_map(|new| request_of(s, new)).max();
        let oldest = waiting.iter().filter_map(|stored| request_of(s, stored)).min();
        if granted.is_some() && oldest.is_some() && granted > oldest {
            self.saw(Seen::PassedByTurn);
        }
    }

    /// Checks that a process keeps or passes on a permit rightly: to one of its requests or, if `to` is `None`, to a
    /// later one. `terms` are those of the request that had it, `asking` the requests of this process without a permit.
    pub(crate) fn judge_reuse(
        &self,
        s: &mut Snapshot,
        process: usize,
        terms: &AcquireOptions,
        to: Option<&Slot>,
        asking: &[Slot],
    ) {
        match s.processes[process].others {
            Others::Alone(at) if s.now < at + reuse_ticks(terms) => {}
            Others::Recalled => return s.breaks(Rule::Recalled),
            Others::Alone(_) | Others::Unknown => return s.breaks(Rule::NotPassedBy),
        }
        let first = asking.iter().map(|slot| slot.request).min();
        let is_first = first.is_none() || first == to.map(|to| to.request);
        let same = |slot: &Slot| slot.options.claim == terms.claim;
        if !is_first || !asking.iter().all(same) || !to.is_none_or(same) {
            s.breaks(Rule::OwnTurn);
        }
    }

    /// Checks that permits without a request go back in time, and after a recall.
    fn judge_kept(&self, s: &Snapshot, p: &Process, broken: &mut Vec<Rule>) {
        let reuse_of = |kept: &Kept| reuse_ticks(&kept.options);
        let has_kept = p.session.as_ref().is_some_and(|session| session.kept() > 0);
        if has_kept && p.others == Others::Recalled {
            broken.push(Rule::Recalled);
        }
        let is_over = |kept: &Kept| {
            let is_known = matches!(p.others, Others::Alone(at) if s.now < at + reuse_of(kept));
            !is_known || s.now >= kept.since + reuse_of(kept)
        };
        if has_kept && p.kept.iter().any(is_over) {
            broken.push(Rule::KeptInTime);
        }
    }

    /// Updates what an onlooker knows of the permits that processes pass on.
    fn note_kept(&self, s: &mut Snapshot) {
        let now = s.now;
        for process in 0..s.processes.len() {
            let p = &s.processes[process];
            let kept = p.session.as_ref().map_or(0, Session::kept);
            if p.kept.len() > kept {
                let gone = p.kept.len() - kept;
                let p = Arc::make_mut(&mut s.processes[process]);
                p.kept.drain(..gone);
            }
            let p = &s.processes[process];
            if matches!(p.others, Others::Alone(at) if now >= at + self.config.longest_reuse()) {
                Arc::make_mut(&mut s.processes[process]).others = Others::Unknown;
            }
        }
    }

    /// Checks what must hold at any time.
    pub(crate) fn judge(&self, s: &mut Snapshot) {
        if self.config.reuses() {
            self.note_kept(s);
        }
        let (now, now_ms) = (s.now, s.server_now());
        let server = Arc::clone(&s.server);
        let places = &server.places;
        let live = |id: Id| places.iter().find(|p| p.id == id && p.end > now_ms);
        let limit = self.cap();
        let faults = &self.config.faults;
        let is_stepped = faults.steps > 0;
        let mut broken = Vec::new();

        let mut workers = 0;
        let mut all_settled = true;
        for p in s.processes.iter().filter(|p| !p.dead) {
            let mut mine = 0;
            for slot in &p.slots {
                // A process that stands still past its deadline does nothing.
                let works =
                    p.works(slot, now, self.config.bug) && (!p.frozen || p.works(slot, now, None));
                let place = p.session.as_ref().and_then(|session| session.place(slot.index));
                let is_revoked = place.is_some_and(|place| s.revoked.contains(&place));
                if works && (!slot.by_policy || slot.counted) && !is_stepped {
                    let held = p.id(slot.index).and_then(live).is_some_and(|p| p.ticket.is_none());
                    let granted = p.id(slot.index).and_then(|id| s.ghost.grants.get(&id));
                    let had = now < s.lost_at + slot.lease()
                        && granted.is_some_and(|(epoch, _)| *epoch < s.epoch);
                    if !held && !had && !is_revoked {
                        broken.push(Rule::Grounded);
                    }
                    if is_revoked && usize::from(p.told) >= s.revoked.len() {
                        broken.push(Rule::Revoked);
                    }
                }
                if works && !slot.by_policy && !is_revoked {
                    mine += slot.cost();
                }
            }
            workers += mine;
            if mine > limit && faults.flushes == 0 && faults.failovers == 0 && faults.moves == 0 {
                broken.push(Rule::CapByProcess);
            }
            if p.is_awake() && p.link == Link::Down && self.is_kept_waiting(p, now) {
                broken.push(Rule::Policy);
            }
            if !s.is_settled(p) {
                all_settled &= !p.is_awake();
                continue;
            }
            self.judge_kept(s, p, &mut broken);
            self.judge_settled(s, p, &live, &mut broken);
            for place in places.iter().filter(|place| place.id.0 == p.me && place.end > now_ms) {
                let stranger = s.ghost.strangers.contains(&place.id);
                let is_excused = s.ghost.orphans.contains(&place.id) && !stranger
                    || s.ghost.deferred.contains(&place.id);
                if !p.knows(place.id) && !p.keeps(place.id) && !is_excused {
                    broken.push(Rule::NoLeak);
                }
            }
        }
        if all_settled && s.mail.is_empty() && s.old.is_empty() && self.is_permit_idle(s) {
            broken.push(Rule::NoIdlePermit);
        }
        let is_seen = faults.flushes == 0
            && !is_stepped
            && !self.config.moves_lose_data
            && (faults.restarts == 0 && faults.failovers == 0 || self.config.quarantine);
        let cap = if is_seen { limit } else { 2 * limit };
        if workers > limit {
            self.saw(Seen::OverCap);
        }
        if workers > cap {
            broken.push(Rule::CapByBelief);
        }
        for rule in broken {
            s.breaks(rule);
        }

        // Forgets what no longer matters, so that equal futures are equal states.
        let Snapshot { ghost, processes, .. } = s;
        let there = |id: &Id| places.iter().any(|p| p.id == *id);
        ghost.grants.retain(|id, _| {
            let p = &processes[usize::from(id.0)];
            there(id) || p.knows(*id) || p.keeps(*id)
        });
        ghost.turns.retain(|(process, request), _| {
            processes[usize::from(*process)].slots.iter().any(|slot| slot.request == *request)
        });
        ghost.orphans.retain(there);
        ghost.strangers.retain(there);
        ghost.unheard.retain(there);
        ghost.restored.retain(there);
    }

    /// Checks that in an outage the policy admits requests at once.
    fn is_kept_waiting(&self, p: &Process, now: u8) -> bool {
        let is_paused = self.config.set(p.set).in_place() == Some(0) || is_paused(p);
        let works = |slot: &Slot| p.works(slot, now, None);
        let mut asking = p.slots.iter().filter(|slot| slot.is_asking() && !slot.napping);
        asking.any(|slot| match slot.options.on_unavailable {
            OnUnavailable::Local(_) => !is_paused && !p.slots.iter().any(works),
            OnUnavailable::Admit => !is_paused,
            _ => false,
        })
    }

    /// Checks what a process must know once it has received everything.
    fn judge_settled<'a>(
        &self,
        s: &Snapshot,
        p: &Process,
        live: &impl Fn(Id) -> Option<&'a Stored>,
        broken: &mut Vec<Rule>,
    ) {
        let now = s.now;
        if !p.slots.iter().any(|slot| slot.is_asking() && !slot.napping) {
            return;
        }
        let Some(mut session) = p.session.clone() else { return };
        for slot in p.slots.iter().filter(|slot| slot.is_asking() && !slot.napping) {
            let Some(id) = p.id(slot.index) else { continue };
            if s.ghost.deferred.contains(&id) {
                continue;
            }
            match (session.handle_poll(slot.index, time(now)), live(id)) {
                (Progress::Joining, _) | (Progress::Waiting, None) => broken.push(Rule::Served),
                // What another process grants in a pause is held back.
                (Progress::Waiting, Some(_)) if is_paused(p) => {}
                (Progress::Waiting, Some(place)) if place.ticket.is_none() => {
                    let expected = place.place.poll_only
                        || self.config.faults.steps > 0
                        || s.mail.iter().any(|h| h.id == id)
                        || s.ghost.unheard.contains(&id);
                    let fresh = s.ghost.grants.get(&id).is_some_and(|(_, at)| *at == now);
                    if !expected || !fresh {
                        broken.push(Rule::Aware);
                    }
                }
                (Progress::Waiting, _) => {}
                _ => broken.push(Rule::Aware),
            }
        }
    }

    /// Checks a state in which every message has arrived, a permit is free, and a place waits. What a process frees
    /// that knows of fewer permits is found by the next renewal.
    fn is_permit_idle(&self, s: &Snapshot) -> bool {
        let limits = &self.config.limits;
        if s.set_at == s.now && self.config.faults.sets > 0
            || limits.iter().any(|l| *l != limits[0])
            // It asks once the pause is over for it.
            || s.processes.iter().any(|p| is_paused(p))
        {
            return false;
        }
        let now_ms = s.server_now();
        let held = s.server.places.iter().filter(|place| place.ticket.is_none());
        let holders = held.map(|held| cost(&held.place)).sum::<usize>();
        if self.config.is_fair() && holders > 0 {
            // It may be the turn of a place that does not fit yet.
            return false;
        }
        s.server.places.iter().any(|place| {
            let p = &s.processes[usize::from(place.id.0)];
            let limit = p.session.as_ref().map_or(0, Session::limit_in_force);
            // Once the window opens, it is asked again.
            let is_full = |rate| s.server.ledger.usage_of(rate, now_ms * 1000).opens_at.is_some();
            place.ticket.is_some()
                && place.end > now_ms
                && !place.place.rate().is_some_and(is_full)
                && p.is_awake()
                && p.knows(place.id)
                && holders < limit as usize
                && p.lost_at.is_none()
        })
    }

    // ===== the end =====

    /// Checks that without further faults everything comes to rest: requests are served and leave, sessions are
    /// dropped, and nothing is left on the server. Done for some of the last states.
    pub(crate) fn drains(&self, s: &Snapshot) -> bool {
        if s.now < self.config.ticks || s.broken.is_some() {
            return true;
        }
        if self.config.drained > 1 {
            let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(s);
            if hash % self.config.drained != 0 {
                return true;
            }
        }
        self.rest(s, false)
    }

    /// Runs on from a state until everything has come to rest. Returns whether it does.
    pub(crate) fn rest(&self, s: &Snapshot, is_told: bool) -> bool {
        let mut s = s.clone();
        s.set = 0;
        let tell = |s: &Snapshot, what: &dyn std::fmt::Debug| {
            if is_told {
                eprintln!("    {} {what:?}", s.now);
            }
        };
        for _ in 0..REST {
            let mut rounds = 0;
            while let Some(action) = self.next_rest(&s) {
                tell(&s, &action);
                if self.apply(&mut s, action).is_none() {
                    break;
                }
                rounds += 1;
                if rounds > ROUNDS * s.processes.len() || s.broken.is_some() {
                    tell(&s, &("no rest", s.broken));
                    return false;
                }
            }
            let is_over = |p: &Arc<Process>| p.session.is_none() && p.slots.is_empty();
            if s.processes.iter().all(is_over) {
                let now_ms = s.server_now();
                return !s.server.places.iter().any(|place| {
                    let is_left = place.end > now_ms
                        && !s.processes[usize::from(place.id.0)].dead
                        && !s.ghost.orphans.contains(&place.id);
                    if is_left {
                        tell(&s, place);
                    }
                    is_left
                });
            }
            self.tick(&mut s);
        }
        tell(&s, &s.processes);
        false
    }

    /// Returns what happens next, on the way to rest.
    fn next_rest(&self, s: &Snapshot) -> Option<Action> {
        if usize::from(s.taken_out) < s.revoked.len() {
            return Some(Action::TakeOut);
        }
        if !s.old.is_empty() {
            return Some(Action::ReadOld(0));
        }
        for (process, p) in s.processes.iter().enumerate() {
            if p.calls.iter().any(|call| call.answer.is_none()) {
                let in_turn = p.calls.iter().any(|call| call.answer.is_none() && !call.late);
                return Some(match in_turn {
                    true => Action::Execute { process },
                    false => Action::ExecuteLate { process },
                });
            }
            if p.dead {
                continue;
            }
            if p.frozen {
                return Some(Action::Wake { process });
            }
            if !p.calls.is_empty() {
                return Some(Action::Answer { process });
            }
            if p.link != Link::Up {
                return Some(Action::Connect { process });
            }
            if s.is_stale(p) || p.checking.is_some() {
                return Some(Action::Learn { process });
            }
            if p.is_due(s.now) && self.config.bug != Some(Bug::NoSelfFence) {
                return Some(Action::Watch { process });
            }
            for (slot, held) in p.slots.iter().enumerate() {
                if held.napping {
                    return Some(Action::Rouse { process, slot });
                }
                if held.phase == Phase::Working {
                    return Some(Action::Leave { process, slot });
                }
                if held.until.is_some_and(|until| until <= s.now) {
                    return Some(Action::Alarm { process, slot });
                }
            }
            if p.has_mail() {
                return Some(Action::Send { process });
            }
        }
        let awake = |i: &usize| s.processes[usize::from(s.recalls[*i].1)].is_awake();
        if let Some(i) = (0..s.recalls.len()).find(awake) {
            return Some(Action::Recall(i));
        }
        let awake = |i: &usize| s.processes[usize::from(s.mail[*i].id.0)].is_awake();
        (0..s.mail.len()).find(awake).map(Action::Hint)
    }
}
