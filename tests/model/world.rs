//! The world around the protocol: connections, servers, clocks, hints, faults, operators, and the requests of each
//! process. The rules are in `judge`.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use stateright::{Model, Property};
use tower_semaphore_protocol::session::{Event, OnUnavailable, PLACES_MAX, Progress, Sending};
use tower_semaphore_protocol::{self as protocol, Call, Op, PlaceId, Reply, Session, Time};
use tower_semaphore_protocol::{PlaceStatus, RejectReason, TICKET_MIN};

use super::process::{Answer, Kept, Link, Others, Phase, Process, Slot, Transit, ticks, time};
use super::server::{Id, Server, Stored, cost, id_of, process_of, server_ms};
use super::{Bug, Config, Faults};

/// The most calls that one session sends in a row.
const CALLS_MAX: usize = 16;

/// A rule that must hold. Each is one property of the checker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Rule {
    /// By the ledger's count, no call leads to more live holders than its limit, except for restored ones.
    CapByLedger,
    /// No more callers work than the limit, except for those admitted by policy.
    CapByBelief,
    /// A working caller has a live permit in the ledger, or had one in a ledger that was lost.
    Grounded,
    /// A single process never works beyond the limit.
    CapByProcess,
    /// No place is granted a permit before a live waiter that came earlier.
    Order,
    /// After an operation no permit is idle while a live waiter waits.
    NoIdlePermit,
    /// A place whose lease has ended gets nothing, unless it joins again.
    DeadStayDead,
    /// A released place is gone; only lost ones are restored.
    NoLeak,
    /// A granted waiter learns of it at once or, if its hint was lost, by its next renewal; in a pause, at its end.
    Aware,
    /// A request has an answer, and has a place while it waits.
    Served,
    /// A permit is lost at its deadline, or because an operator revoked it.
    NotLostEarly,
    /// No place is granted a permit after its process is known to be gone.
    GonePassedOver,
    /// A request has its final answer after its wait timeout, whatever the backend does.
    Answered,
    /// A session that is not idle names the next moment at which it must be handled, and that moment has not
    /// passed.
    Watched,
    /// Without further faults every request is served, each session is dropped, and nothing is left.
    Drained,
    /// What a session sends without time passing is bounded.
    Work,
    /// In an outage a process never admits more than its share.
    LocalShare,
    /// In an outage a process grants its own shares in the order of the requests.
    LocalOrder,
    /// A request is refused, failed or admitted only if its policy says so.
    Policy,
    /// A revoked permit is not in use, and not counted again.
    Revoked,
    /// Each grant goes to a tenant of the lowest class and level, and among these to the one that has been there
    /// longest.
    Turn,
    /// No tenant is granted more than its own cap.
    Each,
    /// In no window do more requests start than the rate of the one that starts.
    Rate,
    /// A process passes a permit on, or keeps it, only if a call that it sent less than that time ago found no other
    /// process waiting.
    NotPassedBy,
    /// After a recall it does so only once a call that it sent later found no other process waiting.
    Recalled,
    /// A permit without a request goes back in time.
    KeptInTime,
    /// Inside a process a permit goes to the request that came first, and only if all without one have the same terms.
    OwnTurn,
}

macro_rules! rules {
    ($($rule:ident)*) => {
        impl Rule {
            pub(crate) const fn name(self) -> &'static str {
                match self {
                    $(Self::$rule => stringify!($rule),)*
                    Self::Drained => "Drained",
                }
            }
        }

        fn rules() -> Vec<Property<World>> {
            let drained =
                Property::always(Rule::Drained.name(), |world: &World, s: &Snapshot| {
                    s.broken != Some(Rule::Drained) && world.drains(s)
                });
            vec![$(Property::always(Rule::$rule.name(), |_, s: &Snapshot| {
                s.broken != Some(Rule::$rule)
            }),)* drained]
        }
    };
}

rules![CapByLedger CapByBelief Grounded CapByProcess Order NoIdlePermit DeadStayDead NoLeak Aware
    Served NotLostEarly GonePassedOver Answered Watched Work LocalShare LocalOrder Policy Revoked Turn
    Each Rate NotPassedBy Recalled KeptInTime OwnTurn];

macro_rules! seen {
    ($($what:ident)*) => {
        /// Something that must happen in a run, so that the rules are put to the test.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Seen {
            $($what,)*
        }
    };
}

seen![LimitReached SomeoneWaits HintLost HintRepaired Restored Rejoined LateSocket Refused OverCap
    LostAtDeadline PassedOver HintFirst TooLate Stranger Quarantined Orphan Audited SameData
    Admitted Counted Shared ShareWaited ShareRefused Failed CallFailed QueueFull Late OldStay
    Rehomed TimedOutJoining TimedOutWaiting Revoked RevokedWaiter Raised Paused LeaveWithJoin
    SeveralInOne Retired Acknowledged Stepped PollOnly Closed TenantsWait PassedByTurn BigWaits Capped Parked PassedOn Kept
    Reused TakenOver KeptRecalled KeptReleased RecallLost PausedForATime RateWaits RateSet];

pub(crate) struct World {
    pub(crate) config: Config,
    pub(crate) seen: Arc<AtomicU64>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Snapshot {
    pub(crate) now: u8,
    pub(crate) server: Arc<Server>,
    /// The data of the replica that takes over when the master fails.
    pub(crate) replica: Option<Arc<Server>>,
    /// How far the server's clock is off, in ticks.
    pub(crate) step: i8,
    /// How often data was lost, and when last.
    pub(crate) epoch: u8,
    pub(crate) lost_at: u8,
    /// The present server is a replica that was promoted: it is older than its data.
    promoted: bool,
    /// How often another server took over the semaphore.
    home: u8,
    /// The override, as an index of the configuration's; and the revocations, the last of which may still have to be
    /// carried out.
    pub(crate) set: u8,
    pub(crate) set_at: u8,
    pub(crate) revoked: Vec<PlaceId>,
    pub(crate) taken_out: u8,
    pub(crate) processes: Vec<Arc<Process>>,
    pub(crate) mail: Vec<Hint>,
    /// Recalls: whether they are late, and their receivers.
    pub(crate) recalls: Vec<(bool, u8)>,
    /// Broken connections whose calls the server still has to read.
    pub(crate) old: Vec<(u8, VecDeque<Transit>)>,
    pub(crate) left: Faults,
    pub(crate) ghost: Ghost,
    pub(crate) broken: Option<Rule>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Hint {
    pub(crate) id: Id,
    place: PlaceId,
    end: u64,
    late: bool,
}

/// What an onlooker that sees everything remembers, to judge by.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Ghost {
    /// Places that the ledger granted since they last joined: in which epoch, and when.
    pub(crate) grants: BTreeMap<Id, (u8, u8)>,
    /// The first ticket of each waiting request.
    pub(crate) turns: BTreeMap<(u8, u8), u64>,
    /// Places that are no process's fault: a late call created them.
    pub(crate) orphans: BTreeSet<Id>,
    /// Places whose process was notified that it has them, and knows nothing of them.
    pub(crate) strangers: BTreeSet<Id>,
    /// Granted places whose hint was lost.
    pub(crate) unheard: BTreeSet<Id>,
    /// Holders that the ledger forgot while they were alive, and those that were restored.
    pub(crate) forgotten: BTreeSet<Id>,
    /// Places whose release or renewal the server refused. It is tried again a tick later.
    pub(crate) deferred: BTreeSet<Id>,
    pub(crate) restored: BTreeSet<Id>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Action {
    Request {
        process: usize,
        wait: bool,
    },
    /// The request ends, in whatever state it is.
    Leave {
        process: usize,
        slot: usize,
    },
    /// The caller releases its permit and waits for the acknowledgement.
    Release {
        process: usize,
        slot: usize,
    },
    /// The timer of a waiting request goes off.
    Alarm {
        process: usize,
        slot: usize,
    },
    /// The task of a request does not run until it is woken again.
    Nap {
        process: usize,
        slot: usize,
    },
    Rouse {
        process: usize,
        slot: usize,
    },
    /// The watchdog handles a session that is due.
    Watch {
        process: usize,
    },
    /// A call of the process is sent, carried out and answered.
    Send {
        process: usize,
    },
    /// A call is sent, and gets stuck.
    SendSlow {
        process: usize,
    },
    Execute {
        process: usize,
    },
    /// The server refuses the next call.
    Fail {
        process: usize,
    },
    /// The server does not know the script of the next call, which is sent again after others.
    Postpone {
        process: usize,
    },
    ExecuteLate {
        process: usize,
    },
    Answer {
        process: usize,
    },
    Hint(usize),
    LoseHint(usize),
    DelayHint(usize),
    Recall(usize),
    LoseRecall(usize),
    DelayRecall(usize),
    Break {
        process: usize,
    },
    /// An attempt to connect fails.
    Unreachable {
        process: usize,
    },
    Connect {
        process: usize,
    },
    /// The server reads one more call from a connection that broke earlier.
    ReadOld(usize),
    Crash {
        process: usize,
    },
    Close {
        process: usize,
    },
    Freeze {
        process: usize,
    },
    Wake {
        process: usize,
    },
    Replicate,
    /// The replica takes over, without the last changes.
    Failover,
    /// The server is killed and comes back empty.
    Restart,
    /// Another client empties it, and no connection shows that.
    Flush,
    /// Another server counts the semaphore from here on, perhaps without its data.
    Move {
        with_data: bool,
    },
    /// The server's clock steps by this number of ticks.
    Step(i8),
    /// An operator sets an override.
    Set(u8),
    /// An operator records a revocation, and then removes the place.
    Revoke(usize),
    TakeOut,
    /// A process learns that grants are paused for a tick.
    Pause {
        process: usize,
    },
    /// A process reads the overrides.
    Learn {
        process: usize,
    },
    Tick,
}

impl World {
    pub(crate) fn saw(&self, what: Seen) {
        let bit = 1 << what as u64;
        if self.seen.load(Ordering::Relaxed) & bit == 0 {
            self.seen.fetch_or(bit, Ordering::Relaxed);
        }
    }

    const fn bug(&self) -> Option<Bug> {
        self.config.bug
    }

    fn has(&self, bug: Bug) -> bool {
        self.config.bug == Some(bug)
    }
}

impl Model for World {
    type State = Snapshot;
    type Action = Action;

    fn init_states(&self) -> Vec<Snapshot> {
        let processes = (0..self.config.processes).map(|me| Arc::new(Process::new(me))).collect();
        let first = Snapshot {
            now: 0,
            server: Arc::default(),
            replica: None,
            step: 0,
            epoch: 0,
            lost_at: 0,
            promoted: false,
            home: 0,
            set: 0,
            set_at: 0,
            revoked: Vec::new(),
            taken_out: 0,
            processes,
            mail: Vec::new(),
            recalls: Vec::new(),
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
        for process in 0..s.processes.len() {
            self.actions_of(s, process, actions);
        }
        let left = &s.left;
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
        for (i, (is_late, process)) in s.recalls.iter().enumerate() {
            if s.processes[usize::from(*process)].is_awake() {
                actions.push(Action::Recall(i));
            }
            if left.lost_recalls > 0 {
                actions.push(Action::LoseRecall(i));
            }
            if left.late_recalls > 0 && !is_late {
                actions.push(Action::DelayRecall(i));
            }
        }
        actions.extend((0..s.old.len()).map(Action::ReadOld));
        let is_empty = s.server.places.is_empty();
        if left.failovers > 0 {
            match &s.replica {
                None if !is_empty => actions.extend([Action::Replicate, Action::Failover]),
                Some(replica) if *replica != s.server => actions.push(Action::Failover),
                _ => {}
            }
        }
        if !is_empty {
            if left.restarts > 0 {
                actions.push(Action::Restart);
            }
            if left.flushes > 0 {
                actions.push(Action::Flush);
            }
            if left.moves > 0 {
                actions.push(Action::Move { with_data: true });
                if self.config.moves_lose_data {
                    actions.push(Action::Move { with_data: false });
                }
            }
            if left.steps > 0 {
                actions.extend(self.config.steps.iter().map(|step| Action::Step(*step)));
            }
            if left.revokes > 0 {
                actions.extend((0..s.server.places.len()).map(Action::Revoke));
            }
        }
        if left.sets > 0 {
            let sets = self.config.sets.len() + self.config.rates.len();
            let sets = u8::try_from(sets).expect("a few");
            actions.extend((0..=sets).filter(|set| *set != s.set).map(Action::Set));
        }
        if usize::from(s.taken_out) < s.revoked.len() {
            actions.push(Action::TakeOut);
        }
        if s.now < self.config.ticks && (self.config.lazy || s.is_caught_up(&self.config)) {
            actions.push(Action::Tick);
        }
    }

    fn next_state(&self, last: &Snapshot, action: Action) -> Option<Snapshot> {
        let mut s = last.clone();
        self.apply(&mut s, action)?;
        self.judge(&mut s);
        (s != *last).then_some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        rules()
    }
}

impl Snapshot {
    fn process(&mut self, process: usize) -> &mut Process {
        Arc::make_mut(&mut self.processes[process])
    }

    pub(crate) fn server_now(&self) -> u64 {
        server_ms(self.now, self.step)
    }

    /// The number of revocations: begun, and completed.
    fn told(&self) -> usize {
        self.revoked.len() + usize::from(self.taken_out)
    }

    pub(crate) fn is_stale(&self, p: &Process) -> bool {
        p.set != self.set || usize::from(p.told) < self.told()
    }

    /// Returns whether every process has done what it could. Only then does time pass, unless a fault is present.
    fn is_caught_up(&self, config: &Config) -> bool {
        let busy = |p: &Process| {
            if !p.is_awake() {
                return false;
            }
            let waits_for_server = match p.link {
                Link::Up => p.has_mail() || p.checking.is_some() || self.is_stale(p),
                Link::Connecting | Link::Down => !config.away,
            };
            let alarm = |slot: &Slot| slot.until.is_some_and(|until| until <= self.now);
            waits_for_server || p.slots.iter().any(alarm) || p.is_due(self.now)
        };
        let fresh = |h: &Hint| !h.late && self.processes[usize::from(h.id.0)].is_awake();
        let fresh_recall = |(is_late, process): &(bool, u8)| {
            !is_late && self.processes[usize::from(*process)].is_awake()
        };
        !self.processes.iter().any(|p| busy(p))
            && !self.mail.iter().any(fresh)
            && !self.recalls.iter().any(fresh_recall)
            && usize::from(self.taken_out) == self.revoked.len()
    }

    pub(crate) fn is_settled(&self, p: &Process) -> bool {
        p.is_awake()
            && p.is_up()
            && p.calls.is_empty()
            && !p.has_mail()
            && p.checking.is_none()
            && !p.is_due(self.now)
            && !self.is_stale(p)
            && usize::from(self.taken_out) == self.revoked.len()
            && (self.epoch == 0 && self.home == 0 || self.lost_at < self.now)
    }

    pub(crate) fn breaks(&mut self, rule: Rule) {
        self.broken.get_or_insert(rule);
    }
}

// ===== what can happen =====

impl World {
    fn actions_of(&self, s: &Snapshot, process: usize, actions: &mut Vec<Action>) {
        let (left, p) = (&s.left, &*s.processes[process]);
        let config = &self.config;
        let to_execute = p.calls.iter().filter(|call| call.answer.is_none());
        let (late, in_turn): (Vec<_>, Vec<_>) = to_execute.partition(|call| call.late);
        if !in_turn.is_empty() {
            actions.push(Action::Execute { process });
            if left.errors > 0 {
                actions.push(Action::Fail { process });
            }
            if left.late_calls > 0 {
                actions.push(Action::Postpone { process });
            }
        }
        if !late.is_empty() {
            actions.push(Action::ExecuteLate { process });
        }
        if p.dead {
            return;
        }
        if p.frozen {
            actions.push(Action::Wake { process });
            return;
        }
        if p.is_due(s.now) {
            actions.push(Action::Watch { process });
        }
        // The processes are alike, so the first to come is the first in the list.
        let may = process == 0 || config.differ || s.processes[process - 1].requests > 0;
        if may && p.requests < config.requests[process] && p.slots.len() < config.slots && !p.closed
        {
            actions.push(Action::Request { process, wait: true });
            if config.tries {
                actions.push(Action::Request { process, wait: false });
            }
        }
        for (slot, held) in p.slots.iter().enumerate() {
            actions.push(Action::Leave { process, slot });
            if config.acknowledged && held.phase == Phase::Working {
                actions.push(Action::Release { process, slot });
            }
            if held.until.is_some_and(|until| until <= s.now) && !held.napping {
                actions.push(Action::Alarm { process, slot });
            }
            if left.naps > 0 && held.is_asking() && !held.napping {
                actions.push(Action::Nap { process, slot });
            }
            if held.napping {
                actions.push(Action::Rouse { process, slot });
            }
        }
        if p.is_up() && p.has_mail() {
            actions.push(Action::Send { process });
            if left.slow > 0 && in_turn.is_empty() {
                actions.push(Action::SendSlow { process });
            }
        }
        if p.calls.front().is_some_and(|call| call.answer.is_some()) {
            actions.push(Action::Answer { process });
        }
        if !p.is_up() {
            actions.push(Action::Connect { process });
            if left.outages > 0 && p.link == Link::Connecting {
                actions.push(Action::Unreachable { process });
            }
        } else if left.breaks > 0 && !p.calls.is_empty() || left.cuts > 0 && p.met.is_some() {
            actions.push(Action::Break { process });
        }
        if p.is_up() && (s.is_stale(p) || p.checking.is_some()) {
            actions.push(Action::Learn { process });
        }
        if left.pauses > 0 && p.is_up() && p.session.is_some() {
            actions.push(Action::Pause { process });
        }
        if !p.slots.is_empty() || !p.kept.is_empty() {
            if left.crashes > 0 {
                actions.push(Action::Crash { process });
            }
            if left.closes > 0 {
                actions.push(Action::Close { process });
            }
            if left.freezes > 0 {
                actions.push(Action::Freeze { process });
            }
        }
    }

    pub(crate) fn apply(&self, s: &mut Snapshot, action: Action) -> Option<()> {
        match action {
            Action::Request { process, wait } => self.request(s, process, wait),
            Action::Leave { process, slot } => self.leave(s, process, slot),
            Action::Release { process, slot } => {
                let index = s.processes[process].slots[slot].index;
                s.process(process).slots[slot].phase = Phase::Releasing;
                if !self.act(s, process, |session, now| session.handle_release(index, now)) {
                    self.leave(s, process, slot);
                }
            }
            Action::Alarm { process, slot } => self.poll(s, process, slot),
            Action::Nap { process, slot } => {
                s.left.naps -= 1;
                s.process(process).slots[slot].napping = true;
            }
            Action::Rouse { process, slot } => {
                s.process(process).slots[slot].napping = false;
                self.finish(s, process);
            }
            Action::Watch { process } => self.watch(s, process),
            Action::Send { process } => {
                let is_alone = s.processes[process].calls.is_empty();
                self.collect(s, process);
                if is_alone {
                    while self.execute(s, process, false) {}
                    while self.answer(s, process) {}
                }
            }
            Action::SendSlow { process } => {
                let before = s.processes[process].calls.len();
                self.collect(s, process);
                if s.processes[process].calls.len() == before {
                    return None;
                }
                s.left.slow -= 1;
            }
            Action::Execute { process } => {
                self.execute(s, process, false);
            }
            Action::ExecuteLate { process } => {
                self.execute(s, process, true);
            }
            Action::Fail { process } => {
                s.left.errors -= 1;
                let in_turn = |call: &Transit| call.answer.is_none() && !call.late;
                let at = s.process(process).calls.iter().position(in_turn)?;
                if self.has(Bug::RefusedThoughDone) {
                    self.execute(s, process, false);
                }
                s.process(process).calls[at].answer = Some(Answer::Failed);
            }
            Action::Postpone { process } => {
                s.left.late_calls -= 1;
                let in_turn = |call: &&mut Transit| call.answer.is_none() && !call.late;
                let call = s.process(process).calls.iter_mut().find(in_turn)?;
                call.late = true;
            }
            Action::Answer { process } => {
                self.answer(s, process);
            }
            Action::Hint(i) => {
                let hint = s.mail.remove(i);
                self.hint(s, hint);
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
            Action::Recall(i) => {
                let (_, process) = s.recalls.remove(i);
                self.recall(s, usize::from(process));
            }
            Action::LoseRecall(i) => {
                s.left.lost_recalls -= 1;
                s.recalls.remove(i);
                self.saw(Seen::RecallLost);
            }
            Action::DelayRecall(i) => {
                s.left.late_recalls -= 1;
                s.recalls[i].0 = true;
                s.recalls.sort_unstable();
            }
            Action::Break { process } => {
                if s.left.breaks > 0 && !s.processes[process].calls.is_empty() {
                    s.left.breaks -= 1;
                } else {
                    s.left.cuts -= 1;
                }
                self.cut(s, process, true);
            }
            Action::Unreachable { process } => {
                s.left.outages -= 1;
                self.unreachable(s, process);
            }
            Action::Connect { process } => self.connect(s, process),
            Action::ReadOld(i) => {
                let process = s.old[i].0;
                let call = s.old[i].1.pop_front()?;
                if s.old[i].1.is_empty() {
                    s.old.remove(i);
                }
                self.saw(Seen::LateSocket);
                self.run_late(s, process, &call);
            }
            Action::Crash { process } => {
                s.left.crashes -= 1;
                self.cut(s, process, true);
                let dead = s.processes[process].crashed();
                s.processes[process] = Arc::new(dead);
                s.mail.retain(|hint| usize::from(hint.id.0) != process);
                s.recalls.retain(|(_, to)| usize::from(*to) != process);
            }
            Action::Close { process } => {
                s.left.closes -= 1;
                s.process(process).closed = true;
                self.act(s, process, Session::handle_close);
                self.saw(Seen::Closed);
            }
            Action::Freeze { process } => {
                s.left.freezes -= 1;
                s.process(process).frozen = true;
            }
            // Whatever it does next, it checks the clock first: see `Process::works`. The watchdog comes at any
            // time.
            Action::Wake { process } => s.process(process).frozen = false,
            Action::Replicate => s.replica = Some(Arc::clone(&s.server)),
            Action::Failover => {
                s.left.failovers -= 1;
                let replica = s.replica.take().unwrap_or_default();
                s.promoted = true;
                self.lose_data(s, replica, true);
            }
            Action::Restart => {
                s.left.restarts -= 1;
                self.lose_data(s, Arc::default(), true);
            }
            Action::Flush => {
                s.left.flushes -= 1;
                self.lose_data(s, Arc::default(), false);
            }
            Action::Move { with_data } => {
                s.left.moves -= 1;
                s.home += 1;
                s.lost_at = s.now;
                if !with_data {
                    self.lose_data(s, Arc::default(), false);
                }
            }
            Action::Step(step) => {
                s.left.steps -= 1;
                s.step += step;
                self.saw(Seen::Stepped);
            }
            Action::Set(set) => {
                s.left.sets -= 1;
                (s.set, s.set_at) = (set, s.now);
            }
            Action::Revoke(i) => {
                s.left.revokes -= 1;
                s.revoked.push(s.server.places[i].place);
            }
            Action::TakeOut => {
                let place = s.revoked[usize::from(s.taken_out)];
                s.taken_out += 1;
                let now_ms = s.server_now();
                let before = s.server.places.clone();
                let server = Arc::make_mut(&mut s.server);
                server.ledger.revoke(place, true, now_ms * 1000);
                server.list();
                if self.config.is_fair() {
                    let op = Op::Release { ids: [place].into_iter().collect() };
                    let call = Call {
                        limit: 0,
                        headroom: 0,
                        for_all: true,
                        max_waiting: 0,
                        used: Vec::new(),
                        recalls: false,
                        op,
                    };
                    self.judge_turns(s, &call, &before);
                }
            }
            Action::Pause { process } => {
                s.left.pauses -= 1;
                self.saw(Seen::PausedForATime);
                let until = time(s.now + 1);
                self.act(s, process, |session, now| session.handle_pause(Some(until), now));
            }
            Action::Learn { process } => self.learn(s, process),
            Action::Tick => self.tick(s),
        }
        Some(())
    }

    pub(crate) fn tick(&self, s: &mut Snapshot) {
        s.now += 1;
        s.ghost.deferred.clear();
        if s.epoch > 0 && s.now >= s.lost_at + self.config.longest_lease() {
            s.ghost.forgotten.clear();
        }
        let early = |slot: &Slot| slot.is_asking() && !slot.napping;
        for process in 0..s.processes.len() {
            let p = &s.processes[process];
            if !p.is_awake() {
                continue;
            }
            if let Some((answer, wait)) = self.config.timeouts
                && p.slots.iter().any(|slot| early(slot) && slot.began + answer.max(wait) < s.now)
            {
                s.breaks(Rule::Answered);
            }
            if !self.config.late_watchdog {
                self.watch(s, process);
            }
        }
    }

    fn watch(&self, s: &mut Snapshot, process: usize) {
        let now = s.now;
        if !s.processes[process].is_due(now) || self.has(Bug::NoSelfFence) {
            return;
        }
        let released = self.act(s, process, |session, now| {
            let before = session.kept();
            session.handle_timeout(now);
            session.kept() < before
        });
        if released {
            self.saw(Seen::KeptReleased);
        }
        if s.processes[process].is_due(now) {
            s.breaks(Rule::Watched);
        }
    }

    // ===== requests =====

    fn request(&self, s: &mut Snapshot, process: usize, wait: bool) {
        let (now, config) = (s.now, &self.config);
        let options = config.options(process, s.processes[process].requests, wait);
        if s.processes[process].met.is_none() && s.processes[process].is_up() {
            self.meet(s, process);
        }
        let p = s.process(process);
        p.begin_session(config);
        let request = p.requests;
        p.requests += 1;
        let Some(session) = &mut p.session else { return };
        let limit = config.limits[process];
        let (mut asked, mut at) = (options, now);
        match config.bug {
            Some(Bug::KeptTooLong) => asked.reuse_ms *= 4,
            Some(Bug::TenantsAlike) => asked.claim = config.options(process, 0, wait).claim,
            Some(Bug::ClockStandsStill) => at = p.kept.last().map_or(now, |kept| kept.since),
            _ => {}
        }
        let serial = session.serial();
        let index = session.handle_request(limit, asked, time(at)).expect("room for it");
        let place = session.place(index);
        let is_old = place.is_some_and(|place| place.n / (PLACES_MAX as u64) < serial);
        let slot = Slot {
            request,
            index,
            began: now,
            options,
            phase: Phase::Asking,
            until: None,
            woken: true,
            napping: false,
            by_policy: false,
            counted: false,
            acked: now,
            has_ticket: false,
        };
        if let Some(at) = p.kept.iter().position(|kept| Some(kept.place) == place) {
            self.saw(Seen::Reused);
            let asking = p.without_permit();
            let kept = p.kept.remove(at);
            let slot = Slot { acked: kept.acked, ..slot };
            p.slots.push(slot.clone());
            self.judge_reuse(s, process, &kept.options, Some(&slot), &asking);
        } else {
            if is_old {
                self.saw(Seen::TakenOver);
            }
            p.slots.push(slot);
        }
        self.finish(s, process);
    }

    fn leave(&self, s: &mut Snapshot, process: usize, slot: usize) {
        let p = s.process(process);
        let slot = p.slots.remove(slot);
        let asking = p.without_permit();
        let Some(place) = p.session.as_ref().and_then(|session| session.place(slot.index)) else {
            return self.act(s, process, |session, now| session.handle_leave(slot.index, now));
        };
        let (to, is_kept) = self.act(s, process, |session, now| {
            let before = session.kept();
            session.handle_leave(slot.index, now);
            let has_it = |other: &&Slot| session.place(other.index) == Some(place);
            (asking.iter().find(has_it), session.kept() > before)
        });
        if let Some(to) = to {
            self.saw(Seen::PassedOn);
            let is_same = |other: &&mut Slot| other.request == to.request;
            if let Some(next) = s.process(process).slots.iter_mut().find(is_same) {
                next.acked = slot.acked;
            }
        } else if is_kept {
            self.saw(Seen::Kept);
            let Slot { acked, options, .. } = slot;
            let kept = Kept { place, acked, options, since: s.now };
            s.process(process).kept.push(kept);
        }
        if to.is_some() || is_kept {
            self.judge_reuse(s, process, &slot.options, to, &asking);
        }
    }

    /// Runs the task of a request.
    fn poll(&self, s: &mut Snapshot, process: usize, at: usize) {
        let now = s.now;
        let p = s.process(process);
        p.slots[at].woken = false;
        let Slot { index, phase, began, .. } = p.slots[at];
        match phase {
            Phase::Asking => {}
            Phase::Working => return,
            Phase::Releasing => {
                if p.session.as_ref().is_none_or(|session| session.release_answer(index).is_some())
                {
                    self.saw(Seen::Acknowledged);
                    self.leave(s, process, at);
                }
                return;
            }
        }
        let mut has_timed_out = false;
        loop {
            let p = s.process(process);
            let Some(session) = &mut p.session else { return };
            let progress = session.handle_poll(index, time(now));
            let until = match progress {
                Progress::Joining => self.config.timeouts.map(|(answer, _)| began + answer),
                Progress::Waiting => self.config.timeouts.map(|(_, wait)| began + wait),
                Progress::Held | Progress::Admitted => {
                    let slot = &mut p.slots[at];
                    (slot.phase, slot.until, slot.has_ticket) = (Phase::Working, None, false);
                    return self.finish(s, process);
                }
                Progress::Refused { reason, .. } => {
                    self.refused(s, reason, has_timed_out);
                    return self.leave(s, process, at);
                }
                Progress::Failed => {
                    self.saw(Seen::Failed);
                    return self.leave(s, process, at);
                }
                Progress::Closed => return self.leave(s, process, at),
            };
            if until.is_none_or(|until| until > now) {
                p.slots[at].until = until;
                return self.finish(s, process);
            }
            if has_timed_out {
                return s.breaks(Rule::Answered);
            }
            has_timed_out = true;
            self.saw(match progress {
                Progress::Joining => Seen::TimedOutJoining,
                _ => Seen::TimedOutWaiting,
            });
            if self.has(Bug::WaitTimeoutIgnored) {
                p.slots[at].until = None;
                return;
            }
            session.handle_wait_timeout(index, time(now));
            self.events(s, process);
        }
    }

    fn refused(&self, s: &mut Snapshot, reason: RejectReason, has_timed_out: bool) {
        self.saw(Seen::Refused);
        match reason {
            RejectReason::QueueFull => self.saw(Seen::QueueFull),
            RejectReason::Revoked => self.saw(Seen::RevokedWaiter),
            RejectReason::QueueTimeout if !has_timed_out => s.breaks(Rule::Policy),
            _ => {}
        }
    }

    // ===== the session, driven as the shell drives it =====

    fn act<T>(
        &self,
        s: &mut Snapshot,
        process: usize,
        act: impl FnOnce(&mut Session, Time) -> T,
    ) -> T {
        let now = s.now;
        let p = s.process(process);
        p.begin_session(&self.config);
        let session = p.session.as_mut().expect("a session");
        let result = act(session, time(now));
        self.finish(s, process);
        result
    }

    /// Notifies requests of news, and drops a session that is over.
    fn finish(&self, s: &mut Snapshot, process: usize) {
        let now = s.now;
        loop {
            let p = s.process(process);
            let Some(session) = &mut p.session else { return };
            // One answer serves all questions up to the last.
            p.checking = session.poll_revocation_check().or(p.checking);
            if !self.config.slow_checks
                && p.link != Link::Connecting
                && let Some(question) = p.checking.take()
            {
                session.handle_revocations_known(question, time(now));
            }
            self.events(s, process);
            let p = &s.processes[process];
            let woken = p.slots.iter().position(|slot| slot.woken && !slot.napping);
            let Some(woken) = woken else { break };
            self.poll(s, process, woken);
        }
        let horizon = self.config.ticks.saturating_add(1);
        let p = s.process(process);
        let Some(session) = &mut p.session else { return };
        if now < horizon {
            let reuse = ticks(self.config.longest_reuse());
            session.coarsen(ticks(1), reuse, time(now), time(horizon));
        }
        if !session.is_idle() && session.poll_timeout().is_none() {
            s.breaks(Rule::Watched);
        } else if p.retire(now) {
            self.saw(Seen::Retired);
        } else if !self.config.late_watchdog && p.is_due(now) && p.is_awake() {
            self.watch(s, process);
        }
    }

    fn events(&self, s: &mut Snapshot, process: usize) {
        let Some(session) = &mut s.process(process).session else { return };
        for event in session.take_events() {
            self.event(s, process, event);
        }
    }

    fn event(&self, s: &mut Snapshot, process: usize, event: Event) {
        let now = s.now;
        let p = s.process(process);
        let (Event::Progress(index)
        | Event::Admitted(index)
        | Event::Failed(index)
        | Event::Refused(index)
        | Event::Lost(index)
        | Event::Released(index)) = event;
        let Some(at) = p.slots.iter().position(|slot| slot.index == index) else { return };
        let place = p.session.as_ref().and_then(|session| session.place(index));
        match event {
            Event::Lost(_) => {
                let slot = &p.slots[at];
                let is_due = now >= slot.acked + slot.lease();
                let is_revoked = place.is_some_and(|place| s.revoked.contains(&place));
                let p = &s.processes[process];
                if is_due {
                    self.saw(Seen::LostAtDeadline);
                } else if is_revoked {
                    self.saw(Seen::Revoked);
                } else if !p.closed && self.config.faults.steps == 0 {
                    s.breaks(Rule::NotLostEarly);
                }
                return;
            }
            Event::Admitted(_) => self.admitted(s, process, at),
            Event::Failed(_) => {
                if p.slots[at].options.on_unavailable == OnUnavailable::Admit
                    && self.config.set(p.set).in_place() != Some(0)
                {
                    s.breaks(Rule::Policy);
                }
            }
            Event::Refused(_) => self.saw(Seen::ShareRefused),
            Event::Progress(_) | Event::Released(_) => {}
        }
        s.process(process).slots[at].woken = true;
    }

    fn admitted(&self, s: &mut Snapshot, process: usize, at: usize) {
        self.saw(Seen::Admitted);
        let (now, config) = (s.now, &self.config);
        let p = s.process(process);
        let was_asked = p.slots[at].began < now;
        p.slots[at].by_policy = true;
        let Some(session) = &p.session else { return };
        let set = config.set(p.set).in_place();
        match p.slots[at].options.on_unavailable {
            OnUnavailable::Admit if set == Some(0) => s.breaks(Rule::Policy),
            OnUnavailable::Admit => {}
            OnUnavailable::Local(share) => {
                self.saw(if was_asked { Seen::ShareWaited } else { Seen::Shared });
                let in_flight = |slot: &&Slot| {
                    session.is_held(slot.index) && !session.is_known_lost(slot.index)
                };
                let share = set.map_or(share, |limit| share.min(limit));
                let (request, line) = (p.slots[at].request, p.slots[at].line());
                let earlier = |slot: &Slot| {
                    slot.request < request
                        && slot.line() == line
                        && slot.is_asking()
                        && !session.is_held(slot.index)
                };
                let units = p.slots.iter().filter(in_flight).map(Slot::cost).sum::<usize>();
                let is_over = units > share as usize;
                let is_passed = session.is_outage() && p.slots.iter().any(earlier);
                if is_over {
                    s.breaks(Rule::LocalShare);
                } else if is_passed {
                    s.breaks(Rule::LocalOrder);
                }
            }
            _ => s.breaks(Rule::Policy),
        }
    }

    /// Has the process read the overrides.
    fn learn(&self, s: &mut Snapshot, process: usize) {
        let (set, told) = (s.set, u8::try_from(s.told()).expect("a few"));
        let p = s.process(process);
        let is_new = std::mem::replace(&mut p.set, set) != set;
        let is_told = std::mem::replace(&mut p.told, told) != told;
        let checking = std::mem::take(&mut p.checking);
        if s.processes[process].session.is_none() {
            return;
        }
        if is_new {
            let set = self.config.set(s.set);
            let before = s.processes[process].session.as_ref().map(Session::limit_in_force);
            self.act(s, process, |session, now| session.handle_override(set, now));
            let after = s.processes[process].session.as_ref().map(Session::limit_in_force);
            if set.rate.is_some() {
                self.saw(Seen::RateSet);
            }
            if after > before {
                self.saw(Seen::Raised);
            } else if after == Some(0) {
                self.saw(Seen::Paused);
            }
        }
        if is_told && !self.has(Bug::RevocationUnheard) {
            for place in s.revoked.clone() {
                self.act(s, process, |session, now| session.handle_revoked(place, now));
            }
        }
        if let Some(question) = checking {
            self.act(s, process, |session, now| session.handle_revocations_known(question, now));
        }
    }

    // ===== connections =====

    /// Compares the data of a connection. Returns whether it is certainly the same as before.
    fn meet(&self, s: &mut Snapshot, process: usize) -> bool {
        let (now, epoch, lost_at, promoted) = (s.now, s.epoch, s.lost_at, s.promoted);
        let names_data = self.config.names_data;
        let bug = self.bug();
        let p = s.process(process);
        let before = p.met.replace(epoch);
        match before {
            // A process that is new here knows at most the age of the server.
            None if epoch == 0 || bug == Some(Bug::YoungServerTrusted) => false,
            None => {
                p.lost_at = match promoted {
                    true if bug == Some(Bug::YoungByUptime) => None,
                    true => Some(now),
                    false => Some(lost_at),
                };
                false
            }
            Some(before) if names_data && before == epoch => true,
            Some(_) => {
                p.lost_at = Some(now);
                false
            }
        }
    }

    fn connect(&self, s: &mut Snapshot, process: usize) {
        let home = s.home;
        let p = s.process(process);
        if p.home != home {
            // The process meets that server for the first time.
            (p.home, p.met) = (home, None);
            p.stay += 1;
        }
        self.learn(s, process);
        let same_data = self.meet(s, process);
        s.process(process).connected();
        self.announce(s, process, same_data);
    }

    fn announce(&self, s: &mut Snapshot, process: usize, same_data: bool) {
        let p = s.process(process);
        if p.session.is_none() {
            return;
        }
        let same_data = same_data || self.has(Bug::AcquiresBeforeRenewals);
        let connected = p.conditions(&self.config, same_data);
        if same_data {
            self.saw(Seen::SameData);
        }
        if connected.poll_only {
            self.saw(Seen::PollOnly);
        }
        s.process(process).others = Others::Unknown;
        self.act(s, process, |session, now| session.handle_connected(connected, now));
        for hint in std::mem::take(&mut s.process(process).altered.hints) {
            self.act(s, process, |session, now| session.handle_hint(hint, now));
        }
    }

    fn unreachable(&self, s: &mut Snapshot, process: usize) {
        let p = s.process(process);
        p.link = Link::Down;
        let checking = std::mem::take(&mut p.checking);
        p.others = Others::Unknown;
        if p.session.is_some() && !self.has(Bug::UnreachableUnheard) {
            self.act(s, process, |session, now| {
                if !session.is_outage() {
                    session.handle_unreachable(now);
                }
            });
            if let Some(question) = checking {
                self.act(s, process, |session, now| {
                    session.handle_revocations_known(question, now);
                });
            }
        }
    }

    /// Breaks the connection. The server may still read what was sent on it, unless the server is gone, too.
    fn cut(&self, s: &mut Snapshot, process: usize, readable: bool) {
        let p = s.process(process);
        let calls = std::mem::take(&mut p.calls);
        let (me, stay) = (p.me, p.stay);
        p.link = Link::Connecting;
        for call in &calls {
            if let Some(Answer::Reply(reply)) = &call.answer {
                s.ghost.unheard.extend(reply.granted.iter().map(|grant| id_of(grant.id)));
            }
            let op = call.meant.as_ref().unwrap_or(&call.call.op);
            if call.stay != stay {
                continue;
            }
            let is_release = matches!(op, Op::Release { .. });
            self.act(s, process, |session, now| {
                if is_release && self.has(Bug::ReleaseNotRepeated) {
                    session.handle_reply(op, &Reply::default(), Sending::at(now), now);
                } else {
                    session.handle_unanswered(op);
                }
            });
        }
        let unread: VecDeque<_> =
            calls.into_iter().filter(|call| call.answer.is_none() && !call.late).collect();
        if readable && !unread.is_empty() {
            s.old.push((me, unread));
        }
    }

    /// Notes that another server counts the semaphore now.
    fn rehome(&self, s: &mut Snapshot, process: usize) {
        self.saw(Seen::Rehomed);
        let home = s.home;
        let p = s.process(process);
        p.stay += 1;
        p.home = home;
        // This process meets that server for the first time.
        p.met = None;
        if self.config.away {
            p.link = Link::Connecting;
        } else {
            self.meet(s, process);
            self.announce(s, process, false);
        }
    }

    fn collect(&self, s: &mut Snapshot, process: usize) {
        let (now, bug) = (s.now, self.bug());
        let set = self.config.set(s.processes[process].set).in_place();
        let is_quarantined = s.processes[process].lost_at.is_some();
        for _ in 0..CALLS_MAX {
            let p = s.process(process);
            let Some(session) = &mut p.session else { return };
            let Some(call) = session.poll_call(time(now)) else { return };
            if call.limit == 0 && is_quarantined && set != Some(0) {
                self.saw(Seen::Quarantined);
            }
            match &call.op {
                Op::Acquire { leaving, ids, .. } => {
                    if !leaving.is_empty() {
                        self.saw(Seen::LeaveWithJoin);
                    }
                    if ids.len() > 1 {
                        self.saw(Seen::SeveralInOne);
                    }
                }
                Op::Reassert { .. } => self.saw(Seen::Rejoined),
                Op::Audit { .. } => self.saw(Seen::Audited),
                _ => {}
            }
            let (call, meant) = p.outgoing(call, bug);
            let stay = p.stay;
            p.calls.push_back(Transit {
                call,
                meant,
                sent: now,
                stay,
                late: false,
                others: None,
                is_stale: false,
                hints: Vec::new(),
                answer: None,
            });
        }
        s.breaks(Rule::Work);
    }

    /// Has the server carry out the next call of a process. Returns `false` if there is none.
    fn execute(&self, s: &mut Snapshot, process: usize, late: bool) -> bool {
        let p = &s.processes[process];
        let is_next = |call: &Transit| call.answer.is_none() && call.late == late;
        let Some(at) = p.calls.iter().position(is_next) else { return false };
        let (me, call) = (p.me, p.calls[at].clone());
        let answer = if p.home != s.home || call.stay != p.stay {
            Answer::Moved
        } else {
            if call.sent + self.config.longest_lease() <= s.now {
                // The release that follows it may not come: it is not sent two leases after it was
                // due.
                self.expect_orphans(s, me, &call);
            }
            if late {
                self.saw(Seen::Late);
            }
            Answer::Reply(self.run(s, me, &call))
        };
        let others = if self.config.reuses() { self.others_that_wait(s, me) } else { None };
        let is_pending = |hint: &&Hint| self.config.reuses() && hint.id.0 == me && !hint.late;
        let hints = s.mail.iter().filter(is_pending).map(|hint| hint.id).collect();
        let call = &mut s.process(process).calls[at];
        (call.answer, call.others, call.hints) = (Some(answer), others, hints);
        true
    }

    /// Has the process receive the answer to its first unanswered call. Returns `false` if there is none.
    fn answer(&self, s: &mut Snapshot, process: usize) -> bool {
        let p = s.process(process);
        if p.calls.front().is_none_or(|call| call.answer.is_none()) {
            return false;
        }
        let Some(transit) = p.calls.pop_front() else {
            return false;
        };
        let Transit { call, meant, sent, stay, late, others, is_stale, hints, answer } = transit;
        for id in hints {
            if let Some(at) = s.mail.iter().position(|hint| hint.id == id && !hint.late) {
                let hint = s.mail.remove(at);
                self.hint(s, hint);
            }
        }
        let alone = others.and_then(|others| self.alone_since(s, process, others, sent));
        let p = s.process(process);
        let mut op = meant.unwrap_or(call.op);
        if stay != p.stay {
            self.saw(Seen::OldStay);
            return true;
        }
        match answer {
            Some(Answer::Reply(mut reply)) => {
                p.incoming(&mut op, &mut reply, sent, self.bug());
                let tells = !matches!(op, Op::Release { .. } | Op::Audit { .. });
                if self.config.reuses() && tells && !late && !is_stale {
                    p.others = match (alone, p.others) {
                        (Some(at), _) => Others::Alone(at),
                        (None, Others::Recalled) => Others::Recalled,
                        (None, _) => Others::Unknown,
                    };
                }
                self.replied(s, process, &op, &reply, late, sent);
            }
            Some(Answer::Failed) => {
                self.saw(Seen::CallFailed);
                // Each is tried again soon, but not at once.
                let ids: Vec<PlaceId> = match &op {
                    Op::Renew { ids, .. } => ids.to_vec(),
                    Op::Reassert { proofs, .. } => proofs.iter().map(|(id, _)| *id).collect(),
                    Op::Release { .. } | Op::Acquire { .. } | Op::Audit { .. } => {
                        op.leaving().to_vec()
                    }
                };
                s.ghost.deferred.extend(ids.into_iter().map(id_of));
                if !self.has(Bug::ErrorUnheard) {
                    self.act(s, process, |session, now| session.handle_call_refused(&op, now));
                }
            }
            Some(Answer::Moved) if stay == p.stay => self.rehome(s, process),
            Some(Answer::Moved) | None => {}
        }
        true
    }

    fn replied(
        &self,
        s: &mut Snapshot,
        process: usize,
        op: &Op,
        reply: &Reply,
        late: bool,
        sent: u8,
    ) {
        let now = s.now;
        let places: Vec<PlaceId> = match op {
            Op::Acquire { ids, .. } | Op::Renew { ids, .. } => ids.to_vec(),
            Op::Reassert { proofs, .. } => proofs.iter().map(|(id, _)| *id).collect(),
            Op::Release { .. } | Op::Audit { .. } => Vec::new(),
        };
        let p = s.process(process);
        let session = p.session.clone();
        let place_of = |slot: &Slot| session.as_ref().and_then(|s| s.place(slot.index));
        let is_late = |slot: &Slot| now >= sent + slot.lease();
        let is_held = |slot: &Slot| session.as_ref().is_some_and(|s| s.is_held(slot.index));
        for (place, status) in places.iter().zip(&reply.statuses) {
            let slot = p.slots.iter_mut().find(|slot| place_of(slot) == Some(*place));
            let Some(slot) = slot else { continue };
            match status {
                PlaceStatus::Held if slot.phase == Phase::Working => {
                    if now < slot.acked + slot.lease() || slot.by_policy && !is_late(slot) {
                        slot.acked = sent;
                    }
                    if slot.by_policy && !is_late(slot) {
                        slot.counted = true;
                        self.saw(Seen::Counted);
                    }
                }
                PlaceStatus::Held => {
                    slot.acked = sent;
                    slot.has_ticket &= !matches!(op, Op::Acquire { .. });
                    if is_late(slot) {
                        self.saw(Seen::TooLate);
                    } else if matches!(op, Op::Renew { .. }) {
                        self.saw(Seen::HintRepaired);
                    }
                }
                PlaceStatus::Waiting(_) | PlaceStatus::WaitingFor(..)
                    if slot.is_asking() && !is_held(slot) =>
                {
                    slot.acked = sent;
                    slot.has_ticket = true;
                }
                _ => {}
            }
        }
        for (place, status) in places.iter().zip(&reply.statuses) {
            let kept = p.kept.iter_mut().find(|kept| kept.place == *place);
            if let Some(kept) = kept.filter(|_| *status == PlaceStatus::Held) {
                kept.acked = sent;
            }
        }
        for grant in &reply.granted {
            if self.is_stranger(s, process, grant.id) {
                s.ghost.strangers.insert(id_of(grant.id));
            }
        }
        let sent = if self.has(Bug::DeadlineFromReceipt) { now } else { sent };
        let late = late && !self.has(Bug::LateIgnored);
        self.act(s, process, |session, now| {
            session.handle_reply(op, reply, Sending::at(time(sent)).late(late), now);
        });
        if self.config.reuses() && matches!(op, Op::Acquire { .. }) {
            self.note_granted(s, process, &places, reply, sent);
        }
    }

    /// A grant may have gone to an older request than the one that asked, or be kept because that one has another
    /// permit.
    fn note_granted(
        &self,
        s: &mut Snapshot,
        process: usize,
        places: &[PlaceId],
        reply: &Reply,
        sent: u8,
    ) {
        for (place, status) in places.iter().zip(&reply.statuses) {
            if *status != PlaceStatus::Held {
                continue;
            }
            let (now, p) = (s.now, s.process(process));
            let Some(session) = &p.session else { return };
            let (kept, has_it) = (session.kept(), |slot: &Slot| session.place(slot.index));
            if let Some(at) = p.slots.iter().position(|slot| has_it(slot) == Some(*place)) {
                p.slots[at].acked = sent;
            } else if kept > p.kept.len() {
                // All requests of such a scope have the terms of the first.
                let options = self.config.options(process, 0, true);
                p.kept.push(Kept { place: *place, acked: sent, options, since: now });
                let asking = p.without_permit();
                self.judge_reuse(s, process, &options, None, &asking);
            }
        }
    }

    /// Returns whether a process knows nothing of a place that it is notified of.
    fn is_stranger(&self, s: &Snapshot, process: usize, place: PlaceId) -> bool {
        let p = &s.processes[process];
        let session = p.session.as_ref();
        let is_place = |slot: &Slot| session.and_then(|s| s.place(slot.index)) == Some(place);
        let is_known = p.slots.iter().any(is_place);
        if !is_known {
            self.saw(Seen::Stranger);
        }
        !is_known
    }

    fn hint(&self, s: &mut Snapshot, hint: Hint) {
        let Hint { id, place, end, .. } = hint;
        let process = usize::from(id.0);
        let p = s.process(process);
        let n = p.hinted(place.n);
        let place = PlaceId { n, ..place };
        let now = s.now;
        let is_joining = s.processes[process]
            .slot_of(id)
            .is_some_and(|slot| slot.is_asking() && !slot.has_ticket && slot.acked == slot.began);
        let is_late = s.processes[process]
            .slot_of(id)
            .is_some_and(|slot| slot.is_asking() && now >= slot.acked + slot.lease());
        if self.is_stranger(s, process, place) {
            s.ghost.strangers.insert(id);
            if self.has(Bug::StrangerNotReleased) {
                return;
            }
        }
        if is_late {
            self.saw(Seen::TooLate);
        }
        if is_joining {
            self.saw(Seen::HintFirst);
            if self.has(Bug::EarlyHintDropped) {
                return;
            }
            if self.has(Bug::KeptHintOutlivesConnection) {
                s.process(process).altered.hints.push(protocol::Hint {
                    n,
                    bound: place.bound,
                    claim: place.claim,
                    lease_end: end,
                });
            }
        }
        let end = if self.has(Bug::HintWithoutLeaseEnd) { u64::MAX } else { end };
        let claim = place.claim.filter(|_| !self.has(Bug::HintWithoutClaim));
        let bound = place.bound.filter(|_| !self.has(Bug::HintWithoutClaim));
        let hint = protocol::Hint { n, bound, claim, lease_end: end };
        self.act(s, process, |session, now| session.handle_hint(hint, now));
    }

    /// Notes a recall.
    fn recall(&self, s: &mut Snapshot, process: usize) {
        let p = s.process(process);
        let Some(session) = &p.session else { return };
        if session.kept() > 0 {
            self.saw(Seen::KeptRecalled);
        }
        p.others = Others::Recalled;
        p.calls.iter_mut().for_each(|call| call.is_stale = true);
        if !self.has(Bug::RecallUnheard) {
            self.act(s, process, |session, now| session.handle_recall(now));
        }
    }

    /// Returns how many places of other processes wait, unless more permits are in use than the limit.
    fn others_that_wait(&self, s: &Snapshot, process: u8) -> Option<usize> {
        let (waiting, held): (Vec<&Stored>, Vec<&Stored>) =
            s.server.places.iter().partition(|place| place.ticket.is_some());
        let in_use = held.iter().map(|held| cost(&held.place)).sum::<usize>();
        let others = waiting.iter().filter(|place| place.id.0 != process).count();
        (in_use <= self.cap()).then_some(others)
    }

    /// Returns until when a process may assume that no other one waits if `others` do, after the reply to a call sent
    /// at
    /// `sent`: if a hint was lost, another process's place may be taken for the one that was granted, which may have
    /// been known to wait until then.
    fn alone_since(&self, s: &Snapshot, process: usize, others: usize, sent: u8) -> Option<u8> {
        let me = s.processes[process].me;
        let own = s.ghost.unheard.iter().filter(|id| id.0 == me);
        let mut granted: Vec<u8> =
            own.filter_map(|id| s.ghost.grants.get(id)).map(|(_, at)| *at).collect();
        granted.sort_unstable_by(|a, b| b.cmp(a));
        match others.checked_sub(1) {
            None => Some(sent),
            Some(last) => granted.get(last).map(|at| sent.min(*at)),
        }
    }

    // ===== the server =====

    fn lose_data(&self, s: &mut Snapshot, left: Arc<Server>, seen: bool) {
        let now_ms = s.server_now();
        let before = std::mem::replace(&mut s.server, left);
        s.epoch += 1;
        s.lost_at = s.now;
        let after = Arc::clone(&s.server);
        for place in &before.places {
            let kept = after
                .places
                .iter()
                .any(|p| p.id == place.id && p.ticket.is_none() && p.end >= place.end);
            if place.ticket.is_none() && place.end > now_ms && !kept {
                s.ghost.forgotten.insert(place.id);
            }
        }
        s.ghost.restored.clear();
        // A place whose ticket its process does not know cannot get its turn back.
        let processes = &s.processes;
        s.ghost.turns.retain(|(process, request), _| {
            let mut slots = processes[usize::from(*process)].slots.iter();
            slots.any(|slot| slot.request == *request && slot.is_asking() && slot.has_ticket)
        });
        if seen {
            // Hints come over the same connections as answers.
            s.old.clear();
            s.ghost.unheard.extend(s.mail.drain(..).map(|hint| hint.id));
            s.recalls.clear();
            for process in 0..s.processes.len() {
                if !s.processes[process].dead && s.processes[process].met.is_some() {
                    self.cut(s, process, false);
                }
            }
        }
    }

    /// A call on a connection that broke before. No process receives the answer.
    fn run_late(&self, s: &mut Snapshot, process: u8, call: &Transit) {
        if call.stay < s.home {
            // That server does not count the semaphore any more.
            return;
        }
        self.expect_orphans(s, process, call);
        let reply = self.run(s, process, call);
        s.ghost.unheard.extend(reply.granted.iter().map(|grant| id_of(grant.id)));
    }

    /// Notes that the places of this call may belong to no process: theirs went on long ago. They last for at most one
    /// lease.
    fn expect_orphans(&self, s: &mut Snapshot, process: u8, call: &Transit) {
        let made: Vec<Id> = match &call.call.op {
            Op::Acquire { ids, .. } => ids.iter().map(|id| id_of(*id)).collect(),
            Op::Reassert { proofs, .. } => proofs
                .iter()
                .filter(|(id, proof)| {
                    let is_ticket = *proof >= TICKET_MIN;
                    is_ticket || s.ghost.forgotten.contains(&id_of(*id))
                })
                .map(|(id, _)| id_of(*id))
                .collect(),
            _ => Vec::new(),
        };
        for id in made {
            s.ghost.strangers.remove(&id);
            if !s.processes[usize::from(process)].wants(id) {
                self.saw(Seen::Orphan);
                s.ghost.orphans.insert(id);
            }
        }
    }

    /// Has the server carry out a call. The onlooker compares before and after.
    fn run(&self, s: &mut Snapshot, process: u8, call: &Transit) -> Reply {
        let now_ms = s.server_now();
        let before = s.server.places.clone();
        let (mut hints, mut recalls) = (Vec::new(), Vec::new());
        let mut passed_over = false;
        let processes = &s.processes;
        let server = Arc::make_mut(&mut s.server);
        let reply = super::server::carry_out(
            self.bug(),
            &mut server.ledger,
            process,
            now_ms,
            &call.call,
            &mut |to, grants| {
                let p = &processes[usize::from(process_of(to))];
                // Like PUBLISH: one message for each node, so the node receives all of them or none.
                let is_heard = p.is_up() || (p.dead && self.has(Bug::GoneNotPassedOver));
                if grants.is_empty() && is_heard {
                    recalls.push((false, p.me));
                } else if is_heard {
                    hints.extend(grants.iter().map(|grant| Hint {
                        id: id_of(grant.id),
                        place: grant.id,
                        end: grant.lease_end,
                        late: false,
                    }));
                } else {
                    passed_over |= !grants.is_empty();
                }
                is_heard
            },
        );
        server.list();
        let after = server.places.clone();
        if passed_over {
            self.saw(Seen::PassedOver);
        }
        hints.retain(|hint| !s.processes[usize::from(hint.id.0)].dead);
        s.mail.extend(hints);
        s.mail.sort_unstable();
        recalls.retain(|(_, to)| !s.processes[usize::from(*to)].dead);
        s.recalls.extend(recalls);
        s.recalls.sort_unstable();
        s.recalls.dedup();
        self.compare(s, process, &call.call, &before, &after);
        if self.config.is_fair() {
            self.judge_turns(s, &call.call, &before);
        }
        reply
    }
}
