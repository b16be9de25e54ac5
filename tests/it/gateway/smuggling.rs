//! Requests that two servers could read in two ways: which are rejected, and how the rest are passed on.
//!
//! docs/gateway.md groups them.

use super::Stage;

/// The outcome.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Rejected with this status; nothing reaches the upstream.
    Rejected(u16),
    /// One request reaches the upstream, and only these lines say how long its body is.
    Passes(&'static str),
}
use Fate::{Passes, Rejected};

const CASES: &[(&str, &str, Fate)] = &[
    (
        "two Content-Length that differ",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        Rejected(400),
    ),
    (
        "a list of Content-Length that differ",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5, 6\r\n\r\nhello",
        Rejected(400),
    ),
    (
        "two Content-Length that are the same",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\ncontent-length: 5\r\n\r\nhello",
        Passes("content-length: 5"),
    ),
    (
        "Content-Length: +5",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: +5\r\n\r\nhello",
        Rejected(400),
    ),
    (
        "Content-Length: -5",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -5\r\n\r\nhello",
        Rejected(400),
    ),
    (
        "Content-Length: 0x5",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0x5\r\n\r\nhello",
        Rejected(400),
    ),
    (
        "Content-Length beyond 64 bits",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 18446744073709551621\r\n\r\nhello",
        Rejected(400),
    ),
    (
        "Content-Length, then Transfer-Encoding",
        "POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        Passes("transfer-encoding: chunked"),
    ),
    (
        "Transfer-Encoding, then Content-Length",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n0\r\n\r\n",
        Passes("transfer-encoding: chunked"),
    ),
    (
        "Transfer-Encoding: xchunked",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "Transfer-Encoding: identity",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: identity\r\n\r\n",
        Rejected(400),
    ),
    (
        "Transfer-Encoding: chunked, identity",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "Transfer-Encoding: gzip, chunked",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        Rejected(501),
    ),
    (
        "Transfer-Encoding: chunked, twice",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        Rejected(501),
    ),
    (
        "Transfer-Encoding: CHUNKED",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: CHUNKED\r\n\r\n0\r\n\r\n",
        Passes("transfer-encoding: chunked"),
    ),
    (
        "Transfer-Encoding with a vertical tab",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "Transfer-Encoding in HTTP/1.0",
        "POST / HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "a blank before the colon",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "a name with an underscore",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer_encoding: chunked\r\ncontent-length: 0\r\n\r\n",
        Passes("content-length: 0"),
    ),
    (
        "a folded line",
        "POST / HTTP/1.1\r\nhost: a\r\nx: y\r\n transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "a first header line that begins with a blank",
        "POST / HTTP/1.1\r\n host: a\r\ncontent-length: 0\r\n\r\n",
        Rejected(400),
    ),
    ("a line without a colon", "GET / HTTP/1.1\r\nhost: a\r\nfoo\r\n\r\n", Rejected(400)),
    ("an empty name", "GET / HTTP/1.1\r\nhost: a\r\n: x\r\n\r\n", Rejected(400)),
    ("NUL in a value", "GET / HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n", Rejected(400)),
    (
        "CR in a value",
        "GET / HTTP/1.1\r\nhost: a\r\nx: a\rtransfer-encoding: chunked\r\n\r\n",
        Rejected(400),
    ),
    ("lines that end with LF alone", "GET / HTTP/1.1\nhost: a\n\n", Passes("")),
    (
        "a chunk's size that ends with LF alone",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\nhello\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "a chunk's size that is not hexadecimal",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "a chunk's size beyond 64 bits",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n10000000000000005\r\nhello\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "a chunk that is longer than its size",
        "POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhello\r\n0\r\n\r\n",
        Rejected(400),
    ),
    (
        "two requests in one line",
        "GET / HTTP/1.1 GET /x HTTP/1.1\r\nhost: a\r\n\r\n",
        Rejected(400),
    ),
    ("HTTP/1.2", "GET / HTTP/1.2\r\nhost: a\r\n\r\n", Rejected(400)),
    ("HTTP/2.0 without its preface", "GET / HTTP/2.0\r\nhost: a\r\n\r\n", Rejected(400)),
    ("no version", "GET /\r\nhost: a\r\n\r\n", Rejected(400)),
    ("a blank in the target", "GET /a b HTTP/1.1\r\nhost: a\r\n\r\n", Rejected(400)),
    ("no Host", "GET / HTTP/1.1\r\n\r\n", Rejected(400)),
    ("two Host", "GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", Rejected(400)),
];

/// Returns the outcome of a request: the status, if there is one before the upstream answers, and what the upstream saw
/// of the length of its body.
async fn send(request: &str) -> (Option<u16>, Option<String>) {
    let stage = Stage::start(&[]).await;
    let mut client = stage.client().await;
    client.send(request).await;
    let mut server = tokio::select! {
        server = stage.upstream.accept() => server,
        head = client.try_head() => return (head.as_deref().map(status), None),
    };
    let head = server.try_head().await;
    let said = client.glimpse().await;
    let lengths = head.as_deref().map(|head| {
        let lengths = head.lines().filter(|line| {
            line.starts_with("content-length:") || line.starts_with("transfer-encoding:")
        });
        lengths.collect::<Vec<_>>().join("; ")
    });
    (Some(said).filter(|said| !said.is_empty()).as_deref().map(status), lengths)
}

fn status(head: &str) -> u16 {
    head.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_ambiguous_is_rejected_or_said_in_one_way() {
    let mut wrong = Vec::new();
    for (name, request, fate) in CASES {
        let found = send(request).await;
        let is_right = match (fate, &found) {
            (Rejected(status), (Some(found), _)) => found == status,
            (Passes(lengths), (None, Some(found))) => found == lengths,
            _ => false,
        };
        if !is_right {
            wrong.push(format!("{name}: {fate:?}, but {found:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_a_request_is_the_next_one_and_is_counted() {
    let stage = Stage::start(&[]).await;
    let two = "POST /first HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n\
        GET /second HTTP/1.1\r\nhost: a\r\n\r\n";
    let (mut client, mut server, head) = stage.ask(two).await;
    assert!(head.starts_with("post /first"), "{head}");
    assert_eq!(server.bytes(5).await, "0\r\n\r\n");
    server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    let head = stage.upstream.accept().await.head().await;
    assert!(head.starts_with("get /second"), "{head}");
    assert!(head.contains("\r\nvia: 1.1 gateway\r\n"), "it came through the gateway: {head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_follows_a_request_with_two_lengths_is_not_read() {
    let stage = Stage::start(&[]).await;
    // Its length is that of Transfer-Encoding (RFC 9112, 6.3), and the connection ends with it.
    let smuggling = "POST /first HTTP/1.1\r\nhost: a\r\ncontent-length: 42\r\n\
        transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /second HTTP/1.1\r\nhost: a\r\n\r\n";
    let (mut client, mut server, head) = stage.ask(smuggling).await;
    assert!(head.starts_with("post /first") && !head.contains("content-length"), "{head}");
    assert_eq!(server.bytes(5).await, "0\r\n\r\n");
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    assert_eq!(client.rest().await, "");
    assert_eq!(server.glimpse().await, "");
    assert!(stage.upstream.is_left_alone().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn huge_heads_are_rejected() {
    let stage = Stage::start(&[]).await;
    let long = "x".repeat(100_000);
    let many = "x: y\r\n".repeat(101);
    for (head, allowed) in [
        (format!("GET /{long} HTTP/1.1\r\nhost: a\r\n\r\n"), &[414, 431][..]),
        (format!("GET / HTTP/1.1\r\nhost: a\r\nx: {long}\r\n\r\n"), &[431]),
        (format!("GET / HTTP/1.1\r\nhost: a\r\n{many}\r\n"), &[431]),
    ] {
        let mut client = stage.client().await;
        client.send(&head).await;
        let (status, _) = client.status().await;
        assert!(allowed.contains(&status), "{status}");
    }
    assert!(stage.upstream.is_left_alone().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_that_are_none_are_a_502() {
    let stage = Stage::start(&[]).await;
    for response in [
        "HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        "HTTP/1.1 200 OK\r\ntransfer-encoding : chunked\r\n\r\n",
        "nonsense\r\n\r\n",
        "",
    ] {
        let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server.send(response).await;
        drop(server);
        assert_eq!(client.status().await.0, 502, "{response:?}");
    }
    // A body that breaks off does not look complete.
    let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    server.send("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel").await;
    drop(server);
    assert_eq!(client.status().await.0, 200);
    assert!(!client.rest().await.ends_with("0\r\n\r\n"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_with_two_lengths_has_that_of_transfer_encoding() {
    let stage = Stage::start(&[]).await;
    for length in [3, 5, 500] {
        let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server
            .send(format!(
                "HTTP/1.1 200 OK\r\ncontent-length: {length}\r\ntransfer-encoding: chunked\r\n\r\n\
                 5\r\nhello\r\n0\r\n\r\n"
            ))
            .await;
        let (status, head) = client.status().await;
        assert_eq!(status, 200);
        assert!(!head.contains("content-length"), "{head}");
        assert!(head.contains("\r\ntransfer-encoding: chunked\r\n"), "{head}");
        assert_eq!(client.bytes(15).await, "5\r\nhello\r\n0\r\n\r\n");
        // Nothing that such an upstream sends after it is a response.
        assert_eq!(server.rest().await, "");
    }
    // A coding that the client does not know of would change what it reads.
    for coding in ["gzip, chunked", "gzip", "chunked, chunked"] {
        let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        server
            .send(format!(
                "HTTP/1.1 200 OK\r\ntransfer-encoding: {coding}\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
            ))
            .await;
        drop(server);
        assert_eq!(client.status().await.0, 502, "{coding}");
    }
}
