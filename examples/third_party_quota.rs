//! The layer on a client: thirty tasks call an API that allows three requests at a time.
//!
//! ```sh
//! cargo run --example third_party_quota
//! ```
//!
//! The API is a small server that this program starts; it counts the requests in flight. With `Semaphore::redis(url)`
//! in place of `in_memory()`, all processes share the quota.

#![allow(clippy::print_stdout, reason = "says what it saw")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::routing::get;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tower::{Layer, ServiceExt};
use tower_semaphore::limit::BoxError;
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};

const QUOTA: u32 = 3;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let api = Arc::new(Api::default());
    let address = serve(Arc::clone(&api)).await?;

    let semaphore = Semaphore::in_memory();
    let quota = ConcurrencyLimitLayer::builder(&semaphore, "third-party")
        .limit(QUOTA)
        .wait_timeout(Duration::from_secs(30))
        // The API notices a broken connection later than this client does.
        .linger(Duration::from_millis(200))
        .build()?;
    let client = quota.layer(Client::builder(TokioExecutor::new()).build_http());

    let mut calls = JoinSet::new();
    for n in 0..30 {
        let client = client.clone();
        calls.spawn(async move {
            let request = Request::get(format!("http://{address}/{n}")).body(Empty::<Bytes>::new());
            // Without a permit in time, this is a 429.
            let response = client.oneshot(request?).await?;
            let status = response.status();
            // The permit is released here; a body that is not read keeps it.
            response.into_body().collect().await?;
            Ok::<_, BoxError>(status)
        });
    }
    let mut answered = 0;
    while let Some(status) = calls.join_next().await {
        answered += usize::from(status?? == StatusCode::OK);
    }
    let peak = api.peak.load(SeqCst);
    println!("{answered} requests answered; the API never saw more than {peak} at a time");
    assert_eq!((answered, peak), (30, 3));

    semaphore.shutdown().await;
    Ok(())
}

/// The third-party API, with the load that it sees.
#[derive(Debug, Default)]
struct Api {
    in_flight: AtomicUsize,
    peak: AtomicUsize,
}

async fn serve(api: Arc<Api>) -> std::io::Result<SocketAddr> {
    let app = Router::new().route("/{n}", get(answer)).with_state(api);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async { axum::serve(listener, app).await });
    Ok(address)
}

async fn answer(State(api): State<Arc<Api>>) -> &'static str {
    let now = api.in_flight.fetch_add(1, SeqCst) + 1;
    api.peak.fetch_max(now, SeqCst);
    tokio::time::sleep(Duration::from_millis(50)).await;
    api.in_flight.fetch_sub(1, SeqCst);
    "a costly answer"
}
