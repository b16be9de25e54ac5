//! The cost of the loss of a master for its tenants, and for the others.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::tenants::{LIMIT, Log, TENANTS, Tenants, WAIT};

/// How long after the promotion everything must be as before.
const SOON: Duration = Duration::from_secs(1);

/// How long everything is observed after that.
const AFTER: Duration = Duration::from_secs(1);

/// A master that went, and the one that replaced it.
pub(crate) struct Failover {
    /// Since when all was well before it.
    pub(crate) calm: Instant,
    pub(crate) failed: Instant,
    /// When the new one reported that it is the master.
    pub(crate) promoted: Instant,
    /// The tenants whose permits it counts.
    pub(crate) its: Vec<usize>,
}

/// The figures.
pub(crate) struct Cost {
    answers: usize,
    its: usize,
    failover: Duration,
    /// From the promotion until the last of its tenants reached the upstream again.
    back: Duration,
    /// Of its tenants: rejections because Redis was unreachable, and after their wait.
    away: usize,
    late: usize,
    /// The longest that any request had to wait for an answer.
    slowest: Duration,
    /// Of its tenants, the longest time over the cap, and the most in flight.
    over: Duration,
    peak: usize,
    /// When the last one was over its cap, counted from the promotion.
    over_until: Duration,
    /// Of its tenants, the longest time to an answer, from a second after the promotion on.
    longest_after: Duration,
    /// The time to the answers of others: before, and meanwhile.
    before: Spread,
    meanwhile: Spread,
}

/// The median, the 99th percentile, and the maximum.
#[derive(Default)]
struct Spread(Duration, Duration, Duration);

impl fmt::Debug for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.0?} {:.0?} {:.0?}", self.0, self.1, self.2)
    }
}

impl Failover {
    /// Observes for some more seconds, and then evaluates everything: what must hold, and what it cost.
    pub(crate) async fn cost(self, tenants: &Tenants) -> Cost {
        let end = self.promoted + SOON + AFTER;
        // Until each request that was sent by then has its answer, if all is well.
        tokio::time::sleep((end + SOON / 2).saturating_duration_since(Instant::now())).await;
        let log = tenants.seen();
        let is_its = |tenant: &usize| self.its.contains(tenant);
        let others: Vec<_> = (0..TENANTS).filter(|tenant| !is_its(tenant)).collect();
        let mut cost = self.in_figures(&log, &others, end);

        for asked in log.asked(&(self.calm..end)) {
            let stalled = log.stalled(&(asked.sent..asked.came));
            let after = asked.came - self.calm;
            if !is_its(&asked.tenant) || asked.came < self.failed {
                assert_eq!(asked.status, 200, "{asked:?} after {after:?}, and nothing befell it");
                continue;
            }
            if asked.sent >= self.promoted + SOON {
                let took = asked.took() - stalled.min(asked.took());
                assert!(asked.status == 200 && took < SOON, "{asked:?}, long after it: {took:?}");
                cost.longest_after = cost.longest_after.max(took);
            }
            match asked.status {
                200 => {}
                503 => cost.away += 1,
                429 => {
                    cost.late += 1;
                    assert!(asked.took() + Duration::from_millis(20) >= WAIT, "{asked:?}");
                }
                status => panic!("{status}: {asked:?}"),
            }
        }
        for tenant in &others {
            let (over, peak) = log.over(*tenant);
            assert!(over.is_empty(), "tenant {tenant}: {peak} at once, {over:?}");
        }
        let mut excess = Vec::new();
        for tenant in &self.its {
            assert!(log.first_after(*tenant, self.promoted + SOON).is_some(), "{tenant} is stuck");
            let (over, peak) = log.over(*tenant);
            let over: Vec<_> = over.into_iter().filter(|over| over.end > self.calm).collect();
            // What Redis acknowledged and lost with the old master is counted again by then.
            let soon = SOON + log.stalled(&(self.promoted..self.promoted + SOON));
            let moment = self.failed..self.promoted + soon;
            for span in &over {
                if !moment.contains(&span.start) || !moment.contains(&span.end) {
                    excess.push((*tenant, span.start.saturating_duration_since(self.promoted)));
                }
                cost.over_until =
                    cost.over_until.max(span.end.saturating_duration_since(self.promoted));
                cost.peak = cost.peak.max(peak);
            }
            cost.over = cost.over.max(over.iter().map(|span| span.end - span.start).sum());
        }
        println!("{cost}");
        assert!(excess.is_empty(), "over the cap so long after the promotion: {excess:?}");
        let busy = log.stalled(&(self.promoted..self.promoted + cost.back));
        assert!(cost.back < SOON + busy, "{:?}", cost.back);
        assert!(cost.over < SOON, "{:?}", cost.over);
        cost
    }

    fn in_figures(&self, log: &Log, others: &[usize], end: Instant) -> Cost {
        let back = |tenant: &usize| log.first_after(*tenant, self.promoted).expect("served again");
        let back = self.its.iter().map(back).max().unwrap() - self.promoted;
        let took =
            |when: Range<Instant>| {
                let theirs = log.asked(&when).filter(|asked| others.contains(&asked.tenant));
                Spread::of(theirs.map(|asked| {
                    asked.took().saturating_sub(log.stalled(&(asked.sent..asked.came)))
                }))
            };
        Cost {
            answers: log.asked(&(self.calm..end)).count(),
            its: self.its.len(),
            failover: self.promoted - self.failed,
            back,
            away: 0,
            late: 0,
            slowest: log.asked(&(self.calm..end)).map(|asked| asked.took()).max().unwrap(),
            over: Duration::ZERO,
            peak: LIMIT,
            over_until: Duration::ZERO,
            longest_after: Duration::ZERO,
            before: took(self.calm..self.failed),
            meanwhile: took(self.failed..end),
        }
    }
}

impl Cost {
    /// Returns whether a request found the master unreachable.
    pub(crate) const fn was_noticed(&self) -> bool {
        self.away + self.late > 0
    }

    /// Returns whether others waited as long as before; in any case they waited for no dead server.
    pub(crate) fn others_waited_as_before(&self) -> bool {
        let Spread(_, before, longest) = self.before;
        let Spread(_, p99, slowest) = self.meanwhile;
        p99 <= before + before / 2 && slowest <= (2 * longest).max(before + LEEWAY)
    }
}

/// What a busy machine may add.
const LEEWAY: Duration = Duration::from_millis(100);

impl Spread {
    fn of(times: impl Iterator<Item = Duration>) -> Self {
        let mut times: Vec<_> = times.collect();
        times.sort_unstable();
        let Some(last) = times.len().checked_sub(1) else { return Self::default() };
        Self(times[last / 2], times[last * 99 / 100], times[last])
    }
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answers, its, failover, back, away, late, slowest, .. } = self;
        write!(
            f,
            "{answers} answers, the slowest after {slowest:?}; a new master after {failover:?}, its \
             {its} tenants all served again {back:?} later ({away} times 503 and {late} times 429 \
             meanwhile); over the cap for {:?} at the most, {} at once, until {:?} after the \
             promotion; their longest answer from a second after that on {:?}; others (p50, p99, longest): {:?} before, {:?} meanwhile",
            self.over, self.peak, self.over_until, self.longest_after, self.before, self.meanwhile,
        )
    }
}
