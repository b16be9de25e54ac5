//! The ledger's side: the expected result of a history.
#![expect(clippy::cast_precision_loss, reason = "no score has more than 53 bits")]

use std::collections::{HashMap, HashSet};

use deadpool_redis::redis::{Cmd, cmd};
use tower_semaphore::protocol::{
    Bound, BoundRate, Caller, Charge, Claim, FURTHER_WORK, Grant, LINE_MAX, Ledger, NodeId,
    PlaceId, PlaceStatus, Reply, TICKET_MIN, Used, UsedOf,
};

use super::wire::{Item, Lua, QUEUED, Told};
use super::{Asks, History, KEY, NODES, Pick, Proof, Step, Terms, Time};

/// An expected message: channel, text.
pub(super) type Message = (String, String);

/// The server's expected state after an operation.
#[derive(Debug)]
pub(super) struct Expected {
    /// The step of the history, as it was carried out.
    pub(super) what: String,
    /// The number of earlier answers that belong to no operation.
    pub(super) before: usize,
    pub(super) reply: Item,
    /// What may come instead.
    pub(super) in_short: Option<Item>,
    pub(super) messages: Vec<Message>,
    pub(super) set: Vec<(String, f64)>,
    /// The longest of the leases in the set, in ms, and the longest ever given.
    pub(super) longest: (u64, u64),
    /// Whether the bound on work was reached.
    pub(super) more: bool,
    /// µs. Budgets that are full by then may still have members.
    pub(super) now: u64,
}

/// A call of a script, and the headroom by which it judges.
struct Call {
    command: Cmd,
    headroom: u32,
}

/// A history carried out by the ledger: the commands to send, and what must come back.
#[derive(Default)]
pub(super) struct Plan {
    pub(super) commands: Vec<u8>,
    pub(super) expected: Vec<Expected>,
    /// The number of expected answers that belong to no operation.
    pub(super) asides: usize,
}

pub(super) struct Model<'a> {
    lua: &'a Lua,
    out: Plan,
    ledger: Ledger,
    counted: bool,
    limit: u32,
    headroom: u32,
    for_all: bool,
    now: u64,
    alive: [bool; NODES],
    next: u64,
    known: Vec<PlaceId>,
    lease_ends: HashMap<PlaceId, u64>,
    tickets: HashMap<PlaceId, u64>,
    leases: HashMap<PlaceId, u64>,
    longest: u64,
    fallback: Asks,
}

/// When histories begin, µs: 20 s before the times of parked lines begin again.
const BEGAN: u64 = 1_795_162_092_000_543;

pub(super) fn node(i: usize) -> NodeId {
    // Far apart, so that their texts differ from the first digit on.
    NodeId::new(0x1357_9bdf_0246_8ace_u64.wrapping_mul(i as u64 * 2 + 1))
}

fn channel(node: NodeId) -> String {
    format!("t:@{node}")
}

impl<'a> Model<'a> {
    pub(super) fn new(lua: &'a Lua, history: &History) -> Self {
        Self {
            lua,
            out: Plan::default(),
            ledger: Ledger::with_work_max(lua.work_max),
            counted: history.counted,
            limit: history.limit,
            headroom: history.headroom,
            for_all: false,
            now: BEGAN,
            alive: [true; NODES],
            // So that numbers of one and of two digits meet: they are ordered as texts.
            next: 30,
            known: Vec::new(),
            lease_ends: HashMap::new(),
            tickets: HashMap::new(),
            leases: HashMap::new(),
            longest: 0,
            fallback: history.fallback,
        }
    }

    pub(super) fn run(mut self, history: &History) -> Plan {
        self.wipe();
        self.send(&cmd("UNSUBSCRIBE"));
        for i in 0..NODES {
            self.send(cmd("SUBSCRIBE").arg(channel(node(i))));
        }
        for (i, step) in history.steps.iter().enumerate() {
            self.take(i, step);
        }
        self.out
    }

    fn send(&mut self, command: &Cmd) {
        self.out.commands.extend(command.get_packed_command());
    }

    fn take(&mut self, i: usize, step: &Step) {
        match step {
            Step::Acquire { node: at, leaving, poll_only, ids, terms } => {
                let leaving = self.pick_leaving(leaving);
                let ids: Vec<_> =
                    ids.iter().map(|asks| self.new_id(*at, *poll_only, *asks)).collect();
                self.acquire(i, *at, &leaving, &ids, *terms);
            }
            Step::AcquireAgain { node, leaving, picks, terms } => {
                let leaving = self.pick_leaving(leaving);
                let mut ids = self.pick_once(picks);
                // All newcomers of a call have the same rate, or none.
                let last = ids.last().and_then(PlaceId::rate);
                ids.retain(|id| id.rate() == last);
                self.acquire(i, *node, &leaving, &ids, *terms);
            }
            Step::Release { node, picks } => {
                let ids = self.pick_leaving(picks);
                self.release(i, *node, &ids);
            }
            Step::Renew { node, picks, lease_ms } => {
                let ids = self.pick_once(picks);
                self.renew(i, *node, &ids, *lease_ms);
            }
            Step::Reassert { node, proofs, lease_ms } => {
                let picks: Vec<_> = proofs.iter().map(|(pick, _)| pick.clone()).collect();
                let ids = self.pick_once(&picks);
                let proofs: Vec<_> =
                    ids.iter().zip(proofs).map(|(id, (_, p))| (*id, self.prove(*id, p))).collect();
                self.reassert(i, *node, &proofs, *lease_ms);
            }
            Step::Inspect { most, rate } => self.inspect(i, *most, *rate),
            Step::Revoke { pick } => {
                let present = self.present();
                let id = self.pick(pick, &present);
                self.revoke(i, id);
            }
            Step::Limit(limit) => self.limit = *limit,
            Step::Headroom(headroom) => self.headroom = *headroom,
            Step::ForAll(for_all) => self.for_all = *for_all,
            Step::Time(Time::By(us)) => self.pass(self.now.saturating_add_signed(*us)),
            Step::Time(Time::LeaseEnd(place, ms)) => {
                let places = self.present();
                if let Some((_, lease_end, _)) = places.get(place % places.len().max(1)) {
                    let ms = lease_end.saturating_add_signed(*ms);
                    self.pass(ms * 1000 + self.now % 1000);
                }
            }
            Step::Subscribe { node: at, alive } => {
                self.alive[*at] = *alive;
                let command = if *alive { "SUBSCRIBE" } else { "UNSUBSCRIBE" };
                self.send(cmd(command).arg(channel(node(*at))));
            }
            Step::Wipe => self.wipe(),
        }
    }

    fn pass(&mut self, now: u64) {
        // With rates, time does not go back: the scripts keep grants that have left their window for a while, and would
        // count them again.
        let is_rated = self.fallback.claim.is_some();
        self.now = if is_rated { now.max(self.now) } else { now };
    }

    fn wipe(&mut self) {
        self.ledger = Ledger::with_work_max(self.lua.work_max);
        self.send(cmd("DEL").arg(KEY));
        self.out.asides += 1;
    }

    fn new_id(&mut self, at: usize, poll_only: bool, asks: Asks) -> PlaceId {
        let Asks { bound, claim, rate } = asks;
        // Only a claim uses the headroom.
        let bound = bound.map(|(limit, headroom)| Bound {
            limit,
            headroom: if claim.is_some() { headroom } else { 0 },
            rate: rate.filter(|_| claim.is_some()),
        });
        let id = PlaceId { node: node(at), poll_only, n: self.next, bound, claim };
        self.next += 1;
        self.known.push(id);
        id
    }

    fn present(&self) -> Vec<(PlaceId, u64, Option<u64>)> {
        let mut places: Vec<_> = self.ledger.places().collect();
        places.sort_unstable_by_key(|(id, ..)| id.n);
        places
    }

    fn pick(&mut self, pick: &Pick, present: &[(PlaceId, u64, Option<u64>)]) -> PlaceId {
        match pick {
            Pick::Present(i) if !present.is_empty() => present[i % present.len()].0,
            Pick::Present(i) | Pick::Known(i) if !self.known.is_empty() => {
                self.known[i % self.known.len()]
            }
            Pick::Present(_) | Pick::Known(_) => self.new_id(0, false, self.fallback),
            Pick::New { node, poll_only, asks } => self.new_id(*node, *poll_only, *asks),
        }
    }

    /// Places that leave, most of those with charges with what they have used.
    fn pick_leaving(&mut self, picks: &[Pick]) -> Vec<Leaving> {
        let present = self.present();
        let mut leaving = Vec::with_capacity(picks.len());
        for pick in picks {
            let id = self.pick(pick, &present);
            // As good as drawn. One product alone has few values modulo 5.
            let product = id.n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let dice = (product ^ product >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32;
            let used = |used: Used, (index, charge): (usize, Charge)| {
                let taken = charge.taken();
                let of = [0, taken / 3, taken, taken + 1_000_007, 5 * charge.burst()];
                let ahead = [0, 0, 0, taken / 2 + 1, 3 * charge.burst()];
                let used_of = UsedOf {
                    used: of[(dice >> (8 * index)) as usize % of.len()],
                    ahead: ahead[(dice >> (8 * index + 4)) as usize % ahead.len()],
                };
                used.with(index, used_of)
            };
            let charges = id.charges();
            let all = charges.iter().enumerate().fold(Used::as_charged(charges), used);
            let is_told = !charges.is_empty() && !dice.is_multiple_of(4);
            self.note_burst(id);
            leaving.push((id, is_told.then_some(all)));
        }
        leaving
    }

    /// No process names a place twice in one call.
    fn pick_once(&mut self, picks: &[Pick]) -> Vec<PlaceId> {
        let mut seen = HashSet::new();
        let present = self.present();
        let mut ids = Vec::with_capacity(picks.len());
        for pick in picks {
            let mut id = self.pick(pick, &present);
            if !seen.insert(id) {
                id = self.new_id(0, false, self.fallback);
                seen.insert(id);
            }
            ids.push(id);
        }
        ids
    }

    fn prove(&self, id: PlaceId, proof: &Proof) -> u64 {
        let near = |ms: i64| (self.now / 1000).saturating_add_signed(ms);
        match proof {
            Proof::LeaseEnd => self.lease_ends.get(&id).copied().unwrap_or_else(|| near(0)),
            Proof::Ticket(i) => {
                let any = self.known.get(i % self.known.len().max(1));
                let other = any.and_then(|id| self.tickets.get(id)).copied().unwrap_or(self.now);
                self.tickets.get(&id).copied().unwrap_or(other)
            }
            Proof::Near(ms) => near(*ms),
            Proof::Never => TICKET_MIN - 1,
            Proof::Leaves => 0,
        }
    }

    /// Takes out the starts that none of them keeps, as the ledger does before each operation. The scripts wait until
    /// their room is needed.
    fn forget_starts(&mut self) {
        let latest = self.ledger.starts().map(|(_, _, at, _)| at).max();
        let Some((latest, until)) = latest.zip(self.ledger.counts_starts_until()) else { return };
        let left = (self.now - (until - latest)) as f64 / 1e6;
        self.send(cmd("ZREMRANGEBYSCORE").arg(KEY).arg(-left).arg("(-1000000000"));
        self.out.asides += 1;
    }

    /// The key may be kept for as long as two bursts.
    fn note_burst(&mut self, id: PlaceId) {
        let burst = id.charges().iter().map(Charge::burst).max();
        self.longest = self.longest.max(burst.map_or(0, |burst| 2 * burst / 1000));
    }

    /// Has the ledger carry it out, and the server asked to do the same.
    fn operate(
        &mut self,
        what: String,
        at: usize,
        ids: &[PlaceId],
        (lease_ms, told, recalls): (u64, Told, bool),
        Call { command, headroom }: &Call,
        run: impl FnOnce(&mut Ledger, Caller, &mut dyn FnMut(NodeId, &[Grant]) -> bool) -> Reply,
    ) {
        self.forget_starts();
        ids.iter().for_each(|id| self.note_burst(*id));
        let caller = Caller {
            now: self.now,
            limit: self.limit,
            headroom: *headroom,
            for_all: self.for_all,
            max_waiting: 0,
            node: node(at),
            recalls,
        };
        let mut messages = Vec::new();
        let (alive, counted) = (self.alive, self.counted);
        let reply = run(&mut self.ledger, caller, &mut |to, grants| {
            // Where listeners cannot be counted, nobody is asked whether it is there.
            if grants.is_empty() && !recalls && !counted {
                return true;
            }
            let listens = (0..NODES).any(|i| node(i) == to && alive[i]);
            if listens {
                let mut text = KEY.to_owned();
                for grant in grants {
                    let id = grant.id.to_string();
                    let (_, n) = id.split_once(':').unwrap();
                    text += &format!(" {n} {}", grant.lease_end);
                }
                messages.push((channel(to), text));
            }
            listens || !counted
        });

        for (id, status) in ids.iter().zip(&reply.statuses) {
            if let Some(ticket) = status.ticket() {
                self.tickets.insert(*id, ticket);
            }
            if *status == PlaceStatus::Held || status.ticket().is_some() {
                self.lease_ends.insert(*id, reply.lease_end);
                self.leases.insert(*id, lease_ms);
                let kept = id.rate().map_or(0, |rate| rate.kept_us() / 1000);
                self.longest = self.longest.max(lease_ms).max(kept);
            }
        }

        let held = reply.statuses.iter().all(|status| *status == PlaceStatus::Held);
        let is_timed = told == Told::Timed && reply.opens_in > 0;
        let in_short = (told != Told::Grants && held && !reply.more && !is_timed)
            .then(|| number(reply.lease_end));
        let usage = reply.usage.unwrap_or_default();
        let is_kept = usage.in_use <= u64::from(self.limit);
        if told == Told::InShort && held && is_kept {
            assert!(!reply.more, "{reply:?}");
            return self.expect(what, command, number(reply.lease_end), messages);
        }
        let mut items: Vec<Item> = Vec::new();
        if told != Told::Grants {
            assert!(!reply.more || reply.earliest == 0, "{reply:?}");
            let earliest = if reply.more { 1 } else { reply.earliest };
            items.extend([reply.lease_end, earliest, usage.in_use, usage.waiting].map(number));
            if reply.opens_in > 0 {
                assert!(!reply.more && reply.earliest == 0, "{reply:?}");
                items[1] = Item::Int(-reply.opens_in.cast_signed());
            }
        }
        items.extend(reply.statuses.iter().map(|status| match status {
            PlaceStatus::Gone => Item::Int(0),
            PlaceStatus::Held => Item::Int(1),
            PlaceStatus::NoPermit => Item::Int(-1),
            PlaceStatus::QueueFull => Item::Int(-2),
            PlaceStatus::TenantFull => Item::Int(-3),
            PlaceStatus::NeverFits => Item::Int(-4),
            PlaceStatus::LimitFull(index) => Item::Int(-5 - i64::from(*index)),
            PlaceStatus::NoStart(ms) => Item::Int(-7 - ms.cast_signed()),
            PlaceStatus::NoBudget(index, ms) => {
                Item::Int(-1_000_000_000_000 * (i64::from(*index) + 1) - ms.cast_signed())
            }
            PlaceStatus::Waiting(ticket) => number(*ticket),
            PlaceStatus::WaitingFor(ticket, full) => {
                number(ticket + (u64::from(*full) + 1) * (1 << 28))
            }
        }));
        for grant in &reply.granted {
            items.push(Item::Text(grant.id.to_string()));
            // As it is in the set: a score comes as text.
            items.push(Item::Text(grant.lease_end.to_string()));
        }
        if told == Told::Grants && reply.more {
            items.push(Item::Int(1));
        }
        if told == Told::Grants && reply.opens_in > 0 {
            items.push(Item::Int(-reply.opens_in.cast_signed()));
        }
        self.expect(what, command, Item::List(items), messages);
        if let Some(expected) = self.out.expected.last_mut() {
            expected.more = reply.more;
            if matches!(told, Told::Either | Told::Timed) {
                expected.in_short = in_short;
            }
        }
    }

    fn expect(&mut self, what: String, command: &Cmd, reply: Item, messages: Vec<Message>) {
        let (s, us) = (self.now / 1_000_000, self.now % 1_000_000);
        self.send(cmd("MSET").arg("now:s").arg(s).arg("now:us").arg(us));
        self.send(command);
        self.send(cmd("ZRANGE").arg(KEY).arg(0).arg(-1).arg("WITHSCORES"));
        self.send(cmd("PTTL").arg(KEY));

        let (set, longest) = self.set(&[]);
        self.longest = self.longest.max(longest);
        let longest = (longest, self.longest);
        let before = std::mem::take(&mut self.out.asides);
        let (more, in_short) = (false, None);
        self.out.expected.push(Expected {
            what,
            before,
            reply,
            in_short,
            messages,
            set,
            longest,
            more,
            now: self.now,
        });
    }

    /// Returns the expected set without these places, and the longest of its leases, in ms.
    fn set(&self, without: &[PlaceId]) -> (Vec<(String, f64)>, u64) {
        let (mut set, mut longest) = (Vec::new(), 0);
        for (id, lease_end, ticket) in self.ledger.places().filter(|(id, ..)| !without.contains(id))
        {
            longest = longest.max(self.leases[&id]);
            let Some(claim) = id.claim_in_line() else {
                let unit = if id.claim.is_some() { 1000.0 } else { 1.0 };
                set.push((id.to_string(), lease_end as f64 / unit));
                set.extend(ticket.map(|ticket| (format!("{QUEUED}{id}"), ticket as f64)));
                let holds = if ticket.is_none() { id.cost() } else { 0 };
                set.extend((2..=holds).map(|i| (format!("{i}{QUEUED}{id}"), FURTHER)));
                continue;
            };
            set.push((id.to_string(), FAIR_LEASES + lease_end as f64));
            if let Some(ticket) = ticket {
                set.push((format!("{QUEUED}{id}"), line_score(claim, ticket)));
                continue;
            }
            // One member for each permit, under the tenant and under each further limit.
            let shares = |kind: &str, score: f64| {
                let member = move |i| if i == 1 { String::new() } else { format!("{i}") };
                let members = (1..=claim.cost()).map(|i| format!("{}{kind}{id}", member(i)));
                members.map(|member| (member, score)).collect::<Vec<_>>()
            };
            set.extend(shares(QUEUED, share_score(claim)));
            for (limit, kind) in claim.further().iter().zip(["a", "b", "c"]) {
                set.extend(shares(kind, UNDER_LIMITS + f64::from(limit.number())));
            }
        }
        let starts: HashSet<_> = self.ledger.starts().collect();
        for (node, n, at, end) in starts {
            longest = longest.max(end.saturating_sub(self.now) / 1000);
            let score = -(at as f64 / 1e6);
            let id = self.known.iter().find(|id| id.node == node && id.n == n).unwrap();
            let number = id.to_string();
            let number = number.split('/').next().unwrap();
            set.push((format!("r{number}"), score));
            set.extend((2..=id.cost()).map(|i| (format!("{i}r{number}"), score)));
        }
        for (number, full_at) in self.ledger.budgets() {
            longest = longest.max(full_at.saturating_sub(self.now) / 1000);
            set.push((format!("b{}", digits(number)), -(full_at as f64) / BUDGET_UNIT));
        }
        set.extend(self.ledger.turns().map(|(line, turn)| (format!("t{line}"), turn)));
        if self.ledger.turns().any(|(_, turn)| turn < ASLEEP) {
            set.push(("s".into(), f64::INFINITY));
        }
        for (line, tenant) in self.ledger.further_lines() {
            set.push((format!("x{line}"), FURTHER_LINES + f64::from(tenant.number())));
        }
        if self.ledger.further_lines().next().is_some() {
            set.push(("x".into(), f64::INFINITY));
        }
        set.sort_unstable_by(|a, b| a.1.total_cmp(&b.1).then_with(|| a.0.cmp(&b.0)));
        (set, longest)
    }

    /// Returns whether any place has a claim.
    fn has_claims(&self) -> bool {
        self.ledger.places().any(|(id, ..)| id.claim.is_some())
    }

    /// Returns the call of a script on these ids.
    fn call<'b>(
        &self,
        name: &'static str,
        ids: impl IntoIterator<Item = &'b PlaceId>,
        rest: &[String],
    ) -> Call {
        let headroom = ids.into_iter().any(|id| id.claim.is_some()).then_some(self.headroom);
        let mut command = self.lua.call(name, self.limit);
        command.arg(u8::from(self.for_all)).arg(headroom.map_or(-1, i64::from)).arg(rest);
        Call { command, headroom: headroom.unwrap_or(0) }
    }

    fn what(&self, i: usize, op: &str, at: usize, ids: &[PlaceId], more: &str) -> String {
        let shown: Vec<_> = ids.iter().take(8).map(ToString::to_string).collect();
        format!(
            "step {i}: {op} by {} of {} ids {shown:?}, limit {}, now {}, {more}",
            node(at),
            ids.len(),
            self.limit,
            self.now
        )
    }

    fn acquire(&mut self, i: usize, at: usize, leaving: &[Leaving], ids: &[PlaceId], terms: Terms) {
        let (leaving_texts, used) = split(leaving);
        let leaving: &[PlaceId] = &leaving.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        let Terms { lease_ms, max_queue, max_waiting, recalls } = terms;
        let left = self.what(i, "leave", at, leaving, "");
        let what = self.what(i, "acquire", at, ids, &format!("{terms:?}, after {left}"));
        let mut rest = vec![lease_ms.to_string(), max_queue.map_or(-1, i64::from).to_string()];
        rest.push(max_waiting.to_string());
        rest.extend([u8::from(self.counted).to_string(), node(at).to_string()]);
        rest.extend([leaving.len().to_string(), u8::from(recalls).to_string()]);
        rest.extend(leaving_texts);
        rest.extend(texts(ids));
        let stay = self.ledger.places().filter(|(id, ..)| !leaving.contains(id));
        let (queue, held): (Vec<_>, Vec<_>) = stay.partition(|(.., ticket)| ticket.is_some());
        let members = if self.has_claims() { self.set(leaving).0.len() } else { held.len() };
        let at_once = queue.is_empty() && (members + ids.len()) as u64 <= u64::from(self.limit);
        let any_claim = self.has_claims() || leaving.iter().chain(ids).any(|id| id.claim.is_some());
        let told = match () {
            () if any_claim && leaving.is_empty() => Told::Either,
            () if any_claim => Told::Timed,
            () if at_once => Told::InShort,
            () => Told::All,
        };
        let call = self.call("acquire", leaving.iter().chain(ids), &rest);
        self.operate(what, at, ids, (lease_ms, told, recalls), &call, |ledger, caller, post| {
            let caller = Caller { max_waiting, ..caller };
            ledger.settle_used(&used, caller.now);
            ledger.acquire(caller, lease_ms, max_queue, leaving, ids, post)
        });
    }

    fn release(&mut self, i: usize, at: usize, leaving: &[Leaving]) {
        let (leaving_texts, used) = split(leaving);
        let ids: &[PlaceId] = &leaving.iter().map(|(id, _)| *id).collect::<Vec<_>>();
        let what = self.what(i, "release", at, ids, "");
        let mut rest = vec![u8::from(self.counted).to_string(), node(at).to_string()];
        rest.extend(leaving_texts);
        let call = self.call("release", ids, &rest);
        self.operate(what, at, ids, (0, Told::Grants, false), &call, |ledger, caller, post| {
            ledger.settle_used(&used, caller.now);
            ledger.release(caller, ids, post)
        });
    }

    fn renew(&mut self, i: usize, at: usize, ids: &[PlaceId], lease_ms: u64) {
        let what = self.what(i, "renew", at, ids, &format!("lease {lease_ms}"));
        let mut rest = vec![lease_ms.to_string(), u8::from(self.counted).to_string()];
        rest.push(node(at).to_string());
        rest.extend(texts(ids));
        let call = self.call("renew", ids, &rest);
        let told = if self.would_wait() == 0 { Told::InShort } else { Told::All };
        self.operate(what, at, ids, (lease_ms, told, false), &call, |ledger, caller, post| {
            ledger.renew(caller, lease_ms, ids, post)
        });
    }

    /// Returns how many wait, once the dead are swept.
    fn would_wait(&self) -> u64 {
        let mut dead: Vec<_> =
            self.ledger.places().filter(|(_, end, _)| *end <= self.now / 1000).collect();
        let kind = |id: &PlaceId| match (id.claim, id.line()) {
            (Some(_), None) => 0,
            (None, _) => 1,
            (Some(_), Some(_)) => 2,
        };
        dead.sort_unstable_by_key(|(id, end, _)| (kind(id), *end, *id));
        let (mut budget, mut swept) = (self.lua.work_max, 0);
        for (id, _, ticket) in dead {
            if budget == 0 {
                break;
            }
            let further = id.claim.is_some_and(Claim::has_further);
            let more = if further { FURTHER_WORK } else { 0 };
            budget = budget.saturating_sub(id.cost() as usize + more);
            swept += u64::from(ticket.is_some());
        }
        self.ledger.waiting() - swept
    }

    fn reassert(&mut self, i: usize, at: usize, proofs: &[(PlaceId, u64)], lease_ms: u64) {
        let ids: Vec<_> = proofs.iter().map(|(id, _)| *id).collect();
        let shown: Vec<_> = proofs.iter().take(8).map(|(_, proof)| proof).collect();
        let what =
            self.what(i, "reassert", at, &ids, &format!("lease {lease_ms}, proofs {shown:?}"));
        let mut rest = vec![lease_ms.to_string(), u8::from(self.counted).to_string()];
        rest.push(node(at).to_string());
        rest.extend(proofs.iter().flat_map(|(id, proof)| [id.to_string(), proof.to_string()]));
        let call = self.call("reassert", &ids, &rest);
        self.operate(
            what,
            at,
            &ids,
            (lease_ms, Told::All, false),
            &call,
            |ledger, caller, post| ledger.reassert(caller, lease_ms, proofs, post),
        );
    }

    fn inspect(&mut self, i: usize, most: usize, rate: Option<BoundRate>) {
        let what = self.what(i, "inspect", 0, &[], &format!("most {most}, rate {rate:?}"));
        let mut command = self.lua.call("inspect", u32::try_from(most).unwrap());
        let words = |rate: BoundRate| [rate.starts().into(), rate.window_us()];
        command.arg(&rate.map_or([0; 2], words)[..]);
        let [mut leases, mut fair, mut nobodys] = [const { Vec::new() }; 3];
        let mut tickets = Vec::new();
        for (id, lease_end, ticket) in self.ledger.places() {
            let (list, above) = match (id.claim, id.line()) {
                (None, _) => (&mut leases, 0.0),
                (Some(_), None) => (&mut nobodys, 0.0),
                (Some(_), Some(_)) => (&mut fair, FAIR_LEASES),
            };
            if lease_end > self.now / 1000 {
                list.push((
                    lease_end as f64 + above,
                    id.to_string(),
                    ticket.zip(id.claim),
                    id.claim,
                ));
            }
            if let (Some(ticket), None) = (ticket, id.line()) {
                tickets.push((ticket as f64, format!("{QUEUED}{id}")));
            }
        }
        for list in [&mut leases, &mut fair, &mut nobodys] {
            list.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
            list.truncate(most);
        }
        tickets.sort_unstable_by(|a, b| a.0.total_cmp(&b.0).then_with(|| a.1.cmp(&b.1)));
        tickets.truncate(most);
        for (_, id, waits, claim) in &fair {
            let share = claim.map_or(0.0, share_score);
            let score = waits.map_or(share, |(ticket, claim)| line_score(claim, ticket));
            tickets.push((score, format!("{QUEUED}{id}")));
        }
        leases.extend(fair);
        leases.extend(nobodys);
        let of_place = |id: &str| id.parse::<PlaceId>().unwrap().rate();
        let rate = rate.or_else(|| leases.iter().rev().find_map(|(_, id, ..)| of_place(id)));
        let leases: Vec<_> = leases.into_iter().map(|(score, id, ..)| (score, id)).collect();
        let counts = [self.now, self.ledger.in_use(), self.ledger.waiting(), leases.len() as u64];
        let mut items: Vec<Item> = counts.map(number).into();
        items.extend(match rate {
            Some(rate) => {
                let usage = self.ledger.usage_of(rate, self.now);
                let opening = usage.opens_at.unwrap_or_default();
                [rate.starts().into(), rate.window_us(), usage.started, opening].map(number)
            }
            None => [0; 4].map(number),
        });
        let mut budgets: Vec<_> =
            self.ledger.budgets().filter(|(_, full_at)| *full_at > self.now).collect();
        budgets.sort_unstable_by_key(|(number, full_at)| (std::cmp::Reverse(*full_at), *number));
        items.push(number(budgets.len() as u64));
        let budget = |(number, full_at): &(u32, u64)| {
            (-(*full_at as f64) / BUDGET_UNIT, format!("b{}", digits(*number)))
        };
        let budgets: Vec<_> = budgets.iter().map(budget).collect();
        for (score, member) in leases.into_iter().chain(budgets).chain(tickets) {
            items.push(Item::Text(member));
            items.push(Item::Text(score.to_string()));
        }
        self.expect(what, &command, Item::List(items), Vec::new());
    }

    fn revoke(&mut self, i: usize, id: PlaceId) {
        let what = self.what(i, "revoke", 0, &[id], "");
        let mut command = cmd("EVALSHA");
        command.arg(&self.lua.hashes["revoke"]).arg(1).arg(KEY).arg(id.to_string()).arg(1);
        let left = self
            .ledger
            .revoke(id, true, self.now)
            .map(|end| number(end.saturating_sub(self.now / 1000)));
        self.expect(what, &command, left.unwrap_or(Item::Int(-1)), Vec::new());
    }
}

/// The lowest score of the lease end of a place with a tenant.
const FAIR_LEASES: f64 = 1e13;

/// The score of the further permits of a place that has a cost and no tenant.
const FURTHER: f64 = 1e8;

/// The score of the permits of a place that stands in lines.
fn share_score(claim: Claim) -> f64 {
    if claim.has_tenant() { f64::from(claim.tenant().number()) } else { FURTHER }
}

/// The lowest scores of permits under further limits, and of the members that tell the tenants of lines with such.
const UNDER_LIMITS: f64 = 5e13;
const FURTHER_LINES: f64 = 2e13;

/// Scores of budgets are times in these, µs.
pub(super) const BUDGET_UNIT: f64 = 8_388_608.0;

/// Turns of lines that are asleep are below this.
const ASLEEP: f64 = -536_870_912.0;

/// Returns the number of a budget to the base 36.
fn digits(number: u32) -> String {
    let digit = |power: u32| char::from_digit(number / 36u32.pow(power) % 36, 36).unwrap();
    (0..5).rev().map(digit).collect()
}

/// The score of a place that waits in a line: -l + k·2⁻²⁸.
fn line_score(claim: Claim, ticket: u64) -> f64 {
    let k = (ticket - TICKET_MIN) as f64;
    k / (LINE_MAX + 1) as f64 - claim.line().map_or(0.0, |line| f64::from(line.number()))
}

/// A place that leaves, and what it has used of its budgets.
type Leaving = (PlaceId, Option<Used>);

/// The texts of places that leave, and what they have used.
fn split(leaving: &[Leaving]) -> (Vec<String>, Vec<(PlaceId, Used)>) {
    let text = |(id, used): &Leaving| {
        let used = used.map(|used| used.text(id.charges()).to_vec()).unwrap_or_default();
        id.to_string() + std::str::from_utf8(&used).unwrap()
    };
    let used = leaving.iter().filter_map(|(id, used)| Some((*id, (*used)?)));
    (leaving.iter().map(text).collect(), used.collect())
}

fn texts(ids: &[PlaceId]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

fn number(n: u64) -> Item {
    Item::Int(i64::try_from(n).unwrap())
}
