//! What refusals tell of the wait, and who is refused because it would wait in vain.
//!
//! Each test in `on_each!` runs on each backend, with the semaphores of several processes. The others measure, on virtual
//! time.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::header::RETRY_AFTER;
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, Refusal, RefusalReason, WaitBudget};
use tower_semaphore::operate::TenantChange;
use tower_semaphore::{
    AcquireError, Ask, ConcurrencyLimitLayer, Permit, Policy, RejectReason, Rejected, Semaphore,
};

use crate::support::semaphore::{rejection, waiting};
use crate::support::{eventually, on_each};

on_each! {
    a_refusal_tells_how_many_were_ahead_and_how_long_it_takes
    what_a_process_has_not_seen_it_does_not_tell
    who_would_wait_in_vain_is_refused_at_once
    a_tenant_that_is_changed_ends_what_was_seen
}

/// How long each permit is held.
const EACH: Duration = Duration::from_millis(50);

fn patient(limit: u32, wait: Duration) -> Policy {
    Policy::builder(limit).wait_timeout(wait).build().unwrap()
}

fn long(limit: u32) -> Policy {
    patient(limit, Duration::from_secs(60))
}

type Waiting = JoinHandle<Result<Permit, AcquireError>>;

/// Passes one permit through requests of this process, each of which holds it for this long. Returns the last.
async fn moving(node: &Semaphore, each: Duration) -> Permit {
    let mut held = node.acquire("x", &long(1)).await.unwrap();
    for _ in 0..5 {
        let next = tokio::spawn(node.acquire("x", &long(1)));
        waiting(node, "x", 1).await;
        sleep(each).await;
        drop(held);
        held = next.await.unwrap().unwrap();
    }
    held
}

async fn queue(node: &Semaphore, requests: u64) -> Vec<Waiting> {
    let mut queue = Vec::new();
    for count in 1..=requests {
        queue.push(tokio::spawn(node.acquire("x", &long(1))));
        waiting(node, "x", count).await;
    }
    queue
}

async fn refused(node: &Semaphore, wait: Duration) -> Rejected {
    rejection(node.acquire("x", &patient(1, wait)).await)
}

async fn a_refusal_tells_how_many_were_ahead_and_how_long_it_takes(node: &dyn Fn() -> Semaphore) {
    let (one, other) = (node(), node());
    let held = moving(&one, EACH).await;
    let queue = queue(&other, 3).await;
    let rejected = refused(&one, Duration::from_millis(20)).await;
    assert_eq!((rejected.reason, rejected.ahead()), (RejectReason::QueueTimeout, Some(3)));
    let each = rejected.expected_wait().unwrap() / 4;
    assert!((EACH..EACH * 4).contains(&each), "{each:?}");
    let rejected = refused(&one, Duration::ZERO).await;
    assert_eq!((rejected.reason, rejected.ahead()), (RejectReason::Limit, Some(3)));
    assert_eq!(rejected.expected_wait().unwrap() / 4, each);
    drop((held, queue));
}

async fn what_a_process_has_not_seen_it_does_not_tell(node: &dyn Fn() -> Semaphore) {
    let (one, other) = (node(), node());
    let held = moving(&one, EACH).await;
    let rejected = refused(&other, Duration::from_millis(20)).await;
    assert_eq!((rejected.ahead(), rejected.expected_wait()), (Some(0), None), "none of its own");
    drop(held);
}

async fn a_tenant_that_is_changed_ends_what_was_seen(node: &dyn Fn() -> Semaphore) {
    let (one, operator) = (node(), node());
    for change in [TenantChange::new().weight(3), TenantChange::new().limit(4)] {
        let held = moving(&one, EACH).await;
        assert!(refused(&one, Duration::ZERO).await.expected_wait().is_some());
        operator.set_tenant("other", "acme", change).await.unwrap();
        assert!(refused(&one, Duration::ZERO).await.expected_wait().is_some());
        operator.set_tenant("x", "acme", change).await.unwrap();
        eventually("nothing is told", async || {
            refused(&one, Duration::ZERO).await.expected_wait().is_none()
        })
        .await;
        drop(held);
    }
}

async fn who_would_wait_in_vain_is_refused_at_once(node: &dyn Fn() -> Semaphore) {
    let (one, other) = (node(), node());
    let held = moving(&one, EACH).await;
    let queue = queue(&other, 19).await;
    let brief = Policy::builder(1).wait_timeout(EACH).refuse_hopeless(true).build().unwrap();
    let error = one.acquire("x", &brief).await.unwrap_err();
    let text = error.to_string();
    let told = "none of 1 permits will come free in time; the wait would be ";
    assert!(text.starts_with(told), "{text}");
    let rejected = rejection(Err(error));
    assert_eq!((rejected.reason, rejected.ahead()), (RejectReason::Hopeless, Some(19)));
    assert!(rejected.expected_wait().unwrap() >= EACH * 20, "{rejected:?}");
    let patient = Policy::builder(1).refuse_hopeless(true).wait_timeout(EACH * 1000);
    let waits = tokio::spawn(one.acquire("x", &patient.build().unwrap()));
    waiting(&other, "x", 20).await;
    // The other process knows nothing of it, so it lets its requests wait.
    let rejected = rejection(other.acquire("x", &brief).await);
    assert_eq!(rejected.reason, RejectReason::QueueTimeout);
    drop((held, queue, waits));
}

/// How a layer with one permit, which comes free once a second while nine wait, answers one more request.
async fn tenth(
    set: impl FnOnce(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder,
    wait: Duration,
) -> (Refusal, String, Value) {
    let semaphore = Semaphore::in_memory();
    let held = moving(&semaphore, Duration::from_secs(1)).await;
    let queue = queue(&semaphore, 9).await;
    let builder = ConcurrencyLimitLayer::builder(&semaphore, "x").limit(1).wait_timeout(LIMIT);
    let served = async |_: Request<()>| Ok::<_, Infallible>(Response::new(String::new()));
    let mut request = Request::new(());
    request.extensions_mut().insert(WaitBudget::of(wait));
    let service = set(builder).build().unwrap().layer(service_fn(served));
    let response = service.oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal = response.extensions().get::<Refusal>().unwrap().clone();
    let after = response.headers()[RETRY_AFTER].to_str().unwrap().to_owned();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    drop((held, queue));
    (refusal, after, serde_json::from_slice(&body).unwrap())
}

const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn a_client_is_told_to_come_back_when_it_can_expect_a_permit_in_time() {
    let mut told = Vec::new();
    for _ in 0..20 {
        let (refusal, after, problem) = tenth(|builder| builder, Duration::from_secs(2)).await;
        assert_eq!(refusal.reason, RefusalReason::QueueTimeout);
        assert_eq!((&problem["ahead"], &problem["expected-wait"]), (&9.into(), &10.0.into()));
        told.push(after);
    }
    // Ten seconds, less half of the two that it waits itself, and up to one more.
    assert!(told.iter().all(|after| ["9", "10"].contains(&after.as_str())), "{told:?}");
    assert!(told.iter().any(|after| *after != told[0]), "those who were refused together");
    let later = |builder: ConcurrencyLimitBuilder| builder.retry_after(Duration::from_secs(30));
    let (_, after, _) = tenth(later, Duration::from_secs(2)).await;
    assert!((30..=60).contains(&after.parse().unwrap()), "not sooner than the layer says: {after}");
}

#[tokio::test(start_paused = true)]
async fn a_request_that_would_wait_in_vain_is_answered_at_once_and_told_so() {
    let began = Instant::now();
    let refuse = |builder: ConcurrencyLimitBuilder| builder.refuse_hopeless(true);
    let (refusal, after, problem) = tenth(refuse, Duration::from_secs(4)).await;
    assert_eq!(refusal.reason, RefusalReason::Hopeless);
    assert_eq!(refusal.waited(), Some(Duration::ZERO));
    assert!(began.elapsed() < Duration::from_secs(6), "it did not wait");
    assert!(["8", "9"].contains(&after.as_str()), "{after}");
    assert_eq!(problem["reason"], "hopeless");
    assert_eq!(problem["detail"], "no permit of x will come free in time");
    assert_eq!((&problem["ahead"], &problem["expected-wait"]), (&9.into(), &10.0.into()));
    let (refusal, ..) = tenth(refuse, Duration::from_secs(5)).await;
    assert_eq!(refusal.reason, RefusalReason::QueueTimeout, "not more than twice as long");
}

/// Ten permits, which requests hold for half a second on average.
const PERMITS: u32 = 10;

/// How many requests a second come at a time, in s.
type Load = fn(f64) -> f64;

fn steadily(_: f64) -> f64 {
    24.0
}

fn in_bursts(at: f64) -> f64 {
    if at % 30.0 < 5.0 { 60.0 } else { 10.0 }
}

fn in_long_bursts(at: f64) -> f64 {
    if at % 60.0 < 10.0 { 60.0 } else { 14.0 }
}

struct Chance(fastrand::Rng);

impl Chance {
    fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    fn exponential(&mut self, rate: f64) -> Duration {
        Duration::from_secs_f64(-(1.0 - self.0.f64()).ln() / rate)
    }

    /// Log-normal, half a second on average.
    fn hold(&mut self) -> Duration {
        let (u, v) = (1.0 - self.0.f64(), self.0.f64());
        let normal = (-2.0 * u.ln()).sqrt() * (std::f64::consts::TAU * v).cos();
        Duration::from_secs_f64(0.5 * (0.8 * normal - 0.32).exp())
    }
}

fn fleet() -> [Semaphore; 3] {
    let backend = MemoryBackend::new();
    [(); 3].map(|()| Semaphore::new(backend.clone()))
}

/// Who asks: each tenant, with its weight, and how many of all requests are its own. None: one queue.
type Tenants = &'static [(&'static str, u32, usize)];

/// One tenant has half of the requests, and another one a tenth.
const UNEVEN: Tenants = &[("a", 1, 5), ("b", 1, 3), ("c", 1, 2), ("d", 1, 1)];
/// Each has a third of the requests.
const WEIGHTED: Tenants = &[("a", 1, 1), ("b", 2, 1), ("c", 4, 1)];

/// Which tenant asks, and for what.
fn ask(tenants: Tenants, chance: &mut Chance) -> (usize, Ask) {
    let each = (0..tenants.len()).flat_map(|whose| [whose].repeat(tenants[whose].2));
    let Some(whose) = chance.0.choice(each.collect::<Vec<_>>()) else { return (0, Ask::of("x")) };
    let (tenant, weight, _) = tenants[whose];
    (whose, Ask::of("x").by(tenant).weight(weight))
}

/// What requests were told that were refused at once, s, and how long others waited that came in their stead.
type Told = Vec<(Option<f64>, f64)>;

async fn told_and_true(load: Load, tenants: Tenants, seed: u64) -> Told {
    let (nodes, mut chance, began) = (fleet(), Chance::new(seed), Instant::now());
    let told = Arc::new(Mutex::new(Told::new()));
    let mut requests = JoinSet::new();
    for count in 0_u64.. {
        let at = began.elapsed().as_secs_f64();
        if at > 300.0 {
            break;
        }
        sleep(chance.exponential(load(at))).await;
        let (_, ask) = ask(tenants, &mut chance);
        let node = chance.0.choice(&nodes).unwrap().clone();
        let (hold, wait) = (chance.hold(), Duration::from_secs_f64(1.0 + 9.0 * chance.0.f64()));
        let told = Arc::clone(&told);
        requests.spawn(async move {
            if count % 10 > 0 {
                let permit = node.acquire(ask.clone(), &patient(PERMITS, wait)).await;
                sleep(if permit.is_ok() { hold } else { Duration::ZERO }).await;
                return;
            }
            let refused = node.try_acquire(ask.clone(), &long(PERMITS)).await;
            let permit = node.acquire(ask.clone(), &long(PERMITS)).await.unwrap();
            if let Err(AcquireError::Rejected(rejected)) = refused {
                let expected = rejected.expected_wait().map(|wait| wait.as_secs_f64());
                told.lock().unwrap().push((expected, permit.waited().as_secs_f64()));
            }
            sleep(hold).await;
        });
        while requests.try_join_next().is_some() {}
    }
    requests.shutdown().await;
    std::mem::take(&mut *told.lock().unwrap())
}

async fn is_about_true(load: Load, how: &str) {
    for (tenants, whom) in
        [(&[][..], "one queue"), (UNEVEN, "uneven tenants"), (WEIGHTED, "weighted tenants")]
    {
        let mut refused = Told::new();
        for seed in 1..=3 {
            refused.append(&mut told_and_true(load, tenants, seed).await);
        }
        let error =
            |(told, waited): &(Option<f64>, f64)| Some((told.as_ref()? - waited).abs() / waited);
        let mut errors: Vec<_> = refused.iter().filter_map(error).collect();
        errors.sort_by(f64::total_cmp);
        let (median, told) = (errors[errors.len() / 2], errors.len() as f64 / refused.len() as f64);
        println!(
            "{whom}, {how}: median error {median:.3}; {told:.3} of {} were told",
            refused.len()
        );
        assert!(median <= 0.3 && told >= 0.9, "{whom}, {how}: {median}, {told}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_expected_wait_is_about_the_true_one_under_a_steady_load() {
    is_about_true(steadily, "steadily").await;
}

#[tokio::test(start_paused = true)]
async fn the_expected_wait_is_about_the_true_one_in_bursts() {
    is_about_true(in_bursts, "in bursts").await;
}

/// What became of a request.
#[derive(Clone, Copy, PartialEq)]
enum Became {
    Served,
    TimedOut,
    Hopeless,
}

struct Seen {
    whose: usize,
    came: Duration,
    wait: Duration,
    became: Became,
    ended: Duration,
}

/// Requests of which half wait for as many seconds as one says, and half as the other, in the order in which they came.
async fn waiting_for(waits: [u64; 2], load: Load, tenants: Tenants, seed: u64) -> Vec<Seen> {
    let (nodes, mut chance, began) = (fleet(), Chance::new(seed), Instant::now());
    let mut requests = JoinSet::new();
    for count in 0_usize.. {
        let at = began.elapsed().as_secs_f64();
        if at > 600.0 {
            break;
        }
        sleep(chance.exponential(load(at))).await;
        let wait = Duration::from_secs(waits[usize::from(chance.0.bool())]);
        let policy = Policy::builder(PERMITS).wait_timeout(wait).refuse_hopeless(true).build();
        let (whose, ask) = ask(tenants, &mut chance);
        let (hold, came) = (chance.hold(), began.elapsed());
        let acquire = chance.0.choice(&nodes).unwrap().acquire(ask, &policy.unwrap());
        requests.spawn(async move {
            let answer = acquire.await;
            let ended = began.elapsed();
            let became = match &answer {
                Ok(_) => Became::Served,
                Err(AcquireError::Rejected(Rejected { reason, .. })) => match reason {
                    RejectReason::Hopeless => Became::Hopeless,
                    _ => Became::TimedOut,
                },
                Err(error) => panic!("{error}"),
            };
            sleep(if answer.is_ok() { hold } else { Duration::ZERO }).await;
            (count, Seen { whose, came, wait, became, ended })
        });
    }
    let mut seen = requests.join_all().await;
    seen.sort_by_key(|(count, _)| *count);
    seen.into_iter().map(|(_, seen)| seen).collect()
}

/// What part of all was refused as hopeless, and what part wrongly; and what part of the hopeless was refused.
fn refused_of(seen: &[Seen], how: &str) -> (f64, f64, f64) {
    let count = |of: Became| seen.iter().filter(|seen| seen.became == of).count();
    let (timed_out, hopeless) = (count(Became::TimedOut), count(Became::Hopeless));
    // A request of its line that came later had a permit in time, so this one would have had it.
    let mut overtaken = 0;
    let mut first = HashMap::new();
    for seen in seen.iter().rev() {
        let first = first.entry(seen.whose).or_insert(Duration::MAX);
        match seen.became {
            Became::Served => *first = seen.ended.min(*first),
            Became::Hopeless => overtaken += usize::from(*first <= seen.came + seen.wait),
            Became::TimedOut => {}
        }
    }
    let all = seen.len() as f64;
    let (refused, wrong) = (hopeless as f64 / all, overtaken as f64 / all);
    let rightly = (hopeless - overtaken) as f64;
    let caught = rightly / (rightly + timed_out as f64).max(1.0);
    println!("{how}: of {all} refused {refused:.4}, {wrong:.4} wrongly; caught {caught:.2}");
    (refused, wrong, caught)
}

#[tokio::test(start_paused = true)]
async fn of_requests_with_mixed_waits_the_hopeless_are_refused_and_hardly_another() {
    // Steadily, those ahead give up before the wait is hopeless.
    let loads = [(in_long_bursts as Load, "in bursts", 0.8), (steadily, "steadily", 0.0)];
    for (load, how, least) in loads {
        let seen = waiting_for([1, 20], load, &[], 1).await;
        let (_, wrong, caught) = refused_of(&seen, how);
        assert!(wrong <= 0.01 && caught >= least, "{how}: {wrong} wrongly, {caught} caught");
    }
}

#[tokio::test(start_paused = true)]
async fn of_tenants_requests_hardly_one_is_refused_that_would_not_wait_in_vain() {
    let seen = waiting_for([1, 20], in_long_bursts, UNEVEN, 1).await;
    let (_, wrong, caught) = refused_of(&seen, "mixed waits");
    assert!(wrong <= 0.01 && caught >= 0.15, "{wrong} wrongly, {caught} caught");
    // Where all wait equally long, those ahead give up first.
    let seen = waiting_for([5, 5], in_long_bursts, UNEVEN, 1).await;
    let (refused, ..) = refused_of(&seen, "equal waits");
    assert!(refused <= 0.001, "{refused}");
}
