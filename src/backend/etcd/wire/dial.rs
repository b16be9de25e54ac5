//! Opening connections.
//!
//! The socket is opened here and not by tonic, whose channel has tasks of its own and reconnects by itself.

use std::io;
use std::time::Duration;

use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tonic::body::Body;

use super::driver::{Driver, Spawner};
use super::error;
use super::settings::Settings;
use super::url::Endpoint;
use crate::error::BackendError;

/// How often a connection with open streams is tested. etcd closes one that does so more often than each five seconds
/// (`--grpc-keepalive-min-time`), and operators may ask for more.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// How long an answer to that may take.
const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// Opens a connection to a member. The caller applies the timeout.
pub(super) async fn dial(
    endpoint: &Endpoint,
    settings: &Settings,
) -> Result<(SendRequest<Body>, Driver), BackendError> {
    let whom = format!("etcd at {endpoint}");
    let io = |error: io::Error| {
        let is_refused = error.kind() == io::ErrorKind::ConnectionRefused;
        error::unreachable(&whom, error, is_refused)
    };
    let reached = settings.environment.reach(endpoint.host(), endpoint.port()).await;
    let stream = reached.map_err(io)?;
    let opened = match &settings.tls {
        None => greet(stream).await,
        Some(tls) => greet(tls.secure(endpoint.host(), stream).await.map_err(io)?).await,
    };
    opened.map_err(|error| error::unreachable(&whom, error, false))
}

/// Begins HTTP/2.
async fn greet(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> hyper::Result<(SendRequest<Body>, Driver)> {
    let (spawner, spawned) = Spawner::new();
    let mut builder = Builder::new(spawner);
    builder
        .timer(TokioTimer::new())
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    let (sender, connection) = builder.handshake(TokioIo::new(stream)).await?;
    let connection = async {
        if let Err(error) = connection.await {
            tracing::debug!(target: "tower_semaphore", %error, "a connection to etcd ended");
        }
    };
    Ok((sender, Driver::new(connection, spawned)))
}
