//! An Axum app in which each tenant may have two requests in flight, streams included.
//!
//! ```sh
//! cargo run --example quickstart
//! ```
//!
//! Permits are counted in this process. Set `REDIS_URL` to share them between replicas:
//!
//! ```sh
//! REDIS_URL=redis://127.0.0.1/ cargo run --example quickstart -- 127.0.0.1:3000
//! REDIS_URL=redis://127.0.0.1/ cargo run --example quickstart -- 127.0.0.1:3001
//! ```

#![allow(clippy::print_stdout, reason = "says what to try")]

#[path = "shared/signals.rs"]
mod signals;

use std::convert::Infallible;
use std::env;
use std::time::Duration;

use axum::response::sse::{Event, Sse};
use axum::routing::get;
use axum::{Extension, Router};
use futures_util::stream::{self, Stream};
use tokio::net::TcpListener;
use tokio::time::sleep;
use tower_semaphore::limit::HeaderKey;
use tower_semaphore::{ConcurrencyLimitLayer, Permit, Semaphore};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Shows the warnings of the semaphore: Redis is away, permits were lost.
    tracing_subscriber::fmt().init();

    let semaphore = match env::var("REDIS_URL") {
        Ok(url) => Semaphore::redis(&url)?,
        Err(_) => Semaphore::in_memory(),
    };
    let two_per_tenant = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
        .key(HeaderKey::from_static("x-tenant"))
        .limit(2)
        .wait_timeout(Duration::from_millis(1500))
        .build()?;

    let app =
        Router::new().route("/slow", get(slow)).route("/stream", get(stream)).layer(two_per_tenant);

    let address = env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(address).await?;
    invite(&format!("http://{}", listener.local_addr()?));

    axum::serve(listener, app).with_graceful_shutdown(signals::stopped()).await?;
    semaphore.shutdown().await;
    Ok(())
}

/// A second of work, or of waiting for a third-party API.
async fn slow(Extension(permit): Extension<Permit>) -> String {
    sleep(Duration::from_secs(1)).await;
    format!("done; waited {} ms for a permit", permit.waited().as_millis())
}

/// Holds the permit until the last event is sent, or the client leaves.
async fn stream() -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    Sse::new(stream::unfold(1, |n| async move {
        sleep(Duration::from_millis(500)).await;
        (n <= 6).then(|| (Ok(Event::default().data(format!("token {n}"))), n + 1))
    }))
}

fn invite(url: &str) {
    println!(
        r#"listening on {url}; try:

# Five at once: two pass, two wait a second for them, one gets a 429.
for i in 1 2 3 4 5; do curl -s -w ' %{{http_code}}\n' -H 'x-tenant: acme' {url}/slow & done; wait

# Two streams hold both permits until they end. Another tenant has its own permits.
for i in 1 2; do curl -sN -H 'x-tenant: acme' {url}/stream & done; sleep 0.2
curl -s -w ' %{{http_code}}\n' -H 'x-tenant: acme' {url}/slow
curl -s -w ' %{{http_code}}\n' -H 'x-tenant: other' {url}/slow
"#
    );
}
