//! The clients of a process: they ask for permits, hold them, give them back, or leave.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};
use tower_semaphore::{AcquireError, Ask, Permit, Policy, RejectReason, Semaphore};

use crate::chance::Rng;
use crate::counted::Counted;
use crate::plan::{Kind, Name, Planted};
use crate::process::{Holding, Seen, Surroundings};

/// How late an answer may be, in ms.
const MARGIN: u64 = 150;
/// The longest time to an answer of a request that does not wait, in ms.
const ANSWER: u64 = 1000;
/// Within which time a request is granted if all that are before it hold their permits for some ms.
const PROMPT: u64 = 3000;
/// How often a future may be polled while no time passes.
const POLLS_MAX: u32 = 300;

/// A task of a process that asks for one name again and again.
pub struct Client {
    pub surroundings: Arc<Surroundings>,
    pub semaphore: Semaphore,
    pub index: usize,
    pub name: Name,
    pub rng: Rng,
    pub numbers: Arc<AtomicU64>,
    pub planted: Option<Planted>,
    /// From when on requests are short, in ms.
    pub calms_at: u64,
    /// From when on everything is granted soon, in ms.
    pub settled_at: u64,
    /// No more requests are to be made.
    pub is_over: Arc<AtomicBool>,
}

/// A request.
struct Request {
    number: u64,
    ask: Ask,
    policy: Policy,
    /// How long it may wait, in ms.
    wait: u64,
    leaves: Option<u64>,
    holding: Holding,
}

impl Client {
    /// Asks until the load ends.
    pub async fn run(mut self) {
        let pause = self.rng.below(50);
        sleep(Duration::from_millis(pause)).await;
        while !self.is_over.load(Ordering::Relaxed) {
            let is_calm = self.surroundings.now() >= self.calms_at;
            let request = self.request(is_calm);
            let number = request.number;
            self.surroundings.saw(number, Seen::Begins);
            if let Some(permit) = self.ask(request).await {
                self.hold(number, permit, is_calm).await;
            }
            let longest = self.rng.pick(&[1, 30, 300]);
            let pause = self.rng.below(longest);
            sleep(Duration::from_millis(if is_calm { pause + 100 } else { pause })).await;
        }
    }

    /// Asks once, and is to be granted.
    pub async fn probe(mut self, within: u64) {
        let mut request = self.request(true);
        (request.wait, request.leaves) = (within, None);
        request.policy = self.policy(self.name.limit, within);
        let number = request.number;
        self.surroundings.saw(number, Seen::Begins);
        let is_hidden = self.planted == Some(Planted::IsNotServed);
        match self.ask(request).await {
            Some(permit) if !is_hidden => self.hold(number, permit, true).await,
            _ => self.breaks(number, "served", format!("{} is not granted", self.name.name)),
        }
    }

    fn breaks(&self, number: u64, rule: &'static str, what: String) {
        self.surroundings.saw(number, Seen::Breaks(rule, what));
    }

    fn policy(&self, limit: u32, wait: u64) -> Policy {
        let Name { lease, linger, reuse, rate, .. } = &self.name;
        let builder = match rate {
            Some((starts, window)) => {
                Policy::builder(limit).rate(*starts, Duration::from_millis(*window))
            }
            None => Policy::builder(limit),
        };
        builder
            .wait_timeout(Duration::from_millis(wait))
            .lease(Duration::from_millis(*lease))
            .linger(Duration::from_millis(*linger))
            .reuse(*reuse && wait > 0 && rate.is_none())
            .build()
            .expect("a policy within its bounds")
    }

    fn request(&mut self, is_calm: bool) -> Request {
        let rng = &mut self.rng;
        let wait = match is_calm {
            true => 5000,
            false => rng.pick(&[0, 50, 700, 3000, 8000]),
        };
        let leaves = (!is_calm && rng.percent(20)).then(|| {
            let longest = rng.pick(&[1, 20, 500]);
            rng.below(longest)
        });
        let limit = match self.name.kind {
            Kind::Mixed if !is_calm => rng.pick(&[1, self.name.limit.div_ceil(2), self.name.limit]),
            _ => self.name.limit,
        };
        let mut holding = Holding { name: self.index, cost: 1, also: Vec::new() };
        let mut ask = Ask::of(self.name.name.as_str());
        if self.name.kind == Kind::Fair {
            let tenant = rng.below(3);
            ask = ask.by(format!("t{tenant}"));
            if rng.percent(40) {
                // A cap of a tenant is one for all of its requests.
                holding.cost = rng.pick(&[1, 2]);
                ask = ask.cost(holding.cost);
            }
            if tenant == 0 {
                let each = self.name.limit.max(2) - 1;
                let each = each.max(2);
                ask = ask.each(each);
                holding.also.push((format!("{} t0", self.name.name), each));
            }
            if rng.percent(40) {
                ask = ask.also("model", "m", 2);
                holding.also.push((format!("{} model", self.name.name), 2));
            }
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let policy = self.policy(limit, wait);
        Request { number, ask, policy, wait, leaves, holding }
    }

    async fn ask(&mut self, request: Request) -> Option<Permit> {
        let Request { number, ask, policy, wait, leaves, holding } = request;
        let (began, frozen) = (Instant::now(), self.surroundings.frozen());
        let acquire = self.semaphore.acquire(ask, &policy);
        if self.planted == Some(Planted::NeverAnswers) && number % 50 == 7 {
            self.breaks_if_hanging(number, std::future::pending::<()>(), wait).await;
            return None;
        }
        if self.planted == Some(Planted::Spins) && number % 50 == 7 {
            let spin = poll_fn(|cx| -> Poll<()> {
                cx.waker().wake_by_ref();
                Poll::Pending
            });
            if Counted::new(Box::pin(spin), POLLS_MAX).await.is_err() {
                self.breaks(number, "spins", "a future that is polled all the time".to_owned());
            }
            return None;
        }
        let bound = wait.max(ANSWER) + MARGIN;
        let is_settled = self.surroundings.now() >= self.settled_at;
        let leaves = leaves.map_or(Duration::MAX, Duration::from_millis);
        let counted = Counted::new(acquire, POLLS_MAX);
        let answer = tokio::select! {
            biased;
            answer = counted => answer,
            () = sleep(leaves.min(Duration::from_secs(60))) => {
                if leaves == Duration::MAX {
                    self.breaks(number, "hangs", format!("no answer; its wait timeout is {wait} ms"));
                }
                self.surroundings.saw(number, Seen::Leaves);
                return None;
            }
        };
        let stood = self.surroundings.frozen() - frozen;
        let took = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if took.saturating_sub(stood) > bound {
            self.breaks(
                number,
                "hangs",
                format!("answered after {took} ms; its wait timeout is {wait} ms"),
            );
        }
        match answer {
            Err(()) => {
                self.breaks(number, "spins", format!("{wait} ms of wait"));
                None
            }
            Ok(Ok(permit)) => {
                if is_settled && self.name.rate.is_none() && took > PROMPT {
                    let what = format!("{} after {took} ms", self.name.name);
                    self.breaks(number, "served", what);
                }
                self.surroundings.saw(number, Seen::Granted(holding));
                Some(permit)
            }
            Ok(Err(error)) => {
                if is_settled && !matches!(error, AcquireError::Closed) {
                    self.breaks(number, "served", format!("{}: {error}", self.name.name));
                }
                self.check_refusal(number, &error, wait, took);
                None
            }
        }
    }

    async fn breaks_if_hanging(&self, number: u64, future: impl Future<Output = ()>, wait: u64) {
        let bound = Duration::from_millis(wait.max(ANSWER) + MARGIN);
        if timeout(bound, future).await.is_err() {
            self.breaks(number, "hangs", format!("no answer; its wait timeout is {wait} ms"));
        }
    }

    fn check_refusal(&self, number: u64, error: &AcquireError, wait: u64, took: u64) {
        let error_seen = match error {
            AcquireError::Rejected(rejected) => match rejected.reason {
                RejectReason::Limit
                | RejectReason::TenantLimit
                | RejectReason::FurtherLimit(_)
                | RejectReason::Rate
                | RejectReason::Paused
                    if wait == 0 =>
                {
                    Seen::Rejected
                }
                RejectReason::QueueTimeout
                | RejectReason::TenantLimit
                | RejectReason::FurtherLimit(_)
                | RejectReason::Rate
                | RejectReason::Paused
                    if wait > 0 && took + 2 >= wait =>
                {
                    Seen::Rejected
                }
                _ => Seen::Breaks("answer", format!("{error}; after {took} of {wait} ms")),
            },
            AcquireError::Unavailable(_) => Seen::Unavailable,
            AcquireError::Closed => Seen::Leaves,
            _ => Seen::Breaks("answer", error.to_string()),
        };
        let error_seen = match (error_seen, self.planted) {
            (Seen::Rejected, Some(Planted::SaysUnavailable)) => Seen::Unavailable,
            (seen, _) => seen,
        };
        self.surroundings.saw(number, error_seen);
    }

    async fn hold(&mut self, number: u64, permit: Permit, is_calm: bool) {
        let longest = match is_calm {
            true => 10,
            false => self.rng.pick(&[1, 20, 200, 200, 2500]),
        };
        let time = Duration::from_millis(self.rng.below(longest));
        let is_lost = timeout(time, permit.lost()).await.is_ok() || permit.is_lost();
        if is_lost {
            if self.planted == Some(Planted::IgnoresLoss) {
                sleep(Duration::from_secs(5)).await;
            }
            self.surroundings.saw(number, Seen::Lost);
            return;
        }
        match self.planted {
            Some(Planted::KeepsPermit) if number % 50 == 7 => {
                self.surroundings.saw(number, Seen::GivesBack);
                std::future::pending::<()>().await;
            }
            Some(Planted::UsesReturned) if number.is_multiple_of(5) => {
                drop(permit);
                sleep(Duration::from_millis(200)).await;
                self.surroundings.saw(number, Seen::GivesBack);
                return;
            }
            _ => {}
        }
        self.surroundings.saw(number, Seen::GivesBack);
        match self.rng.below(10) {
            0 => _ = permit.release().await,
            1 => {
                permit.break_off();
                drop(permit);
            }
            _ => drop(permit),
        }
    }
}
