//! A gateway to an LLM whose provider allows six requests at a time, shared by tenants on two plans.
//!
//! ```sh
//! cargo run --features admin,metrics --example llm_gateway             # prints what to try with curl
//! cargo run --features admin,metrics --example llm_gateway -- --demo   # calls itself and ends
//! ```
//!
//! The provider is a fake that this program starts itself: it streams the words of a prompt back. Set
//! `REDIS_URL` to share the quota between all processes that use the same Redis.

#![allow(clippy::print_stdout, reason = "says what to try, and what it saw")]

mod api;
mod demo;
mod llm;
mod operators;
#[path = "../shared/prometheus.rs"]
mod prometheus;
mod provider;
#[path = "../shared/signals.rs"]
mod signals;
mod tenants;

use std::env;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::time::timeout;
use tower_semaphore::Semaphore;
use tower_semaphore::limit::BoxError;

use self::llm::Llm;
use self::operators::Password;
use self::provider::Provider;

/// How long a shutdown waits for open sockets.
const GOODBYE: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let semaphore = match env::var("REDIS_URL") {
        Ok(url) => Semaphore::redis(&url)?,
        Err(_) => Semaphore::in_memory(),
    };
    let provider = Arc::new(Provider::default());
    let llm = Llm::new(&llm::quota(&semaphore)?, provider::serve(Arc::clone(&provider)).await?);
    let password = match env::var("ADMIN_PASSWORD") {
        Ok(password) => password,
        Err(_) => format!("{:016x}", getrandom::u64()?),
    };

    let stop = watch::Sender::new(false);
    let app = api::router(&semaphore, llm, stop.subscribe())?.merge(operators::router(
        &semaphore,
        prometheus::install()?,
        &Password::new(&password),
    ));

    let is_demo = env::args().any(|arg| arg == "--demo");
    let address = if is_demo { "127.0.0.1:0" } else { "127.0.0.1:3000" };
    let listener = TcpListener::bind(address).await?;
    let url = format!("http://{}", listener.local_addr()?);
    if is_demo {
        let server = tokio::spawn(serve(listener, app, stop.clone(), semaphore));
        demo::run(&url, &password, &provider, &stop).await?;
        server.await??;
        println!("shut down: all permits were given back");
    } else {
        invite(&url, &password);
        let signal = stop.clone();
        tokio::spawn(async move {
            signals::stopped().await;
            signal.send_replace(true);
        });
        serve(listener, app, stop, semaphore).await?;
    }
    Ok(())
}

/// Serves until `stop` says so. What is in flight then is answered to its end.
async fn serve(
    listener: TcpListener,
    app: Router,
    stop: watch::Sender<bool>,
    semaphore: Semaphore,
) -> io::Result<()> {
    let mut stopping = stop.subscribe();
    let stopped = async move { api::stopped(&mut stopping).await };
    axum::serve(listener, app).with_graceful_shutdown(stopped).await?;
    // The server does not wait for upgraded connections. Each socket keeps a receiver.
    let _ = timeout(GOODBYE, stop.closed()).await;
    // Without this, permits that are still held would stay taken until their leases end.
    semaphore.shutdown().await;
    Ok(())
}

fn invite(url: &str, password: &str) {
    println!(
        r#"listening on {url}; try:

# A stream of tokens. Without a key, 401.
curl -N -H 'authorization: Bearer acme-key' {url}/v1/chat -d 'the quick brown fox jumps'

# Ten at once. `hobby` is on the free plan and has two at a time; `acme` pays, and has four.
for i in $(seq 10); do for t in hobby acme; do
  curl -s -o /dev/null -w "$t %{{http_code}} after %{{time_total}} s\n" -H "authorization: Bearer $t-key" \
    {url}/v1/chat -d 'one two three four five six seven eight' &
done; done; wait

# A WebSocket: each prompt takes a permit of the same quota. `hobby` may have one open.
websocat -H 'authorization: Bearer hobby-key' ws{socket}/v1/live

# For operators: the page in a browser (user operator), and what Prometheus sees.
xdg-open {url}/admin    # password: {password}
curl -s -u operator:{password} {url}/metrics | grep '^concurrency_limit_requests'
"#,
        socket = url.trim_start_matches("http"),
    );
}
