//! Plain sockets: both ends of HTTP, byte by byte.

use std::net::SocketAddr;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// The longest time for a read.
const PATIENCE: Duration = Duration::from_secs(10);

/// One end of a connection.
pub(crate) struct Wire {
    stream: TcpStream,
    read: Vec<u8>,
}

/// A server that answers what the test says.
pub(crate) struct WireServer {
    listener: TcpListener,
}

impl WireServer {
    pub(crate) async fn start() -> Self {
        Self { listener: TcpListener::bind("127.0.0.1:0").await.unwrap() }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.listener.local_addr().unwrap()
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address())
    }

    pub(crate) async fn accept(&self) -> Wire {
        let accepted = tokio::time::timeout(PATIENCE, self.listener.accept());
        Wire::new(accepted.await.expect("a connection comes").unwrap().0)
    }

    /// Returns whether no client comes for a while.
    pub(crate) async fn is_left_alone(&self) -> bool {
        tokio::time::timeout(Duration::from_millis(200), self.listener.accept()).await.is_err()
    }

    /// Answers each request on each connection with 200, and with its own head as the body. Requests must have no body.
    pub(crate) fn echo_heads(self) {
        tokio::spawn(async move {
            loop {
                let mut wire = self.accept_when_it_comes().await;
                tokio::spawn(async move {
                    while let Some(head) = wire.try_head().await {
                        let length = head.len();
                        let head =
                            format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{head}");
                        wire.send(head).await;
                    }
                });
            }
        });
    }

    async fn accept_when_it_comes(&self) -> Wire {
        Wire::new(self.listener.accept().await.unwrap().0)
    }
}

impl Wire {
    fn new(stream: TcpStream) -> Self {
        stream.set_nodelay(true).unwrap();
        Self { stream, read: Vec::new() }
    }

    /// Connects to `http://address`.
    pub(crate) async fn connect(url: &str) -> Self {
        let address = url.strip_prefix("http://").unwrap();
        Self::new(TcpStream::connect(address).await.unwrap())
    }

    pub(crate) fn local(&self) -> SocketAddr {
        self.stream.local_addr().unwrap()
    }

    /// Sends it, if the other end still reads.
    pub(crate) async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        let _ = self.stream.write_all(bytes.as_ref()).await;
    }

    /// Sends until the other end accepts no more, or is gone. Returns how much that was.
    pub(crate) async fn fill(&mut self) -> usize {
        let chunk = vec![b'x'; 64 * 1024];
        let mut sent = 0;
        loop {
            let write = self.stream.write(&chunk);
            match tokio::time::timeout(Duration::from_millis(500), write).await {
                Ok(Ok(written)) => sent += written,
                Ok(Err(_)) | Err(_) => return sent,
            }
        }
    }

    /// Closes the connection with a reset.
    pub(crate) fn reset(self) {
        SockRef::from(&self.stream).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// Returns the next head, with the empty line; `None` if the connection ends before it does.
    pub(crate) async fn try_head(&mut self) -> Option<String> {
        loop {
            if let Some(at) = self.read.windows(4).position(|four| four == b"\r\n\r\n") {
                let rest = self.read.split_off(at + 4);
                let head = std::mem::replace(&mut self.read, rest);
                return Some(String::from_utf8_lossy(&head).to_lowercase());
            }
            if self.read_some().await == 0 {
                return None;
            }
        }
    }

    /// The same, where it must come.
    pub(crate) async fn head(&mut self) -> String {
        tokio::time::timeout(PATIENCE, self.try_head())
            .await
            .unwrap_or_else(|_| panic!("only {:?}", String::from_utf8_lossy(&self.read)))
            .expect("a head comes before the end")
    }

    /// Returns the next status, with the rest of its head.
    pub(crate) async fn status(&mut self) -> (u16, String) {
        let head = self.head().await;
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
        (status.unwrap_or_else(|| panic!("{head}")), head)
    }

    /// Returns the next bytes, this many, as text.
    pub(crate) async fn bytes(&mut self, count: usize) -> String {
        String::from_utf8(self.raw(count).await).unwrap()
    }

    /// Returns the next bytes, this many.
    pub(crate) async fn raw(&mut self, count: usize) -> Vec<u8> {
        let all = async {
            while self.read.len() < count {
                assert_ne!(self.read_some().await, 0, "only {} bytes", self.read.len());
            }
        };
        tokio::time::timeout(PATIENCE, all).await.expect("all come in time");
        let rest = self.read.split_off(count);
        std::mem::replace(&mut self.read, rest)
    }

    /// Returns everything that comes until the other end closes, or breaks, the connection.
    pub(crate) async fn rest(&mut self) -> String {
        let all = async { while self.read_some().await > 0 {} };
        tokio::time::timeout(PATIENCE, all).await.expect("the connection ends");
        String::from_utf8_lossy(&std::mem::take(&mut self.read)).into_owned()
    }

    /// Returns whether the other end has closed the connection, as far as is known.
    pub(crate) async fn is_over(&mut self) -> bool {
        let read = tokio::time::timeout(Duration::from_millis(1), self.read_some());
        matches!(read.await, Ok(0))
    }

    /// Returns what comes within a moment.
    pub(crate) async fn glimpse(&mut self) -> String {
        let all = async { while self.read_some().await > 0 {} };
        let _ = tokio::time::timeout(Duration::from_millis(300), all).await;
        String::from_utf8_lossy(&std::mem::take(&mut self.read)).into_owned()
    }

    async fn read_some(&mut self) -> usize {
        self.stream.read_buf(&mut self.read).await.unwrap_or(0)
    }
}
