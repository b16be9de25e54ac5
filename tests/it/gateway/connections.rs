//! Many connections: none keeps others, or the probes, from an answer, and none costs much.

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use h2::client::SendRequest;
use tokio::net::TcpStream;

use super::{Stage, seen};
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway};
use crate::support::redis::free_port;
use crate::support::wire::{Wire, WireServer};

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// A gateway that may have 128 file descriptors.
fn with_few_descriptors(upstream: &str, args: &[&str]) -> Gateway {
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -n 128; exec \"$0\" \"$@\""]).arg(Gateway::command().get_program());
    command.args(["--listen", "127.0.0.1:0", "--upstream", upstream, "--limit", "9"]).args(args);
    Gateway::running(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_sent_heads_keep_neither_requests_nor_probes_from_an_answer() {
    let upstream = WireServer::start().await;
    let status = free_port().to_string();
    let mut args = vec!["--status", &status];
    let mut crowded = vec![Some(status.as_str()), None];
    let admin = free_port().to_string();
    if cfg!(feature = "admin") {
        args.extend(["--admin", &admin]);
        crowded.push(Some(&admin));
    }
    let url = upstream.url();
    upstream.echo_heads();
    for port in crowded {
        let gateway = with_few_descriptors(&url, &args);
        let crowded = port
            .map_or_else(|| gateway.url().to_owned(), |port| format!("http://127.0.0.1:{port}"));
        let mut halves = Vec::new();
        for _ in 0..140 {
            let mut half = Wire::connect(&crowded).await;
            half.send("GET /-/healthy HTTP/1.1\r\nho").await;
            halves.push(half);
        }
        let answers = async {
            assert_eq!(seen(&gateway, GET).await.0, 200);
            let healthy = format!("http://127.0.0.1:{status}/-/healthy");
            assert_eq!(Client::new().get(&healthy).await, 200);
        };
        let answered = tokio::time::timeout(Duration::from_secs(8), answers).await;
        assert!(answered.is_ok(), "no answer with 140 half heads at {crowded}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_longest_idle_connection_is_closed_if_descriptors_run_out() {
    let upstream = WireServer::start().await;
    let status = free_port().to_string();
    let args = ["--max-connections", "1000", "--status", &status];
    let gateway = with_few_descriptors(&upstream.url(), &args);
    let mut halves = Vec::new();
    for _ in 0..140 {
        let mut half = Wire::connect(gateway.url()).await;
        half.send("GET / HTTP/1.1\r\nho").await;
        halves.push(half);
    }
    for address in [gateway.url(), &format!("http://127.0.0.1:{status}")] {
        let mut client = Wire::connect(address).await;
        client.send("GET /-/healthy HTTP/1.1\r\n\r\n").await;
        let answer = tokio::time::timeout(Duration::from_secs(8), client.status()).await;
        assert!(answer.is_ok(), "no answer at {address}");
    }
    assert_eq!(halves[0].rest().await, "");
    assert!(!halves[139].is_over().await, "the youngest is the last to go");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_answer_while_all_connections_are_in_use() {
    let upstream = WireServer::start().await;
    let status = free_port().to_string();
    let gateway = with_few_descriptors(&upstream.url(), &["--wait", "1m", "--status", &status]);
    let mut busy = Vec::new();
    for _ in 0..140 {
        let mut client = Wire::connect(gateway.url()).await;
        client.send(GET).await;
        busy.push(client);
    }
    let healthy = format!("http://127.0.0.1:{status}/-/healthy");
    let (client, patience) = (Client::new(), Duration::from_secs(8));
    let answer = tokio::time::timeout(patience, client.get(&healthy)).await;
    assert_eq!(answer.expect("the probe is answered"), 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_does_not_end_is_given_up_by_status_and_admin_too() {
    let upstream = WireServer::start().await;
    let (status, admin) = (free_port().to_string(), free_port().to_string());
    let mut args = vec!["--limit", "1", "--header-timeout", "500ms", "--status", &status];
    let mut ports = vec![&status];
    if cfg!(feature = "admin") {
        args.extend(["--admin", &admin]);
        ports.push(&admin);
    }
    let _gateway = Gateway::start(&upstream.url(), &args);
    for port in ports {
        for start in ["", "GET / HTTP/1.1\r\nho"] {
            let mut client = Wire::connect(&format!("http://127.0.0.1:{port}")).await;
            let began = Instant::now();
            client.send(start).await;
            client.rest().await;
            let took = began.elapsed();
            assert!((0.4..3.0).contains(&took.as_secs_f64()), "{start:?}: {took:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_beyond_the_maximum_takes_the_place_of_the_longest_idle_one() {
    let stage = Stage::waiting("1m", &["--max-connections", "3", "--prefix", "/limited"]).await;
    let (mut busy, mut server, _) = stage.ask(GET).await;
    let mut idle = stage.client().await;
    idle.send("GET / HTTP/1.1\r\nho").await;
    // It was accepted before the next one comes.
    let mut younger = stage.client().await;
    younger.send("GET / HTTP/1.1\r\n\r\n").await;
    assert_eq!(younger.status().await.0, 400);
    assert!(!idle.is_over().await);
    let (mut new, mut other, _) = stage.ask(GET).await;
    assert_eq!(idle.rest().await, "");
    assert!(!younger.is_over().await && !busy.is_over().await);

    // All of them are in use: the next one waits until one ends.
    let (mut last, mut last_server, _) = stage.ask(GET).await;
    // After the body of its response.
    younger.rest().await;
    let mut waits = stage.client().await;
    waits.send("GET / HTTP/1.1\r\n\r\n").await;
    assert_eq!(waits.glimpse().await, "");
    let ok = "HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
    server.send(ok).await;
    assert_eq!(busy.status().await.0, 200);
    assert_eq!(waits.status().await.0, 400);
    other.send(ok).await;
    last_server.send(ok).await;
    assert_eq!((new.status().await.0, last.status().await.0), (200, 200));
}

/// Returns the resident memory, in bytes.
#[cfg(target_os = "linux")]
fn resident(gateway: &Gateway) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<usize>().unwrap() * 1024
}

/// A connection of HTTP/2.
async fn by_http2(gateway: &Gateway) -> SendRequest<Bytes> {
    let address = gateway.url().strip_prefix("http://").unwrap();
    let socket = TcpStream::connect(address).await.unwrap();
    let (sender, connection) = h2::client::handshake(socket).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// Begins to send 1 MB. Returns how much the gateway accepts before its window is closed for a moment.
async fn upload(
    sender: &SendRequest<Bytes>,
    path: &str,
) -> (usize, h2::client::ResponseFuture, h2::SendStream<Bytes>) {
    const SIZE: usize = 1_000_000;
    let request = http::Request::post(format!("http://a{path}")).body(()).unwrap();
    let mut sender = sender.clone().ready().await.unwrap();
    let (response, mut stream) = sender.send_request(request, false).unwrap();
    let mut sent = 0;
    while sent < SIZE {
        stream.reserve_capacity(SIZE - sent);
        let capacity = std::future::poll_fn(|cx| stream.poll_capacity(cx));
        let Ok(capacity) = tokio::time::timeout(Duration::from_millis(700), capacity).await else {
            break;
        };
        let part = Bytes::from(vec![b'x'; capacity.unwrap().unwrap().min(SIZE - sent)]);
        sent += part.len();
        stream.send_data(part, sent == SIZE).unwrap();
    }
    (sent, response, stream)
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_of_http2_that_waits_costs_little_memory() {
    const QUEUED: usize = 60;
    let stage = Stage::waiting("1m", &[]).await;
    let (_holder, _server, _) = stage.ask(GET).await;
    let before = resident(&stage.gateway);
    let uploads = (0..QUEUED).map(async |_| {
        let sender = by_http2(&stage.gateway).await;
        upload(&sender, "/").await
    });
    let uploads = join_all(uploads).await;
    let sent: usize = uploads.iter().map(|upload| upload.0).sum();
    let mut most = before;
    for _ in 0..20 {
        most = most.max(resident(&stage.gateway));
        tokio::time::sleep(Duration::from_millis(25)).await;
    }
    let each = (most - before) / QUEUED;
    println!("{sent} bytes of {QUEUED} uploads cost {each} bytes each");
    assert!(sent > QUEUED * 16_384, "they wait: {sent}");
    assert!(each <= 200_000, "{each} bytes for each upload");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uploads_of_http2_that_wait_do_not_stop_others_of_their_connection() {
    let stage = Stage::waiting("1m", &["--prefix", "/waits"]).await;
    let (_holder, _server, _) = stage.ask("GET /waits HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let sender = by_http2(&stage.gateway).await;
    let waiting = join_all((0..30).map(|_| upload(&sender, "/waits"))).await;
    let passes = async {
        let mut server = stage.upstream.accept().await;
        server.head().await;
        server.raw(1_000_000).await;
        server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    };
    let ((sent, response, _stream), ()) = tokio::join!(upload(&sender, "/passes"), passes);
    assert_eq!(sent, 1_000_000);
    assert_eq!(response.await.unwrap().status(), 200);
    drop(waiting);
    eventually("the connection is left", async || stage.upstream.is_left_alone().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_beyond_the_maximum_of_the_gateway_is_rejected_at_once() {
    let stage = Stage::waiting("1m", &["--max-requests", "2"]).await;
    let (mut holder, mut server, _) = stage.ask(GET).await;
    let mut waits = stage.client().await;
    waits.send(GET).await;
    assert_eq!(waits.glimpse().await, "");
    let mut client = stage.client().await;
    client.send(GET).await;
    let (status, head) = client.status().await;
    assert_eq!(status, 503);
    assert!(head.contains("\r\nretry-after: 1\r\n"), "{head}");
    assert!(head.contains("\r\ncontent-length: 0\r\n"), "{head}");
    let sender = by_http2(&stage.gateway).await;
    let request = http::Request::get("http://a/").body(()).unwrap();
    let (response, _) = sender.ready().await.unwrap().send_request(request, true).unwrap();
    assert_eq!(response.await.unwrap().status(), 503);

    // A response that has not ended has its room, too.
    server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n").await;
    assert_eq!(holder.status().await.0, 200);
    let mut client = stage.client().await;
    client.send(GET).await;
    assert_eq!(client.status().await.0, 503);
    server.send("ok").await;
    holder.bytes(2).await;
    let ok = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    let mut server = stage.upstream.accept().await;
    server.head().await;
    server.send(ok).await;
    assert_eq!(waits.status().await.0, 200);
    eventually("there is room again", async || stage.is_free().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_lines_of_all_tenants_together_have_a_maximum() {
    let args = ["--fair-by", "header:x-tenant", "--max-waiting", "2"];
    let stage = Stage::waiting("1m", &args).await;
    let request = |tenant: &str| format!("GET / HTTP/1.1\r\nhost: a\r\nx-tenant: {tenant}\r\n\r\n");
    let (_holder, _server, _) = stage.ask(&request("a")).await;
    let mut waiting = Vec::new();
    let mut rejected = 0;
    for tenant in ["b", "c", "d", "e"] {
        let mut client = stage.client().await;
        client.send(request(tenant)).await;
        tokio::select! {
            (status, _) = client.status() => {
                assert_eq!(status, 429);
                rejected += 1;
            }
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
        }
        waiting.push(client);
    }
    assert_eq!(rejected, 2);
}
