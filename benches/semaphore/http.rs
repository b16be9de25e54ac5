//! An Axum server with the layer, beside one with a hand-written middleware.
//!
//! Each server is a process with one thread. This process makes the load: 64 kept-alive connections, with one request
//! at a time on each.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::Request;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::serve::ListenerExt;
use bytes::Bytes;
use futures_util::future::join_all;
use http::StatusCode;
use http_body_util::{BodyExt, Empty};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use serde::{Deserialize, Serialize};
use tokio::net::{TcpListener, TcpStream};
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};

use super::child::{self, Child, Parent};
use super::redis::{Redis, Usage};
use super::reference::Reference;
use super::stats::{each, median, micros, quantile};
use super::table::{Bound, Row, number};
use super::{Context, runtime};

const CASE: &str = "http";
const CONNECTIONS: usize = 64;
const LIMIT: u32 = 1000;

#[derive(Clone, Copy, Serialize, Deserialize)]
enum Before {
    Layer,
    ByHand,
    Nothing,
}

#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
    before: Before,
}

struct Round {
    requests_a_second: f64,
    p50: f64,
    p99: f64,
    cpu: f64,
}

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let runtime = runtime();
    let servers = [Before::Layer, Before::ByHand, Before::Nothing].map(|before| {
        let mut child = Child::start(&child::Job::Serve(Job { url: redis.url(), before }));
        let address: SocketAddr = child.hear().parse().expect("an address");
        (runtime.block_on(connections(address)), child)
    });
    let time = context.seconds(0.7, 3.0);
    let mut servers = servers.map(|(connections, child)| (connections, child, Vec::new()));
    for (connections, _, _) in &mut servers {
        runtime.block_on(round(&redis, connections, time / 5));
    }
    for turn in 0..context.rounds() {
        for side in 0..3 {
            let (connections, _, rounds) = &mut servers[(turn + side) % 3];
            rounds.push(runtime.block_on(round(&redis, connections, time)));
        }
    }
    let [layer, by_hand, nothing] = servers.map(|(_, _, rounds)| rounds);
    let rate = |rounds: &[Round]| each(rounds, |r| r.requests_a_second);
    let table = &mut context.table;
    table.add(
        Row::new(CASE, "with the layer on Redis", "requests/s", &rate(&layer))
            .against("by hand", &rate(&layer), &rate(&by_hand))
            .bound(Bound::RatioLeast(1.3))
            .note(format!(
                "Redis: {} µs CPU a request, by hand {}",
                number(median(&each(&layer, |r| r.cpu))),
                number(median(&each(&by_hand, |r| r.cpu)))
            )),
    );
    let none = rate(&nothing);
    table.add(Row::new(CASE, "without any limit", "requests/s", &none));
    let both = |figure: fn(&Round) -> f64| (each(&layer, figure), each(&by_hand, figure));
    let (ours, theirs) = both(|r| r.p50);
    table.add(Row::new(CASE, "latency, p50", "µs", &ours).against("by hand", &ours, &theirs));
    let (ours, theirs) = both(|r| r.p99);
    table.add(Row::new(CASE, "latency, p99", "µs", &ours).against("by hand", &ours, &theirs));
}

pub(crate) type Connection = SendRequest<Empty<Bytes>>;

async fn connections(address: SocketAddr) -> Vec<Connection> {
    join_all((0..CONNECTIONS).map(|_| connect(address))).await
}

/// A connection that a task of its own drives.
pub(crate) async fn connect(address: SocketAddr) -> Connection {
    let stream = TcpStream::connect(address).await.expect("a connection");
    stream.set_nodelay(true).expect("a socket");
    let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("a handshake");
    tokio::spawn(connection);
    sender
}

async fn round(redis: &Redis, connections: &mut [Connection], time: Duration) -> Round {
    let before: Usage = redis.usage();
    let began = Instant::now();
    let times = connections.iter_mut().map(|connection| load(connection, began + time));
    let times: Vec<f64> = join_all(times).await.concat();
    let took = began.elapsed().as_secs_f64();
    let requests = times.len() as f64;
    Round {
        requests_a_second: requests / took,
        p50: median(&times),
        p99: quantile(&times, 0.99),
        cpu: redis.usage().since(before).cpu_us / requests,
    }
}

/// Returns how long each request took, in µs.
async fn load(connection: &mut Connection, end: Instant) -> Vec<f64> {
    let mut times = Vec::new();
    while Instant::now() < end {
        let request = Request::get("/").header("host", "bench").body(Empty::new());
        let began = Instant::now();
        connection.ready().await.expect("a connection");
        let response = connection.send_request(request.expect("valid")).await.expect("a response");
        assert_eq!(response.status(), StatusCode::OK);
        response.into_body().collect().await.expect("a body");
        times.push(micros(began.elapsed()));
    }
    times
}

pub(crate) fn child(job: &Job, parent: &Parent) {
    runtime().block_on(async {
        let router = Router::new().route("/", get(async || "hello"));
        let router = match job.before {
            Before::Layer => router.layer(layer(&job.url)),
            Before::ByHand => {
                let reference = Reference::connect(&job.url).await;
                router.layer(from_fn(move |request: Request, next: Next| {
                    by_hand(reference.clone(), request, next)
                }))
            }
            Before::Nothing => router,
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        parent.say(&listener.local_addr().expect("an address").to_string());
        let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("a socket"));
        axum::serve(listener, router).await.expect("never ends");
    });
}

fn layer(url: &str) -> ConcurrencyLimitLayer {
    let semaphore = Semaphore::redis(url).expect("a URL");
    ConcurrencyLimitLayer::builder(&semaphore, "bench").limit(LIMIT).build().expect("in range")
}

async fn by_hand(mut reference: Reference, request: Request, next: Next) -> Response {
    let Some(id) = reference.acquire("reference:{bench}", LIMIT).await else {
        return StatusCode::TOO_MANY_REQUESTS.into_response();
    };
    let response = next.run(request).await;
    reference.release("reference:{bench}", &id).await;
    response
}
