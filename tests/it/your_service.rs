//! The tests of docs/testing.md, which `manual.rs` compares with that page.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::{Request, Response, StatusCode};
use tokio::time::{Instant, sleep};
use tower::ServiceExt;
use tower_semaphore::backend::{AfterLoss, MemoryBackend, MemoryServer};
use tower_semaphore::{
    ConcurrencyLimitLayer, ConfigError, ConnectionState, OnUnavailable, Policy, Semaphore,
};

/// The service under test. `main` passes `Semaphore::redis(url)`.
fn app(semaphore: &Semaphore) -> Result<Router, ConfigError> {
    let quota = ConcurrencyLimitLayer::builder(semaphore, "openai")
        .limit(2)
        .wait_timeout(Duration::from_secs(20))
        .on_unavailable(OnUnavailable::Local(1))
        .build()?;
    Ok(Router::new().route("/chat", get(async || "hello")).layer(quota))
}

/// The response has its permit until its body is read to the end or dropped.
async fn chat(app: &Router) -> Response<Body> {
    let request = Request::get("/chat").body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_request_beyond_the_quota_waits_and_is_then_rejected() {
    let app = app(&Semaphore::in_memory()).unwrap();
    let (first, _second) = (chat(&app).await, chat(&app).await);

    let began = Instant::now();
    assert_eq!(chat(&app).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(began.elapsed().as_secs(), 20); // of the paused clock

    drop(first); // as a client that leaves
    assert_eq!(chat(&app).await.status(), StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn what_others_hold_counts() {
    let semaphore = Semaphore::in_memory();
    let app = app(&semaphore).unwrap();
    let permit = semaphore.acquire("openai", &Policy::new(2)).await.unwrap();
    let stream = chat(&app).await;
    assert_eq!(semaphore.inspect("openai").await.unwrap().in_use, 2);

    drop((permit, stream));
    assert_eq!(semaphore.inspect("openai").await.unwrap().in_use, 0);
}

#[tokio::test(start_paused = true)]
async fn replicas_share_the_quota() {
    let backend = MemoryBackend::new();
    let replicas: Vec<_> = (0..3).map(|_| app(&Semaphore::new(backend.clone())).unwrap()).collect();
    let held = (chat(&replicas[0]).await, chat(&replicas[1]).await);

    let third = tokio::spawn({
        let replica = replicas[2].clone();
        async move { chat(&replica).await.status() }
    });
    sleep(Duration::from_secs(10)).await;
    assert!(!third.is_finished(), "it waits for a permit of another replica");
    drop(held.0);
    assert_eq!(third.await.unwrap(), StatusCode::OK);

    drop(held.1);
    assert!(backend.is_empty(), "a permit was not given back");
}

/// Waits until a process has noticed that the server is available, or that it is not.
async fn until_up(semaphore: &Semaphore, up: bool) {
    while matches!(semaphore.health().connection, ConnectionState::Up) != up {
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_outage_leaves_each_replica_its_share() {
    let server = MemoryServer::new();
    let semaphore = Semaphore::new(server.clone());
    let app = app(&semaphore).unwrap();
    assert_eq!(chat(&app).await.status(), StatusCode::OK);

    server.set_available(false);
    until_up(&semaphore, false).await;
    let held = chat(&app).await;
    assert_eq!(held.status(), StatusCode::OK);
    assert_eq!(chat(&app).await.status(), StatusCode::TOO_MANY_REQUESTS, "the share is 1");

    server.set_available(true);
    until_up(&semaphore, true).await;
    let _second = chat(&app).await;
    assert_eq!(semaphore.inspect("openai").await.unwrap().in_use, 2, "`held` is counted again");
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_cut_off_when_an_outage_outlasts_its_lease() {
    let server = MemoryServer::new();
    let semaphore = Semaphore::new(server.clone());
    let app = app(&semaphore).unwrap();
    let stream = chat(&app).await;

    server.set_available(false);
    sleep(Duration::from_secs(11)).await; // the lease is 10 s
    assert!(axum::body::to_bytes(stream.into_body(), 100).await.is_err());
    assert_eq!(semaphore.health().lost, 1);
}

#[tokio::test(start_paused = true)]
async fn what_is_in_flight_is_counted_again_after_a_loss_of_data() {
    let backend = MemoryBackend::new();
    let semaphore = Semaphore::new(backend.clone());
    let app = app(&semaphore).unwrap();
    let held = (chat(&app).await, chat(&app).await);

    backend.forget_all();
    assert_eq!(semaphore.inspect("openai").await.unwrap().in_use, 0);
    sleep(Duration::from_secs(4)).await; // leases are renewed each third of one
    assert_eq!(semaphore.inspect("openai").await.unwrap().in_use, 2);
    drop(held);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_granted_in_the_quarantine_after_a_loss_of_data() {
    let server = MemoryServer::new().after_loss(AfterLoss::Quarantine);
    sleep(Duration::from_secs(10)).await; // a young server counts as one that lost its data
    let semaphore = Semaphore::new(server.clone());
    let app = app(&semaphore).unwrap();
    assert_eq!(chat(&app).await.status(), StatusCode::OK);

    server.set_available(false);
    server.forget_all();
    until_up(&semaphore, false).await;
    server.set_available(true);
    until_up(&semaphore, true).await;
    let began = Instant::now();
    assert_eq!(chat(&app).await.status(), StatusCode::OK);
    assert!(began.elapsed() > Duration::from_secs(9), "one lease");
}
