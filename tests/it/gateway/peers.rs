//! Client addresses: what the upstream is told, and which proxies are trusted.

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
