//! The service of one connection: knows which of its responses is an upgrade.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http::{Method, Request, Response, Version};
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use super::{Connection, Exchange};

/// The service of one connection, made by [`Connection`], which is a layer.
///
/// Inserts the connection into the extensions of each request. Where its response upgrades the connection, that holds
/// the permits of the request from then on.
#[derive(Clone, Debug)]
pub struct OnConnection<S> {
    inner: S,
    connection: Connection,
}

pin_project! {
    /// The future of [`OnConnection`].
    #[derive(Debug)]
    pub struct OnConnectionFuture<F> {
        #[pin]
        future: F,
        exchange: Exchange,
    }
}

impl<S> Layer<S> for Connection {
    type Service = OnConnection<S>;

    /// Wraps the service of this connection.
    fn layer(&self, inner: S) -> OnConnection<S> {
        OnConnection { inner, connection: self.clone() }
    }
}

impl<S, ReqBody, ResBody> Service<Request<ReqBody>> for OnConnection<S>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
{
    type Response = Response<ResBody>;
    type Error = S::Error;
    type Future = OnConnectionFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<ReqBody>) -> Self::Future {
        // It is shared with other requests, and read all the time.
        let connection = self.connection.of_many(request.version() == Version::HTTP_2);
        let exchange = connection.begin(request.method() == Method::CONNECT);
        request.extensions_mut().insert(connection);
        OnConnectionFuture { future: self.inner.call(request), exchange }
    }
}

impl<F, B, E> Future for OnConnectionFuture<F>
where
    F: Future<Output = Result<Response<B>, E>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let response = ready!(this.future.poll(cx));
        if let Ok(response) = &response {
            this.exchange.answered(response.status());
        }
        Poll::Ready(response)
    }
}
