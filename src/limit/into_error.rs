//! Refusals as errors, for stacks of clients.

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
use super::service::ConcurrencyLimit;

/// A [`ConcurrencyLimitLayer`] that refuses with an error instead of a response.
///
/// Made by [`ConcurrencyLimitLayer::into_error`].
#[derive(Clone, Debug)]
pub struct IntoErrorLayer {
    layer: ConcurrencyLimitLayer,
}

/// A [`ConcurrencyLimit`] that refuses with an error instead of a response.
///
/// Its error is a [`BoxError`], as that of Tower's own layers: a [`Refusal`] if a permit could not be
/// had, or the error of the service inside. Responses that are refusals of a layer further inside
/// become errors too.
#[derive(Clone, Debug)]
pub struct IntoError<S> {
    inner: S,
}

impl ConcurrencyLimitLayer {
    /// The same layer, with errors for refusals: for clients, where a response that the other side
    /// never gave would be taken for its own.
    ///
    /// The error is a [`Refusal`], boxed, and says whether trying again makes sense, and when. What
    /// the layer is set to answer with (`refusal` and the like) does not matter then. A stream that
    /// is cut off later ends with [`LeaseLost`](crate::LeaseLost) as ever.
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
    /// Dropping it removes the request from the queue, and its turn is lost; a permit that it has is released,
    /// after its [linger](super::ConcurrencyLimitBuilder::linger) if the request was passed on.
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
        // A layer puts it there, and nobody else can make one: no peer either.
        Poll::Ready(match response.extensions_mut().remove::<Refusal>() {
            Some(refusal) => Err(Box::new(refusal)),
            None => Ok(response),
        })
    }
}
