//! Futures that are watched for spinning.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::time::Instant;

/// Counts how often a future is polled while no time passes. `Err`: it spins.
pub(crate) struct Counted<F> {
    future: F,
    most: u32,
    last: Option<Instant>,
    polls: u32,
}

impl<F> Counted<F> {
    /// `most`: how often it may be polled while no time passes.
    pub(crate) const fn new(future: F, most: u32) -> Self {
        Self { future, most, last: None, polls: 0 }
    }
}

impl<F: Future + Unpin> Future for Counted<F> {
    type Output = Result<F::Output, ()>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let now = Instant::now();
        if self.last == Some(now) {
            self.polls += 1;
            if self.polls > self.most {
                return Poll::Ready(Err(()));
            }
        } else {
            (self.last, self.polls) = (Some(now), 0);
        }
        Pin::new(&mut self.future).poll(cx).map(Ok)
    }
}
