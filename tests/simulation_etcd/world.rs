//! A run: processes, the cluster, the network between them, and the faults of a plan.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::time::{Instant, sleep, sleep_until};

use crate::chance::{Rng, mix};
use crate::checker::{Checker, Violation};
use crate::client::Client;
use crate::cluster::{Cluster, Trouble};
use crate::network::Network;
use crate::plan::{FAULT_KINDS, Fault, Kind, MEMBERS, PROBES, Plan, Planted, Side, What};
use crate::process::{Process, Seen};
use crate::server::serve;
use crate::store::Store;

/// How long a window is, in ms.
const WINDOW: u64 = 1;
/// How long the requests of names with a rate end before each of them is asked for, in ms.
const RATED_BEFORE: u64 = 5500;
/// How long after the load the last request may end, in ms.
const GIVES_BACK: u64 = 7500;
/// How long after that nothing is stored of it any more, in ms: permits linger, and starts count for a second.
const LINGERS: u64 = 2500;
/// How long after the last fault what operators did is undone, in ms: what they asked for by then is done or has failed.
const CLEARS: u64 = 2000;
/// How long a shutdown may take, in ms.
const SHUTS_DOWN: u64 = 6000;
/// How long after that everything is gone, in ms: the longest lease, and the time in which etcd notices its end.
const LEASES_END: u64 = 5000;

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    pub violations: Vec<Violation>,
    /// How often each kind of event occurred.
    pub counts: BTreeMap<&'static str, u64>,
    /// A hash of all events.
    pub hash: u64,
    /// How long it took by its own clock, in ms.
    pub lasted: u64,
    /// What was seen, if it was asked for.
    pub trace: Vec<String>,
}

/// Carries out a plan. `pulse` is called from time to time, so that a run without progress is noticed.
#[must_use]
pub fn run(plan: &Plan, traced: bool, pulse: &dyn Fn()) -> Outcome {
    // The crate draws some of its jitter from the generator of the thread.
    fastrand::seed(mix(&[plan.seed, 9]));
    let mut world = World::new(plan, traced);
    world.run(pulse);
    let World { checker, now, trace, .. } = world;
    let Checker { mut violations, counts, hash, .. } = checker;
    violations.sort_by_key(|violation| violation.at);
    Outcome { violations, counts, hash, lasted: now, trace }
}

struct World<'a> {
    plan: &'a Plan,
    now: u64,
    checker: Checker<'a>,
    network: Network,
    cluster: Cluster,
    /// By slot; `None`: it is down.
    processes: Vec<Option<Process>>,
    serial: u64,
    numbers: Arc<AtomicU64>,
    /// Shared by the probes that have not ended.
    probes: Arc<()>,
    faults: VecDeque<Fault>,
    /// When slots are to have a process again.
    starts: BTreeSet<(u64, usize)>,
    /// When there is space again, and a clock is right again.
    space_at: Option<u64>,
    /// When what operators did is to be undone; 0: they did nothing.
    clears_at: u64,
    is_over: bool,
    /// Ends the load: that of names without a rate, and of those with one.
    are_over: [Arc<AtomicBool>; 2],
    traced: bool,
    trace: Vec<String>,
    epoch: Instant,
    // Last, so that tasks end before what they use.
    runtime: Runtime,
}

impl<'a> World<'a> {
    fn new(plan: &'a Plan, traced: bool) -> Self {
        let builder = &mut tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().start_paused(true).build().expect("a runtime");
        let epoch = runtime.block_on(async { Instant::now() });
        let store = Store::new(plan.min_ttl, plan.planted);
        let network = Network::new(mix(&[plan.seed, 2]));
        let mut rng = Rng::new(mix(&[plan.seed, 3]));
        for process in 0..plan.processes {
            for member in 0..MEMBERS {
                let latency = (1 + rng.below(2), rng.below(3));
                network.change(process, member, |way| way.latency = latency);
            }
        }
        let mut world = Self {
            plan,
            now: 0,
            checker: Checker::new(plan),
            network,
            cluster: Cluster::new(mix(&[plan.seed, 4]), store),
            processes: Vec::new(),
            serial: 0,
            numbers: Arc::default(),
            probes: Arc::default(),
            faults: plan.faults.iter().copied().collect(),
            starts: BTreeSet::new(),
            space_at: None,
            clears_at: 0,
            is_over: false,
            are_over: Default::default(),
            traced,
            trace: Vec::new(),
            epoch,
            runtime,
        };
        world.processes.resize_with(plan.processes, || None);
        (0..plan.processes).for_each(|slot| world.start(slot));
        world
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if self.traced {
            self.trace.push(format!("{:>6} {}", self.now, text()));
        }
    }

    fn run(&mut self, pulse: &dyn Fn()) {
        let settled = self.plan.faults_end + self.plan.settle();
        // A rate lets a probe through in time only if the others have left.
        self.run_until(settled - RATED_BEFORE, pulse, |_| false);
        self.are_over[1].store(true, Ordering::Relaxed);
        self.run_until(settled, pulse, |_| false);
        self.probe();
        self.run_until(settled + PROBES, pulse, |world| Arc::strong_count(&world.probes) == 1);
        self.are_over[0].store(true, Ordering::Relaxed);
        self.run_until(self.now + GIVES_BACK, pulse, |world| world.checker.is_at_rest());
        self.run_until(self.now + LINGERS + self.plan.clocks_differ(), pulse, |_| false);
        self.checker.check_no_places(self.now, &self.cluster.state().store);
        self.is_over = true;
        for process in self.processes.iter_mut().flatten().filter(|process| !process.is_closing) {
            process.shut_down();
        }
        let are_gone = |world: &Self| world.processes.iter().all(Option::is_none);
        self.run_until(self.now + SHUTS_DOWN, pulse, are_gone);
        for slot in 0..self.plan.processes {
            if let Some(process) = self.processes[slot].take() {
                let what = format!("the shutdown of process {}", process.serial);
                self.checker.breaks(self.now, "hangs", what);
            }
        }
        self.run_until(self.now + LEASES_END, pulse, |_| false);
        self.judge();
    }

    fn judge(&mut self) {
        let state = self.cluster.state();
        if self.traced {
            let told = state.store.log().iter().map(|change| format!("{:>6} {change}", change.at));
            self.trace.extend(told);
            self.trace.sort_by_key(|line| line[..6].trim().parse::<u64>().unwrap_or(0));
        }
        self.checker.check_nothing(self.now, &state.store);
        self.checker.check_work(state.requests());
        self.checker.check_history(&state.store);
        self.checker.count("leases that ended by time", state.ended as u64);
        self.checker.count("connections", self.network.opened());
    }

    fn run_until(&mut self, until: u64, pulse: &dyn Fn(), is_done: impl Fn(&Self) -> bool) {
        while self.now < until && !is_done(self) {
            if self.now.is_multiple_of(100) {
                pulse();
            }
            self.step();
        }
    }

    fn step(&mut self) {
        let (from, to) = (self.now, self.now + WINDOW);
        while self.faults.front().is_some_and(|fault| fault.at <= from)
            && let Some(fault) = self.faults.pop_front()
        {
            self.begin(fault);
        }
        if self.space_at.is_some_and(|at| at <= from) {
            self.space_at = None;
            self.cluster.state().store.has_space = true;
        }
        if self.clears_at > 0 && self.now == self.plan.faults_end + CLEARS {
            self.clear();
        }
        while self.starts.first().is_some_and(|(at, _)| *at <= from)
            && let Some((_, slot)) = self.starts.pop_first()
        {
            if self.processes[slot].is_none() && !self.is_over {
                self.start(slot);
            }
        }
        self.cluster.state().tick(from);
        for accepted in self.network.deliver(from) {
            self.runtime.spawn(serve(self.cluster.clone(), accepted));
        }
        let until = self.epoch + Duration::from_millis(to);
        self.runtime.block_on(async { sleep_until(until).await });
        let mut running = BTreeSet::new();
        for slot in 0..self.processes.len() {
            let Some(process) = &mut self.processes[slot] else { continue };
            let serial = process.serial;
            let entries = process.run(from, to);
            if to >= process.tells_at {
                running.insert(serial);
            }
            for entry in entries {
                if entry.seen == Seen::ShutDown {
                    process.is_shut_down = true;
                }
                if self.traced {
                    let (at, number) = (entry.at, entry.number);
                    self.trace.push(format!("{at:>6} p{serial} {number}: {:?}", entry.seen));
                }
                self.checker.handle(serial, entry);
            }
            if process.is_shut_down {
                self.processes[slot] = None;
                self.checker.gone(serial);
            }
        }
        self.checker.check_held(to, |serial| running.contains(&serial));
        self.now = to;
    }

    // ===== processes =====

    fn start(&mut self, slot: usize) {
        self.serial += 1;
        let serial = self.serial;
        let seed = mix(&[self.plan.seed, 5, serial]);
        let process = Process::start(self.plan, &self.network, (slot, serial), seed, self.now);
        self.note(|| format!("process {serial} starts in slot {slot}"));
        for index in 0..self.plan.names.len() {
            for task in 0..self.plan.tasks {
                let client = self.client(&process, index, task as u64);
                process.spawn(client.run());
            }
        }
        if self.plan.planted == Some(Planted::AsksAllTheTime) && slot == 0 {
            let (semaphore, name) = (process.semaphore.clone(), self.plan.names[0].name.clone());
            for _ in 0..10 {
                let (semaphore, name) = (semaphore.clone(), name.clone());
                process.spawn(async move {
                    loop {
                        _ = semaphore.inspect(name.as_str()).await;
                        sleep(Duration::from_millis(1)).await;
                    }
                });
            }
        }
        self.processes[slot] = Some(process);
    }

    fn client(&self, process: &Process, index: usize, task: u64) -> Client {
        let is_rated = self.plan.names[index].rate.is_some();
        Client {
            surroundings: Arc::clone(&process.surroundings),
            semaphore: process.semaphore.clone(),
            index,
            name: self.plan.names[index].clone(),
            rng: Rng::new(mix(&[self.plan.seed, 6, process.serial, index as u64, task])),
            numbers: Arc::clone(&self.numbers),
            planted: self.plan.planted,
            calms_at: self.plan.faults_end,
            settled_at: self.plan.faults_end + self.plan.settle(),
            is_over: Arc::clone(&self.are_over[usize::from(is_rated)]),
        }
    }

    /// Each process is to be granted each name.
    fn probe(&self) {
        for process in self.processes.iter().flatten() {
            for index in 0..self.plan.names.len() {
                let (client, probes) =
                    (self.client(process, index, 1000), Arc::clone(&self.probes));
                process.spawn(async move {
                    client.probe(PROBES - 500).await;
                    drop(probes);
                });
            }
        }
    }

    fn end(&mut self, slot: usize, silently: bool) {
        let Some(process) = self.processes[slot].take() else { return };
        if silently {
            self.network.silence(slot);
        }
        self.checker.gone(process.serial);
    }

    // ===== faults =====

    fn begin(&mut self, fault: Fault) {
        let Fault { at, lasts, what } = fault;
        let until = at + lasts;
        self.checker.count(FAULT_KINDS[what.kind()], 1);
        self.note(|| format!("fault until {until}: {what:?}"));
        match what {
            What::Dies { process, silently } => {
                self.end(process, silently);
                self.starts.insert((until, process));
            }
            What::ShutsDown { process } => {
                if let Some(process) = &mut self.processes[process] {
                    process.shut_down();
                }
                // Not before it has ended.
                self.starts.insert((until.max(at + SHUTS_DOWN), process));
            }
            What::Freezes { process } | What::Suspends { process } => {
                if let Some(process) = &mut self.processes[process] {
                    process.frozen_until = process.frozen_until.max(until);
                    process.is_suspended |= matches!(what, What::Suspends { .. });
                }
            }
            What::ClockSteps { process, by } => {
                self.processes[process].iter().for_each(|process| process.step_clock(by));
            }
            What::Cut { process, member } => self.network.cut(process, member),
            What::CutOff { process, side } => {
                (0..MEMBERS).for_each(|member| self.stall(process, member, side, until));
            }
            What::Slow { process, by } => {
                for member in 0..MEMBERS {
                    self.network.change(process, member, |way| {
                        (way.slow_by, way.slow_until) = (by, until);
                    });
                }
            }
            What::Refuses { process, member } => {
                self.network.cut(process, member);
                self.network.change(process, member, |way| way.refuses_until = until);
            }
            What::MemberDown { member } => {
                for process in 0..self.plan.processes {
                    self.network.cut(process, member);
                    self.network.change(process, member, |way| way.refuses_until = until);
                }
            }
            What::MemberFrozen { member } => {
                let all = 0..self.plan.processes;
                all.for_each(|process| self.stall(process, member, Side::Both, until));
            }
            What::Limits { process, .. } | What::Pauses { process } => {
                self.operate(what, process, until);
            }
            other => self.begin_in_cluster(other, until),
        }
    }

    fn stall(&self, process: usize, member: usize, side: Side, until: u64) {
        self.network.change(process, member, |way| {
            for (at, stalled) in way.stalled_until.iter_mut().enumerate() {
                if side == Side::Both || (side == Side::ToMember) == (at == 0) {
                    *stalled = until.max(*stalled);
                }
            }
        });
    }

    fn begin_in_cluster(&mut self, what: What, until: u64) {
        let lasts = until - self.now.min(until);
        let mut state = self.cluster.state();
        let trouble = |percent| Trouble { until, percent };
        match what {
            What::Lags { member, by } => {
                let member = &mut state.members[member];
                (member.lags_by, member.lags_until) = (by, until);
            }
            What::WatchLags { member, by } => {
                let member = &mut state.members[member];
                (member.watch_lags_by, member.watch_lags_until) = (by, until);
            }
            What::LosesLeader { unnoticed } => {
                let unnoticed = unnoticed.min(lasts);
                state.lose_leader(unnoticed, lasts - unnoticed);
            }
            What::Deposes => state.depose(lasts),
            What::Compacts => {
                let revision = state.store.revision();
                state.store.compact(revision);
            }
            What::NoSpace => {
                state.store.has_space = false;
                self.space_at = Some(until.max(self.space_at.unwrap_or(0)));
            }
            What::EndsLeases { all } => {
                let leases = state.store.leases();
                let one = Rng::new(mix(&[self.plan.seed, 7, self.now])).index(leases.len());
                for (at, lease) in leases.into_iter().enumerate() {
                    if all || at == one {
                        _ = state.store.revoke(lease);
                    }
                }
            }
            What::Late { percent } => state.troubles.late = trouble(percent),
            What::Unanswered { percent } => state.troubles.unanswered = trouble(percent),
            What::Refused { percent } => state.troubles.refused = trouble(percent),
            What::WatchesLose { percent } => state.troubles.watches_lose = trouble(percent),
            What::WatchesEnd { percent } => state.troubles.watches_end = trouble(percent),
            _ => {}
        }
    }

    /// An operator changes the first name that it may.
    fn operate(&mut self, what: What, slot: usize, until: u64) {
        let name = self.plan.names.iter().find(|name| name.kind == Kind::Mixed);
        let (Some(name), Some(process)) = (name, &self.processes[slot]) else { return };
        let (semaphore, name) = (process.semaphore.clone(), name.name.clone());
        process.spawn(async move {
            _ = match what {
                What::Limits { limit, .. } => semaphore.set_limit(name, limit).await,
                _ => semaphore.pause(name).await,
            };
        });
        self.clears_at = self.clears_at.max(until);
    }

    /// Undoes what operators did, from every process, as long as that takes.
    fn clear(&self) {
        let Some(name) = self.plan.names.iter().find(|name| name.kind == Kind::Mixed) else {
            return;
        };
        for process in self.processes.iter().flatten() {
            let (semaphore, name) = (process.semaphore.clone(), name.name.clone());
            process.spawn(async move {
                for _ in 0..20 {
                    if semaphore.clear_limit(name.as_str()).await.is_ok()
                        && semaphore.resume(name.as_str()).await.is_ok()
                    {
                        break;
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            });
        }
    }
}
