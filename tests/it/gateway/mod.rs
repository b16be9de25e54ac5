//! The gateway, byte by byte: what it accepts, what it passes on, and when it gives up.

mod adaptive;
mod budgets;
#[cfg(feature = "tls")]
mod certificates;
mod config;
mod config_secrets;
mod connections;
#[cfg(feature = "etcd")]
mod etcd;
mod fields;
mod linger;
mod logs;
mod paths;
mod pauses;
mod peers;
mod protocols;
mod quota;
mod rates;
mod requests;
mod shutdown;
mod smuggling;
mod status;
mod streams;
mod time;
mod upgrades;
mod uploads;

use crate::support::gateway::Gateway;
use crate::support::wire::{Wire, WireServer};

/// A gateway before an upstream that the test plays itself.
struct Stage {
    upstream: WireServer,
    gateway: Gateway,
}

impl Stage {
    /// With `--limit 1 --wait 0s`, and further arguments.
    async fn start(args: &[&str]) -> Self {
        Self::waiting("0s", args).await
    }

    /// With `--limit 1`, and this wait timeout.
    async fn waiting(wait: &str, args: &[&str]) -> Self {
        let upstream = WireServer::start().await;
        let args = [&["--limit", "1", "--wait", wait], args].concat();
        let gateway = Gateway::start(&upstream.url(), &args);
        Self { upstream, gateway }
    }

    async fn client(&self) -> Wire {
        Wire::connect(self.gateway.url()).await
    }

    /// Sends a request, and waits until the upstream has its head.
    async fn ask(&self, request: &str) -> (Wire, Wire, String) {
        let mut client = self.client().await;
        client.send(request).await;
        let mut server = self.upstream.accept().await;
        let head = server.head().await;
        (client, server, head)
    }

    /// Sends requests until one comes over the connection that the gateway keeps. Returns its head. When the gateway
    /// has that connection back after a response is not visible from outside.
    async fn ask_on(&self, server: &mut Wire, client: &mut Wire, request: &str) -> String {
        for _ in 0..100 {
            client.send(request).await;
            let mut other = tokio::select! {
                head = server.head() => return head,
                other = self.upstream.accept() => other,
            };
            other.head().await;
            other.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
            assert_eq!(client.status().await.0, 200);
        }
        panic!("the connection is not used again");
    }

    /// Asserts that all permits are free: the next request reaches the upstream.
    async fn is_free(&self) -> bool {
        let mut client = self.client().await;
        client.send("GET /free HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n").await;
        tokio::select! {
            mut server = self.upstream.accept() => {
                server.head().await;
                server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
                client.status().await.0 == 200
            }
            (status, _) = client.status() => {
                assert_eq!(status, 429);
                false
            }
        }
    }
}

/// A gateway before an upstream that answers with the head of the request.
async fn echoing(args: &[&str]) -> Gateway {
    let upstream = WireServer::start().await;
    let gateway = Gateway::start(&upstream.url(), args);
    upstream.echo_heads();
    gateway
}

/// Returns the status of one request on a connection of its own, and the body: what the upstream saw.
async fn seen(gateway: &Gateway, request: &str) -> (u16, String) {
    let mut client = Wire::connect(gateway.url()).await;
    client.send(request).await;
    let (status, head) = client.status().await;
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let length = length.map_or(0, |length| length.parse().unwrap());
    (status, client.bytes(length).await)
}
