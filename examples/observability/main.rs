//! An Axum app with observability: metrics for Prometheus, spans and events in the log.
//!
//! ```sh
//! cargo run -p example-observability
//! ```
//!
//! This directory also has a Grafana dashboard and alert rules for Prometheus. Set `REDIS_URL` to share permits
//! between all processes that use the same Redis.

#![allow(clippy::print_stdout, reason = "says what to try")]

#[path = "../../gateway/src/prometheus.rs"]
mod prometheus;
#[path = "../shared/signals.rs"]
mod signals;

use std::env;
use std::time::Duration;

use axum::Router;
use axum::extract::Query;
use axum::routing::get;
use serde::Deserialize;
use tokio::net::TcpListener;
use tokio::time::sleep;
use tower_semaphore::limit::{HeaderKey, KeyLabels};
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
use tracing_subscriber::EnvFilter;

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    // Logs only changes of state; RUST_LOG=tower_semaphore=debug logs every request.
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).init();
    let prometheus = prometheus::install()?;

    let semaphore = match env::var("REDIS_URL") {
        Ok(url) => Semaphore::redis(&url)?,
        Err(_) => Semaphore::in_memory(),
    };
    let per_tenant = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
        .key(HeaderKey::from_static("x-tenant"))
        .limit(2)
        .wait_timeout(Duration::from_millis(1500))
        // Clients choose the header, so only these values get their own series.
        .key_labels(KeyLabels::listed(["acme", "globex"]))
        .build()?;

    let app = Router::new()
        .route("/work", get(work))
        .layer(per_tenant)
        // Outside the layer, so that the limit does not apply to it.
        .route("/metrics", get(async move || prometheus.render()));

    let address = env::args().nth(1).unwrap_or_else(|| "127.0.0.1:3000".to_owned());
    let listener = TcpListener::bind(address).await?;
    invite(&format!("http://{}", listener.local_addr()?));

    axum::serve(listener, app).with_graceful_shutdown(signals::stopped()).await?;
    semaphore.shutdown().await;
    Ok(())
}

#[derive(Deserialize)]
struct Work {
    #[serde(default = "half_a_second")]
    ms: u64,
}

const fn half_a_second() -> u64 {
    500
}

async fn work(Query(work): Query<Work>) -> &'static str {
    sleep(Duration::from_millis(work.ms.min(60_000))).await;
    "done\n"
}

fn invite(url: &str) {
    println!(
        r#"listening on {url}; try:

# Ten at once for a tenant that may have two: some wait, some are rejected.
for i in $(seq 10); do curl -s -o /dev/null -w '%{{http_code}}\n' -H 'x-tenant: acme' {url}/work & done; wait

# The metrics.
curl -s {url}/metrics | grep -v '^#'
"#
    );
}
