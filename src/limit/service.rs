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
/// `poll_ready` is that of the service inside: whose permit a request takes is only known when it is
/// there.
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

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        // The service that was made ready goes into the future; its clone waits for the next call.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        ResponseFuture::new(ready, request, Arc::clone(&self.settings))
    }
}
