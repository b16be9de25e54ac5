//! Opening connections.
//!
//! Sockets are opened here and not by the redis crate, which would start a task for each. The driver's own task drives
//! the connection that carries its calls: with a task for the socket, each call and each reply would pass one more
//! task, and could wake another thread.

use std::io;
use std::time::Duration;

#[cfg(feature = "deadpool-redis")]
use deadpool_redis::{Connection, Pool, PoolError};
use futures_util::FutureExt;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, ConnectionAddr, RedisConnectionInfo, RedisError};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;

use super::endpoint::Endpoint;
use super::error;
use super::multiplexed::{Driver, Multiplexed};
use crate::backend::socket::reach;
use crate::error::BackendError;

/// The number of leading characters of a password that are searched for in an error of a server.
const REPEATED_MIN: usize = 8;

/// The timeouts for opening a connection and for an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Timeouts {
    pub(super) connect: Duration,
    pub(super) answer: Duration,
}

/// Opens a connection to one server, which the caller has to drive. Errors contain its address.
pub(super) async fn dial_named(
    to: &Endpoint,
    config: AsyncConnectionConfig,
    timeouts: Timeouts,
) -> Result<(MultiplexedConnection, Driver), BackendError> {
    open(to, config, timeouts, &format!("Redis at {}", to.address())).await
}

/// Opens a connection with a task of its own, because nobody polls it between two queries. Errors do not contain its
/// address.
pub(super) async fn dial(to: &Endpoint, timeouts: Timeouts) -> Result<Multiplexed, BackendError> {
    let opened = open(to, AsyncConnectionConfig::new(), timeouts, "Redis").await;
    opened.map(|(connection, driver)| Multiplexed::spawn(connection, driver))
}

async fn open(
    to: &Endpoint,
    config: AsyncConnectionConfig,
    timeouts: Timeouts,
    whom: &str,
) -> Result<(MultiplexedConnection, Driver), BackendError> {
    // The caller applies the response timeout.
    let config = config.set_response_timeout(None).set_pipeline_buffer_size(1024);
    match timeout(timeouts.connect, connect(to, config)).await {
        Ok(opened) => opened.map_err(|error| refused(error, whom, to.secret())),
        Err(elapsed) => Err(not_in_time(elapsed, whom)),
    }
}

async fn connect(
    to: &Endpoint,
    config: AsyncConnectionConfig,
) -> Result<(MultiplexedConnection, Driver), RedisError> {
    let settings = to.info().redis_settings();
    match (to.address(), to.tls()) {
        (ConnectionAddr::Tcp(host, port), None) => {
            greet(settings, reach(host, *port).await?, config).await
        }
        (ConnectionAddr::Tcp(host, port), Some(tls)) => {
            let stream = tls.secure(host, reach(host, *port).await?).await?;
            greet(settings, stream, config).await
        }
        #[cfg(unix)]
        (ConnectionAddr::Unix(path), None) => {
            greet(settings, tokio::net::UnixStream::connect(path).await?, config).await
        }
        (address, _) => {
            let text = format!(
                "address is {address}; expected TCP, with or without TLS, or a Unix socket on Unix"
            );
            Err(io::Error::other(text).into())
        }
    }
}

/// Authenticates, and selects protocol and database.
async fn greet(
    settings: &RedisConnectionInfo,
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
    config: AsyncConnectionConfig,
) -> Result<(MultiplexedConnection, Driver), RedisError> {
    let greeted = MultiplexedConnection::new_with_config(settings, stream, config).await;
    greeted.map(|(connection, driver)| (connection, driver.boxed()))
}

/// Takes a connection from the user's pool, for good: the pool would check it with a round trip at each use.
#[cfg(feature = "deadpool-redis")]
pub(super) async fn from_pool(pool: &Pool) -> Result<MultiplexedConnection, BackendError> {
    pool.get().await.map(Connection::take).map_err(|error| match error {
        PoolError::Timeout(_) => not_in_time(error, "Redis"),
        PoolError::Backend(error) => refused(error, "Redis", None),
        error => {
            let text = format!("Redis could not be reached: {error}");
            BackendError::connection(text).with_source(error)
        }
    })
}

fn not_in_time(error: impl std::error::Error + Send + Sync + 'static, whom: &str) -> BackendError {
    let text = format!(
        "{whom} could not be reached in time; check that it is running, and that the URL begins with rediss if and \
         only if the port speaks TLS"
    );
    BackendError::connection(text).with_source(error)
}

/// Returns the error without the password. A server may echo its input, and one that does not know `HELLO` does.
fn refused(error: RedisError, whom: &str, secret: Option<&str>) -> BackendError {
    let text = error.to_string();
    let advice = error::advice(&error);
    if let Some((text, _)) = text.split_once("with args beginning with") {
        let text = text.trim_end_matches([',', ' ']);
        return BackendError::connection(format!("{whom} could not be reached: {text}{advice}"));
    }
    // A long password may be echoed in part.
    let start = |secret: &str| secret.chars().take(REPEATED_MIN).collect::<String>();
    let Some(start) = secret.map(start).filter(|start| text.contains(start)) else {
        let text = format!("{whom} could not be reached: {text}{advice}");
        return BackendError::connection(text).with_source(error);
    };
    let is_code =
        |code: &&str| code.bytes().all(|c| c.is_ascii_uppercase()) && !code.contains(&start);
    let code = error.code().filter(is_code).unwrap_or("ERR");
    BackendError::connection(format!(
        "{whom} could not be reached: {code}; the message is not shown because it may contain the password"
    ))
}
