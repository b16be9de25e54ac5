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
/// Made by [`ConcurrencyLimitLayer`](super::ConcurrencyLimitLayer). A request that gets no permit is
/// answered with a response, never with an error: `Error` is that of the service inside. A client may
/// like errors better: see [`ConcurrencyLimitLayer::into_error`](super::ConcurrencyLimitLayer::into_error).
///
/// It is always ready, and makes the service inside ready for each request once that has its permit. A request
/// that waits for a permit reserves nothing inside, such as a slot of a buffer or of another limit, so the
/// waiting requests of one key keep no other key's request from it. What `poll_ready` of the service inside fails
/// with is the error of the request.
#[derive(Clone, Debug)]
pub struct ConcurrencyLimit<S> {
    inner: S,
    settings: Arc<Settings>,
}

impl<S> ConcurrencyLimit<S> {
    pub(super) const fn new(inner: S, settings: Arc<Settings>) -> Self {
        Self { inner, settings }
    }

    /// The service inside.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The service inside.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The service inside.
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

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        ResponseFuture::new(self.inner.clone(), request, Arc::clone(&self.settings))
    }
}
