//! Permits that stay taken after their requests were broken off.

use std::convert::Infallible;
use std::future::pending;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt, Full, StreamBody};
use tokio::time::{Instant, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::{BoxError, HoldUntil};
use tower_semaphore::{ConcurrencyLimitLayer, Permit, Policy, Semaphore};

const NAME: &str = "quota";
const LINGER: Duration = Duration::from_millis(400);

fn layer(semaphore: &Semaphore) -> ConcurrencyLimitLayer {
    let builder = ConcurrencyLimitLayer::builder(semaphore, NAME).limit(1);
    builder.linger(LINGER).wait_timeout(Duration::from_secs(5)).build().unwrap()
}

async fn in_use(semaphore: &Semaphore) -> u64 {
    semaphore.inspect(NAME).await.unwrap().in_use
}

/// Returns how long it takes until the next request has a permit.
async fn until_free(semaphore: &Semaphore) -> Duration {
    let began = Instant::now();
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(30)).build().unwrap();
    let _ = semaphore.acquire(NAME, &policy).await.unwrap();
    began.elapsed()
}

/// Two frames, and then no end.
fn endless() -> StreamBody<impl futures_util::Stream<Item = Result<Frame<Bytes>, BoxError>>> {
    let frames = ["one", "two"].map(|text| Ok(Frame::data(Bytes::from(text))));
    let stream = futures_util::stream::iter(frames);
    StreamBody::new(futures_util::StreamExt::chain(stream, futures_util::stream::pending()))
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_before_the_response_leaves_its_permit_taken_for_a_while() {
    let semaphore = Semaphore::in_memory();
    let hangs = service_fn(|_: Request<()>| pending::<Result<Response<Full<Bytes>>, Infallible>>());
    let mut call = Box::pin(layer(&semaphore).layer(hangs).oneshot(Request::new(())));
    assert!(call.as_mut().now_or_never().is_none());
    drop(call);
    assert_eq!(in_use(&semaphore).await, 1);
    assert_eq!(until_free(&semaphore).await, LINGER);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_is_dropped_before_its_end_leaves_its_permit_taken_for_a_while() {
    for on_lost in [tower_semaphore::limit::OnLost::Abort, tower_semaphore::limit::OnLost::Continue]
    {
        let semaphore = Semaphore::in_memory();
        let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).linger(LINGER);
        let layer = builder.on_lost(on_lost).build().unwrap();
        let streams =
            service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(endless())) });
        let response = layer.layer(streams).oneshot(Request::new(())).await.unwrap();
        let mut body = response.into_body();
        body.frame().await.unwrap().unwrap();
        drop(body);
        assert_eq!(until_free(&semaphore).await, LINGER);
    }
}

#[tokio::test(start_paused = true)]
async fn a_body_that_fails_leaves_its_permit_taken_for_a_while() {
    for on_lost in [tower_semaphore::limit::OnLost::Abort, tower_semaphore::limit::OnLost::Continue]
    {
        let semaphore = Semaphore::in_memory();
        let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).linger(LINGER);
        let layer = builder.on_lost(on_lost).build().unwrap();
        let fails = service_fn(|_: Request<()>| async {
            let frames = [Ok(Frame::data(Bytes::from("one"))), Err(BoxError::from("reset"))];
            let body = StreamBody::new(futures_util::stream::iter(frames));
            Ok::<_, Infallible>(Response::new(body))
        });
        let response = layer.layer(fails).oneshot(Request::new(())).await.unwrap();
        response.into_body().collect().await.unwrap_err();
        assert_eq!(until_free(&semaphore).await, LINGER);
    }
}

#[tokio::test(start_paused = true)]
async fn a_service_that_fails_leaves_its_permit_taken_for_a_while() {
    let semaphore = Semaphore::in_memory();
    let fails = service_fn(|_: Request<()>| async {
        Err::<Response<Full<Bytes>>, _>(BoxError::from("timed out"))
    });
    layer(&semaphore).layer(fails).oneshot(Request::new(())).await.unwrap_err();
    assert_eq!(until_free(&semaphore).await, LINGER);
}

#[tokio::test(start_paused = true)]
async fn a_timeout_further_in_leaves_the_permit_taken_for_a_while() {
    let hangs =
        || service_fn(|_: Request<()>| pending::<Result<Response<Full<Bytes>>, Infallible>>());
    let second = Duration::from_secs(1);
    for status in [StatusCode::REQUEST_TIMEOUT, StatusCode::GATEWAY_TIMEOUT] {
        let semaphore = Semaphore::in_memory();
        let timeout = tower_http::timeout::TimeoutLayer::with_status_code(status, second);
        let service = layer(&semaphore).layer(timeout.layer(hangs()));
        let response = service.oneshot(Request::new(())).await.unwrap();
        assert_eq!(response.status(), status);
        drop(response);
        assert_eq!(until_free(&semaphore).await, LINGER, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn what_ends_well_gives_its_permit_back_at_once() {
    let semaphore = Semaphore::in_memory();
    let layer = layer(&semaphore);
    let full = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::from("served")))
    });
    let response = layer.layer(full).oneshot(Request::new(())).await.unwrap();
    response.into_body().collect().await.unwrap();
    assert_eq!(in_use(&semaphore).await, 0);

    // A server does not poll for the end of a body with a known length.
    let sized = service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(
            Response::builder().header("content-length", 6).body(endless()).unwrap(),
        )
    });
    let response = layer.layer(sized).oneshot(Request::new(())).await.unwrap();
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    body.frame().await.unwrap().unwrap();
    drop(body);
    assert_eq!(in_use(&semaphore).await, 0);

    // Nor does it poll the body at all in a response to HEAD, or with these statuses.
    for (method, status) in [(Method::HEAD, 200), (Method::GET, 204), (Method::GET, 304)] {
        let none = service_fn(move |_: Request<()>| async move {
            Ok::<_, Infallible>(Response::builder().status(status).body(endless()).unwrap())
        });
        let request = Request::builder().method(method).body(()).unwrap();
        drop(layer.layer(none).oneshot(request).await.unwrap());
        assert_eq!(in_use(&semaphore).await, 0, "{status}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_is_held_until_the_head_lingers_only_before_that() {
    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).linger(LINGER);
    let layer = builder.hold_until(HoldUntil::ResponseHead).build().unwrap();
    let streams =
        service_fn(|_: Request<()>| async { Ok::<_, Infallible>(Response::new(endless())) });
    drop(layer.layer(streams).oneshot(Request::new(())).await.unwrap());
    assert_eq!(in_use(&semaphore).await, 0);
    let hangs = service_fn(|_: Request<()>| pending::<Result<Response<Full<Bytes>>, Infallible>>());
    let mut call = Box::pin(layer.layer(hangs).oneshot(Request::new(())));
    assert!(call.as_mut().now_or_never().is_none());
    drop(call);
    assert_eq!(until_free(&semaphore).await, LINGER);
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_somebody_keeps_lingers_from_when_that_one_drops_it() {
    let semaphore = Semaphore::in_memory();
    let (sender, mut kept) = tokio::sync::mpsc::unbounded_channel();
    let hangs = service_fn(move |request: Request<()>| {
        sender.send(request.extensions().get::<Permit>().unwrap().clone()).unwrap();
        pending::<Result<Response<Full<Bytes>>, Infallible>>()
    });
    let mut call = Box::pin(layer(&semaphore).layer(hangs).oneshot(Request::new(())));
    assert!(call.as_mut().now_or_never().is_none());
    drop(call);
    let permit = kept.recv().await.unwrap();
    sleep(2 * LINGER).await;
    assert_eq!(in_use(&semaphore).await, 1);
    drop(permit);
    assert_eq!(until_free(&semaphore).await, LINGER);
}

/// A service that hands out its permit and answers at once.
async fn keeps(
    status: StatusCode,
    request: Request<()>,
    sender: tokio::sync::mpsc::UnboundedSender<Permit>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    sender.send(request.extensions().get::<Permit>().unwrap().clone()).unwrap();
    Ok(Response::builder().status(status).body(Full::default()).unwrap())
}

/// A handler's permit cannot know whether its socket broke or was closed.
#[tokio::test(start_paused = true)]
async fn a_permit_that_a_handler_keeps_past_an_upgrade_lingers_unless_it_is_released() {
    let upgrades = [
        (Method::GET, Version::HTTP_11, StatusCode::SWITCHING_PROTOCOLS),
        (Method::CONNECT, Version::HTTP_2, StatusCode::OK),
    ];
    for (method, version, status) in upgrades {
        for hold_until in [HoldUntil::BodyEnd, HoldUntil::ResponseHead] {
            let what = format!("{status} {hold_until:?}");
            let semaphore = Semaphore::in_memory();
            let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1).linger(LINGER);
            let layer = builder.hold_until(hold_until).build().unwrap();
            let (sender, mut kept) = tokio::sync::mpsc::unbounded_channel();
            let handler = service_fn(move |request| keeps(status, request, sender.clone()));
            let request = || {
                let request = Request::builder().method(&method).uri("example.org:443");
                request.version(version).body(()).unwrap()
            };
            drop(layer.layer(handler.clone()).oneshot(request()).await.unwrap());
            let permit = kept.recv().await.unwrap();
            sleep(2 * LINGER).await;
            assert_eq!(in_use(&semaphore).await, 1, "{what}");
            drop(permit);
            assert_eq!(until_free(&semaphore).await, LINGER, "{what}");

            drop(layer.layer(handler).oneshot(request()).await.unwrap());
            kept.recv().await.unwrap().release().await.unwrap();
            assert_eq!(in_use(&semaphore).await, 0, "{what}: its handler says that it is over");

            let nobody = service_fn(move |_: Request<()>| async move {
                let response = Response::builder().status(status);
                Ok::<_, Infallible>(response.body(Full::<Bytes>::default()).unwrap())
            });
            drop(layer.layer(nobody).oneshot(request()).await.unwrap());
            assert_eq!(in_use(&semaphore).await, 0, "{what}: nobody keeps it");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_a_background_task_keeps_is_free_at_the_end_of_that() {
    let semaphore = Semaphore::in_memory();
    let (sender, mut kept) = tokio::sync::mpsc::unbounded_channel();
    let handler = service_fn(move |request| keeps(StatusCode::ACCEPTED, request, sender.clone()));
    drop(layer(&semaphore).layer(handler).oneshot(Request::new(())).await.unwrap());
    let permit = kept.recv().await.unwrap();
    assert_eq!(in_use(&semaphore).await, 1);
    drop(permit);
    assert_eq!(in_use(&semaphore).await, 0);
}

#[tokio::test(start_paused = true)]
async fn a_permit_lingers_where_its_holder_says_so() {
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(1).linger(LINGER).build().unwrap();
    drop(semaphore.acquire(NAME, &policy).await.unwrap());
    assert_eq!(in_use(&semaphore).await, 0);
    let permit = semaphore.acquire(NAME, &policy).await.unwrap();
    permit.break_off();
    drop(permit);
    assert_eq!(until_free(&semaphore).await, LINGER);
    let permit = semaphore.acquire(NAME, &policy).await.unwrap();
    permit.break_off();
    permit.release().await.unwrap();
    assert_eq!(in_use(&semaphore).await, 0, "a release is one");
}

#[test]
fn a_linger_fits_into_half_a_lease() {
    let lease = Duration::from_secs(2);
    let build = |linger| Policy::builder(1).lease(lease).linger(linger).build();
    build(lease / 2).unwrap();
    let error = build(Duration::from_millis(1001)).unwrap_err();
    let said =
        "linger is 1.001s, more than half of the lease of 2s; expected 0 to 1s, or a longer lease";
    assert_eq!(error.to_string(), said);
    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1);
    builder.linger(Duration::from_secs(6)).build().unwrap_err();
}

#[cfg(all(feature = "axum", feature = "redis"))]
mod redis {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use axum::extract::ws::WebSocketUpgrade;
    use futures_util::{SinkExt, StreamExt};
    use tokio::net::TcpStream;
    use tokio_tungstenite::tungstenite::Message;

    use super::*;
    use crate::support::eventually;
    use crate::support::gateway::{Client, Gateway};
    use crate::support::http::Server;
    use crate::support::proxy::{Proxy, REQUESTS};
    use crate::support::redis::TestRedis;

    #[tokio::test]
    async fn what_lingers_stands_in_redis_and_is_handed_over_at_its_end() {
        let redis = TestRedis::start();
        let [one, other] = [redis.semaphore(), redis.semaphore()];
        let policy = Policy::builder(1).linger(LINGER).build().unwrap();
        let permit = one.acquire(NAME, &policy).await.unwrap();
        permit.break_off();
        let began = Instant::now();
        drop(permit);
        assert_eq!(in_use(&other).await, 1);
        let _ = other.acquire(NAME, &policy).await.unwrap();
        let waited = began.elapsed();
        assert!(waited >= LINGER, "{waited:?}");
        eventually("nothing is left", async || redis.keys() == 0).await;
    }

    /// An upstream that allows this number of calls at a time, and notices after a while that a client has left.
    struct Upstream {
        in_flight: AtomicUsize,
        most: AtomicUsize,
        calls: AtomicUsize,
    }

    const NOTICES_AFTER: Duration = Duration::from_millis(50);

    /// A call whose end the upstream has noticed, or will notice.
    struct Call(Arc<Upstream>);

    impl Upstream {
        fn call(self: &Arc<Self>) -> Call {
            self.calls.fetch_add(1, Ordering::SeqCst);
            let in_flight = self.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
            self.most.fetch_max(in_flight, Ordering::SeqCst);
            Call(Arc::clone(self))
        }
    }

    impl Call {
        fn ends_well(self) {
            self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
            std::mem::forget(self);
        }
    }

    impl Drop for Call {
        fn drop(&mut self) {
            let upstream = Arc::clone(&self.0);
            tokio::spawn(async move {
                sleep(NOTICES_AFTER).await;
                upstream.in_flight.fetch_sub(1, Ordering::SeqCst);
            });
        }
    }

    /// A stream of the upstream: ten frames, 2 ms apart.
    fn stream(call: Call) -> axum::body::Body {
        let frames =
            futures_util::stream::unfold((0, Some(call)), |(frame, mut call)| async move {
                if frame == 10 {
                    call.take().into_iter().for_each(Call::ends_well);
                    return None;
                }
                sleep(Duration::from_millis(2)).await;
                Some((Ok::<_, Infallible>("frame"), (frame + 1, call)))
            });
        axum::body::Body::from_stream(frames)
    }

    impl Upstream {
        fn new() -> Arc<Self> {
            Arc::new(Self { in_flight: 0.into(), most: 0.into(), calls: 0.into() })
        }

        fn router(self: &Arc<Self>) -> axum::Router {
            let upstream = Arc::clone(self);
            let handler = axum::routing::get(async move || stream(upstream.call()));
            axum::Router::new().route("/", handler)
        }

        /// The most calls that were in flight, while 30 clients made 400 calls through two processes and two of three
        /// left during the stream.
        async fn most_in_flight(&self, urls: [String; 2]) -> usize {
            let calls = AtomicUsize::new(0);
            let client = async |n: usize| {
                while calls.fetch_add(1, Ordering::SeqCst) < 400 {
                    let mut response = Client::new().open(&urls[n % 2]).await;
                    assert_eq!(response.status(), StatusCode::OK);
                    response.body_mut().frame().await.unwrap().unwrap();
                    if n.is_multiple_of(3) {
                        while response.body_mut().frame().await.is_some() {}
                    }
                    // Otherwise the connection is closed here.
                }
            };
            futures_util::future::join_all((0..30).map(client)).await;
            assert_eq!(self.calls.load(Ordering::SeqCst), 400);
            self.most.load(Ordering::SeqCst)
        }
    }

    async fn through_layers(linger: Duration) -> usize {
        let (redis, upstream) = (TestRedis::start(), Upstream::new());
        let mut servers = Vec::new();
        for semaphore in [redis.semaphore(), redis.semaphore()] {
            let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(10);
            let builder = builder.wait_timeout(Duration::from_secs(20)).linger(linger);
            servers.push(Server::start(upstream.router().layer(builder.build().unwrap())).await);
        }
        upstream.most_in_flight([servers[0].url("/"), servers[1].url("/")]).await
    }

    async fn through_gateways(linger: &str) -> usize {
        let (redis, upstream) = (TestRedis::start(), Upstream::new());
        let server = Server::start(upstream.router()).await;
        let url = redis.url();
        let gateway = || {
            let args = ["--redis", &url, "--limit", "10", "--wait", "20s", "--linger", linger];
            Gateway::start(server.url("").trim_end_matches('/'), &args)
        };
        let gateways = [gateway(), gateway()];
        let urls = gateways.each_ref().map(|gateway| format!("{}/", gateway.url()));
        upstream.most_in_flight(urls).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_quota_of_somebody_elses_is_not_passed_when_clients_leave() {
        assert_eq!(through_layers(Duration::from_millis(100)).await, 10);
        // That is what the linger is for.
        let most = through_layers(Duration::ZERO).await;
        assert!(most > 10, "{most}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nor_is_it_through_gateways() {
        assert_eq!(through_gateways("100ms").await, 10);
        let most = through_gateways("0s").await;
        assert!(most > 10, "{most}");
    }

    impl Upstream {
        /// The WebSocket of the docs, which talks with the upstream while it is open.
        fn sockets(self: &Arc<Self>) -> axum::Router {
            let upstream = Arc::clone(self);
            let open = async move |upgrade: WebSocketUpgrade, permit: Permit| {
                upgrade.on_upgrade(async move |mut socket| {
                    let _call = upstream.call();
                    let echo = async {
                        while let Some(Ok(message)) = socket.recv().await {
                            let _ = socket.send(message).await;
                        }
                    };
                    tokio::select! {
                        () = echo => {}
                        () = permit.lost() => {}
                    }
                })
            };
            axum::Router::new().route("/", axum::routing::any(open))
        }
    }

    /// The most sockets of the upstream, while 30 clients opened 200 and vanished.
    async fn most_sockets(start: impl AsyncFn(axum::Router) -> Server, linger: Duration) -> usize {
        let (redis, upstream) = (TestRedis::start(), Upstream::new());
        let mut servers = Vec::new();
        for semaphore in [redis.semaphore(), redis.semaphore()] {
            let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(10);
            let builder = builder.wait_timeout(Duration::from_secs(20)).linger(linger);
            servers.push(start(upstream.sockets().layer(builder.build().unwrap())).await);
        }
        let opened = AtomicUsize::new(0);
        let client = async |n: usize| {
            while opened.fetch_add(1, Ordering::SeqCst) < 200 {
                let address = servers[n % 2].address;
                let socket = TcpStream::connect(address).await.unwrap();
                let url = format!("ws://{address}/");
                let (mut socket, _) = tokio_tungstenite::client_async(url, socket).await.unwrap();
                socket.send(Message::text("hello")).await.unwrap();
                socket.next().await.unwrap().unwrap();
                // The connection vanishes here.
            }
        };
        futures_util::future::join_all((0..30).map(client)).await;
        assert_eq!(upstream.calls.load(Ordering::SeqCst), 200);
        upstream.most.load(Ordering::SeqCst)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn nor_is_it_by_the_websocket_of_the_docs_when_clients_vanish() {
        let linger = Duration::from_millis(100);
        assert_eq!(
            most_sockets(Server::start_holding, linger).await,
            10,
            "its connection holds it"
        );
        assert_eq!(most_sockets(Server::start, linger).await, 10, "its handler holds it");
        let most = most_sockets(Server::start, Duration::ZERO).await;
        assert!(most > 10, "{most}");
    }

    /// It breaks off its call when it learns of the loss, and the other side notices later.
    #[tokio::test]
    async fn a_permit_that_is_lost_lingers_before_another_process_has_it() {
        let redis = TestRedis::start();
        let proxy = Proxy::start(redis.port()).await;
        let (cut_off, other) = (Semaphore::redis(&proxy.url()).unwrap(), redis.semaphore());
        let builder = Policy::builder(1).linger(LINGER).lease(Duration::from_millis(1000));
        let policy = builder.wait_timeout(Duration::from_secs(10)).build().unwrap();
        let permit = cut_off.acquire(NAME, &policy).await.unwrap();
        let waits = tokio::spawn({
            let other = other.clone();
            async move { (other.acquire(NAME, &policy).await, Instant::now()) }
        });
        eventually("it waits", async || other.inspect(NAME).await.unwrap().waiting == 1).await;
        // So are later connections.
        let stalled = async {
            loop {
                proxy.hold(REQUESTS);
                sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::select! {
            () = permit.lost() => {}
            () = stalled => {}
        }
        let lost = Instant::now();
        assert!(permit.is_lost());
        drop(permit);
        let (granted, at) = waits.await.unwrap();
        let _ = granted.unwrap();
        // The clocks of a lease may differ by a millisecond at each end.
        let lingered = at - lost + Duration::from_millis(5);
        assert!(lingered >= LINGER, "{lingered:?}");
    }

    #[tokio::test]
    async fn a_process_that_shuts_down_leaves_what_lingers_to_its_lease() {
        let redis = TestRedis::start();
        let [one, other] = [redis.semaphore(), redis.semaphore()];
        let lease = Duration::from_millis(1000);
        let builder = Policy::builder(1).linger(LINGER).lease(lease);
        let policy = builder.wait_timeout(Duration::from_secs(5)).build().unwrap();
        let permit = one.acquire(NAME, &policy).await.unwrap();
        let waits = tokio::spawn({
            let other = other.clone();
            async move { other.acquire(NAME, &policy).await }
        });
        eventually("it waits", async || other.inspect(NAME).await.unwrap().waiting == 1).await;
        permit.break_off();
        let began = Instant::now();
        drop(permit);
        one.shutdown().await;
        let _ = waits.await.unwrap().unwrap();
        let waited = began.elapsed();
        assert!(waited >= LINGER, "{waited:?}");
    }
}
