//! The world around the ledger: processes, connections, hints, faults, and what must hold.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use stateright::{Model, Property};
use tower_semaphore::ledger::Ledger;

use super::process::{Call, Notes, Op, Process, State, request_of};
use super::server::{self, Id, LEASE, Proof, Stored, id_of, stored};
use super::{Bug, Config, Faults};

/// What must hold. Each is one property of the checker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Rule {
    /// By the ledger's count, no more live holders than the limit, but for restored ones.
    CapByLedger,
    /// No more callers at work than the limit.
    CapByBelief,
    /// Whoever works has a live permit in the ledger, or had one in a ledger that was lost.
    Grounded,
    /// One process alone never works beyond the limit.
    CapByProcess,
    /// Nobody is granted a permit before a live waiter who came earlier.
    Order,
    /// After an operation no permit is idle while a live waiter waits.
    NoIdlePermit,
    /// A place whose lease has ended gets nothing, but by joining anew.
    DeadStayDead,
    /// What is given back is gone; only what was lost is restored.
    NoLeak,
    /// A granted waiter knows it at once, or, if its hint was lost, by its next renewal.
    Aware,
    /// A request has an answer, and a place as long as it waits.
    Served,
    /// A permit is lost at its deadline, or because the ledger says so with proof at hand.
    NotLostEarly,
    /// Nobody is granted a permit after he is known to be gone.
    GonePassedOver,
}

impl Rule {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::CapByLedger => "CapByLedger",
            Self::CapByBelief => "CapByBelief",
            Self::Grounded => "Grounded",
            Self::CapByProcess => "CapByProcess",
            Self::Order => "Order",
            Self::NoIdlePermit => "NoIdlePermit",
            Self::DeadStayDead => "DeadStayDead",
            Self::NoLeak => "NoLeak",
            Self::Aware => "Aware",
            Self::Served => "Served",
            Self::NotLostEarly => "NotLostEarly",
            Self::GonePassedOver => "GonePassedOver",
        }
    }
}

/// That something happened in a run, so that the rules were put to the test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Seen {
    LimitReached = 1,
    SomeoneWaits = 2,
    HintLost = 4,
    HintRepaired = 8,
    Restored = 0x10,
    Rejoined = 0x20,
    LateSocket = 0x40,
    Refused = 0x80,
    OverCap = 0x100,
    LostAtDeadline = 0x200,
    PassedOver = 0x400,
    HintFirst = 0x800,
    TooLate = 0x1000,
    Stranger = 0x2000,
    Quarantined = 0x4000,
    Orphan = 0x8000,
}

pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) seen: Arc<AtomicU32>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Snapshot {
    pub(crate) now: u8,
    pub(crate) server: Server,
    /// What the replica has, that takes over when the master fails.
    pub(crate) replica: Option<Server>,
    /// How often the data was lost, and when last.
    pub(crate) epoch: u8,
    lost_at: u8,
    /// The server that runs now is a replica that was promoted: it is older than its data.
    promoted: bool,
    pub(crate) processes: Vec<Process>,
    pub(crate) mail: Vec<Hint>,
    /// Broken connections whose calls the server still has to read.
    pub(crate) old: Vec<(u8, VecDeque<Call>)>,
    pub(crate) left: Faults,
    ghost: Ghost,
    pub(crate) broken: Option<Rule>,
}

/// The ledger, and its places as a list, so that they need not be listed at every look.
#[derive(Clone, Debug, Default)]
pub(crate) struct Server {
    ledger: Ledger,
    places: Vec<Stored>,
}

impl PartialEq for Server {
    fn eq(&self, other: &Self) -> bool {
        self.places == other.places
    }
}

impl Eq for Server {}

impl Hash for Server {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.places.hash(state);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Hint {
    id: Id,
    end: u8,
    late: bool,
}

/// What an onlooker who sees all remembers, to judge by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Ghost {
    /// Places that the ledger granted in their present stay: in which epoch, and when.
    grants: BTreeMap<Id, (u8, u8)>,
    /// The first ticket of each request that waits.
    turns: BTreeMap<(u8, u8), u16>,
    /// Places that nobody can be blamed for: a call that came late, or data of before, made them.
    orphans: BTreeSet<Id>,
    /// Places of which a process was told that it has them, and knows nothing of.
    strangers: BTreeSet<Id>,
    /// Granted places whose hint was lost.
    unheard: BTreeSet<Id>,
    /// Holders that the ledger forgot while they were alive, and those that were restored.
    forgotten: BTreeSet<Id>,
    restored: BTreeSet<Id>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Request {
        process: usize,
        wait: bool,
    },
    /// The request ends, however far it has come.
    Leave {
        process: usize,
        slot: usize,
    },
    /// What the process has to send is sent, carried out and answered.
    Send {
        process: usize,
    },
    /// It is sent, and gets stuck.
    SendSlow {
        process: usize,
    },
    Execute {
        process: usize,
    },
    Answer {
        process: usize,
    },
    Hint(usize),
    LoseHint(usize),
    DelayHint(usize),
    Break {
        process: usize,
    },
    Connect {
        process: usize,
    },
    /// The server reads one more call from a connection that broke long ago.
    ReadOld(usize),
    Crash {
        process: usize,
    },
    Freeze {
        process: usize,
    },
    Wake {
        process: usize,
    },
    Replicate,
    /// The replica takes over, without what came after.
    Failover,
    /// The server is killed and comes back empty.
    Restart,
    /// Another client empties it, and no connection shows that.
    Flush,
    Tick,
}

impl World {
    pub(crate) fn saw(&self, what: Seen) {
        self.seen.fetch_or(what as u32, Ordering::Relaxed);
    }

    const fn bug(&self) -> Option<Bug> {
        self.config.bug
    }
}

impl Model for World {
    type State = Snapshot;
    type Action = Action;

    fn init_states(&self) -> Vec<Snapshot> {
        let processes = (0..self.config.processes).map(Process::new).collect();
        let first = Snapshot {
            now: 0,
            server: Server::default(),
            replica: None,
            epoch: 0,
            lost_at: 0,
            promoted: false,
            processes,
            mail: Vec::new(),
            old: Vec::new(),
            left: self.config.faults,
            ghost: Ghost::default(),
            broken: None,
        };
        let beginning = self.config.beginning.iter();
        vec![beginning.fold(first, |s, action| {
            self.next_state(&s, *action).expect("a beginning that can happen")
        })]
    }

    fn actions(&self, s: &Snapshot, actions: &mut Vec<Action>) {
        if s.broken.is_some() {
            return;
        }
        let left = &s.left;
        for (process, p) in s.processes.iter().enumerate() {
            if !p.wire.is_empty() {
                actions.push(Action::Execute { process });
            }
            if p.dead {
                continue;
            }
            if p.frozen {
                actions.push(Action::Wake { process });
                continue;
            }
            // The processes are alike: the first to come is the first in the list.
            let may = process == 0 || s.processes[process - 1].requests > 0;
            if may
                && p.requests < self.config.requests[process]
                && p.slots.len() < self.config.slots
            {
                actions.push(Action::Request { process, wait: true });
                if self.config.tries {
                    actions.push(Action::Request { process, wait: false });
                }
            }
            actions.extend((0..p.slots.len()).map(|slot| Action::Leave { process, slot }));
            if p.connected && p.has_mail() {
                actions.push(Action::Send { process });
                if left.slow > 0 && p.wire.is_empty() {
                    actions.push(Action::SendSlow { process });
                }
            }
            if !p.back.is_empty() {
                actions.push(Action::Answer { process });
            }
            if !p.connected {
                actions.push(Action::Connect { process });
            } else if left.breaks > 0 && (!p.wire.is_empty() || !p.back.is_empty()) {
                actions.push(Action::Break { process });
            }
            if !p.slots.is_empty() {
                if left.crashes > 0 {
                    actions.push(Action::Crash { process });
                }
                if left.freezes > 0 {
                    actions.push(Action::Freeze { process });
                }
            }
        }
        for (i, hint) in s.mail.iter().enumerate() {
            let p = &s.processes[usize::from(hint.id.0)];
            if p.is_awake() {
                actions.push(Action::Hint(i));
            }
            if left.lost_hints > 0 {
                actions.push(Action::LoseHint(i));
            }
            if left.late_hints > 0 && !hint.late {
                actions.push(Action::DelayHint(i));
            }
        }
        actions.extend((0..s.old.len()).map(Action::ReadOld));
        if left.failovers > 0 {
            match &s.replica {
                None if !s.server.places.is_empty() => {
                    actions.extend([Action::Replicate, Action::Failover]);
                }
                Some(replica) if *replica != s.server => actions.push(Action::Failover),
                _ => {}
            }
        }
        if !s.server.places.is_empty() {
            if left.restarts > 0 {
                actions.push(Action::Restart);
            }
            if left.flushes > 0 {
                actions.push(Action::Flush);
            }
        }
        if s.now < self.config.ticks && (self.config.lazy || s.is_caught_up(self.config.away)) {
            actions.push(Action::Tick);
        }
    }

    fn next_state(&self, last: &Snapshot, action: Action) -> Option<Snapshot> {
        let mut s = last.clone();
        let now = s.now;
        match action {
            Action::Request { process, wait } => s.processes[process].join(wait, now),
            Action::Leave { process, slot } => s.processes[process].leave(slot, now),
            Action::Send { process } => {
                let calls = self.collect(&mut s, process);
                let p = &mut s.processes[process];
                p.wire.extend(calls);
                if last.processes[process].wire.is_empty()
                    && last.processes[process].back.is_empty()
                {
                    while !s.processes[process].wire.is_empty() {
                        self.execute(&mut s, process);
                    }
                    while !s.processes[process].back.is_empty() {
                        self.answer(&mut s, process);
                    }
                }
            }
            Action::SendSlow { process } => {
                let calls = self.collect(&mut s, process);
                if calls.is_empty() {
                    return None;
                }
                s.left.slow -= 1;
                s.processes[process].wire.extend(calls);
            }
            Action::Execute { process } => self.execute(&mut s, process),
            Action::Answer { process } => self.answer(&mut s, process),
            Action::Hint(i) => {
                let Hint { id: (process, n), end, .. } = s.mail.remove(i);
                let mut notes = Notes::default();
                s.processes[usize::from(process)].promoted(n, end, now, self.bug(), &mut notes);
                self.note(&mut s, process, &notes);
                self.watch(&mut s, usize::from(process));
            }
            Action::LoseHint(i) => {
                let hint = s.mail.remove(i);
                s.left.lost_hints -= 1;
                s.ghost.unheard.insert(hint.id);
                self.saw(Seen::HintLost);
            }
            Action::DelayHint(i) => {
                s.left.late_hints -= 1;
                s.mail[i].late = true;
                s.mail.sort_unstable();
            }
            Action::Break { process } => {
                s.left.breaks -= 1;
                self.cut(&mut s, process, true);
            }
            Action::Connect { process } => {
                s.processes[process].reconnected(self.bug());
            }
            Action::ReadOld(i) => {
                let process = s.old[i].0;
                let call = s.old[i].1.pop_front()?;
                if s.old[i].1.is_empty() {
                    s.old.remove(i);
                }
                self.saw(Seen::LateSocket);
                self.run_late(&mut s, process, &call);
            }
            Action::Crash { process } => {
                s.left.crashes -= 1;
                self.cut(&mut s, process, true);
                let p = &mut s.processes[process];
                let mut dead = Process::new(p.me);
                (dead.dead, dead.connected, dead.requests) = (true, false, p.requests);
                *p = dead;
                s.mail.retain(|hint| usize::from(hint.id.0) != process);
            }
            Action::Freeze { process } => {
                s.left.freezes -= 1;
                s.processes[process].frozen = true;
            }
            Action::Wake { process } => {
                s.processes[process].frozen = false;
                // Whatever it does next, it looks at the clock before: see `Slot::works`. The
                // watchdog comes when it comes.
                if self.bug() != Some(Bug::NoSelfFence) {
                    self.watch(&mut s, process);
                }
            }
            Action::Replicate => s.replica = Some(s.server.clone()),
            Action::Failover => {
                s.left.failovers -= 1;
                let replica = s.replica.take().unwrap_or_default();
                s.promoted = true;
                self.lose_data(&mut s, replica, true);
            }
            Action::Restart => {
                s.left.restarts -= 1;
                self.lose_data(&mut s, Server::default(), true);
            }
            Action::Flush => {
                s.left.flushes -= 1;
                self.lose_data(&mut s, Server::default(), false);
            }
            Action::Tick => {
                s.now += 1;
                if s.epoch > 0 && s.now >= s.lost_at + LEASE {
                    s.ghost.forgotten.clear();
                }
                for process in 0..s.processes.len() {
                    if s.processes[process].is_awake() {
                        self.watch(&mut s, process);
                    }
                }
            }
        }
        self.judge(&mut s);
        (s != *last).then_some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        macro_rules! always {
            ($($rule:ident)*) => {
                vec![$(Property::always(Rule::$rule.name(), |_, s: &Snapshot| {
                    s.broken != Some(Rule::$rule)
                })),*]
            };
        }
        always![CapByLedger CapByBelief Grounded CapByProcess Order NoIdlePermit DeadStayDead
            NoLeak Aware Served NotLostEarly GonePassedOver]
    }
}

impl Snapshot {
    /// Whether everybody did what he could: only then does time pass, unless a fault is at work.
    fn is_caught_up(&self, away: bool) -> bool {
        let busy = |p: &Process| match p.connected {
            _ if !p.is_awake() => false,
            true => p.has_mail() && !p.only_doubts(),
            false => !away,
        };
        let fresh = |h: &Hint| !h.late && self.processes[usize::from(h.id.0)].is_awake();
        !self.processes.iter().any(busy) && !self.mail.iter().any(fresh)
    }

    fn is_settled(&self, p: &Process) -> bool {
        p.is_awake()
            && p.connected
            && p.wire.is_empty()
            && p.back.is_empty()
            && !p.has_mail()
            && (self.epoch == 0 || self.lost_at < self.now)
    }

    fn breaks(&mut self, rule: Rule) {
        self.broken.get_or_insert(rule);
    }
}

impl World {
    fn collect(&self, s: &mut Snapshot, process: usize) -> Vec<Call> {
        let p = &mut s.processes[process];
        // The first look at this server.
        if p.seen != Some(s.epoch) {
            let by_uptime = self.bug() == Some(Bug::YoungByUptime);
            let young = s.epoch > 0 && s.now < s.lost_at + LEASE && !(s.promoted && by_uptime);
            let until = match p.seen {
                Some(_) => s.now + LEASE,
                None if young && self.bug() != Some(Bug::YoungServerTrusted) => s.lost_at + LEASE,
                None => 0,
            };
            p.seen = Some(s.epoch);
            if self.config.quarantine && self.bug() != Some(Bug::NoQuarantine) {
                p.quarantine = until;
            }
        }
        let mut limit = self.config.limit;
        if s.now < p.quarantine {
            self.saw(Seen::Quarantined);
            limit = 0;
        }
        // A release that is overdue is not sent; a call that came after the request had left may
        // have given the place a new lease, which then has to end by itself.
        let overdue = p.releases.iter().filter(|(_, until)| *until <= s.now);
        s.ghost.orphans.extend(overdue.map(|(n, _)| (p.me, *n)));
        p.collect(s.now, limit, self.bug())
    }

    /// The server carries out the first call on the wire.
    fn execute(&self, s: &mut Snapshot, process: usize) {
        let Some(call) = s.processes[process].wire.pop_front() else { return };
        let me = s.processes[process].me;
        if call.sent + LEASE <= s.now {
            // The release that follows it may not come: it is not sent a lease after it was due.
            self.expect_orphans(s, me, &call);
        }
        let reply = self.run(s, me, &call);
        s.processes[process].back.push_back((call, reply));
    }

    fn answer(&self, s: &mut Snapshot, process: usize) {
        let Some((call, reply)) = s.processes[process].back.pop_front() else { return };
        let (now, mut notes) = (s.now, Notes::default());
        s.processes[process].answered(&call, &reply, now, self.bug(), &mut notes);
        let me = s.processes[process].me;
        self.note(s, me, &notes);
        // What came late may be due already.
        self.watch(s, process);
    }

    fn watch(&self, s: &mut Snapshot, process: usize) {
        let (now, mut notes) = (s.now, Notes::default());
        s.processes[process].tick(now, self.bug(), &mut notes);
        let me = s.processes[process].me;
        self.note(s, me, &notes);
    }

    fn note(&self, s: &mut Snapshot, process: u8, notes: &Notes) {
        for n in &notes.stranger {
            self.saw(Seen::Stranger);
            s.ghost.strangers.insert((process, *n));
        }
        for (happened, what) in [
            (notes.lost_at_deadline, Seen::LostAtDeadline),
            (notes.hint_repaired, Seen::HintRepaired),
            (notes.rejoined, Seen::Rejoined),
            (notes.refused, Seen::Refused),
            (notes.hint_came_first, Seen::HintFirst),
            (notes.too_late, Seen::TooLate),
        ] {
            if happened {
                self.saw(what);
            }
        }
        if notes.lost_without_cause {
            s.breaks(Rule::NotLostEarly);
        }
    }

    /// The connection breaks. The server may still read what was sent on it, unless it is gone too.
    fn cut(&self, s: &mut Snapshot, process: usize, readable: bool) {
        let now = s.now;
        let p = &mut s.processes[process];
        let wire = std::mem::take(&mut p.wire);
        let back = std::mem::take(&mut p.back);
        let mut calls = Vec::new();
        for (call, reply) in back {
            s.ghost.unheard.extend(reply.granted.iter().map(|grant| id_of(grant.id)));
            calls.push(call);
        }
        calls.extend(wire.iter().cloned());
        p.disconnected(&calls, now, self.bug());
        if readable && !wire.is_empty() {
            s.old.push((p.me, wire));
        }
    }

    fn lose_data(&self, s: &mut Snapshot, left: Server, seen: bool) {
        let now = s.now;
        let before = std::mem::replace(&mut s.server, left).places;
        s.epoch += 1;
        s.lost_at = now;
        let after = s.server.places.clone();
        for place in &before {
            let kept =
                after.iter().any(|p| p.id == place.id && p.ticket.is_none() && p.end >= place.end);
            if place.ticket.is_none() && place.end > now && !kept {
                s.ghost.forgotten.insert(place.id);
            }
        }
        for place in &after {
            let (process, n) = place.id;
            if !s.processes[usize::from(process)].knows(n) {
                s.ghost.orphans.insert(place.id);
            }
        }
        s.ghost.restored.clear();
        // A place whose ticket its process does not know cannot have its turn again.
        let processes = &s.processes;
        s.ghost.turns.retain(|(process, request), _| {
            processes[usize::from(*process)].slots.iter().any(|slot| {
                slot.request() == *request
                    && matches!(slot.state, State::Waiting { ticket: Some(_) })
            })
        });
        if seen {
            // Hints come over the same connections as answers do.
            s.old.clear();
            s.ghost.unheard.extend(s.mail.drain(..).map(|hint| hint.id));
            for process in 0..s.processes.len() {
                if !s.processes[process].dead && s.processes[process].seen.is_some() {
                    self.cut(s, process, false);
                }
            }
        }
    }

    /// A call on a connection that broke before; nobody hears the answer.
    fn run_late(&self, s: &mut Snapshot, process: u8, call: &Call) {
        self.expect_orphans(s, process, call);
        let reply = self.run(s, process, call);
        s.ghost.unheard.extend(reply.granted.iter().map(|grant| id_of(grant.id)));
    }

    /// What this call makes may belong to nobody: its process went on long ago. It is
    /// left for one lease at the most.
    fn expect_orphans(&self, s: &mut Snapshot, process: u8, call: &Call) {
        let made: Vec<u8> = match &call.op {
            Op::Acquire { ids, .. } => ids.clone(),
            Op::Reassert { proofs } => proofs
                .iter()
                .filter(|(n, proof)| {
                    matches!(proof, Proof::Ticket(_)) || s.ghost.forgotten.contains(&(process, *n))
                })
                .map(|(n, _)| *n)
                .collect(),
            _ => Vec::new(),
        };
        for n in made {
            s.ghost.strangers.remove(&(process, n));
            if !s.processes[usize::from(process)].wants(n) {
                self.saw(Seen::Orphan);
                s.ghost.orphans.insert((process, n));
            }
        }
    }

    /// The server carries out a call; the onlooker compares before and after.
    fn run(&self, s: &mut Snapshot, process: u8, call: &Call) -> tower_semaphore::ledger::Reply {
        let before = s.server.places.clone();
        let mut hints = Vec::new();
        let mut passed_over = false;
        let processes = &s.processes;
        let reply = server::carry_out(
            self.bug(),
            &mut s.server.ledger,
            process,
            s.now,
            call,
            &mut |id, end| {
                let p = &processes[usize::from(id.0)];
                if p.connected || (p.dead && self.bug() == Some(Bug::GoneNotPassedOver)) {
                    hints.push(Hint { id, end, late: false });
                    true
                } else {
                    passed_over = true;
                    false
                }
            },
        );
        if passed_over {
            self.saw(Seen::PassedOver);
        }
        hints.retain(|hint| !s.processes[usize::from(hint.id.0)].dead);
        s.mail.extend(hints);
        s.mail.sort_unstable();
        let after = stored(&s.server.ledger);
        s.server.places.clone_from(&after);
        self.compare(s, process, call, &before, &after);
        reply
    }

    fn compare(
        &self,
        s: &mut Snapshot,
        process: u8,
        call: &Call,
        before: &[Stored],
        after: &[Stored],
    ) {
        let now = s.now;
        let place = |list: &[Stored], id: Id| list.iter().find(|p| p.id == id).copied();
        let names = |n: u8| matches!(&call.op, Op::Acquire { ids, .. } if ids.contains(&n));
        let proof = |id: Id| match &call.op {
            Op::Reassert { proofs } if id.0 == process => {
                proofs.iter().find(|(n, _)| *n == id.1).map(|(_, proof)| *proof)
            }
            _ => None,
        };

        for old in before {
            if old.end <= now || place(after, old.id).is_none() {
                s.ghost.turns.remove(&(old.id.0, request_of(old.id.1)));
            }
        }
        for new in after {
            let key = (new.id.0, request_of(new.id.1));
            let old = place(before, new.id);
            let came_back = old.is_some_and(|old| old.end <= now) && new.end > now;
            if came_back && !(new.id.0 == process && names(new.id.1)) && proof(new.id).is_none() {
                s.breaks(Rule::DeadStayDead);
            }
            if let Some(ticket) = new.ticket {
                if old.is_none_or(|old| old.ticket.is_none()) {
                    s.ghost.grants.remove(&new.id);
                    s.ghost.turns.entry(key).or_insert(ticket);
                }
                continue;
            }
            if old.is_some_and(|old| old.ticket.is_none()) {
                continue;
            }
            // It holds, and did not before.
            if new.end <= now {
                s.breaks(Rule::DeadStayDead);
            }
            match proof(new.id) {
                Some(Proof::End(end)) if old.is_none() => {
                    self.saw(Seen::Restored);
                    if end <= now {
                        s.breaks(Rule::DeadStayDead);
                    } else if !s.ghost.forgotten.contains(&new.id) {
                        s.breaks(Rule::NoLeak);
                    }
                    s.ghost.restored.insert(new.id);
                    s.ghost.grants.insert(new.id, (s.epoch, now));
                    continue;
                }
                _ => {}
            }
            let turn = match (s.ghost.turns.get(&key), proof(new.id)) {
                (Some(turn), _) => *turn,
                (None, Some(Proof::Ticket(ticket))) => ticket,
                _ => old.and_then(|old| old.ticket).unwrap_or(u16::MAX),
            };
            let passed = after.iter().any(|other| {
                let p = &s.processes[usize::from(other.id.0)];
                let earlier = s
                    .ghost
                    .turns
                    .get(&(other.id.0, request_of(other.id.1)))
                    .is_some_and(|theirs| *theirs < turn);
                other.ticket.is_some() && other.end > now && p.knows(other.id.1) && earlier
            });
            if passed {
                s.breaks(Rule::Order);
            }
            // Its own last calls promote without a message.
            if old.is_some() && new.id.0 != process && s.processes[usize::from(new.id.0)].dead {
                s.breaks(Rule::GonePassedOver);
            }
            s.ghost.grants.insert(new.id, (s.epoch, now));
        }

        let live = |p: &&Stored| p.end > now;
        let holders = after.iter().filter(live).filter(|p| p.ticket.is_none()).count();
        let waiting = after.iter().filter(live).filter(|p| p.ticket.is_some()).count();
        let limit = self.config.limit as usize;
        if holders >= limit {
            self.saw(Seen::LimitReached);
        }
        if waiting > 0 {
            self.saw(Seen::SomeoneWaits);
        }
        if call.limit as usize == limit && holders < limit && waiting > 0 {
            s.breaks(Rule::NoIdlePermit);
        }
        let restored = s.ghost.restored.iter().filter(|id| place(after, **id).is_some()).count();
        if holders > limit + restored || restored > limit {
            s.breaks(Rule::CapByLedger);
        }
    }

    /// What must hold at any time.
    fn judge(&self, s: &mut Snapshot) {
        let now = s.now;
        let places = s.server.places.clone();
        let live = |id: Id| places.iter().find(|p| p.id == id && p.end > now);
        let limit = self.config.limit as usize;
        let faults = &self.config.faults;
        let mut broken = Vec::new();

        let mut workers = 0;
        for p in s.processes.iter().filter(|p| !p.dead) {
            let mut mine = 0;
            for slot in &p.slots {
                let id = (p.me, slot.n);
                // One that stands still past its deadline does nothing.
                let works = slot.works(now, self.bug()) && (!p.frozen || slot.works(now, None));
                if works {
                    mine += 1;
                    let held = live(id).is_some_and(|place| place.ticket.is_none());
                    let had = now < s.lost_at + LEASE
                        && s.ghost.grants.get(&id).is_some_and(|(epoch, _)| *epoch < s.epoch);
                    if !held && !had {
                        broken.push(Rule::Grounded);
                    }
                }
            }
            workers += mine;
            if mine > limit && faults.flushes == 0 && faults.failovers == 0 {
                broken.push(Rule::CapByProcess);
            }
            if !s.is_settled(p) {
                continue;
            }
            for slot in &p.slots {
                let id = (p.me, slot.n);
                match (slot.state, live(id)) {
                    (State::Joining { .. }, _) | (State::Waiting { .. }, None) => {
                        broken.push(Rule::Served);
                    }
                    (State::Waiting { .. }, Some(place)) if place.ticket.is_none() => {
                        let expected =
                            s.mail.iter().any(|h| h.id == id) || s.ghost.unheard.contains(&id);
                        let fresh = s.ghost.grants.get(&id).is_some_and(|(_, at)| *at == now);
                        if !expected || !fresh {
                            broken.push(Rule::Aware);
                        }
                    }
                    _ => {}
                }
            }
            for place in places.iter().filter(|place| place.id.0 == p.me && place.end > now) {
                let stranger = s.ghost.strangers.contains(&place.id);
                if !p.knows(place.id.1) && (!s.ghost.orphans.contains(&place.id) || stranger) {
                    broken.push(Rule::NoLeak);
                }
            }
        }
        let seen_losses = faults.flushes == 0
            && (faults.restarts == 0 && faults.failovers == 0 || self.config.quarantine);
        let cap = if seen_losses { limit } else { 2 * limit };
        if workers > limit {
            self.saw(Seen::OverCap);
        }
        if workers > cap {
            broken.push(Rule::CapByBelief);
        }
        for rule in broken {
            s.breaks(rule);
        }

        // Forget what no longer matters, so that equal futures are equal states.
        let Snapshot { ghost, processes, .. } = s;
        let there = |id: &Id| places.iter().any(|p| p.id == *id);
        ghost.grants.retain(|id, _| there(id) || processes[usize::from(id.0)].knows(id.1));
        ghost.turns.retain(|(process, request), _| {
            processes[usize::from(*process)].slots.iter().any(|slot| slot.request() == *request)
        });
        ghost.orphans.retain(there);
        ghost.strangers.retain(there);
        ghost.unheard.retain(there);
        ghost.restored.retain(there);
    }
}
