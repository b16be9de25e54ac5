//! Up to 5,000 clients at once, through two Axum servers that share one limit of 50: how long they wait, beside the
//! ideal queue, and what that costs Redis.
//!
//! Ideally the k-th of N clients waits ⌊k / limit⌋ holds. A hold is what the handlers measured on average, because a
//! sleep of 20 ms takes longer on a busy machine. A client's wait is the time from the common start to the head of its
//! response, less its own hold: the work of clients and servers for so many requests counts against the queue.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use axum::serve::ListenerExt;
use futures_util::future::join_all;
use http::header::RETRY_AFTER;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use serde::{Deserialize, Serialize};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tower_semaphore::limit::serve;
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};

use super::child::{self, Child, Parent};
use super::http::{Connection, connect};
use super::plots::{self, Line};
use super::redis::Redis;
use super::stats::{each, mean, median};
use super::table::{Bound, Row, number};
use super::{Context, descriptors, runtime};

const CASE: &str = "ladder";
const NAME: &str = "ladder";
const RUNGS: [usize; 5] = [100, 500, 1000, 2000, 5000];
const QUICK_RUNGS: [usize; 2] = [100, 500];
const PROCESSES: usize = 2;
const LIMIT: u32 = 50;
const HOLD: Duration = Duration::from_millis(20);
const WAIT: Duration = Duration::from_secs(30);

#[derive(Serialize, Deserialize)]
pub(crate) struct Job {
    url: String,
}

/// The answer to a client.
enum Answer {
    /// 200, after this time in ms.
    Served { wait: f64, hold: f64 },
    /// 429 or 503, with the time to come back.
    Refused,
    /// Another response, a broken connection, or no answer in time.
    Other,
}

/// The waits of all clients, in ms.
#[derive(Default)]
struct Round {
    p50: f64,
    p99: f64,
    ideal_p50: f64,
    ideal_p99: f64,
    hold: f64,
    refused: f64,
    other: f64,
    /// In percent of a core.
    redis: f64,
}

pub(crate) fn run(context: &mut Context) {
    let redis = Redis::start();
    let runtime = runtime();
    let mut servers: Vec<Child> = (0..PROCESSES)
        .map(|_| Child::start(&child::Job::Ladder(Job { url: redis.url() })))
        .collect();
    let addresses: Vec<SocketAddr> =
        servers.iter_mut().map(|server| server.hear().parse().expect("an address")).collect();

    let rungs: &[usize] = context.either(&QUICK_RUNGS, &RUNGS);
    // Each client needs a file descriptor.
    let most = usize::try_from(descriptors().saturating_sub(100)).unwrap_or(usize::MAX);
    let (possible, left_out): (Vec<usize>, Vec<usize>) =
        rungs.iter().partition(|clients| **clients <= most);
    let ladder: Vec<(usize, Vec<Round>)> = runtime.block_on(async {
        let semaphore = redis.semaphore();
        let mut connections = Vec::new();
        for client in 0..possible.iter().copied().max().unwrap_or(0) {
            connections.push(connect(addresses[client % PROCESSES]).await);
        }
        // Each server connects to Redis.
        round(&redis, &semaphore, &mut connections[..PROCESSES]).await;
        let mut ladder = Vec::new();
        for clients in possible {
            let mut rounds = Vec::new();
            for _ in 0..context.rounds() {
                rounds.push(round(&redis, &semaphore, &mut connections[..clients]).await);
            }
            ladder.push((clients, rounds));
        }
        semaphore.shutdown().await;
        ladder
    });
    for (clients, rounds) in &ladder {
        rows(context, *clients, rounds);
    }
    for clients in left_out {
        context.table.add(
            Row::new(CASE, format!("{clients} clients"), "", &[])
                .note(format!("not measured: only {most} clients can be connected (ulimit -n)")),
        );
    }
    plot(context, &ladder);
}

fn rows(context: &mut Context, clients: usize, rounds: &[Round]) {
    const IDEAL: &str = "ideal queue";
    let table = &mut context.table;
    let holds = median(&each(rounds, |r| r.hold));
    let nominal_ms = HOLD.as_secs_f64() * 1e3;
    for (what, figure, ideal, most) in [
        ("p50", (|r| r.p50) as fn(&Round) -> f64, (|r| r.ideal_p50) as fn(&Round) -> f64, 1.1),
        ("p99", |r| r.p99, |r| r.ideal_p99, 1.2),
    ] {
        let (ours, ideal) = (each(rounds, figure), each(rounds, ideal));
        let with_nominal = median(&ours) / median(&ideal) * holds / nominal_ms;
        table.add(
            Row::new(CASE, format!("{clients} clients: wait, {what}"), "ms", &ours)
                .against(IDEAL, &ours, &ideal)
                .bound(Bound::RatioMost(most))
                .note(format!(
                    "holds of {} ms; with {nominal_ms} ms in the ideal: {}×",
                    number(holds),
                    number(with_nominal)
                )),
        );
    }
    table.add(
        Row::new(CASE, format!("{clients} clients: Redis' CPU"), "%", &each(rounds, |r| r.redis))
            .bound(Bound::Most(50.0))
            .note("of a core"),
    );
    let other: f64 = each(rounds, |r| r.other).iter().sum();
    let refused: f64 = each(rounds, |r| r.refused).iter().sum();
    let all = clients * rounds.len();
    table.add(
        Row::new(CASE, format!("{clients} clients: neither 200 nor a refusal"), "", &[other])
            .bound(Bound::Most(0.0))
            .counted()
            .note(format!("of {all} in all rounds, of which {refused} were refused")),
    );
}

fn plot(context: &Context, ladder: &[(usize, Vec<Round>)]) {
    let line = |name, figure: fn(&Round) -> f64| {
        let point = |(clients, rounds): &(usize, Vec<Round>)| {
            (*clients as f64, median(&each(rounds, figure)))
        };
        Line { name, points: ladder.iter().map(point).collect() }
    };
    plots::lines(
        &context.directory.join("ladder.svg"),
        "Waiting for one of 50 permits, all at once through two processes, holds of 20 ms",
        ("clients", "ms from request to permit"),
        &[
            line("p50", |r| r.p50),
            line("p99", |r| r.p99),
            line("p50 of the ideal queue", |r| r.ideal_p50),
            line("p99 of the ideal queue", |r| r.ideal_p99),
        ],
        false,
    );
}

async fn round(redis: &Redis, semaphore: &Semaphore, connections: &mut [Connection]) -> Round {
    until_free(semaphore).await;
    let before = redis.usage();
    let began = Instant::now();
    let answers = join_all(connections.iter_mut().map(|connection| ask(connection, began))).await;
    let took = began.elapsed();
    let usage = redis.usage().since(before);

    let mut round = Round { redis: usage.cpu_us / took.as_secs_f64() / 1e4, ..Round::default() };
    let (mut waits, mut holds) = (Vec::new(), Vec::new());
    for answer in answers {
        match answer {
            Answer::Served { wait, hold } => {
                waits.push(wait);
                holds.push(hold);
            }
            Answer::Refused => round.refused += 1.0,
            Answer::Other => round.other += 1.0,
        }
    }
    waits.sort_by(f64::total_cmp);
    round.hold = mean(&holds);
    let at = |percent: usize| {
        let k = waits.len() * percent / 100;
        let ideal = (k / LIMIT as usize) as f64 * round.hold;
        (waits.get(k).copied().unwrap_or(f64::NAN), ideal)
    };
    let ((p50, ideal_p50), (p99, ideal_p99)) = (at(50), at(99));
    Round { p50, p99, ideal_p50, ideal_p99, ..round }
}

/// Releases are sent after their responses.
async fn until_free(semaphore: &Semaphore) {
    for _ in 0..5000 {
        let seen = semaphore.inspect(NAME).await.expect("an answer");
        if seen.in_use == 0 && seen.waiting == 0 {
            return;
        }
        sleep(Duration::from_millis(2)).await;
    }
    panic!("permits of the last round are still held");
}

async fn ask(connection: &mut Connection, began: Instant) -> Answer {
    let answer = timeout(2 * WAIT, async {
        let request = Request::get("/").header("host", "bench").body(Empty::new());
        connection.ready().await.ok()?;
        let response = connection.send_request(request.expect("valid")).await.ok()?;
        let head_after = began.elapsed();
        let (head, body) = response.into_parts();
        let body = body.collect().await.ok()?.to_bytes();
        match head.status {
            StatusCode::OK => {
                let hold_us: f64 = str::from_utf8(&body).ok()?.parse().ok()?;
                let hold = hold_us / 1e3;
                Some(Answer::Served { wait: head_after.as_secs_f64() * 1e3 - hold, hold })
            }
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE
                if head.headers.contains_key(RETRY_AFTER) =>
            {
                Some(Answer::Refused)
            }
            _ => None,
        }
    });
    answer.await.ok().flatten().unwrap_or(Answer::Other)
}

pub(crate) fn child(job: &Job, parent: &Parent) {
    runtime().block_on(async {
        let semaphore = Semaphore::redis(&job.url).expect("a URL");
        let layer = ConcurrencyLimitLayer::builder(&semaphore, NAME).limit(LIMIT);
        let layer = layer.wait_timeout(WAIT).build().expect("in range");
        let router = Router::new().route("/", get(hold)).layer(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        parent.say(&listener.local_addr().expect("an address").to_string());
        let listener = listener.tap_io(|stream| stream.set_nodelay(true).expect("a socket"));
        serve(listener, router).await.expect("never ends");
    });
}

/// Sends a request and returns how long it took, in µs.
async fn hold() -> String {
    let began = Instant::now();
    sleep(HOLD).await;
    began.elapsed().as_micros().to_string()
}
