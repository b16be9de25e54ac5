//! A TCP proxy that holds back what passes through it, until it is told to release it.
//!
//! It does not interpret what it carries. An order applies to the present connections; later ones are unaffected.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

/// From the client to the server.
pub(crate) const REQUESTS: usize = 0;
/// From the server to the client.
pub(crate) const REPLIES: usize = 1;

/// Stands between one client and one server. Its connections end when it is dropped.
pub(crate) struct Proxy {
    address: SocketAddr,
    orders: watch::Sender<Orders>,
    seen: Arc<Seen>,
    listening: JoinHandle<()>,
}

/// Connections are numbered; each order applies to those below its number.
#[derive(Clone, Copy, Debug, Default)]
struct Orders {
    hold: [usize; 2],
    /// Both ends are closed, and what was held back is lost.
    cut: usize,
    /// The client's end is closed; what was held back on its way to the server stays so.
    cut_near: usize,
    /// The number of bytes of replies that pass in [`TICK`]; `None` for all.
    rate: Option<usize>,
}

const TICK: Duration = Duration::from_millis(10);

#[derive(Default)]
struct Seen {
    connections: AtomicUsize,
    held: [AtomicUsize; 2],
}

impl Proxy {
    pub(crate) async fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let orders = watch::Sender::new(Orders::default());
        let seen = Arc::<Seen>::default();
        let (watched, counts) = (orders.subscribe(), Arc::clone(&seen));
        let listening = tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let number = counts.connections.fetch_add(1, Ordering::SeqCst);
                let (orders, counts) = (watched.clone(), Arc::clone(&counts));
                tokio::spawn(async move {
                    let far = TcpStream::connect(("127.0.0.1", server)).await?;
                    carry(number, near, far, orders, &counts).await
                });
            }
        });
        Self { address, orders, seen, listening }
    }

    /// Returns `host:port` for clients.
    #[cfg(feature = "etcd")]
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// Returns how many connections there have been.
    pub(crate) fn connections(&self) -> usize {
        self.seen.connections.load(Ordering::SeqCst)
    }

    /// Returns how many bytes are held back.
    pub(crate) fn held(&self, way: usize) -> usize {
        self.seen.held[way].load(Ordering::SeqCst)
    }

    /// Holds back this direction from now on.
    pub(crate) fn hold(&self, way: usize) {
        let all = self.connections();
        self.orders.send_modify(|orders| orders.hold[way] = all);
    }

    /// Releases what was held back, and lets later bytes pass.
    pub(crate) fn flow(&self) {
        self.orders.send_modify(|orders| orders.hold = [0; 2]);
    }

    /// Lets this number of bytes of replies pass in a second.
    pub(crate) fn slow(&self, bytes: usize) {
        self.orders.send_modify(|orders| orders.rate = Some(bytes / 100));
    }

    /// Closes both ends; what was held back is lost.
    pub(crate) fn cut(&self) {
        let all = self.connections();
        self.orders.send_modify(|orders| (orders.cut, orders.hold) = (all, [0; 2]));
    }

    /// Closes the client's end. What was held back on its way to the server is still in flight, and arrives with the
    /// next [`flow`](Self::flow).
    pub(crate) fn cut_near(&self) {
        let all = self.connections();
        self.orders.send_modify(|orders| orders.cut_near = all);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listening.abort();
    }
}

async fn carry(
    number: usize,
    near: TcpStream,
    mut far: TcpStream,
    mut orders: watch::Receiver<Orders>,
    seen: &Seen,
) -> std::io::Result<()> {
    near.set_nodelay(true)?;
    far.set_nodelay(true)?;
    let mut near = Some(near);
    let mut passes = Instant::now();
    let mut held = [Held::new(&seen.held[REQUESTS]), Held::new(&seen.held[REPLIES])];
    loop {
        let now = *orders.borrow_and_update();
        let pause = now.rate.map_or(Duration::ZERO, |_| TICK);
        if number < now.cut || orders.has_changed().is_err() {
            return Ok(());
        }
        if number < now.cut_near {
            near = None;
        }
        if number >= now.hold[REQUESTS] {
            far.write_all(&held[REQUESTS].take(None)).await?;
        }
        if let Some(near) = &mut near
            && number >= now.hold[REPLIES]
            && passes.elapsed() >= pause
        {
            near.write_all(&held[REPLIES].take(now.rate)).await?;
            passes = Instant::now();
        }
        let [requests, replies] = &mut held;
        let Some(end) = &mut near else {
            if requests.bytes.is_empty() {
                break;
            }
            let _ = orders.changed().await;
            continue;
        };
        tokio::select! {
            // The client has left, but what it had sent is still delivered.
            read = end.read_buf(&mut requests.bytes) => if read.unwrap_or(0) == 0 { near = None },
            read = far.read_buf(&mut replies.bytes) => if read? == 0 { return Ok(()) },
            _ = orders.changed() => {}
            () = sleep(pause), if now.rate.is_some() && !replies.bytes.is_empty() => {}
        }
        held.iter_mut().for_each(Held::count);
    }
    // Closed normally, so that the server reads everything first.
    far.shutdown().await?;
    tokio::io::copy(&mut far, &mut tokio::io::sink()).await?;
    Ok(())
}

/// What is held back in one direction of one connection.
struct Held<'a> {
    bytes: Vec<u8>,
    counted: usize,
    all: &'a AtomicUsize,
}

impl<'a> Held<'a> {
    const fn new(all: &'a AtomicUsize) -> Self {
        Self { bytes: Vec::new(), counted: 0, all }
    }

    fn count(&mut self) {
        self.all.fetch_add(self.bytes.len() - self.counted, Ordering::SeqCst);
        self.counted = self.bytes.len();
    }

    /// Returns what there is, up to this much.
    fn take(&mut self, most: Option<usize>) -> Vec<u8> {
        let rest = self.bytes.split_off(most.unwrap_or(usize::MAX).min(self.bytes.len()));
        let taken = std::mem::replace(&mut self.bytes, rest);
        let counted = std::mem::replace(&mut self.counted, self.bytes.len());
        self.all.fetch_sub(counted - self.counted.min(counted), Ordering::SeqCst);
        self.counted = self.counted.min(counted);
        taken
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.take(None);
    }
}
