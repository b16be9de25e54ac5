//! The service that takes a permit for each request.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use tower_service::Service;

use super::BoxError;
use super::body::ResponseBody;
use super::future::ResponseFuture;
use super::settings::Settings;

/// Takes a permit for each request and holds it as long as the response.
///
/// Made by [`ConcurrencyLimitLayer`](super::ConcurrencyLimitLayer). A request that gets no permit is rejected with a
/// response, never with an error: `Error` is that of the inner service. For a client that wants errors, see
/// [`ConcurrencyLimitLayer::into_error`](super::ConcurrencyLimitLayer::into_error).
///
/// # Readiness
///
/// The service is always ready. It polls the readiness of a clone of the inner service for each request, once that
/// has its permit. A waiting request therefore reserves nothing inside, such as a slot of a buffer or of another
/// limit, and the queue of one key does not block the requests of another. An error of the inner `poll_ready` is
/// the error of the request. The permit is held while the inner service becomes ready; no wait timeout bounds that
/// time, see [`WaitBudget`](super::WaitBudget#what-it-does-not-bound).
#[derive(Clone, Debug)]
pub struct ConcurrencyLimit<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S> ConcurrencyLimit<S> {
    pub(super) const fn new(inner: S, settings: Arc<Settings>) -> Self {
        Self { inner, settings }
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

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for ConcurrencyLimit<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    ResBody: Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    type Response = Response<ResponseBody<ResBody>>;
    type Error = S::Error;
    type Future = ResponseFuture<S, ReqBody>;

    // The key is known only in `call`. A layer that is ready when its inner service is would hold a reservation of that
    // service for each waiting request, and the queue of one key would starve all others behind a buffer or a channel.
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        ResponseFuture::new(self.inner.clone(), request, Arc::clone(&self.settings))
    }
}
