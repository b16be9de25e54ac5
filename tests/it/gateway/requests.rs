//! Requests as the upstream receives them.

use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;

use super::{Stage, echoing, seen};
use crate::support::gateway::Gateway;
use crate::support::wire::{Wire, WireServer};

/// Returns what the upstream saw of a request over HTTP/2, and the status.
pub(super) async fn by_http2(gateway: &Gateway, request: http::request::Builder) -> (u16, String) {
    let address = gateway.url().strip_prefix("http://").unwrap();
    let io = TokioIo::new(TcpStream::connect(address).await.unwrap());
    let (mut sender, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
    tokio::spawn(connection);
    let request = request.body(Full::<bytes::Bytes>::default()).unwrap();
    let response = sender.send_request(request).await.unwrap();
    let status = response.status().as_u16();
    let body = response.into_body().collect().await.unwrap().to_bytes();
    (status, String::from_utf8(body.into()).unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_any_method_arrive() {
    let stage = Stage::start(&[]).await;
    for method in ["GET", "HEAD", "DELETE", "OPTIONS", "POST", "BREW"] {
        let head = format!("{method} / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n");
        let (mut client, mut server, head) = stage.ask(&head).await;
        assert!(head.contains("\r\ntransfer-encoding: chunked\r\n"), "{head}");
        client.send("5\r\nhello\r\n0\r\n\r\n").await;
        assert_eq!(server.bytes(15).await, "5\r\nhello\r\n0\r\n\r\n", "{method}");
        server.send("HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
        assert_eq!(client.status().await.0, 204);

        let head = format!("{method} / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nhello");
        let (mut client, mut server, head) = stage.ask(&head).await;
        assert!(head.contains("\r\ncontent-length: 5\r\n"), "{head}");
        assert_eq!(server.bytes(5).await, "hello", "{method}");
        server.send("HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
        assert_eq!(client.status().await.0, 204);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_to_head_has_the_length_that_the_upstream_said_and_no_other() {
    let stage = Stage::start(&[]).await;
    for (said, expected) in [("", false), ("content-length: 17\r\n", true)] {
        let (mut client, mut server, _) = stage.ask("HEAD / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server.send(format!("HTTP/1.1 200 OK\r\n{said}connection: close\r\n\r\n")).await;
        let head = client.head().await;
        assert_eq!(head.contains("content-length: 17"), expected, "{head}");
        assert_eq!(head.contains("content-length"), expected, "{head}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cookies_of_http2_are_one_field_for_http1() {
    let gateway = echoing(&["--limit", "9"]).await;
    let request = http::Request::get("http://shop.example/x")
        .header("cookie", "a=1")
        .header("cookie", "b=2")
        .header("cookie", "c=3; d=4");
    let (status, head) = by_http2(&gateway, request).await;
    assert_eq!(status, 200);
    assert!(head.starts_with("get /x http/1.1\r\n"), "{head}");
    assert!(head.contains("\r\ncookie: a=1; b=2; c=3; d=4\r\n"), "{head}");
    assert!(head.contains("\r\nhost: shop.example\r\n"), "{head}");
    assert!(head.contains("\r\nvia: 2.0 gateway\r\n"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn via_says_by_which_version_a_request_came() {
    let gateway = echoing(&["--limit", "9"]).await;
    let (_, head) = seen(&gateway, "GET / HTTP/1.1\r\nhost: a\r\nvia: 1.1 x\r\n\r\n").await;
    assert!(head.contains("\r\nvia: 1.1 x\r\nvia: 1.1 gateway\r\n"), "{head}");
    let (_, head) = seen(&gateway, "GET / HTTP/1.0\r\n\r\n").await;
    assert!(head.contains("\r\nvia: 1.0 gateway\r\n"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_for_one_host() {
    let gateway = echoing(&["--limit", "9"]).await;
    for (request, status, host) in [
        ("GET / HTTP/1.1\r\nhost: a.example\r\n\r\n", 200, "a.example"),
        ("GET / HTTP/1.1\r\nhost: [::1]:80\r\n\r\n", 200, "[::1]:80"),
        // The target takes precedence (RFC 9112, 3.2.2).
        ("GET http://b.example/ HTTP/1.1\r\nhost: a.example\r\n\r\n", 200, "b.example"),
        ("GET / HTTP/1.1\r\n\r\n", 400, ""),
        ("GET http://b.example/ HTTP/1.1\r\n\r\n", 400, ""),
        ("GET / HTTP/1.1\r\nhost: a\r\nhost: a\r\n\r\n", 400, ""),
        ("GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400, ""),
        ("GET / HTTP/1.1\r\nhost:\r\n\r\n", 400, ""),
        ("GET / HTTP/1.1\r\nhost: a, b\r\n\r\n", 400, ""),
        ("GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400, ""),
        ("GET / HTTP/1.1\r\nhost: user@a\r\n\r\n", 400, ""),
        ("GET / HTTP/1.1\r\nhost: a:99999\r\n\r\n", 400, ""),
        ("CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n", 501, ""),
    ] {
        let (found, head) = seen(&gateway, request).await;
        assert_eq!(found, status, "{request}");
        assert!(
            status != 200 || head.contains(&format!("\r\nhost: {host}\r\n")),
            "{request}: {head}"
        );
    }
    for (host, status) in [("shop.example", 200), ("other.example", 400)] {
        let request = http::Request::get("http://shop.example/").header("host", host);
        assert_eq!(by_http2(&gateway, request).await.0, status, "{host}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_see_the_host_that_the_upstream_gets() {
    let args = ["--key", "header:host", "--limit", "9", "--limit-for", "b.example=0"];
    let gateway = echoing(&args).await;
    for (request, status) in [
        ("GET / HTTP/1.1\r\nhost: a.example\r\n\r\n", 200),
        ("GET / HTTP/1.1\r\nhost: b.example\r\n\r\n", 429),
        // A host has one spelling.
        ("GET / HTTP/1.1\r\nhost: B.Example:\r\n\r\n", 429),
        ("GET http://b.example/ HTTP/1.1\r\nhost: a.example\r\n\r\n", 429),
        ("GET http://b.example/ HTTP/1.0\r\n\r\n", 429),
        ("GET http://a.example/ HTTP/1.1\r\nhost: b.example\r\n\r\n", 200),
    ] {
        let (found, head) = seen(&gateway, request).await;
        assert_eq!(found, status, "{request}: {head}");
        assert!(status != 200 || head.contains("\r\nhost: a.example\r\n"), "{request}: {head}");
    }
    for (url, status) in
        [("http://a.example/", 200), ("http://b.example/", 429), ("http://B.EXAMPLE/", 429)]
    {
        assert_eq!(by_http2(&gateway, http::Request::get(url)).await.0, status, "{url}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_spelling_of_a_host_gets_around_its_limit() {
    let limits = ["--limit-for", "b.example=0", "--limit-for", "[2001:db8::1]=0"];
    let gateway = echoing(&[&["--key", "header:host", "--limit", "9"], &limits[..]].concat()).await;
    let ask =
        async |host: &str| seen(&gateway, &format!("GET / HTTP/1.1\r\nhost: {host}\r\n\r\n")).await;
    for host in [
        "b.example",
        "B.EXAMPLE:",
        "b.example:80",
        "b.example:0080",
        "b.example:443",
        "b.example:8080",
        "b.example.",
        "B.Example.:80",
        "[2001:db8::1]",
        "[2001:DB8:0:0:0:0:0:1]",
        "[2001:db8::0001]:443",
    ] {
        assert_eq!(ask(host).await.0, 429, "{host}");
        let url = format!("http://{host}/");
        let (status, _) = by_http2(&gateway, http::Request::get(&url)).await;
        assert_eq!(status, 429, "{url}");
    }
    for host in [
        "b.example:+80",
        "b.example:-80",
        "b.example:80a",
        "b.example:65536",
        "b.example..",
        "b..example",
        ".b.example",
        ".",
        ":80",
        "[2001:db8::1",
        "[2001:db8::1]x",
        "[2001:db8::1]x:80",
        "[b.example]",
    ] {
        assert_eq!(ask(host).await.0, 400, "{host}");
    }
    // The upstream receives the port, too.
    for (host, expected) in [
        ("A.Example.:08081", "a.example:8081"),
        ("a.example:80", "a.example:80"),
        ("[2001:db8:0::2]:80", "[2001:db8::2]:80"),
    ] {
        let (status, head) = ask(host).await;
        assert_eq!(status, 200, "{host}");
        assert!(head.contains(&format!("\r\nhost: {expected}\r\n")), "{host}: {head}");
        assert!(head.contains(&format!(";host=\"{expected}\";")), "{host}: {head}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_preflight_needs_a_permit_like_any_other_request() {
    let preflight = "OPTIONS / HTTP/1.1\r\nhost: a\r\norigin: https://b.example\r\n\
        access-control-request-method: POST\r\naccess-control-request-headers: x-tenant\r\n\r\n";
    let stage = Stage::start(&["--key", "header:x-tenant"]).await;
    let mut client = stage.client().await;
    client.send(preflight).await;
    assert_eq!(client.status().await.0, 400);
    assert!(client.glimpse().await.contains("missing_key"));

    let stage = Stage::start(&["--key", "header:x-tenant", "--missing-key", "shared"]).await;
    let (_first, _server, head) = stage.ask(preflight).await;
    assert!(head.contains("\r\naccess-control-request-method: post\r\n"), "{head}");
    let mut second = stage.client().await;
    second.send(preflight).await;
    assert_eq!(second.status().await.0, 429);
    // It takes nothing from those that have a key.
    stage.ask("GET / HTTP/1.1\r\nhost: a\r\nx-tenant: t\r\n\r\n").await;
}

#[test]
fn a_limit_for_a_host_that_no_request_has_is_refused() {
    let refused = |args: &[&str]| {
        // It could not listen there either.
        let common =
            ["--listen", "192.0.2.1:0", "--upstream", "http://127.0.0.1:1", "--limit", "9"];
        let output = Gateway::command().args(common).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let key = ["--key", "header:host", "--limit-for"];
    for host in ["b.example:80=0", "B.example=0", "b.example.=0", "[2001:DB8::1]=0", "b/c=0", "=0"]
    {
        let said = refused(&[&key[..], &[host]].concat());
        assert!(said.contains("--limit-for: a key is not a host as it is counted"), "{said}");
        assert!(!said.contains("example"), "a key may be a secret: {said}");
    }
    let said = refused(&["--fair-by", "header:host", "--weight-for", "b.example:80=2"]);
    assert!(said.contains("--weight-for: a key is not a host as it is counted"), "{said}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_see_the_cookies_that_the_upstream_gets() {
    let args = ["--key", "header:cookie", "--limit", "9", "--limit-for", "a=1; b=2=0"];
    let gateway = echoing(&args).await;
    let cookies = |crumbs: &[&str]| {
        let request = http::Request::get("http://shop.example/");
        crumbs.iter().fold(request, |request, crumb| request.header("cookie", *crumb))
    };
    for (crumbs, status) in [
        (&["a=1; b=2"] as &[_], 429),
        (&["a=1", "b=2"], 429),
        (&["a=1", "b=3"], 200),
        (&["a=1"], 200),
        (&["b=2", "a=1"], 200),
    ] {
        assert_eq!(by_http2(&gateway, cookies(crumbs)).await.0, status, "{crumbs:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_cannot_take_away_what_the_limit_goes_by() {
    let args =
        ["--key", "header:x-api-key", "--fair-by", "header:x-tenant", "--cost", "header:x-units"];
    let gateway = echoing(&[&["--limit", "9"], &args[..]].concat()).await;
    let (status, head) = seen(
        &gateway,
        "GET / HTTP/1.1\r\nhost: a\r\nx-api-key: k\r\nx-tenant: t\r\nx-units: 2\r\n\
         authorization: Bearer b\r\nx-hop: h\r\nkeep-alive: timeout=1\r\ncookie: c=1\r\n\
         connection: X-Api-Key, x-tenant, x-units, authorization, x-hop\r\n\
         connection: cookie, host, content-length, x-forwarded-for\r\n\r\n",
    )
    .await;
    assert_eq!(status, 200, "{head}");
    for line in [
        "x-api-key: k",
        "x-tenant: t",
        "x-units: 2",
        "authorization: bearer b",
        "cookie: c=1",
        "host: a",
    ] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line}: {head}");
    }
    for name in ["x-hop", "keep-alive", "connection:"] {
        assert!(!head.contains(name), "{name}: {head}");
    }
    let nameless = "GET / HTTP/1.1\r\nhost: a\r\nx-tenant: t\r\nconnection: x-api-key\r\n\r\n";
    assert_eq!(seen(&gateway, nameless).await.0, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_on_a_kept_connection_that_was_closed_is_sent_again() {
    let stage = Stage::start(&[]).await;
    for (method, again) in [("GET", true), ("PUT", true), ("POST", false)] {
        let request = format!("{method} / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n");
        let (mut client, mut server, _) = stage.ask(&request).await;
        server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(client.status().await.0, 200);
        // Closed as the request comes: the gateway cannot know before it sends.
        let head = stage.ask_on(&mut server, &mut client, &request).await;
        assert!(head.starts_with(&method.to_lowercase()), "{head}");
        drop(server);
        if again {
            let mut server = stage.upstream.accept().await;
            assert!(server.head().await.starts_with(&method.to_lowercase()));
            server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
            assert_eq!(client.status().await.0, 200, "{method}");
        } else {
            assert_eq!(client.status().await.0, 502, "{method}");
            assert!(stage.upstream.is_left_alone().await, "{method}");
        }
    }
    // Once: an upstream that closes each connection is not tried endlessly.
    let request = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    let (mut client, mut server, _) = stage.ask(request).await;
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    stage.ask_on(&mut server, &mut client, request).await;
    drop(server);
    stage.upstream.accept().await.head().await;
    assert_eq!(client.status().await.0, 502);
    assert!(stage.upstream.is_left_alone().await);
    tokio::time::timeout(Duration::from_secs(1), stage.is_free()).await.unwrap();
}

/// A frame of HTTP/2: its kind and its stream.
async fn frame(wire: &mut Wire) -> (u8, u32) {
    let head = wire.raw(9).await;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    wire.raw(length as usize).await;
    (head[3], u32::from_be_bytes([head[5], head[6], head[7], head[8]]))
}

/// Accepts a connection of HTTP/2.
async fn accept_http2(upstream: &WireServer) -> Wire {
    let mut server = upstream.accept().await;
    assert_eq!(server.raw(24).await, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    server.send([0, 0, 0, 4, 0, 0, 0, 0, 0]).await;
    server
}

/// Waits for the head of a request. Returns its stream.
async fn head_of_http2(server: &mut Wire) -> u32 {
    loop {
        if let (1, stream) = frame(server).await {
            return stream;
        }
    }
}

/// Answers 200, without a body.
async fn answer_http2(server: &mut Wire, stream: u32) {
    let [a, b, c, d] = stream.to_be_bytes();
    server.send([0, 0, 1, 1, 5, a, b, c, d, 0x88]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_the_upstream_did_not_look_at_is_sent_again() {
    let upstream = WireServer::start().await;
    let url = upstream.url().replace("http://", "h2c://");
    let gateway = Gateway::start(&url, &["--limit", "1", "--wait", "0s"]);
    let mut client = Wire::connect(gateway.url()).await;
    let request = "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n";
    client.send(request).await;
    let mut server = accept_http2(&upstream).await;
    let stream = head_of_http2(&mut server).await;
    answer_http2(&mut server, stream).await;
    assert_eq!(client.status().await.0, 200);

    // As nginx does after a number of requests: GOAWAY without an error, which names the previous stream as the last.
    client.send(request).await;
    assert_eq!(head_of_http2(&mut server).await, stream + 2);
    let [a, b, c, d] = stream.to_be_bytes();
    server.send([0, 0, 8, 7, 0, 0, 0, 0, 0, a, b, c, d, 0, 0, 0, 0]).await;
    let mut server = accept_http2(&upstream).await;
    let stream = head_of_http2(&mut server).await;
    answer_http2(&mut server, stream).await;
    assert_eq!(client.status().await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_of_http2_may_have_as_many_fields_as_one_of_http1() {
    let stage = Stage::start(&[]).await;
    let (_holder, _server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    // The permit is taken: a request that is counted is rejected with 429.
    for (count, expected) in [(100, 429), (101, 431), (1700, 431)] {
        let uri = format!("{}/", stage.gateway.url());
        let mut request = http::Request::get(uri);
        for _ in 0..count {
            request = request.header("x", "");
        }
        let (status, said) = by_http2(&stage.gateway, request).await;
        assert_eq!(status, expected, "{count}: {said}");
    }
}
