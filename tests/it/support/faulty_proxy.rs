//! A TCP proxy that misbehaves on demand.

use std::net::SocketAddr;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Builder;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};

/// The bytes read at once, and the most chunks that a delay holds back.
const CHUNK: usize = 16 * 1024;
const CHUNKS: usize = 1024;

/// From the client to the server.
pub(crate) const REQUESTS: usize = 0;
/// From the server to the client.
pub(crate) const REPLIES: usize = 1;

/// Stands between one process and one server.
pub(crate) struct Proxy {
    address: SocketAddr,
    orders: watch::Sender<Orders>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Orders {
    delay: Duration,
    /// Nothing passes to the server or from it, but nothing breaks either.
    stalled: [bool; 2],
    /// Connections of an older generation end at once, with a reset.
    cut: u64,
    /// The same for their directions to the server and from it: these are closed normally.
    closed: [u64; 2],
}

impl Proxy {
    pub(crate) async fn start(server: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let orders = watch::Sender::new(Orders::default());
        let seen = orders.subscribe();
        tokio::spawn(serve(listener, server, move |_| Some(seen.clone())));
        Self { address, orders }
    }

    /// Returns `host:port` for clients.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn delay(&self, delay: Duration) {
        self.orders.send_modify(|orders| orders.delay = delay);
    }

    /// Lets nothing pass until it is told otherwise; then what was held back arrives late.
    pub(crate) fn stall(&self, stalled: bool) {
        self.orders.send_modify(|orders| orders.stalled = [stalled; 2]);
    }

    /// The same for one of the two directions: the other one goes on, and new connections are made.
    pub(crate) fn stall_way(&self, way: usize, stalled: bool) {
        self.orders.send_modify(|orders| orders.stalled[way] = stalled);
    }

    /// Resets every connection.
    pub(crate) fn cut(&self) {
        self.orders.send_modify(|orders| orders.cut += 1);
    }

    /// Closes one of the two directions of every connection: to the server, or from it.
    pub(crate) fn half_close(&self, from_server: bool) {
        self.orders.send_modify(|orders| orders.closed[usize::from(from_server)] += 1);
    }
}

/// The links between the members of a cluster, each of which dials all others.
pub(crate) struct PeerLinks {
    addresses: Vec<SocketAddr>,
    /// For the connections that the first member made to the second.
    orders: Vec<Vec<watch::Sender<Orders>>>,
    /// Its end is that of the proxies.
    _ends: oneshot::Sender<()>,
}

impl PeerLinks {
    /// Starts a proxy before each of these ports. `client_of` returns which member the client at the first address is, if it
    /// is connected to the second.
    pub(crate) fn start(
        ports: &[u16],
        client_of: impl Fn(SocketAddr, SocketAddr) -> Option<usize> + Send + Sync + 'static,
    ) -> Self {
        let orders = || ports.iter().map(|_| watch::Sender::new(Orders::default())).collect();
        let orders: Vec<Vec<_>> = ports.iter().map(|_| orders()).collect();
        let client_of = Arc::new(client_of);
        // On a thread of its own: each commit passes here, so the members would be slow whenever the test is busy.
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let start = |(to, port): (usize, &u16)| {
            let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
            listener.set_nonblocking(true).unwrap();
            let address = listener.local_addr().unwrap();
            let seen: Vec<_> = orders.iter().map(|from| from[to].subscribe()).collect();
            let client_of = Arc::clone(&client_of);
            let port = *port;
            runtime.spawn(async move {
                let listener = TcpListener::from_std(listener).unwrap();
                let orders_for = |client| Some(seen[client_of(client, address)?].clone());
                serve(listener, port, orders_for).await;
            });
            address
        };
        let addresses = ports.iter().enumerate().map(start).collect();
        let (ends, ended) = oneshot::channel();
        thread::spawn(move || _ = runtime.block_on(ended));
        Self { addresses, orders, _ends: ends }
    }

    /// Returns the addresses of the proxies.
    pub(crate) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Stalls what one member says to another one, whichever of the two made the connection.
    pub(crate) fn stall(&self, from: usize, to: usize, stalled: bool) {
        for ((client, server), way) in [((from, to), REQUESTS), ((to, from), REPLIES)] {
            self.orders[client][server].send_modify(|orders| orders.stalled[way] = stalled);
        }
    }
}

/// Passes on all connections to a server, as is ordered for their clients.
async fn serve(
    listener: TcpListener,
    server: u16,
    orders_for: impl Fn(SocketAddr) -> Option<watch::Receiver<Orders>>,
) {
    while let Ok((near, client)) = listener.accept().await {
        // A client that left at once is not known any more.
        let Some(orders) = orders_for(client) else { continue };
        tokio::spawn(async move {
            if let Ok(far) = TcpStream::connect(("127.0.0.1", server)).await {
                join(near, far, orders).await;
            }
        });
    }
}

async fn join(near: TcpStream, far: TcpStream, mut orders: watch::Receiver<Orders>) {
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let born = *orders.borrow_and_update();
    let ((mut from_near, mut to_near), (mut from_far, mut to_far)) =
        (near.into_split(), far.into_split());
    let cut = {
        let there = pump(&mut from_near, &mut to_far, orders.clone(), REQUESTS, born);
        let back = pump(&mut from_far, &mut to_near, orders.clone(), REPLIES, born);
        tokio::select! {
            _ = async { tokio::join!(there, back) } => false,
            _ = orders.wait_for(|orders| orders.cut > born.cut) => true,
        }
    };
    if cut {
        // With this set, closing sends a reset.
        let _ = from_near.as_ref().set_zero_linger();
        let _ = from_far.as_ref().set_zero_linger();
    }
}

/// Passes on what comes, as ordered, until its end.
async fn pump(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    orders: watch::Receiver<Orders>,
    way: usize,
    born: Orders,
) {
    let (came, mut coming) = mpsc::channel::<(Instant, Vec<u8>)>(CHUNKS);
    let read = async move {
        loop {
            let mut chunk = vec![0; CHUNK];
            match from.read(&mut chunk).await {
                Ok(length @ 1..) => chunk.truncate(length),
                _ => return,
            }
            if came.send((Instant::now(), chunk)).await.is_err() {
                return;
            }
        }
    };
    let mut seen = orders.clone();
    let write = async {
        while let Some((at, chunk)) = coming.recv().await {
            let delay = seen.borrow().delay;
            sleep_until(at + delay).await;
            if seen.wait_for(|orders| !orders.stalled[way]).await.is_err()
                || to.write_all(&chunk).await.is_err()
            {
                break;
            }
        }
        // A stall holds back the end, too.
        let _ = seen.wait_for(|orders| !orders.stalled[way]).await;
    };
    let mut closing = orders;
    tokio::select! {
        _ = async { tokio::join!(read, write) } => {}
        _ = closing.wait_for(|orders| orders.closed[way] > born.closed[way]) => {}
    }
    let _ = to.shutdown().await;
}
