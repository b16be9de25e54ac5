//! Opening connections.

use std::time::Duration;

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{AsyncConnectionConfig, ConnectionInfo};
use deadpool_redis::{Connection, Manager, Pool, PoolError, Runtime, Timeouts};

use super::error;
use crate::error::BackendError;

/// How long opening a connection, and an answer, may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    pub(super) connect: Duration,
    pub(super) answer: Duration,
}

/// A connection of our own to one server.
pub(super) async fn dial(
    info: &ConnectionInfo,
    config: AsyncConnectionConfig,
    patience: Patience,
) -> Result<MultiplexedConnection, BackendError> {
    let config = config
        .set_connection_timeout(Some(patience.connect))
        // The caller bounds the answers: it knows what to do about it.
        .set_response_timeout(None)
        .set_pipeline_buffer_size(1024);
    let manager = Manager::new_with_config(info.clone(), config)
        .map_err(|error| unreachable(PoolError::Backend(error)))?;
    let limit = Some(patience.connect);
    let pool = Pool::builder(manager)
        .max_size(1)
        .timeouts(Timeouts { wait: limit, create: limit, recycle: limit })
        .runtime(Runtime::Tokio1)
        .build()
        .map_err(|error| BackendError::connection(format!("connection pool: {error}")))?;
    from(&pool).await
}

/// A connection out of a pool, for good: going back would cost a round trip each time.
pub(super) async fn from(pool: &Pool) -> Result<MultiplexedConnection, BackendError> {
    pool.get().await.map(Connection::take).map_err(unreachable)
}

fn unreachable(error: PoolError) -> BackendError {
    let text = match &error {
        PoolError::Timeout(_) => {
            "Redis could not be reached in time; is it there, and does it speak TLS on this port if \
             and only if the URL says rediss?"
                .to_owned()
        }
        PoolError::Backend(error) => {
            format!("Redis could not be reached: {error}{}", error::advice(error))
        }
        error => format!("Redis could not be reached: {error}"),
    };
    BackendError::connection(text).with_source(error)
}
