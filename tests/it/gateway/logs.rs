//! The logs: files that are moved or full, and readers that stand still.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::time::timeout;

use super::{Stage, seen};
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::redis::{TestRedis, free_port};
use crate::support::wire::WireServer;

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// The lines of a process's stderr, as they come.
fn stderr(process: &mut Child) -> Arc<Mutex<Vec<String>>> {
    let log = Arc::<Mutex<Vec<String>>>::default();
    let (stderr, lines) = (process.stderr.take().unwrap(), Arc::clone(&log));
    // Ends with the process.
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            lines.lock().unwrap().push(line);
        }
    });
    log
}

fn count(log: &Mutex<Vec<String>>, what: &str) -> usize {
    log.lock().unwrap().iter().filter(|line| line.contains(what)).count()
}

fn command(upstream: &str, args: &[&str]) -> Command {
    let mut command = Gateway::command();
    command.args(["--listen", "127.0.0.1:0", "--upstream", upstream, "--limit", "9"]).args(args);
    command
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_access_log_is_opened_again_at_sighup() {
    let dir = TempDir::new().unwrap();
    let (file, old) = (dir.path().join("access.log"), dir.path().join("access.log.1"));
    let upstream = WireServer::start().await;
    let args = ["--limit", "9", "--access-log", file.to_str().unwrap()];
    let gateway = Gateway::start(&upstream.url(), &args);
    upstream.echo_heads();
    assert_eq!(seen(&gateway, GET).await.0, 200);
    eventually("it is logged", async || lines(&file).len() == 1).await;
    std::fs::rename(&file, &old).unwrap();
    gateway.signal("HUP");
    eventually("there is a file again", async || file.exists()).await;
    assert_eq!(seen(&gateway, GET).await.0, 200);
    eventually("it is logged there", async || lines(&file).len() == 1).await;
    assert_eq!(lines(&old).len(), 1);
    gateway.signal("TERM");
    assert_eq!(gateway.exit().await, Some(0));
}

#[cfg(unix)]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_access_log_is_for_its_owner_unless_it_is_there_already() {
    use std::os::unix::fs::PermissionsExt;

    let dir = TempDir::new().unwrap();
    let (file, old) = (dir.path().join("access.log"), dir.path().join("access.log.1"));
    let mode = || std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
    let upstream = WireServer::start().await;
    let args = ["--limit", "9", "--access-log", file.to_str().unwrap(), "--access-log-keys"];
    let gateway = Gateway::start(&upstream.url(), &args);
    assert_eq!(mode(), 0o600);
    std::fs::rename(&file, &old).unwrap();
    gateway.signal("HUP");
    eventually("there is a file again", async || file.exists()).await;
    assert_eq!(mode(), 0o600);

    // Others may read a file that was created for them.
    std::fs::rename(&file, &old).unwrap();
    std::fs::write(&file, "").unwrap();
    std::fs::set_permissions(&file, PermissionsExt::from_mode(0o640)).unwrap();
    gateway.signal("HUP");
    upstream.echo_heads();
    // A request that comes before the signal is logged in the old one.
    eventually("it is logged", async || {
        assert_eq!(seen(&gateway, GET).await.0, 200);
        !lines(&file).is_empty()
    })
    .await;
    assert_eq!(mode(), 0o640);
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_write_does_not_end_the_access_log() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("access.log");
    std::os::unix::fs::symlink("/dev/full", &file).unwrap();
    let upstream = WireServer::start().await;
    let mut command = command(&upstream.url(), &["--access-log", file.to_str().unwrap()]);
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    let log = stderr(&mut process);
    let gateway = Gateway::running(process);
    upstream.echo_heads();
    for _ in 0..20 {
        assert_eq!(seen(&gateway, GET).await.0, 200);
    }
    eventually("it is told", async || count(&log, "the access log cannot be written") > 0).await;
    std::fs::remove_file(&file).unwrap();
    eventually("lines are written again", async || {
        assert_eq!(seen(&gateway, GET).await.0, 200);
        !lines(&file).is_empty()
    })
    .await;
    eventually("that is told", async || count(&log, "the access log is written again") == 1).await;
    assert_eq!(count(&log, "the access log cannot be written"), 1, "once, not for each line");
    eventually("and how many are missing", async || count(&log, "were dropped") > 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_shares_nothing_says_so_once() {
    let redis = TestRedis::start();
    let (url, upstream) = (redis.url(), WireServer::start().await);
    for (args, told) in [(vec![], 1), (vec!["--redis", &url], 0)] {
        let mut process = command(&upstream.url(), &args).stderr(Stdio::piped()).spawn().unwrap();
        let log = stderr(&mut process);
        let gateway = Gateway::running(process);
        // It is the last line.
        gateway.signal("TERM");
        eventually("it drains", async || count(&log, "draining") == 1).await;
        assert_eq!(count(&log, "are not shared with other gateways"), told, "{log:?}");
        assert_eq!(count(&log, " WARN "), told, "{log:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_of_stdout_that_stands_still_does_not_keep_the_process() {
    let upstream = WireServer::start().await;
    let mut command = command(&upstream.url(), &["--access-log", "-", "--drain", "1s"]);
    let (gateway, stdout) = Gateway::running_unread(command.spawn().unwrap());
    upstream.echo_heads();
    let long = "x".repeat(8000);
    for _ in 0..30 {
        let request = format!("GET /{long} HTTP/1.1\r\nhost: a\r\n\r\n");
        assert_eq!(seen(&gateway, &request).await.0, 200);
    }
    let began = Instant::now();
    gateway.signal("TERM");
    assert_eq!(gateway.exit().await, Some(0));
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    drop(stdout);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lines_that_a_log_cannot_take_are_counted() {
    let upstream = WireServer::start().await;
    let mut command = command(&upstream.url(), &["--access-log", "-", "--drain", "1s"]);
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    let log = stderr(&mut process);
    let (gateway, stdout) = Gateway::running_unread(process);
    upstream.echo_heads();
    // Five megabytes, of which four may wait.
    let request = format!("GET /{} HTTP/1.1\r\nhost: a\r\n\r\n", "x".repeat(50_000));
    for _ in 0..100 {
        assert_eq!(seen(&gateway, &request).await.0, 200);
    }
    // Once the reader goes on, everything that waits is written, with the number of missing lines.
    let reader = std::thread::spawn(move || stdout.lines().map_while(Result::ok).count());
    eventually("it is told", async || count(&log, "lines of the access log were dropped") == 1)
        .await;
    let told = log
        .lock()
        .unwrap()
        .iter()
        .find_map(|line| line.split_once(" dropped=")?.1.trim().parse::<usize>().ok());
    gateway.signal("TERM");
    assert_eq!(gateway.exit().await, Some(0));
    assert_eq!(reader.join().unwrap() + told.unwrap(), 100);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_of_stderr_that_stands_still_stops_neither_requests_nor_the_end() {
    let upstream = Upstream::start().await;
    let mut command = command(&upstream.url(), &["--drain", "1s"]);
    command.env("RUST_LOG", "trace").stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let stderr = process.stderr.take().unwrap();
    let (gateway, client) = (Gateway::running(process), Client::new());
    // More than a pipe can hold.
    for _ in 0..600 {
        let answer = timeout(Duration::from_secs(5), client.get(gateway.url())).await;
        assert_eq!(answer.expect("the log holds nothing up"), 200);
    }
    let began = Instant::now();
    gateway.signal("TERM");
    assert_eq!(gateway.exit().await, Some(0));
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "{took:?}");
    let lines: Vec<_> = BufReader::new(stderr).lines().map_while(Result::ok).collect();
    assert!(lines.iter().map(String::len).sum::<usize>() > 60_000, "the pipe was full");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_the_upstream_is_a_line_at_its_begin_and_one_at_its_end() {
    let port = free_port();
    let mut command = command(&format!("http://127.0.0.1:{port}"), &[]);
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    let log = stderr(&mut process);
    let gateway = Gateway::running(process);
    for _ in 0..50 {
        assert_eq!(seen(&gateway, GET).await.0, 502);
    }
    let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut head = [0; 4096];
            if socket.read(&mut head).await.is_ok() {
                let response = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
                let _ = socket.write_all(response).await;
            }
        }
    });
    eventually("its end is told", async || {
        assert_eq!(seen(&gateway, GET).await.0, 200);
        count(&log, "the upstream answers again") > 0
    })
    .await;
    assert_eq!(count(&log, "the upstream cannot be reached"), 1, "{log:?}");
    assert_eq!(count(&log, "the upstream answers again"), 1, "{log:?}");
    assert_eq!(count(&log, "failed=50"), 1, "{log:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_before_it_listens_does_not_end_it() {
    let (dir, upstream) = (TempDir::new().unwrap(), WireServer::start().await);
    let file = dir.path().join("gateway.toml");
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let mut command = Gateway::command();
    let process = command.arg("--config").arg(&file).spawn().unwrap();
    let pid = process.id().to_string();
    // Opening it waits for the process, which then reads as slowly as from a slow disk.
    let path = file.clone();
    let opened = tokio::task::spawn_blocking(move || std::fs::File::create(path).unwrap());
    let mut config = timeout(Duration::from_secs(20), opened).await.unwrap().unwrap();
    assert!(Command::new("kill").args(["-s", "HUP", &pid]).status().unwrap().success());
    let contents = format!(
        "listen = \"127.0.0.1:0\"\nupstream = \"{}\"\n[[rule]]\nlimit = 9\n",
        upstream.url()
    );
    let _ = std::io::Write::write_all(&mut config, contents.as_bytes());
    drop(config);
    let gateway = Gateway::running(process);
    // The signal counts: the file is read once more.
    let path = file.clone();
    let again = tokio::task::spawn_blocking(move || std::fs::write(path, contents));
    timeout(Duration::from_secs(10), again).await.expect("it is read again").unwrap().unwrap();
    upstream.echo_heads();
    assert_eq!(seen(&gateway, GET).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sighup_without_a_file_drains() {
    let stage = Stage::start(&[]).await;
    let (mut client, mut server, _) = stage.ask(GET).await;
    stage.gateway.signal("HUP");
    tokio::time::sleep(Duration::from_millis(100)).await;
    server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    assert_eq!(stage.gateway.exit().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_is_logged_when_it_ends() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("access.log");
    let stage = Stage::start(&["--key", "path", "--access-log", file.to_str().unwrap()]).await;
    for end in ["client", "upstream"] {
        let before = lines(&file).len();
        let (mut client, mut server, _) = stage.ask(UPGRADE).await;
        server.send(ACCEPTED).await;
        assert_eq!(client.status().await.0, 101);
        client.send("ping").await;
        assert_eq!(server.bytes(4).await, "ping");
        server.send("pong, and more").await;
        assert_eq!(client.bytes(14).await, "pong, and more");
        // A request meanwhile has its line; the open connection has none.
        let mut other = stage.client().await;
        other.send(UPGRADE).await;
        assert_eq!(other.status().await.0, 429);
        eventually("that is logged", async || lines(&file).len() > before).await;
        let now = lines(&file);
        assert_eq!((now.len(), &now[before]["status"]), (before + 1, &429.into()), "{now:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
        if end == "client" {
            drop(client);
            assert_eq!(server.rest().await, "");
            drop(server);
        } else {
            drop(server);
            assert_eq!(client.rest().await, "");
            drop(client);
        }
        eventually("its end is logged", async || lines(&file).len() == before + 2).await;
        let line = lines(&file).pop().unwrap();
        assert_eq!((&line["status"], &line["bytes"]), (&101.into(), &14.into()), "{line}");
        assert!(line["held_ms"].as_f64().unwrap() >= 100.0, "{line}");
    }
}

const UPGRADE: &str =
    "GET /chat HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: toy/1\r\n\r\n";
const ACCEPTED: &str =
    "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: toy/1\r\n\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_that_is_cut_off_is_logged_as_well() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("access.log");
    let args = ["--drain", "300ms", "--access-log", file.to_str().unwrap()];
    let stage = Stage::start(&args).await;
    let (mut client, mut server, _) = stage.ask(UPGRADE).await;
    server.send(format!("{ACCEPTED}hi")).await;
    assert_eq!(client.status().await.0, 101);
    assert_eq!(client.bytes(2).await, "hi");
    stage.gateway.signal("TERM");
    assert_eq!(stage.gateway.exit().await, Some(0));
    let lines = lines(&file);
    assert_eq!((lines.len(), &lines[0]["bytes"]), (1, &2.into()), "{lines:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_websocket_is_counted_under_hold_head() {
    let stage = Stage::start(&["--hold", "head"]).await;
    let (mut client, mut server, _) = stage.ask(UPGRADE).await;
    server.send(ACCEPTED).await;
    assert_eq!(client.status().await.0, 101);
    client.send("ping").await;
    assert_eq!(server.bytes(4).await, "ping");
    assert!(!stage.is_free().await, "the permit is held");
    drop(client);
    assert_eq!(server.rest().await, "");
    drop(server);
    eventually("the permit is free", async || stage.is_free().await).await;
}

#[cfg(feature = "metrics")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stderr_that_nobody_reads_any_more_is_not_written_without_end() {
    let port = free_port();
    let (down, status) = (format!("http://127.0.0.1:{}", free_port()), port.to_string());
    let mut command = command(&down, &["--status", &status]);
    let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
    drop(process.stderr.take());
    let gateway = Gateway::running(process);
    assert_eq!(seen(&gateway, GET).await.0, 502);
    let dropped = async || {
        let metrics = http::Request::get(format!("http://127.0.0.1:{port}/-/metrics"));
        let text = Client::new().send(metrics).await.1.unwrap();
        let text = String::from_utf8(text.into()).unwrap();
        let series = "gateway_log_lines_dropped_total{log=\"stderr\"} ";
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.unwrap().parse::<u64>().unwrap()
    };
    eventually("lines are dropped", async || dropped().await > 0).await;
    // A report of dropped lines would be the next dropped line, thousands of times.
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        assert!(dropped().await < 10);
    }
}

#[cfg(feature = "metrics")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_tell_of_the_gateway_itself() {
    let (dir, port, down) = (TempDir::new().unwrap(), free_port(), free_port());
    let file = dir.path().join("gateway.toml");
    let contents = format!(
        "listen = \"127.0.0.1:0\"\nupstream = \"http://127.0.0.1:{down}\"\nstatus = {port}\n\
         [[rule]]\nlimit = 9\n"
    );
    std::fs::write(&file, &contents).unwrap();
    let mut command = Gateway::command();
    let gateway = Gateway::running(command.arg("--config").arg(&file).spawn().unwrap());
    let text = async || {
        let metrics = http::Request::get(format!("http://127.0.0.1:{port}/-/metrics"));
        let text = Client::new().send(metrics).await.1.unwrap();
        String::from_utf8(text.into()).unwrap()
    };
    let has = async |line: &str| text().await.lines().any(|found| found == line);
    // Before anything happened.
    assert!(has("gateway_reloads_total{result=\"failed\"} 0").await, "{}", text().await);
    assert!(has("gateway_log_lines_dropped_total{log=\"stderr\"} 0").await, "{}", text().await);
    assert!(has("gateway_log_lines_dropped_total{log=\"access\"} 0").await, "{}", text().await);
    assert!(has("gateway_client_connections 0").await, "{}", text().await);

    let mut open = crate::support::wire::Wire::connect(gateway.url()).await;
    open.send(GET).await;
    assert_eq!(open.status().await.0, 502);
    assert!(has("gateway_upstream_errors_total{reason=\"connect\"} 1").await, "{}", text().await);
    assert!(has("gateway_client_connections 1").await, "{}", text().await);
    drop(open);
    eventually("it is gone", async || has("gateway_client_connections 0").await).await;

    gateway.signal("HUP");
    let reloaded = "gateway_reloads_total{result=\"succeeded\"} 1";
    eventually("the reload is counted", async || has(reloaded).await).await;
    std::fs::write(&file, "nonsense").unwrap();
    gateway.signal("HUP");
    let failed = "gateway_reloads_total{result=\"failed\"} 1";
    eventually("the failure is counted", async || has(failed).await).await;
}
