//! The rules of when a permit may be granted: rate and pause.

use serde::Serialize;

use super::super::history::{At, Fault, Pause, Rate, Request, Run, What};
use super::super::plan::{MOST_DELAY, Shape};
use super::{Check, MESSAGE, MS, Of, SETTLE, SLACK, TAIL, WAKE, ms, overlap};

/// The time in which a permit was granted.
struct Grant {
    from: At,
    to: At,
    what: String,
}

/// The starts of a key with a rate.
#[derive(Debug, Serialize)]
pub(crate) struct Starts {
    pub(crate) key: usize,
    pub(crate) count: usize,
    /// The most in a window, as Redis counted and as they certainly came to the upstream.
    pub(crate) most: usize,
    pub(crate) most_at_upstream: usize,
}

/// What pauses a run had.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Pauses {
    /// The responses that asked for one.
    pub(crate) asked: usize,
    /// The records in Redis.
    pub(crate) recorded: usize,
    pub(crate) resumes: usize,
    /// The time in which a grant would have been a violation.
    pub(crate) judged_ms: f64,
}

impl Run {
    /// Returns the grants of a key that Redis counted for its rate.
    fn granted_by_redis(&self, key: usize) -> Vec<Grant> {
        let starts = self.starts.iter().filter(|start| start.key == key).map(|start| start.at);
        let what = || "a permit".to_owned();
        let mut grants: Vec<_> =
            starts.map(|at| Grant { from: at, to: at, what: what() }).collect();
        grants.sort_by_key(|grant| grant.from);
        grants
    }

    /// Returns when the permit of a request was granted that came to the upstream: between its sending and its arrival; at
    /// most [`TAIL`] before that, if nothing kept it up.
    pub(super) fn granted(&self, request: &Request) -> Option<(At, At)> {
        let to = request.came()?;
        let near = to.saturating_sub(TAIL + self.stalled(to.saturating_sub(TAIL), to));
        let is_clean = self.is_clean(request.key, request.gateway, near, to);
        Some((if is_clean { request.sent.max(near) } else { request.sent }, to))
    }

    /// Returns those that the upstream saw.
    fn granted_by_upstream(&self, key: usize) -> Vec<Grant> {
        let of_key = |request: &&Request| request.key == key;
        let grant = |request: &Request| {
            let (from, to) = self.granted(request)?;
            let what = format!(
                "gateway {}'s request, sent at {:.1} ms,",
                request.gateway,
                ms(request.sent)
            );
            Some(Grant { from, to, what })
        };
        let mut grants: Vec<_> = self.requests.iter().filter(of_key).filter_map(grant).collect();
        grants.sort_by_key(|grant| grant.from);
        grants
    }

    /// Returns whether Redis may have lost what started before this time or in it. With Sentinel, an old master may
    /// count for itself for some time after another was named.
    pub(super) fn loses_starts(&self, loss: &Fault, from: At, to: At) -> bool {
        let leaves = if self.rules.shape == Shape::One { 0 } else { WAKE };
        let late = leaves + self.stalled(loss.begin, to);
        let is_soon = loss.begin < to && from < loss.end.saturating_add(late);
        let slept = |(begin, end): (At, At)| {
            begin < loss.end.saturating_add(TAIL)
                && loss.end < end
                && overlap((end, end.saturating_add(WAKE)), (from, to)) > 0
        };
        let all = 0..self.gateways.len();
        is_soon || loss.what == What::Failover && all.flat_map(|g| self.frozen(g)).any(slept)
    }

    /// Returns whether a process may grant in a pause at some moment of this time, because it cannot know of it yet, or
    /// because its call was on its way before it knew. Such a call grants to the waiting requests of all.
    fn may_not_know(&self, pause: &Pause, (from, to): (At, At)) -> bool {
        let message = MESSAGE + self.stalled(pause.written, from);
        let is_several = self.rules.shape != Shape::One;
        let mut faults = self.faults.iter().filter(|fault| !fault.what.is_harmless());
        from < pause.written + message
            || faults.any(|fault| {
                let end = |late: At| fault.end.saturating_add(late);
                let lasts = |late| overlap((fault.begin, end(late)), (pause.written, to + 1)) > 0;
                // Else all knew before it.
                let is_in_time = fault.begin < pause.written + message;
                match fault.what {
                    // The record may be lost before all have read it.
                    what if what.is_loss(self.rules.shape) => lasts(SETTLE),
                    _ if is_several && fault.gateway.is_none() => lasts(SETTLE),
                    // Its calls came in time, and the next process reads what is paused first.
                    What::KillGateway => false,
                    // A message, the question for what it is about with its answer, and a call before that.
                    What::Delay => is_in_time && from < end(message + 3 * MOST_DELAY * MS),
                    // Nothing comes to Redis from a process that stands still, or is cut off, and what was held back
                    // comes in the end. A new connection reads what is paused first.
                    _ => is_in_time && fault.end <= to && from < end(message),
                }
            })
    }

    fn is_resumed(&self, pause: &Pause, at: At) -> bool {
        self.resumes.iter().any(|(begin, end)| *begin <= at && pause.written <= *end)
    }

    /// Returns the times in which processes may refuse because of a pause.
    pub(super) fn paused(&self, key: usize) -> Vec<(At, At)> {
        let recorded = self.pauses.iter().filter(|pause| pause.key == key);
        let recorded = recorded.map(|pause| (pause.written, pause.ends + MESSAGE));
        // Each process pauses itself, whether this is recorded or not.
        let most = self.rules.max_pause + SLACK + MESSAGE;
        recorded.chain(self.asked(key).map(|(from, to)| (from, to + most))).collect()
    }

    /// Returns the times in which some processes may know of a new pause, and others not.
    pub(super) fn pausing(&self, key: usize) -> Vec<(At, At)> {
        let known = |to| to + MESSAGE + self.stalled(to, to + MESSAGE);
        self.asked(key).map(|(from, to)| (from, known(to))).collect()
    }

    /// Returns the times in which the upstream asked for a pause: from its response to when that was passed on.
    fn asked(&self, key: usize) -> impl Iterator<Item = (At, At)> {
        let asked = self.requests.iter().filter(move |request| request.key == key && request.later);
        asked.filter_map(|request| {
            let from = request.stays.first()?.to?;
            Some((from, request.head.map_or(from, |(at, _)| at.max(from))))
        })
    }

    /// Returns the times in which no permit may be granted to these, although some are free.
    pub(super) fn closed(&self, key: usize, of: Of) -> Vec<(At, At)> {
        let mut spans = [self.paused(key), self.full(key), self.spent(key, of)].concat();
        spans.sort_unstable();
        spans.dedup_by(|next, last| {
            let is_one = next.0 <= last.1;
            last.1 = if is_one { last.1.max(next.1) } else { last.1 };
            is_one
        });
        spans
    }

    /// Returns the times in which as many may have started as the rate of a key allows.
    fn full(&self, key: usize) -> Vec<(At, At)> {
        let Some(Rate { starts, window }) = self.rules.rates[key] else { return Vec::new() };
        let by_redis = self.granted_by_redis(key).iter().map(|grant| grant.to).collect();
        let mut by_upstream: Vec<_> =
            self.granted_by_upstream(key).iter().map(|grant| grant.to).collect();
        by_upstream.sort_unstable();
        let full = |times: Vec<At>| {
            let of_window: Vec<_> =
                times.windows(starts).map(|of| (of[0], of[starts - 1])).collect();
            of_window.into_iter().map(|(first, last)| (last, first + window + MESSAGE))
        };
        let mut all: Vec<_> = full(by_redis).chain(full(by_upstream)).collect();
        all.retain(|(from, to)| from < to);
        all
    }
}

/// Returns what Redis noted of a key, for a reader.
pub(super) fn noted(run: &Run, key: Option<usize>) -> impl Iterator<Item = (At, String)> {
    let pauses = run.pauses.iter().map(|pause| {
        (pause.written, format!("key {} is paused until {:.1}", pause.key, ms(pause.ends)))
    });
    let resumes = run
        .resumes
        .iter()
        .map(|(begin, end)| (*begin, format!("an operator resumes, until {:.1}", ms(*end))));
    let starts = run.starts.iter().filter(move |start| key == Some(start.key));
    pauses.chain(resumes).chain(starts.map(|start| (start.at, "starts, by Redis".to_owned())))
}

impl Check<'_> {
    pub(super) fn rate(&mut self, key: usize, rate: Rate) {
        let (by_redis, by_upstream) =
            (self.run.granted_by_redis(key), self.run.granted_by_upstream(key));
        let most = self.count_windows(key, rate, &by_redis, "Redis");
        let most_at_upstream = self.count_windows(key, rate, &by_upstream, "the upstream");
        self.report.starts.push(Starts { key, count: by_redis.len(), most, most_at_upstream });
    }

    /// Returns the most in a window.
    fn count_windows(&mut self, key: usize, rate: Rate, grants: &[Grant], by: &str) -> usize {
        let run = self.run;
        let (mut peak, mut flagged) = (0, 0);
        for (i, first) in grants.iter().enumerate() {
            let end = first.from + rate.window;
            let begun = grants[i..].iter().take_while(|grant| grant.from < end);
            let within = begun.filter(|grant| grant.to < end);
            let (count, last) =
                within.fold((0, 0), |(count, last), grant| (count + 1, last.max(grant.to)));
            peak = peak.max(count);
            if count <= rate.starts || first.from < flagged {
                continue;
            }
            let losses = run.faults.iter().filter(|fault| {
                fault.what.is_loss(run.rules.shape)
                    && fault.befalls(key)
                    && run.loses_starts(fault, first.from, end)
            });
            let most = rate.starts * (1 + losses.count());
            if count > most {
                let since = ms(first.from);
                let text = format!(
                    "{count} started within {} ms from {since:.1} ms on, according to {by}; {most} at most",
                    rate.window / MS
                );
                self.flag("rate", last, key, text);
                flagged = end;
            }
        }
        peak
    }

    pub(super) fn pause(&mut self, key: usize) {
        let run = self.run;
        let pauses: Vec<_> = run.pauses.iter().filter(|pause| pause.key == key).collect();
        let of_key = run.requests.iter().filter(|request| request.key == key);
        let asked = of_key.filter(|request| request.later && !request.stays.is_empty()).count();
        self.report.pauses.asked += asked;
        if pauses.is_empty() {
            return;
        }
        let grants =
            [(run.granted_by_redis(key), "Redis"), (run.granted_by_upstream(key), "the upstream")];
        for (grant, by) in grants.iter().flat_map(|(all, by)| all.iter().map(move |one| (one, by)))
        {
            let breaks = |pause: &&&Pause| {
                pause.written <= grant.from
                    && grant.to + SLACK < pause.ends
                    && !run.is_resumed(pause, grant.to)
                    && !run.may_not_know(pause, (grant.from, grant.to))
            };
            if let Some(pause) = pauses.iter().find(breaks) {
                let text = format!(
                    "{} was granted {:.1} ms after a pause was recorded, {:.1} ms before its end, according to {by}",
                    grant.what,
                    ms(grant.from - pause.written),
                    ms(pause.ends - grant.to)
                );
                self.flag("pause", grant.to, key, text);
            }
        }
        let judged = |pause: &Pause| {
            let times = (pause.written..pause.ends.saturating_sub(SLACK)).step_by(10_000);
            times
                .filter(|at| !run.is_resumed(pause, *at) && !run.may_not_know(pause, (*at, *at)))
                .count()
        };
        let found = &mut self.report.pauses;
        found.recorded += pauses.len();
        found.resumes = run.resumes.len();
        found.judged_ms += pauses.iter().map(|pause| judged(pause) as f64 * 10.0).sum::<f64>();
    }

    /// Each key is served after the last fault.
    pub(super) fn progress(&mut self) {
        let after = self.run.faults.iter().map(|fault| fault.end).max().unwrap_or(0);
        for key in 0..self.run.rules.limits.len() {
            let mut of_key = self.run.requests.iter().filter(|request| request.key == key);
            if !of_key.any(|request| request.sent >= after && request.came().is_some()) {
                let text = "no request came after the last fault".to_owned();
                self.flag("progress", after, key, text);
            }
        }
    }
}
