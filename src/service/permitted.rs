//! The service that takes a permit for each call.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use tower_service::Service;

use super::BoxError;
use super::future::PermitFuture;
use super::keep::{KeepPermit, Release};
use super::layer::Settings;

/// Takes a permit for each call, and holds it until the inner service has responded.
///
/// Made by [`PermitLayer`](super::PermitLayer). Clones share the semaphore, and each call uses a clone of the inner
/// service.
///
/// # Readiness
///
/// The service is always ready, as the name of a permit depends on the request: [`tower::limit::ConcurrencyLimit`], which
/// has one semaphore for all, takes its permit in `poll_ready` instead, and holds it there until the call is made. The
/// readiness of a clone of the inner service is polled for each request, once that has its permit. A waiting request
/// therefore reserves nothing inside, such as a slot of a buffer, and the queue of one name does not block the requests
/// of another. An error of the inner `poll_ready` is the error of the request. The permit is held while the inner service
/// becomes ready; no wait timeout bounds that time.
///
/// A caller that relies on `poll_ready` for backpressure, such as [`tower::load_shed`], finds none here. The policy bounds
/// the queue instead: see [`max_queue`](crate::PolicyBuilder::max_queue) and
/// [`wait_timeout`](crate::PolicyBuilder::wait_timeout).
///
/// # Lost permits
///
/// A permit whose lease could not be renewed belongs to another request by now. The call is dropped, and its error is
/// [`LeaseLost`](crate::LeaseLost), so that the limit holds. Work that must not be cut short goes into a task of its own,
/// which [attach](super::PermitLayer::attach) gives the permit.
///
/// [`tower::limit::ConcurrencyLimit`]: https://docs.rs/tower/latest/tower/limit/concurrency/struct.ConcurrencyLimit.html
/// [`tower::load_shed`]: https://docs.rs/tower/latest/tower/load_shed
pub struct Permitted<S, Req, K = Release> {
    inner: S,
    settings: Arc<Settings<Req>>,
    keep: K,
}

impl<S, Req, K> Permitted<S, Req, K> {
    pub(super) const fn new(inner: S, settings: Arc<Settings<Req>>, keep: K) -> Self {
        Self { inner, settings, keep }
    }

    /// Returns a reference to the inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns a mutable reference to the inner service.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// Returns the inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req, K> Service<Req> for Permitted<S, Req, K>
where
    S: Service<Req> + Clone,
    S::Error: Into<BoxError>,
    K: KeepPermit<S::Response> + Clone,
{
    type Response = K::Output;
    type Error = BoxError;
    type Future = PermitFuture<S, Req, K>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        let settings = Arc::clone(&self.settings);
        PermitFuture::new(self.inner.clone(), request, settings, self.keep.clone())
    }
}

impl<S: Clone, Req, K: Clone> Clone for Permitted<S, Req, K> {
    fn clone(&self) -> Self {
        let settings = Arc::clone(&self.settings);
        Self { inner: self.inner.clone(), settings, keep: self.keep.clone() }
    }
}

impl<S: fmt::Debug, Req, K> fmt::Debug for Permitted<S, Req, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Permitted")
            .field("inner", &self.inner)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}
