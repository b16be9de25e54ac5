//! One budget for all the waiting of a request, in all layers and attempts.

use std::convert::Infallible;
use std::future::poll_fn;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio::time::sleep;
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::limit::{ClientTimeout, Refusal, RefusalReason, WaitBudget};
use tower_semaphore::{ConcurrencyLimitLayer, Permit, Policy, Semaphore};

use crate::support::told::Told;

async fn served(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("served")))
}

/// Holds the only permit of a name for this long.
async fn hold(semaphore: &Semaphore, name: &'static str, time: Duration) {
    let permit = semaphore.acquire(name, &Policy::new(1)).await.unwrap();
    tokio::spawn(async move {
        sleep(time).await;
        drop(permit);
    });
}

async fn elapsed<F: Future>(future: F) -> (Duration, F::Output) {
    let began = tokio::time::Instant::now();
    let output = future.await;
    (began.elapsed(), output)
}

fn waits(semaphore: &Semaphore, name: &str, wait: Duration) -> ConcurrencyLimitLayer {
    let builder = ConcurrencyLimitLayer::builder(semaphore, name).limit(1);
    builder.wait_timeout(wait).build().unwrap()
}

const SECOND: Duration = Duration::from_secs(1);

/// Two layers: the outer one has a permit free after `first`, the inner one never.
async fn waited_for_both(
    outer: Duration,
    inner: Duration,
    first: Duration,
    request: Request<()>,
) -> Duration {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::new(1);
    let outer_held = semaphore.acquire("outer", &policy).await.unwrap();
    let _inner_held = semaphore.acquire("inner", &policy).await.unwrap();
    tokio::spawn(async move {
        sleep(first).await;
        drop(outer_held);
    });
    let service = waits(&semaphore, "outer", outer)
        .layer(waits(&semaphore, "inner", inner).layer(service_fn(served)));
    let (waited, response) = elapsed(service.oneshot(request)).await;
    assert_eq!(response.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
    waited
}

#[tokio::test(start_paused = true)]
async fn the_waits_of_stacked_layers_do_not_add_up() {
    let request = || Request::new(());
    let waited = waited_for_both(5 * SECOND, 5 * SECOND, 4 * SECOND, request()).await;
    assert_eq!(waited, 5 * SECOND);
    // The inner layer may wait longer, and what the outer one waited counts.
    let waited = waited_for_both(5 * SECOND, 8 * SECOND, 4 * SECOND, request()).await;
    assert_eq!(waited, 8 * SECOND);
    // It has what is left of the longer timeout, and no more than its own.
    let waited = waited_for_both(5 * SECOND, 2 * SECOND, 4 * SECOND, request()).await;
    assert_eq!(waited, 5 * SECOND);
    let waited = waited_for_both(5 * SECOND, SECOND / 2, 4 * SECOND, request()).await;
    assert_eq!(waited, 4 * SECOND + SECOND / 2);
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_stands_in_the_request_ends_all_waiting() {
    let mut request = Request::new(());
    request.extensions_mut().insert(WaitBudget::of(3 * SECOND));
    let waited = waited_for_both(5 * SECOND, 5 * SECOND, 2 * SECOND, request).await;
    assert_eq!(waited, 3 * SECOND);
    let mut request = Request::new(());
    request.extensions_mut().insert(WaitBudget::of(Duration::ZERO));
    let waited = waited_for_both(5 * SECOND, 5 * SECOND, 2 * SECOND, request).await;
    assert_eq!(waited, Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_request_waits_no_longer_than_its_client() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::new(1);
    let _held = semaphore.acquire("inner", &policy).await.unwrap();
    let outer_held = semaphore.acquire("outer", &policy).await.unwrap();
    tokio::spawn(async move {
        sleep(SECOND).await;
        drop(outer_held);
    });
    let outer = ConcurrencyLimitLayer::builder(&semaphore, "outer").limit(1);
    let outer = outer.wait_timeout(10 * SECOND).client_timeout(ClientTimeout::grpc());
    let inner = waits(&semaphore, "inner", 10 * SECOND).layer(service_fn(served));
    let service = outer.build().unwrap().layer(inner);
    let request =
        |timeout: &str| Request::get("/").header("grpc-timeout", timeout).body(()).unwrap();
    // Two seconds from its arrival: one in the outer layer, one in the inner.
    let (waited, _) = elapsed(service.clone().oneshot(request("2S"))).await;
    assert_eq!(waited, 2 * SECOND);
    // It does not make a layer wait for longer than its own timeout.
    let (waited, _) = elapsed(service.oneshot(request("2H"))).await;
    assert_eq!(waited, 10 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn a_wait_timeout_can_go_by_the_request() {
    let semaphore = Semaphore::in_memory();
    let _held = semaphore.acquire("quota", &Policy::new(1)).await.unwrap();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "quota").limit(1);
    let layer = layer.wait_timeout_by(|_, parts| {
        if parts.headers.contains_key("x-patient") { 7 * SECOND } else { Duration::ZERO }
    });
    let service = layer.build().unwrap().layer(service_fn(served));
    let patient = Request::get("/").header("x-patient", "1").body(()).unwrap();
    let (waited, _) = elapsed(service.clone().oneshot(patient)).await;
    assert_eq!(waited, 7 * SECOND);
    let (waited, _) = elapsed(service.oneshot(Request::new(()))).await;
    assert_eq!(waited, Duration::ZERO);
}

/// A layer whose plans may wait for as many seconds as the request says.
fn waits_by_plan(semaphore: &Semaphore, wait: Duration) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::builder(semaphore, "outer")
        .limit(1)
        .wait_timeout(wait)
        .wait_timeout_by(|_, parts| {
            let plan = parts.headers["x-patience-ms"].to_str().unwrap();
            Duration::from_millis(plan.parse().unwrap())
        })
        .build()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn layers_further_in_go_by_the_wait_that_a_plan_was_allowed() {
    // The layer's own wait timeout, the plan's, the wait in the outer layer, the wait timeout of the inner
    // layer, and the wait in both.
    let cases = [
        (SECOND, 10 * SECOND, 4 * SECOND, 5 * SECOND, 9 * SECOND),
        (10 * SECOND, 2 * SECOND, SECOND * 3 / 2, SECOND, 2 * SECOND),
    ];
    for (layer, plan, first, inner, both) in cases {
        let semaphore = Semaphore::in_memory();
        hold(&semaphore, "outer", first).await;
        hold(&semaphore, "inner", 60 * SECOND).await;
        let stack = waits_by_plan(&semaphore, layer)
            .layer(waits(&semaphore, "inner", inner).layer(service_fn(served)));
        let plan = plan.as_millis().to_string();
        let request = Request::get("/").header("x-patience-ms", plan).body(()).unwrap();
        let (waited, response) = elapsed(stack.oneshot(request)).await;
        assert_eq!(response.unwrap().status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(waited, both);
    }
}

#[tokio::test(start_paused = true)]
async fn a_layer_without_a_wait_leaves_what_it_allowed_to_those_further_in() {
    let semaphore = Semaphore::in_memory();
    hold(&semaphore, "middle", 2 * SECOND).await;
    hold(&semaphore, "inner", 60 * SECOND).await;
    let inner = waits(&semaphore, "inner", SECOND).layer(service_fn(served));
    let stack = waits(&semaphore, "outer", 10 * SECOND)
        .layer(waits(&semaphore, "middle", SECOND * 5 / 2).layer(inner));
    let mut request = Request::new(());
    request.extensions_mut().insert(WaitBudget::default());
    let (waited, _) = elapsed(stack.oneshot(request)).await;
    assert_eq!(waited, 3 * SECOND, "two in the middle, and one of the outer's ten");
}

#[tokio::test(start_paused = true)]
async fn the_tries_of_a_request_share_one_budget() {
    let semaphore = Semaphore::in_memory();
    hold(&semaphore, "inner", 60 * SECOND).await;
    let inner = waits(&semaphore, "inner", 3 * SECOND).layer(service_fn(served));
    let retry = service_fn(move |request: Request<()>| {
        let inner = inner.clone();
        async move {
            for _ in 0..4 {
                let response = inner.clone().oneshot(request.clone()).await.unwrap();
                assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            }
            served(request).await
        }
    });
    // One in the outer layer, and four in all attempts.
    hold(&semaphore, "outer", SECOND).await;
    let stack = waits(&semaphore, "outer", 5 * SECOND).layer(retry.clone());
    let (waited, _) = elapsed(stack.oneshot(Request::new(()))).await;
    assert_eq!(waited, 5 * SECOND);
    // A request that came with a budget counts once a layer has passed it on, even if it did not wait there.
    let stack = waits(&semaphore, "free", 5 * SECOND).layer(retry.clone());
    let mut request = Request::new(());
    request.extensions_mut().insert(WaitBudget::default());
    let (waited, _) = elapsed(stack.oneshot(request)).await;
    assert_eq!(waited, 5 * SECOND);
    // So does a request whose budget was inserted without a layer.
    let mut request = Request::new(());
    WaitBudget::default().insert_into(request.extensions_mut());
    let budget = request.extensions().get::<WaitBudget>().unwrap().clone();
    let (waited, _) = elapsed(retry.oneshot(request)).await;
    assert_eq!((waited, budget.waited()), (3 * SECOND, 3 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn tries_that_wait_at_the_same_time_wait_once() {
    let semaphore = Semaphore::in_memory();
    hold(&semaphore, "a", 2 * SECOND).await;
    hold(&semaphore, "b", 3 * SECOND).await;
    let mut request = Request::new(());
    WaitBudget::default().insert_into(request.extensions_mut());
    let budget = request.extensions().get::<WaitBudget>().unwrap().clone();
    let ask = |name| {
        let request = request.clone();
        waits(&semaphore, name, 10 * SECOND).layer(service_fn(served)).oneshot(request)
    };
    let (waited, _) = elapsed(join_all([ask("a"), ask("b")])).await;
    assert_eq!((waited, budget.waited()), (3 * SECOND, 3 * SECOND));
    // An attempt that was given up has waited, too.
    hold(&semaphore, "a", 60 * SECOND).await;
    tokio::time::timeout(SECOND, ask("a")).await.unwrap_err();
    assert_eq!(budget.waited(), 4 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn what_the_inner_service_takes_to_be_ready_is_no_wait_for_a_permit() {
    let semaphore = Semaphore::in_memory();
    let mut request = Request::new(());
    let budget = WaitBudget::until(tokio::time::Instant::now() + 5 * SECOND);
    budget.insert_into(request.extensions_mut());
    let budget = request.extensions().get::<WaitBudget>().unwrap().clone();
    // The only slot is taken until after the deadline.
    let slot = tower::limit::ConcurrencyLimit::new(
        service_fn(|request: Request<()>| async move {
            assert!(request.extensions().get::<Permit>().is_some());
            served(request).await
        }),
        1,
    );
    let mut other = slot.clone();
    poll_fn(|cx| Service::<Request<()>>::poll_ready(&mut other, cx)).await.unwrap();
    tokio::spawn(async move {
        sleep(7 * SECOND).await;
        drop(other);
    });
    hold(&semaphore, "quota", SECOND).await;
    let call = waits(&semaphore, "quota", 60 * SECOND).layer(slot).oneshot(request);
    let (took, response) = elapsed(call).await;
    assert_eq!(response.unwrap().status(), StatusCode::OK);
    assert_eq!((took, budget.waited()), (7 * SECOND, SECOND));
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_which_no_time_is_left_has_timed_out() {
    let told = Told::new();
    let semaphore = Semaphore::in_memory();
    hold(&semaphore, "quota", 60 * SECOND).await;
    let ask = async |wait, budget| {
        let mut request = Request::new(());
        request.extensions_mut().insert(WaitBudget::of(budget));
        let layer = waits(&semaphore, "quota", wait);
        let (waited, response) = elapsed(layer.layer(service_fn(served)).oneshot(request)).await;
        assert_eq!(waited, Duration::ZERO);
        let response = response.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        let outcome = told.events().pop().unwrap().fields["outcome"].clone();
        (response.extensions().get::<Refusal>().unwrap().reason, outcome)
    };
    let told = ask(SECOND, Duration::ZERO).await;
    assert_eq!(told, (RefusalReason::QueueTimeout, "queue_timeout".to_owned()));
    // This layer lets no request wait, whatever is left of the budget.
    let told = ask(Duration::ZERO, SECOND).await;
    assert_eq!(told, (RefusalReason::Limit, "limit".to_owned()));
}

/// As `axum::Extension` and tower-http's `AddExtensionLayer` insert it.
#[tokio::test(start_paused = true)]
async fn requests_that_have_clones_of_one_budget_do_not_share_their_waits() {
    let semaphore = Semaphore::in_memory();
    let one = WaitBudget::default();
    let stack = waits(&semaphore, "quota", 2 * SECOND).layer(service_fn(served));
    let stack = tower::util::MapRequest::new(stack, |mut request: Request<()>| {
        request.extensions_mut().insert(one.clone());
        request
    });
    for round in 0..3 {
        hold(&semaphore, "quota", SECOND).await;
        let (waited, response) = elapsed(stack.clone().oneshot(Request::new(()))).await;
        assert_eq!((waited, response.unwrap().status()), (SECOND, StatusCode::OK), "{round}");
    }
    assert_eq!(one.waited(), Duration::ZERO);
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn a_deadline_holds_while_redis_is_frozen() {
    use tower_semaphore::OnUnavailable;

    let redis = crate::support::redis::TestRedis::start();
    let semaphore = redis.semaphore();
    let ask = async |name: &str, policy, budget| {
        let layer = ConcurrencyLimitLayer::builder(&semaphore, name).limit(1);
        let layer = layer.on_unavailable(policy).build().unwrap();
        let mut request = Request::new(());
        request.extensions_mut().insert(WaitBudget::of(budget));
        let began = std::time::Instant::now();
        let response = layer.layer(service_fn(served)).oneshot(request).await.unwrap();
        (response.status(), began.elapsed())
    };
    let (refuse, admit) = (OnUnavailable::Refuse, OnUnavailable::Admit);
    // There is time for the answer of a healthy Redis, even if there is none to wait.
    assert_eq!(ask("free", refuse, Duration::ZERO).await.0, StatusCode::OK);
    redis.signal("STOP");
    for (policy, status) in [(refuse, StatusCode::SERVICE_UNAVAILABLE), (admit, StatusCode::OK)] {
        for (budget, least) in [(300, 300), (0, 100)].map(|(a, b)| (a, Duration::from_millis(b))) {
            let (answered, took) = ask("frozen", policy, Duration::from_millis(budget)).await;
            assert_eq!(answered, status, "{policy:?} with {budget} ms");
            assert!(took < least + SECOND / 3, "{policy:?} with {budget} ms: {took:?}");
        }
    }
    redis.signal("CONT");
}
