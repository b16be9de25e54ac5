//! A reqwest client that respects the quota of an API, with errors for refusals.
//!
//! ```sh
//! cargo run -p example-client
//! ```
//!
//! The API is a small server that this program starts; it counts the requests in flight. With `Semaphore::redis(url)` in
//! place of `in_memory()`, all processes share the quota.

#![allow(clippy::print_stdout, reason = "says what it saw")]

mod adapter;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::routing::get;
use reqwest::Method;
use tokio::net::TcpListener;
use tokio::time::sleep;
use tower::ServiceExt;
use tower_semaphore::limit::{BoxError, Refusal};
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};

use self::adapter::limited;

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let api = Arc::new(Api::default());
    let url = serve(Arc::clone(&api)).await?;
    let semaphore = Semaphore::in_memory();
    let quota = ConcurrencyLimitLayer::builder(&semaphore, "third-party")
        .limit(2)
        .wait_timeout(Duration::from_millis(600))
        // The API notices a broken connection later than this client does.
        .linger(Duration::from_millis(200))
        .build()?;
    let client = limited(reqwest::Client::new(), quota);

    let calls = (0..5).map(|n| {
        let request = reqwest::Request::new(Method::GET, format!("{url}/{n}").parse().unwrap());
        let client = client.clone();
        tokio::spawn(async move {
            let response = client.oneshot(request).await?;
            // The permit is released here; a body that is not read keeps it.
            Ok::<_, BoxError>(response.text().await?)
        })
    });
    let (mut answers, mut refusals) = (0, 0);
    for call in calls.collect::<Vec<_>>() {
        match call.await? {
            Ok(answer) => {
                answers += 1;
                println!("{answer}");
            }
            Err(error) => {
                // Other errors are those of the client.
                let refusal = error.downcast::<Refusal>()?;
                refusals += 1;
                println!("{refusal}; try again in {:?}", refusal.retry_after);
            }
        }
    }
    // Two are sent at once, two after them; the fifth times out in the queue.
    assert_eq!((answers, refusals), (4, 1));
    let peak = api.peak.load(SeqCst);
    println!("the API never had more than {peak} requests in flight");
    assert_eq!(peak, 2);
    semaphore.shutdown().await;
    Ok(())
}

/// The third-party API, with the load that it sees.
#[derive(Debug, Default)]
struct Api {
    in_flight: AtomicUsize,
    peak: AtomicUsize,
}

async fn serve(api: Arc<Api>) -> std::io::Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let app = Router::new().route("/{n}", get(answer)).with_state(api);
    tokio::spawn(async { axum::serve(listener, app).await });
    Ok(format!("http://{address}"))
}

/// Takes 400 ms.
async fn answer(State(api): State<Arc<Api>>, Path(n): Path<u8>) -> String {
    let now = api.in_flight.fetch_add(1, SeqCst) + 1;
    api.peak.fetch_max(now, SeqCst);
    sleep(Duration::from_millis(400)).await;
    api.in_flight.fetch_sub(1, SeqCst);
    format!("answer {n}")
}
