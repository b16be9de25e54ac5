//! A gateway to an LLM whose provider allows six requests at a time, shared by tenants on two plans.
//!
//! ```sh
//! cargo run -p example-llm-gateway             # prints what to try with curl
//! cargo run -p example-llm-gateway -- --demo   # calls itself and ends
//! ```
//!
//! The provider is a fake that this program starts itself: it streams the words of a prompt back. Set
//! `REDIS_URL` to share the quota between all processes that use the same Redis, and `ADMIN_PASSWORD` to a password for
//! operators of at least 16 characters; without it, a random one is printed.

#![allow(clippy::print_stdout, reason = "prints what to try, and what it saw")]

mod api;
mod demo;
mod llm;
mod operators;
#[path = "../../gateway/src/prometheus.rs"]
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
use tokio::sync::{oneshot, watch};
use tokio::time::sleep;
use tower_semaphore::Semaphore;
use tower_semaphore::limit::BoxError;

use self::llm::Llm;
use self::operators::Password;
use self::provider::Provider;

/// How long a shutdown waits for open requests and sockets. Shorter than the time that the platform leaves between
/// SIGTERM and SIGKILL.
const DRAIN: Duration = Duration::from_secs(20);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt().init();
    let semaphore = match env::var("REDIS_URL") {
        Ok(url) => Semaphore::redis(&url)?,
        Err(_) => Semaphore::in_memory(),
    };
    let provider = Arc::new(Provider::default());
    let llm = Llm::new(&llm::quota(&semaphore)?, provider::serve(Arc::clone(&provider)).await?);
    let password = Password::new(env::var_os("ADMIN_PASSWORD"))?;

    let stop = watch::Sender::new(false);
    let app = api::router(&semaphore, llm, stop.subscribe())?.merge(operators::router(
        &semaphore,
        prometheus::install()?,
        &password,
    )?);

    let is_demo = env::args().any(|arg| arg == "--demo");
    let address = if is_demo { "127.0.0.1:0" } else { "127.0.0.1:3000" };
    let listener = TcpListener::bind(address).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let served = if is_demo {
        let server = serve(listener, app, stop.clone(), semaphore.clone());
        rehearse(server, demo::run(&url, password.text(), &provider, &stop), &semaphore).await
    } else {
        invite(&url, &password);
        let signal = stop.clone();
        tokio::spawn(async move {
            signals::stopped().await;
            signal.send_replace(true);
        });
        serve(listener, app, stop, semaphore.clone()).await.map_err(Into::into)
    };
    // Without this, permits that are still held would stay taken until their leases end.
    semaphore.shutdown().await;
    served
}

/// Runs the demo, and says what the server left when it ended.
async fn rehearse(
    server: impl Future<Output = io::Result<()>> + Send + 'static,
    demo: impl Future<Output = Result<(), BoxError>>,
    semaphore: &Semaphore,
) -> Result<(), BoxError> {
    let server = tokio::spawn(server);
    demo.await?;
    server.await??;
    let quota = semaphore.inspect(llm::NAME).await?;
    let left = quota.processes.iter().find(|process| process.is_own).map_or(0, |own| own.in_use);
    println!("stopped: this process has {left} permits of the quota in use");
    if left > 0 {
        return Err("permits of the quota were not given back".into());
    }
    Ok(())
}

/// Serves until `stop` is set. Then queued requests are rejected, and requests in flight finish unless that takes
/// longer than [`DRAIN`].
async fn serve(
    listener: TcpListener,
    app: Router,
    stop: watch::Sender<bool>,
    semaphore: Semaphore,
) -> io::Result<()> {
    let mut stopping = stop.subscribe();
    let (begin, begun) = oneshot::channel();
    let queue = semaphore.clone();
    let stopped = async move {
        api::stopped(&mut stopping).await;
        queue.stop_waiting();
        let _ = begin.send(());
    };
    let served = async {
        axum::serve(listener, app).with_graceful_shutdown(stopped).await?;
        // The server does not wait for upgraded connections; each socket keeps a receiver.
        stop.closed().await;
        io::Result::Ok(())
    };
    let overdue = async {
        let _ = begun.await;
        sleep(DRAIN).await;
    };
    tokio::select! {
        served = served => served,
        () = overdue => {
            tracing::warn!("cutting off what is still open after {DRAIN:?}");
            Ok(())
        }
    }
}

fn invite(url: &str, password: &Password) {
    let (shown, typed) = match password {
        Password::Set(_) => ("the value of ADMIN_PASSWORD", "$ADMIN_PASSWORD"),
        Password::Generated(text) => (text.as_str(), text.as_str()),
    };
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
xdg-open {url}/admin    # password: {shown}
curl -s -u "operator:{typed}" {url}/metrics | grep '^concurrency_limit_requests'
"#,
        socket = url.trim_start_matches("http"),
    );
}
