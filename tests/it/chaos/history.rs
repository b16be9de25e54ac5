//! The history of a run: every request and every fault, on one monotonic clock.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant, SystemTime};

use serde::Serialize;

use super::plan::Shape;

/// A point in time, in µs since the run began.
pub(crate) type At = u64;

/// A run, as the checker reads it.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Run {
    pub(crate) rules: Rules,
    pub(crate) requests: Vec<Request>,
    pub(crate) faults: Vec<Fault>,
    /// Every process that ever ran, by number.
    pub(crate) gateways: Vec<Life>,
    /// When this machine did not let even the test run.
    pub(crate) stalls: Vec<(At, At)>,
    /// The starts that Redis counted for rates.
    pub(crate) starts: Vec<Start>,
    /// The pauses that Redis recorded.
    pub(crate) pauses: Vec<Pause>,
    /// The adaptive limits that Redis recorded.
    pub(crate) numbers: Vec<Number>,
    /// When an operator asked for an end of all pauses, and when that was answered.
    pub(crate) resumes: Vec<(At, At)>,
    /// When no key was left in Redis, after the last request had ended: none without a rate, and none at all.
    pub(crate) empty: Option<At>,
    pub(crate) forgotten: Option<At>,
    /// What the upstream still had in flight then.
    pub(crate) in_flight_left: usize,
}

/// The number of models of a key, if they are limited.
pub(crate) const MODELS: usize = 2;

/// The configuration of the gateways.
#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Rules {
    /// The limit of each key.
    pub(crate) limits: Vec<usize>,
    /// The rate of each key, if it has one.
    pub(crate) rates: Vec<Option<Rate>>,
    /// The budget of each key, if it has one; with tenants, that of each tenant of the key.
    pub(crate) budgets: Vec<Option<Budget>>,
    /// The longest pause that a response can ask for.
    pub(crate) max_pause: At,
    pub(crate) wait: At,
    pub(crate) lease: At,
    pub(crate) shape: Shape,
    pub(crate) fair: Fair,
    /// The number of gateways that pass permits on to their own next requests.
    pub(crate) reuse: usize,
    /// The key whose limit finds itself, from 1 to that of the rules, if there is one.
    pub(crate) adaptive: Option<usize>,
    /// How many permits of a key the requests with one model may have, if that is limited.
    pub(crate) also: Option<usize>,
}

impl Rules {
    /// Returns whether the limit of a key finds itself.
    pub(crate) fn is_adaptive(&self, key: usize) -> bool {
        self.adaptive == Some(key)
    }
}

/// A change of the adaptive limit, as Redis recorded it, by its clock.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Number {
    pub(crate) limit: usize,
    /// When it was last lowered, and last changed.
    pub(crate) lowered: At,
    pub(crate) changed: At,
}

/// How many requests of a key may start in a window.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Rate {
    pub(crate) starts: usize,
    pub(crate) window: At,
}

/// What requests of a key may use: so much at once, which refills in that time.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Budget {
    pub(crate) burst: u64,
    pub(crate) refill: At,
    /// The highest estimate of a request.
    pub(crate) most: u64,
}

/// A grant that counts for a rate, by Redis' clock.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Start {
    pub(crate) key: usize,
    pub(crate) at: At,
}

/// A pause until a time, as Redis recorded it, by its clock.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Pause {
    pub(crate) key: usize,
    pub(crate) written: At,
    pub(crate) ends: At,
}

/// Whether tenants share the permits of a key, and the cap of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) enum Fair {
    #[default]
    Arrival,
    Shares,
    Each(usize),
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Request {
    pub(crate) key: usize,
    /// The tenant of that key that sent it; 0 without tenants.
    pub(crate) tenant: usize,
    /// The model that it asks for, if models are limited and it names one.
    pub(crate) model: Option<usize>,
    /// The process that it was sent to.
    pub(crate) gateway: usize,
    pub(crate) kind: Kind,
    /// How long the upstream works before its head.
    pub(crate) work: At,
    /// How long its body lasts.
    pub(crate) stream: At,
    /// The upstream answers it with 429 and a time, which pauses its key.
    pub(crate) later: bool,
    /// What it is estimated to use of a budget, and what it does use.
    pub(crate) estimate: u64,
    pub(crate) used: u64,
    pub(crate) sent: At,
    /// Its stays at the upstream: one, unless something is wrong.
    pub(crate) stays: Vec<Stay>,
    pub(crate) head: Option<(At, u16)>,
    /// When the last bytes of the body arrived.
    pub(crate) last_frame: Option<At>,
    pub(crate) end: Option<(At, End)>,
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Kind {
    Short,
    Stream,
    Post,
    /// Leaves before the head arrives.
    Impatient,
    /// Leaves during the body.
    Leaving,
    /// Reads one byte a second, and then leaves.
    Slow,
}

/// The time from a request's arrival at the upstream until its end there.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Stay {
    pub(crate) from: At,
    pub(crate) to: Option<At>,
    /// It was not cut off.
    pub(crate) whole: bool,
}

/// How a request ended for its client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum End {
    /// With its whole body.
    Whole,
    /// With a normal end, but parts of the body are missing.
    Short,
    /// With an error in the body.
    Cut,
    /// The client left.
    Left,
    /// The connection broke before there was a head.
    Broken,
    /// The client gave up: there was no answer, or it did not end.
    Unanswered,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub(crate) enum What {
    KillGateway,
    FreezeGateway,
    FreezeRedis,
    RestartRedis,
    KillPubsub,
    KillNormal,
    ScriptFlush,
    FlushAll,
    DebugSleep,
    Delay,
    Stall,
    StallCut,
    Cut,
    HalfClose,
    /// It comes back as a replica of the server that replaced it.
    KillMaster,
    /// Sentinel makes a replica the master; what the old one had not replicated is lost.
    Failover,
    /// A replica of a cluster takes over once it has all data of its master.
    Handover,
    /// A slot moves to another master of the cluster while it is used.
    MoveSlot,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Fault {
    pub(crate) what: What,
    /// The affected process; `None` for all.
    pub(crate) gateway: Option<usize>,
    /// The affected keys; empty for all.
    pub(crate) keys: Vec<usize>,
    /// The process that replaced it.
    pub(crate) heir: Option<usize>,
    pub(crate) begin: At,
    pub(crate) end: At,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Life {
    pub(crate) born: At,
    pub(crate) died: Option<At>,
}

/// Writes the history.
#[derive(Debug)]
pub(crate) struct Recorder {
    began: Instant,
    /// The same moment by the clock of this machine, which is that of Redis, too.
    began_by_clock: At,
    run: Mutex<Run>,
}

impl Recorder {
    pub(crate) fn new(rules: Rules) -> Self {
        let (began, by_clock) = (Instant::now(), SystemTime::UNIX_EPOCH.elapsed().unwrap());
        let run = Mutex::new(Run { rules, ..Run::default() });
        Self { began, began_by_clock: us(by_clock), run }
    }

    /// Returns when it was this time by Redis' clock, in µs.
    pub(crate) fn at(&self, by_clock: u64) -> At {
        by_clock.saturating_sub(self.began_by_clock)
    }

    /// Returns what Redis' clock shows at a time, in µs.
    pub(crate) fn by_clock(&self, at: At) -> u64 {
        self.began_by_clock + at
    }

    pub(crate) fn now(&self) -> At {
        us(self.began.elapsed())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Run> {
        self.run.lock().unwrap()
    }

    /// Records a request that is about to be sent. Returns its number.
    pub(crate) fn sent(&self, mut request: Request) -> usize {
        let mut run = self.lock();
        request.sent = self.now();
        run.requests.push(request);
        run.requests.len() - 1
    }

    pub(crate) fn update(&self, number: usize, act: impl FnOnce(&mut Request, At)) {
        let mut run = self.lock();
        let now = self.now();
        act(&mut run.requests[number], now);
    }

    pub(crate) fn born(&self) -> usize {
        let mut run = self.lock();
        run.gateways.push(Life { born: self.now(), died: None });
        run.gateways.len() - 1
    }
}

pub(crate) fn us(time: Duration) -> At {
    u64::try_from(time.as_micros()).unwrap()
}

impl Fault {
    pub(crate) fn befalls(&self, key: usize) -> bool {
        self.keys.is_empty() || self.keys.contains(&key)
    }
}

impl What {
    /// Returns whether it makes Redis lose data. If there are several servers, one that stands still may be replaced
    /// meanwhile.
    pub(crate) const fn is_loss(self, shape: Shape) -> bool {
        match self {
            Self::FlushAll | Self::RestartRedis | Self::KillMaster | Self::Failover => true,
            Self::FreezeRedis => !matches!(shape, Shape::One),
            _ => false,
        }
    }

    /// Returns whether no client may notice it.
    pub(crate) const fn is_harmless(self) -> bool {
        matches!(self, Self::ScriptFlush | Self::MoveSlot)
    }

    /// With several servers, each.
    pub(crate) const fn befalls_all_servers(self) -> bool {
        matches!(self, Self::KillPubsub | Self::KillNormal | Self::ScriptFlush)
    }
}
