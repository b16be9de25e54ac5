//! A run: processes, servers, the network between them, and the faults of a plan.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap};

use foldhash::fast::FixedState;
use tower_semaphore_protocol::NodeId;

use crate::backend::{
    Answers, Batch, Incoming, Message, Outgoing, Port, Refuses, Sent, Site, Store,
};
use crate::chance::mix;
use crate::checker::{Checker, RECALLED, SETTLE, Stock, Violation};
use crate::plan::{
    AskPlan, Deed, FaultPlan, GiveBack, Kind, OutagePolicy, Plan, Planted, RequestPlan, Scenario,
};
use crate::process::{Entry, Process, Seen};

const MS: u64 = 1000;
/// The interval in which requests are sent that must be served: after the end of the faults, in ms.
const PROBES: u64 = 4000;
/// How long after the end of the load the overrides are cleared. All operators' calls have ended by then.
const CLEARS: u64 = 1500;
/// The claim of these requests if tenants share a name.
const PROBE: AskPlan = AskPlan::of(60_000);
/// The time at which a run begins, in µs since 1970.
const EPOCH: u64 = 1_700_000_000_000_000;
/// How rarely releases that were refused for long are tried again, in ms.
const REFUSED: u64 = 4000;
/// How long after a suspension of its machine a process may take to notify holders, in ms.
const RESUMES: u64 = 600;
/// How long a server works on a batch before it answers a part of it.
const PART: u64 = 20 * MS;
/// How often the checker examines the servers.
const LOOK: u64 = 100 * MS;

/// The result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The broken rules.
    pub violations: Vec<Violation>,
    /// How often each kind of event occurred.
    pub counts: BTreeMap<&'static str, u64>,
    /// The number of requests.
    pub requests: u64,
    /// A hash of all events.
    pub hash: u64,
    /// The events, if they were asked for.
    pub trace: Vec<String>,
}

/// Called from time to time with the plan's seed, so that a run without progress is noticed.
pub type Pulse<'a> = &'a dyn Fn();

/// Carries out a plan.
#[must_use]
pub fn run(plan: &Plan, traced: bool, pulse: Pulse<'_>) -> Outcome {
    let plan = plan.for_its_ledger();
    let mut world = World::new(&plan, traced);
    world.run(pulse);
    let World { mut checker, hash, trace, .. } = world;
    checker.violations.sort_by_key(|violation| violation.at);
    Outcome {
        requests: checker.counts.get("requests").copied().unwrap_or(0),
        violations: checker.violations,
        counts: checker.counts,
        hash,
        trace: trace.unwrap_or_default(),
    }
}

struct World<'a> {
    plan: &'a Plan,
    now: u64,
    serial: u64,
    hash: u64,
    trace: Option<Vec<String>>,
    queue: BinaryHeap<Reverse<Event>>,
    servers: Vec<Server>,
    /// The server that counts each name; the last one is that of the overrides.
    homes: Vec<usize>,
    lanes: HashMap<(usize, u64), Lane, FixedState>,
    /// By process of the plan and server.
    links: Vec<Vec<Link>>,
    processes: Vec<Option<Process>>,
    /// By process of the plan, its present replacement.
    current: Vec<Option<usize>>,
    checker: Checker,
    next_request: usize,
    probes: Vec<RequestPlan>,
}

struct Event {
    at: u64,
    serial: u64,
    what: What,
}

enum What {
    Opens {
        process: usize,
        lane: u64,
        server: usize,
    },
    Arrives {
        process: usize,
        lane: u64,
        batch: Batch,
        late: bool,
    },
    CarriesOut {
        process: usize,
        lane: u64,
        batch: Batch,
        late: bool,
    },
    Overdue {
        process: usize,
        lane: u64,
    },
    /// A part of a long batch is carried out.
    Hears {
        process: usize,
        lane: u64,
    },
    Closes {
        process: usize,
        lane: u64,
    },
    /// A recall came to a process some time ago, at this time.
    Recalled {
        process: usize,
        name: usize,
        at: u64,
    },
    Fault(usize),
    Over(usize),
    Operation(usize),
    Snapshot(usize),
    Born(usize),
    Ends(usize),
}

impl PartialEq for Event {
    fn eq(&self, other: &Self) -> bool {
        self.serial == other.serial
    }
}

impl Eq for Event {}

impl PartialOrd for Event {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Event {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

#[derive(Default)]
struct Server {
    store: Store,
    /// Copies of its data, the oldest first.
    copies: Vec<(u64, Store)>,
    generation: u64,
    born: u64,
    /// How far its clock is off, in µs.
    offset: i64,
    drift: i64,
    down_until: u64,
    hangs_until: u64,
    busy_until: u64,
    no_memory_until: u64,
    read_only_until: u64,
    loading_until: u64,
    no_rights_until: u64,
    /// By name.
    forbidden_until: BTreeMap<usize, u64>,
    fails_after_until: u64,
    late_until: u64,
    hints_lost_until: u64,
    hints_late_until: u64,
    hints_twice_until: u64,
    /// The processes that listen, and their connections.
    listeners: BTreeMap<NodeId, Vec<(usize, u64)>>,
}

impl Server {
    fn clock(&self, now: u64) -> u64 {
        let drift = i64::try_from(now / MS).unwrap_or(0) * self.drift / 1000;
        (EPOCH + now).saturating_add_signed(self.offset + drift)
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterCut {
    Lost,
    CarriedOut,
    CarriedOutLate,
}

struct Lane {
    server: usize,
    slot: usize,
    open: bool,
    /// The process closed it; the server may learn of that later.
    left: bool,
    poll_only: bool,
    /// Requests no longer arrive; answers no longer arrive.
    deaf_up: bool,
    deaf_down: bool,
    last_up: u64,
    last_down: u64,
    messages: u64,
    /// How much of it is left when it is cut.
    after_cut: AfterCut,
    /// A write that waits to be overtaken.
    deferred: Option<Batch>,
    /// The latest write that is to be carried out.
    enqueued: u64,
}

#[derive(Clone, Copy, Default)]
struct Link {
    /// The least time that a message takes, in µs.
    base: u64,
    slow_until: u64,
    slow_by: u64,
    stalled_until: u64,
    swallows_up_until: u64,
    swallows_down_until: u64,
    connect_fails_until: u64,
    connect_slow_until: u64,
    poll_only_until: u64,
}

impl<'a> World<'a> {
    fn new(plan: &'a Plan, traced: bool) -> Self {
        let chance = |what: &[u64]| mix(&[&[plan.seed], what].concat());
        let servers = (0..plan.servers).map(|server| Server {
            drift: plan.drift[server],
            offset: i64::try_from(chance(&[1, server as u64]) % 50_000).unwrap_or(0),
            ..Server::default()
        });
        let links = (0..plan.processes).map(|process| {
            (0..plan.servers)
                .map(|server| Link {
                    base: 1000 + chance(&[2, process as u64, server as u64]) % 1500,
                    ..Link::default()
                })
                .collect()
        });
        let homes = (0..=plan.names).map(|name| name % plan.servers);
        let mut world = Self {
            plan,
            now: 0,
            serial: 0,
            hash: plan.seed,
            trace: traced.then(Vec::new),
            queue: BinaryHeap::new(),
            servers: servers.collect(),
            homes: homes.collect(),
            lanes: HashMap::default(),
            links: links.collect(),
            processes: Vec::new(),
            current: vec![None; plan.processes],
            checker: Checker::new(plan),
            next_request: 0,
            probes: Vec::new(),
        };
        for own in &plan.policies {
            for policy in own {
                world.checker.count(match policy.outage {
                    OutagePolicy::Refuse => "policy: refuse",
                    OutagePolicy::Admit => "policy: admit",
                    OutagePolicy::Local(_) => "policy: local",
                });
                if policy.reuse {
                    world.checker.count("policy: reuse");
                }
                if policy.adaptive.is_some() {
                    world.checker.count("policy: adaptive");
                }
            }
        }
        if plan.quarantine {
            world.checker.count("policy: quarantine");
            // The servers are young: a process grants nothing until they are one lease old.
            world.checker.quarantine();
        }
        (0..plan.processes).for_each(|slot| world.start(slot));
        for (number, fault) in plan.faults.iter().enumerate() {
            world.push(fault.at * MS, What::Fault(number));
        }
        for (number, operation) in plan.operations.iter().enumerate() {
            world.push(operation.at * MS, What::Operation(number));
        }
        if plan.faults.iter().any(|fault| fault.kind == Kind::Failover) {
            (0..plan.servers).for_each(|server| world.push(0, What::Snapshot(server)));
        }
        world
    }

    fn push(&mut self, at: u64, what: What) {
        self.serial += 1;
        self.queue.push(Reverse(Event { at: at.max(self.now), serial: self.serial, what }));
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        let at = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:>10.1} {}", (at as f64) / 1000.0, text()));
        }
    }

    fn digest(&mut self, values: &[u64]) {
        for value in values {
            self.hash = (self.hash.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    /// Returns a number that depends only on the seed and on these.
    fn chance(&self, what: &[u64]) -> u64 {
        what.iter().fold(self.plan.seed, |state, value| mix(&[state, *value]))
    }

    // ===== the course of time =====

    fn run(&mut self, pulse: Pulse<'_>) {
        let load = self.plan.load * MS;
        let mut cleared = false;
        let mut look_at = LOOK;
        let mut second_at = 1000 * MS;
        let mut end = None;
        let mut rest: Option<Vec<u64>> = None;
        loop {
            pulse();
            let from = self.now;
            let is_quiet = end.is_some() || (from > load && self.checker.open() == 0);
            let window = if is_quiet { 10 * MS } else { self.plan.window * MS };
            let to = from + window;
            self.start_requests(to);
            self.run_processes(from, to, window);
            self.run_network(to);
            self.now = to;
            if to >= look_at {
                self.look();
                look_at += LOOK;
            }
            if to >= second_at {
                let records: Vec<_> = (self.processes.iter())
                    .map(|process| process.as_ref().map(Process::records))
                    .collect();
                let admitted: Vec<_> = (self.processes.iter())
                    .map(|process| process.as_ref().map_or(0, |process| process.health().1))
                    .collect();
                self.checker.second(to, self.plan.servers, &records, &admitted);
                second_at += 1000 * MS;
            }
            if !cleared && to >= load + CLEARS * MS {
                cleared = true;
                self.clear();
            }
            if self.probes.is_empty() && to >= load + PROBES * MS {
                self.probe();
            }
            let longest = self.plan.longest_lease(None);
            let patience = load + (PROBES + 3 * longest + 20_000) * MS;
            if end.is_none()
                && !self.probes.is_empty()
                && ((self.checker.open() == 0 && to > load + (PROBES + 10) * MS) || to > patience)
            {
                end = Some(to + (9000.max(2 * longest + 2000)).min(25_000) * MS);
            }
            if let Some(end) = end {
                if to + 3000 * MS >= end && rest.is_none() {
                    rest = Some(self.living().map(|(_, process)| process.parks()).collect());
                }
                if to >= end {
                    break;
                }
            }
        }
        self.finish(&rest.unwrap_or_default());
    }

    fn living(&self) -> impl Iterator<Item = (usize, &Process)> {
        let all = self.processes.iter().enumerate();
        all.filter_map(|(number, process)| Some((number, process.as_ref()?)))
    }

    fn start_requests(&mut self, to: u64) {
        while let Some(request) = self.plan.requests.get(self.next_request)
            && request.at * MS < to
        {
            let number = self.next_request;
            self.next_request += 1;
            let Some(process) = self.current[request.process] else { continue };
            self.request(process, number, *request);
        }
    }

    fn request(&self, process: usize, number: usize, request: RequestPlan) {
        let mut policy = self.plan.policies[request.process][request.name];
        if let Some((limit, headroom)) = request.bound {
            (policy.limit, policy.headroom) = (limit, headroom);
            // A share above the limit is rejected.
            if let OutagePolicy::Local(share) = &mut policy.outage {
                *share = limit.min(*share);
            }
        }
        if let Some(process) = &self.processes[process] {
            process.request(number, request, &policy, self.is_layered());
        }
    }

    fn is_layered(&self) -> bool {
        self.plan.scenario == Scenario::Layer
    }

    fn key(&self, name: usize) -> String {
        if self.is_layered() { format!("l{name}") } else { format!("n{name}") }
    }

    fn run_processes(&mut self, from: u64, to: u64, window: u64) {
        let mut seen: Vec<(u64, bool, usize, usize, Entry)> = Vec::new();
        let mut sent: Vec<(usize, Sent)> = Vec::new();
        let mut recalled: Vec<(u64, usize, usize)> = Vec::new();
        for number in 0..self.processes.len() {
            let news_first = self.chance(&[3, number as u64, from]).is_multiple_of(2);
            let stops = self.chance(&[9, number as u64, from]) % 5;
            let Some(process) = &mut self.processes[number] else { continue };
            let stands = process.frozen_until > from
                || (process.slow_until > from && !(from / window).is_multiple_of(16));
            if stands {
                process.frozen += window;
                let resumes = if process.is_suspended { RESUMES * MS } else { 0 };
                let life = &mut self.checker.lives[number];
                life.frozen = process.frozen;
                // Standing still again does not shorten the time in which a suspension must be noticed.
                life.awake_since = life.awake_since.max(to + resumes);
                continue;
            }
            let entries = process.run(from, to, news_first, stops);
            if process.has_stopped {
                // Nor does this.
                let awake_since = &mut self.checker.lives[number].awake_since;
                *awake_since = to.max(*awake_since);
            }
            let mut granted = Vec::new();
            for (index, entry) in entries.into_iter().enumerate() {
                if let Seen::Granted { .. } = entry.seen {
                    granted.push((entry.at, entry.number));
                }
                // What a request saw after its grant stays after it.
                let is_last = granted.contains(&(entry.at, entry.number));
                seen.push((entry.at, is_last, number, index, entry));
            }
            for (at, name) in process.port.take_recalls() {
                self.checker.recalled(number, name, at);
                recalled.push((at, number, name));
            }
            sent.extend(process.port.take_sent().into_iter().map(|sent| (number, sent)));
        }
        seen.sort_by_key(|(at, is_last, number, index, _)| (*at, *is_last, *number, *index));
        for (_, _, process, _, entry) in seen {
            self.saw(process, &entry);
        }
        for (at, process, name) in recalled {
            self.push(at + RECALLED, What::Recalled { process, name, at });
        }
        sent.sort_by_key(|(_, sent)| sent.at);
        for (process, sent) in sent {
            self.sent(process, sent);
        }
    }

    fn saw(&mut self, process: usize, entry: &Entry) {
        self.digest(&[entry.at, entry.number as u64, process as u64]);
        let saved = self.now;
        self.now = entry.at;
        self.note(|| format!("process {process}: {} {:?}", entry.number, entry.seen));
        self.now = saved;
        match entry.seen {
            Seen::Operated(took, well) => {
                self.checker.count(if well { "operated" } else { "operation failed" });
                let operation = self.plan.operations.get(entry.number);
                let deed = operation.map(|o| o.deed);
                if let (true, Some(Deed::PauseFor(ms)), Some(o)) = (well, deed, operation) {
                    self.checker.is_paused(process, o.name, (entry.at, took), ms);
                }
                let drain = if let Some(Deed::Drain(ms)) = deed { ms * MS } else { 0 };
                let frozen = self.checker.lives[process].frozen;
                if took > drain + 6_000 * MS + frozen {
                    let text = format!("{deed:?} took {} ms", took / MS);
                    self.checker.flag("answer", entry.at, text);
                }
            }
            Seen::Revoked => self.checker.count("revoked"),
            Seen::ShutsDown => self.checker.shuts_down(process, entry.at),
            Seen::ShutDown(took) => {
                self.checker.count("shut down");
                let frozen = self.checker.lives[process].frozen;
                if took > 2_200 * MS + frozen {
                    let text = format!("the shutdown of process {process} took {} ms", took / MS);
                    self.checker.flag("answer", entry.at, text);
                }
            }
            Seen::Cleared => {}
            _ => {
                let plan = match self.plan.requests.get(entry.number) {
                    Some(plan) => plan,
                    None => &self.probes[entry.number - self.plan.requests.len()],
                };
                let layered = self.is_layered();
                let wait = match self.plan.policies[plan.process][plan.name] {
                    policy if layered => policy.wait,
                    _ => plan.wait,
                };
                let is_probe = entry.number >= self.plan.requests.len();
                if is_probe && matches!(entry.seen, Seen::Refused(_)) && !layered {
                    let text = format!(
                        "a request of process {process} for n{} was told {:?}, {} ms after the end of load and faults",
                        plan.name,
                        entry.seen,
                        entry.at / MS - self.plan.load
                    );
                    self.checker.flag("recovery", entry.at, text);
                }
                self.checker.saw(process, (plan.name, plan.ask), wait, layered, entry, &self.homes);
            }
        }
    }

    // ===== the network =====

    fn latency(&self, slot: usize, server: usize, lane: u64, message: u64, at: u64) -> u64 {
        let link = &self.links[slot][server];
        let chance = self.chance(&[4, slot as u64, server as u64, lane, message]);
        let jitter = match chance % 20 {
            0 => chance / 20 % 8000,
            1..5 => chance / 20 % 1500,
            _ => chance / 20 % 300,
        };
        let slow = if link.slow_until > at {
            link.slow_by + chance / 160 % link.slow_by.max(1)
        } else {
            0
        };
        link.base + jitter + slow
    }

    fn sent(&mut self, process: usize, Sent { at, lane, what }: Sent) {
        self.digest(&[at, lane, 1]);
        let Some(slot) = self.processes[process].as_ref().map(|process| process.slot) else {
            return;
        };
        if let Outgoing::Connect(server) = what {
            self.checker.sent(process, (0, 0), 1);
            self.checker.connects(process, server, at);
            self.checker.count("connects");
            self.lanes.insert(
                (process, lane),
                Lane {
                    server,
                    slot,
                    open: false,
                    left: false,
                    poll_only: false,
                    deaf_up: false,
                    deaf_down: false,
                    last_up: 0,
                    last_down: 0,
                    messages: 0,
                    after_cut: AfterCut::CarriedOut,
                    deferred: None,
                    enqueued: 0,
                },
            );
        }
        let Some(known) = self.lanes.get(&(process, lane)) else { return };
        let (server, message) = (known.server, known.messages);
        let link = self.links[slot][server];
        let departs = at.max(link.stalled_until);
        let latency = self.latency(slot, server, lane, message, at);
        let swallowed = link.swallows_up_until > at;
        let Some(known) = self.lanes.get_mut(&(process, lane)) else { return };
        known.messages += 1;
        let arrives = (departs + latency).max(known.last_up + 1);
        known.last_up = arrives;
        known.deaf_up |= swallowed;
        let is_deaf = known.deaf_up;
        match what {
            Outgoing::Connect(server) => {
                if !is_deaf {
                    let slow =
                        if link.connect_slow_until > at { latency % 7 * 100 * MS } else { 0 };
                    // Two round trips, for a handshake and the first queries.
                    self.push(arrives + 2 * latency + slow, What::Opens { process, lane, server });
                }
            }
            Outgoing::Batch(batch) => {
                let (calls, places) = batch.size();
                self.checker.sent(process, (calls, places), 0);
                *self.checker.counts.entry("calls").or_default() += calls as u64;
                if !is_deaf {
                    self.push(arrives, What::Arrives { process, lane, batch, late: false });
                }
            }
            Outgoing::Close => {
                known.left = true;
                if is_deaf {
                    self.lanes.remove(&(process, lane));
                } else {
                    self.push(arrives, What::Closes { process, lane });
                }
            }
        }
    }

    fn run_network(&mut self, to: u64) {
        while let Some(Reverse(event)) = self.queue.peek()
            && event.at < to
        {
            let Some(Reverse(event)) = self.queue.pop() else { break };
            self.now = self.now.max(event.at);
            self.happens(event.what);
        }
    }

    fn happens(&mut self, what: What) {
        match what {
            What::Opens { process, lane, server } => self.opens(process, lane, server),
            What::Arrives { process, lane, batch, late } => {
                self.arrives(process, lane, batch, late)
            }
            What::CarriesOut { process, lane, batch, late } => {
                self.carries_out(process, lane, &batch, late);
            }
            What::Overdue { process, lane } => {
                let deferred = self.lanes.get_mut(&(process, lane)).and_then(|l| l.deferred.take());
                if let Some(batch) = deferred {
                    self.enqueue(process, lane, batch);
                }
            }
            What::Hears { process, lane } => {
                if self.lanes.get(&(process, lane)).is_some_and(|lane| lane.open) {
                    self.deliver(process, lane, Incoming::Heard { lane });
                }
            }
            What::Closes { process, lane } => {
                // What arrived before is still carried out, but not answered.
                self.unsubscribe(process, lane);
                if let Some(lane) = self.lanes.get_mut(&(process, lane)) {
                    lane.open = false;
                }
            }
            What::Recalled { process, name, at } => {
                let server = self.homes[name];
                let known = &self.servers[server];
                let node = self.processes[process].as_ref().and_then(|it| it.port.node());
                let places = known.store.living(known.clock(self.now));
                let own = places.filter(|(of, id, _)| *of == name && Some(id.node) == node);
                let count = own.count() as u64;
                if known.down_until <= self.now && known.hangs_until <= self.now {
                    self.checker.after_recall((process, name), server, at, self.now, count);
                }
            }
            What::Fault(number) => self.fault(self.plan.faults[number], number),
            What::Over(number) => self.over(self.plan.faults[number]),
            What::Operation(number) => self.operation(number),
            What::Snapshot(server) => {
                let (now, known) = (self.now, &mut self.servers[server]);
                known.copies.push((now, known.store.clone()));
                if known.copies.len() > 8 {
                    known.copies.remove(0);
                }
                if now < self.plan.load * MS {
                    self.push(now + 70 * MS, What::Snapshot(server));
                }
            }
            What::Born(slot) => {
                if self.current[slot].is_none() || self.plan.scenario == Scenario::Deploy {
                    self.start(slot);
                }
            }
            What::Ends(process) => self.end(process),
        }
    }

    fn deliver(&mut self, process: usize, lane: u64, incoming: Incoming) {
        let now = self.now;
        let Some(known) = self.lanes.get(&(process, lane)) else { return };
        let (slot, server, message) = (known.slot, known.server, known.messages);
        let latency = self.latency(slot, server, lane, message | 1 << 40, now);
        let link = self.links[slot][server];
        let Some(known) = self.lanes.get_mut(&(process, lane)) else { return };
        known.messages += 1;
        known.deaf_down |= link.swallows_down_until > now;
        let at = (now.max(link.stalled_until) + latency).max(known.last_down + 1);
        known.last_down = at;
        if !known.deaf_down {
            self.post(process, at, incoming);
        }
    }

    fn post(&mut self, process: usize, at: u64, incoming: Incoming) {
        self.serial += 1;
        let serial = self.serial;
        if let Some(process) = &mut self.processes[process] {
            process.post(at, serial, incoming);
        }
    }

    fn opens(&mut self, process: usize, lane: u64, server: usize) {
        let now = self.now;
        let known = &self.servers[server];
        let Some(slot) = self.lanes.get(&(process, lane)).map(|lane| lane.slot) else { return };
        let link = self.links[slot][server];
        let (generation, born) = (known.generation, known.born);
        if known.hangs_until > now {
            let at = known.hangs_until + 1;
            return self.push(at, What::Opens { process, lane, server });
        }
        let refused = if known.down_until > now {
            Some("connection refused")
        } else if link.connect_fails_until > now {
            Some("no route")
        } else if known.loading_until > now {
            Some("LOADING")
        } else {
            None
        };
        self.note(|| {
            format!("server {server}: process {process} connects over {lane}: {refused:?}")
        });
        if let Some(why) = refused {
            // Another server names the right one.
            let is_up = |other: &Server| other.down_until <= now;
            let homes = self.servers.iter().any(is_up).then(|| self.homes.clone());
            return self.deliver(process, lane, Incoming::Refused { lane, why, homes });
        }
        let poll_only = link.poll_only_until > now;
        let data = (server, generation);
        let age = (generation == 0 || born > 0)
            .then(|| if generation == 0 { 100_000 * MS } else { now - born });
        if self.plan.quarantine && age.is_none() {
            // A process that is new cannot know when data was lost: it may have been just now.
            for name in (0..self.plan.names).filter(|name| self.homes[*name] == server) {
                let lease = self.plan.longest_lease(Some(name)) * MS;
                self.checker.unsettle(name, now + lease + SETTLE);
            }
        }
        if let Some(lane) = self.lanes.get_mut(&(process, lane)) {
            (lane.open, lane.poll_only) = (true, poll_only);
        }
        let node = self.processes[process].as_ref().and_then(|process| process.port.node());
        if let Some(node) = node.filter(|_| !poll_only) {
            self.servers[server].listeners.entry(node).or_default().push((process, lane));
        }
        if poll_only {
            self.checker.count("poll-only connections");
        }
        self.deliver(process, lane, Incoming::Opened { lane, poll_only, data, age });
    }

    fn arrives(&mut self, process: usize, lane: u64, batch: Batch, late: bool) {
        let now = self.now;
        let Some(known) = self.lanes.get(&(process, lane)) else { return };
        let server = known.server;
        if !known.open {
            match known.after_cut {
                AfterCut::Lost => return,
                AfterCut::CarriedOutLate if !late => {
                    let at = now + self.chance(&[5, lane, batch.number]) % (400 * MS);
                    return self.push(at, What::Arrives { process, lane, batch, late: true });
                }
                _ => {}
            }
        }
        let known = &mut self.servers[server];
        if known.down_until > now {
            return;
        }
        if known.late_until > now && mix(&[self.plan.seed, lane, batch.number]).is_multiple_of(3) {
            // Waits to be overtaken by the next one.
            if let Some(known) = self.lanes.get_mut(&(process, lane))
                && known.deferred.is_none()
            {
                known.deferred = Some(batch);
                return self.push(now + 5 * MS, What::Overdue { process, lane });
            }
        }
        self.enqueue(process, lane, batch);
    }

    /// Has a server carry out a batch in its turn.
    fn enqueue(&mut self, process: usize, lane: u64, batch: Batch) {
        let now = self.now;
        let Some(known) = self.lanes.get_mut(&(process, lane)) else { return };
        let late = batch.number < known.enqueued;
        known.enqueued = known.enqueued.max(batch.number);
        let known = &mut self.servers[known.server];
        let (calls, places) = batch.size();
        let cost = 5 + 10 * calls as u64 + places as u64 * self.plan.place_ns / 1000;
        let at = now.max(known.busy_until).max(known.hangs_until) + cost;
        known.busy_until = at;
        for part in 1..cost / PART {
            self.push(at - part * PART, What::Hears { process, lane });
        }
        self.push(at, What::CarriesOut { process, lane, batch, late });
    }

    fn carries_out(&mut self, process: usize, lane: u64, batch: &Batch, late: bool) {
        let now = self.now;
        let Some(known) = self.lanes.get_mut(&(process, lane)) else { return };
        let server = known.server;
        let overtaken = known.deferred.take_if(|deferred| deferred.number < batch.number);
        if !known.open || known.left {
            // What is taken over a connection that is gone stays there for a lease.
            self.checker.count("calls of closed connections");
            for name in batch.takes() {
                self.checker.taken_late(process, name, now);
            }
        }
        if self.servers[server].hangs_until > now {
            let at = self.servers[server].hangs_until;
            let batch = batch.clone();
            if let Some(known) = self.lanes.get_mut(&(process, lane)) {
                known.deferred = overtaken;
            }
            return self.push(at, What::CarriesOut { process, lane, batch, late });
        }
        if self.servers[server].down_until > now {
            return;
        }
        let answers = self.carry_out(process, server, batch, late);
        if let Some(overtaken) = overtaken {
            let first = self.carry_out(process, server, &overtaken, true);
            self.checker.count("calls overtaken");
            self.answer(process, lane, first);
        }
        self.answer(process, lane, answers);
    }

    fn answer(&mut self, process: usize, lane: u64, answers: Answers) {
        if self.lanes.get(&(process, lane)).is_some_and(|lane| lane.open) {
            self.deliver(process, lane, Incoming::Answers { lane, answers });
        }
    }

    fn carry_out(&mut self, process: usize, server: usize, batch: &Batch, late: bool) -> Answers {
        let now = self.now;
        let known = &mut self.servers[server];
        let clock = known.clock(now);
        let refuses = Refuses {
            no_memory: known.no_memory_until > now,
            read_only: known.read_only_until > now,
            loading: known.loading_until > now,
            no_rights: known.no_rights_until > now,
            fails_after: known.fails_after_until > now,
        };
        known.forbidden_until.retain(|_, until| *until > now);
        let forbidden: BTreeSet<usize> = known.forbidden_until.keys().copied().collect();
        let Server { store, listeners, .. } = known;
        let counted = self.plan.counted;
        let checker = &mut self.checker;
        let mut site = Site {
            homes: &self.homes,
            server,
            now: clock,
            refuses,
            forbidden: &forbidden,
            late,
            listens: &mut |node| {
                !counted || listeners.get(&node).is_some_and(|over| !over.is_empty())
            },
            audit: &mut |step| checker.step(now, step),
            judges: self.plan.scenario != Scenario::Crowd,
            planted: self.plan.planted,
            adapted: Vec::new(),
        };
        let (answers, messages) = store.carry_out(batch, &mut site);
        for step in site.adapted {
            checker.adapted(now, process, &step);
        }
        self.note(|| {
            format!("server {server}: process {process} asks {}=> {}", batch.text(), answers.text())
        });
        self.digest(&[now, answers.digest()]);
        if batch.sets_overrides() {
            self.look_at_overrides();
        }
        for (to, message) in messages {
            self.publish(server, to, &message);
        }
        answers
    }

    fn publish(&mut self, server: usize, to: Option<NodeId>, message: &Message) {
        let now = self.now;
        // News of overrides passes over the servers' bus to every listener.
        let mut receivers: Vec<(usize, u64)> = Vec::new();
        for (number, known) in self.servers.iter().enumerate() {
            match to {
                Some(node) if number == server || matches!(message, Message::Told(..)) => {
                    receivers.extend(known.listeners.get(&node).into_iter().flatten());
                }
                Some(_) => {}
                None => receivers.extend(known.listeners.values().flatten()),
            }
        }
        let known = &self.servers[server];
        let is_lost = known.hints_lost_until > now;
        let is_late = known.hints_late_until > now;
        let is_twice = known.hints_twice_until > now;
        for (process, lane) in receivers {
            self.checker.count("messages");
            if matches!(message, Message::Recall(_)) {
                self.checker.count(if is_lost { "recalls lost" } else { "recalls" });
            }
            if is_lost {
                self.checker.count("messages lost");
                continue;
            }
            let message = Incoming::Message(message.clone());
            if is_twice {
                self.checker.count("messages twice");
                self.deliver(process, lane, message.clone());
            }
            if is_late {
                self.checker.count("messages late");
                let late = self.chance(&[6, self.serial]) % (9000 * MS);
                self.post(process, now + 1000 + late, message);
            } else {
                self.deliver(process, lane, message);
            }
        }
    }

    fn unsubscribe(&mut self, process: usize, lane: u64) {
        let Some(server) = self.lanes.get(&(process, lane)).map(|lane| lane.server) else { return };
        for over in self.servers[server].listeners.values_mut() {
            over.retain(|known| *known != (process, lane));
        }
        self.servers[server].listeners.retain(|_, over| !over.is_empty());
    }

    // ===== faults =====

    fn fault(&mut self, fault: FaultPlan, number: usize) {
        let FaultPlan { lasts, kind, process: slot, server, what, .. } = fault;
        let (now, until) = (self.now, self.now + lasts * MS);
        self.note(|| format!("fault: {fault:?}"));
        self.digest(&[now, kind as u64]);
        self.checker.count(kind.name());
        let homes = self.homes.clone();
        let link = &mut self.links[slot][server];
        let known = &mut self.servers[server];
        match kind {
            Kind::Cut => self.cut(Some(slot), server, number),
            Kind::Stall => link.stalled_until = until,
            Kind::Blackhole => link.swallows_up_until = until,
            Kind::HalfOpen => link.swallows_down_until = until,
            Kind::SlowNetwork => {
                link.slow_until = until;
                link.slow_by = (5 + what % 300) * MS;
            }
            Kind::ConnectFails => {
                link.connect_fails_until = until;
                self.cut(Some(slot), server, number);
            }
            Kind::ConnectSlow => {
                link.connect_slow_until = until;
                self.cut(Some(slot), server, number);
            }
            Kind::HintsLost => known.hints_lost_until = until,
            Kind::HintsLate => known.hints_late_until = until,
            Kind::HintsTwice => known.hints_twice_until = until,
            Kind::PollOnly => {
                link.poll_only_until = until;
                self.cut(Some(slot), server, number);
            }
            Kind::Down => {
                known.down_until = until;
                self.cut(None, server, number);
            }
            Kind::Hangs => known.hangs_until = until,
            Kind::Restart => {
                known.down_until = until;
                known.store.forget();
                known.copies.clear();
                known.generation += 1;
                known.born = until;
                self.cut(None, server, number);
            }
            Kind::Flush => {
                known.store.forget();
                known.copies.clear();
            }
            Kind::Failover => {
                known.down_until = until;
                let at = usize::try_from(what).unwrap_or(0) % known.copies.len().max(1);
                if let Some((_, copy)) = known.copies.get(at) {
                    known.store = copy.clone();
                }
                known.copies.clear();
                known.generation += 1;
                known.born = 0;
                self.cut(None, server, number);
            }
            Kind::NoMemory => known.no_memory_until = until,
            Kind::ReadOnly => known.read_only_until = until,
            Kind::Loading => known.loading_until = until,
            Kind::NoRights => known.no_rights_until = until,
            Kind::Forbidden => {
                let name = usize::try_from(what).unwrap_or(0) % self.plan.names;
                known.forbidden_until.insert(name, until);
            }
            Kind::FailsAfter => known.fails_after_until = until,
            Kind::LateAnswers => known.late_until = until,
            Kind::Move => {
                let name = usize::try_from(what).unwrap_or(0) % (self.plan.names + 1);
                let from = self.homes[name];
                let to =
                    (from + 1 + usize::try_from(what / 7).unwrap_or(0) % (self.plan.servers - 1))
                        % self.plan.servers;
                let mut old = std::mem::take(&mut self.servers[from].store);
                if name == self.plan.names {
                    self.servers[to].store.take_overrides(&mut old);
                } else {
                    old.hand_over(name, &mut self.servers[to].store);
                }
                self.servers[from].store = old;
                self.servers.iter_mut().for_each(|server| server.copies.clear());
                self.homes[name] = to;
                // Two clocks, so lease ends and tickets are off by this much.
                let skew = self.servers[from].clock(now).abs_diff(self.servers[to].clock(now));
                self.checker.disturb(None, from, now, now, &homes);
                self.checker.disturb(None, to, now, now, &self.homes);
                if let Some(name) = Some(name).filter(|name| *name < self.plan.names) {
                    self.checker.moved(name, to, now);
                    self.checker.unsettle(name, now + skew + 3000 * MS);
                    self.checker.data_lost(name, now, now + skew);
                }
                return;
            }
            Kind::ClockStep => {
                let by = (50 + what * 2) * 1000;
                let (forth, back) = if what % 2 == 0 { (by, 0) } else { (0, by) };
                known.offset =
                    known.offset.saturating_add_unsigned(forth).saturating_sub_unsigned(back);
                let lease = self.plan.longest_lease(None) * MS;
                self.checker.disturb(None, server, now, now + lease, &homes);
                self.checker.clock_steps(server, now + lease, back, &homes);
                for name in (0..self.plan.names).filter(|name| homes[*name] == server) {
                    self.checker.data_lost(name, now, now + 2000 * MS);
                }
                return;
            }
            Kind::Crash => {
                if let Some(process) = self.current[slot].take() {
                    // Its host may be gone, too, so that its connections are not closed.
                    let silent = what % 2 == 0;
                    self.kill(process, silent);
                    self.push(until + MS, What::Born(slot));
                }
                return;
            }
            Kind::Freeze | Kind::Suspend | Kind::SlowProcess => {
                if let Some(process) = self.current[slot] {
                    if let Some(process) = &mut self.processes[process] {
                        match kind {
                            Kind::Freeze => process.freezes = Some((50, until)),
                            Kind::Suspend => {
                                process.freezes = Some((50, until));
                                process.suspends = true;
                            }
                            _ => process.slow_until = until,
                        }
                    }
                    self.checker.disturb(Some(slot), server, now, until, &homes);
                }
                return;
            }
            Kind::Leave => {
                if let Some(process) = self.current[slot]
                    && let Some(process) = &mut self.processes[process]
                    && !process.closing
                {
                    process.shut_down();
                    self.push(until + MS, What::Born(slot));
                    self.push(until + 4000 * MS, What::Ends(process_number(&self.current, slot)));
                }
                return;
            }
        }
        if lasts > 0 {
            self.push(until, What::Over(number));
        }
        let clients = match kind {
            Kind::Down
            | Kind::Hangs
            | Kind::Restart
            | Kind::Flush
            | Kind::Failover
            | Kind::NoMemory
            | Kind::ReadOnly
            | Kind::Loading
            | Kind::NoRights
            | Kind::Forbidden
            | Kind::FailsAfter
            | Kind::LateAnswers
            | Kind::HintsLost
            | Kind::HintsLate
            | Kind::HintsTwice => None,
            _ => Some(slot),
        };
        // Late hints come for two more seconds.
        let end = if kind == Kind::HintsLate { until + 2000 * MS } else { until };
        self.checker.disturb(clients, server, now, end, &homes);
        if matches!(
            kind,
            Kind::NoMemory
                | Kind::ReadOnly
                | Kind::Loading
                | Kind::NoRights
                | Kind::Forbidden
                | Kind::FailsAfter
        ) {
            // What was refused for long is tried again just as rarely.
            self.checker.calls_fail(until + lasts.min(REFUSED) * MS);
        }
        if matches!(kind, Kind::Restart | Kind::Flush | Kind::Failover) {
            for name in (0..self.plan.names).filter(|name| homes[*name] == server) {
                self.checker.data_lost(name, now, until);
            }
            if homes[self.plan.names] == server {
                self.checker.numbers_lost();
                // The overrides are lost, and for a while each process applies something else.
                (0..self.plan.names)
                    .for_each(|name| self.checker.unsettle(name, until + 3000 * MS));
            }
        }
    }

    fn over(&mut self, fault: FaultPlan) {
        self.note(|| format!("over: {:?} of {} and {}", fault.kind, fault.process, fault.server));
    }

    fn cut(&mut self, slot: Option<usize>, server: usize, number: usize) {
        let mut lanes: Vec<_> = self
            .lanes
            .iter()
            .filter(|(_, lane)| lane.server == server && slot.is_none_or(|slot| slot == lane.slot))
            .map(|(key, lane)| (*key, lane.slot, lane.open))
            .collect();
        lanes.sort_unstable_by_key(|(key, ..)| *key);
        for ((process, lane), slot, open) in lanes {
            self.unsubscribe(process, lane);
            let after_cut = match self.chance(&[7, number as u64, lane]) % 3 {
                0 => AfterCut::Lost,
                1 => AfterCut::CarriedOut,
                _ => AfterCut::CarriedOutLate,
            };
            if !open {
                continue;
            }
            let at = self.now + self.latency(slot, server, lane, 1 << 41, self.now);
            if let Some(lane) = self.lanes.get_mut(&(process, lane)) {
                lane.open = false;
                lane.after_cut = after_cut;
            }
            self.checker.count("connections cut");
            self.post(process, at, Incoming::Broken { lane });
        }
    }

    // ===== processes =====

    fn start(&mut self, slot: usize) {
        let number = self.processes.len();
        let node = self.chance(&[8, number as u64]);
        let port = Port::new(node, self.plan.quarantine, self.homes.clone(), self.plan.servers)
            .planted(self.plan.planted.filter(|it| slot == 0 || *it == Planted::ForgetsSuspension));
        let layers = if self.is_layered() { &self.plan.policies[slot][..] } else { &[] };
        // A client's fault is planted in one process.
        let planted = self.plan.planted.filter(|planted| {
            matches!(
                planted,
                Planted::Spins
                    | Planted::Hangs
                    | Planted::KeepsPermit
                    | Planted::NeverAnswers
                    | Planted::SaysClosed
                    | Planted::SaysQuarantined
                    | Planted::ForgetsToLinger
                    | Planted::LingersTooLong
                    | Planted::LingersAlways
                    | Planted::KeepsTooLong
                    | Planted::ComesLate
            )
        });
        let process = Process::start(slot, port, self.now, layers, planted);
        self.checker.born(slot, process.port.node());
        self.processes.push(Some(process));
        self.current[slot] = Some(number);
        self.note(|| format!("process {number} starts, as {slot}"));
    }

    fn kill(&mut self, process: usize, silent: bool) {
        self.note(|| format!("process {process} dies"));
        self.checker.died(process, self.now, &self.homes);
        let mut lanes: Vec<_> =
            self.lanes.keys().filter(|(whose, _)| *whose == process).copied().collect();
        lanes.sort_unstable();
        for (process, lane) in lanes {
            if let Some(lane) = self.lanes.get_mut(&(process, lane)) {
                lane.deaf_down = true;
            }
            if !silent {
                self.push(self.now + 1500, What::Closes { process, lane });
            }
        }
        drop(self.processes[process].take());
    }

    /// Notes that a process that was shut down is gone.
    fn end(&mut self, process: usize) {
        if self.processes[process].is_some() {
            self.kill(process, false);
            for current in &mut self.current {
                current.take_if(|current| *current == process);
            }
        }
    }

    // ===== operators =====

    fn operation(&mut self, number: usize) {
        let operation = self.plan.operations[number];
        let Some(process) = self.current[operation.process] else { return };
        self.note(|| format!("operator: {operation:?}"));
        self.checker.count(match operation.deed {
            Deed::SetLimit(_) => "deed: set limit",
            Deed::ClearLimit => "deed: clear limit",
            Deed::Pause => "deed: pause",
            Deed::PauseFor(_) => "deed: pause for",
            Deed::SetRate(..) => "deed: set rate",
            Deed::ClearRate => "deed: clear rate",
            Deed::Resume => "deed: resume",
            Deed::Drain(_) => "deed: drain",
            Deed::Revoke => "deed: revoke",
            Deed::Inspect => "deed: inspect",
            Deed::InspectFleet => "deed: inspect fleet",
            Deed::List => "deed: list",
            Deed::Overrides => "deed: overrides",
        });
        let settles = self.now + 6000 * MS;
        match operation.deed {
            Deed::SetLimit(limit) => {
                self.checker.limit_set(operation.name, limit);
                if limit == 0 {
                    self.checker.pauses(operation.name);
                }
            }
            Deed::Pause => self.checker.pauses(operation.name),
            Deed::PauseFor(ms) => self.checker.asks_for_pause(operation.name, self.now, ms),
            Deed::Resume => self.checker.resumes(operation.name, self.now),
            Deed::Drain(_) => self.checker.drains(operation.name),
            Deed::Revoke => self.checker.revokes(operation.name, self.now),
            _ => {}
        }
        if !matches!(
            operation.deed,
            Deed::Inspect | Deed::InspectFleet | Deed::List | Deed::Overrides
        ) {
            self.checker.unsettle(operation.name, settles);
        }
        let key = self.key(operation.name);
        if let Some(process) = &self.processes[process] {
            process.operate(number, key, operation.deed);
        }
    }

    fn clear(&mut self) {
        if self.plan.operations.is_empty() {
            return;
        }
        let names: Vec<_> = (0..self.plan.names).map(|name| self.key(name)).collect();
        let first = self.living().find(|(_, process)| !process.closing).map(|(number, _)| number);
        if let Some(process) = first.and_then(|number| self.processes[number].as_ref()) {
            process.clear(names);
        }
        for name in 0..self.plan.names {
            self.checker.resumes(name, self.now);
            self.checker.unsettle(name, self.now + 3000 * MS);
        }
    }

    // ===== the checker's eyes =====

    fn look(&mut self) {
        let now = self.now;
        let nodes: Vec<_> = self
            .processes
            .iter()
            .map(|process| process.as_ref().and_then(|process| process.port.node()))
            .collect();
        // By server, name and process; processes that are gone come last.
        let (names, columns) = (self.plan.names, nodes.len() + 1);
        let mut counts = vec![(0_u64, 0_u64); self.servers.len() * names * columns];
        let mut units = vec![0; self.servers.len() * names];
        let mut waiting = vec![Vec::new(); names];
        for (number, known) in self.servers.iter().enumerate() {
            for (name, id, ticket) in known.store.living(known.clock(now)) {
                let waits = ticket.is_some();
                if let Some(ticket) = ticket.filter(|_| self.homes[name] == number) {
                    waiting[name].push((ticket, id));
                }
                let whose = nodes.iter().position(|known| *known == Some(id.node));
                units[number * names + name] += if waits { 0 } else { u64::from(id.cost()) };
                let at = (number * names + name) * columns + whose.unwrap_or(nodes.len());
                if waits {
                    counts[at].1 += 1;
                } else {
                    counts[at].0 += 1;
                }
            }
        }
        self.look_at_overrides();
        for name in 0..names {
            let server = self.homes[name];
            let known = &self.servers[server];
            let keeper = &self.servers[self.homes[names]];
            let set = keeper.store.override_of(name);
            if known.down_until <= now && known.hangs_until <= now {
                let at = (server * names + name) * columns;
                let units = units[server * names + name];
                let seen =
                    Stock { places: &counts[at..at + columns], waiting: &waiting[name], units };
                self.checker.look(now, name, server, seen, set);
            }
        }
    }

    fn look_at_overrides(&mut self) {
        let keeper = &self.servers[self.homes[self.plan.names]];
        for name in 0..self.plan.names {
            let (set, clock) = (keeper.store.override_of(name), keeper.clock(self.now));
            let adapted = keeper.store.adapted_of(name, clock);
            self.checker.look_at_overrides(self.now, name, set, adapted);
        }
    }

    fn probe(&mut self) {
        let processes: Vec<_> =
            self.living().filter(|(_, p)| !p.closing).map(|(number, p)| (number, p.slot)).collect();
        for (number, slot) in processes {
            for name in 0..self.plan.common {
                let plan = RequestPlan {
                    at: self.now / MS + 1,
                    process: slot,
                    name,
                    ask: self.plan.is_fair(name).then_some(PROBE),
                    bound: None,
                    wait: 2 * self.plan.longest_lease(None) + 8000,
                    hold: 5,
                    leaves: None,
                    back: GiveBack::Drop,
                };
                self.probes.push(plan);
                let request = self.checker.add_request();
                let policy =
                    crate::plan::PolicyPlan { max_queue: 10_000, ..self.plan.policies[slot][name] };
                if let Some(process) = &self.processes[number] {
                    process.request(request, plan, &policy, self.is_layered());
                }
            }
        }
        if self.probes.is_empty() {
            // No process is left to ask.
            self.probes.push(RequestPlan {
                at: 0,
                process: 0,
                name: 0,
                ask: None,
                bound: None,
                wait: 0,
                hold: 0,
                leaves: None,
                back: GiveBack::Drop,
            });
        }
    }

    fn finish(&mut self, rest: &[u64]) {
        let now = self.now;
        self.checker.finish(now);
        for number in 0..self.servers.len() {
            let server = &self.servers[number];
            let nodes: Vec<_> = self
                .processes
                .iter()
                .map(|process| process.as_ref().and_then(|process| process.port.node()))
                .collect();
            let left: Vec<_> = server
                .store
                .living(server.clock(now))
                .filter(|(name, id, _)| {
                    let whose = nodes.iter().position(|known| *known == Some(id.node));
                    whose.is_none_or(|whose| !self.checker.lives[whose].has_late(*name, now))
                })
                .collect();
            if let Some((name, ..)) = left.first() {
                let text =
                    format!("server {number} has {} places, of n{name} and others", left.len());
                self.checker.flag("left", now, text);
            }
        }
        let mut findings = Vec::new();
        for (number, process) in self.living() {
            let records = process.records();
            if records > 0 && !process.closing {
                let text = format!("process {number} has records of {records} names in the end");
                findings.push(("records", text));
            }
            if process.port.unanswered_max() > 64 {
                let text = format!(
                    "process {number} had {} writes unanswered",
                    process.port.unanswered_max()
                );
                findings.push(("work: unanswered", text));
            }
        }
        for ((number, process), before) in self.living().zip(rest) {
            // Two for each window of ten ms, and some for reading the overrides each second, because Tokio's timers
            // wake its thread a few times on the way to a far one.
            let parks = (process.parks() - before).saturating_sub(600);
            if parks > 40 * self.plan.servers as u64 + 60 {
                let text = format!("process {number} woke {parks} times in the last 3 s");
                findings.push(("restless", text));
            }
        }
        let health: Vec<_> = self.living().map(|(_, process)| process.health()).collect();
        for (lost, admitted, refused) in health {
            *self.checker.counts.entry("permits lost").or_default() += lost;
            *self.checker.counts.entry("admitted by policy").or_default() += admitted;
            *self.checker.counts.entry("refused by policy").or_default() += refused;
        }
        for (rule, text) in findings {
            self.checker.flag(rule, now, text);
        }
        *self.checker.counts.entry("ms simulated").or_default() += now / MS;
    }
}

fn process_number(current: &[Option<usize>], slot: usize) -> usize {
    current[slot].unwrap_or(0)
}
