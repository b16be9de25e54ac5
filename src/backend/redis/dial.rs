//! Opening connections.

use std::time::Duration;

use deadpool_redis::redis::{AsyncConnectionConfig, RedisError};
use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime, TimeoutType, Timeouts};
use tokio::time::timeout;

use super::endpoint::Endpoint;
use super::error;
use super::multiplexed::Multiplexed;
use crate::error::BackendError;

/// So much of the start of a password is looked for in what a server says.
const REPEATED_MIN: usize = 8;

/// How long opening a connection, and an answer, may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) connect: Duration,
    pub(super) answer: Duration,
}

/// A connection of our own to one server.
pub(super) async fn dial(
    to: &Endpoint,
    config: AsyncConnectionConfig,
    patience: Patience,
) -> Result<Multiplexed, BackendError> {
    let config = config
        .set_connection_timeout(Some(patience.connect))
        // The caller bounds the answers: it knows what to do about it.
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    let limit = patience.connect;
    let opened = match to.tls() {
        Some(tls) => match timeout(limit, tls.open(to.info(), config)).await {
            Ok(opened) => opened.map_err(PoolError::Backend),
            Err(_) => Err(PoolError::Timeout(TimeoutType::Create)),
        },
        None => plain(to, config, limit).await,
    };
    opened.map_err(|error| unreachable(error, to.secret()))
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

/// A connection out of a pool of the user's.
pub(super) async fn from(pool: &Pool) -> Result<Multiplexed, BackendError> {
    take(pool).await.map_err(|error| unreachable(error, None))
}

/// For good: going back would cost a round trip each time.
async fn take(pool: &Pool) -> Result<Multiplexed, PoolError> {
    pool.get().await.map(|connection| Connection::take(connection).into())
}

fn unreachable(error: PoolError, secret: Option<&str>) -> BackendError {
    match error {
        PoolError::Timeout(_) => {
            let text = "Redis could not be reached in time; is it there, and does it speak TLS on this \
                        port if and only if the URL says rediss?";
            BackendError::connection(text).with_source(error)
        }
        PoolError::Backend(error) => refused(error, secret),
        error => {
            let text = format!("Redis could not be reached: {error}");
            BackendError::connection(text).with_source(error)
        }
    }
}

/// What went wrong, without the password: a server may repeat what it was sent. One that knows no `HELLO`
/// does.
fn refused(error: RedisError, secret: Option<&str>) -> BackendError {
    let text = format!("Redis could not be reached: {error}{}", error::advice(&error));
    if let Some((text, _)) = text.split_once("with args beginning with") {
        let text = text.trim_end_matches([',', ' ']);
        return BackendError::connection(format!("{text}{}", error::advice(&error)));
    }
    // A long one may be repeated in part.
    let start = |secret: &str| secret.chars().take(REPEATED_MIN).collect::<String>();
    let Some(start) = secret.map(start).filter(|start| text.contains(start)) else {
        return BackendError::connection(text).with_source(error);
    };
    let is_code =
        |code: &&str| code.bytes().all(|c| c.is_ascii_uppercase()) && !code.contains(&start);
    let code = error.code().filter(is_code).unwrap_or("ERR");
    BackendError::connection(format!(
        "Redis could not be reached: {code}, with a text that is not shown because the password may be in it"
    ))
}
