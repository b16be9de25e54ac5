//! A connection that many callers share.

use std::ops::{Deref, DerefMut};

use deadpool_redis::redis::aio::MultiplexedConnection;

/// A connection, with the task that drives it unless redis started one. The task is aborted with the last clone;
/// otherwise it would wait for every outstanding reply.
#[derive(Clone, Debug)]
pub(super) struct Multiplexed {
    connection: MultiplexedConnection,
    #[cfg(feature = "tls-no-provider")]
    _driver: Option<std::sync::Arc<Driver>>,
}

impl Multiplexed {
    #[cfg(feature = "tls-no-provider")]
    pub(super) fn spawn(
        connection: MultiplexedConnection,
        driver: impl Future<Output = ()> + Send + 'static,
    ) -> Self {
        let driver = Driver(tokio::spawn(driver));
        Self { connection, _driver: Some(std::sync::Arc::new(driver)) }
    }
}

impl From<MultiplexedConnection> for Multiplexed {
    fn from(connection: MultiplexedConnection) -> Self {
        Self {
            connection,
            #[cfg(feature = "tls-no-provider")]
            _driver: None,
        }
    }
}

impl Deref for Multiplexed {
    type Target = MultiplexedConnection;

    fn deref(&self) -> &MultiplexedConnection {
        &self.connection
    }
}

impl DerefMut for Multiplexed {
    fn deref_mut(&mut self) -> &mut MultiplexedConnection {
        &mut self.connection
    }
}

#[cfg(feature = "tls-no-provider")]
#[derive(Debug)]
struct Driver(tokio::task::JoinHandle<()>);

#[cfg(feature = "tls-no-provider")]
impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}
