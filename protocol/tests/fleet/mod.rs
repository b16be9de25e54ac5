//! Processes that share a simulated store, in true time, with faults.
//!
//! # What is excluded, because the design does not promise it
//!
//! * With half a grace: a lease that is revoked early while its process cannot reach the store. There the process relies
//!   on a place for up to half a lease too long. Runs with a whole grace have this.
//! * A sign that is removed early twice within one grace, if another process misses that it was back in between. Runs
//!   leave 600 ms between, which is longer than any event takes; where a watch loses events, a grace and a lease.
//! * Clocks whose speeds differ by more than 1 %.

mod faults;
mod messages;
pub(crate) mod plan;
pub(crate) mod process;
pub(crate) mod store;

use std::collections::BTreeMap;

use fastrand::Rng;
use tower_semaphore_protocol::Time;
use tower_semaphore_protocol::liveness::{
    Action, Cleanup, LeaseId, Request, RequestId, Revision, Row, Seen, Sign, Term,
};

use self::plan::{Fault, Plan, Removed};
use self::process::Process;
use self::store::{Change, MS, Micros, Store};

/// How long a run goes on after the last fault began.
const SETTLE_MS: u64 = 40_000;

/// How often a process looks at its places.
const WORK_MS: u64 = 300;

/// What happens at a time.
#[derive(Clone, Debug)]
enum Happening {
    AtStore { process: usize, connection: u64, message: Message },
    AtProcess { process: usize, connection: u64, answer: Answer },
    Timer(usize),
    Work(usize),
    Connect(usize),
    Lessor,
    Fault(Fault),
}

#[derive(Clone, Copy, Debug)]
enum Message {
    Own(Request),
    Open,
    List,
    Forget(Row),
    ForgetWaiting(Row),
    /// Makes a place of this id, or reads the one that is there.
    Acquire(u32, u64),
    Read(u32),
}

#[derive(Clone, Debug)]
enum Answer {
    Granted(RequestId, LeaseId, u32),
    KeptAlive(RequestId, u32, Term),
    Sign(RequestId, Option<Sign>, Term),
    NoLease(RequestId),
    Revoked(RequestId),
    Opened { signs: Vec<Row>, places: Vec<Row>, revision: Revision },
    Listed(Vec<Row>, Revision),
    Forgotten(Row),
    WaitingForgotten(Row),
    IsAlive(Row, Revision),
    Place(u32, Option<u64>, Revision),
    Changed(Change, Revision),
}

/// What a run showed.
#[derive(Debug, Default)]
pub(crate) struct Report {
    /// A process relied on a place that others had forgotten.
    pub(crate) violation: Option<String>,
    /// A living process has no row, or not its place, at the end.
    pub(crate) lost: Vec<String>,
    /// When each row was forgotten while it had a place, in ms, by whom.
    pub(crate) forgotten: Vec<(Row, u64)>,
    /// Transactions that were to forget a row.
    pub(crate) attempts: BTreeMap<Row, u32>,
    /// When processes were killed, in ms.
    pub(crate) killed: BTreeMap<usize, u64>,
    pub(crate) places_made: usize,
    pub(crate) early_revocations: usize,
    pub(crate) happened: usize,
}

pub(crate) struct World {
    plan: Plan,
    now: Micros,
    queue: BTreeMap<(Micros, u64), Happening>,
    serial: u64,
    rng: Rng,
    store: Store,
    processes: Vec<Process>,
    /// The leases that the old leader knows, with their ends.
    deposed: BTreeMap<LeaseId, Micros>,
    deposed_until: Micros,
    /// When a sign was last removed.
    removed_at: BTreeMap<Row, Micros>,
    /// When a sign was created.
    put_at: BTreeMap<(Row, Revision), Micros>,
    may_lose_events: bool,
    pub(crate) report: Report,
}

/// Runs a plan to its end.
pub(crate) fn run(plan: &Plan) -> (Report, World) {
    let mut world = World::new(plan.clone());
    let last_fault = plan.faults.iter().map(|(at, _)| *at).max().unwrap_or(0);
    let end = (last_fault + SETTLE_MS) * MS;
    while world.now < end && world.report.violation.is_none() {
        world.step();
    }
    world.check_end();
    (std::mem::take(&mut world.report), world)
}

impl World {
    fn new(plan: Plan) -> Self {
        let mut rng = Rng::with_seed(plan.seed);
        let drifts = [-plan.drift, plan.drift, 0];
        let first = rng.usize(..3);
        let process =
            |n: usize| Process::new(n as u64 + 1, drifts[(first + n) % drifts.len()], plan.grace);
        let processes: Vec<_> = (0..plan.processes).map(process).collect();
        let may_lose_events =
            plan.faults.iter().any(|(_, fault)| matches!(fault, Fault::Deaf { .. }));
        let mut world = Self {
            now: 0,
            queue: BTreeMap::new(),
            serial: 0,
            rng,
            store: Store::new(),
            processes,
            deposed: BTreeMap::new(),
            deposed_until: 0,
            removed_at: BTreeMap::new(),
            put_at: BTreeMap::new(),
            may_lose_events,
            report: Report::default(),
            plan,
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        for process in 0..self.processes.len() {
            self.push(0, Happening::Connect(process));
            let phase = self.rng.u64(..WORK_MS * MS);
            self.push(phase, Happening::Work(process));
        }
        self.push(0, Happening::Lessor);
        for (ms, fault) in self.plan.faults.clone() {
            self.push((ms + 2000) * MS, Happening::Fault(fault));
        }
    }

    fn push(&mut self, after: Micros, happening: Happening) {
        self.push_at(self.now + after, happening);
    }

    fn push_at(&mut self, at: Micros, happening: Happening) {
        self.serial += 1;
        self.queue.insert((at, self.serial), happening);
    }

    fn step(&mut self) {
        let Some(((at, _), happening)) = self.queue.pop_first() else {
            self.now = Micros::MAX;
            return;
        };
        self.now = at;
        self.report.happened += 1;
        if let Some(process) = self.asleep(&happening) {
            let thaw = self.processes[process].frozen_until;
            let is_timer = !matches!(happening, Happening::AtProcess { .. });
            let is_later = is_timer != self.processes[process].thaws_timers_first;
            self.push_at(thaw + u64::from(is_later), happening);
            return;
        }
        self.carry_out(happening);
        self.deliver_changes();
        self.check();
    }

    /// The process that is frozen, and so does not come to this yet.
    fn asleep(&self, happening: &Happening) -> Option<usize> {
        match *happening {
            Happening::AtProcess { process, .. }
            | Happening::Timer(process)
            | Happening::Work(process)
            | Happening::Connect(process) => {
                Some(process).filter(|process| self.now < self.processes[*process].frozen_until)
            }
            _ => None,
        }
    }

    fn carry_out(&mut self, happening: Happening) {
        match happening {
            Happening::AtStore { process, connection, message } => {
                self.at_store(process, connection, message);
            }
            Happening::AtProcess { process, connection, answer } => {
                self.at_process(process, connection, answer);
                // After a freeze, all messages come before the timers, or all after them.
                if self.now != self.processes[process].frozen_until {
                    self.drive(process);
                }
            }
            Happening::Timer(process) => {
                if self.processes[process].timer_at <= self.now {
                    self.processes[process].timer_at = Micros::MAX;
                    self.drive(process);
                }
            }
            Happening::Work(process) => self.work(process),
            Happening::Connect(process) => self.connect(process),
            Happening::Lessor => {
                self.store.expire(self.now);
                self.push(500 * MS, Happening::Lessor);
            }
            Happening::Fault(fault) => self.begin_fault(fault),
        }
    }

    /// Has a process act on its state and the time.
    fn drive(&mut self, n: usize) {
        if self.processes[n].is_dead {
            return;
        }
        let (now, removed) = (self.processes[n].clock(self.now), self.plan.removed);
        if self.processes[n].own.handle_timeout(now) {
            self.processes[n].disconnect(self.now);
            self.processes[n].is_at_deposed &= self.rng.u8(..3) == 0;
            let after = self.rng.u64(1..30) * MS;
            self.push(after, Happening::Connect(n));
        }
        self.processes[n].renew(removed);
        while let Some(request) = self.processes[n].own.poll_request(now) {
            self.send_own(n, request, now);
        }
        loop {
            let others = &mut self.processes[n].others;
            let at = match (removed, others.poll_timeout()) {
                (Some(Removed::Restart), Some(timeout)) => now.min(timeout),
                _ => now,
            };
            let Some(cleanup) = others.poll_cleanup(at) else { break };
            self.send(n, message_of(cleanup));
        }
        self.set_timer(n);
    }

    fn send_own(&mut self, n: usize, request: Request, now: Time) {
        let process = &mut self.processes[n];
        if let Action::KeepAlive { .. } = request.action {
            process.kept_alive_sent.insert(request.id, now);
        }
        match (request.action, self.plan.removed) {
            (Action::ReadSign { seconds }, Some(Removed::Reading)) => {
                let row = process.row(seconds);
                // As if it were there, in the term of the keepalive.
                if let Some(sign) = self.store.signs.get(&row).copied() {
                    let term = if process.is_at_deposed { 0 } else { self.store.term };
                    process.own.handle_sign(request.id, Some(sign), term, now);
                    return;
                }
            }
            (Action::Grant { seconds }, Some(Removed::Registering)) => {
                let times = process.granted.entry(seconds).or_default();
                *times += 1;
                if *times > 1 {
                    return;
                }
            }
            _ => {}
        }
        self.send(n, Message::Own(request));
    }

    fn set_timer(&mut self, n: usize) {
        let process = &mut self.processes[n];
        let next = [process.own.poll_timeout(), process.others.poll_timeout()];
        let Some(next) = next.into_iter().flatten().min() else { return };
        let is_stale = self.plan.removed == Some(Removed::Restart);
        assert!(next > process.clock(self.now) || is_stale, "nothing is left to be done");
        let at = process.true_time(next).max(self.now + 1);
        if at < process.timer_at {
            process.timer_at = at;
            self.push_at(at, Happening::Timer(n));
        }
    }

    fn connect(&mut self, n: usize) {
        let process = &mut self.processes[n];
        if process.is_dead || process.is_connected {
            return;
        }
        process.connection += 1;
        self.send(n, Message::Open);
        self.push(700 * MS, Happening::Connect(n));
    }

    /// Looks at the places: makes those that are missing, and reads the others.
    fn work(&mut self, n: usize) {
        self.push(WORK_MS * MS, Happening::Work(n));
        if self.processes[n].is_dead || !self.processes[n].is_connected {
            return;
        }
        for seconds in self.processes[n].rows() {
            if self.processes[n].places.contains_key(&seconds) {
                self.send(n, Message::Read(seconds));
            } else if self.processes[n].own.is_registered(seconds) {
                let id = self.processes[n].next_place();
                self.send(n, Message::Acquire(seconds, id));
            }
        }
        self.drive(n);
    }

    /// No process relies on a place that is gone.
    fn check(&mut self) {
        for process in &self.processes {
            for (row, id) in process.relied(self.now) {
                if self.store.places.get(&row) != Some(&id) {
                    let at = self.now / MS;
                    self.report.violation =
                        Some(format!("at {at} ms, {row:?} relies on a place that was forgotten"));
                }
            }
        }
    }

    /// Faults are over, so every living process has its rows and places, and nothing else is there.
    fn check_end(&mut self) {
        let living: Vec<_> = self.processes.iter().filter(|process| !process.is_dead).collect();
        let count = living.len() * process::LENGTHS.len();
        let mut lost = Vec::new();
        for process in &living {
            for seconds in process.rows() {
                let row = process.row(seconds);
                if !process.own.is_registered(seconds) {
                    lost.push(format!("{row:?} has no sign"));
                }
                if !process.relied(self.now).any(|(relied, _)| relied == row) {
                    lost.push(format!("{row:?} has no place"));
                }
            }
            let tracked = process.others.tracked();
            if tracked + process::LENGTHS.len() != count {
                lost.push(format!("{:?} tracks {tracked} rows", process.node));
            }
        }
        if self.store.places.len() != count {
            lost.push(format!("{} places, expected {count}", self.store.places.len()));
        }
        self.report.lost = lost;
    }
}

fn message_of(cleanup: Cleanup) -> Message {
    match cleanup {
        Cleanup::ForgetWaiting(row) => Message::ForgetWaiting(row),
        Cleanup::Forget(row) => Message::Forget(row),
        Cleanup::List => Message::List,
    }
}
