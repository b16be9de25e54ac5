//! What is visible from outside: probes, metrics, the access log, the log.

use std::io::Read;
use std::process::Stdio;
use std::time::Duration;

use serde_json::Value;
use tempfile::TempDir;

use super::{Stage, seen};
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway};
use crate::support::redis::{TestRedis, free_port};
use crate::support::wire::WireServer;

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_say_how_it_is() {
    let (redis, upstream) = (TestRedis::start(), WireServer::start().await);
    let port = free_port().to_string();
    let args = ["--redis", &redis.url(), "--limit", "1", "--status", &port];
    let gateway = Gateway::start(&upstream.url(), &args);
    let client = Client::new();
    let probe = async |path: &str| client.get(&format!("http://127.0.0.1:{port}/-/{path}")).await;
    assert_eq!(probe("healthy").await, 200);
    // Though no permit was requested yet.
    assert_eq!(probe("ready").await, 200);
    assert_eq!(probe("other").await, 404);
    let metrics = http::Request::get(format!("http://127.0.0.1:{port}/-/metrics"));
    let (status, body) = client.send(metrics).await;
    assert_eq!(status.as_u16(), if cfg!(feature = "metrics") { 200 } else { 404 });
    assert!(body.is_ok());
    // Probes are no requests to the upstream, and its requests are no probes.
    upstream.echo_heads();
    assert_eq!(seen(&gateway, GET).await.0, 200);
    drop(redis);
    eventually("it is not ready", async || probe("ready").await == 503).await;
    assert_eq!(probe("healthy").await, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_passes_requests_without_redis_is_ready_without_it() {
    let upstream = WireServer::start().await;
    let (port, redis) = (free_port().to_string(), format!("redis://127.0.0.1:{}/", free_port()));
    let args = ["--redis", &redis, "--limit", "1", "--on-unavailable", "admit", "--status", &port];
    let _gateway = Gateway::start(&upstream.url(), &args);
    assert_eq!(Client::new().get(&format!("http://127.0.0.1:{port}/-/ready")).await, 200);
}

#[cfg(feature = "metrics")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count_requests() {
    let upstream = WireServer::start().await;
    let port = free_port().to_string();
    let gateway = Gateway::start(&upstream.url(), &["--limit", "1", "--status", &port]);
    upstream.echo_heads();
    assert_eq!(seen(&gateway, GET).await.0, 200);
    let metrics = http::Request::get(format!("http://127.0.0.1:{port}/-/metrics"));
    let text = Client::new().send(metrics).await.1.unwrap();
    let text = String::from_utf8_lossy(&text);
    assert!(text.contains("gateway"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_access_log_has_a_line_for_each_request() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("access.log");
    let lines = || {
        let text = std::fs::read_to_string(&file).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect::<Vec<Value>>()
    };
    let line = async |count: usize| {
        eventually("the line is there", async || lines().len() == count).await;
        lines().pop().unwrap()
    };
    let path = file.to_str().unwrap();
    let args = ["--key", "header:x-tenant", "--access-log", path, "--access-log-keys"];
    let stage = Stage::start(&args).await;
    let request = "GET /a//b?secret HTTP/1.1\r\nhost: a\r\nx-tenant: acme\r\n\r\n";
    let (mut client, mut server, _) = stage.ask(request).await;

    let mut refused = stage.client().await;
    refused.send(request).await;
    assert_eq!(refused.status().await.0, 429);
    let entry = line(1).await;
    assert_eq!((&entry["status"], &entry["refused"]), (&429.into(), &"limit".into()), "{entry}");
    assert_eq!((&entry["rule"], &entry["held_ms"]), (&"gateway".into(), &Value::Null), "{entry}");

    tokio::time::sleep(Duration::from_millis(100)).await;
    server
        .send("HTTP/1.1 201 Created\r\nconnection: close\r\ncontent-length: 5\r\n\r\nhello")
        .await;
    assert_eq!(client.status().await.0, 201);
    let entry = line(2).await;
    for (field, value) in [
        ("method", Value::from("GET")),
        ("path", "/a/b".into()),
        ("version", "1.1".into()),
        ("client", "127.0.0.1".into()),
        ("status", 201.into()),
        ("key", "acme".into()),
        ("bytes", 5.into()),
    ] {
        assert_eq!(entry[field], value, "{field}: {entry}");
    }
    assert!(entry["held_ms"].as_f64().unwrap() >= 100.0, "{entry}");
    assert!(entry["waited_ms"].as_f64().unwrap() < entry["held_ms"].as_f64().unwrap(), "{entry}");
    assert!(entry.get("refused").is_none(), "{entry}");

    // A client that leaves has no status.
    let (client, server, _) = stage.ask(request).await;
    drop(client);
    let entry = line(3).await;
    assert_eq!(entry["status"], Value::Null, "{entry}");
    drop(server);

    // Keys may be secrets: without the flag there are none. All lines are written at the end.
    let other = dir.path().join("other.log");
    let args = ["--key", "header:x-tenant", "--access-log", other.to_str().unwrap()];
    let stage = Stage::start(&args).await;
    let mut bad = stage.client().await;
    bad.send("GET / HTTP/1.1\r\nx-tenant: acme\r\n\r\n").await;
    assert_eq!(bad.status().await.0, 400);
    stage.gateway.signal("TERM");
    assert_eq!(stage.gateway.exit().await, Some(0));
    let text = std::fs::read_to_string(other).unwrap();
    assert!(text.contains("\"status\":400") && !text.contains("acme"), "{text}");
}

#[test]
fn rust_log_decides_what_is_said() {
    let said = |filter: &str| {
        let mut command = Gateway::command();
        command.args([
            "--listen",
            "127.0.0.1:0",
            "--upstream",
            "http://127.0.0.1:1",
            "--limit",
            "1",
        ]);
        let mut process = command.env("RUST_LOG", filter).stderr(Stdio::piped()).spawn().unwrap();
        let mut stderr = process.stderr.take().unwrap();
        let gateway = Gateway::running(process);
        gateway.signal("TERM");
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        text
    };
    assert!(said("info").contains("draining"));
    assert_eq!(said("off"), "");
}

#[cfg(feature = "admin")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_drain_ends_with_its_own_answer() {
    let port = free_port().to_string();
    let stage = Stage::start(&["--admin", &port]).await;
    let (_client, _server, _) = stage.ask(GET).await;
    let drain = http::Request::post(format!("http://127.0.0.1:{port}/semaphores/gateway/drain"));
    let drain = drain.header("x-semaphore-admin", "1").header("content-type", "application/json");
    let body = http_body_util::Full::<bytes::Bytes>::from(r#"{"timeout_ms": 31000}"#);
    let client = hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new());
    let response = client.build_http().request(drain.body(body).unwrap()).await.unwrap();
    let status = response.status();
    let body = http_body_util::BodyExt::collect(response.into_body()).await.unwrap().to_bytes();
    assert_eq!((status.as_u16(), &*body), (200, &br#"{"empty":false}"#[..]));
}
