//! A few processes that share a semaphore through a store which counts nothing, with all that goes wrong between them.

mod beliefs;
pub(crate) mod checks;
mod ending;
pub(crate) mod faults;
pub(crate) mod process;
pub(crate) mod steps;
pub(crate) mod store;

use tower_semaphore_protocol::replica::{Change, Ended, Row};
use tower_semaphore_protocol::{NodeId, PlaceId};

use self::beliefs::Beliefs;
pub(crate) use self::faults::Fault;
use self::process::{Process, State};
use self::steps::{History, Step};
use self::store::{Outcome, Request, Store};

pub(crate) const BEGAN: u64 = 1_795_169_853_126_543;
/// The lengths of leases that policies ask for, and those that the store grants.
pub(crate) const LEASES_MS: [u64; 2] = [1_500, 9_500];
pub(crate) const LEASES_S: [u32; 2] = [SHORT_S, 10];
pub(crate) const SHORT_S: u32 = 2;

pub(crate) struct Fleet {
    pub(crate) store: Store,
    pub(crate) processes: Vec<Process>,
    late: Vec<Request>,
    now: u64,
    step: usize,
    fault: Fault,
    tenants: bool,
    /// When the acquire of a place was answered.
    pub(crate) answered: std::collections::BTreeMap<PlaceId, usize>,
    pub(crate) counts: Counts,
    beliefs: Beliefs,
}

/// What happened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) written: usize,
    pub(crate) unchanged: usize,
    pub(crate) lost: usize,
    /// Transactions that were carried out after their processes had given them up.
    pub(crate) late: usize,
    /// Places of dead processes that were forgotten.
    pub(crate) forgotten: usize,
    pub(crate) answered_without: usize,
    /// Grants that a process was told of before they were written.
    pub(crate) ahead: usize,
}

impl Fleet {
    pub(crate) fn new(history: &History, fault: Fault) -> Self {
        let nodes = (1..=history.processes).map(|n| NodeId::new(n as u64 * 0x1357_9bdf_0246));
        let processes: Vec<_> =
            nodes.map(|node| Process::new(node, history.limit, fault)).collect();
        let mut store = Store::new();
        for process in &processes {
            store.signs.extend(LEASES_S.map(|s| (process.node, s)));
        }
        Self {
            store,
            processes,
            late: Vec::new(),
            now: BEGAN,
            step: 0,
            fault,
            tenants: history.tenants,
            answered: std::collections::BTreeMap::new(),
            counts: Counts::default(),
            beliefs: Beliefs::default(),
        }
    }

    /// Carries the history out, then everything that is still under way, and checks what the store has seen.
    pub(crate) fn run(history: &History, fault: Fault) -> Result<Self, String> {
        let mut fleet = Self::new(history, fault);
        let ended = fleet.take_all(&history.steps);
        checks::check(&fleet.store, fleet.tenants, &fleet.answered)?;
        ended.map(|()| fleet)
    }

    fn take_all(&mut self, steps: &[Step]) -> Result<(), String> {
        for step in steps {
            self.step += 1;
            self.take(step)?;
            self.beliefs.check(&self.store, &self.processes)?;
        }
        self.settle()
    }

    fn alive(&self, pick: usize) -> usize {
        let alive: Vec<_> =
            (0..self.processes.len()).filter(|at| self.processes[*at].is_alive).collect();
        alive[pick % alive.len()]
    }

    fn take(&mut self, step: &Step) -> Result<(), String> {
        self.now += 1_000;
        match step {
            Step::Acquire { at, count, may_wait, is_short, tenant, leaving } => {
                let (at, tenant) = (self.alive(*at), self.tenants.then_some(*tenant));
                self.processes[at].acquire(*count, *may_wait, *is_short, tenant, leaving);
            }
            Step::Release { at, picks } => {
                let at = self.alive(*at);
                self.processes[at].release(picks);
            }
            Step::Renew(at) => {
                let at = self.alive(*at);
                self.processes[at].renew();
            }
            Step::Audit(at) => {
                let at = self.alive(*at);
                self.processes[at].audit();
            }
            Step::Exchange { at, stages } => {
                let at = self.alive(*at);
                for _ in 0..*stages {
                    self.exchange(at)?;
                }
            }
            Step::Unknown { at, is_late } => self.lose(self.alive(*at), *is_late)?,
            Step::GiveUp(at) => {
                let at = self.alive(*at);
                self.lose(at, true)?;
                self.processes[at].give_up();
            }
            Step::Late(pick) => self.carry_out_late(*pick),
            Step::Refuse(at) => {
                let at = self.alive(*at);
                if self.processes[at].request.as_ref().is_some_and(|(_, done)| done.is_none()) {
                    self.processes[at].request = None;
                    self.processes[at].replica.handle_refused();
                    self.take_events(at, None)?;
                }
            }
            Step::Reconnect(at) => {
                let at = self.alive(*at);
                if let Some((request, None)) = self.processes[at].request.take() {
                    self.late.push(request);
                }
                self.processes[at].reconnect();
            }
            Step::Watch { at, count } => {
                let at = self.alive(*at);
                for _ in 0..*count {
                    self.watch(at)?;
                }
            }
            Step::Miss(at) => {
                let at = self.alive(*at);
                self.processes[at].watch.clear();
            }
            Step::Read(at) => self.read(self.alive(*at))?,
            Step::Stale { at, pick } => {
                let (at, pick) = (self.alive(*at), pick % self.store.history.len());
                let version = self.store.history[pick].clone();
                self.processes[at].handle_value(version.revision, version.bytes.as_deref());
                self.take_events(at, None)?;
            }
            Step::Crash(at) => {
                let at = self.alive(*at);
                // One is left to serve the others.
                if at > 0 {
                    self.crash(at);
                }
            }
            Step::Lapse { at, is_short } => {
                let at = at % self.processes.len();
                self.lapse(at, LEASES_S[usize::from(!is_short)]);
            }
            Step::Return(at) => self.return_to_life(self.alive(*at)),
            Step::Life(at) => {
                let at = self.alive(*at);
                self.processes[at].take_life(false);
            }
            Step::Revoke(pick) => self.revoke(*pick),
            Step::Limit(limit) => {
                self.processes.iter_mut().for_each(|process| process.limit = *limit);
            }
            Step::Pass { us, revisions } => {
                self.now += us;
                self.store.pass(*revisions);
            }
            Step::Skew { at, us } => {
                let at = self.alive(*at);
                self.processes[at].skew = *us;
            }
        }
        Ok(())
    }

    /// Takes one step of a transaction: sends it, carries it out, or brings its outcome. Returns whether there was one.
    fn exchange(&mut self, at: usize) -> Result<bool, String> {
        match self.processes[at].request.take() {
            None => {
                let pending = self.processes[at].pending.len();
                let request = self.processes[at].poll(self.now, self.step);
                // Calls that only ask may have been answered.
                self.take_events(at, None)?;
                self.counts.answered_without += pending - self.processes[at].pending.len();
                let Some(request) = request else { return Ok(false) };
                let held = self.processes[at].mine.iter().find(|mine| mine.state == State::Held);
                let request = self.fault.spoil(request, held.map(|mine| mine.id));
                self.processes[at].request = Some((request, None));
            }
            Some((request, None)) => {
                let outcome = self.execute(&request);
                self.processes[at].request = Some((request, Some(outcome)));
            }
            Some((request, Some(outcome))) => {
                let revision = match outcome {
                    Outcome::Committed(revision) => Some(revision),
                    Outcome::Lost(..) => None,
                };
                self.processes[at].handle_outcome(outcome, &request.transaction);
                self.take_events(at, revision)?;
            }
        }
        Ok(true)
    }

    fn execute(&mut self, request: &Request) -> Outcome {
        let versions = self.store.history.len();
        let outcome = self.store.execute(request, self.step, self.fault);
        self.announce(versions);
        let counts = &mut self.counts;
        match (&outcome, &request.transaction.change) {
            (Outcome::Lost(..), _) => counts.lost += 1,
            (Outcome::Committed(_), Change::Nothing) => counts.unchanged += 1,
            (Outcome::Committed(_), _) => {
                counts.written += 1;
                counts.forgotten += usize::from(!request.transaction.absent.is_empty());
            }
        }
        outcome
    }

    /// What was written since is on the way to everyone.
    fn announce(&mut self, versions: usize) {
        for version in &self.store.history[versions..] {
            for process in self.processes.iter_mut().filter(|process| process.is_alive) {
                process.watch.push_back((version.revision, version.bytes.clone()));
            }
        }
    }

    fn lose(&mut self, at: usize, is_late: bool) -> Result<(), String> {
        if self.processes[at].request.is_none() {
            self.exchange(at)?;
        }
        let Some((request, done)) = self.processes[at].request.take() else { return Ok(()) };
        if is_late && done.is_none() {
            self.late.push(request);
        }
        self.processes[at].handle_unknown();
        self.take_events(at, Some(self.store.read().0))
    }

    fn carry_out_late(&mut self, pick: usize) {
        if !self.late.is_empty() {
            let request = self.late.remove(pick % self.late.len());
            let versions = self.store.history.len();
            self.execute(&request);
            self.counts.late += self.store.history.len() - versions;
        }
    }

    fn take_events(&mut self, at: usize, revision: Option<u64>) -> Result<(), String> {
        let joining: Vec<_> = self.processes[at].mine.clone();
        self.processes[at].take_events(&self.store, revision)?;
        let places = self.store.newest().places();
        for before in joining.iter().filter(|mine| mine.state == State::Waiting) {
            let after = self.processes[at].mine.iter().find(|mine| mine.id == before.id);
            let is_ahead = places.get(&before.id).is_some_and(|(_, ticket)| ticket.is_some());
            let is_held = after.is_some_and(|mine| mine.state == State::Held);
            self.counts.ahead += usize::from(is_held && is_ahead);
        }
        for before in joining.iter().filter(|mine| mine.state == State::Joining) {
            let after = self.processes[at].mine.iter().find(|mine| mine.id == before.id);
            if after.is_none_or(|mine| mine.state != State::Joining) {
                self.answered.insert(before.id, self.step);
            }
        }
        Ok(())
    }

    fn watch(&mut self, at: usize) -> Result<bool, String> {
        let Some((revision, bytes)) = self.processes[at].watch.pop_front() else {
            return Ok(false);
        };
        if self.fault != Fault::NoHints {
            self.processes[at].handle_value(revision, bytes.as_deref());
        }
        self.take_events(at, None)?;
        Ok(true)
    }

    /// Reads the key, so that calls that only ask are answered for a while.
    fn read(&mut self, at: usize) -> Result<(), String> {
        let (revision, bytes) = self.store.read();
        let until = std::time::Duration::from_micros(self.now - BEGAN + 1_000_000);
        let process = &mut self.processes[at];
        if self.fault != Fault::NoHints {
            process.handle_value(revision, bytes.as_deref());
            process.replica.handle_fresh(tower_semaphore_protocol::Time::since_epoch(until));
        }
        self.take_events(at, None)
    }

    fn crash(&mut self, at: usize) {
        let process = &mut self.processes[at];
        process.is_alive = false;
        process.watch.clear();
        if let Some((request, None)) = process.request.take() {
            self.late.push(request);
        }
    }

    fn lapse(&mut self, at: usize, seconds: u32) {
        let node = self.processes[at].node;
        self.store.signs.remove(&(node, seconds));
        self.spread_life(node, seconds, false);
    }

    fn return_to_life(&mut self, at: usize) {
        let node = self.processes[at].node;
        for seconds in LEASES_S {
            if self.store.signs.insert((node, seconds)) {
                self.spread_life(node, seconds, true);
            }
        }
    }

    fn spread_life(&mut self, node: NodeId, seconds: u32, is_back: bool) {
        for process in self.processes.iter_mut().filter(|process| process.node != node) {
            let row = Row { node, seconds };
            if seconds == SHORT_S {
                process.life.push_back((Ended::Waiting(row), is_back));
            }
            process.life.push_back((Ended::Row(row), is_back));
        }
    }

    /// An operator removes a place that its process knows.
    fn revoke(&mut self, pick: usize) {
        let mut value = self.store.newest().value();
        let is_known = |id: &PlaceId| {
            let mine = self.processes.iter().flat_map(|process| &process.mine);
            mine.clone()
                .any(|mine| mine.id == *id && matches!(mine.state, State::Waiting | State::Held))
        };
        let mut known: Vec<_> =
            value.ledger.places().map(|place| place.0).filter(is_known).collect();
        known.sort_unstable();
        if known.is_empty() {
            return;
        }
        let time = value.next_time(self.now);
        _ = value.ledger.revoke(known[pick % known.len()], true, time);
        (value.time, value.is_promoted, value.writer) = (time, false, NodeId::new(0));
        let bytes = (!value.ledger.is_empty()).then(|| value.encode());
        let versions = self.store.history.len();
        self.store.write(bytes, None, self.step);
        self.announce(versions);
    }
}
