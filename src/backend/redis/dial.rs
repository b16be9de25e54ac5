//! Opening connections.

use std::time::Duration;

use deadpool_redis::redis::{AsyncConnectionConfig, RedisError};
use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime, TimeoutType, Timeouts};
use tokio::time::timeout;

use super::endpoint::Endpoint;
use super::error;
use super::multiplexed::Multiplexed;
use crate::error::BackendError;

/// How many characters of a password are searched for in an error of a server.
const REPEATED_MIN: usize = 8;

/// The timeouts for opening a connection and for an answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) connect: Duration,
    pub(super) answer: Duration,
}

/// Opens a connection to one server. Errors name its address.
pub(super) async fn dial_named(
    to: &Endpoint,
    config: AsyncConnectionConfig,
    patience: Patience,
) -> Result<Multiplexed, BackendError> {
    let whom = format!("Redis at {}", to.address());
    open(to, config, patience).await.map_err(|error| unreachable(error, &whom, to.secret()))
}

/// As [`dial_named`], but the caller names the address.
pub(super) async fn dial(
    to: &Endpoint,
    config: AsyncConnectionConfig,
    patience: Patience,
) -> Result<Multiplexed, BackendError> {
    open(to, config, patience).await.map_err(|error| unreachable(error, "Redis", to.secret()))
}

async fn open(
    to: &Endpoint,
    config: AsyncConnectionConfig,
    patience: Patience,
) -> Result<Multiplexed, PoolError> {
    let config = config
        .set_connection_timeout(Some(patience.connect))
        // The caller applies the response timeout.
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    let limit = patience.connect;
    match to.tls() {
        Some(tls) => match timeout(limit, tls.open(to.info(), config)).await {
            Ok(opened) => opened.map_err(PoolError::Backend),
            Err(_) => Err(PoolError::Timeout(TimeoutType::Create)),
        },
        None => plain(to, config, limit).await,
    }
}

async fn plain(
    to: &Endpoint,
    config: AsyncConnectionConfig,
    limit: Duration,
) -> Result<Multiplexed, PoolError> {
    let manager = Manager::new_with_config(to.info().clone(), config)?;
    let limit = Some(limit);
    let pool = Pool::builder(manager)
        .max_size(1)
        .timeouts(Timeouts { wait: limit, create: limit, recycle: limit })
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|_| PoolError::NoRuntimeSpecified)?;
    take(&pool).await
}

/// Takes a connection from the user's pool.
pub(super) async fn from(pool: &Pool) -> Result<Multiplexed, BackendError> {
    take(pool).await.map_err(|error| unreachable(error, "Redis", None))
}

/// Takes a connection that is never returned: a return would cost a round trip each time.
async fn take(pool: &Pool) -> Result<Multiplexed, PoolError> {
    pool.get().await.map(|connection| Connection::take(connection).into())
}

fn unreachable(error: PoolError, whom: &str, secret: Option<&str>) -> BackendError {
    match error {
        PoolError::Timeout(_) => {
            let text = format!(
                "{whom} could not be reached in time; check that it is running, and that the URL begins with \
                 rediss if and only if the port speaks TLS"
            );
            BackendError::connection(text).with_source(error)
        }
        PoolError::Backend(error) => refused(error, whom, secret),
        error => {
            let text = format!("{whom} could not be reached: {error}");
            BackendError::connection(text).with_source(error)
        }
    }
}

/// The error without the password. A server may echo its input; one that does not know `HELLO` does.
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
