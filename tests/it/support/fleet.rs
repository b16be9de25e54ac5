//! Several gateways on one Redis, before one upstream.

use super::eventually;
use super::gateway::{Client, Gateway, Upstream};
use super::redis::TestRedis;

pub(crate) struct Fleet {
    pub(crate) redis: TestRedis,
    pub(crate) upstream: Upstream,
    pub(crate) gateways: Vec<Gateway>,
    pub(crate) client: Client,
}

impl Fleet {
    pub(crate) async fn start(processes: usize, args: &[&str]) -> Self {
        let redis = TestRedis::start();
        let upstream = Upstream::start().await;
        let mut fleet = Self { redis, upstream, gateways: Vec::new(), client: Client::new() };
        for _ in 0..processes {
            fleet.add(args);
        }
        fleet
    }

    pub(crate) fn add(&mut self, args: &[&str]) {
        let redis = self.redis.url();
        let args = [&["--redis", &redis], args].concat();
        self.gateways.push(Gateway::start(&self.upstream.url(), &args));
    }

    pub(crate) fn url(&self, gateway: usize, path: &str) -> String {
        format!("{}{path}", self.gateways[gateway % self.gateways.len()].url())
    }

    /// Asserts that all is quiet, and nothing is left.
    pub(crate) async fn quiet(&self) {
        eventually("nothing is left", async || {
            self.redis.keys() == 0 && self.upstream.seen().in_flight == 0
        })
        .await;
    }
}
