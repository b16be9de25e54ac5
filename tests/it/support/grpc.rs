//! A gRPC server and its clients, hand-written: nothing is generated.

use std::convert::Infallible;
use std::future::pending;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures_util::{Stream, StreamExt, stream};
use http::uri::PathAndQuery;
use http::{Request, Response};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tonic::body::Body;
use tonic::client::GrpcService;
use tonic::server::NamedService;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Status, Streaming};
use tonic_prost::ProstCodec;
use tower::{BoxError, Service, service_fn};
use tower_semaphore::ConcurrencyLimitLayer;

pub(crate) const UNARY: &str = "/test.Echo/Unary";
const BIDI: &str = "/test.Echo/Bidi";
/// A message that is never answered, in unary calls.
pub(crate) const NEVER: &str = "never";
const WATCH: &str = "/test.Echo/Watch";

type Codec = ProstCodec<String, String>;

/// Returns what comes: one message; each of a stream as it comes; or one, and then nothing more.
#[derive(Clone, Debug)]
pub(crate) struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl Service<Request<Body>> for Echo {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Codec::default());
            if request.uri().path() == BIDI {
                let echo = |request: tonic::Request<Streaming<String>>| async {
                    Ok::<_, Status>(tonic::Response::new(request.into_inner()))
                };
                return Ok(grpc.streaming(service_fn(echo), request).await);
            }
            if request.uri().path() == WATCH {
                let watch = |request: tonic::Request<String>| async {
                    let first = stream::iter([Ok(request.into_inner())]);
                    Ok::<_, Status>(tonic::Response::new(first.chain(stream::pending())))
                };
                return Ok(grpc.server_streaming(service_fn(watch), request).await);
            }
            let echo = |request: tonic::Request<String>| async {
                if request.get_ref() == NEVER {
                    pending::<()>().await;
                }
                Ok::<_, Status>(tonic::Response::new(request.into_inner()))
            };
            Ok(grpc.unary(service_fn(echo), request).await)
        })
    }
}

/// [`Echo`] under a layer, on a free loopback port; stops when it is dropped.
pub(crate) struct GrpcServer {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl GrpcServer {
    pub(crate) async fn start(layer: ConcurrencyLimitLayer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = Server::builder().layer(layer).add_service(Echo);
        let serve = server.serve_with_incoming(TcpIncoming::from(listener));
        Self { address, task: tokio::spawn(async { serve.await.unwrap() }) }
    }

    pub(crate) async fn channel(&self) -> Channel {
        Endpoint::try_from(format!("http://{}", self.address)).unwrap().connect().await.unwrap()
    }

    /// Returns a client on a connection of its own.
    pub(crate) async fn client(&self) -> Client<Channel> {
        Client::new(self.channel().await)
    }
}

impl Drop for GrpcServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// What a generated client does, for [`Echo`].
#[derive(Clone)]
pub(crate) struct Client<T> {
    grpc: tonic::client::Grpc<T>,
}

impl<T> Client<T>
where
    T: GrpcService<Body>,
    T::ResponseBody: Send + 'static,
    <T::ResponseBody as http_body::Body>::Error: Into<BoxError>,
{
    pub(crate) fn new(service: T) -> Self {
        Self { grpc: tonic::client::Grpc::new(service) }
    }

    pub(crate) async fn unary(&mut self, text: &str) -> Result<String, Status> {
        self.ready().await;
        let request = tonic::Request::new(text.to_owned());
        let path = PathAndQuery::from_static(UNARY);
        Ok(self.grpc.unary(request, path, Codec::default()).await?.into_inner())
    }

    pub(crate) async fn bidi(
        &mut self,
        texts: impl Stream<Item = String> + Send + 'static,
    ) -> Result<Streaming<String>, Status> {
        self.ready().await;
        let request = tonic::Request::new(texts);
        let path = PathAndQuery::from_static(BIDI);
        Ok(self.grpc.streaming(request, path, Codec::default()).await?.into_inner())
    }

    pub(crate) async fn watch(&mut self, text: &str) -> Result<Streaming<String>, Status> {
        self.ready().await;
        let request = tonic::Request::new(text.to_owned());
        let path = PathAndQuery::from_static(WATCH);
        Ok(self.grpc.server_streaming(request, path, Codec::default()).await?.into_inner())
    }

    async fn ready(&mut self) {
        assert!(self.grpc.ready().await.is_ok(), "the channel is ready");
    }
}
