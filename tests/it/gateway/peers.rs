//! Client addresses: what the upstream receives, and which proxies are trusted.

use super::{Stage, echoing, seen};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_upstream_is_told_of_the_client() {
    let gateway = echoing(&["--limit", "9"]).await;
    let (_, head) = seen(
        &gateway,
        "GET / HTTP/1.1\r\nhost: shop.example:81\r\nx-forwarded-for: 198.51.100.1\r\n\
         x-forwarded-for: 203.0.113.9\r\nx-forwarded-proto: https\r\nforwarded: for=198.51.100.1\r\n\
         x-forwarded-host: evil.example\r\n\r\n",
    )
    .await;
    for line in [
        "host: shop.example:81",
        "x-forwarded-for: 198.51.100.1, 203.0.113.9, 127.0.0.1",
        "x-forwarded-proto: http",
        "forwarded: for=198.51.100.1, for=127.0.0.1;host=\"shop.example:81\";proto=http",
    ] {
        assert!(head.contains(&format!("\r\n{line}\r\n")), "{line}: {head}");
    }
    assert!(!head.contains("evil"), "{head}");

    let trusting = echoing(&["--limit", "9", "--trusted-proxies", "127.0.0.0/8"]).await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nx-forwarded-proto: https\r\n\r\n";
    let (_, head) = seen(&trusting, request).await;
    assert!(head.contains("\r\nx-forwarded-proto: https\r\n"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_upstream_can_be_asked_by_its_own_name() {
    let gateway = echoing(&["--limit", "9", "--host", "upstream"]).await;
    let (_, head) = seen(&gateway, "GET / HTTP/1.1\r\nhost: shop.example\r\n\r\n").await;
    assert!(head.contains("\r\nhost: 127.0.0.1:"), "{head}");
    assert!(head.contains("\r\nx-forwarded-host: shop.example\r\n"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_trusted_proxies_say_for_whom_they_ask() {
    let of =
        |ip: &str| format!("GET / HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 192.0.2.1, {ip}\r\n\r\n");
    let trusting = Stage::start(&["--key", "peer-ip", "--trusted-proxies", "127.0.0.1,10.0.0.0/8"]);
    let trusting = trusting.await;
    let (_first, _first_server, _) = trusting.ask(&of("198.51.100.1")).await;
    let mut same = trusting.client().await;
    same.send(of("198.51.100.1, 10.1.2.3")).await;
    assert_eq!(same.status().await.0, 429);
    let (_second, _second_server, _) = trusting.ask(&of("198.51.100.2")).await;

    let distrusting = Stage::start(&["--key", "peer-ip"]).await;
    let (_first, _first_server, _) = distrusting.ask(&of("198.51.100.1")).await;
    let mut other = distrusting.client().await;
    other.send(of("198.51.100.2")).await;
    assert_eq!(other.status().await.0, 429);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_cannot_erase_the_address_that_a_proxy_adds_behind_its_own() {
    let gateway = echoing(&["--limit", "9", "--trusted-proxies", "127.0.0.0/8"]).await;
    // Each is what a client sends, followed by what the proxy appends.
    for theirs in ["\"", "\"\\", "a\"b", "x=\"y"] {
        let request =
            format!("GET / HTTP/1.1\r\nhost: h\r\nx-forwarded-for: {theirs}, 203.0.113.9\r\n\r\n");
        let (status, head) = seen(&gateway, &request).await;
        let expected = format!("\r\nx-forwarded-for: {theirs}, 203.0.113.9, 127.0.0.1\r\n");
        assert_eq!(status, 200, "{theirs}");
        assert!(head.contains(&expected), "{theirs}: {head}");
    }

    // Nor keep it from being the key.
    let of = |ip: &str| {
        let line = [&b"x-forwarded-for: caf\xe9 \", "[..], ip.as_bytes(), b"\r\n\r\n"].concat();
        [&b"GET / HTTP/1.1\r\nhost: a\r\n"[..], &line].concat()
    };
    let stage = Stage::start(&["--key", "peer-ip", "--trusted-proxies", "127.0.0.0/8"]).await;
    let mut first = stage.client().await;
    first.send(of("198.51.100.1")).await;
    let mut server = stage.upstream.accept().await;
    server.head().await;
    let mut same = stage.client().await;
    same.send(of("198.51.100.1")).await;
    assert_eq!(same.status().await.0, 429);
    let mut other = stage.client().await;
    other.send(of("198.51.100.2")).await;
    tokio::select! {
        mut server = stage.upstream.accept() => drop(server.head().await),
        (status, _) = other.status() => panic!("{status}: another client has another key"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quote_in_forwarded_swallows_nothing_that_stands_behind_it() {
    for args in [&["--limit", "9"] as &[_], &["--limit", "9", "--trusted-proxies", "127.0.0.0/8"]] {
        let gateway = echoing(args).await;
        for (lines, kept) in [
            ("for=\"a", None),
            ("for=\"a\\\"", None),
            // The client's quote opens, and the proxy's closes it.
            ("for=\"a, for=\"[2001:db8::1]\"", None),
            ("for=\"a\r\nforwarded: for=b", None),
            ("for=\"a\r\nforwarded: for=\"[2001:db8::1]\"", None),
            // The proxy repeats a quote from the client's host.
            ("for=\"a, for=192.0.2.1;host=\"b\\\"c\"", None),
            ("for=\"a, for=192.0.2.1;host=\"\"", None),
            ("for=\\\"a\"", None),
            ("for=a\"b\"", None),
            ("\"a\"", None),
            ("for=\"a, b\\\"c\";by=d", Some("for=\"a, b\\\"c\";by=d, ")),
            ("for=\"\" , for=\"_b\" ; by=\"c\"", Some("for=\"\" , for=\"_b\" ; by=\"c\", ")),
            ("for=\"a\"\r\nforwarded: for=2001:db8::1", Some("for=\"a\", for=2001:db8::1, ")),
        ] {
            let request = format!("GET / HTTP/1.1\r\nhost: h\r\nforwarded: {lines}\r\n\r\n");
            let (status, head) = seen(&gateway, &request).await;
            let Some(kept) = kept else {
                assert_eq!(status, 400, "{lines}: {head}");
                continue;
            };
            let expected = format!("\r\nforwarded: {kept}for=127.0.0.1;host=\"h\";proto=http\r\n");
            assert!(head.contains(&expected), "{lines}: {head}");
        }
    }
}
