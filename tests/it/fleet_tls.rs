//! Gateways that reach a cluster, and a master named by Sentinel, only over TLS and with a password.

use tokio::task::block_in_place;

use crate::support::cluster::{MASTERS, TestCluster};
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::redis::TestRedis;
use crate::support::sentinel::TestSentinel;
use crate::support::tls::{self, Tls};
use crate::support::until;

/// Two gateways that trust the authority, and one that does not.
struct Gateways {
    upstream: Upstream,
    client: Client,
    trusting: [Gateway; 2],
    distrusting: Gateway,
}

impl Gateways {
    async fn start(redis: &str, tls: &Tls) -> Self {
        let upstream = Upstream::start().await;
        let start = |trusts: bool| {
            let mut command = Gateway::command();
            command.args(["--listen", "127.0.0.1:0", "--upstream", &upstream.url()]);
            command.args(["--redis", redis, "--key", "header:x-tenant", "--limit", "1"]);
            command.args(["--wait", "10s"]);
            if trusts {
                command.env("SSL_CERT_FILE", tls.authority());
            }
            Gateway::running(command.spawn().unwrap())
        };
        let (trusting, distrusting) = ([start(true), start(true)], start(false));
        Self { trusting, distrusting, upstream, client: Client::new() }
    }

    async fn ask(&self, gateway: &Gateway, tenant: usize, path: &str) -> u16 {
        let url = format!("{}{path}", gateway.url());
        let request = http::Request::get(url).header("x-tenant", format!("tenant-{tenant}"));
        self.client.send(request).await.0.as_u16()
    }

    /// Requests of some tenants, on all shards: one holds at one gateway, the next waits at the other.
    async fn serve(&self) {
        for tenant in 0..12 {
            let first = self.ask(&self.trusting[tenant % 2], tenant, "/?ms=100");
            let second = async {
                eventually("the first is there", async || self.upstream.seen().in_flight == 1)
                    .await;
                self.ask(&self.trusting[(tenant + 1) % 2], tenant, "/").await
            };
            assert_eq!(tokio::join!(first, second), (200, 200), "tenant {tenant}");
        }
        assert_eq!(self.upstream.seen().peak, 1);
    }

    /// A gateway that trusts no authority is not served, and the servers see only that.
    async fn nobody_else(&self, servers: &[TestRedis]) {
        assert_eq!(self.ask(&self.distrusting, 0, "/").await, 503);
        let ours = |server: &TestRedis| {
            let port = format!("laddr=127.0.0.1:{} ", tls::port(server));
            let clients: String = server.command(&["CLIENT", "LIST"]);
            let ours = clients.lines().filter(|line| line.contains("user=app"));
            let (secret, open): (Vec<_>, Vec<_>) = ours.partition(|line| line.contains(&port));
            assert!(open.is_empty(), "{open:?}");
            secret.len()
        };
        assert!(block_in_place(|| servers.iter().map(ours).sum::<usize>()) >= 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_is_reached_over_tls_with_a_password_and_followed() {
    let Some(tls) = Tls::new() else { return };
    let cluster = TestCluster::start_each(|| {
        let mut args = tls.args();
        args.extend(["--tls-cluster".to_owned(), "yes".to_owned()]);
        args
    });
    let ports = [1, MASTERS + 2].map(|node| tls::port(&cluster.nodes[node]));
    let _ = cluster.url_of_least_rights();
    let url = ports.map(|port| format!("127.0.0.1:{port}")).join(",");
    let gateways = Gateways::start(&format!("rediss-cluster://app:secret@{url}"), &tls).await;
    gateways.serve().await;
    gateways.nobody_else(&cluster.nodes).await;
    let replica = &cluster.nodes[MASTERS];
    replica.command::<()>(&["CLUSTER", "FAILOVER"]);
    until("its replica took over", || {
        replica.command::<String>(&["INFO", "replication"]).contains("role:master")
    });
    gateways.serve().await;
    gateways.nobody_else(&cluster.nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_their_master_are_reached_over_tls_with_passwords_and_followed() {
    let Some(tls) = Tls::new() else { return };
    let redis = TestSentinel::start_each(|| tls.args(), tls::port, || tls.settings());
    let url = redis.url_of_least_rights().replace("redis-sentinel", "rediss-sentinel");
    let gateways = Gateways::start(&url, &tls).await;
    gateways.serve().await;
    gateways.nobody_else(&redis.servers).await;
    let before = redis.master();
    redis.failover();
    until("another master is named", || redis.master() != before);
    // For a moment one can use the new master while the other uses the old one.
    until("both have left the old one", || {
        !redis.servers[0].command::<String>(&["CLIENT", "LIST"]).contains("user=app")
    });
    gateways.serve().await;
    gateways.nobody_else(&redis.servers).await;
}
