//! The answer to a call, or the error of one without a permit.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use super::BoxError;
use super::entry::PlainEntry;
use super::keep::{KeepPermit, Release};
use super::layer::Settings;
use super::passage::{Exit, Passage};
use crate::error::LeaseLost;

pin_project! {
    /// The future of [`Permitted`](super::Permitted).
    ///
    /// A request has its place in the queue from the call on: a future that is kept without being polled keeps it, and a
    /// permit with it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue, and its position is lost. A call that was made is dropped,
    /// and then its permit is released; after the [linger](crate::PolicyBuilder::linger) of the policy, because the other
    /// side may go on with the request. An error of the inner service lingers in the same way.
    pub struct PermitFuture<S, Req, K = Release>
    where
        S: Service<Req>,
    {
        #[pin]
        passage: Passage<S, PlainEntry<Req>, S::Future>,
        settings: Arc<Settings<Req>>,
        keep: K,
    }
}

impl<S, Req, K> PermitFuture<S, Req, K>
where
    S: Service<Req>,
{
    pub(super) fn new(service: S, request: Req, settings: Arc<Settings<Req>>, keep: K) -> Self {
        let entry = PlainEntry::new(request, &settings);
        Self { passage: Passage::new(service, entry), settings, keep }
    }
}

impl<S, Req, K> Future for PermitFuture<S, Req, K>
where
    S: Service<Req>,
    S::Error: Into<BoxError>,
    K: KeepPermit<S::Response>,
{
    type Output = Result<K::Output, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        Poll::Ready(match ready!(this.passage.poll(this.settings, cx)) {
            Exit::Answered(Ok(response), held) => Ok(this.keep.keep(response, held.complete())),
            Exit::Answered(Err(error), held) => {
                // Released before the caller sees the error.
                drop(held);
                Err(error.into())
            }
            Exit::Refused(error) => Err(error.into()),
            Exit::Lost(held) => {
                let lost = LeaseLost::of(held.permit());
                let semaphore = lost.name();
                tracing::debug!(target: "tower_semaphore", semaphore, "aborted before its response: the permit is lost");
                Err(lost.into())
            }
        })
    }
}

impl<S, Req, K> fmt::Debug for PermitFuture<S, Req, K>
where
    S: Service<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PermitFuture").field("settings", &self.settings).finish_non_exhaustive()
    }
}
