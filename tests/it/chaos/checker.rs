//! Reads the history of a run, and reports what was wrong with it.
//!
//! The rules and their exceptions:
//!
//! * **cap**: whenever a request arrives at the upstream, no more than `limit` of its key are in flight, including it.
//!   A request counts from its arrival to its end, except
//!   - after its client left: its permit is free from then on, and the connection to the upstream is cut after that;
//!   - for the last [`TAIL`] before it was cut off, if it was: the upstream sees the end of a stream whose lease was
//!     lost that much later;
//!   - while its gateway is frozen, and [`TAIL`] longer, if it arrived before.
//!
//!   More than the limit may arrive only after Redis lost its data: from the loss until one lease and [`TAIL`] after
//!   Redis is back, and [`WAKE`] after a gateway wakes that slept while Sentinel made another server the master. By
//!   then every holder was counted again or had lost its lease, so a later request that exceeds the cap is one too
//!   many. Never more than once the limit for each loss, and once for what was there before.
//! * **order**: of two requests for one key, the later one arrives at the upstream first, or arrives at all while the
//!   earlier one waits in vain. Only requests sent [`GAP`] or more apart are compared; if there is more than one
//!   permit, two that are granted at once may overtake each other by [`GAP`] on their way. The earlier one must be
//!   clean: no fault of its gateway, link or Redis from its sending to its turn, nor in the [`SETTLE`] before. (A
//!   process that loses its subscription can be passed over; a wipe loses the queue; a frozen Redis reads its sockets
//!   in any order.) `SCRIPT FLUSH` is no excuse, nor are faults of other gateways. Gateways that pass permits on may
//!   pass a request by for [`REUSE`], so compared requests are sent that much further apart. Those that arrive while some
//!   processes know of a new pause pass nobody by: a gateway that knows of it starts no request, although its permit was
//!   granted before.
//! * **idle**: a clean request waits while, for [`IDLE`] without interruption, its key has free permits, is not paused,
//!   fewer have started than its rate allows, and the last grant was so long ago that its budget has enough for any.
//! * **rate**: within a window, no more start than the rate allows. Starts are those that Redis counted, by its clock; and
//!   requests that came to the upstream. A request started between its sending and its arrival, and at most [`TAIL`]
//!   before this if its gateway, its link and Redis were without faults: what may have started before the window does
//!   not count. As many more may start for each loss of Redis' data in the window; for [`WAKE`] longer with several
//!   servers, of which the former one may still grant.
//! * **budget**: in no time do requests use more than the burst, what refills meanwhile, and what those that held a permit
//!   when it began can have given back: as much as their estimates, each once. Requests count if they were granted in
//!   that time for certain. For each loss of Redis' data the burst is there once more, and so are these.
//! * **pause**: nothing starts, by either account, from [`MESSAGE`] after the record of a pause was written until
//!   [`SLACK`] before its end, which is the time that the response named, unless an operator resumed. If a fault was on
//!   when the messages were on their way, what it held back may start until [`MESSAGE`] after its end. After a loss of
//!   data, or a fault of one of several servers, nothing is known of that pause.
//! * **adaptive**: a limit that finds itself is within its range, and was lowered no more often than the upstream refused
//!   requests.
//! * **progress**: each key is served after the last fault.
//! * **answer**: each request has its head within wait + its work + [`MARGIN`], and its body within its duration +
//!   [`MARGIN`]; the time in which its gateway was frozen is added. Redis is no excuse.
//! * **status**: 200, 429 only after the whole wait or from the upstream, 503 only if unclean or paused, nothing else. No
//!   broken connection unless its gateway was killed, or wakes after its lease. No incomplete body that does not end with
//!   an error. No request twice at the upstream.
//! * **wake**: a gateway that was frozen for longer than its lease passes on no frame of what it had in flight before,
//!   and leaves the upstream within [`WAKE`].
//! * **recovery**: at most [`RECOVERY`] after each fault, every affected gateway serves again; the time in which other
//!   faults affected it is added.
//! * **rest**: in the end nothing is in flight, and no key is in Redis one lease and 1 s after the last request has
//!   ended; with a rate, three leases and 2 s, which is as long as the starts may be kept.
//!
//! If tenants share the permits of a key, order is that within a tenant; each tenant's cap is checked like that of the
//! key, and a tenant at its cap may wait beside a free permit. So it is with the models of requests, if they are limited:
//! order is that of the requests that name the same model or none, and of one tenant where there are tenants.
//!
//! If this machine stood still even for the test, all times are longer by that.

mod adaptive;
mod budget;
mod grants;

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use self::adaptive::Numbers;
use self::budget::Spent;
use self::grants::{Pauses, Starts};
use super::history::{At, End, Fair, Fault, Kind, MODELS, Request, Run, What};

const MS: At = 1000;
/// How long it may take until the upstream sees that it was cut off.
const TAIL: At = 250 * MS;
/// How far apart requests must be sent for their order to be known.
const GAP: At = 100 * MS;
/// How long after a fault's end a gateway may be busy with its consequences.
const SETTLE: At = 1200 * MS;
const IDLE: At = 2500 * MS;
/// How long a gateway passes permits on after a call that no other process waits.
const REUSE: At = 50 * MS;
/// How long a message that arrives takes to all processes, and what they send before to Redis.
const MESSAGE: At = 250 * MS;
/// How much longer than it was asked for a pause lasts.
const SLACK: At = 250 * MS;
const MARGIN: At = 1500 * MS;
const WAKE: At = 400 * MS;
const RECOVERY: At = 3000 * MS;

/// The result.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Report {
    pub(crate) violations: Vec<Violation>,
    pub(crate) requests: usize,
    pub(crate) granted: usize,
    pub(crate) statuses: BTreeMap<u16, usize>,
    pub(crate) ends: BTreeMap<String, usize>,
    /// The number of requests whose order was checked.
    pub(crate) compared: usize,
    pub(crate) faults: BTreeMap<What, Kindred>,
    /// The most in flight at once, by key, as the upstream saw it.
    pub(crate) peaks: Vec<usize>,
    /// The time over the cap as the upstream saw it, for any reason.
    pub(crate) over_ms: f64,
    /// The part of it that a loss of data explains.
    pub(crate) over_after_loss_ms: f64,
    /// The time from the return of Redis after a loss to the last request over the cap.
    pub(crate) last_over_after_loss_ms: f64,
    /// By key with a rate.
    pub(crate) starts: Vec<Starts>,
    /// By key with a budget, and by tenant if each has one.
    pub(crate) budgets: Vec<Spent>,
    pub(crate) pauses: Pauses,
    /// If a limit finds itself.
    pub(crate) numbers: Option<Numbers>,
    /// The time from sending to head, for granted requests.
    pub(crate) head_ms_p50: f64,
    pub(crate) head_ms_p99: f64,
    pub(crate) head_ms_max: f64,
    pub(crate) empty_after_ms: Option<f64>,
    pub(crate) stalled_ms: f64,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct Violation {
    pub(crate) rule: &'static str,
    pub(crate) at: At,
    pub(crate) key: Option<usize>,
    pub(crate) text: String,
}

/// The faults of one kind.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Kindred {
    pub(crate) count: usize,
    /// The time from the end of the fault to the first success after it, for the slowest gateway.
    pub(crate) recovery_ms: Vec<f64>,
}

pub(crate) fn check(run: &Run) -> Report {
    let mut check = Check { run, report: Report::default() };
    check.figures();
    let tenants = 1 + run.requests.iter().map(|request| request.tenant).max().unwrap_or(0);
    let of_tenants: Vec<_> = match run.rules.fair {
        Fair::Arrival => vec![Of::default()],
        _ => (0..tenants).map(|tenant| Of { tenant: Some(tenant), model: None }).collect(),
    };
    let models: Vec<_> = match run.rules.also {
        None => vec![None],
        Some(_) => (0..MODELS).map(Some).chain([None]).map(Some).collect(),
    };
    for (key, limit) in run.rules.limits.iter().enumerate() {
        check.cap(key, Of::default(), *limit);
        if let Some(rate) = run.rules.rates[key] {
            check.rate(key, rate);
        }
        if let Some(budget) = run.rules.budgets[key] {
            let of_each =
                if run.rules.fair == Fair::Arrival { &[Of::default()][..] } else { &of_tenants };
            of_each.iter().for_each(|of| check.budget(key, *of, budget));
        }
        check.pause(key);
        check.adaptive(key);
        for model in 0..run.rules.also.map_or(0, |_| MODELS) {
            let of = Of { tenant: None, model: Some(Some(model)) };
            check.cap(key, of, run.rules.also.unwrap_or(usize::MAX));
        }
        for of in &of_tenants {
            if let Fair::Each(each) = run.rules.fair {
                check.cap(key, *of, each);
            }
            for model in &models {
                let of = Of { model: *model, ..*of };
                check.order(key, of);
                check.idle(key, of);
            }
        }
    }
    for (number, request) in run.requests.iter().enumerate() {
        check.answer(number, request);
        check.status(number, request);
        check.wake(number, request);
    }
    check.recovery();
    check.progress();
    check.rest();
    check.report.violations.sort_by_key(|violation| violation.at);
    check.report
}

/// Requests of a key: all, or those of one tenant, or with one model or none, or both.
#[derive(Clone, Copy, Default)]
struct Of {
    tenant: Option<usize>,
    model: Option<Option<usize>>,
}

impl Of {
    fn has(self, request: &Request) -> bool {
        self.tenant.is_none_or(|tenant| request.tenant == tenant)
            && self.model.is_none_or(|model| request.model == model)
    }
}

impl fmt::Display for Of {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tenant.map_or(Ok(()), |tenant| write!(f, " of tenant {tenant}"))?;
        self.model.flatten().map_or(Ok(()), |model| write!(f, " of model {model}"))
    }
}

struct Check<'a> {
    run: &'a Run,
    report: Report,
}

impl Run {
    /// Returns how long this machine stood still in this time.
    fn stalled(&self, from: At, to: At) -> At {
        self.stalls.iter().map(|stall| overlap(*stall, (from, to))).sum()
    }

    /// Returns when a gateway was frozen.
    fn frozen(&self, gateway: usize) -> impl Iterator<Item = (At, At)> {
        let of_it = move |what, whose| what == What::FreezeGateway && whose == Some(gateway);
        self.faults.iter().filter(move |f| of_it(f.what, f.gateway)).map(|f| (f.begin, f.end))
    }

    /// Returns whether the request ended as its gateway woke after its lease: one that was stopped between head and
    /// body cuts the connection with the head still unsent.
    fn slept_past_its_lease(&self, request: &Request, at: At) -> bool {
        let lease = self.rules.lease;
        request.came().is_some_and(|came| {
            self.frozen(request.gateway).any(|(begin, end)| {
                came <= begin + TAIL / 5 && end - begin >= lease && (end..end + WAKE).contains(&at)
            })
        })
    }

    /// Returns whether the request's gateway slept while Sentinel made another server the master, and has just woken:
    /// it uses the old master, which is not demoted yet, until it has asked the sentinel.
    fn woke_beside_an_old_master(&self, loss: &Fault, number: usize, at: At) -> bool {
        let gateway = self.requests[number].gateway;
        loss.what == What::Failover
            && self.frozen(gateway).any(|(begin, end)| {
                begin < loss.end.saturating_add(TAIL)
                    && loss.end < end
                    && (end..end.saturating_add(WAKE)).contains(&at)
            })
    }

    /// Returns whether nothing affected the gateway, or Redis for that key, in this time or shortly before.
    fn is_clean(&self, key: usize, gateway: usize, from: At, to: At) -> bool {
        let life = &self.gateways[gateway];
        // A new gateway has no connection; before the run there was time to open one.
        let is_young = self.is_heir(gateway) && life.born + SETTLE > from;
        !is_young
            && life.died.is_none_or(|died| died > to)
            && !self.faults.iter().any(|fault| {
                !fault.what.is_harmless()
                    && fault.befalls(key)
                    && fault.gateway.is_none_or(|whose| whose == gateway)
                    && overlap((fault.begin, fault.end.saturating_add(SETTLE)), (from, to + 1)) > 0
            })
    }

    fn is_heir(&self, gateway: usize) -> bool {
        self.faults.iter().any(|fault| fault.heir == Some(gateway))
    }

    fn died(&self, gateway: usize, until: At) -> bool {
        self.gateways[gateway].died.is_some_and(|died| died <= until)
    }
}

fn overlap(a: (At, At), b: (At, At)) -> At {
    a.1.min(b.1).saturating_sub(a.0.max(b.0))
}

fn ms(time: At) -> f64 {
    (time as f64) / 1000.0
}

impl Request {
    fn came(&self) -> Option<At> {
        self.stays.first().map(|stay| stay.from)
    }

    /// Returns when it is known whose turn it was: at its arrival, or when it was rejected after its wait.
    fn turn(&self) -> Option<At> {
        self.came().or(match self.head {
            Some((at, 429)) => Some(at),
            _ => None,
        })
    }
}

impl Check<'_> {
    fn flag(&mut self, rule: &'static str, at: At, key: impl Into<Option<usize>>, text: String) {
        self.report.violations.push(Violation { rule, at, key: key.into(), text });
    }

    /// Returns these requests of a key.
    fn of_key(&self, key: usize, of: Of) -> impl Iterator<Item = (usize, &Request)> {
        let is_of = move |request: &Request| request.key == key && of.has(request);
        self.run.requests.iter().enumerate().filter(move |(_, request)| is_of(request))
    }

    fn figures(&mut self) {
        let report = &mut self.report;
        let mut heads = Vec::new();
        for request in &self.run.requests {
            report.requests += 1;
            report.granted += usize::from(!request.stays.is_empty());
            if let Some((at, status)) = request.head {
                *report.statuses.entry(status).or_default() += 1;
                if status == 200 {
                    heads.push(at - request.sent);
                }
            }
            let end = request.end.as_ref().map(|(_, end)| format!("{end:?}"));
            *report.ends.entry(end.unwrap_or_default()).or_default() += 1;
        }
        heads.sort_unstable();
        if let Some(last) = heads.len().checked_sub(1) {
            report.head_ms_p50 = ms(heads[last / 2]);
            report.head_ms_p99 = ms(heads[last * 99 / 100]);
            report.head_ms_max = ms(heads[last]);
        }
        for fault in &self.run.faults {
            report.faults.entry(fault.what).or_default().count += 1;
        }
        report.stalled_ms = ms(self.run.stalled(0, At::MAX));
    }

    // ===== cap =====

    /// Returns the intervals in which a stay of a request counts; up to a time at which it does not, there may be more
    /// than one.
    fn counted(&self, request: &Request, stay: usize) -> Vec<(At, At)> {
        let stay = &request.stays[stay];
        let mut to = stay.to.unwrap_or(At::MAX);
        match request.end {
            Some((left, End::Left | End::Unanswered)) => to = to.min(left),
            _ if !stay.whole => to = to.saturating_sub(TAIL),
            _ => {}
        }
        let mut spans = vec![(stay.from, to.max(stay.from + 1))];
        for (begin, end) in self.run.frozen(request.gateway) {
            // What it still had in flight when it was stopped is from before.
            if stay.from <= begin + TAIL / 5 {
                let awake = end.saturating_add(TAIL);
                spans = without(spans, (begin, awake));
            }
        }
        spans
    }

    fn cap(&mut self, key: usize, of: Of, limit: usize) {
        // Time, whether it arrives, which request, and whether the upstream sees it so or it counts so.
        let mut seen = Vec::new();
        let mut steps = Vec::new();
        for (number, request) in self.of_key(key, of) {
            for (index, stay) in request.stays.iter().enumerate() {
                seen.push((stay.from, true));
                seen.push((stay.to.unwrap_or(At::MAX), false));
                for (from, to) in self.counted(request, index) {
                    steps.push((from, true, number, from == stay.from));
                    steps.push((to, false, number, false));
                }
            }
        }
        seen.sort_unstable();
        steps.sort_unstable();
        if of.tenant.is_none() && of.model.is_none() {
            let (over, peak) = over(&seen, limit);
            self.report.over_ms += ms(over);
            self.report.peaks.push(peak);
            let counted: Vec<_> = steps.iter().map(|(at, comes, ..)| (*at, *comes)).collect();
            self.report.over_after_loss_ms += ms(self::over(&counted, limit).0);
        }

        let shape = self.run.rules.shape;
        let losses = self.run.faults.iter().filter(|f| f.what.is_loss(shape) && f.befalls(key));
        let losses: Vec<_> = losses.collect();
        let mut in_flight: BTreeMap<usize, At> = BTreeMap::new();
        for (at, comes, number, is_new) in steps {
            if !comes {
                in_flight.remove(&number);
                continue;
            }
            in_flight.insert(number, at);
            if !is_new || in_flight.len() <= limit {
                continue;
            }
            let end = |end: At| end.saturating_add(self.run.rules.lease + TAIL);
            let excuse = losses.iter().find(|loss| {
                let soon =
                    loss.begin <= at && at <= end(loss.end) + self.run.stalled(loss.begin, at);
                soon || self.run.woke_beside_an_old_master(loss, number, at)
            });
            let oldest = in_flight.keys().filter_map(|n| self.run.requests[*n].came()).min();
            let since = losses.iter().filter(|loss| {
                loss.begin <= at && oldest.is_some_and(|oldest| end(loss.end) >= oldest)
            });
            let most = limit * (1 + since.count().max(1));
            let Some(loss) = excuse else {
                let text = format!(
                    "request {number} came as number {} of {limit}{of}, with {:?} in flight",
                    in_flight.len(),
                    in_flight.keys().collect::<Vec<_>>()
                );
                self.flag("cap", at, key, text);
                continue;
            };
            let after = ms(at.saturating_sub(loss.end));
            let last = &mut self.report.last_over_after_loss_ms;
            *last = last.max(after);
            if in_flight.len() > most {
                let text = format!(
                    "request {number} came as number {} of {limit}{of} {after} ms after Redis was back without its data, {most} at most",
                    in_flight.len()
                );
                self.flag("cap", at, key, text);
            }
        }
    }

    // ===== order =====

    fn order(&mut self, key: usize, of: Of) {
        // Two that are granted at once may be swapped on their way, but one alone may not.
        let slack = if self.run.rules.limits[key] == 1 { 0 } else { GAP };
        let reuse = if self.run.rules.reuse > 0 { REUSE } else { 0 };
        let mut requests: Vec<_> = self.of_key(key, of).collect();
        requests.sort_by_key(|(_, request)| request.sent);
        let pausing = self.run.pausing(key);
        let is_pausing = |at: &At| pausing.iter().any(|(from, to)| (*from..*to).contains(at));
        // The earliest arrival of this one and of all that were sent later, and which request it was.
        let mut earliest = vec![(At::MAX, 0); requests.len() + 1];
        for (i, (number, request)) in requests.iter().enumerate().rev() {
            let own = (request.came().filter(|at| !is_pausing(at)).unwrap_or(At::MAX), *number);
            earliest[i] = earliest[i + 1].min(own);
        }
        let (mut compared, mut flags) = (0, Vec::new());
        for (number, request) in &requests {
            let Some(turn) = request.turn() else { continue };
            if !self.run.is_clean(request.key, request.gateway, request.sent, turn) {
                continue;
            }
            compared += 1;
            let stalled = self.run.stalled(request.sent, turn);
            let later = request.sent + GAP + reuse + stalled;
            let i = requests.partition_point(|(_, other)| other.sent < later);
            let (came, other) = earliest[i];
            if came < turn.saturating_sub(slack + stalled) {
                let what = if request.stays.is_empty() { "was refused" } else { "came" };
                let after = ms(self.run.requests[other].sent - request.sent);
                flags.push((turn, format!(
                    "request {number} {what} {} ms after {other}, which was sent {after} ms after it",
                    ms(turn - came)
                )));
            }
        }
        self.report.compared += compared;
        for (at, text) in flags {
            self.flag("order", at, key, text);
        }
    }

    // ===== idle =====

    fn idle(&mut self, key: usize, of: Of) {
        // One that finds itself is at least this.
        let is_adaptive = self.run.rules.is_adaptive(key);
        let limit = if is_adaptive { 1 } else { self.run.rules.limits[key] };
        let each = if let Fair::Each(each) = self.run.rules.fair { each } else { usize::MAX };
        let also = self.run.rules.also.unwrap_or(usize::MAX);
        let mut seen = Vec::new();
        for (_, request) in self.of_key(key, Of::default()) {
            let is_own = [
                of.tenant.is_some_and(|tenant| request.tenant == tenant),
                of.model.flatten().is_some_and(|model| request.model == Some(model)),
            ];
            for stay in &request.stays {
                seen.push((stay.from, true, is_own));
                seen.push((stay.to.unwrap_or(At::MAX), false, is_own));
            }
        }
        seen.sort_unstable();
        // The times with free permits.
        let (mut room, mut since, mut in_flight, mut own) = (Vec::new(), Some(0), 0, [0; 2]);
        for (at, comes, is_own) in seen {
            let count = |count: &mut usize, by: usize| {
                *count = if comes { *count + by } else { *count - by };
            };
            count(&mut in_flight, 1);
            own.iter_mut().zip(is_own).for_each(|(own, is)| count(own, usize::from(is)));
            let is_room = in_flight < limit && own[0] < each && own[1] < also;
            match since {
                Some(from) if !is_room => {
                    room.push((from, at));
                    since = None;
                }
                None if is_room => since = Some(at),
                _ => {}
            }
        }
        room.extend(since.map(|from| (from, At::MAX)));
        let mut room = self.run.closed(key, of).into_iter().fold(room, without);
        room.retain(|(from, to)| to - from >= IDLE);
        let mut flags = Vec::new();
        for (number, request) in self.of_key(key, of) {
            let Some(turn) = request.turn() else { continue };
            let waited = (request.sent, turn);
            let idle = room.iter().map(|room| overlap(*room, waited)).max().unwrap_or(0);
            if idle >= IDLE + self.run.stalled(waited.0, waited.1)
                && self.run.is_clean(request.key, request.gateway, request.sent, turn)
            {
                flags.push((
                    turn,
                    format!("request {number} waited {} ms beside a free permit", ms(idle)),
                ));
            }
        }
        for (at, text) in flags {
            self.flag("idle", at, key, text);
        }
    }

    // ===== answers =====

    fn answer(&mut self, number: usize, request: &Request) {
        let gateway = request.gateway;
        let late = |from: At, allowed: At, to: At| {
            let frozen: At =
                self.run.frozen(gateway).map(|frozen| overlap(frozen, (from, to))).sum();
            let all = allowed + frozen + self.run.stalled(from, to);
            to - from > all
        };
        let Some((end_at, end)) = &request.end else {
            let text = format!("request {number}: its client never came to an end");
            return self.flag("answer", request.sent, request.key, text);
        };
        let to = request.head.map_or(*end_at, |(at, _)| at);
        let left = request.head.is_none() && *end == End::Left;
        let killed = self.run.died(gateway, *end_at);
        let bound = self.run.rules.wait + request.work + MARGIN;
        if !left && !killed && late(request.sent, bound, to) {
            let text = format!("request {number} had no head for {} ms", ms(to - request.sent));
            return self.flag("answer", to, request.key, text);
        }
        if let Some((head, _)) = request.head
            && request.kind != Kind::Slow
            && !killed
            && late(head, request.stream + request.stream / 2 + MARGIN, *end_at)
        {
            let text = format!("request {number} had no end for {} ms", ms(end_at - head));
            self.flag("answer", *end_at, request.key, text);
        }
    }

    fn status(&mut self, number: usize, request: &Request) {
        let key = request.key;
        if request.stays.len() > 1 {
            let text = format!("request {number} came {} times", request.stays.len());
            self.flag("status", request.stays[1].from, key, text);
        }
        let wait = self.run.rules.wait;
        let is_paused =
            |at| self.run.paused(key).iter().any(|(from, to)| (*from..*to).contains(&at));
        if let Some((at, status)) = request.head {
            let waited = at - request.sent;
            match status {
                429 if waited + 20 * MS >= wait => {}
                429 if request.later && request.came().is_some() => {}
                429 => {
                    let text = format!("request {number} was refused after {} ms", ms(waited));
                    self.flag("status", at, key, text);
                }
                503 if self.run.is_clean(request.key, request.gateway, request.sent, at)
                    && !is_paused(at) =>
                {
                    let text = format!(
                        "request {number}: 503, with nothing wrong, after {} ms",
                        ms(waited)
                    );
                    self.flag("status", at, key, text);
                }
                200 | 503 => {}
                _ => self.flag("status", at, key, format!("request {number}: {status}")),
            }
        }
        let Some((at, end)) = &request.end else { return };
        let killed = self.run.died(request.gateway, at + 100 * MS);
        match end {
            End::Broken if !killed && !self.run.slept_past_its_lease(request, *at) => {
                self.flag("status", *at, key, format!("request {number}: the connection broke"));
            }
            End::Cut
                if !killed
                    && self.run.is_clean(request.key, request.gateway, request.sent, *at) =>
            {
                self.flag("status", *at, key, format!("request {number}: cut, with nothing wrong"));
            }
            End::Short => {
                let text = format!("request {number}: a body that lacks its end came to an end");
                self.flag("status", *at, key, text);
            }
            _ => {}
        }
    }

    fn wake(&mut self, number: usize, request: &Request) {
        for (begin, end) in self.run.frozen(request.gateway) {
            if end == At::MAX || end - begin < self.run.rules.lease + TAIL {
                continue;
            }
            for stay in &request.stays {
                let to = stay.to.unwrap_or(At::MAX);
                if stay.from > begin || to < end {
                    continue;
                }
                if to > end + WAKE + self.run.stalled(end, end + WAKE)
                    && !self.run.died(request.gateway, to)
                {
                    let after = ms(to.min(end + 60_000 * MS) - end);
                    let text = format!(
                        "request {number} was in flight {after} ms after its gateway woke past its lease"
                    );
                    self.flag("wake", end, request.key, text);
                }
                // A refusal with a head of its own was not cut off: it reports that the lease was lost.
                if let (Some(last), Some((head, 200))) = (request.last_frame, request.head)
                    && head < begin
                    && last > end
                    && request.kind != Kind::Slow
                    && self.run.stalled(begin, last) == 0
                {
                    let text = format!(
                        "request {number} had a frame {} ms after its gateway woke past its lease",
                        ms(last - end)
                    );
                    self.flag("wake", last, request.key, text);
                }
            }
        }
    }

    // ===== recovery and rest =====

    fn recovery(&mut self) {
        let mut successes: Vec<Vec<(At, usize)>> = vec![Vec::new(); self.run.gateways.len()];
        let mut last = 0;
        for request in &self.run.requests {
            last = last.max(request.sent);
            if let Some((at, 200)) = request.head {
                successes[request.gateway].push((at, request.key));
            }
        }
        successes.iter_mut().for_each(|times| times.sort_unstable());
        for fault in &self.run.faults {
            let befell: Vec<usize> = match (fault.heir, fault.gateway) {
                (Some(heir), _) => vec![heir],
                (None, Some(gateway)) => vec![gateway],
                (None, None) => (0..self.run.gateways.len())
                    .filter(|g| self.run.gateways[*g].born <= fault.begin)
                    .collect(),
            };
            let mut slowest = None;
            for gateway in befell {
                let died = self.run.gateways[gateway].died.unwrap_or(At::MAX);
                let first = successes[gateway].partition_point(|(at, _)| *at < fault.end);
                let mut later = successes[gateway][first..].iter();
                let first = later.find(|(_, key)| fault.befalls(*key)).map(|(at, _)| *at);
                let until = first.unwrap_or_else(|| last.min(died)).max(fault.end);
                let took = until - fault.end;
                // The time in which other faults affected it, or their consequences lasted.
                let mut others: Vec<_> = self
                    .run
                    .faults
                    .iter()
                    .filter(|other| !std::ptr::eq(*other, fault))
                    .filter(|other| !other.what.is_harmless())
                    .filter(|other| other.gateway.is_none_or(|whose| whose == gateway))
                    .map(|other| {
                        (other.begin.max(fault.end), other.end.saturating_add(SETTLE).min(until))
                    })
                    .filter(|(from, to)| from < to)
                    .collect();
                others.sort_unstable();
                let (mut added, mut upto) = (0, 0);
                for (from, to) in others {
                    added += to.saturating_sub(from.max(upto));
                    upto = upto.max(to);
                }
                let allowed = RECOVERY + added + self.run.stalled(fault.end, until);
                if took > allowed {
                    let text = format!(
                        "gateway {gateway} did not serve for {} ms after {:?}",
                        ms(took),
                        fault.what
                    );
                    self.flag("recovery", until, None, text);
                }
                if first.is_some() && died > until {
                    slowest = slowest.max(Some(took));
                }
            }
            let kindred = self.report.faults.entry(fault.what).or_default();
            kindred.recovery_ms.extend(slowest.map(ms));
        }
        for kindred in self.report.faults.values_mut() {
            kindred.recovery_ms.sort_by(f64::total_cmp);
        }
    }

    fn rest(&mut self) {
        let ends = self.run.requests.iter().filter_map(|request| request.end.as_ref());
        let last = ends.map(|(at, _)| *at).max().unwrap_or(0);
        self.report.empty_after_ms = self.run.empty.map(|at| ms(at.saturating_sub(last)));
        let bound = last + self.run.rules.lease + 1000 * MS;
        if self.run.empty.is_none_or(|at| at > bound + self.run.stalled(last, at)) {
            let text = match self.report.empty_after_ms {
                Some(after) => format!("keys were left in Redis for {after} ms"),
                None => "keys were left in Redis".to_owned(),
            };
            self.flag("rest", bound, None, text);
        }
        let kept = last + 3 * self.run.rules.lease + 2000 * MS;
        if self.run.forgotten.is_none_or(|at| at > kept + self.run.stalled(last, at)) {
            self.flag("rest", kept, None, "starts were left in Redis".to_owned());
        }
        if self.run.in_flight_left > 0 {
            let text = format!("{} requests were left at the upstream", self.run.in_flight_left);
            self.flag("rest", last, None, text);
        }
    }
}

/// Returns what is left of these spans without one.
fn without(spans: Vec<(At, At)>, cut: (At, At)) -> Vec<(At, At)> {
    let left = |(from, to): (At, At)| [(from, to.min(cut.0)), (from.max(cut.1), to)];
    spans.into_iter().flat_map(left).filter(|(from, to)| from < to).collect()
}

/// Returns how long there were more than `limit`, and the greatest number.
fn over(steps: &[(At, bool)], limit: usize) -> (At, usize) {
    let (mut over, mut peak, mut in_flight, mut since) = (0, 0, 0, 0);
    for (at, comes) in steps {
        if in_flight > limit {
            over += at - since;
        }
        since = *at;
        if *comes {
            in_flight += 1
        } else {
            in_flight -= 1
        }
        peak = peak.max(in_flight);
    }
    (over, peak)
}

/// Returns the part of the history around a violation, for a reader.
pub(crate) fn around(run: &Run, violation: &Violation) -> String {
    const AROUND: At = 1500 * MS;
    let (from, to) = (violation.at.saturating_sub(AROUND), violation.at.saturating_add(AROUND / 3));
    let mut lines: Vec<(At, String)> = Vec::new();
    for fault in &run.faults {
        if overlap((fault.begin, fault.end.saturating_add(SETTLE)), (from, to)) > 0 {
            let mut whose =
                fault.gateway.map_or_else(|| "all".to_owned(), |g| format!("gateway {g}"));
            if !fault.keys.is_empty() {
                whose = format!("the server of {:?}", fault.keys);
            }
            lines.push((fault.begin, format!("{:?} of {whose}", fault.what)));
            lines.push((fault.end, format!("{:?} of {whose} is over", fault.what)));
        }
    }
    lines.extend(grants::noted(run, violation.key).filter(|(at, _)| (from..to).contains(at)));
    for (number, request) in run.requests.iter().enumerate() {
        if violation.key.is_some_and(|key| key != request.key) {
            continue;
        }
        let name = format!("{number} (gateway {}, {:?})", request.gateway, request.kind);
        let mut add = |at: At, what: String| {
            if (from..to).contains(&at) {
                lines.push((at, format!("{name} {what}")));
            }
        };
        add(request.sent, "is sent".to_owned());
        for stay in &request.stays {
            add(stay.from, "comes to the upstream".to_owned());
            if let Some(to) = stay.to {
                add(to, if stay.whole { "is done there" } else { "is cut off there" }.to_owned());
            }
        }
        if let Some((at, status)) = request.head {
            add(at, format!("has its head, {status}"));
        }
        if let Some((at, end)) = &request.end {
            add(*at, format!("ends: {end:?}"));
        }
    }
    lines.sort();
    let mut text =
        format!("--- {} at {:.1} ms: {}\n", violation.rule, ms(violation.at), violation.text);
    for (at, line) in lines {
        text += &format!("{:>12.1} {line}\n", ms(at));
    }
    text
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "requests {}, granted {}", self.requests, self.granted)?;
        let statuses: Vec<_> = self.statuses.iter().map(|(s, n)| format!("{s}: {n}")).collect();
        let ends: Vec<_> = self.ends.iter().map(|(s, n)| format!("{s} {n}")).collect();
        writeln!(f, "answers: {}; ends: {}", statuses.join(", "), ends.join(", "))?;
        let [p50, p99, max] = [self.head_ms_p50, self.head_ms_p99, self.head_ms_max];
        writeln!(f, "to the head: p50 {p50:.0} ms, p99 {p99:.0} ms, max {max:.0} ms")?;
        writeln!(f, "order: {} requests compared", self.compared)?;
        writeln!(
            f,
            "in flight at most, by key: {:?}; over the cap as seen by the upstream {:.0} ms, of this after a \
             loss {:.0} ms; last one over {:.0} ms after a loss",
            self.peaks, self.over_ms, self.over_after_loss_ms, self.last_over_after_loss_ms
        )?;
        for Spent { key, whose, count, used, peak } in &self.budgets {
            writeln!(
                f,
                "key {key}{whose}: {count} grants used {used} of a budget; {peak} at once"
            )?;
        }
        for Starts { key, count, most, most_at_upstream } in &self.starts {
            writeln!(
                f,
                "key {key}: {count} starts; in a window {most} at most, and {most_at_upstream} at the upstream"
            )?;
        }
        let Pauses { asked, recorded, resumes, judged_ms } = self.pauses;
        writeln!(
            f,
            "pauses: {asked} asked for, {recorded} recorded, {resumes} resumes; judged for {judged_ms:.0} ms"
        )?;
        if let Some(Numbers { changes, decreases, refusals }) = self.numbers {
            writeln!(
                f,
                "adaptive limit: {changes} changes seen, {decreases} decreases, {refusals} refusals"
            )?;
        }
        match self.empty_after_ms {
            Some(after) => writeln!(f, "Redis empty {after:.0} ms after the last request")?,
            None => writeln!(f, "Redis not empty in the end")?,
        }
        writeln!(f, "the machine stood still for {:.0} ms", self.stalled_ms)?;
        writeln!(f, "{:<15} {:>5}   first success after: p50, max", "fault", "count")?;
        for (what, kindred) in &self.faults {
            let times = &kindred.recovery_ms;
            let at =
                |i: usize| times.get(i).map_or_else(|| "-".to_owned(), |ms| format!("{ms:.0} ms"));
            let (p50, max) = (at(times.len() / 2), at(times.len().wrapping_sub(1)));
            writeln!(f, "{:<15} {:>5}   {p50:>8} {max:>8}", format!("{what:?}"), kindred.count)?;
        }
        writeln!(f, "violations: {}", self.violations.len())?;
        for violation in self.violations.iter().take(50) {
            let Violation { rule, at, key, text } = violation;
            let key = key.map_or(String::new(), |key| format!(" key {key}"));
            writeln!(f, "  {:>10.1} ms {rule}{key}: {text}", ms(*at))?;
        }
        Ok(())
    }
}
