//! Gateways that count permits in etcd.

use std::io::{BufRead, BufReader};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::seen;
use crate::support::etcd::TestEtcd;
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway};
use crate::support::redis::{TestRedis, free_port};
use crate::support::wire::{Wire, WireServer};

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
const SECRET: &str = "8675309867530986753098";

/// Runs it until it ends. Returns its exit code, and what it prints.
fn refused(command: &mut Command) -> (Option<i32>, String) {
    let Output { status, stderr, .. } = command.stdin(Stdio::null()).output().unwrap();
    (status.code(), String::from_utf8(stderr).unwrap())
}

/// Returns the program with a limit and an upstream that nobody asks.
fn alone() -> Command {
    let mut command = Gateway::command();
    command.args(["--limit", "1", "--upstream", "http://127.0.0.1:1"]);
    command
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_share_a_limit_through_etcd() {
    let (etcd, upstream) = (TestEtcd::start(), WireServer::start().await);
    let url = etcd.url();
    let args = ["--etcd", &url, "--limit", "1", "--wait", "0s"];
    let (one, other) =
        (Gateway::start(&upstream.url(), &args), Gateway::start(&upstream.url(), &args));
    let mut client = Wire::connect(one.url()).await;
    client.send(GET).await;
    let mut server = upstream.accept().await;
    server.head().await;
    assert_eq!(Client::new().get(other.url()).await, 429);
    let seen = etcd.semaphore().inspect("gateway").await.unwrap();
    assert_eq!(seen.in_use, 1, "the permit is counted there");

    // The permit is free for the other gateway.
    server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    upstream.echo_heads();
    eventually("it is free", async || Client::new().get(other.url()).await == 200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_url_of_etcd_can_stand_in_the_environment_or_the_file() {
    let (etcd, upstream, dir) =
        (TestEtcd::start(), WireServer::start().await, TempDir::new().unwrap());
    let upstream_url = upstream.url();
    upstream.echo_heads();
    let signs =
        |prefix: &str| etcd.ctl(&["get", "--prefix", "--keys-only", &format!("{prefix}/n/")]);
    let mut command = Gateway::command();
    command.args(["--listen", "127.0.0.1:0", "--limit", "1", "--upstream", &upstream_url]);
    let gateway = Gateway::running(command.env("ETCD_URL", etcd.url()).spawn().unwrap());
    assert_eq!(seen(&gateway, GET).await.0, 200);
    assert!(!signs("semaphore").trim().is_empty(), "it counts there");
    gateway.signal("TERM");
    assert_eq!(gateway.exit().await, Some(0));

    let file = dir.path().join("gateway.toml");
    let contents = |etcd: &str| {
        format!(
            "listen = \"127.0.0.1:0\"\nupstream = \"{upstream_url}\"\netcd = \"{etcd}\"\n[[rule]]\nlimit = 1\n"
        )
    };
    std::fs::write(&file, contents(&format!("{}/shop", etcd.url()))).unwrap();
    let mut command = Gateway::command();
    command.arg("--config").arg(&file).env("NO_COLOR", "1").stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let stderr = process.stderr.take().unwrap();
    let gateway = Gateway::running(process);
    assert_eq!(seen(&gateway, GET).await.0, 200);
    assert!(!signs("shop").trim().is_empty(), "it counts there");

    // Another etcd needs a restart.
    std::fs::write(&file, contents(&format!("etcd://u:{SECRET}@127.0.0.1:1"))).unwrap();
    gateway.signal("HUP");
    let read = tokio::task::spawn_blocking(move || {
        let mut lines = BufReader::new(stderr).lines().map_while(Result::ok);
        lines.find(|line| line.contains("configuration")).unwrap()
    });
    let said = tokio::time::timeout(Duration::from_secs(10), read).await.unwrap().unwrap();
    assert!(said.contains("gateway.toml:3: etcd: changed; restart the gateway"), "{said}");
    assert!(!said.contains("86753"), "{said}");
    assert_eq!(seen(&gateway, GET).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_is_ready_while_etcd_answers() {
    let (etcd, upstream) = (TestEtcd::start(), WireServer::start().await);
    let port = free_port().to_string();
    let url = etcd.url();
    let args = ["--etcd", &url, "--limit", "1", "--status", &port];
    let _gateway = Gateway::start(&upstream.url(), &args);
    let ready = format!("http://127.0.0.1:{port}/-/ready");
    // Though no permit was requested yet.
    assert_eq!(Client::new().get(&ready).await, 200);
    drop(etcd);
    eventually("it is not ready", async || Client::new().get(&ready).await == 503).await;
    let (_, body) = Client::new().send(http::Request::get(&ready)).await;
    assert_eq!(String::from_utf8(body.unwrap().to_vec()).unwrap(), "no reply from etcd\n");
}

#[test]
fn permits_are_counted_in_one_place() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("gateway.toml");
    let (redis, etcd) = (format!("redis://u:{SECRET}@h/"), format!("etcd://u:{SECRET}@h"));
    let check = |command: &mut Command, place: &str| {
        let (code, said) = refused(command);
        assert_eq!(code, Some(2), "{said}");
        assert!(said.contains(place) && said.contains("leave out redis"), "{said}");
        assert!(!said.contains("86753"), "{said}");
    };
    check(alone().args(["--redis", &redis, "--etcd", &etcd]), "--etcd: ");
    check(alone().args(["--etcd", &etcd]).env("REDIS_URL", &redis), "--etcd: ");
    check(alone().args(["--redis", &redis]).env("ETCD_URL", &etcd), "--etcd: ");
    let rule = "upstream = \"http://127.0.0.1:1\"\n[[rule]]\nlimit = 1\n";
    std::fs::write(&file, format!("redis = \"{redis}\"\netcd = \"{etcd}\"\n{rule}")).unwrap();
    check(Gateway::command().arg("--config").arg(&file), "gateway.toml:2: etcd: ");
    std::fs::write(&file, format!("etcd = \"{etcd}\"\n{rule}")).unwrap();
    check(Gateway::command().arg("--config").arg(&file).args(["--redis", &redis]), ":1: etcd: ");

    // What only Redis has is not passed over.
    let (code, said) = refused(alone().args(["--etcd", &etcd, "--after-loss", "quarantine"]));
    assert!(code == Some(2) && said.contains("--after-loss: "), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_died_keeps_its_permits_for_the_whole_grace_if_told() {
    let (etcd, held, upstream) =
        (TestEtcd::start(), WireServer::start().await, WireServer::start().await);
    let url = etcd.url();
    let args =
        ["--etcd", &url, "--etcd-whole-grace", "--limit", "1", "--lease", "6s", "--wait", "20s"];
    let (mut one, other) =
        (Gateway::start(&held.url(), &args), Gateway::start(&upstream.url(), &args));
    upstream.echo_heads();
    let mut client = Wire::connect(one.url()).await;
    client.send(GET).await;
    let mut server = held.accept().await;
    server.head().await;
    one.kill();
    let killed = Instant::now();
    assert_eq!(Client::new().get(other.url()).await, 200);
    // The lease, less at most the third of it after which it is renewed, half a second, and 6 s. By default 9.5 s at most.
    assert!(killed.elapsed() > Duration::from_secs(10), "{:?}", killed.elapsed());

    let (code, said) = refused(alone().arg("--etcd-whole-grace"));
    assert!(code == Some(2) && said.contains("--etcd-whole-grace: is set without etcd"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_url_of_etcd_is_not_shown() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("gateway.toml");
    let rule = "[[rule]]\nlimit = 1\n";
    for (value, place) in [
        (SECRET.to_owned(), "gateway.toml:1"),
        ("86753098675309.5".to_owned(), "gateway.toml:1: etcd"),
        (format!("[\"etcd://u:{SECRET}@h\"]"), "gateway.toml:1: etcd"),
        (format!("\"etcd://u:{SECRET}"), "gateway.toml:1"),
        (format!("\"etcd://u:{SECRET}@h/a/b\""), "gateway.toml:1: etcd"),
    ] {
        let contents = format!("etcd = {value}\nupstream = \"http://127.0.0.1:1\"\n{rule}");
        std::fs::write(&file, contents).unwrap();
        let (code, said) = refused(Gateway::command().arg("--config").arg(&file));
        assert!(code == Some(2) && !said.contains("86753") && said.contains(place), "{said}");
    }
    for bad in [
        format!("etcd://u:{SECRET}@h/a/b"),
        format!("etcd://{SECRET}@h"),
        format!("redis://u:{SECRET}@h/"),
        SECRET.to_owned(),
    ] {
        let (_, said) = refused(alone().args(["--etcd", &bad]));
        assert!(!said.contains("86753") && said.contains("--etcd: "), "{said}");
        let (_, said) = refused(alone().env("ETCD_URL", &bad));
        assert!(!said.contains("86753") && said.contains("--etcd: "), "{said}");
    }
    let unknown = format!("--etdc=etcd://u:{SECRET}@h");
    let (_, said) = refused(alone().arg(unknown));
    assert!(!said.contains("86753"), "{said}");
    let mut help = Gateway::command();
    let Output { stdout, .. } = help.arg("--help").env("ETCD_URL", SECRET).output().unwrap();
    let help = String::from_utf8(stdout).unwrap();
    assert!(help.contains("ETCD_URL") && !help.contains(SECRET), "{help}");

    // Nor by one that runs, and is refused by the server.
    let etcd = TestEtcd::start();
    etcd.ctl(&["user", "add", "root:root"]);
    etcd.ctl(&["user", "grant-role", "root", "root"]);
    etcd.ctl(&["auth", "enable"]);
    let url = format!("etcd://app:{SECRET}@{}", etcd.address());
    let mut command = alone();
    command.args(["--listen", "127.0.0.1:0", "--wait", "100ms"]).env("ETCD_URL", &url);
    command.env("NO_COLOR", "1").env("RUST_LOG", "debug").stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let stderr = process.stderr.take().unwrap();
    let mut gateway = Gateway::running(process);
    assert_eq!(Client::new().get(gateway.url()).await, 503);
    gateway.kill();
    let said = std::io::read_to_string(stderr).unwrap();
    assert!(said.contains("etcd") && !said.contains("86753"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_counts_alone_says_how_to_share() {
    let started = |command: &mut Command| {
        let command = command.args(["--listen", "127.0.0.1:0"]).env("NO_COLOR", "1");
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let stderr = process.stderr.take().unwrap();
        // Its log is written behind it; a signal waits for that.
        let gateway = Gateway::running(process);
        gateway.signal("TERM");
        std::io::read_to_string(stderr).unwrap()
    };
    let said = started(&mut alone());
    assert!(said.contains("set --redis or --etcd to share them"), "{said}");
    let (redis, etcd) = (TestRedis::start(), TestEtcd::start());
    for shared in [["--redis", &redis.url()], ["--etcd", &etcd.url()]] {
        let said = started(alone().args(shared));
        assert!(!said.contains("to share them"), "{said}");
    }
}
