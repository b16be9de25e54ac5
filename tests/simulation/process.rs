//! One simulated process: a semaphore, its tasks and its clients in a runtime of their own, so that the process can
//! die, stand still and be slow as a whole.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Extensions, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use tokio::runtime::Runtime;
use tokio::time::{Instant, Sleep, advance, sleep, sleep_until};
use tower_layer::Layer;
use tower_semaphore::limit::{Refusal as LayerRefusal, RefusalReason};
use tower_semaphore::{
    AcquireError, Adaptive, Ask, Budget, ConcurrencyLimitLayer, ConnectionState, Feedback, Limit,
    Name, OnUnavailable, Permit, Policy, RejectReason, Semaphore,
};
use tower_service::Service;

use crate::backend::{Incoming, Port, SimBackend};
use crate::counted::Counted;
use crate::plan::{
    AdaptivePlan, AskPlan, BudgetPlan, Deed, FURTHER, GiveBack, OutagePolicy, Planted, PolicyPlan,
    RequestPlan,
};

/// How often a client may be polled while its clock stands still.
const POLLS_MAX: u32 = 200;

/// An event that a process, a client or an operator saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seen {
    /// A request came.
    Begins,
    /// It has a permit.
    Granted {
        /// Whether the backend had just answered for its name. If not, the permit was passed on from another request,
        /// or the outage policy admitted this one.
        is_own: bool,
    },
    /// It was rejected.
    Refused(Refusal),
    /// Its client left.
    Leaves,
    /// The permit is being released.
    GivesBack,
    /// The request is broken off, and its permit dropped.
    BreaksOff,
    /// The permit was lost.
    Lost,
    /// An awaited release ended after this many µs; and whether it succeeded.
    Released(u64, bool),
    /// A future was polled again and again while no time passed.
    Spins,
    /// An operator's call ended after this many µs; and whether it succeeded.
    Operated(u64, bool),
    /// The upstream asked for a pause of this many ms.
    BacksOff(u64),
    /// The upstream refused its request.
    TooMany,
    /// A place was revoked.
    Revoked,
    /// The process shuts down.
    ShutsDown,
    /// The shutdown ended after this many µs.
    ShutDown(u64),
    /// The overrides were cleared.
    Cleared,
}

/// Why a request was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// No permit was free.
    Limit,
    /// The queue was full.
    QueueFull,
    /// Its wait timeout passed.
    QueueTimeout,
    /// Data was lost.
    Quarantine,
    /// The name was paused.
    Paused,
    /// The name was drained.
    Draining,
    /// The name was paused until a time.
    UpstreamPause,
    /// Its place was revoked.
    Revoked,
    /// The server could not be asked; and whether the process's health showed that.
    Unavailable {
        /// Whether the connection was reported as down.
        down: bool,
    },
    /// The semaphore was shut down.
    Closed,
    /// The tenant is at its cap.
    TenantLimit,
    /// A further limit is full.
    FurtherLimit,
    /// It asks for more than it could ever get.
    CostTooHigh,
    /// As many started lately as the rate allows.
    Rate,
    /// The layer's response to a rejected request.
    Status(u16),
}

/// An entry of a process's journal.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// When it happened, in µs.
    pub at: u64,
    /// The request or the operation.
    pub number: usize,
    /// The event.
    pub seen: Seen,
}

/// The journal that a process's tasks write.
#[derive(Debug)]
pub struct Journal {
    port: Arc<Port>,
    entries: Mutex<Vec<Entry>>,
}

impl Journal {
    fn granted(&self, number: usize, name: usize) {
        self.add(number, Seen::Granted { is_own: !self.port.hears_of(name) });
    }

    fn add(&self, number: usize, seen: Seen) {
        let at = self.port.now();
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).push(Entry {
            at,
            number,
            seen,
        });
    }

    fn take(&self) -> Vec<Entry> {
        std::mem::take(&mut *self.entries.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A process.
#[derive(Debug)]
pub struct Process {
    /// Which of the plan's processes it is, or replaces.
    pub slot: usize,
    /// Its end of the network.
    pub port: Arc<Port>,
    /// Until when it stands still, in µs.
    pub frozen_until: u64,
    /// It will stand still for this time as soon as a message comes, after at most this many windows.
    pub freezes: Option<(u32, u64)>,
    /// Whether its clock will stand still as well, and whether it does.
    pub suspends: bool,
    /// See there.
    pub is_suspended: bool,
    /// Some of its tasks did not run in the last window.
    pub has_stopped: bool,
    /// Until when it runs only from time to time, in µs.
    pub slow_until: u64,
    /// How long it has stood still so far, in µs.
    pub frozen: u64,
    /// Until when it takes requests.
    pub closing: bool,
    semaphore: Semaphore,
    /// By name: without tenants, and with them.
    services: [Vec<Service1>; 2],
    journal: Arc<Journal>,
    inbox: BinaryHeap<Reverse<Mail>>,
    parks: Arc<AtomicU64>,
    planted: Option<Planted>,
    // Last, so that tasks end before what they use.
    runtime: Runtime,
}

type Service1 = tower_semaphore::ConcurrencyLimit<Handler>;

#[derive(Debug)]
struct Mail {
    at: u64,
    serial: u64,
    incoming: Incoming,
}

impl PartialEq for Mail {
    fn eq(&self, other: &Self) -> bool {
        self.serial == other.serial
    }
}

impl Eq for Mail {}

impl PartialOrd for Mail {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Mail {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

/// What a task of a process uses.
#[derive(Clone)]
struct Client {
    number: usize,
    plan: RequestPlan,
    policy: Policy,
    backoff: Option<u64>,
    adaptive: Option<AdaptivePlan>,
    semaphore: Semaphore,
    journal: Arc<Journal>,
    planted: Option<Planted>,
}

impl Process {
    /// Starts a process. Its clock shows `now`, in µs.
    ///
    /// # Panics
    ///
    /// If no runtime can be created.
    #[must_use]
    pub fn start(
        slot: usize,
        port: Port,
        now: u64,
        layers: &[PolicyPlan],
        planted: Option<Planted>,
    ) -> Self {
        let parks = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&parks);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .on_thread_park(move || {
                counter.fetch_add(1, Ordering::Relaxed);
            })
            .build()
            .expect("a runtime");
        let port = Arc::new(port);
        runtime.block_on(async { port.start(now) });
        let semaphore = Semaphore::new(SimBackend(Arc::clone(&port)));
        let journal = Arc::new(Journal { port: Arc::clone(&port), entries: Mutex::default() });
        let services = [false, true].map(|is_fair| {
            let layer = |(name, plan)| {
                layer(&semaphore, name, plan, is_fair, planted).layer(Handler(Arc::clone(&journal)))
            };
            layers.iter().enumerate().map(layer).collect()
        });
        Self {
            slot,
            port,
            frozen_until: 0,
            freezes: None,
            suspends: false,
            is_suspended: false,
            has_stopped: false,
            slow_until: 0,
            frozen: 0,
            closing: false,
            semaphore,
            services,
            journal,
            inbox: BinaryHeap::new(),
            parks,
            planted,
            runtime,
        }
    }

    /// Returns whether a message is on its way to it.
    pub fn post(&mut self, at: u64, serial: u64, incoming: Incoming) {
        self.inbox.push(Reverse(Mail { at, serial, incoming }));
    }

    /// Runs it from `from` to `to`, in µs. Returns what was seen.
    /// If it is about to stand still, its tasks may make this many steps after a message came.
    pub fn run(&mut self, from: u64, to: u64, news_first: bool, stops: u64) -> Vec<Entry> {
        let mut mail = Vec::new();
        while let Some(Reverse(next)) = self.inbox.peek()
            && next.at < to
        {
            let Some(Reverse(next)) = self.inbox.pop() else { break };
            mail.push(next);
        }
        let mut stops_here = false;
        if let Some((windows, until)) = &mut self.freezes {
            *windows = windows.saturating_sub(1);
            if *windows == 0 || !mail.is_empty() {
                stops_here = true;
                self.frozen_until = *until;
            }
        }
        if stops_here {
            self.freezes = None;
        }
        self.has_stopped = stops_here;
        let was_suspended = std::mem::take(&mut self.is_suspended);
        self.is_suspended = stops_here && std::mem::take(&mut self.suspends);
        let port = &self.port;
        self.runtime.block_on(async {
            let mut mail = mail.into_iter().peekable();
            let now = port.now();
            if now < from {
                // It stood still: messages and timers are due at once, in either order.
                while news_first && mail.peek().is_some_and(|next| next.at < from) {
                    if let Some(next) = mail.next() {
                        port.deliver(next.incoming);
                    }
                }
                if was_suspended {
                    port.stood_still(from);
                } else {
                    advance(Duration::from_micros(from - now)).await;
                }
            }
            for next in mail {
                // Timers have a resolution of 1 ms.
                let at = next.at.next_multiple_of(1000);
                if at > port.now() && at < to {
                    sleep_until(port.instant(at)).await;
                }
                port.deliver(next.incoming);
            }
            if stops_here {
                for _ in 0..stops {
                    tokio::task::yield_now().await;
                }
                return;
            }
            sleep_until(port.instant(to)).await;
        });
        self.journal.take()
    }

    /// Returns how often its thread has been idle.
    #[must_use]
    pub fn parks(&self) -> u64 {
        self.parks.load(Ordering::Relaxed)
    }

    /// Returns the number of names of which it has a record.
    #[must_use]
    pub fn records(&self) -> usize {
        self.semaphore.health().semaphores
    }

    /// Returns its counts of permits lost, and of requests admitted or refused by policy.
    #[must_use]
    pub fn health(&self) -> (u64, u64, u64) {
        let health = self.semaphore.health();
        (health.lost, health.admitted_by_policy, health.refused_by_policy)
    }

    /// Makes a request at its time.
    pub fn request(&self, number: usize, plan: RequestPlan, policy: &PolicyPlan, layered: bool) {
        let mut client = Client {
            number,
            plan,
            policy: policy_of(policy, plan.wait, self.planted),
            backoff: policy.backoff.filter(|_| number.is_multiple_of(10)),
            adaptive: policy.adaptive,
            semaphore: self.semaphore.clone(),
            journal: Arc::clone(&self.journal),
            planted: self.planted,
        };
        let at = self.port.instant(plan.at * 1000);
        match self.services[usize::from(plan.ask.is_some())]
            .get(plan.name)
            .filter(|_| layered)
            .cloned()
        {
            Some(service) => {
                client.plan.wait = policy.wait;
                self.runtime.spawn(async move {
                    sleep_until(at).await;
                    client.call(service).await;
                });
            }
            None => {
                self.runtime.spawn(async move {
                    sleep_until(at).await;
                    client.run().await;
                });
            }
        }
    }

    /// Makes an operator's call now.
    pub fn operate(&self, number: usize, name: String, deed: Deed) {
        let semaphore = self.semaphore.clone();
        let journal = Arc::clone(&self.journal);
        self.runtime.spawn(async move {
            let began = Instant::now();
            let well = operate(&semaphore, &name, deed, &journal, number).await;
            journal.add(number, Seen::Operated(micros(began.elapsed()), well));
        });
    }

    /// Clears the overrides of these names.
    pub fn clear(&self, names: Vec<String>) {
        let semaphore = self.semaphore.clone();
        let journal = Arc::clone(&self.journal);
        self.runtime.spawn(async move {
            for name in names {
                for _ in 0..50 {
                    if semaphore.clear_limit(&*name).await.is_ok()
                        && semaphore.resume(&*name).await.is_ok()
                    {
                        break;
                    }
                    sleep(Duration::from_millis(100)).await;
                }
            }
            journal.add(0, Seen::Cleared);
        });
    }

    /// Shuts it down.
    pub fn shut_down(&mut self) {
        self.closing = true;
        let semaphore = self.semaphore.clone();
        let journal = Arc::clone(&self.journal);
        self.runtime.spawn(async move {
            journal.add(0, Seen::ShutsDown);
            let began = Instant::now();
            semaphore.shutdown().await;
            journal.add(0, Seen::ShutDown(micros(began.elapsed())));
        });
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn ask_of(name: usize, plan: Option<AskPlan>) -> Ask {
    let ask = Ask::of(format!("n{name}"));
    let Some(AskPlan { tenant, weight, class, cost, each, also, budget }) = plan else {
        return ask;
    };
    let ask = ask.by(format!("t{tenant}")).weight(weight).class(class).cost(cost);
    let ask = if each > 0 { ask.each(each) } else { ask };
    let ask = match budget {
        Some(plan) => ask.estimate(&budget_of(plan), plan.estimate),
        None => ask,
    };
    FURTHER.into_iter().zip(also).fold(ask, |ask, (limit, also)| match also {
        Some((value, cap)) => ask.also(limit, format!("v{value}"), cap),
        None => ask,
    })
}

fn budget_of(plan: BudgetPlan) -> Budget {
    let budget = Budget::new("tokens", 100, Duration::from_millis(plan.per)).expect("a budget");
    if plan.is_each { budget.each() } else { budget }
}

/// Returns how long permits linger, in ms: by the policy, or by a planted fault.
fn linger_of(plan: &PolicyPlan, planted: Option<Planted>) -> Duration {
    Duration::from_millis(match planted {
        Some(Planted::ForgetsToLinger) => 0,
        Some(Planted::LingersTooLong) if plan.linger > 0 => plan.lease / 2,
        _ => plan.linger,
    })
}

fn policy_of(plan: &PolicyPlan, wait: u64, planted: Option<Planted>) -> Policy {
    let builder = match plan.rate {
        Some((starts, window)) => {
            Policy::builder(plan.limit).rate(starts, Duration::from_millis(window))
        }
        None => Policy::builder(plan.limit),
    };
    let builder = match plan.adaptive {
        Some(AdaptivePlan { min, .. }) => builder.adaptive(Adaptive::between(min, plan.limit)),
        None => builder,
    };
    builder
        .headroom(plan.headroom)
        .wait_timeout(Duration::from_millis(wait))
        .lease(Duration::from_millis(plan.lease))
        .max_queue(plan.max_queue)
        .linger(linger_of(plan, planted))
        .reuse(plan.reuse && wait > 0)
        .on_unavailable(match plan.outage {
            OutagePolicy::Refuse => OnUnavailable::Refuse,
            OutagePolicy::Admit => OnUnavailable::Admit,
            OutagePolicy::Local(share) => OnUnavailable::Local(share),
        })
        .build()
        .expect("a policy within its bounds")
}

fn layer(
    semaphore: &Semaphore,
    name: usize,
    plan: &PolicyPlan,
    is_fair: bool,
    planted: Option<Planted>,
) -> ConcurrencyLimitLayer {
    let builder = ConcurrencyLimitLayer::builder(semaphore, format!("l{name}"))
        .limit(plan.limit)
        .wait_timeout(Duration::from_millis(plan.wait))
        .lease(Duration::from_millis(plan.lease))
        .max_queue(plan.max_queue)
        .linger(linger_of(plan, planted))
        .reuse(plan.reuse && plan.wait > 0);
    let builder = match plan.rate {
        Some((starts, window)) => builder.rate(starts, Duration::from_millis(window)),
        None => builder,
    };
    let builder = if is_fair {
        builder
            .fair_by(|parts: &Parts| Some(format!("t{}", asked(parts).tenant)))
            .weight_by(|_: &Name, parts: &Parts| asked(parts).weight)
            .class_by(|_: &Name, parts: &Parts| asked(parts).class)
            .cost_by(|parts: &Parts| asked(parts).cost)
            .each_by(|_: &Name, parts: &Parts| match asked(parts).each {
                0 => Limit::Unlimited,
                each => Limit::Permits(each),
            })
            .headroom(plan.headroom)
    } else {
        builder
    };
    let builder = FURTHER.into_iter().enumerate().fold(builder, |builder, (kind, limit)| {
        let also =
            move |parts: &Parts| parts.extensions.get::<AskPlan>().and_then(|ask| ask.also[kind]);
        let value = move |parts: &Parts| also(parts).map(|(value, _)| format!("v{value}"));
        builder.also_by(limit, value, move |_: &Name, parts: &Parts| {
            also(parts).map_or(0, |(_, cap)| cap)
        })
    });
    builder.build().expect("a layer")
}

fn asked(parts: &Parts) -> AskPlan {
    *parts.extensions.get().expect("what is asked for")
}

// ===== clients =====

/// The result of a client's wait.
enum Waited<T> {
    Done(T),
    Spins,
    Leaves,
}

async fn wait<F: Future + Unpin>(future: F, leaves: Option<u64>) -> Waited<F::Output> {
    let mut future = Counted::new(future, POLLS_MAX);
    let mut leaves = leaves.map(|ms| Box::pin(sleep(Duration::from_millis(ms))));
    poll_fn(|cx| {
        match Pin::new(&mut future).poll(cx) {
            Poll::Ready(Ok(done)) => return Poll::Ready(Waited::Done(done)),
            Poll::Ready(Err(())) => return Poll::Ready(Waited::Spins),
            Poll::Pending => {}
        }
        match &mut leaves {
            Some(leaves) => leaves.as_mut().poll(cx).map(|()| Waited::Leaves),
            None => Poll::Pending,
        }
    })
    .await
}

impl Client {
    fn saw(&self, seen: Seen) {
        self.journal.add(self.number, seen);
    }

    async fn run(self) {
        self.saw(Seen::Begins);
        if self.planted == Some(Planted::ComesLate) && self.number % 10 == 7 {
            sleep(Duration::from_millis(300)).await;
        }
        let ask = ask_of(self.plan.name, self.plan.ask);
        let acquire = if self.plan.wait == 0 && self.number.is_multiple_of(2) {
            self.semaphore.try_acquire(ask, &self.policy)
        } else {
            self.semaphore.acquire(ask, &self.policy)
        };
        if self.plan.leaves == Some(0) {
            drop(acquire);
            return self.saw(Seen::Leaves);
        }
        match self.planted {
            Some(Planted::Spins) if self.number % 100 == 7 => {
                let spin = poll_fn(|cx| -> Poll<()> {
                    cx.waker().wake_by_ref();
                    Poll::Pending
                });
                if matches!(wait(Box::pin(spin), None).await, Waited::Spins) {
                    self.saw(Seen::Spins);
                }
            }
            Some(Planted::Hangs) if self.number % 100 == 7 => loop {
                std::hint::spin_loop();
            },
            Some(Planted::NeverAnswers) if self.number % 100 == 7 => {
                std::future::pending::<()>().await;
            }
            _ => {}
        }
        match wait(acquire, self.plan.leaves).await {
            Waited::Done(Ok(permit)) => {
                self.journal.granted(self.number, self.plan.name);
                self.hold(permit).await;
            }
            Waited::Done(Err(error)) => self.saw(Seen::Refused(self.refusal(&error))),
            Waited::Spins => self.saw(Seen::Spins),
            Waited::Leaves => self.saw(Seen::Leaves),
        }
    }

    fn refusal(&self, error: &AcquireError) -> Refusal {
        match error {
            _ if self.planted == Some(Planted::SaysClosed) => Refusal::Closed,
            _ if self.planted == Some(Planted::SaysQuarantined) => Refusal::Quarantine,
            AcquireError::Rejected(rejected) => match rejected.reason {
                RejectReason::Limit => Refusal::Limit,
                RejectReason::QueueFull => Refusal::QueueFull,
                RejectReason::QueueTimeout => Refusal::QueueTimeout,
                RejectReason::Quarantine => Refusal::Quarantine,
                RejectReason::Paused => Refusal::Paused,
                RejectReason::Draining => Refusal::Draining,
                RejectReason::UpstreamPause => Refusal::UpstreamPause,
                RejectReason::Revoked => Refusal::Revoked,
                RejectReason::TenantLimit => Refusal::TenantLimit,
                RejectReason::FurtherLimit(_) => Refusal::FurtherLimit,
                RejectReason::CostTooHigh => Refusal::CostTooHigh,
                RejectReason::Rate | RejectReason::Budget(_) => Refusal::Rate,
                _ => Refusal::Status(0),
            },
            AcquireError::Unavailable(_) => Refusal::Unavailable {
                down: matches!(self.semaphore.health().connection, ConnectionState::Down { .. }),
            },
            AcquireError::Closed => Refusal::Closed,
            _ => Refusal::Status(0),
        }
    }

    async fn hold(self, permit: Permit) {
        if self.planted == Some(Planted::KeepsPermit) && self.number % 100 == 7 {
            self.saw(Seen::GivesBack);
            std::future::pending::<()>().await;
            drop(permit);
            return;
        }
        let half = self.plan.hold / 2;
        let clone = (self.plan.back == GiveBack::Clone).then(|| permit.clone());
        if !held(&permit, half).await {
            return self.saw(Seen::Lost);
        }
        let permit = match clone {
            Some(clone) => {
                drop(permit);
                clone
            }
            None => permit,
        };
        if let Some(plan) = self.plan.ask.and_then(|ask| ask.budget) {
            plan.used.iter().for_each(|used| _ = permit.settle("tokens", *used));
            plan.left.iter().for_each(|left| _ = permit.budget_left("tokens", *left));
        }
        let is_broken_off = self.plan.back == GiveBack::BreakOff;
        if is_broken_off || self.planted == Some(Planted::LingersAlways) {
            permit.break_off();
        }
        if !held(&permit, self.plan.hold - half).await {
            return self.saw(Seen::Lost);
        }
        if let Some(ms) = self.backoff {
            permit.feedback(Feedback::Backoff(Duration::from_millis(ms)));
            self.saw(Seen::BacksOff(ms));
        }
        if self.adaptive.is_some_and(|plan| plan.refuses(self.journal.port.now() / 1000)) {
            self.saw(Seen::TooMany);
            permit.feedback(Feedback::TooMany);
        }
        self.saw(if is_broken_off { Seen::BreaksOff } else { Seen::GivesBack });
        if self.planted == Some(Planted::KeepsTooLong) && self.number % 10 == 7 {
            sleep(Duration::from_millis(400)).await;
        }
        match self.plan.back {
            GiveBack::Drop | GiveBack::Clone | GiveBack::BreakOff => drop(permit),
            GiveBack::Release => {
                let began = Instant::now();
                let well = permit.release().await.is_ok();
                self.saw(Seen::Released(micros(began.elapsed()), well));
            }
            GiveBack::ReleaseLeft => {
                let mut release = Box::pin(permit.release());
                poll_fn(|cx| {
                    let _ = release.as_mut().poll(cx);
                    Poll::Ready(())
                })
                .await;
            }
        }
    }

    // ===== the layer =====

    async fn call(self, mut service: Service1) {
        self.saw(Seen::Begins);
        let mut request =
            Request::new(Job { number: self.number, name: self.plan.name, hold: self.plan.hold });
        request.extensions_mut().extend(self.plan.ask.map(extension).unwrap_or_default());
        let future = Box::pin(service.call(request));
        if self.plan.leaves == Some(0) {
            drop(future);
            return self.saw(Seen::Leaves);
        }
        let response = match wait(future, self.plan.leaves).await {
            Waited::Done(Ok(response)) => response,
            Waited::Spins => return self.saw(Seen::Spins),
            Waited::Leaves => return self.saw(Seen::Leaves),
        };
        if response.status() != StatusCode::OK {
            let refusal = response.extensions().get::<LayerRefusal>();
            let told = match refusal.map(|refusal| refusal.reason) {
                Some(RefusalReason::Quarantine) => Some(Refusal::Quarantine),
                Some(RefusalReason::Paused) => Some(Refusal::Paused),
                _ => None,
            };
            if let Some(told) = told {
                return self.saw(Seen::Refused(told));
            }
            return self.saw(Seen::Refused(Refusal::Status(response.status().as_u16())));
        }
        let mut body = Box::pin(response.into_body());
        loop {
            match body.frame().await {
                Some(Ok(_)) if self.plan.back == GiveBack::Release => {
                    // The client reads slowly.
                    sleep(Duration::from_millis(self.plan.hold / 8)).await;
                }
                Some(Ok(_)) => {}
                Some(Err(_)) => return self.saw(Seen::Lost),
                None => break,
            }
            if self.plan.back == GiveBack::BreakOff {
                self.saw(Seen::BreaksOff);
                return drop(body);
            }
        }
        self.saw(Seen::GivesBack);
        drop(body);
    }
}

fn extension(ask: AskPlan) -> Extensions {
    let mut extensions = Extensions::new();
    extensions.insert(ask);
    extensions
}

/// Holds a permit for this many ms. Returns `false` if it was lost.
async fn held(permit: &Permit, ms: u64) -> bool {
    let mut lost = Box::pin(permit.lost());
    let mut time = Box::pin(sleep(Duration::from_millis(ms)));
    poll_fn(|cx| {
        if lost.as_mut().poll(cx).is_ready() || permit.is_lost() {
            return Poll::Ready(false);
        }
        time.as_mut().poll(cx).map(|()| true)
    })
    .await
}

struct Job {
    number: usize,
    name: usize,
    hold: u64,
}

/// The inner service, which answers with a stream.
#[derive(Clone, Debug)]
struct Handler(Arc<Journal>);

impl Service<Request<Job>> for Handler {
    type Response = Response<Stream>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Job>) -> Self::Future {
        let Job { number, name, hold } = *request.body();
        let journal = Arc::clone(&self.0);
        journal.granted(number, name);
        Box::pin(async move {
            let piece = Duration::from_millis(hold / 4);
            sleep(piece).await;
            let next = Box::pin(sleep(piece));
            Ok(Response::new(Stream { left: 3, piece, next, number, journal }))
        })
    }
}

/// A few frames, with time between them.
struct Stream {
    left: u32,
    piece: Duration,
    next: Pin<Box<Sleep>>,
    number: usize,
    journal: Arc<Journal>,
}

impl Drop for Stream {
    /// Its source has ended, whether its reader knows that or not.
    fn drop(&mut self) {
        let seen = if self.left == 0 { Seen::GivesBack } else { Seen::Lost };
        self.journal.add(self.number, seen);
    }
}

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        if self.next.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.left -= 1;
        let at = Instant::now() + self.piece;
        self.next.as_mut().reset(at);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"data")))))
    }
}

// ===== operators =====

async fn operate(
    semaphore: &Semaphore,
    name: &str,
    deed: Deed,
    journal: &Journal,
    number: usize,
) -> bool {
    match deed {
        Deed::SetLimit(limit) => semaphore.set_limit(name, limit).await.is_ok(),
        Deed::ClearLimit => semaphore.clear_limit(name).await.is_ok(),
        Deed::Pause => semaphore.pause(name).await.is_ok(),
        Deed::PauseFor(ms) => semaphore.pause_for(name, Duration::from_millis(ms)).await.is_ok(),
        Deed::SetRate(starts, ms) => {
            semaphore.set_rate(name, starts, Duration::from_millis(ms)).await.is_ok()
        }
        Deed::ClearRate => semaphore.clear_rate(name).await.is_ok(),
        Deed::Resume => semaphore.resume(name).await.is_ok(),
        Deed::Drain(ms) => semaphore.drain(name, Duration::from_millis(ms)).await.is_ok(),
        Deed::Inspect => semaphore.inspect(name).await.is_ok(),
        Deed::InspectFleet => semaphore.inspect_fleet(name).await.is_ok(),
        Deed::List => semaphore.list(tower_semaphore::operate::Cursor::default(), 10).await.is_ok(),
        Deed::Overrides => semaphore.overrides().await.is_ok(),
        Deed::Revoke => {
            let Ok(seen) = semaphore.inspect(name).await else { return false };
            let holder = seen.holders.first().map(|holder| holder.id);
            let waiter = seen.waiters.first().map(|waiter| waiter.id);
            let id = if number.is_multiple_of(2) { holder.or(waiter) } else { waiter.or(holder) };
            match id {
                Some(id) => {
                    let well = semaphore.revoke(name, id).await;
                    if matches!(well, Ok(true)) {
                        journal.add(number, Seen::Revoked);
                    }
                    well.is_ok()
                }
                None => true,
            }
        }
    }
}
