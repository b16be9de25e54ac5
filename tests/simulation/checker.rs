//! Watches what each request was answered and what each server holds, and reports what was wrong.

mod adaptive;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fmt;

use foldhash::fast::FixedState;
use tower_semaphore_protocol::{NodeId, PlaceId};

use self::adaptive::Numbers;
use crate::backend::Step;
use crate::plan::{AskPlan, OutagePolicy, Plan, PolicyPlan, Scenario};
use crate::process::{Entry, Refusal, Seen};

const MS: u64 = 1000;
const S: u64 = 1_000_000;
/// How long after a fault a process may be busy with its consequences.
pub const SETTLE: u64 = 2 * S;
/// Within this, each process that reaches the servers knows of a pause, even if the message is lost.
const PAUSE_KNOWN: u64 = 1500 * MS;
/// How long a permit may be idle while a live place waits.
const IDLE: u64 = 2 * S;
/// How long a place may be on a server without a request of its process.
const ORPHAN: u64 = 500 * MS;
/// The same, while a crowd keeps the server busy.
const CROWDED_ORPHAN: u64 = 1500 * MS;
/// How long after its end the place of a request may be on the server.
const ENDED: u64 = 400 * MS;
/// How long the record of a name may be kept after its last request.
const RECORD: u64 = 8 * S;
/// How long a permit may be in use without being counted by its server.
const UNCOUNTED: u64 = 2500 * MS;
/// How long an answer may take beyond its bound.
const SLACK: u64 = 100 * MS;
/// How many refused releases a process keeps for each name, and the last call.
const PUT_OFF: u64 = 4096 + 512;
/// How many places a call may touch: 512 that it names, and 500 others.
const TOUCHED_MAX: u64 = 1012;
/// How long permits are passed on after an answer that no other process waits, as in the crate.
const REUSE: u64 = 50 * MS;
/// How long after a recall a kept permit may be back: the time of a message, and of a call before it.
pub const RECALLED: u64 = 40 * MS;
/// How long after a fault the first call of a new connection may come.
const CONNECTS: u64 = 500 * MS;
/// The answer timeout, as in the crate.
const ANSWER_TIMEOUT: u64 = S;

/// A broken rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The name of the rule.
    pub rule: &'static str,
    /// When it was broken, in µs.
    pub at: u64,
    /// How it was broken.
    pub text: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.at / MS;
        write!(f, "{} at {ms} ms: {}", self.rule, self.text)
    }
}

#[derive(Clone, Copy, Debug)]
struct Request {
    process: usize,
    name: usize,
    ask: Option<AskPlan>,
    wait: u64,
    begun: u64,
    frozen: u64,
    granted: Option<u64>,
    /// Whether it had a permit at once, without a call to the backend.
    is_handed: bool,
    over: bool,
}

impl Request {
    fn cost(&self) -> u64 {
        self.ask.map_or(1, |ask| u64::from(ask.cost))
    }
}

/// The pauses of a name until a time.
#[derive(Clone, Debug, Default)]
struct Pauses {
    /// The longest that was asked for, in ms.
    longest: u64,
    /// From when on all processes know of one, unless something is wrong, and when it ends.
    recorded: Vec<(u64, u64)>,
    resumed: Vec<u64>,
}

/// What is known of a process.
#[derive(Clone, Debug)]
pub struct Life {
    /// Which of the plan's processes it is, or replaces.
    pub slot: usize,
    node: Option<NodeId>,
    /// By name, since when each of its calls is answered that another process waits.
    others_wait: Vec<Option<u64>>,
    /// When recalls came, kept for a while.
    recalls: Vec<VecDeque<u64>>,
    /// Its waiting requests, in the order of their arrival.
    queues: Vec<BTreeSet<(u64, usize)>>,
    /// Since when it has had places of requests that ended long before.
    keeps: Vec<Option<u64>>,
    /// When a request of it last waited, by name.
    waited: Vec<u64>,
    /// Its open requests, by name.
    alive: Vec<u64>,
    /// When requests ended, kept for a while.
    ended: Vec<VecDeque<u64>>,
    /// Lingering permits, and those that lingered until lately, by name.
    lingering: Vec<VecDeque<Lingering>>,
    /// When the lingers of broken-off requests end, each with a release of its own.
    linger_ends: VecDeque<u64>,
    /// Until when places may exist that were taken late, or that a shutdown left to their leases.
    late: Vec<u64>,
    /// When the last one existed.
    used: Vec<u64>,
    /// Those of them that have a permit, and the number of these permits.
    believed: Vec<u64>,
    units: Vec<u64>,
    /// By name, since when its server has more of its places than it has requests.
    orphans: Vec<Option<u64>>,
    /// By name, since when its server has fewer of its places than it has permits.
    uncounted: Vec<Option<u64>>,
    /// Whether it runs.
    pub lives: bool,
    /// Whether it was reported for keeping too many records.
    hoards: bool,
    /// Whether it was shut down.
    pub closing: bool,
    /// Whether it runs again after it stood still.
    pub awake_since: u64,
    /// How long it has stood still so far, in µs.
    pub frozen: u64,
    /// What it did in this second.
    events: u64,
    handed: u64,
    calls: u64,
    named: u64,
    connects: u64,
    /// The servers that it has been connected to, or has tried to reach.
    known: BTreeSet<usize>,
    /// Requests that its policies have admitted, up to this second.
    admitted: u64,
}

impl Life {
    /// Whether places of a name may exist that were taken over connections that are gone.
    #[must_use]
    pub fn has_late(&self, name: usize, at: u64) -> bool {
        self.late[name] > at
    }
}

/// A loss of data.
#[derive(Clone, Copy, Debug)]
struct Loss {
    /// The interval in which it may show.
    begin: u64,
    until: u64,
    /// The permits in use when it happened. Newcomers are admitted beside these.
    in_use: u64,
}

impl Loss {
    const fn shows(&self, at: u64) -> bool {
        self.begin <= at && at <= self.until
    }
}

/// How late a process may notify a holder that its permit is lost.
const TOLD: u64 = 10 * MS;

/// A lingering permit, whose request was broken off.
#[derive(Clone, Copy, Debug)]
struct Lingering {
    /// Until when it is counted at least, in µs.
    until: u64,
    /// The number of permits.
    units: u64,
    /// Whether its process could renew its lease before, so that the server counts it even if the process dies.
    is_certain: bool,
}

/// The bounds of the claims of a name's requests, if they name tenants.
#[derive(Clone, Copy, Debug)]
struct Terms {
    /// The highest cost of a request.
    cost: u64,
    /// The most permits that are reserved for class 0.
    headroom: u64,
    /// Whether tenants have caps, or requests further limits.
    is_capped: bool,
    /// Its requests start by time.
    /// Whether time keeps some of its requests back: they have a rate or a budget.
    is_rated: bool,
}

/// What a server has of a name.
#[derive(Clone, Copy, Debug)]
pub struct Stock<'a> {
    /// For each process, the number of places that hold and that wait; processes that are gone come last.
    pub places: &'a [(u64, u64)],
    /// The waiting places, with their tickets.
    pub waiting: &'a [(u64, PlaceId)],
    /// Permits in use.
    pub units: u64,
}

/// Watches a run.
#[derive(Debug)]
pub struct Checker {
    /// The broken rules.
    pub violations: Vec<Violation>,
    /// How often each kind of event occurred.
    pub counts: BTreeMap<&'static str, u64>,
    /// The processes, including those that are gone.
    pub lives: Vec<Life>,
    names: usize,
    scenario: Scenario,
    requests: Vec<Option<Request>>,
    /// By process of the plan and server: the disturbances, in µs.
    disturbed: Vec<Vec<Vec<(u64, u64)>>>,
    /// By name: when data was lost.
    losses: Vec<Vec<Loss>>,
    /// By name: until when the cap is not checked.
    uncapped: Vec<u64>,
    /// By name: until when local shares may be in use in addition.
    local: Vec<u64>,
    /// By name: the highest and the lowest limit in force.
    limits: Vec<(u32, u32)>,
    /// By name: when an operator last set something, or data moved.
    unsettled: Vec<u64>,
    idle_since: Vec<Option<u64>>,
    terms: Vec<Terms>,
    /// By name: the lowest limit that an operator set, and the smallest local share.
    least_set: Vec<u32>,
    least_shares: Vec<Option<u64>>,
    /// By name: the longest lease of all processes. By process of the plan and name: its own lease.
    leases: Vec<u64>,
    own_leases: Vec<Vec<u64>>,
    /// By process of the plan and name: how long permits linger.
    lingers: Vec<Vec<u64>>,
    /// By process of the plan and name: whether permits are passed on.
    reuses: Vec<Vec<bool>>,
    shares: Vec<u64>,
    admits: Vec<bool>,
    paused: Vec<bool>,
    pauses: Vec<Pauses>,
    drained: Vec<bool>,
    revoked: Vec<bool>,
    revocations: Vec<Vec<u64>>,
    call_errors_until: u64,
    quarantine: bool,
    /// By name: its limit, if it finds itself.
    numbers: Vec<Option<Numbers>>,
    /// Whether the clock of a server was set.
    is_clock_set: bool,
}

impl Checker {
    /// Creates the checker of a plan.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let policies = |name: usize| plan.policies.iter().map(move |own| own[name]);
        let names = plan.names;
        let pauses = |name: usize| {
            // A refusal can be noted before the answer that asked for the pause.
            let longest = policies(name).filter_map(|policy| policy.backoff).max().unwrap_or(0);
            Pauses { longest, ..Pauses::default() }
        };
        let share = |name: usize| {
            policies(name)
                .map(|policy| match policy.outage {
                    OutagePolicy::Local(share) => u64::from(share),
                    _ => 0,
                })
                .sum()
        };
        Self {
            violations: Vec::new(),
            counts: BTreeMap::new(),
            lives: Vec::new(),
            names,
            scenario: plan.scenario,
            requests: vec![None; plan.requests.len()],
            disturbed: vec![vec![Vec::new(); plan.servers]; plan.processes],
            losses: vec![Vec::new(); names],
            uncapped: vec![0; names],
            local: vec![0; names],
            limits: (0..names)
                .map(|name| {
                    let limits = || plan.bounds(name).map(|(limit, _)| limit);
                    // A request that costs more than the lowest adaptive limit never fits.
                    let lowest = policies(name).filter_map(|policy| Some(policy.adaptive?.min));
                    let least = limits().chain(lowest).min();
                    (limits().max().unwrap_or(0), least.unwrap_or(0))
                })
                .collect(),
            unsettled: vec![0; names],
            idle_since: vec![None; names],
            least_set: vec![u32::MAX; names],
            least_shares: (0..names)
                .map(|name| {
                    let share = |policy: &PolicyPlan| match policy.outage {
                        OutagePolicy::Local(share) => Some(u64::from(share)),
                        _ => None,
                    };
                    policies(name).filter_map(|policy| share(&policy)).min()
                })
                .collect(),
            terms: (0..names)
                .map(|name| {
                    let requests = plan.requests.iter().filter(|request| request.name == name);
                    let asks: Vec<_> = requests.filter_map(|request| request.ask).collect();
                    Terms {
                        cost: asks.iter().map(|ask| u64::from(ask.cost)).max().unwrap_or(1),
                        headroom: plan
                            .bounds(name)
                            .map(|(_, headroom)| u64::from(headroom))
                            .max()
                            .unwrap_or(0),
                        is_capped: asks.iter().any(|ask| ask.each > 0 || ask.also != [None; 2]),
                        is_rated: policies(name).any(|policy| policy.rate.is_some())
                            || asks.iter().any(|ask| ask.budget.is_some()),
                    }
                })
                .collect(),
            leases: (0..names).map(|name| plan.longest_lease(Some(name)) * MS).collect(),
            own_leases: plan
                .policies
                .iter()
                .map(|own| own.iter().map(|policy| policy.lease * MS).collect())
                .collect(),
            lingers: plan
                .policies
                .iter()
                .map(|own| own.iter().map(|policy| policy.linger * MS).collect())
                .collect(),
            reuses: plan
                .policies
                .iter()
                .map(|own| own.iter().map(|policy| policy.reuse).collect())
                .collect(),
            shares: (0..names).map(share).collect(),
            admits: (0..names)
                .map(|name| policies(name).any(|policy| policy.outage == OutagePolicy::Admit))
                .collect(),
            paused: vec![false; names],
            pauses: (0..names).map(pauses).collect(),
            drained: vec![false; names],
            revoked: vec![false; names],
            revocations: vec![Vec::new(); names],
            call_errors_until: 0,
            quarantine: plan.quarantine,
            numbers: (0..names).map(|name| Numbers::new(plan, name)).collect(),
            is_clock_set: false,
        }
    }

    /// Counts an event.
    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Reports a broken rule.
    pub fn flag(&mut self, rule: &'static str, at: u64, text: String) {
        self.violations.push(Violation { rule, at, text });
    }

    // ===== what happens =====

    /// Notes that a process starts.
    pub fn born(&mut self, slot: usize, node: Option<NodeId>) {
        self.lives.push(Life {
            slot,
            node,
            others_wait: vec![None; self.names],
            recalls: vec![VecDeque::new(); self.names],
            queues: vec![BTreeSet::new(); self.names],
            keeps: vec![None; self.names],
            waited: vec![0; self.names],
            alive: vec![0; self.names],
            ended: vec![VecDeque::new(); self.names],
            lingering: vec![VecDeque::new(); self.names],
            linger_ends: VecDeque::new(),
            late: vec![0; self.names],
            used: vec![0; self.names],
            believed: vec![0; self.names],
            units: vec![0; self.names],
            orphans: vec![None; self.names],
            uncounted: vec![None; self.names],
            lives: true,
            hoards: false,
            closing: false,
            awake_since: 0,
            frozen: 0,
            events: 0,
            handed: 0,
            calls: 0,
            named: 0,
            connects: 0,
            known: BTreeSet::new(),
            admitted: 0,
        });
    }

    /// Notes that a process is gone, and with it everything that it was doing.
    pub fn died(&mut self, process: usize, at: u64, home: &[usize]) {
        for number in 0..self.requests.len() {
            let open = self.requests[number].filter(|r| r.process == process && !r.over);
            let Some(request) = open else { continue };
            if request.granted.is_some() && !self.lives[process].closing {
                self.breaks_off(&request, at, home[request.name], "broken off by a crash");
            }
            self.requests[number] = Some(Request { over: true, ..request });
        }
        self.lives[process].lives = false;
    }

    /// Notes that a process shuts down. Permits that may linger are left to their leases.
    pub fn shuts_down(&mut self, process: usize, at: u64) {
        let life = &mut self.lives[process];
        life.closing = true;
        for name in 0..self.names {
            if self.lingers[life.slot][name] > 0 {
                life.late[name] = life.late[name].max(at + self.own_leases[life.slot][name]);
            }
        }
    }

    /// Notes that a request with a permit is broken off: the permit lingers from now on.
    fn breaks_off(&mut self, request: &Request, at: u64, server: usize, how: &'static str) {
        let (process, name) = (request.process, request.name);
        let linger = self.lingers[self.lives[process].slot][name];
        if linger == 0 {
            return;
        }
        self.count(how);
        let is_certain = self.settled_since(process, name, server) < at;
        let life = &mut self.lives[process];
        let until = at + linger;
        life.used[name] = life.used[name].max(until);
        life.linger_ends.push_back(until);
        life.lingering[name].push_back(Lingering { until, units: request.cost(), is_certain });
    }

    /// Returns since when a process's places of a name have been on its server as the process assumes.
    fn settled_since(&self, process: usize, name: usize, server: usize) -> u64 {
        self.quiet_since(process, server)
            .max(self.unsettled[name])
            .max(self.uncapped[name])
            .max(self.call_errors_until)
    }

    /// Notes that a process of the plan, or each, may be unable to reach a server from `begin` to `end`.
    pub fn disturb(
        &mut self,
        slot: Option<usize>,
        server: usize,
        begin: u64,
        end: u64,
        home: &[usize],
    ) {
        for (at, servers) in self.disturbed.iter_mut().enumerate() {
            if slot.is_none_or(|slot| slot == at) {
                servers[server].push((begin, end));
            }
        }
        for name in (0..self.names).filter(|name| home[*name] == server) {
            self.answers_itself(name, end);
        }
    }

    /// Notes that a name has moved to a server that may be disturbed.
    pub fn moved(&mut self, name: usize, server: usize, at: u64) {
        let ends = self.disturbed.iter().flat_map(|servers| &servers[server]);
        let last = ends.filter(|(begin, end)| *begin <= at && at < *end).map(|(_, end)| *end).max();
        if let Some(end) = last {
            self.answers_itself(name, end);
        }
    }

    /// Notes that policies may answer requests for a name until then.
    fn answers_itself(&mut self, name: usize, end: u64) {
        if self.admits[name] {
            self.uncapped[name] = self.uncapped[name].max(end + SETTLE);
        }
        self.local[name] = self.local[name].max(end + SETTLE);
    }

    /// Notes that a server's clock is set, back by this much or forward. Leases then end sooner or later than their
    /// holders assume.
    pub fn clock_steps(&mut self, server: usize, until: u64, back: u64, home: &[usize]) {
        self.is_clock_set = true;
        for name in (0..self.names).filter(|name| home[*name] == server) {
            self.uncapped[name] = self.uncapped[name].max(until + SETTLE);
            // No process renews these, so they last that much longer.
            self.lives.iter_mut().for_each(|life| life.late[name] += back);
        }
    }

    /// Notes that a place was taken over a connection that is gone. It may exist for a lease that no process knows of.
    pub fn taken_late(&mut self, process: usize, name: usize, at: u64) {
        let until = at + self.leases[name];
        let late = &mut self.lives[process].late[name];
        *late = (*late).max(until);
    }

    /// Notes that calls fail until then.
    pub fn calls_fail(&mut self, until: u64) {
        self.call_errors_until = self.call_errors_until.max(until + SETTLE);
    }

    /// Notes that a server loses data of a name, and is back at `end`.
    pub fn data_lost(&mut self, name: usize, begin: u64, end: u64) {
        let until = end + self.leases[name] + SETTLE;
        let in_use = self.in_use(name, begin);
        self.losses[name].push(Loss { begin, until, in_use });
        self.lives.iter_mut().for_each(|life| life.others_wait[name] = None);
        // No process shows a proof for the places that these left.
        for life in self.lives.iter_mut().filter(|life| !life.lives || life.closing) {
            life.lingering[name].iter_mut().for_each(|permit| permit.is_certain = false);
        }
        let quarantine = if self.quarantine { self.leases[name] } else { 0 };
        self.unsettle(name, end + quarantine + SETTLE);
    }

    /// Notes that the limit in force for a name is uncertain until then.
    pub fn unsettle(&mut self, name: usize, until: u64) {
        self.unsettled[name] = self.unsettled[name].max(until);
    }

    /// Notes that all servers may have lost data before the beginning.
    pub fn quarantine(&mut self) {
        for name in 0..self.leases.len() {
            self.unsettle(name, self.leases[name] + SETTLE);
        }
    }

    /// Notes that an operator sets a limit.
    pub fn limit_set(&mut self, name: usize, limit: u32) {
        self.set_instead(name, limit);
        self.limits[name].0 = self.limits[name].0.max(limit);
        self.least_set[name] = self.least_set[name].min(limit);
    }

    /// Notes that an operator pauses a name, or sets its limit to 0.
    pub fn pauses(&mut self, name: usize) {
        self.paused[name] = true;
    }

    /// Notes that a pause for a time is asked for.
    pub fn asks_for_pause(&mut self, name: usize, at: u64, ms: u64) {
        let pauses = &mut self.pauses[name];
        pauses.longest = pauses.longest.max(ms);
        // Whatever else is set meanwhile.
        self.unsettle(name, at + ms * MS + PAUSE_KNOWN + SETTLE);
    }

    /// Notes that a pause for a time was asked for at `at - took`, and is recorded.
    pub fn is_paused(&mut self, process: usize, name: usize, (at, took): (u64, u64), ms: u64) {
        if (0..self.disturbed[0].len()).all(|server| self.quiet_since(process, server) < at - took)
        {
            self.pauses[name].recorded.push((at + PAUSE_KNOWN, at - took + ms * MS));
        }
    }

    /// Notes that an operator ends a pause.
    pub fn resumes(&mut self, name: usize, at: u64) {
        self.pauses[name].resumed.push(at);
    }

    /// Returns whether a request that came while everybody knew of a pause has a permit in it.
    fn is_granted_in_pause(&self, process: usize, request: &Request, at: u64) -> bool {
        let pauses = &self.pauses[request.name];
        let servers = self.disturbed[0].len();
        pauses.recorded.iter().any(|(known, end)| {
            let is_in = *known <= request.begun && at < *end;
            let since = known.saturating_sub(PAUSE_KNOWN);
            is_in
                && !pauses
                    .resumed
                    .iter()
                    .any(|resumed| *resumed + PAUSE_KNOWN > since && *resumed < at)
                && (0..servers).all(|server| self.quiet_since(process, server) < since)
        })
    }

    /// Notes that an operator drains a name.
    pub fn drains(&mut self, name: usize) {
        self.drained[name] = true;
    }

    /// Notes that an operator revokes a place.
    pub fn revokes(&mut self, name: usize, at: u64) {
        self.revoked[name] = true;
        self.revocations[name].push(at);
    }

    /// Notes that a process sent calls, or opened a connection.
    pub fn sent(&mut self, process: usize, (calls, places): (usize, usize), connects: u64) {
        let life = &mut self.lives[process];
        life.calls += calls as u64;
        life.named += places as u64;
        life.connects += connects;
    }

    /// Notes that a process opens a connection to a server: it lost the previous one, or could not open it.
    pub fn connects(&mut self, process: usize, server: usize, at: u64) {
        if self.lives[process].known.insert(server) {
            return;
        }
        let quiet = self.quiet_since(process, server).max(self.call_errors_until);
        if quiet < at && !self.lives[process].closing {
            let text = format!(
                "process {process} connects to server {server} again, and nothing was wrong"
            );
            self.flag("work: reconnects", at, text);
        }
    }

    /// Returns since when nothing has kept a process from reaching a server.
    fn quiet_since(&self, process: usize, server: usize) -> u64 {
        let life = &self.lives[process];
        let disturbed = &self.disturbed[life.slot][server];
        disturbed
            .iter()
            .map(|(_, end)| end + SETTLE)
            .max()
            .unwrap_or(0)
            .max(life.awake_since + SETTLE)
    }

    // ===== servers =====

    /// Notes since when each reply to a process has said that others wait.
    fn follow_waiters(&mut self, at: u64, step: &Step<'_>) {
        let mut nodes: Vec<NodeId> = Vec::new();
        if step.after.waiting() > 0 {
            for (id, _, ticket) in step.after.places() {
                if ticket.is_some() && !nodes.contains(&id.node) {
                    nodes.push(id.node);
                }
            }
        }
        for life in &mut self.lives {
            let is_so = nodes.iter().any(|node| Some(*node) != life.node);
            since(&mut life.others_wait[step.name], is_so, at);
        }
    }

    /// Notes that a recall came to a process.
    pub fn recalled(&mut self, process: usize, name: usize, at: u64) {
        let recalls = &mut self.lives[process].recalls[name];
        recalls.push_back(at);
        if recalls.len() > 100 {
            recalls.pop_front();
        }
    }

    /// Checks, some time after a recall, that what the process kept is back if another process still waits. `places`
    /// are those that its server has of it.
    pub fn after_recall(
        &mut self,
        (process, name): (usize, usize),
        server: usize,
        came: u64,
        at: u64,
        places: u64,
    ) {
        let settled = self.settled_since(process, name, server);
        let life = &self.lives[process];
        let is_over = life.others_wait[name].is_none_or(|since| since > came);
        if is_over || !life.lives || life.closing || settled.max(life.late[name]) >= came {
            return;
        }
        let ended = life.ended[name].iter().filter(|end| **end >= came).count() as u64;
        let known = life.alive[name] + ended + life.lingering[name].len() as u64;
        self.count("recalls looked at");
        if places > known {
            let text = format!(
                "process {process} has {places} places of n{name} and {known} requests, {} ms after a recall",
                (at - came) / MS
            );
            self.flag("recall", at, text);
        }
    }

    /// Checks a request that has a permit of which the backend knows nothing.
    fn passed_on(
        &mut self,
        process: usize,
        number: usize,
        request: &Request,
        at: u64,
        server: usize,
    ) {
        let name = request.name;
        let settled = self.settled_since(process, name, server);
        let life = &self.lives[process];
        // A process that stood still may have heard of it before; and its policy may admit requests.
        if life.awake_since + 10 * MS > at || !self.reuses[life.slot][name] || request.wait == 0 {
            return;
        }
        let others = life.others_wait[name];
        let by_time = others.filter(|since| since + REUSE <= at);
        let by_recall = others.and_then(|since| {
            life.recalls[name].iter().find(|came| (since..at).contains(came)).copied()
        });
        let older = life.queues[name].first().copied();
        // While a server cannot be asked, a policy may also admit requests of which the server knows nothing.
        let may_admit = self.admits[name] || self.shares[name] > 0;
        // A process does not know that its places are gone before it renews them.
        let is_lost = self.losses[name].iter().any(|loss| loss.shows(at));
        let is_clean = settled < at || !(may_admit || is_lost);
        self.count(if request.begun == at { "kept permits used" } else { "permits passed on" });
        if let Some(since) = by_time.filter(|_| is_clean) {
            let text = format!(
                "request {number} of process {process} had a permit of n{name} passed on, and others wait for {} ms",
                (at - since) / MS
            );
            self.flag("passed by", at, text);
        }
        if let Some(came) = by_recall.filter(|_| is_clean) {
            let text = format!(
                "request {number} of process {process} had a permit of n{name} passed on, {} ms after a recall",
                (at - came) / MS
            );
            self.flag("recall", at, text);
        }
        if let Some((begun, older)) = older
            && begun + SLACK < request.begun
            && settled < begun
        {
            let text = format!(
                "request {number} of process {process} had a permit of n{name} passed on before request {older}"
            );
            self.flag("own order", at, text);
        }
    }

    /// Checks an operation that was carried out.
    pub fn step(&mut self, at: u64, step: &Step<'_>) {
        self.follow_waiters(at, step);
        self.limit_of_call(at, step);
        let count = step.after.count();
        // The places that it names, and those that it sweeps, grants or passes over. Those that are passed over for
        // nothing were posted and removed.
        let swept = step.count_before.saturating_sub(count + step.leaving as u64);
        let touched = step.ids as u64 + swept.max(step.passed as u64);
        let most = self.counts.entry("most places touched by a call").or_default();
        *most = touched.max(*most);
        if touched > TOUCHED_MAX {
            let text = format!("{} touched {touched} places of n{}", step.op, step.name);
            self.flag("work: places", at, text);
        }
        let for_all = step.for_all.then_some(step.limit);
        let room = |id| crate::fair::room(id, for_all, (step.limit, 0));
        let is_free = step.after.waiting() > 0 && step.after.in_use() < u64::from(step.limit);
        let is_idle = is_free && {
            let waiting = step.after.places().filter_map(|(id, _, ticket)| Some((ticket?, id)));
            waiting.min().is_some_and(|(_, first)| step.after.in_use() < room(first))
        };
        if let Some(breach) = &step.turns {
            self.count("turns judged");
            if let Some((rule, text)) = breach {
                self.flag(rule, at, format!("{} of n{}: {text}", step.op, step.name));
            }
        } else if step.promotes && !step.more && is_idle {
            let (waiting, in_use) = (step.after.waiting(), step.after.in_use());
            let text = format!(
                "{} left n{} with {waiting} waiting and {in_use} of {} in use",
                step.op, step.name, step.limit
            );
            self.flag("idle in the server", at, text);
        }
        let Some(before) = step.before else { return };
        // If none can join, each that is granted no longer waits.
        if matches!(step.op, "renew" | "release") && step.waiting_before == step.after.waiting() {
            return;
        }
        let known: HashMap<PlaceId, Option<u64>, FixedState> =
            before.iter().map(|(id, _, ticket)| (*id, *ticket)).collect();
        let mut held = 0;
        let mut news = 0;
        let (mut granted, mut new_units) = (Vec::new(), 0);
        let mut last_granted = None;
        let mut first_waiting: Option<(u64, PlaceId)> = None;
        for (id, end, ticket) in step.after.places() {
            let was = known.get(&id);
            match ticket {
                None => {
                    held += if end > step.now { u64::from(id.cost()) } else { 0 };
                    match was {
                        Some(None) => {}
                        Some(Some(ticket)) => {
                            news += 1;
                            granted.push((*ticket, id));
                            last_granted = last_granted.max(Some((*ticket, id)));
                        }
                        None => {
                            news += 1;
                            new_units += u64::from(id.cost());
                            last_granted = Some((u64::MAX, id));
                        }
                    }
                }
                Some(ticket) if end > step.now && was == Some(&Some(ticket)) => {
                    let this = (ticket, id);
                    first_waiting = Some(first_waiting.map_or(this, |first| first.min(this)));
                }
                Some(_) => {}
            }
        }
        // Newcomers, by the limit of the call.
        if new_units > 0 && !step.proves && held > u64::from(step.limit) {
            let text = format!(
                "{} granted {news} of n{}: {held} of {} in use",
                step.op, step.name, step.limit
            );
            self.flag("cap in the server", at, text);
        }
        // Each that waited, by its own limit, together with those granted before it and without those that came after
        // it.
        granted.sort_unstable();
        let mut then = step.after.in_use().saturating_sub(new_units);
        for (_, id) in granted.iter().rev().filter(|_| !step.proves && step.turns.is_none()) {
            if then > room(*id) {
                let text = format!("{} granted {id} of n{} as one of {then}", step.op, step.name);
                self.flag("cap in the server", at, text);
            }
            then = then.saturating_sub(u64::from(id.cost()));
        }
        if let (Some(granted), Some(waiting)) = (last_granted, first_waiting)
            && granted > waiting
            && !step.proves
            && step.turns.is_none()
        {
            let text =
                format!("{} granted {granted:?} of n{} before {waiting:?}", step.op, step.name);
            self.flag("order", at, text);
        }
    }

    // ===== requests =====

    /// Adds a probe, a request that must be served.
    pub fn add_request(&mut self) -> usize {
        self.requests.push(None);
        self.requests.len() - 1
    }

    /// Returns the number of open requests.
    #[must_use]
    pub fn open(&self) -> usize {
        self.requests.iter().flatten().filter(|request| !request.over).count()
    }

    /// Notes what a request saw.
    pub fn saw(
        &mut self,
        process: usize,
        (name, ask): (usize, Option<AskPlan>),
        wait: u64,
        layered: bool,
        entry: &Entry,
        home: &[usize],
    ) {
        let Entry { at, number, seen } = *entry;
        let server = home[name];
        if self.requests[number].is_none_or(|request| !request.is_handed) {
            self.lives[process].events += 1;
        }
        if seen == Seen::Begins {
            self.count("requests");
            if let Some(ask) = ask {
                self.count("requests of tenants");
                if ask.cost > 1 {
                    self.count("requests for several permits");
                }
            }
            let frozen = self.lives[process].frozen;
            let request = Request {
                process,
                name,
                ask,
                wait: wait * MS,
                begun: at,
                frozen,
                granted: None,
                is_handed: false,
                over: false,
            };
            if wait > 0 {
                self.lives[process].queues[name].insert((at, number));
            }
            self.requests[number] = Some(request);
            self.lives[process].alive[name] += 1;
            return;
        }
        let Some(request) = self.requests[number] else { return };
        if request.over && !matches!(seen, Seen::Released(..)) {
            return;
        }
        let frozen = self.lives[process].frozen - request.frozen;
        let elapsed = at.saturating_sub(request.begun);
        match seen {
            Seen::Granted { is_own } => {
                self.answered(number, &request, elapsed, frozen, at);
                if self.is_granted_in_pause(process, &request, at) {
                    let text = format!("request {number} of n{name} has a permit in a pause");
                    self.flag("pause", at, text);
                }
                let is_handed = is_own && request.begun == at;
                if let Some(request) = &mut self.requests[number] {
                    (request.granted, request.is_handed) = (Some(at), is_handed);
                }
                let life = &mut self.lives[process];
                if life.queues[name].remove(&(request.begun, number)) {
                    life.waited[name] = at;
                }
                if is_handed {
                    // It made no call when it came, and may make one when it leaves.
                    life.events = life.events.saturating_sub(2);
                }
                if is_own {
                    self.passed_on(process, number, &request, at, server);
                }
                self.count("granted");
                self.lives[process].believed[name] += 1;
                self.lives[process].units[name] += request.cost();
                self.cap(name, at);
            }
            Seen::Refused(refusal) if request.granted.is_none() => {
                self.answered(number, &request, elapsed, frozen, at);
                self.refused(number, &request, refusal, elapsed, layered, at, server);
                self.over(number, at);
            }
            Seen::Refused(_) | Seen::Lost => {
                self.count("lost");
                self.lost(number, &request, at, server);
                if self.lives[process].closing {
                    self.breaks_off(&request, at, server, "broken off by a shutdown");
                }
                self.over(number, at);
            }
            Seen::Leaves => {
                self.count("left");
                if request.granted.is_some() {
                    self.breaks_off(&request, at, server, "broken off before the response");
                }
                self.over(number, at);
            }
            Seen::GivesBack => self.over(number, at),
            Seen::TooMany => {
                self.count("refused by the upstream");
                self.upstream_refused(process, name, request.granted.unwrap_or(at));
            }
            Seen::BacksOff(ms) => {
                self.count("backed off");
                self.upstream_refused(process, name, request.granted.unwrap_or(at));
                self.asks_for_pause(name, at, ms);
            }
            Seen::BreaksOff => {
                let how = if layered { "broken off in the response" } else { "broken off" };
                self.breaks_off(&request, at, server, how);
                self.over(number, at);
            }
            Seen::Released(took, well) => {
                self.count(if well { "released" } else { "release failed" });
                if took > ANSWER_TIMEOUT + SLACK + frozen {
                    let text = format!("release of request {number} took {} ms", took / MS);
                    self.flag("answer", at, text);
                }
                let quiet = self.quiet_since(process, server) < at.saturating_sub(2 * S);
                if !well && quiet && at > self.call_errors_until && at > self.unsettled[name] {
                    let text = format!("release of request {number} failed, and nothing was wrong");
                    self.flag("release", at, text);
                }
            }
            Seen::Spins => {
                let text = format!("request {number} was polled and polled, and no time passed");
                self.flag("spin", at, text);
                self.over(number, at);
            }
            _ => {}
        }
    }

    fn over(&mut self, number: usize, at: u64) {
        let Some(request) = &mut self.requests[number] else { return };
        if std::mem::replace(&mut request.over, true) {
            return;
        }
        let life = &mut self.lives[request.process];
        if life.queues[request.name].remove(&(request.begun, number)) {
            life.waited[request.name] = at;
        }
        life.alive[request.name] -= 1;
        life.ended[request.name].push_back(at);
        life.used[request.name] = life.used[request.name].max(at);
        life.handed += u64::from(request.is_handed);
        if request.granted.is_some() {
            life.believed[request.name] -= 1;
            life.units[request.name] -= request.cost();
        }
    }

    fn answered(&mut self, number: usize, request: &Request, elapsed: u64, frozen: u64, at: u64) {
        let bound = request.wait + ANSWER_TIMEOUT + SLACK + frozen;
        if elapsed > bound {
            let text = format!(
                "request {number} was answered after {} ms; its bound was {} ms",
                elapsed / MS,
                bound / MS
            );
            self.flag("answer", at, text);
        }
    }

    #[expect(clippy::too_many_arguments, reason = "each is a thing of its own")]
    fn refused(
        &mut self,
        number: usize,
        request: &Request,
        refusal: Refusal,
        elapsed: u64,
        layered: bool,
        at: u64,
        server: usize,
    ) {
        let (process, name, wait) = (request.process, request.name, request.wait);
        self.count(match refusal {
            Refusal::Limit => "refused: limit",
            Refusal::QueueFull => "refused: queue full",
            Refusal::QueueTimeout => "refused: queue timeout",
            Refusal::Quarantine => "refused: quarantine",
            Refusal::Paused => "refused: paused",
            Refusal::Draining => "refused: draining",
            Refusal::UpstreamPause => "refused: upstream pause",
            Refusal::Revoked => "refused: revoked",
            Refusal::TenantLimit => "refused: tenant limit",
            Refusal::FurtherLimit => "refused: further limit",
            Refusal::CostTooHigh => "refused: cost too high",
            Refusal::Rate => "refused: rate",
            Refusal::Unavailable { .. } => "refused: unavailable",
            Refusal::Closed => "refused: closed",
            Refusal::Status(400) => "refused: 400",
            Refusal::Status(429) => "refused: 429",
            Refusal::Status(503) => "refused: 503",
            Refusal::Status(_) => "refused: other",
        });
        let say = |what: &str| {
            format!(
                "request {number} of n{name}, wait {} ms, was told {refusal:?} after {} ms{what}",
                wait / MS,
                elapsed / MS
            )
        };
        match refusal {
            Refusal::Limit if wait > 0 => self.flag("refusal", at, say(", though it may wait")),
            Refusal::Rate if wait > 0 || !self.terms[name].is_rated => {
                self.flag("refusal", at, say(", though it may wait, or has no rate"));
            }
            Refusal::QueueTimeout if elapsed < wait || wait == 0 => {
                self.flag("refusal", at, say(", too early"));
            }
            Refusal::Quarantine if !self.quarantine => {
                self.flag("refusal", at, say(", and no loss begins a quarantine"));
            }
            Refusal::Paused if !self.paused[name] => {
                self.flag("refusal", at, say(", and nobody pauses"));
            }
            Refusal::UpstreamPause if self.pauses[name].longest == 0 => {
                self.flag("refusal", at, say(", and no pause was asked for"));
            }
            Refusal::Draining if !self.drained[name] => {
                self.flag("refusal", at, say(", and nobody drains"));
            }
            Refusal::Revoked if !self.revoked[name] => {
                self.flag("refusal", at, say(", and nobody revokes"));
            }
            Refusal::Closed if !self.lives[process].closing => {
                self.flag("closed", at, say(", and nothing was shut down"));
            }
            Refusal::Unavailable { .. } | Refusal::Status(503) => {
                let quiet = self.quiet_since(process, server);
                let settled = quiet.max(self.call_errors_until).max(self.unsettled[name]);
                if settled < request.begun {
                    self.flag("unavailable", at, say(", and nothing was wrong"));
                } else if matches!(refusal, Refusal::Unavailable { down: false })
                    && elapsed
                        > ANSWER_TIMEOUT + SLACK + (self.lives[process].frozen - request.frozen)
                    && at > self.call_errors_until
                    // Overrides are read before the first call of a connection.
                    && at > quiet.saturating_sub(SETTLE) + CONNECTS
                {
                    self.flag("unavailable late", at, say(", with a connection"));
                }
            }
            Refusal::TenantLimit if wait > 0 || request.ask.is_none_or(|ask| ask.each == 0) => {
                self.flag("refusal", at, say(", and nothing stops its tenant"));
            }
            Refusal::FurtherLimit
                if wait > 0 || request.ask.is_none_or(|ask| ask.also == [None; 2]) =>
            {
                self.flag("refusal", at, say(", and it names no limit"));
            }
            Refusal::CostTooHigh | Refusal::Status(400) if !self.is_too_much(request) => {
                self.flag("refusal", at, say(", and there may be as many"));
            }
            Refusal::Status(status) if layered && !matches!(status, 400 | 429) => {
                self.flag("refusal", at, say(""));
            }
            _ => {}
        }
    }

    /// Returns whether a request asks for more than some limit, cap or share could ever give it.
    fn is_too_much(&self, request: &Request) -> bool {
        let Some(ask) = request.ask else { return false };
        let headroom = if ask.class == 0 { 0 } else { self.terms[request.name].headroom };
        let (_, least) = self.limits[request.name];
        let least = u64::from(least.min(self.least_set[request.name]));
        let share = self.least_shares[request.name].unwrap_or(u64::MAX);
        let cost = u64::from(ask.cost);
        let is_over_a_cap = ask.also.iter().flatten().any(|(_, cap)| ask.cost > *cap);
        cost + headroom > least
            || cost > share
            || (1..ask.cost).contains(&ask.each)
            || is_over_a_cap
    }

    fn lost(&mut self, number: usize, request: &Request, at: u64, server: usize) {
        let life = &self.lives[request.process];
        let lease = self.own_leases[life.slot][request.name];
        let from = at.saturating_sub(lease + SLACK);
        if life.closing
            || self.revoked[request.name]
            || life.awake_since + lease > at
            || life.frozen > request.frozen
            || self.losses[request.name].iter().any(|loss| loss.begin <= at && from <= loss.until)
            || self.call_errors_until > from
        {
            return;
        }
        let linger = self.lingers[life.slot][request.name];
        if linger > TOLD {
            // Its request breaks off, and the rest of the lease is meant for that.
            let is_certain = self.uncapped[request.name] < at;
            let permit = Lingering { until: at + linger - TOLD, units: request.cost(), is_certain };
            self.lives[request.process].lingering[request.name].push_back(permit);
            self.count("lost in time");
        }
        let life = &self.lives[request.process];
        let disturbed: u64 = self.disturbed[life.slot][server]
            .iter()
            .filter(|(begin, end)| *begin <= at && *end + SETTLE >= from)
            .map(|(begin, end)| S + (*end).min(at).saturating_sub((*begin).max(from)))
            .sum();
        if disturbed < (lease - linger) / 2 {
            let text = format!(
                "the permit of request {number} of n{} was lost, with a lease of {} ms and {} ms of disturbance",
                request.name,
                lease / MS,
                disturbed / MS
            );
            self.flag("lost", at, text);
        }
    }

    /// Returns the permits in use, as far as their holders know, including those that linger.
    fn in_use(&self, name: usize, at: u64) -> u64 {
        let awake = self.lives.iter().filter(|life| life.lives && life.awake_since + 10 * MS <= at);
        let held: u64 = awake.map(|life| life.units[name]).sum();
        let lingering = self.lives.iter().flat_map(|life| &life.lingering[name]);
        let counted = lingering.filter(|permit| permit.is_certain && permit.until > at);
        held + counted.map(|permit| permit.units).sum::<u64>()
    }

    /// Checks whether more permits are in use than allowed.
    fn cap(&mut self, name: usize, at: u64) {
        let believed = self.in_use(name, at);
        let limit = u64::from(self.limits[name].0);
        if believed <= limit || at <= self.uncapped[name] {
            return;
        }
        // Each loss can admit up to the limit beside what is in use, including what an earlier loss admitted.
        let mut most = limit;
        for loss in self.losses[name].iter().filter(|loss| loss.shows(at)) {
            most = most.max(loss.in_use) + limit;
        }
        if at <= self.local[name] {
            most += self.shares[name];
        }
        // A revoked holder is notified within a second, or loses the permit with its lease.
        let told = at.saturating_sub(3 * S + self.leases[name]);
        let revoked = self.revocations[name].iter().filter(|begun| **begun >= told).count() as u64;
        most += revoked * self.terms[name].cost;
        if believed > most {
            let text = format!("{believed} permits of n{name} are in use, {most} at the most");
            self.flag("cap", at, text);
        } else {
            self.count("over the limit, as documented");
        }
    }

    // ===== time =====

    /// Checks what a server has of a name, and the limit that operators set.
    pub fn look(
        &mut self,
        at: u64,
        name: usize,
        server: usize,
        stock: Stock<'_>,
        set: (Option<u32>, bool),
    ) {
        let Stock { places, waiting: all_waiting, units } = stock;
        let mut living_waits = false;
        let mut left_behind = 0;
        let mut kept = Vec::new();
        for (process, (held, waiting)) in places.iter().copied().enumerate().take(self.lives.len())
        {
            let quiet = self.quiet_since(process, server).max(self.unsettled[name]);
            let quiet = quiet.max(self.call_errors_until);
            let settled = self.settled_since(process, name, server);
            let life = &mut self.lives[process];
            let lingering = &mut life.lingering[name];
            while lingering.front().is_some_and(|permit| permit.until + ENDED < at) {
                lingering.pop_front();
            }
            let linger =
                lingering.iter().filter(|it| it.is_certain && it.until > at).count() as u64;
            let lingered = lingering.len() as u64;
            if !life.lives {
                left_behind += linger;
                continue;
            }
            living_waits |= waiting > 0 && quiet < at && !life.closing;
            let ended = &mut life.ended[name];
            while ended.front().is_some_and(|end| end + ENDED < at) {
                ended.pop_front();
            }
            let more = held + waiting > life.alive[name] + ended.len() as u64 + lingered;
            let lately = ended.iter().filter(|end| **end + REUSE + SLACK >= at).count() as u64;
            // Releasing thousands takes a while.
            let keeps = self.reuses[life.slot][name]
                && self.scenario != Scenario::Large
                && held + waiting > life.alive[name] + lately + lingered;
            let keeps = since(&mut life.keeps[name], keeps, at);
            if keeps.is_some_and(|from| from < at && from > settled.max(life.late[name])) {
                let text = format!(
                    "process {process} has {} places of n{name} and {} requests, which has been so for {} ms",
                    held + waiting,
                    life.alive[name] + lately,
                    (at - keeps.unwrap_or(at)) / MS
                );
                life.keeps[name] = None;
                kept.push(text);
            }
            let fewer = held < life.believed[name];
            let orphans = since(&mut life.orphans[name], more, at);
            let uncounted = since(&mut life.uncounted[name], fewer, at);
            let (alive, believed) = (life.alive[name], life.believed[name]);
            let patience = if self.scenario == Scenario::Crowd { CROWDED_ORPHAN } else { ORPHAN };
            if orphans.is_some_and(|from| at > from.max(quiet).max(life.late[name]) + patience) {
                let text = format!(
                    "process {process} has {alive} requests for n{name}, and {} places stand there for it",
                    held + waiting
                );
                self.lives[process].orphans[name] = None;
                self.flag("orphan", at, text);
            }
            if uncounted.is_some_and(|from| at > from.max(quiet) + UNCOUNTED) {
                let text = format!(
                    "process {process} uses {believed} permits of n{name}, and {held} are counted"
                );
                self.lives[process].uncounted[name] = None;
                self.flag("uncounted", at, text);
            }
            // A loss of data is noticed with the next renewal.
            if linger > 0 && held < believed + linger && settled + UNCOUNTED < at {
                let text = format!(
                    "process {process} uses {believed} permits of n{name}, {linger} more linger, and {held} are counted"
                );
                self.flag("linger", at, text);
            }
        }
        for text in kept {
            self.flag("kept", at, text);
        }
        let (held_by_none, _) = places.last().copied().unwrap_or_default();
        if held_by_none < left_behind && at > self.unsettled[name].max(self.uncapped[name]) {
            let text = format!(
                "{left_behind} permits of n{name} linger whose processes are gone, and {held_by_none} are counted"
            );
            self.flag("linger", at, text);
        }
        let limit = match set {
            (_, true) => Some(0),
            (limit, _) => limit.or_else(|| self.numbers[name].as_ref()?.lowest()),
        };
        self.look_at_growth(at, name, units, living_waits);
        // Each is judged by its own limit, and waits for those before it. The order among tenants is not checked here,
        // and a place of a tenant with a cap may wait.
        let fits =
            |id: PlaceId| units + u64::from(id.cost()) <= crate::fair::room(id, limit, (0, 0));
        let is_plain = all_waiting.iter().all(|(_, id)| id.tenant().is_none());
        let first = all_waiting.iter().min().filter(|_| is_plain);
        let fits = match first {
            Some((_, first)) => fits(*first),
            None => all_waiting.iter().all(|(_, id)| fits(*id)),
        };
        let terms = &self.terms[name];
        // No window of the plans is as long as this may last.
        let idle = living_waits && fits && (!terms.is_capped || units == 0) && !terms.is_rated;
        let since = since(&mut self.idle_since[name], idle, at);
        if since.is_some_and(|from| at > from.max(self.unsettled[name]) + IDLE) {
            let text = format!(
                "{units} permits of n{name} are in use, and a living place waits with room under its limit"
            );
            self.idle_since[name] = None;
            self.flag("idle", at, text);
        }
    }

    /// Checks, each second, what processes did in it.
    pub fn second(&mut self, at: u64, servers: usize, records: &[Option<usize>], admitted: &[u64]) {
        for process in 0..self.lives.len() {
            let quiet = (0..servers).map(|server| self.quiet_since(process, server)).max();
            self.admits_in(process, admitted[process], quiet.unwrap_or(0), at);
            let used = &self.lives[process];
            // If the server was unreachable, releases may wait for it until the leases end.
            let away = |name: usize| {
                if quiet.unwrap_or(0) + RECORD < at { 0 } else { 3 * self.leases[name] }
            };
            // A quarantine lasts for its lease.
            let quarantined = |name: usize| {
                let before = at.saturating_sub(RECORD);
                self.quarantine && self.losses[name].iter().any(|loss| loss.until > before)
            };
            let names = (0..self.names)
                .filter(|name| {
                    used.alive[*name] > 0
                        || used.used[*name] + RECORD + away(*name) > at
                        || quarantined(*name)
                })
                .count();
            if let Some(records) = records[process]
                && records > names
                && !std::mem::replace(&mut self.lives[process].hoards, true)
            {
                let text = format!(
                    "process {process} has records of {records} names, and used {names} lately"
                );
                self.flag("records", at, text);
            }
            let names = self.names as u64;
            let life = &mut self.lives[process];
            let (events, calls, connects) = (life.events, life.calls, life.connects);
            let named = std::mem::take(&mut life.named);
            let handed = life.handed;
            let lingered = life.linger_ends.iter().filter(|end| **end <= at).count() as u64;
            life.linger_ends.retain(|end| *end > at);
            (life.events, life.handed, life.calls, life.connects) = (0, 0, 0, 0);
            let alive: u64 = life.alive.iter().sum();
            // While permits are passed on, the backend is asked every 25 ms.
            let asks = self.reuses[life.slot].iter().filter(|reuses| **reuses).count() as u64 * 40;
            let most = 60 + 6 * events + handed + lingered + 40 * names + asks + alive / 4;
            if calls > most {
                let text = format!(
                    "process {process} made {calls} calls in a second, with {events} events, {handed} permits handed on and {alive} requests alive"
                );
                self.flag("work: calls", at, text);
            }
            // Each place when it comes and when it leaves, and ten times in between if the process polls. All releases
            // that were kept while they were refused may be sent at once.
            let most_named =
                1000 + 10 * (events + handed + lingered) + 30 * alive + PUT_OFF * names;
            if named > most_named {
                let text = format!(
                    "process {process} named {named} places in a second, with {events} events and {alive} requests alive"
                );
                self.flag("work: named", at, text);
            }
            let most = self.counts.entry("most places named in a second").or_default();
            *most = named.max(*most);
            if connects > 12 * servers as u64 {
                let text = format!("process {process} opened {connects} connections in a second");
                self.flag("work: connects", at, text);
            }
            *self.counts.entry("most calls in a second").or_default() =
                calls.max(self.counts.get("most calls in a second").copied().unwrap_or(0));
        }
    }

    /// Checks that outage policies admit requests only in an outage, not because a server is busy.
    fn admits_in(&mut self, process: usize, admitted: u64, quiet: u64, at: u64) {
        let life = &mut self.lives[process];
        let more = admitted.saturating_sub(life.admitted);
        life.admitted = admitted;
        if more > 0 && quiet.max(self.call_errors_until) + S < at {
            let text = format!("process {process} admitted {more} requests, and nothing was wrong");
            self.flag("admitted", at, text);
        }
    }

    /// Checks, at the end of the run, that every request was answered.
    pub fn finish(&mut self, at: u64) {
        let open: Vec<_> = self
            .requests
            .iter()
            .enumerate()
            .filter_map(|(number, request)| Some((number, (*request)?)))
            .filter(|(_, request)| !request.over)
            .collect();
        for (number, request) in open.into_iter().take(3) {
            let what =
                if request.granted.is_some() { "has its permit still" } else { "has no answer" };
            let text = format!("request {number} of n{} {what} in the end", request.name);
            self.flag("answer", at, text);
        }
        let _ = self.scenario;
    }
}

fn since(state: &mut Option<u64>, is_so: bool, at: u64) -> Option<u64> {
    if is_so {
        Some(*state.get_or_insert(at))
    } else {
        *state = None;
        None
    }
}
