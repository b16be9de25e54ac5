//! Real servers and real clients on loopback.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::BufStream;
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;
use tokio::task::JoinHandle;

/// A listener whose connections are not sockets themselves.
pub(crate) struct Buffered(TcpListener);

impl Buffered {
    pub(crate) async fn bind() -> Self {
        Self(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }
}

impl Listener for Buffered {
    type Io = BufStream<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (io, address) = Listener::accept(&mut self.0).await;
        (BufStream::new(io), address)
    }

    fn local_addr(&self) -> std::io::Result<SocketAddr> {
        self.0.local_addr()
    }
}

/// A server on a free loopback port, as `axum::serve` runs it. It stops listening when it is dropped.
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    task: JoinHandle<()>,
}

impl Server {
    pub(crate) async fn start(router: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = router.into_make_service_with_connect_info::<SocketAddr>();
        let task = tokio::spawn(async move { axum::serve(listener, service).await.unwrap() });
        Self { address, task }
    }

    /// The same, over connections that can keep a permit.
    pub(crate) async fn start_holding(router: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let task = tokio::spawn(async move {
            tower_semaphore::limit::serve(listener, router).await.unwrap();
        });
        Self { address, task }
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// Opens a connection, and makes one request on it.
    pub(crate) async fn get(&self, path: &str) -> Response<Incoming> {
        self.send(get(path)).await
    }

    /// Opens a connection, and makes this request on it. The connection lives as long as the body.
    pub(crate) async fn send(&self, request: Request<Full<Bytes>>) -> Response<Incoming> {
        self.http1().await.send(request).await.unwrap()
    }

    pub(crate) async fn http1(&self) -> Http1 {
        let (sender, connection) = http1::handshake(self.connect().await).await.unwrap();
        let task = tokio::spawn(async move {
            let _ = connection.with_upgrades().await;
        });
        Http1 { sender, task }
    }

    pub(crate) async fn http2(&self) -> http2::SendRequest<Full<Bytes>> {
        let io = self.connect().await;
        let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        tokio::spawn(async move {
            let _ = connection.await;
        });
        sender
    }

    async fn connect(&self) -> TokioIo<TcpStream> {
        TokioIo::new(TcpStream::connect(self.address).await.unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// One HTTP/1 connection.
pub(crate) struct Http1 {
    sender: http1::SendRequest<Full<Bytes>>,
    task: JoinHandle<()>,
}

impl Http1 {
    pub(crate) async fn send(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> hyper::Result<Response<Incoming>> {
        self.sender.send_request(request).await
    }

    /// Sends a request, whose response can be awaited later.
    pub(crate) fn begin(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> JoinHandle<hyper::Result<Response<Incoming>>> {
        tokio::spawn(self.sender.send_request(request))
    }

    /// Closes the socket, whatever is in flight.
    pub(crate) fn cut(self) {
        self.task.abort();
    }
}

pub(crate) fn get(path: &str) -> Request<Full<Bytes>> {
    Request::get(path).header("host", "localhost").body(Full::default()).unwrap()
}

pub(crate) async fn text(response: Response<Incoming>) -> String {
    let bytes = response.into_body().collect().await.unwrap().to_bytes();
    String::from_utf8(bytes.into()).unwrap()
}

/// The response that curl got.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: String,
}

impl Reply {
    /// Returns the value of a header that is there once.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.get_all(name).iter();
        let value = values.next()?;
        assert_eq!(values.next(), None, "{name} stands there twice");
        Some(value.to_str().unwrap())
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// Makes a request with a client that knows nothing of this crate: curl.
pub(crate) async fn curl(url: &str, args: &[&str]) -> Reply {
    let limit = Duration::from_secs(20);
    let output = Command::new("curl")
        .args(["-q", "-s", "-i", "--noproxy", "*"])
        .args(args)
        .arg(url)
        .kill_on_drop(true)
        .output();
    let output = tokio::time::timeout(limit, output).await.expect("curl ends in time");
    let output = output.expect("curl is installed");
    assert!(output.status.success(), "curl: {}", output.status);
    let text = String::from_utf8(output.stdout).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    let mut lines = head.split("\r\n");
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines.map(|line| {
        let (name, value) = line.split_once(':').unwrap();
        let value = HeaderValue::from_str(value.trim()).unwrap();
        (name.parse::<HeaderName>().unwrap(), value)
    });
    Reply { status, headers: headers.collect(), body: body.to_owned() }
}
