//! The gateway of [`tower_semaphore`]: a reverse proxy that takes a permit for each request before it goes on to an
//! upstream. A sidecar, for services in any language.
//!
//! ```sh
//! semaphore-gateway \
//!     --listen 127.0.0.1:8080 --upstream http://127.0.0.1:9000 \
//!     --redis redis://127.0.0.1/ --key header:x-tenant --limit 5 --limit-for acme=20
//! ```
//!
//! It accepts HTTP/1.1 and HTTP/2 without TLS, and speaks HTTP/1.1, HTTP/2 (`h2c://`) or, with the
//! feature `tls`, `https://` to the upstream. With the feature `admin`, `--admin 9090` serves a page
//! for operators, on loopback; with `metrics`, `--status 9091` shows metrics beside probes.
//! `docs/gateway.md` is its manual.
//!
//! All gateways with the same `--redis` and `--name` share their permits, or with the same `--etcd` (feature `etcd`).
//! `--help` lists the rest.
//! `--config FILE` reads several limits, each for all paths or some; the file is reloaded at SIGHUP.
//! SIGTERM or Ctrl-C drains: requests in flight end, permits are released, the exit code is 0. A
//! second signal ends it at once, with 1.
//!
//! The crate is a program. Its library has only what the program starts, and follows no version.

#![allow(clippy::print_stdout, reason = "says where it listens")]

mod access_log;
#[cfg(feature = "admin")]
mod admin;
mod also;
mod app;
mod args;
mod body;
mod budgets;
#[cfg(feature = "tls")]
mod certificates;
mod connect;
mod connection;
mod connections;
mod counts;
mod descriptors;
mod file;
mod forward;
mod headers;
mod host;
mod intake;
mod lines;
mod outage;
mod outgoing;
mod pages;
mod path;
mod peer;
mod pool;
mod problem;
mod progress;
#[cfg(feature = "metrics")]
mod prometheus;
mod room;
mod secret;
mod server;
mod site;
mod status;
mod upgrade;
mod upload;
mod upstream;

use std::future::Future;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tokio::net::TcpListener;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;
use tracing_subscriber::EnvFilter;

use self::access_log::AccessLog;
use self::app::Current;
use self::args::Args;
use self::connections::Connections;
use self::counts::Log;
use self::intake::Intake;
use self::lines::Lines;
use self::room::Room;
use self::server::Listener;
use self::status::Status;

/// How long the logs may take to write what is left, beyond the drain timeout.
const LAST_LINES: Duration = Duration::from_millis(500);

/// The flags that let gateways share their permits.
const TO_SHARE: &str = if cfg!(feature = "etcd") { "--redis or --etcd" } else { "--redis" };

/// Runs the program, with the arguments and the environment of this process.
#[must_use]
pub fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> io::Result<()> {
    let runtime = Runtime::new()?;
    // Before all else: until then, SIGHUP ends the process.
    let hangups = runtime.block_on(async { Hangups::listen() })?;
    let args = Args::read();
    let filter = std::env::var(EnvFilter::DEFAULT_ENV).unwrap_or_else(|_| "info".to_owned());
    let filter = EnvFilter::try_new(&filter).unwrap_or_else(|error| {
        args::refuse(format!("{} is {filter:?}: {error}", EnvFilter::DEFAULT_ENV))
    });
    let log = Arc::new(Lines::start(Log::Stderr, || Ok(Box::new(io::stderr())))?);
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(Arc::clone(&log)).init();
    let (served, deadline) = match runtime.block_on(serve(&args, hangups)) {
        Ok(deadline) => (Ok(()), deadline),
        Err(error) => (Err(error), Instant::now() + LAST_LINES),
    };
    // Waits for nothing: a look-up of a name can take long.
    runtime.shutdown_background();
    log.finish(deadline);
    served
}

/// Serves until a signal. Returns by when the process has to end.
async fn serve(args: &Args, hangups: Hangups) -> io::Result<Instant> {
    let current = Arc::new(Current::new(args).unwrap_or_else(|error| args::refuse(error)));
    let site = current.site();
    let bounds = site.bounds();
    if site.server().is_none() {
        tracing::warn!(
            "permits are counted in this process alone and are not shared with other gateways; set {TO_SHARE} to share them"
        );
    }
    let log = match &site.access_log {
        Some(path) => Some(Arc::new(access_log(path, site.access_log_keys)?)),
        None => None,
    };
    let status = if site.is_watched() { Some(Status::new(&current)?) } else { None };
    let open = Connections::new(false);
    let windows = match &status {
        Some(status) => windows(&current, status, &open).await?,
        None => Vec::new(),
    };
    let intake = Arc::new(Intake {
        current: Arc::clone(&current),
        trusted: site.trusted_proxies.clone().unwrap_or_default(),
        log: log.clone(),
        room: Room::new(site.max_requests),
    });

    let socket = bind(site.listen()).await?;
    let is_reloaded = args.config.is_some() || log.is_some();
    let (hangups, ends) = if is_reloaded { (Some(hangups), None) } else { (None, Some(hangups)) };
    let stopped = first_signal(ends)?;
    let reloads = reloads(hangups, Arc::clone(&current), args, log.clone());
    println!("listening on http://{}", socket.local_addr()?);
    io::stdout().flush()?;

    let began = OnceLock::new();
    let drain = async {
        stopped.await;
        let _ = began.set(Instant::now());
        if let Some(status) = &status {
            status.drain();
        }
    };
    let listener = Listener { socket, most: site.max_connections(), open, others: Vec::new() };
    tokio::select! {
        () = server::run(listener, &intake, bounds, drain) => {}
        () = reloads => {}
    }
    for window in windows {
        window.abort();
        let _ = window.await;
    }
    current.semaphore().shutdown().await;
    let drained = began.get().map(|began| *began + bounds.drain);
    let deadline = drained.unwrap_or_else(Instant::now).max(Instant::now() + LAST_LINES);
    if let Some(log) = log {
        log.lines().finish(deadline);
    }
    Ok(deadline)
}

/// Serves the pages for operators and probes, as far as they have addresses.
async fn windows(
    current: &Current,
    status: &Status,
    open: &Arc<Connections>,
) -> io::Result<Vec<JoinHandle<()>>> {
    let site = current.site();
    let bounds = site.bounds();
    let mut windows = Vec::new();
    if let Some(address) = site.status {
        windows.push(pages::serve("status", address, status.router(), bounds, open).await?);
    }
    #[cfg(feature = "admin")]
    if let Some(address) = site.admin.address {
        let pages = admin::router(&site.admin, address, current.semaphore().clone());
        let pages = pages.merge(status.router());
        windows.push(pages::serve("admin", address, pages, bounds, open).await?);
    }
    Ok(windows)
}

async fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{address}: {error}"));
    TcpListener::bind(address).await.map_err(named)
}

fn access_log(path: &std::path::Path, with_keys: bool) -> io::Result<AccessLog> {
    AccessLog::open(path, with_keys)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Reloads the file and opens the access log again, as far as there are any, at each SIGHUP. Never resolves.
async fn reloads(
    hangups: Option<Hangups>,
    current: Arc<Current>,
    args: &Args,
    log: Option<Arc<AccessLog>>,
) {
    let Some(mut hangups) = hangups else { return std::future::pending().await };
    loop {
        hangups.next().await;
        if let Some(log) = &log {
            log.lines().reopen();
        }
        if args.config.is_none() {
            continue;
        }
        let reloaded = current.reload(args).await;
        counts::reloaded(reloaded.is_ok());
        match reloaded {
            Ok(()) => tracing::info!("the configuration was reloaded and is in force"),
            Err(error) => tracing::error!("{error}; the previous configuration stays"),
        }
    }
}

/// Resolves at the first signal to stop; a second one then exits the process. SIGHUP is one where there is nothing to
/// reload.
fn first_signal(hangups: Option<Hangups>) -> io::Result<impl Future<Output = ()>> {
    let mut signals = Signals::listen()?;
    let hung_up = async move {
        match hangups {
            Some(mut hangups) => hangups.next().await,
            None => std::future::pending().await,
        }
    };
    Ok(async move {
        tokio::select! {
            () = signals.next() => {}
            () = hung_up => {}
        }
        tracing::info!("draining; a second signal exits at once");
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(1);
        });
    })
}

/// SIGHUP, from when this is made.
struct Hangups {
    #[cfg(unix)]
    signal: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Hangups {
    fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self { signal: signal(SignalKind::hangup())? })
    }

    async fn next(&mut self) {
        if self.signal.recv().await.is_none() {
            std::future::pending().await
        }
    }
}

#[cfg(not(unix))]
impl Hangups {
    fn listen() -> io::Result<Self> {
        Ok(Self {})
    }

    async fn next(&mut self) {
        std::future::pending().await
    }
}

/// SIGTERM and Ctrl-C.
struct Signals {
    #[cfg(unix)]
    terminate: tokio::signal::unix::Signal,
    #[cfg(unix)]
    interrupt: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Signals {
    fn listen() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        let terminate = signal(SignalKind::terminate())?;
        Ok(Self { terminate, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

#[cfg(not(unix))]
impl Signals {
    fn listen() -> io::Result<Self> {
        Ok(Self {})
    }

    async fn next(&mut self) {
        let _ = tokio::signal::ctrl_c().await;
    }
}
