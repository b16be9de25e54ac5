//! The least that limits concurrency through Redis: what one would write by hand.
//!
//! It counts permits in a sorted set, from which expired ones are removed, and refuses a request that gets none. It has
//! no queue, no renewals and no hints. One `EVALSHA` takes a permit, another releases it: 8 commands a pair, for
//! Redis.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::cmd;

use super::redis::connect;

const ACQUIRE: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[1]) then
  redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
return 0
";
const RELEASE: &str = "return redis.call('ZREM', KEYS[1], ARGV[1])";
const LEASE_MS: u32 = 10_000;

/// A connection that all clones share.
#[derive(Clone)]
pub(crate) struct Reference {
    connection: MultiplexedConnection,
    acquire: Arc<str>,
    release: Arc<str>,
    next: Arc<AtomicU64>,
}

/// Loads a script, and returns its hash.
pub(crate) async fn load(connection: &mut MultiplexedConnection, script: &str) -> Arc<str> {
    let mut load = cmd("SCRIPT");
    load.arg("LOAD").arg(script);
    let hash: String = load.query_async(connection).await.expect("a hash");
    hash.into()
}

impl Reference {
    pub(crate) async fn connect(url: &str) -> Self {
        let mut connection = connect(url).await;
        let acquire = load(&mut connection, ACQUIRE).await;
        let release = load(&mut connection, RELEASE).await;
        Self { connection, acquire, release, next: Arc::default() }
    }

    /// Returns the id of the place that was taken.
    pub(crate) async fn acquire(&mut self, key: &str, limit: u32) -> Option<String> {
        // The same length as ours.
        let id = format!("reference00:{:x}", self.next.fetch_add(1, Ordering::Relaxed));
        let mut call = cmd("EVALSHA");
        call.arg(&*self.acquire).arg(1).arg(key).arg(limit).arg(LEASE_MS).arg(&id);
        let granted: bool = call.query_async(&mut self.connection).await.expect("an answer");
        granted.then_some(id)
    }

    pub(crate) async fn release(&mut self, key: &str, id: &str) {
        let mut call = cmd("EVALSHA");
        call.arg(&*self.release).arg(1).arg(key).arg(id);
        let _: u32 = call.query_async(&mut self.connection).await.expect("an answer");
    }

    pub(crate) async fn ping(&mut self) {
        cmd("PING").exec_async(&mut self.connection).await.expect("an answer");
    }
}
