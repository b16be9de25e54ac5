//! A TCP proxy that misbehaves on demand.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};

/// The bytes read at once, and the most chunks that a delay holds back.
const CHUNK: usize = 16 * 1024;
const CHUNKS: usize = 1024;

/// Stands between one process and one server.
pub(crate) struct Proxy {
    address: SocketAddr,
    orders: watch::Sender<Orders>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Orders {
    delay: Duration,
    /// Nothing passes, but nothing breaks either.
    stalled: bool,
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
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                let orders = seen.clone();
                tokio::spawn(async move {
                    if let Ok(far) = TcpStream::connect(("127.0.0.1", server)).await {
                        join(near, far, orders).await;
                    }
                });
            }
        });
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
        self.orders.send_modify(|orders| orders.stalled = stalled);
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

async fn join(near: TcpStream, far: TcpStream, mut orders: watch::Receiver<Orders>) {
    near.set_nodelay(true).unwrap();
    far.set_nodelay(true).unwrap();
    let born = *orders.borrow_and_update();
    let ((mut from_near, mut to_near), (mut from_far, mut to_far)) =
        (near.into_split(), far.into_split());
    let cut = {
        let there = pump(&mut from_near, &mut to_far, orders.clone(), 0, born);
        let back = pump(&mut from_far, &mut to_near, orders.clone(), 1, born);
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
            if seen.wait_for(|orders| !orders.stalled).await.is_err()
                || to.write_all(&chunk).await.is_err()
            {
                break;
            }
        }
        // A stall holds back the end, too.
        let _ = seen.wait_for(|orders| !orders.stalled).await;
    };
    let mut closing = orders;
    tokio::select! {
        _ = async { tokio::join!(read, write) } => {}
        _ = closing.wait_for(|orders| orders.closed[way] > born.closed[way]) => {}
    }
    let _ = to.shutdown().await;
}
