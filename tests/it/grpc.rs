//! The layer on a tonic server and on a tonic channel.

use std::time::Duration;

use futures_util::stream;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tonic::Code;
use tower::Layer;
use tower_semaphore::backend::MemoryBackend;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, HeaderKey, MissingKey, OnLost, Refusal};
use tower_semaphore::{ConcurrencyLimitLayer, Permit, Policy, Semaphore};

use crate::support::eventually;
use crate::support::grpc::{Client, GrpcServer, NEVER, UNARY};
use crate::support::redis::TestRedis;
use crate::support::semaphore::{empty, in_use};

const NAME: &str = "api";
const LONG: Duration = Duration::from_secs(20);

/// Limit 1, and no request may wait, unless set.
fn builder(semaphore: &Semaphore) -> ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, NAME).limit(1).wait_timeout(Duration::ZERO)
}

/// A server whose only permit is in use.
async fn full(
    set: impl FnOnce(ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder,
) -> (GrpcServer, Permit) {
    let semaphore = Semaphore::in_memory();
    let permit = semaphore.acquire(NAME, &Policy::new(1)).await.unwrap();
    (GrpcServer::start(set(builder(&semaphore)).build().unwrap()).await, permit)
}

/// One request over HTTP/2, as it is on the wire.
async fn raw(server: &GrpcServer, content_type: &str) -> Response<Incoming> {
    let io = TokioIo::new(TcpStream::connect(server.address).await.unwrap());
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(async move { drop(connection.await) });
    let request = Request::post(format!("http://{}{UNARY}", server.address))
        .header("content-type", content_type)
        .header("te", "trailers")
        .body(Full::<bytes::Bytes>::default())
        .unwrap();
    sender.send_request(request).await.unwrap()
}

fn texts(sent: mpsc::UnboundedReceiver<&'static str>) -> impl stream::Stream<Item = String> {
    stream::unfold(sent, async |mut sent| sent.recv().await.map(|text| (text.to_owned(), sent)))
}

// ===== refusals =====

#[tokio::test]
async fn a_refusal_is_a_status_in_headers_alone() {
    let (server, permit) = full(|layer| layer).await;
    let response = raw(&server, "application/grpc").await;
    assert_eq!(response.status(), StatusCode::OK);
    let headers: HeaderMap = response.headers().clone();
    assert_eq!(headers["content-type"], "application/grpc");
    assert_eq!(headers["grpc-status"], "8");
    assert_eq!(headers["grpc-message"], "limit: all permits are in use");
    let pushback: u32 = headers["grpc-retry-pushback-ms"].to_str().unwrap().parse().unwrap();
    assert!([1000, 2000].contains(&pushback), "{pushback}");
    for other in ["retry-after", "ratelimit", "ratelimit-policy"] {
        assert!(!headers.contains_key(other), "{other}");
    }
    let body = response.into_body().collect().await.unwrap();
    assert!(body.trailers().is_none());
    assert!(body.to_bytes().is_empty());

    // tonic reads it so, too.
    let mut client = server.client().await;
    let status = client.unary("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.message(), "limit: all permits are in use");
    assert!(status.metadata().contains_key("grpc-retry-pushback-ms"));
    let status = client.bidi(stream::pending()).await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);

    drop(permit);
    assert_eq!(client.unary("hello").await.unwrap(), "hello");
}

#[tokio::test]
async fn whoever_waits_in_vain_is_told_that() {
    let (server, _permit) = full(|layer| layer.wait_timeout(Duration::from_millis(20))).await;
    let status = server.client().await.unary("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.message(), "queue_timeout: no permit came free in time");
}

#[tokio::test]
async fn whoever_waits_in_vain_for_the_rate_is_told_that() {
    let semaphore = Semaphore::in_memory();
    let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(5);
    let builder = builder.rate(1, Duration::from_secs(60)).wait_timeout(Duration::from_millis(20));
    let server = GrpcServer::start(builder.build().unwrap()).await;
    let mut client = server.client().await;
    assert_eq!(client.unary("hello").await.unwrap(), "hello");
    let status = client.unary("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.message(), "queue_timeout: the rate allowed no start in time");
}

#[tokio::test]
async fn a_pool_that_all_share_is_unavailable() {
    let (server, _permit) = full(|layer| layer.full_status(StatusCode::SERVICE_UNAVAILABLE)).await;
    let status = server.client().await.unary("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
}

#[tokio::test]
async fn while_redis_is_away_calls_are_unavailable_and_then_served_again() {
    let mut redis = TestRedis::start();
    let server = GrpcServer::start(builder(&redis.semaphore()).build().unwrap()).await;
    let mut client = server.client().await;
    assert_eq!(client.unary("hello").await.unwrap(), "hello");
    redis.kill();
    let status = client.unary("hello").await.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert!(status.message().starts_with("unavailable"), "{status:?}");
    assert!(status.metadata().contains_key("grpc-retry-pushback-ms"));
    redis.restart();
    eventually("it serves again", async || client.clone().unary("hello").await.is_ok()).await;
}

#[tokio::test]
async fn a_call_without_a_key_is_told_so() {
    let keyed = |missing| {
        let layer = builder(&Semaphore::in_memory()).key(HeaderKey::from_static("x-tenant"));
        layer.on_missing_key(missing).build().unwrap()
    };
    for (status, code) in [
        (400, Code::InvalidArgument),
        (401, Code::Unauthenticated),
        (403, Code::PermissionDenied),
        (500, Code::Internal),
        (503, Code::Unavailable),
    ] {
        let missing = MissingKey::Reject(StatusCode::from_u16(status).unwrap());
        let server = GrpcServer::start(keyed(missing)).await;
        let error = server.client().await.unary("hello").await.unwrap_err();
        assert_eq!(error.code(), code);
        assert!(!error.metadata().contains_key("grpc-retry-pushback-ms"));
    }
}

#[tokio::test]
async fn only_grpc_is_answered_as_grpc() {
    let (server, _permit) = full(|layer| layer).await;
    for (asked, answered) in [
        ("application/grpc", "application/grpc"),
        ("application/grpc+proto", "application/grpc"),
        ("application/grpc; charset=utf-8", "application/grpc"),
        ("Application/GRPC+json", "application/grpc"),
        ("application/grpc-web+proto", "application/grpc-web+proto"),
        ("application/grpc-web-text", "application/grpc-web-text"),
    ] {
        let response = raw(&server, asked).await;
        assert_eq!(response.status(), StatusCode::OK, "{asked}");
        assert_eq!(response.headers()["content-type"], answered, "{asked}");
        assert_eq!(response.headers()["grpc-status"], "8", "{asked}");
    }
    for asked in ["application/json", "application/grpcish", "application/grp", "text/plain", ""] {
        let response = raw(&server, asked).await;
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS, "{asked}");
        assert_eq!(response.headers()["content-type"], "application/problem+json", "{asked}");
        assert!(!response.headers().contains_key("grpc-status"), "{asked}");
    }
}

#[tokio::test]
async fn grpc_can_be_answered_as_http_if_so_set() {
    let (server, _permit) = full(|layer| layer.grpc_status(false)).await;
    let response = raw(&server, "application/grpc").await;
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    assert!(!response.headers().contains_key("grpc-status"));
}

#[tokio::test]
async fn a_response_of_the_users_own_is_for_http_alone() {
    let own = |_: &Refusal| {
        Response::builder().status(418).body(Full::<bytes::Bytes>::default()).unwrap()
    };
    let (server, _permit) = full(|layer| layer.refusal(own)).await;
    assert_eq!(raw(&server, "text/plain").await.status(), 418);
    assert_eq!(raw(&server, "application/grpc").await.headers()["grpc-status"], "8");

    let (server, _permit) = full(|layer| layer.refusal(own).grpc_status(false)).await;
    assert_eq!(raw(&server, "application/grpc").await.status(), 418);
}

// ===== how long a permit is held =====

#[tokio::test]
async fn a_streaming_call_holds_its_permit_to_the_trailers() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let server = GrpcServer::start(builder(&semaphore).build().unwrap()).await;
    let (say, said) = mpsc::unbounded_channel();
    let mut client = server.client().await;
    let mut heard = client.bidi(texts(said)).await.unwrap();
    for _ in 0..3 {
        say.send("hello").unwrap();
        assert_eq!(heard.message().await.unwrap().unwrap(), "hello");
        let refused = server.client().await.unary("other").await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
    }
    drop(say);
    // Right after the trailers, the permit is free.
    assert_eq!(heard.message().await.unwrap(), None);
    assert_eq!(client.unary("next").await.unwrap(), "next");
    eventually("nothing is stored", async || backend.is_empty()).await;
}

#[tokio::test]
async fn whoever_has_read_the_trailers_is_never_refused_the_next_call() {
    let redis = TestRedis::start();
    let server = GrpcServer::start(builder(&redis.semaphore()).build().unwrap()).await;
    let mut client = server.client().await;
    for round in 0..50 {
        assert_eq!(client.unary("hello").await.unwrap(), "hello", "round {round}");
        let mut heard = client.bidi(stream::iter(["a".to_owned()])).await.unwrap();
        assert_eq!(heard.message().await.unwrap().unwrap(), "a", "round {round}");
        assert_eq!(heard.message().await.unwrap(), None);
    }
    empty(&redis).await;
}

#[tokio::test]
async fn a_client_that_drops_its_stream_frees_the_permit() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let server = GrpcServer::start(builder(&semaphore).build().unwrap()).await;
    let mut client = server.client().await;
    let mut heard = client.watch("hello").await.unwrap();
    assert_eq!(heard.message().await.unwrap().unwrap(), "hello");
    in_use(&semaphore, NAME, 1).await;
    drop(heard);
    eventually("nothing is stored", async || backend.is_empty()).await;
    assert_eq!(client.unary("next").await.unwrap(), "next");
}

/// Starts a stream on a Redis, and then stops Redis for longer than the lease.
async fn lose_a_lease(on_lost: OnLost) -> (TestRedis, Result<Option<String>, tonic::Status>) {
    let redis = TestRedis::start();
    let layer = builder(&redis.semaphore()).lease(Policy::MIN_LEASE).on_lost(on_lost);
    let server = GrpcServer::start(layer.build().unwrap()).await;
    let (say, said) = mpsc::unbounded_channel();
    let mut heard = server.client().await.bidi(texts(said)).await.unwrap();
    say.send("before").unwrap();
    assert_eq!(heard.message().await.unwrap().unwrap(), "before");
    redis.signal("STOP");
    let mut last = timeout(2 * Policy::MIN_LEASE, heard.message()).await;
    if last.is_err() {
        // It is not cut off: it still sends.
        say.send("after").unwrap();
        last = timeout(LONG, heard.message()).await;
    }
    redis.signal("CONT");
    (redis, last.expect("an end or a message"))
}

#[tokio::test]
async fn a_stream_whose_permit_is_lost_ends_with_a_status() {
    let (redis, last) = lose_a_lease(OnLost::Abort).await;
    let status = last.unwrap_err();
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "the lease of the request's permit was lost");
    empty(&redis).await;
}

#[tokio::test]
async fn a_call_whose_permit_is_lost_before_its_answer_ends_with_a_status() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let layer = builder(&semaphore).lease(Policy::MIN_LEASE).build().unwrap();
    let server = GrpcServer::start(layer).await;
    let mut client = server.client().await;
    let call = tokio::spawn(async move { client.unary(NEVER).await });
    in_use(&redis.semaphore(), NAME, 1).await;
    redis.signal("STOP");
    let status = timeout(LONG, call).await.expect("an answer").unwrap().unwrap_err();
    redis.signal("CONT");
    assert_eq!(status.code(), Code::Unavailable);
    assert_eq!(status.message(), "lease_lost: the lease of the request's permit was lost");
    empty(&redis).await;
}

#[tokio::test]
async fn a_stream_whose_permit_is_lost_goes_on_if_so_set() {
    let (redis, last) = lose_a_lease(OnLost::Continue).await;
    assert_eq!(last.unwrap().unwrap(), "after");
    empty(&redis).await;
}

// ===== on the client =====

#[tokio::test]
async fn a_channel_can_be_limited_too() {
    // The server has no limit; the client keeps to one.
    let free = ConcurrencyLimitLayer::builder(&Semaphore::in_memory(), "free");
    let server = GrpcServer::start(free.limit(100).build().unwrap()).await;
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let layer = builder(&semaphore).build().unwrap();
    let mut client = Client::new(layer.layer(server.channel().await));

    let (say, said) = mpsc::unbounded_channel();
    let mut heard = client.bidi(texts(said)).await.unwrap();
    say.send("hello").unwrap();
    assert_eq!(heard.message().await.unwrap().unwrap(), "hello");
    let status = client.clone().unary("second").await.unwrap_err();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert_eq!(status.message(), "limit: all permits are in use");
    drop(say);
    assert_eq!(heard.message().await.unwrap(), None);
    assert_eq!(client.unary("third").await.unwrap(), "third");
    drop(heard);
    eventually("nothing is stored", async || backend.is_empty()).await;
}
