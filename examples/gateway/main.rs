//! A reverse proxy that takes a permit for each request before it goes on to an upstream: the
//! layer as a sidecar, for services in any language.
//!
//! ```sh
//! cargo run --release --example gateway -- \
//!     --listen 127.0.0.1:8080 --upstream http://127.0.0.1:9000 \
//!     --redis redis://127.0.0.1/ --key header:x-tenant --limit 5 --limit-for acme=20
//! ```
//!
//! With the feature `admin`, `--admin 9090` serves a page for operators, on loopback.
//!
//! All gateways with the same `--redis` and `--name` share their permits. `--help` lists the rest.
//! With `--config FILE` there can be several limits, for parts of the paths if need be; the file is
//! read again at SIGHUP.
//! SIGTERM or Ctrl-C drains: what is in flight ends, the permits are given back, the exit code is
//! 0. A second signal ends it at once, with 1.

#![allow(clippy::print_stdout, reason = "says where it listens")]

#[cfg(feature = "admin")]
mod admin;
mod app;
mod args;
mod file;
mod proxy;

use std::future::{Future, IntoFuture};
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;

use axum::extract::{ConnectInfo, Request};
use axum::serve::ListenerExt;
use axum::{Router, middleware};
use tokio::net::TcpListener;

use self::app::Current;
use self::args::Args;

fn main() -> ExitCode {
    let args = Args::read();
    tracing_subscriber::fmt().with_writer(io::stderr).init();
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

#[tokio::main(worker_threads = 2)]
async fn serve(args: &Args) -> io::Result<()> {
    let current = Arc::new(Current::new(args).unwrap_or_else(|error| args::refuse(error)));
    let listen = current.listen();
    #[cfg(feature = "admin")]
    let window = admin::serve(current.admin(), current.semaphore().clone()).await?;
    let app = Router::new()
        .fallback({
            let current = Arc::clone(&current);
            move |request| current.serve(request)
        })
        .layer(middleware::map_request(with_peer))
        .into_make_service_with_connect_info::<SocketAddr>();

    let listener = TcpListener::bind(listen)
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("{listen}: {error}")))?;
    let drain = first_signal()?;
    let reloads = reloads(Arc::clone(&current), args)?;
    println!("listening on http://{}", listener.local_addr()?);
    io::stdout().flush()?;

    let listener = listener.tap_io(|socket| {
        // Without it, small frames of a stream are kept back. Fails on a dead socket only.
        let _ = socket.set_nodelay(true);
    });
    tokio::select! {
        end = axum::serve(listener, app).with_graceful_shutdown(drain).into_future() => end?,
        () = reloads => {}
    }
    #[cfg(feature = "admin")]
    if let Some(window) = window {
        window.abort();
        let _ = window.await;
    }
    current.semaphore().shutdown().await;
    Ok(())
}

/// Reads the file again at each SIGHUP, if there is one. Never ends.
#[cfg(unix)]
fn reloads(current: Arc<Current>, args: &Args) -> io::Result<impl Future<Output = ()>> {
    use tokio::signal::unix::{SignalKind, signal};
    let args = args.clone();
    // Without a file SIGHUP does what it always does.
    let mut hangups = args.config.is_some().then(|| signal(SignalKind::hangup())).transpose()?;
    Ok(async move {
        if let Some(hangups) = &mut hangups {
            while hangups.recv().await.is_some() {
                match current.reload(&args).await {
                    Ok(()) => tracing::info!("the configuration was read again and is in force"),
                    Err(error) => tracing::error!("{error}; the configuration of before stays"),
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

/// Puts the client's address where `PeerIpKey` looks for it.
async fn with_peer(ConnectInfo(peer): ConnectInfo<SocketAddr>, mut request: Request) -> Request {
    request.extensions_mut().insert(peer);
    request
}

/// Ready at the first signal to stop; a second one then ends the process.
fn first_signal() -> io::Result<impl Future<Output = ()>> {
    let mut signals = Signals::listen()?;
    Ok(async move {
        signals.next().await;
        tracing::info!("draining; a second signal ends at once");
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
