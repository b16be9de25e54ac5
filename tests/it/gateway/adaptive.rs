//! A limit that finds itself by the refusals of the upstream, through two gateways.

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::redis::TestRedis;
use crate::support::wire::{Wire, WireServer};

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
const BUSY: &str = "HTTP/1.1 429 Too Many Requests\r\nretry-after: 60\r\nconnection: close\r\n\
                    content-length: 4\r\n\r\nbusy";

/// Sends this many requests, and takes them at the upstream.
async fn send_all(gateway: &Gateway, upstream: &WireServer, count: usize) -> Vec<(Wire, Wire)> {
    let mut all = Vec::new();
    for _ in 0..count {
        let mut client = Wire::connect(gateway.url()).await;
        client.send(GET).await;
        let mut server = upstream.accept().await;
        server.head().await;
        all.push((client, server));
    }
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_lowers_the_limit_of_all_gateways_and_pauses_nothing() {
    let (redis, upstream) = (TestRedis::start(), WireServer::start().await);
    let url = redis.url();
    let args = ["--adaptive", "1..4", "--wait", "0s", "--redis", &url];
    let start = || Gateway::start(&upstream.url(), &args);
    let (a, b) = (start(), start());
    let mut all = send_all(&a, &upstream, 4).await;
    let (client, server) = all.last_mut().unwrap();
    server.send(BUSY).await;
    assert_eq!((client.status().await.0, &*client.bytes(4).await), (429, "busy"));
    eventually("it is recorded", async || {
        let record: Option<String> =
            redis.command(&["HGET", "semaphore:{!overrides}:adaptive", "gateway"]);
        record.is_some_and(|record| record.starts_with("3 "))
    })
    .await;
    drop(all);
    let operator = redis.semaphore();
    eventually("all are gone", async || {
        operator.inspect("gateway").await.is_ok_and(|seen| seen.in_use == 0)
    })
    .await;
    let held = send_all(&b, &upstream, 3).await;
    for gateway in [&a, &b] {
        let mut refused = Wire::connect(gateway.url()).await;
        refused.send(GET).await;
        let (status, head) = refused.status().await;
        assert_eq!(status, 429, "{head}");
    }
    drop(held);
}

#[test]
fn what_cannot_be_meant_is_refused() {
    for (args, said) in [
        (&["--adaptive", "5"][..], "expected two numbers, such as 5..100"),
        (&["--adaptive", "5..100/2"], "expected two numbers, such as 5..100"),
        (&["--adaptive", "0..100"], "--adaptive: adaptive limit is from 0 to 100"),
        (&["--adaptive", "100..5"], "expected a minimum below the maximum"),
        (&["--adaptive", "5..100/1ms"], "adaptive limit grows every 1ms"),
        (&["--adaptive", "5..100", "--limit", "50"], "--adaptive: limit is 50"),
        (&["--adaptive", "5..100", "--limit", "unlimited"], "--adaptive: adaptive limit is set"),
    ] {
        let mut command = Gateway::command();
        let output =
            command.args(["--upstream", "http://127.0.0.1:9"]).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains(said), "{args:?}: {error}");
    }
}
