//! A slow network: a proxy before Redis that delays everything by half a round trip in each direction.
//!
//! It uses sleeping threads, because Tokio's timers have a resolution of 1 ms.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{JoinHandle, sleep, spawn};
use std::time::{Duration, Instant};

/// A thread on Linux sleeps longer than it asked for, by this and the time until it is scheduled.
const TIMER_SLACK: Duration = Duration::from_micros(50);

/// Bytes, and when they are due on the other side.
type Delayed = (Instant, Vec<u8>);

/// Stops accepting connections when this is dropped; each thread ends with its connection.
pub(crate) struct Proxy {
    address: SocketAddr,
    is_closed: Arc<AtomicBool>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Delayed bytes do not delay those behind them, so throughput is not limited.
    pub(crate) fn start(server: SocketAddr, round_trip: Duration) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address");
        let is_closed = Arc::new(AtomicBool::new(false));
        let closed = Arc::clone(&is_closed);
        let acceptor = spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if closed.load(Ordering::Relaxed) {
                    break;
                }
                let Ok(server) = TcpStream::connect(server) else { continue };
                connect(&client, &server, round_trip / 2);
                connect(&server, &client, round_trip / 2);
            }
        });
        Self { address, is_closed, acceptor: Some(acceptor) }
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.is_closed.store(true, Ordering::Relaxed);
        // The flag is read at the next connection.
        let is_woken = TcpStream::connect(self.address).is_ok();
        if let Some(acceptor) = self.acceptor.take().filter(|_| is_woken) {
            let _ = acceptor.join();
        }
    }
}

/// Copies one direction.
fn connect(from: &TcpStream, to: &TcpStream, delay: Duration) {
    to.set_nodelay(true).expect("a socket");
    let (from, to) = (from.try_clone().expect("a socket"), to.try_clone().expect("a socket"));
    let (under_way, arriving) = channel();
    spawn(move || read(from, &under_way, delay));
    spawn(move || write(to, &arriving));
}

fn read(mut from: TcpStream, under_way: &Sender<Delayed>, delay: Duration) {
    let mut buffer = vec![0; 64 * 1024];
    while let Ok(length @ 1..) = from.read(&mut buffer) {
        if under_way.send((Instant::now() + delay, buffer[..length].to_vec())).is_err() {
            break;
        }
    }
}

fn write(mut to: TcpStream, arriving: &Receiver<Delayed>) {
    for (due, bytes) in arriving {
        let left = due.saturating_duration_since(Instant::now());
        sleep(left.saturating_sub(TIMER_SLACK));
        if to.write_all(&bytes).is_err() {
            break;
        }
    }
    // The peer sees the end, and ends the other direction.
    let _ = to.shutdown(Shutdown::Both);
}
