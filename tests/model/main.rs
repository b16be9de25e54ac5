//! A model checker that explores the protocol: the shipped ledger and session, with a model of the processes, their
//! connections and their mailboxes around them, and every fault at every moment, in a small scope.
//!
//! `server` has the shipped ledger and the wrong ledgers of the mutants, `process` the shipped session and what the
//! shell keeps beside it, `world` everything that moves, and `judge` the rules. This file has the scopes, and the
//! mutants: each undoes one rule, and must be caught.

#[expect(unreachable_pub, reason = "it is public in the simulation")]
#[path = "../simulation/fair.rs"]
mod fair;
#[expect(unreachable_pub, reason = "it is public in the simulation")]
#[path = "../simulation/further.rs"]
mod further;
mod judge;
mod process;
mod server;
mod world;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use stateright::{Checker, HasDiscoveries, Model};

use tower_semaphore_protocol::session::{AcquireOptions, OnUnavailable};
use tower_semaphore_protocol::{Claim, FurtherLimit, Mode, Override, Rate, Tenant};

use self::world::{Action, Rule, Seen, World};

/// The settings of a run.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    name: &'static str,
    processes: u8,
    /// The requests of a process at a time, and in all.
    slots: usize,
    requests: [u8; 3],
    /// The limit that each process knows.
    limits: [u32; 3],
    ticks: u8,
    /// The leases in ticks; the requests of a process use them in turn.
    leases: &'static [u8],
    /// The number of requests that may wait.
    max_queue: u32,
    /// What each process does while the server cannot be asked.
    policies: [OnUnavailable; 3],
    /// How long a request waits for its first answer, and for a permit.
    timeouts: Option<(u8, u8)>,
    /// By process: the claims of its requests, in turn.
    asks: [&'static [Ask]; 3],
    /// How many requests may start in this many ticks.
    rate: Option<(u32, u8)>,
    /// By process: for how many ticks permits are passed on; its requests use them in turn.
    reuse: [&'static [u8]; 3],
    /// Whether some requests may not wait.
    tries: bool,
    /// Whether time passes while a process has something to send.
    lazy: bool,
    /// Whether reconnecting takes time.
    away: bool,
    /// Whether the processes differ, so that it matters which one comes first.
    differ: bool,
    quarantine: bool,
    /// Whether a server identifies its data, so that a process recognizes it.
    names_data: bool,
    /// The processes that receive no hints, always or from the first new connection on.
    poll_only: [bool; 3],
    loses_subscription: bool,
    /// Whether the watchdog may be slower than everything else.
    late_watchdog: bool,
    /// Whether anything may happen before revocations are known.
    slow_checks: bool,
    /// Whether callers may wait for the acknowledgement of a release.
    acknowledged: bool,
    /// Whether a replica that takes over may lack the last changes.
    moves_lose_data: bool,
    /// By how many ticks the server's clock may step.
    steps: &'static [i8],
    /// The overrides that operators may set.
    sets: &'static [(Option<u32>, Mode)],
    /// The starts of the rates that they may set after those, in the same window.
    rates: &'static [u32],
    /// One in this number of last states is checked for whether everything comes to rest from there.
    drained: u64,
    /// How it begins: what can happen is explored from there.
    beginning: &'static [Action],
    faults: Faults,
    bug: Option<Bug>,
}

/// A tenant, the permits and the class of its requests, its cap, and its further limits, each with a cap; tenant 0 for
/// none.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    tenant: u64,
    cost: u32,
    class: u8,
    each: Option<u32>,
    further: &'static [(u64, u32)],
}

impl Ask {
    const fn of(tenant: u64) -> Self {
        Self { tenant, cost: 1, class: 0, each: None, further: &[] }
    }

    fn claim(self) -> Option<Claim> {
        let Self { tenant, cost, class, each, further } = self;
        let claim = match tenant {
            0 if further.is_empty() => return None,
            0 => Claim::without_tenant().with_cost(cost),
            _ => Claim::new(Tenant::of_hash(tenant))
                .with_cost(cost)
                .with_class(class)
                .with_each(each),
        };
        let limits = further.iter().map(|(number, cap)| FurtherLimit::of_hash(*number, *cap));
        Some(limits.fold(claim, Claim::also))
    }
}

/// How often each fault occurs at most.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Faults {
    slow: u8,
    breaks: u8,
    cuts: u8,
    outages: u8,
    errors: u8,
    late_calls: u8,
    late_hints: u8,
    lost_hints: u8,
    late_recalls: u8,
    lost_recalls: u8,
    crashes: u8,
    closes: u8,
    freezes: u8,
    naps: u8,
    restarts: u8,
    failovers: u8,
    flushes: u8,
    moves: u8,
    steps: u8,
    sets: u8,
    /// How often a process learns that grants are paused for a tick.
    pauses: u8,
    revokes: u8,
}

/// A rule undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bug {
    // At the seam between the session and the world: an input is dropped, or an answer is changed.
    RejoinWithSameId,
    RejoinWithNewTicket,
    HintWithoutLeaseEnd,
    ProofInEveryRenewal,
    DeadlineFromReceipt,
    ReleaseNotRepeated,
    AcquireNotRepeated,
    RepeatsUnderNewId,
    WaitersNotRenewed,
    RenewalDoesNotTellGrant,
    NoSelfFence,
    NoReassert,
    NoQuarantine,
    YoungServerTrusted,
    YoungByUptime,
    GoneDropsGrantedSince,
    StrangerNotReleased,
    StrangersNotAudited,
    AcquiresBeforeRenewals,
    EarlyHintDropped,
    KeptHintOutlivesConnection,
    WaitTimeoutIgnored,
    UnreachableUnheard,
    ErrorUnheard,
    RefusedThoughDone,
    LateIgnored,
    RevocationUnheard,
    ProofWithoutClaim,
    HintWithoutClaim,
    RecallUnheard,
    WaitersTakenForOwn,
    KeptTooLong,
    ClockStandsStill,
    TenantsAlike,
    // In the server.
    RenewExtendsBeforeSweep,
    RenewDoesNotPromote,
    ReleasePromotesBeforeSweep,
    ReleaseDoesNotPromote,
    RetryReturnsEarly,
    RetryKeepsOldLease,
    NewcomerBarges,
    TryBarges,
    GoneNotPassedOver,
    StartsForgotten,
}

const NONE: Faults = Faults {
    slow: 0,
    breaks: 0,
    cuts: 0,
    outages: 0,
    errors: 0,
    late_calls: 0,
    late_hints: 0,
    lost_hints: 0,
    late_recalls: 0,
    lost_recalls: 0,
    crashes: 0,
    closes: 0,
    freezes: 0,
    naps: 0,
    restarts: 0,
    failovers: 0,
    flushes: 0,
    moves: 0,
    steps: 0,
    sets: 0,
    pauses: 0,
    revokes: 0,
};

const BASE: Config = Config {
    name: "",
    processes: 2,
    slots: 1,
    requests: [2, 1, 0],
    limits: [1; 3],
    ticks: 4,
    leases: &[3],
    max_queue: 8,
    policies: [OnUnavailable::Refuse; 3],
    timeouts: None,
    asks: [&[]; 3],
    rate: None,
    reuse: [&[]; 3],
    tries: false,
    lazy: false,
    away: false,
    differ: false,
    quarantine: false,
    names_data: true,
    poll_only: [false; 3],
    loses_subscription: false,
    late_watchdog: false,
    slow_checks: false,
    acknowledged: false,
    moves_lose_data: false,
    steps: &[],
    sets: &[],
    rates: &[],
    drained: 16,
    beginning: &[],
    faults: NONE,
    bug: None,
};

impl Config {
    /// Returns the claim of the next request of a process.
    fn options(&self, process: usize, request: u8, wait: bool) -> AcquireOptions {
        let asks = self.asks[process];
        let ask = (!asks.is_empty()).then(|| asks[usize::from(request) % asks.len()]);
        AcquireOptions {
            linger_ms: 0,
            reuse_ms: u32::from(self.reuse_of(process, request)) * 1000,
            lease: process::ticks(self.leases[usize::from(request) % self.leases.len()]),
            max_queue: wait.then_some(self.max_queue),
            on_unavailable: self.policies[process],
            max_waiting: 100,
            headroom: 0,
            rate: self.rate_of(self.rate.map_or(0, |(starts, _)| starts)),
            claim: ask.and_then(Ask::claim),
            patience_ms: 0,
        }
    }

    /// Returns the rate of this many starts; `None`: there are none.
    fn rate_of(&self, starts: u32) -> Option<Rate> {
        let (_, window) = self.rate?;
        Rate::parse(&format!("{starts}/{}", process::ticks(window).as_millis()))
    }

    fn reuse_of(&self, process: usize, request: u8) -> u8 {
        let reuse = self.reuse[process];
        if reuse.is_empty() { 0 } else { reuse[usize::from(request) % reuse.len()] }
    }

    fn longest_reuse(&self) -> u8 {
        self.reuse.iter().flat_map(|reuse| *reuse).copied().max().unwrap_or(0)
    }

    /// Returns whether any process passes permits on.
    fn reuses(&self) -> bool {
        self.longest_reuse() > 0
    }

    /// Returns whether places have claims, as those of tenants and those with a rate.
    const fn is_fair(&self) -> bool {
        self.rate.is_some()
            || !(self.asks[0].is_empty() && self.asks[1].is_empty() && self.asks[2].is_empty())
    }

    /// Returns the number of overrides that operators may set.
    fn set(&self, set: u8) -> Override {
        let mut of_operators = Override::default();
        if let Some(set) = usize::from(set).checked_sub(1) {
            match self.sets.get(set) {
                Some(set) => (of_operators.limit, of_operators.mode) = *set,
                None => of_operators.rate = self.rate_of(self.rates[set - self.sets.len()]),
            }
        }
        of_operators
    }

    /// Returns whether more callers than the limit may work for a while: see the promises.
    const fn may_pass_the_cap(&self) -> bool {
        let Faults { restarts, failovers, flushes, steps, .. } = self.faults;
        (restarts + failovers + flushes > 0 && !self.quarantine)
            || steps > 0
            || self.moves_lose_data
    }

    fn longest_lease(&self) -> u8 {
        self.leases.iter().copied().max().expect("a lease")
    }
}

fn config(name: &str) -> Config {
    let deep = if configs().iter().any(|c| c.name == name) { Vec::new() } else { deep_configs() };
    configs()
        .into_iter()
        .chain(deep)
        .find(|config| config.name == name)
        .expect("a scope of this name")
}

fn configs() -> Vec<Config> {
    vec![
        Config {
            name: "crash, lost hint",
            processes: 3,
            requests: [1, 1, 1],
            tries: true,
            faults: Faults { crashes: 1, lost_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "two permits",
            processes: 3,
            requests: [1, 1, 1],
            limits: [2; 3],
            faults: Faults { crashes: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "slow call, break",
            ticks: 2,
            faults: Faults { slow: 1, breaks: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "slow call, break, crash",
            requests: [1, 1, 1],
            faults: Faults { slow: 1, breaks: 1, crashes: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "freeze, late hint",
            ticks: 4,
            faults: Faults { freezes: 1, late_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "freeze, slow call",
            requests: [1, 1, 1],
            ticks: 3,
            faults: Faults { freezes: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "restart, order",
            processes: 3,
            requests: [1, 1, 1],
            ticks: 1,
            faults: Faults { restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "restart, slow call",
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { restarts: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "restart, break",
            requests: [2, 0, 0],
            processes: 1,
            slots: 2,
            ticks: 1,
            faults: Faults { restarts: 1, slow: 1, breaks: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "failover, break",
            requests: [1, 1, 0],
            ticks: 2,
            faults: Faults { failovers: 1, slow: 1, breaks: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "restart, two places a process",
            slots: 2,
            ticks: 2,
            faults: Faults { restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "restart, quarantine",
            requests: [2, 1, 0],
            ticks: 5,
            quarantine: true,
            faults: Faults { restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "failover, quarantine",
            ticks: 4,
            requests: [1, 1, 0],
            quarantine: true,
            faults: Faults { failovers: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "failover",
            requests: [1, 1, 0],
            ticks: 4,
            faults: Faults { failovers: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "wait timeout, lost hint",
            timeouts: Some((1, 2)),
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { lost_hints: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "outage, refuse",
            differ: true,
            timeouts: Some((1, 2)),
            requests: [2, 1, 0],
            slots: 2,
            ticks: 3,
            away: true,
            faults: Faults { cuts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "outage, admit",
            differ: true,
            policies: [OnUnavailable::Admit, OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [1, 1, 0],
            slots: 2,
            ticks: 3,
            away: true,
            faults: Faults { cuts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "outage, local share",
            processes: 1,
            differ: true,
            timeouts: Some((1, 2)),
            policies: [OnUnavailable::Local(1), OnUnavailable::Refuse, OnUnavailable::Refuse],
            max_queue: 1,
            tries: true,
            requests: [3, 0, 0],
            slots: 3,
            ticks: 3,
            away: true,
            faults: Faults { cuts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "outage, acknowledged release, slow call",
            differ: true,
            acknowledged: true,
            policies: [OnUnavailable::Admit, OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [1, 1, 0],
            ticks: 3,
            away: true,
            faults: Faults { breaks: 1, slow: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "restart in an outage",
            differ: true,
            policies: [OnUnavailable::Admit, OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [1, 1, 0],
            ticks: 4,
            away: true,
            faults: Faults { restarts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "queue full, no permit",
            processes: 2,
            requests: [2, 2, 0],
            slots: 2,
            max_queue: 1,
            tries: true,
            ticks: 2,
            ..BASE
        },
        Config {
            name: "call errors, refuse",
            differ: true,
            requests: [1, 1, 0],
            slots: 1,
            ticks: 4,
            faults: Faults { errors: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "call errors, admit",
            differ: true,
            policies: [OnUnavailable::Admit, OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [1, 1, 0],
            ticks: 4,
            faults: Faults { errors: 2, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "call errors, local share",
            processes: 1,
            differ: true,
            policies: [OnUnavailable::Local(1), OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [2, 0, 0],
            slots: 2,
            ticks: 3,
            faults: Faults { errors: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "several ids in a call",
            requests: [2, 1, 0],
            slots: 2,
            limits: [2; 3],
            ticks: 1,
            faults: Faults { slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "poll only, crash",
            differ: true,
            poll_only: [true, false, false],
            requests: [1, 1, 0],
            faults: Faults { crashes: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "the subscription is lost",
            loses_subscription: true,
            requests: [1, 1, 0],
            away: true,
            ticks: 4,
            faults: Faults { cuts: 2, ..NONE },
            ..BASE
        },
        Config {
            name: "late calls",
            requests: [2, 1, 0],
            slots: 1,
            ticks: 1,
            faults: Faults { late_calls: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "another server, slow call",
            requests: [1, 1, 0],
            moves_lose_data: true,
            ticks: 2,
            faults: Faults { moves: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "overrides",
            differ: true,
            sets: &[(Some(2), Mode::Open), (None, Mode::Paused), (None, Mode::Draining)],
            requests: [2, 1, 0],
            ticks: 1,
            faults: Faults { sets: 2, ..NONE },
            ..BASE
        },
        Config {
            name: "overrides, outage",
            differ: true,
            sets: &[(None, Mode::Paused)],
            policies: [OnUnavailable::Local(1), OnUnavailable::Admit, OnUnavailable::Refuse],
            requests: [1, 1, 0],
            slots: 1,
            ticks: 2,
            away: true,
            faults: Faults { sets: 2, cuts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "pauses",
            tries: true,
            requests: [2, 1, 0],
            ticks: 2,
            faults: Faults { pauses: 2, ..NONE },
            ..BASE
        },
        Config {
            name: "pauses, quarantine",
            quarantine: true,
            requests: [1, 1, 0],
            leases: &[2],
            ticks: 3,
            faults: Faults { pauses: 1, restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "rate",
            rate: Some((1, 1)),
            limits: [2; 3],
            requests: [2, 1, 0],
            ticks: 2,
            faults: Faults { slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "rate, crash, lost hint",
            rate: Some((1, 1)),
            limits: [2; 3],
            requests: [1, 2, 0],
            ticks: 3,
            faults: Faults { crashes: 1, lost_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "rate, pauses",
            rate: Some((2, 2)),
            requests: [2, 1, 0],
            ticks: 3,
            faults: Faults { pauses: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "rate, set",
            differ: true,
            rate: Some((1, 2)),
            rates: &[2],
            limits: [2; 3],
            requests: [2, 1, 0],
            ticks: 2,
            faults: Faults { sets: 2, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "revoke",
            slow_checks: true,
            requests: [1, 1, 0],
            ticks: 1,
            faults: Faults { revokes: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "revoke, flush",
            slow_checks: true,
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { revokes: 1, flushes: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "limits differ",
            differ: true,
            limits: [1, 2, 2],
            processes: 3,
            requests: [1, 1, 1],
            ticks: 3,
            faults: Faults { crashes: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "mixed leases",
            leases: &[3, 6],
            requests: [2, 1, 0],
            slots: 2,
            limits: [2; 3],
            ticks: 4,
            faults: Faults { restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "idle connections break",
            requests: [2, 1, 0],
            away: true,
            ticks: 3,
            faults: Faults { cuts: 2, ..NONE },
            ..BASE
        },
        Config {
            name: "idle connections break, data unknown",
            names_data: false,
            requests: [1, 1, 0],
            away: true,
            ticks: 2,
            faults: Faults { cuts: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "the server's clock steps",
            steps: &[2, -2],
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { steps: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "tasks and the watchdog are late",
            late_watchdog: true,
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { naps: 1, slow: 1, lost_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "failover, late watchdog",
            late_watchdog: true,
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { failovers: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "shutdown",
            requests: [1, 1, 0],
            slots: 2,
            ticks: 1,
            faults: Faults { closes: 1, slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "flush, slow call, late hint",
            requests: [1, 1, 0],
            ticks: 2,
            faults: Faults { flushes: 1, slow: 1, late_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "tenants, crash, lost hint",
            asks: [TWO_AND_ONE, OTHER, ONE],
            differ: true,
            processes: 3,
            requests: [1, 1, 1],
            limits: [2; 3],
            faults: Faults { crashes: 1, lost_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "tenants take turns",
            asks: [ONE, OTHER, &[]],
            requests: [3, 2, 0],
            slots: 3,
            ticks: 1,
            ..BASE
        },
        Config {
            name: "a tenant's own cap, and none",
            asks: [CAPPED, NOBODY, &[]],
            differ: true,
            requests: [2, 2, 0],
            slots: 2,
            limits: [2; 3],
            tries: true,
            ticks: 1,
            ..BASE
        },
        Config {
            name: "tenants, restart",
            asks: [TWO_AND_ONE, OTHER, &[]],
            differ: true,
            requests: [2, 1, 0],
            slots: 2,
            limits: [2; 3],
            ticks: 2,
            faults: Faults { restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "tenants, failover",
            asks: [ONE, OTHER, &[]],
            requests: [1, 1, 0],
            ticks: 3,
            faults: Faults { failovers: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "tenants, slow call, break",
            asks: [TWO_AND_ONE, OTHER, &[]],
            differ: true,
            requests: [1, 1, 0],
            limits: [2; 3],
            ticks: 2,
            faults: Faults { slow: 1, breaks: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "tenants, outage, local share",
            asks: [ONE_TWO_ONE, &[], &[]],
            processes: 1,
            differ: true,
            policies: [OnUnavailable::Local(2), OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [3, 0, 0],
            slots: 3,
            limits: [2; 3],
            ticks: 2,
            away: true,
            faults: Faults { cuts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "further limits, crash, lost hint",
            asks: [BOTH_ROUTES, OTHERS_ROUTES, FIRST_ROUTE],
            differ: true,
            processes: 3,
            requests: [2, 1, 1],
            limits: [2; 3],
            faults: Faults { crashes: 1, lost_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "further limits cross",
            asks: [CROSSING, OTHERS_ROUTES, &[]],
            requests: [3, 2, 0],
            slots: 3,
            limits: [2; 3],
            ticks: 1,
            ..BASE
        },
        Config {
            name: "further limits and a tenant's cap, some do not wait",
            asks: [CAPPED_ROUTES, NOBODYS_ROUTES, &[]],
            differ: true,
            requests: [2, 2, 0],
            slots: 2,
            limits: [2; 3],
            tries: true,
            ticks: 1,
            ..BASE
        },
        Config {
            name: "further limits, restart",
            asks: [BOTH_ROUTES, OTHERS_ROUTES, &[]],
            differ: true,
            requests: [2, 1, 0],
            slots: 2,
            limits: [2; 3],
            ticks: 2,
            faults: Faults { restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "further limits, outage, local share",
            asks: [CROSSING, &[], &[]],
            processes: 1,
            differ: true,
            policies: [OnUnavailable::Local(2), OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [3, 0, 0],
            slots: 3,
            limits: [2; 3],
            ticks: 2,
            away: true,
            faults: Faults { cuts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, slow call, late recall",
            reuse: [&[1]; 3],
            requests: [2, 1, 0],
            ticks: 1,
            faults: Faults { slow: 1, late_recalls: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, requests that wait",
            reuse: [&[1]; 3],
            requests: [2, 1, 0],
            slots: 2,
            ticks: 1,
            faults: Faults { slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, places taken over",
            reuse: [&[1]; 3],
            requests: [3, 0, 0],
            slots: 2,
            limits: [2; 3],
            ticks: 1,
            faults: Faults { slow: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, lost hint",
            reuse: [&[1], &[], &[]],
            differ: true,
            late_watchdog: true,
            requests: [3, 2, 0],
            slots: 3,
            limits: [2; 3],
            ticks: 1,
            beginning: &[
                Action::Request { process: 0, wait: true },
                Action::Request { process: 0, wait: true },
                Action::Request { process: 1, wait: true },
                Action::Send { process: 1 },
                Action::Send { process: 0 },
                Action::Request { process: 1, wait: true },
                Action::Leave { process: 1, slot: 0 },
                Action::Send { process: 1 },
            ],
            faults: Faults { lost_hints: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, three processes",
            reuse: [&[1]; 3],
            processes: 3,
            requests: [2, 1, 1],
            limits: [2; 3],
            ticks: 1,
            faults: Faults { lost_recalls: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, freeze",
            reuse: [&[1]; 3],
            differ: true,
            late_watchdog: true,
            requests: [2, 1, 0],
            ticks: 2,
            faults: Faults { freezes: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, outage, admit",
            reuse: [&[2]; 3],
            differ: true,
            policies: [OnUnavailable::Admit, OnUnavailable::Refuse, OnUnavailable::Refuse],
            requests: [2, 1, 0],
            ticks: 1,
            away: true,
            faults: Faults { cuts: 1, outages: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, restart",
            reuse: [&[2]; 3],
            differ: true,
            requests: [2, 1, 0],
            ticks: 2,
            faults: Faults { restarts: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, and none",
            reuse: [&[1, 0], &[0], &[]],
            differ: true,
            requests: [3, 1, 0],
            slots: 2,
            ticks: 1,
            faults: Faults { late_recalls: 1, ..NONE },
            ..BASE
        },
        Config {
            name: "reuse, tenants",
            reuse: [&[2]; 3],
            asks: [IN_TURN, OTHER, &[]],
            differ: true,
            requests: [3, 1, 0],
            slots: 2,
            ticks: 1,
            ..BASE
        },
    ]
}

/// One request for two permits, and one of a higher class for one.
const TWO_AND_ONE: &[Ask] = &[Ask { cost: 2, ..Ask::of(1) }, Ask { class: 1, ..Ask::of(1) }];
const ONE: &[Ask] = &[Ask::of(1)];
const OTHER: &[Ask] = &[Ask::of(2)];
const NOBODY: &[Ask] = &[Ask::of(0)];
const IN_TURN: &[Ask] = &[Ask::of(1), Ask::of(1), Ask::of(2)];
const ONE_TWO_ONE: &[Ask] = &[Ask::of(1), Ask { cost: 2, ..Ask::of(2) }, Ask::of(1)];
/// Two routes with one permit each: requests for one, for the other, and for both.
const ROUTES: [&[(u64, u32)]; 3] = [&[(1, 1)], &[(2, 1)], &[(1, 1), (2, 1)]];
const BOTH_ROUTES: &[Ask] =
    &[Ask { further: ROUTES[0], ..Ask::of(1) }, Ask { further: ROUTES[1], ..Ask::of(1) }];
const OTHERS_ROUTES: &[Ask] =
    &[Ask { further: ROUTES[0], ..Ask::of(2) }, Ask { further: ROUTES[1], ..Ask::of(2) }];
const FIRST_ROUTE: &[Ask] = &[Ask { further: ROUTES[0], ..Ask::of(1) }];
const CROSSING: &[Ask] = &[
    Ask { further: ROUTES[2], ..Ask::of(1) },
    Ask { further: ROUTES[0], ..Ask::of(1) },
    Ask { further: ROUTES[1], ..Ask::of(1) },
];
const CAPPED_ROUTES: &[Ask] = &[
    Ask { further: ROUTES[0], each: Some(1), ..Ask::of(1) },
    Ask { further: ROUTES[1], each: Some(1), ..Ask::of(1) },
];
const NOBODYS_ROUTES: &[Ask] =
    &[Ask { further: ROUTES[0], ..Ask::of(0) }, Ask { further: &[], ..Ask::of(0) }];

/// A tenant with a cap of one.
const CAPPED: &[Ask] = &[Ask { each: Some(1), ..Ask::of(1) }];

/// Larger scopes, for `MODEL_DEEP=1`: minutes each.
fn deep_configs() -> Vec<Config> {
    let larger = |name: &'static str, of: &'static str| Config { name, ..config(of) };
    vec![
        Config { slots: 2, ..larger("call errors, refuse, two places", "call errors, refuse") },
        Config {
            reuse: [&[2]; 3],
            requests: [3, 1, 0],
            ticks: 3,
            ..larger("reuse, three ticks", "reuse, slow call, late recall")
        },
        Config {
            reuse: [&[2]; 3],
            requests: [3, 2, 0],
            ticks: 1,
            ..larger("reuse, requests that wait, again", "reuse, requests that wait")
        },
        Config {
            requests: [4, 1, 0],
            ticks: 2,
            ..larger("reuse, tenants, two ticks", "reuse, tenants")
        },
        Config {
            requests: [3, 1, 0],
            ticks: 3,
            faults: Faults { restarts: 1, slow: 1, ..NONE },
            ..larger("reuse, restart, slow call", "reuse, restart")
        },
        Config {
            requests: [2, 1, 0],
            ticks: 2,
            faults: Faults { flushes: 1, slow: 1, ..NONE },
            ..larger("reuse, flush, slow call", "reuse, restart")
        },
        Config {
            reuse: [&[2, 0], &[0, 2], &[]],
            requests: [3, 2, 0],
            limits: [2; 3],
            faults: Faults { slow: 1, late_recalls: 1, ..NONE },
            ..larger("reuse, and none, slow call", "reuse, and none")
        },
        Config {
            processes: 2,
            requests: [3, 1, 0],
            ..larger("outage, local share, two processes", "outage, local share")
        },
        Config { requests: [2, 1, 0], ..larger("poll only, crash, again", "poll only, crash") },
        Config { ticks: 2, ..larger("late calls, two ticks", "late calls") },
        Config {
            requests: [2, 1, 0],
            ..larger("another server, slow call, again", "another server, slow call")
        },
        Config {
            ticks: 3,
            faults: Faults { revokes: 1, slow: 1, breaks: 1, ..NONE },
            ..larger("revoke, break", "revoke")
        },
        Config {
            requests: [2, 1, 0],
            ..larger("the server's clock steps, again", "the server's clock steps")
        },
        Config {
            ticks: 4,
            ..larger(
                "tasks and the watchdog are late, four ticks",
                "tasks and the watchdog are late",
            )
        },
        Config {
            faults: Faults { failovers: 1, crashes: 1, ..NONE },
            ..larger("failover, crash", "failover")
        },
        Config {
            ticks: 3,
            away: true,
            faults: Faults { slow: 1, breaks: 1, late_hints: 1, ..NONE },
            ..larger("slow call, long break, late hint", "slow call, break")
        },
        Config {
            beginning: &[
                Action::Request { process: 0, wait: true },
                Action::Send { process: 0 },
                Action::Request { process: 1, wait: true },
                Action::SendSlow { process: 1 },
                Action::Execute { process: 1 },
                Action::Leave { process: 0, slot: 0 },
                Action::Send { process: 0 },
                Action::DelayHint(0),
                Action::Break { process: 1 },
            ],
            ticks: 3,
            away: true,
            faults: Faults { slow: 1, breaks: 1, late_hints: 1, ..NONE },
            ..larger("granted while away", "slow call, break")
        },
        Config {
            requests: [2, 1, 0],
            ..larger("flush, slow call, late hint, again", "flush, slow call, late hint")
        },
        Config { requests: [2, 1, 0], ..larger("restart, slow call, again", "restart, slow call") },
        Config { ticks: 3, ..larger("slow call, break, three ticks", "slow call, break") },
        Config {
            ticks: 5,
            requests: [2, 1, 0],
            ..larger("failover, quarantine, five ticks", "failover, quarantine")
        },
        Config {
            processes: 3,
            requests: [1, 1, 1],
            ..larger("restart, quarantine, three processes", "restart, quarantine")
        },
        Config {
            faults: Faults { slow: 2, breaks: 1, late_hints: 1, ..NONE },
            ..larger("two slow calls, break, late hint", "slow call, break")
        },
        Config { ticks: 5, ..larger("slow call, break, five ticks", "slow call, break") },
        Config {
            faults: Faults { slow: 1, breaks: 1, ..NONE },
            lazy: true,
            requests: [1, 1, 0],
            ..larger("nobody in a hurry", "slow call, break")
        },
        Config {
            processes: 3,
            requests: [1, 1, 1],
            ..larger("three processes, slow call, break", "slow call, break")
        },
        Config {
            ticks: 4,
            faults: Faults { restarts: 1, late_hints: 1, ..NONE },
            ..larger("restart, late hint, four ticks", "restart, order")
        },
        Config {
            ticks: 5,
            faults: Faults { restarts: 1, slow: 1, ..NONE },
            requests: [2, 1, 0],
            processes: 2,
            ..larger("restart, slow call, quarantine", "restart, quarantine")
        },
        Config {
            ticks: 6,
            faults: Faults { freezes: 2, late_hints: 1, slow: 1, ..NONE },
            ..larger("two freezes, slow call, late hint", "freeze, late hint")
        },
    ]
}

/// The result of a run.
struct Found {
    states: usize,
    /// Not ended early by `MODEL_MOST`.
    is_whole: bool,
    seen: u64,
    /// The rules that broke, and how.
    broken: Vec<(&'static str, String)>,
}

/// Explores a scope. Breadth first finds the shortest way to a defect; depth first is faster if the defect is far
/// away.
fn explore(config: &Config, stop: HasDiscoveries, depth_first: bool, most: Option<usize>) -> Found {
    fn found(checker: &impl Checker<World>, seen: u64, most: Option<usize>) -> Found {
        let discoveries = checker.discoveries().into_iter();
        let broken = discoveries.map(|(rule, path)| {
            let shows = std::env::var_os("MODEL_SHOW").is_some();
            if shows && rule == Rule::Drained.name() {
                checker.model().rest(path.last_state(), true);
            }
            if shows {
                eprintln!("{:#?}", path.last_state());
            }
            let steps = path.into_actions();
            let steps: Vec<_> = steps.iter().map(|step| format!("  {step:?}")).collect();
            (rule, steps.join("\n"))
        });
        let is_whole = most.is_none_or(|most| checker.state_count() < most);
        Found { states: checker.unique_state_count(), is_whole, seen, broken: broken.collect() }
    }
    let seen = Arc::new(AtomicU64::new(0));
    let world = World { config: config.clone(), seen: Arc::clone(&seen) };
    let mut checker = world.checker().threads(2).finish_when(stop);
    if let Some(most) = most {
        checker = checker.target_state_count(most);
    }
    if depth_first {
        let checker = checker.spawn_dfs().join();
        found(&checker, seen.load(Ordering::Relaxed), most)
    } else {
        let checker = checker.spawn_bfs().join();
        found(&checker, seen.load(Ordering::Relaxed), most)
    }
}

/// Faults and habits that a run of the scope must have shown, or it proves nothing.
const SHOWN: &[(&str, &[Seen])] = &[
    ("crash, lost hint", &[Seen::HintLost, Seen::HintRepaired, Seen::Refused, Seen::PassedOver]),
    ("two permits", &[Seen::PassedOver]),
    ("slow call, break, crash", &[Seen::LateSocket, Seen::PassedOver]),
    ("slow call, break", &[Seen::LateSocket, Seen::Orphan, Seen::Stranger, Seen::HintFirst]),
    ("freeze, slow call", &[Seen::LostAtDeadline]),
    ("freeze, late hint", &[Seen::TooLate, Seen::LostAtDeadline, Seen::Rejoined]),
    ("restart, order", &[Seen::Restored, Seen::Rejoined, Seen::OverCap]),
    ("restart, slow call", &[Seen::Restored, Seen::OverCap]),
    ("restart, break", &[Seen::Restored, Seen::SameData]),
    ("failover, break", &[Seen::Audited, Seen::SameData]),
    ("restart, two places a process", &[Seen::Restored, Seen::Rejoined]),
    ("restart, quarantine", &[Seen::Restored, Seen::Rejoined, Seen::Quarantined]),
    ("failover, quarantine", &[Seen::Restored, Seen::Quarantined]),
    ("flush, slow call, late hint", &[Seen::Restored, Seen::OverCap]),
    ("failover", &[Seen::Audited]),
    ("failover, late watchdog", &[Seen::Audited]),
    ("limits differ", &[Seen::PassedOver]),
    ("shutdown", &[Seen::Closed]),
    ("wait timeout, lost hint", &[Seen::TimedOutJoining, Seen::TimedOutWaiting, Seen::HintLost]),
    ("outage, refuse", &[Seen::Failed, Seen::TimedOutJoining, Seen::TimedOutWaiting]),
    ("outage, admit", &[Seen::Admitted, Seen::Counted]),
    ("outage, local share", &[Seen::Shared, Seen::ShareWaited, Seen::ShareRefused]),
    ("outage, acknowledged release, slow call", &[Seen::Acknowledged, Seen::Admitted]),
    ("restart in an outage", &[Seen::Admitted, Seen::Counted, Seen::Restored]),
    ("queue full, no permit", &[Seen::QueueFull, Seen::Refused, Seen::LeaveWithJoin]),
    ("call errors, refuse", &[Seen::CallFailed, Seen::Failed]),
    ("call errors, admit", &[Seen::CallFailed, Seen::Admitted, Seen::Counted]),
    ("call errors, local share", &[Seen::CallFailed, Seen::Shared, Seen::Counted]),
    ("several ids in a call", &[Seen::SeveralInOne, Seen::LeaveWithJoin]),
    ("poll only, crash", &[Seen::HintRepaired]),
    ("the subscription is lost", &[Seen::PollOnly, Seen::PassedOver, Seen::HintRepaired]),
    ("late calls", &[Seen::Late]),
    ("another server, slow call", &[Seen::Rehomed, Seen::OldStay, Seen::Restored]),
    ("overrides", &[Seen::Raised, Seen::Paused, Seen::Refused]),
    ("overrides, outage", &[Seen::Paused, Seen::Admitted, Seen::Shared]),
    ("pauses", &[Seen::PausedForATime, Seen::Refused]),
    ("pauses, quarantine", &[Seen::PausedForATime, Seen::Restored, Seen::Quarantined]),
    ("rate", &[Seen::RateWaits]),
    ("rate, crash, lost hint", &[Seen::RateWaits, Seen::HintLost]),
    ("rate, pauses", &[Seen::RateWaits, Seen::PausedForATime]),
    ("rate, set", &[Seen::RateWaits, Seen::RateSet]),
    ("revoke", &[Seen::Revoked, Seen::RevokedWaiter]),
    ("revoke, flush", &[Seen::Revoked, Seen::Restored]),
    ("mixed leases", &[Seen::Restored]),
    ("idle connections break", &[Seen::SameData, Seen::PassedOver]),
    ("idle connections break, data unknown", &[Seen::Audited]),
    ("the server's clock steps", &[Seen::Stepped]),
    ("tasks and the watchdog are late", &[Seen::LostAtDeadline, Seen::HintLost]),
    ("tenants, crash, lost hint", &[Seen::TenantsWait, Seen::BigWaits, Seen::HintRepaired]),
    ("tenants take turns", &[Seen::TenantsWait, Seen::PassedByTurn]),
    ("a tenant's own cap, and none", &[Seen::Capped, Seen::TenantsWait, Seen::Refused]),
    ("tenants, restart", &[Seen::Restored, Seen::Rejoined, Seen::TenantsWait]),
    ("tenants, failover", &[Seen::Restored, Seen::Rejoined]),
    ("tenants, slow call, break", &[Seen::LateSocket, Seen::Stranger]),
    ("tenants, outage, local share", &[Seen::Shared, Seen::ShareWaited]),
    ("further limits, crash, lost hint", &[Seen::Parked, Seen::HintRepaired]),
    ("further limits cross", &[Seen::Parked, Seen::PassedByTurn]),
    ("further limits and a tenant's cap, some do not wait", &[Seen::Parked, Seen::Refused]),
    ("further limits, restart", &[Seen::Parked, Seen::Restored, Seen::Rejoined]),
    ("further limits, outage, local share", &[Seen::Shared, Seen::ShareWaited]),
    ("reuse, slow call, late recall", &[Seen::Kept, Seen::Reused, Seen::KeptReleased]),
    ("reuse, requests that wait", &[Seen::PassedOn, Seen::Kept, Seen::KeptRecalled]),
    ("reuse, places taken over", &[Seen::TakenOver, Seen::PassedOn, Seen::Kept]),
    ("reuse, lost hint", &[Seen::PassedOn, Seen::HintLost, Seen::HintRepaired]),
    ("reuse, three processes", &[Seen::Reused, Seen::KeptRecalled, Seen::RecallLost]),
    ("reuse, freeze", &[Seen::Kept, Seen::Reused, Seen::KeptReleased]),
    ("reuse, outage, admit", &[Seen::Kept, Seen::Reused, Seen::Admitted, Seen::Counted]),
    ("reuse, restart", &[Seen::Kept, Seen::Reused, Seen::Restored]),
    ("reuse, and none", &[Seen::PassedOn, Seen::Kept, Seen::Reused]),
    ("reuse, tenants", &[Seen::PassedOn, Seen::Kept, Seen::Reused, Seen::TenantsWait]),
];

#[test]
fn each_scope_says_what_it_must_show() {
    let scopes: BTreeSet<_> = configs().iter().map(|config| config.name).collect();
    let shown: BTreeSet<_> = SHOWN.iter().map(|(name, _)| *name).collect();
    assert_eq!(scopes, shown);
}

#[test]
fn the_protocol_keeps_its_rules_through_every_fault() {
    let only = std::env::var("MODEL_ONLY").ok();
    // The states that are fewest events away come first.
    let most = std::env::var("MODEL_MOST").ok().map(|most| most.parse().expect("a number"));
    let (mut all, mut wrong) = (0, Vec::new());
    let mut scopes = configs();
    if std::env::var_os("MODEL_DEEP").is_some() {
        scopes.extend(deep_configs());
    }
    let names: Vec<_> = scopes.iter().map(|config| config.name).collect();
    let is_mutant = |name: &str| MUTANTS.iter().any(|(bug, ..)| format!("{bug:?}") == name);
    let asked = only.iter().flat_map(|only| only.split(';'));
    let unknown: Vec<_> = asked.filter(|name| !names.contains(name) && !is_mutant(name)).collect();
    assert!(unknown.is_empty(), "no scope or mutant is called {unknown:?}; scopes: {names:?}");
    for config in scopes {
        let name = config.name;
        if only.as_ref().is_some_and(|only| !only.split(';').any(|only| only == name)) {
            continue;
        }
        let start = Instant::now();
        let Found { states, is_whole, seen, broken } =
            explore(&config, HasDiscoveries::AnyFailures, false, most);
        all += states;
        eprintln!("{states:>9} states in {:>6.1?}: {name}", start.elapsed());
        if let Some((rule, steps)) = broken.first() {
            wrong.push(format!("{rule} does not hold in {name}:\n{steps}"));
            continue;
        }
        let always = [Seen::LimitReached, Seen::SomeoneWaits];
        let shown = SHOWN.iter().filter(|(shows, _)| is_whole && *shows == name);
        let shown = shown.flat_map(|(_, what)| *what);
        for what in always.iter().chain(shown) {
            if seen & (1 << *what as u64) == 0 {
                wrong.push(format!("{name} never shows {what:?}"));
            }
        }
        if !config.may_pass_the_cap() && seen & (1 << Seen::OverCap as u64) != 0 {
            wrong.push(format!("{name}: over the cap"));
        }
    }
    eprintln!("{all:>9} states");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Each rule undone, the scope in which it is, and the rule that must break.
const MUTANTS: [(Bug, &str, Rule); 51] = [
    (Bug::RejoinWithSameId, "flush, slow call, late hint, again", Rule::Grounded),
    (Bug::RejoinWithNewTicket, "restart, order", Rule::Order),
    (Bug::HintWithoutLeaseEnd, "granted while away", Rule::Grounded),
    (Bug::ProofInEveryRenewal, "slow call, break, three ticks", Rule::NoLeak),
    (Bug::DeadlineFromReceipt, "slow call, break, three ticks", Rule::Grounded),
    (Bug::ReleaseNotRepeated, "slow call, break", Rule::NoLeak),
    (Bug::AcquireNotRepeated, "slow call, break", Rule::Served),
    (Bug::RepeatsUnderNewId, "slow call, break", Rule::NoLeak),
    (Bug::WaitersNotRenewed, "crash, lost hint", Rule::Served),
    (Bug::RenewalDoesNotTellGrant, "crash, lost hint", Rule::Aware),
    (Bug::NoSelfFence, "freeze, late hint", Rule::Grounded),
    (Bug::NoReassert, "restart, order", Rule::NotLostEarly),
    (Bug::NoQuarantine, "restart, quarantine", Rule::CapByBelief),
    (Bug::YoungServerTrusted, "restart, quarantine", Rule::CapByBelief),
    (Bug::GoneDropsGrantedSince, "flush, slow call, late hint", Rule::NotLostEarly),
    (Bug::StrangerNotReleased, "slow call, break", Rule::NoLeak),
    (Bug::AcquiresBeforeRenewals, "restart, two places a process", Rule::CapByProcess),
    (Bug::EarlyHintDropped, "slow call, break", Rule::Aware),
    (Bug::KeptHintOutlivesConnection, "restart, slow call, again", Rule::Grounded),
    (Bug::RenewExtendsBeforeSweep, "slow call, break, three ticks", Rule::DeadStayDead),
    (Bug::RenewDoesNotPromote, "crash, lost hint", Rule::NoIdlePermit),
    (Bug::ReleasePromotesBeforeSweep, "crash, lost hint", Rule::NoIdlePermit),
    (Bug::ReleaseDoesNotPromote, "two permits", Rule::NoIdlePermit),
    (Bug::RetryReturnsEarly, "slow call, break, crash", Rule::NoIdlePermit),
    (Bug::RetryKeepsOldLease, "slow call, break, three ticks", Rule::Grounded),
    (Bug::NewcomerBarges, "crash, lost hint", Rule::Order),
    (Bug::TryBarges, "crash, lost hint", Rule::Order),
    (Bug::GoneNotPassedOver, "crash, lost hint", Rule::GonePassedOver),
    (Bug::StrangersNotAudited, "failover", Rule::NoLeak),
    (Bug::WaitTimeoutIgnored, "wait timeout, lost hint", Rule::Answered),
    (Bug::UnreachableUnheard, "outage, admit", Rule::Policy),
    (Bug::ErrorUnheard, "call errors, refuse", Rule::Served),
    (Bug::RefusedThoughDone, "call errors, refuse", Rule::NoLeak),
    (Bug::LateIgnored, "late calls", Rule::NoLeak),
    (Bug::RevocationUnheard, "revoke", Rule::Revoked),
    (Bug::YoungByUptime, "failover, quarantine", Rule::CapByBelief),
    (Bug::ProofWithoutClaim, "tenants, restart", Rule::NoLeak),
    (Bug::HintWithoutClaim, "tenants, slow call, break", Rule::NoLeak),
    (Bug::NewcomerBarges, "tenants, crash, lost hint", Rule::CapByLedger),
    (Bug::ReleaseDoesNotPromote, "tenants take turns", Rule::NoIdlePermit),
    (Bug::RenewDoesNotPromote, "tenants, crash, lost hint", Rule::NoIdlePermit),
    (Bug::RenewDoesNotPromote, "further limits, crash, lost hint", Rule::NoIdlePermit),
    (Bug::ReleaseDoesNotPromote, "further limits cross", Rule::NoIdlePermit),
    (Bug::ProofWithoutClaim, "further limits, restart", Rule::NoLeak),
    (Bug::RecallUnheard, "reuse, slow call, late recall", Rule::Recalled),
    (Bug::WaitersTakenForOwn, "reuse, requests that wait", Rule::NotPassedBy),
    (Bug::DeadlineFromReceipt, "reuse, slow call, late recall", Rule::NotPassedBy),
    (Bug::KeptTooLong, "reuse, three processes", Rule::KeptInTime),
    (Bug::ClockStandsStill, "reuse, freeze", Rule::NotPassedBy),
    (Bug::TenantsAlike, "reuse, tenants", Rule::OwnTurn),
    (Bug::StartsForgotten, "rate", Rule::Rate),
];

#[test]
fn each_rule_undone_is_caught() {
    let only = std::env::var("MODEL_ONLY").ok();
    let mut missed = Vec::new();
    for (bug, name, rule) in MUTANTS {
        if only.as_ref().is_some_and(|only| format!("{bug:?}") != *only) {
            continue;
        }
        let start = Instant::now();
        let config = Config { bug: Some(bug), ..config(name) };
        let far = config.faults.restarts + config.faults.failovers + config.faults.flushes > 0;
        let stop = HasDiscoveries::AnyOf([rule.name()].into());
        let Found { states, broken, .. } = explore(&config, stop, far, None);
        let caught = broken.iter().find(|(broken, _)| *broken == rule.name());
        eprintln!("{bug:?}: {rule:?} after {states} states, {:.1?}", start.elapsed());
        match caught {
            Some((_, steps)) if only.is_some() => eprintln!("{steps}"),
            Some(_) => {}
            None => missed.push(format!("{bug:?} in {name}: {rule:?} holds")),
        }
    }
    assert!(missed.is_empty(), "not caught:\n{}", missed.join("\n"));
}
