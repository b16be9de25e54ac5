//! 10,000 connections of HTTP/1.1, each with an unread upload while its request waits: the cost of checking their
//! sockets for clients that have left, beside the same connections without these checks.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::thread::sleep;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufStream};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, ServiceExt};
use tower_semaphore::limit::ConnectionIo;
use tower_semaphore::{ConcurrencyLimitLayer, Policy, Semaphore};

use super::child::{self, Child, Parent};
use super::table::{Bound, Row, number};
use super::watchdog::cpu_ns;
use super::{Context, descriptors, runtime};

const CASE: &str = "queued";
const QUEUED: u32 = 10_000;
const NAME: &str = "bench";
const HOUR: Duration = Duration::from_secs(3600);
const UPLOAD: &[u8] =
    b"POST / HTTP/1.1\r\nhost: bench\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n";

#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    queued: u32,
    is_looked_at: bool,
}

pub(crate) fn run(context: &mut Context) {
    let queued = context.either(2_000, QUEUED).min(descriptors().saturating_sub(100));
    let (time, rounds) = (context.seconds(1.0, 4.0), context.rounds());
    // One after the other: each client needs a file descriptor.
    let [looked_at, not] = [true, false].map(|is_looked_at| {
        let mut child = Child::start(&child::Job::Queue(Job { queued, is_looked_at }));
        let address: SocketAddr = child.hear().parse().expect("an address");
        let runtime = runtime();
        let _clients = runtime.block_on(clients(address, queued));
        assert_eq!(child.hear(), "queued");
        let share = |_| {
            let before = cpu_ns(&child);
            sleep(time);
            let used = (cpu_ns(&child) - before) / time.as_nanos() as f64;
            100.0 * used * f64::from(QUEUED) / f64::from(queued)
        };
        (0..rounds).map(share).collect::<Vec<f64>>()
    });
    let looks: Vec<f64> = looked_at.iter().zip(&not).map(|(all, rest)| all - rest).collect();
    context.table.add(
        Row::new(CASE, "CPU for looks at the sockets of 10,000 waiting", "%", &looks)
            .bound(Bound::Most(2.0))
            .note(format!("of a core; measured with {}", number(f64::from(queued)))),
    );
    context.table.add(
        Row::new(CASE, "CPU of the process in which they wait", "%", &looked_at).against(
            "not looked at",
            &looked_at,
            &not,
        ),
    );
}

async fn clients(address: SocketAddr, count: u32) -> Vec<TcpStream> {
    let mut clients = Vec::new();
    for _ in 0..count {
        let mut socket = TcpStream::connect(address).await.expect("a connection");
        socket.write_all(UPLOAD).await.expect("it is read");
        clients.push(socket);
    }
    clients
}

pub(crate) fn child(job: &Job, parent: &Parent) {
    runtime().block_on(async {
        let semaphore = Semaphore::in_memory();
        let permit = semaphore.acquire(NAME, &Policy::new(1)).await.expect("it is free");
        let builder = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(1);
        let layer = builder.wait_timeout(HOUR).max_queue(QUEUED).build().expect("in range");
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        parent.say(&listener.local_addr().expect("an address").to_string());
        for _ in 0..job.queued {
            let (socket, _) = listener.accept().await.expect("a connection");
            if job.is_looked_at {
                tokio::spawn(serve(ConnectionIo::new(socket), layer.clone()));
            } else {
                // Without a known socket.
                tokio::spawn(serve(ConnectionIo::new(BufStream::new(socket)), layer.clone()));
            }
        }
        let waiting = async || semaphore.inspect(NAME).await.expect("it answers").waiting;
        while waiting().await < u64::from(job.queued) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        parent.say("queued");
        std::future::pending::<()>().await;
        drop(permit);
    });
}

async fn serve<I>(io: ConnectionIo<I>, layer: ConcurrencyLimitLayer)
where
    I: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = io.connection();
    let served = tower::service_fn(async |_: Request<Incoming>| {
        Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
    });
    let served = connection.layer(layer.layer(served));
    let service = service_fn(move |request: Request<Incoming>| served.clone().oneshot(request));
    let _ = http1::Builder::new().serve_connection(TokioIo::new(io), service).await;
}
