//! Several layers on one route: the tenant's, the route's and one for all.

use std::convert::Infallible;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::limit::{HeaderKey, PathKey, Refusal};
use tower_semaphore::{ConcurrencyLimitLayer, Limit, Name, Permit, Policy, Semaphore};

use crate::support::eventually;
use crate::support::redis::TestRedis;
use crate::support::semaphore::{empty, warm};
use crate::support::stopwatch::Stopwatch;

const LIMITS: [u32; 3] = [2, 4, 6];

/// Outermost first.
fn layers(semaphore: &Semaphore, wait: Duration) -> [ConcurrencyLimitLayer; 3] {
    let names = ["tenant", "route", "all"];
    std::array::from_fn(|i| {
        let builder = ConcurrencyLimitLayer::builder(semaphore, names[i]);
        let builder = match i {
            0 => builder.key(HeaderKey::from_static("x-tenant")),
            1 => builder.key(PathKey),
            _ => builder,
        };
        builder.limit(LIMITS[i]).wait_timeout(wait).build().unwrap()
    })
}

fn request(tenant: usize, route: usize) -> Request<()> {
    let request = Request::get(format!("/{route}")).header("x-tenant", format!("t{tenant}"));
    request.body(()).unwrap()
}

fn tenant_0() -> Name {
    Name::new("tenant").part("t0")
}

fn route_0() -> Name {
    Name::new("route").part("/0")
}

/// Waits until this number of requests hold, and this number wait.
async fn until(semaphore: &Semaphore, name: Name, in_use: u64, waiting: u64) {
    eventually("so many hold and wait", async || {
        let seen = semaphore.inspect(name.clone()).await;
        seen.is_ok_and(|seen| (seen.in_use, seen.waiting) == (in_use, waiting))
    })
    .await;
}

async fn served(_: Request<()>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("served")))
}

/// How many are inside, by tenant, by route and in all; and the most there have been.
#[derive(Default)]
struct Inside {
    tenants: [AtomicUsize; 5],
    routes: [AtomicUsize; 3],
    all: [AtomicUsize; 1],
    peaks: Mutex<[usize; 3]>,
}

impl Inside {
    fn counts(&self, tenant: usize, route: usize) -> [&AtomicUsize; 3] {
        [&self.tenants[tenant], &self.routes[route], &self.all[0]]
    }

    fn enter(&self, tenant: usize, route: usize) {
        let mut peaks = self.peaks.lock().unwrap();
        for (count, peak) in self.counts(tenant, route).into_iter().zip(&mut *peaks) {
            *peak = (*peak).max(count.fetch_add(1, Ordering::SeqCst) + 1);
        }
    }

    fn leave(&self, tenant: usize, route: usize) {
        for count in self.counts(tenant, route) {
            count.fetch_sub(1, Ordering::SeqCst);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn three_layers_keep_three_caps_over_two_processes_and_nobody_is_stuck() {
    let redis = TestRedis::start();
    let processes = [redis.semaphore(), redis.semaphore()];
    let stacks = processes.each_ref().map(|process| layers(process, Duration::from_secs(60)));
    let inside = Arc::<Inside>::default();
    let began = Instant::now();
    // Forty clients of five tenants on three routes: each makes thirty requests.
    let clients = (0..40).map(|client| {
        let [tenant_layer, route_layer, all_layer] = stacks[client % 2].clone();
        let inside = Arc::clone(&inside);
        tokio::spawn(async move {
            for i in 0..30 {
                let (tenant, route) = (client % 5, (client / 5 + i) % 3);
                let inside = Arc::clone(&inside);
                let handler = service_fn(move |_: Request<()>| {
                    let inside = Arc::clone(&inside);
                    async move {
                        inside.enter(tenant, route);
                        tokio::time::sleep(Duration::from_millis(2)).await;
                        inside.leave(tenant, route);
                        Ok::<_, Infallible>(Response::new(Full::from("served")))
                    }
                });
                let service = tenant_layer.layer(route_layer.layer(all_layer.layer(handler)));
                let response = service.oneshot(request(tenant, route)).await.unwrap();
                assert_eq!(response.status(), StatusCode::OK);
                response.into_body().collect().await.unwrap();
            }
        })
    });
    for client in join_all(clients).await {
        client.unwrap();
    }
    let peaks = *inside.peaks.lock().unwrap();
    println!("1200 requests in {:?}; at the most inside: {peaks:?}", began.elapsed());
    // Each cap was reached, and none was exceeded.
    assert_eq!(peaks.map(|peak| u32::try_from(peak).unwrap()), LIMITS);
    // With a cycle, a request would have waited for its whole timeout.
    assert!(began.elapsed() < Duration::from_secs(50), "{:?}", began.elapsed());
    empty(&redis).await;
}

#[tokio::test]
async fn a_refusal_of_an_inner_layer_gives_the_outer_permits_back_at_once() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    let [tenant, route, all] = layers(&semaphore, Duration::from_secs(1));
    let service = tenant.layer(route.layer(all.layer(service_fn(served))));
    let policy = Policy::new(LIMITS[2]);
    let taken = join_all((0..LIMITS[2]).map(|_| semaphore.acquire("all", &policy))).await;

    let asks = tokio::spawn(service.clone().oneshot(request(0, 0)));
    until(&semaphore, Name::new("all"), 6, 1).await;
    // While it waits it holds what it has.
    until(&semaphore, tenant_0(), 1, 0).await;
    until(&semaphore, route_0(), 1, 0).await;
    let response = asks.await.unwrap().unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let refusal: &Refusal = response.extensions().get().unwrap();
    assert_eq!(&*refusal.policy, "all");
    // The response still exists, unread; its permits do not.
    until(&semaphore, tenant_0(), 0, 0).await;
    until(&semaphore, route_0(), 0, 0).await;
    drop((taken, response));
    empty(&redis).await;
}

#[tokio::test]
async fn who_waits_in_the_outermost_layer_takes_nothing_from_others() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    let [tenant, route, all] = layers(&semaphore, Duration::from_secs(30));
    let service = tenant.layer(route.layer(all.layer(service_fn(served))));
    // One tenant requests more than all permits together.
    let ask = async |tenant| service.clone().oneshot(request(tenant, 0)).await.unwrap();
    let held = join_all((0..LIMITS[0]).map(|_| ask(0))).await;
    let crowd = tokio::spawn(join_all(
        (0..10).map(|_| service.clone().oneshot(request(0, 0))).collect::<Vec<_>>(),
    ));
    until(&semaphore, tenant_0(), 2, 10).await;
    until(&semaphore, route_0(), 2, 0).await;
    let began = Stopwatch::start();
    assert_eq!(ask(1).await.status(), StatusCode::OK);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    crowd.abort();
    let _ = crowd.await;
    drop(held);
    empty(&redis).await;
}

#[tokio::test]
async fn two_routes_with_opposite_orders_can_stand_in_a_circle_until_the_wait_timeout() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    warm(&semaphore).await;
    let layer = |name: &str| {
        let builder = ConcurrencyLimitLayer::builder(&semaphore, name).limit(1);
        builder.wait_timeout(Duration::from_millis(700)).build().unwrap()
    };
    let (a, b, handler) = (layer("a"), layer("b"), service_fn(served));
    // Requests the second permit when both requests have their first one.
    let both_hold = Arc::new(tokio::sync::Barrier::new(2));
    let then = |second: &ConcurrencyLimitLayer| {
        let (service, both_hold) = (second.layer(handler), Arc::clone(&both_hold));
        service_fn(move |request: Request<()>| {
            let (service, both_hold) = (service.clone(), Arc::clone(&both_hold));
            async move {
                both_hold.wait().await;
                service.oneshot(request).await
            }
        })
    };
    let began = Instant::now();
    let (one, two) = tokio::join!(
        a.layer(then(&b)).oneshot(request(0, 0)),
        b.layer(then(&a)).oneshot(request(0, 0)),
    );
    let took = began.elapsed();
    // It ends, but only by a rejection, and not before.
    let statuses = [one.unwrap().status(), two.unwrap().status()];
    assert!(statuses.contains(&StatusCode::TOO_MANY_REQUESTS), "{statuses:?}");
    assert!(took >= Duration::from_millis(700) && took < Duration::from_secs(3), "{took:?}");
    empty(&redis).await;
}

// ===== what a handler keeps =====

fn limited(semaphore: &Semaphore, name: &str) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::builder(semaphore, name).limit(2).build().unwrap()
}

/// Returns the permit that a handler below these layers takes from the request's extensions.
async fn kept<S>(make: impl FnOnce(Taker) -> S) -> Permit
where
    S: Service<Request<()>, Error = Infallible>,
{
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let response = make(Taker { sender }).oneshot(Request::new(())).await;
    assert!(response.is_ok());
    drop(response);
    receiver.recv().await.expect("a permit")
}

#[derive(Clone)]
struct Taker {
    sender: tokio::sync::mpsc::UnboundedSender<Permit>,
}

impl Service<Request<()>> for Taker {
    type Response = Response<Full<Bytes>>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        self.sender.send(request.extensions().get::<Permit>().expect("a permit").clone()).unwrap();
        std::future::ready(Ok(Response::default()))
    }
}

async fn in_use(semaphore: &Semaphore) -> [u64; 3] {
    let mut counts = [0; 3];
    for (count, name) in counts.iter_mut().zip(["tenant", "route", "all"]) {
        *count = semaphore.inspect(name).await.unwrap().in_use;
    }
    counts
}

#[tokio::test]
async fn a_handler_that_keeps_the_permit_keeps_those_of_all_layers() {
    let semaphore = Semaphore::in_memory();
    let [tenant, route, all] = ["tenant", "route", "all"].map(|name| limited(&semaphore, name));
    let permit = kept(|taker| tenant.layer(route.layer(all.layer(taker)))).await;
    assert_eq!(in_use(&semaphore).await, [1, 1, 1]);
    let names: Vec<_> =
        std::iter::successors(Some(&permit), |permit| permit.outer()).map(Permit::name).collect();
    assert_eq!(names, ["all", "route", "tenant"]);
    let clone = permit.clone();
    drop(permit);
    assert_eq!(in_use(&semaphore).await, [1, 1, 1]);
    drop(clone);
    assert_eq!(in_use(&semaphore).await, [0, 0, 0]);

    let permit = kept(|taker| tenant.layer(route.layer(all.layer(taker)))).await;
    permit.release().await.unwrap();
    assert_eq!(in_use(&semaphore).await, [0, 0, 0]);
}

#[tokio::test]
async fn a_layer_that_counts_nothing_takes_no_real_permits_place() {
    let semaphore = Semaphore::in_memory();
    let tenant = limited(&semaphore, "tenant");
    let unlimited = ConcurrencyLimitLayer::builder(&semaphore, "route").limit(Limit::Unlimited);
    let unlimited = unlimited.build().unwrap();
    let permit = kept(|taker| tenant.layer(unlimited.layer(taker))).await;
    assert_eq!((permit.name(), permit.cost()), ("tenant", 1));
    assert_eq!(in_use(&semaphore).await, [1, 0, 0]);
    drop(permit);

    // In shadow, and none is free.
    let shadow = ConcurrencyLimitLayer::builder(&semaphore, "route").limit(0).shadow(true);
    let shadow = shadow.build().unwrap();
    let permit = kept(|taker| tenant.layer(shadow.layer(taker))).await;
    assert_eq!((permit.name(), permit.cost()), ("tenant", 1));
    let permit = kept(|taker| shadow.layer(tenant.layer(taker))).await;
    assert_eq!((permit.name(), permit.cost()), ("tenant", 1));
}

#[tokio::test]
async fn a_permit_is_lost_with_any_of_those_that_stand_behind_it() {
    let semaphore = Semaphore::in_memory();
    let [tenant, route] = ["tenant", "route"].map(|name| limited(&semaphore, name));
    let permit = kept(|taker| tenant.layer(route.layer(taker))).await;
    let mut lost = tokio_test::task::spawn(permit.lost());
    tokio_test::assert_pending!(lost.poll());
    let seen = semaphore.inspect("tenant").await.unwrap();
    let [holder] = &seen.holders[..] else { panic!("one holder") };
    assert!(semaphore.revoke("tenant", holder.id).await.unwrap());
    eventually("the loss is told", async || lost.is_woken()).await;
    tokio_test::assert_ready!(lost.poll());
    assert!(permit.is_lost());
    let mut polled = tokio_test::task::spawn(std::future::poll_fn(|cx| permit.poll_lost(cx)));
    tokio_test::assert_ready!(polled.poll());
}
