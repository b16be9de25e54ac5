//! What a process reaches outside of itself: the members, and the clock on the wall. A simulation brings its own.

use std::io;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::Instant;

use crate::backend::socket::reach;
use crate::suspension;

/// A stream of bytes to a member.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

/// The network and the clocks of a process.
pub trait Environment: Send + Sync + 'static {
    /// Opens a stream to a member. The caller applies the timeout.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future abandons the attempt.
    ///
    /// # Errors
    ///
    /// If the member cannot be reached.
    fn reach<'a>(&'a self, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<Box<dyn Stream>>>;

    /// Returns the time by the wall clock, in µs since 1970.
    fn wall(&self) -> u64;

    /// Returns for how long the machine has been suspended so far. `now` was read just before.
    fn suspended(&self, now: Instant) -> Duration;
}

/// The environment of a process that is not simulated.
#[derive(Clone, Copy, Debug)]
pub(super) struct Machine;

impl Environment for Machine {
    fn reach<'a>(&'a self, host: &'a str, port: u16) -> BoxFuture<'a, io::Result<Box<dyn Stream>>> {
        async move { Ok(Box::new(reach(host, port).await?) as _) }.boxed()
    }

    fn wall(&self) -> u64 {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since_1970.as_micros()).unwrap_or(u64::MAX)
    }

    fn suspended(&self, now: Instant) -> Duration {
        suspension::check(now)
    }
}
