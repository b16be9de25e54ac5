//! A reverse proxy that takes a permit for each request before it goes on to an upstream: the
//! layer as a sidecar, for services in any language.
//!
//! ```sh
//! cargo run --release --example gateway -- \
//!     --listen 127.0.0.1:8080 --upstream http://127.0.0.1:9000 \
//!     --redis redis://127.0.0.1/ --key header:x-tenant --limit 5 --limit-for acme=20
//! ```
//!
//! It takes HTTP/1.1 and HTTP/2 without TLS, and speaks HTTP/1.1, HTTP/2 (`h2c://`) or, with the
//! feature `tls`, `https://` to the upstream. With the feature `admin`, `--admin 9090` serves a page
//! for operators, on loopback; with `metrics`, `--status 9091` shows metrics beside probes.
//! docs/gateway.md is its manual.
//!
//! All gateways with the same `--redis` and `--name` share their permits. `--help` lists the rest.
//! `--config FILE` takes several limits, each for all paths or some; the file is reloaded at SIGHUP.
//! SIGTERM or Ctrl-C drains: requests in flight end, permits are released, the exit code is 0. A
//! second signal ends it at once, with 1.

#![allow(clippy::print_stdout, reason = "says where it listens")]

mod access_log;
#[cfg(feature = "admin")]
mod admin;
mod app;
mod args;
mod body;
mod connect;
mod connection;
mod connections;
mod descriptors;
mod file;
mod forward;
mod headers;
mod host;
mod intake;
mod outgoing;
mod pages;
mod path;
mod peer;
mod pool;
mod problem;
mod progress;
#[cfg(feature = "metrics")]
#[path = "../shared/prometheus.rs"]
mod prometheus;
mod server;
mod site;
mod status;
mod upgrade;
mod upload;
mod upstream;

use std::future::Future;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;

use tokio::net::TcpListener;
use tracing_subscriber::EnvFilter;

use self::access_log::AccessLog;
use self::app::Current;
use self::args::Args;
use self::connections::Connections;
use self::intake::Intake;
use self::server::Listener;
use self::status::Status;

fn main() -> ExitCode {
    let args = Args::read();
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("info"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main]
async fn serve(args: &Args) -> io::Result<()> {
    let current = Arc::new(Current::new(args).unwrap_or_else(|error| args::refuse(error)));
    let site = current.site();
    let bounds = site.bounds();
    let log = match &site.access_log {
        Some(path) => Some(Arc::new(access_log(path, site.access_log_keys)?)),
        None => None,
    };
    let status = if site.is_watched() { Some(Status::new(&current)?) } else { None };
    let open = Connections::new(false);
    let mut windows = Vec::new();
    if let (Some(address), Some(status)) = (site.status, &status) {
        windows.push(pages::serve("status", address, status.router(), bounds, &open).await?);
    }
    #[cfg(feature = "admin")]
    if let (Some(address), Some(status)) = (site.admin.address, &status) {
        let pages = admin::router(&site.admin, address, current.semaphore().clone());
        let pages = pages.merge(status.router());
        windows.push(pages::serve("admin", address, pages, bounds, &open).await?);
    }
    let intake = Arc::new(Intake {
        current: Arc::clone(&current),
        trusted: site.trusted_proxies.clone().unwrap_or_default(),
        log: log.clone(),
    });

    let listen = site.listen();
    let socket = TcpListener::bind(listen)
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("{listen}: {error}")))?;
    let stopped = first_signal()?;
    let reloads = reloads(Arc::clone(&current), args)?;
    println!("listening on http://{}", socket.local_addr()?);
    io::stdout().flush()?;

    let drain = async {
        stopped.await;
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
    if let Some(log) = log {
        log.finish();
    }
    Ok(())
}

fn access_log(path: &std::path::Path, with_keys: bool) -> io::Result<AccessLog> {
    AccessLog::open(path, with_keys)
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

/// Reloads the file, if there is one, at each SIGHUP. Never resolves.
#[cfg(unix)]
fn reloads(current: Arc<Current>, args: &Args) -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let args = args.clone();
    // Without a file, SIGHUP keeps its default action.
    let mut hangups = args.config.is_some().then(|| signal(SignalKind::hangup())).transpose()?;
    Ok(async move {
        if let Some(hangups) = &mut hangups {
            while hangups.recv().await.is_some() {
                match current.reload(&args).await {
                    Ok(()) => tracing::info!("the configuration was reloaded and is in force"),
                    Err(error) => tracing::error!("{error}; the previous configuration stays"),
                }
            }
        }
        std::future::pending().await
    })
}

#[cfg(not(unix))]
fn reloads(_: Arc<Current>, _: &Args) -> io::Result<impl Future<Output = ()>> {
    Ok(std::future::pending())
}

/// Resolves at the first signal to stop; a second one then exits the process.
fn first_signal() -> io::Result<impl Future<Output = ()>> {
    let mut signals = Signals::listen()?;
    Ok(async move {
        signals.next().await;
        tracing::info!("draining; a second signal exits at once");
        tokio::spawn(async move {
            signals.next().await;
            std::process::exit(1);
        });
    })
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
