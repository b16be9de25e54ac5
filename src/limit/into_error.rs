//! Refusals as errors, for clients.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::Response;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::BoxError;
use super::layer::ConcurrencyLimitLayer;
use super::refusal::Refusal;
use super::refusal_response::RefusalBody;
use super::service::ConcurrencyLimit;

/// A [`ConcurrencyLimitLayer`] that rejects with an error instead of a response.
///
/// Made by [`ConcurrencyLimitLayer::into_error`].
#[derive(Clone, Debug)]
pub struct IntoErrorLayer {
    layer: ConcurrencyLimitLayer,
}

/// A [`ConcurrencyLimit`] that rejects with an error instead of a response.
///
/// Its error is a [`BoxError`], as with Tower's own layers: a [`Refusal`] if the request got no permit, or the error
/// of the inner service. A response with which another layer of this crate, further inside, rejected the request
/// becomes an error, too.
#[derive(Clone, Debug)]
pub struct IntoError<S> {
    inner: S,
}

impl ConcurrencyLimitLayer {
    /// Converts the layer into one that rejects with errors: for clients, which would take a response for that of
    /// the server.
    ///
    /// The error is a boxed [`Refusal`], which says whether trying again makes sense, and when. Settings of the
    /// response, such as [`refusal`](super::ConcurrencyLimitBuilder::refusal), have no effect then. A stream whose
    /// permit is lost ends with [`LeaseLost`](crate::LeaseLost) as usual.
    ///
    /// ```
    /// use tower_layer::Layer;
    /// use tower_semaphore::limit::{BoxError, Refusal};
    /// use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
    /// # use http::{Request, Response};
    /// # use tower_service::Service;
    /// # #[derive(Clone)]
    /// # struct Client;
    /// # impl Service<Request<String>> for Client {
    /// #     type Response = Response<String>;
    /// #     type Error = std::io::Error;
    /// #     type Future = std::future::Ready<Result<Response<String>, Self::Error>>;
    /// #     fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
    /// #         std::task::Poll::Ready(Ok(()))
    /// #     }
    /// #     fn call(&mut self, _: Request<String>) -> Self::Future {
    /// #         std::future::ready(Ok(Response::new("hello".to_owned())))
    /// #     }
    /// # }
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), BoxError> {
    /// let semaphore = Semaphore::in_memory();
    /// let nobody = ConcurrencyLimitLayer::builder(&semaphore, "api").limit(0).build()?;
    /// let mut client = nobody.into_error().layer(Client);
    ///
    /// let error = client.call(Request::new(String::new())).await.unwrap_err();
    /// let refusal = error.downcast_ref::<Refusal>().expect("not an error of the client");
    /// assert!(refusal.reason.is_full());
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub const fn into_error(self) -> IntoErrorLayer {
        IntoErrorLayer { layer: self }
    }
}

impl<S> Layer<S> for IntoErrorLayer {
    type Service = IntoError<ConcurrencyLimit<S>>;

    fn layer(&self, inner: S) -> Self::Service {
        IntoError { inner: self.layer.layer(inner) }
    }
}

impl<S> IntoError<S> {
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

impl<S, Request, Body> Service<Request> for IntoError<S>
where
    S: Service<Request, Response = Response<Body>>,
    S::Error: Into<BoxError>,
{
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = IntoErrorFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        self.inner.poll_ready(cx).map_err(Into::into)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        IntoErrorFuture { future: self.inner.call(request) }
    }
}

pin_project! {
    /// The future of [`IntoError`].
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue, and its position is lost. A permit that was granted
    /// is released, after its [linger](super::ConcurrencyLimitBuilder::linger) if the inner service was called.
    #[derive(Debug)]
    pub struct IntoErrorFuture<F> {
        #[pin]
        future: F,
    }
}

impl<F, Body, E> Future for IntoErrorFuture<F>
where
    F: Future<Output = Result<Response<Body>, E>>,
    E: Into<BoxError>,
{
    type Output = Result<Response<Body>, BoxError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut response = ready!(self.project().future.poll(cx)).map_err(Into::into)?;
        if RefusalBody::refusal_of(&response).is_none() {
            return Poll::Ready(Ok(response));
        }
        Poll::Ready(match response.extensions_mut().remove::<Refusal>() {
            Some(refusal) => Err(Box::new(refusal)),
            None => Ok(response),
        })
    }
}
