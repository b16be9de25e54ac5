//! The least that queues through Redis: what one would write by hand to be fair.
//!
//! A request that finds no permit free is put into a list. The script that releases a permit hands it to the first of
//! that list, and a message notifies its process. Leases are not renewed, and a dead waiter is still handed a permit.
//! One `EVALSHA` takes a permit or a place in the list, another releases it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use deadpool_redis::redis::aio::MultiplexedConnection;
use deadpool_redis::redis::{Client, cmd};
use futures_util::StreamExt;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use super::redis::connect;
use super::reference::load;

const ACQUIRE: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
if redis.call('LLEN', KEYS[2]) == 0 and redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[1]) then
  redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[3])
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
redis.call('RPUSH', KEYS[2], ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[2])
return 0
";
const RELEASE: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREM', KEYS[1], ARGV[3])
if redis.call('ZCARD', KEYS[1]) < tonumber(ARGV[1]) then
  local next = redis.call('LPOP', KEYS[2])
  if next then
    redis.call('ZADD', KEYS[1], now + ARGV[2], next)
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    redis.call('PUBLISH', string.match(next, '^[^:]+'), next)
  end
end
";
const LEASE_MS: u32 = 60_000;

/// A process with its connections, which all clones share.
#[derive(Clone)]
pub(crate) struct Naive(Arc<Process>);

struct Process {
    connection: MultiplexedConnection,
    acquire: Arc<str>,
    release: Arc<str>,
    /// The channel of this process: the part of its ids before the colon.
    channel: String,
    next: AtomicU64,
    waiting: Waiting,
    listener: JoinHandle<()>,
}

type Waiting = Arc<Mutex<HashMap<String, oneshot::Sender<()>>>>;

/// Released in a task of its own when it is dropped.
pub(crate) struct NaivePermit {
    process: Arc<Process>,
    name: Arc<str>,
    limit: u32,
    id: String,
}

impl Naive {
    /// `process` distinguishes this process from others.
    pub(crate) async fn connect(url: &str, process: u32) -> Self {
        let mut connection = connect(url).await;
        let acquire = load(&mut connection, ACQUIRE).await;
        let release = load(&mut connection, RELEASE).await;
        let channel = format!("naive{process}");
        let client = Client::open(url).expect("a URL");
        let mut messages = client.get_async_pubsub().await.expect("a connection");
        messages.subscribe(&channel).await.expect("an answer");
        let waiting = Waiting::default();
        let known = Arc::clone(&waiting);
        let listener = tokio::spawn(async move {
            let mut messages = messages.into_on_message();
            while let Some(message) = messages.next().await {
                let id: String = message.get_payload().expect("an id");
                if let Some(granted) = of(&known).remove(&id) {
                    let _ = granted.send(());
                }
            }
        });
        let next = AtomicU64::new(0);
        Self(Arc::new(Process { connection, acquire, release, channel, next, waiting, listener }))
    }

    pub(crate) async fn acquire(&self, name: &Arc<str>, limit: u32) -> NaivePermit {
        let process = &self.0;
        let id = format!("{}:{:x}", process.channel, process.next.fetch_add(1, Ordering::Relaxed));
        let (granted, grant) = oneshot::channel();
        of(&process.waiting).insert(id.clone(), granted);
        let is_held: bool = process.call(&process.acquire, name, limit, &id).await;
        if is_held {
            of(&process.waiting).remove(&id);
        } else {
            grant.await.expect("it is told");
        }
        NaivePermit { process: Arc::clone(process), name: Arc::clone(name), limit, id }
    }

    /// Returns the number of waiters.
    pub(crate) async fn waiting(&self, name: &str) -> u32 {
        let mut connection = self.0.connection.clone();
        let mut call = cmd("LLEN");
        call.arg(format!("naive:queue:{{{name}}}"));
        call.query_async(&mut connection).await.expect("an answer")
    }
}

fn of(waiting: &Waiting) -> std::sync::MutexGuard<'_, HashMap<String, oneshot::Sender<()>>> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Process {
    async fn call<T: deadpool_redis::redis::FromRedisValue>(
        &self,
        script: &str,
        name: &str,
        limit: u32,
        id: &str,
    ) -> T {
        let mut call = cmd("EVALSHA");
        call.arg(script).arg(2);
        call.arg(format!("naive:held:{{{name}}}")).arg(format!("naive:queue:{{{name}}}"));
        call.arg(limit).arg(LEASE_MS).arg(id);
        call.query_async(&mut self.connection.clone()).await.expect("an answer")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

impl Drop for NaivePermit {
    fn drop(&mut self) {
        let (process, name) = (Arc::clone(&self.process), Arc::clone(&self.name));
        let (limit, id) = (self.limit, std::mem::take(&mut self.id));
        tokio::spawn(async move {
            let () = process.call(&process.release, &name, limit, &id).await;
        });
    }
}
