//! Each bound on time, and that the permit is free afterwards.

use std::time::{Duration, Instant};

use super::Stage;
use crate::support::eventually;

const HEAD: &str = "HTTP/1.1 200 OK\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_that_does_not_end_is_given_up() {
    let stage = Stage::start(&["--header-timeout", "500ms"]).await;
    for start in
        ["", "GET / HTTP/1.1\r\nho", "PRI * HTTP/2.0\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"]
    {
        let mut client = stage.client().await;
        let began = Instant::now();
        client.send(start).await;
        client.rest().await;
        let took = began.elapsed();
        assert!((0.4..3.0).contains(&took.as_secs_f64()), "{start:?}: {took:?}");
    }
    // Sending one byte at a time does not evade it.
    let mut client = stage.client().await;
    let began = Instant::now();
    let drip = async {
        loop {
            client.send("x").await;
            tokio::time::sleep(Duration::from_millis(50)).await;
            if client.is_over().await {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(5), drip).await.expect("it is given up");
    assert!(began.elapsed() < Duration::from_secs(3));
    // A connection between two requests may be silent for longer.
    let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    for _ in 0..2 {
        server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(client.status().await.0, 200);
        tokio::time::sleep(Duration::from_millis(900)).await;
        client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server.head().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_half_of_a_head_behind_a_request_is_given_up() {
    let stage = Stage::start(&["--header-timeout", "1s"]).await;
    let half = "GET /second HTTP/1.1\r\nho";
    let get = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    let post = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello";
    for request in [get, post] {
        for together in [true, false] {
            let first = if together { format!("{request}{half}") } else { request.to_owned() };
            let (mut client, mut server, _) = stage.ask(&first).await;
            if !together {
                // It arrives while the first one is in flight.
                client.send(half).await;
            }
            // Its time begins with the end of the response.
            tokio::time::sleep(Duration::from_millis(1500)).await;
            let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
            server.send(head).await;
            assert_eq!(client.status().await.0, 200, "{first:?}");
            let began = Instant::now();
            client.rest().await;
            let took = began.elapsed();
            assert!((0.8..4.0).contains(&took.as_secs_f64()), "{first:?}: {took:?}");
        }
        // A complete one is answered, and the connection then stays.
        let (mut client, mut server, _) = stage.ask(&format!("{request}{get}")).await;
        for again in [true, false] {
            let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
            server.send(head).await;
            assert_eq!(client.status().await.0, 200);
            if again {
                server = stage.upstream.accept().await;
                server.head().await;
            }
        }
        tokio::time::sleep(Duration::from_millis(1500)).await;
        client.send(get).await;
        // Answered, so that the only permit is free for the next.
        let mut server = stage.upstream.accept().await;
        server.head().await;
        server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(client.status().await.0, 200);
    }
    // So does one whose request is rejected at once.
    let mut client = stage.client().await;
    client.send("GET /%zz HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let (status, head) = client.status().await;
    assert_eq!(status, 400, "{head}");
    client.glimpse().await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    client.send(get).await;
    stage.upstream.accept().await.head().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_that_does_not_answer_is_a_504() {
    let stage = Stage::start(&["--upstream-timeout", "500ms"]).await;
    let (mut client, server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(client.status().await.0, 504);
    drop(server);
    eventually("the permit is free", async || stage.is_free().await).await;

    // The time begins with the end of the request.
    let (mut client, mut server, _) =
        stage.ask("POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 6\r\n\r\n").await;
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        client.send("x").await;
    }
    server.bytes(6).await;
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upload_that_stands_still_is_given_up() {
    // Longer than `fill` waits: once it is given up, the gateway reads the rest.
    let stage = Stage::start(&["--idle-timeout", "2s"]).await;
    let upload = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 100000000\r\n\r\nsome";
    // The client sends no more.
    let (mut client, mut server, _) = stage.ask(upload).await;
    server.bytes(4).await;
    assert_eq!(client.status().await.0, 408);
    eventually("the permit is free", async || stage.is_free().await).await;
    // The upstream accepts no more.
    let (mut client, server, _) = stage.ask(upload).await;
    let sent = client.fill().await;
    assert!(sent < 100_000_000, "{sent}");
    assert_eq!(client.status().await.0, 504);
    drop(server);
    eventually("the permit is free", async || stage.is_free().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_that_stands_still_is_cut_off() {
    let stage = Stage::start(&["--idle-timeout", "600ms"]).await;
    let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    server.send(format!("{HEAD}transfer-encoding: chunked\r\n\r\n")).await;
    assert_eq!(client.status().await.0, 200);
    // It may go on while data moves.
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(200)).await;
        server.send("1\r\nx\r\n").await;
    }
    assert!(!stage.is_free().await);
    let rest = client.rest().await;
    assert!(!rest.ends_with("0\r\n\r\n"), "the end must not look like a whole body: {rest}");
    eventually("the permit is free", async || stage.is_free().await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_loses_its_permit() {
    let stage = Stage::start(&["--idle-timeout", "600ms"]).await;
    let (client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    server.send(format!("{HEAD}content-length: 100000000\r\n\r\n")).await;
    let sent = server.fill().await;
    assert!(sent < 100_000_000, "{sent}");
    eventually("the permit is free", async || stage.is_free().await).await;
    drop(client);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_of_http2_that_is_not_read_loses_its_permit() {
    use http_body_util::Empty;
    use hyper::client::conn::http2;
    use hyper_util::rt::{TokioExecutor, TokioIo};

    let stage = Stage::start(&["--idle-timeout", "600ms"]).await;
    let address = stage.gateway.url().strip_prefix("http://").unwrap();
    let io = TokioIo::new(tokio::net::TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let request = http::Request::get("http://a/").body(Empty::<bytes::Bytes>::new()).unwrap();
    let (response, mut server) = tokio::join!(sender.send_request(request), async {
        let mut server = stage.upstream.accept().await;
        server.head().await;
        server.send(format!("{HEAD}content-length: 100000000\r\n\r\n")).await;
        server
    });
    let response = response.unwrap();
    let sent = server.fill().await;
    assert!(sent < 100_000_000, "{sent}");
    eventually("the permit is free", async || stage.is_free().await).await;
    drop(response);
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_connections_ask_whether_the_peer_is_there() {
    let stage = Stage::start(&[]).await;
    let (client, server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    for peer in [client.local(), stage.upstream.address()] {
        // The gateway's end has that address as its remote one; timer 02 is keepalive.
        let remote = format!(":{:04X}", peer.port());
        let mut lines = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let has_keepalive =
            lines.any(|line| line[2].ends_with(&remote) && line[5].starts_with("02:"));
        assert!(has_keepalive, "{peer}: {sockets}");
    }
    drop((client, server));
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn how_soon_they_ask_can_be_set() {
    let stage = Stage::start(&["--keepalive", "7s"]).await;
    let (client, server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
    for peer in [client.local(), stage.upstream.address()] {
        let remote = format!(":{:04X}", peer.port());
        let mut lines = sockets.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
        let timer = lines.find_map(|line| {
            let when = line[5].strip_prefix("02:").filter(|_| line[2].ends_with(&remote))?;
            u64::from_str_radix(when, 16).ok()
        });
        // In hundredths of a second.
        let left = timer.unwrap_or_else(|| panic!("{peer}: {sockets}"));
        assert!((1..=700).contains(&left), "{peer}: {left}");
    }
    drop((client, server));
}
