//! A backend of two servers, with the data of the embedded one.

use std::future::{pending, ready};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, TryStreamExt, stream};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until};

use crate::backend::{
    AddressedCall, Answer, Answers, Backend, Change, Connection, Embedded, Listing, Mailbox,
    MemoryBackend, Names, OVERRIDES, Overrides, PeerMessage, Queries, Query, QueryError,
    ServerInfo, Shard,
};
use crate::error::BackendError;
use crate::protocol::{BoundRate, NodeId, PlaceId, Time};

/// Servers `a`, which counts `x` at first, and `b`, which counts all else.
#[derive(Clone, Default)]
pub(super) struct TwoServers(pub(super) Arc<World>);

#[derive(Default)]
pub(super) struct World {
    pub(super) memory: MemoryBackend,
    /// The data of b, if it is not the same.
    pub(super) b_memory: Option<MemoryBackend>,
    /// b counts `x`.
    pub(super) moved: AtomicBool,
    /// The next attempt to connect to a finds that b counts `x`, and that a cannot be reached.
    pub(super) a_dies: AtomicBool,
    /// The next attempt to connect to a finds that b counts `x`, and that a has left the backend.
    pub(super) a_ends: AtomicBool,
    pub(super) b_is_slow: AtomicBool,
    /// The map says that a keeps the overrides, until a is asked and says that b does.
    pub(super) a_kept: AtomicBool,
    /// Connections up to this number answer no queries.
    pub(super) silent: AtomicUsize,
    /// So many of the next questions for overrides are not answered.
    pub(super) lost_questions: AtomicUsize,
    pub(super) response_timeout: Option<Duration>,
    /// Over connections up to this number, queries fail as over one that is gone.
    pub(super) broken: AtomicUsize,
    /// The data was lost, so its id is another one.
    pub(super) lost: AtomicBool,
    /// No connection can be opened.
    pub(super) down: AtomicBool,
    /// Connections break at once.
    pub(super) flaps: AtomicBool,
    /// Calls are not answered.
    pub(super) is_mute: AtomicBool,
    /// Calls for `hot` are carried out and answered once `cool` is notified, behind the others of their batch.
    pub(super) is_hot: AtomicBool,
    pub(super) cool: Notify,
    /// How long each place of a call takes, in µs, and until when there is work.
    pub(super) place_us: AtomicUsize,
    pub(super) busy_until: Mutex<Option<Instant>>,
    pub(super) connects: AtomicUsize,
    /// The number of processes that have used it.
    pub(super) attached: AtomicUsize,
    pub(super) connected_at: Mutex<Vec<Instant>>,
    pub(super) cut: Notify,
}

struct OneConnection {
    number: usize,
    is_b: bool,
    world: Arc<World>,
    info: ServerInfo,
}

impl World {
    pub(super) fn is(&self, flag: impl Fn(&Self) -> &AtomicBool) -> bool {
        flag(self).load(Ordering::SeqCst)
    }

    pub(super) fn set(&self, flag: impl Fn(&Self) -> &AtomicBool, value: bool) {
        flag(self).store(value, Ordering::SeqCst);
    }

    pub(super) fn cut(&self) {
        self.cut.notify_waiters();
    }

    /// Adds the work of these calls. Returns when it will be done, if it takes time.
    fn work(&self, calls: &[AddressedCall]) -> Option<Instant> {
        let place = Some(self.place_us.load(Ordering::SeqCst)).filter(|place| *place > 0)?;
        let places = calls.iter().map(|addressed| 1 + addressed.call.op.places()).sum::<usize>();
        let work = Duration::from_micros(u64::try_from(place * places).unwrap());
        let mut busy_until = self.busy_until.lock().unwrap();
        let done = busy_until.unwrap_or_else(Instant::now).max(Instant::now()) + work;
        *busy_until = Some(done);
        Some(done)
    }
}

impl Backend for TwoServers {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.attached.fetch_add(1, Ordering::SeqCst);
        self.0.memory.attach(node, Weak::clone(&mailbox));
        self.0.b_memory.iter().for_each(|memory| memory.attach(node, Weak::clone(&mailbox)));
    }

    fn key(&self, name: &str) -> Arc<str> {
        name.into()
    }

    fn shard(&self, key: &str) -> Shard {
        if key == OVERRIDES && self.0.is(|world| &world.a_kept) {
            return Shard::named("a");
        }
        Shard::named(if key == "x" && !self.0.is(|world| &world.moved) { "a" } else { "b" })
    }

    fn response_timeout(&self) -> Duration {
        self.0.response_timeout.unwrap_or(Duration::from_millis(500))
    }

    fn shards(&self) -> Vec<Shard> {
        vec![Shard::named("a"), Shard::named("b")]
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        let world = &self.0;
        async move {
            let number = world.connects.fetch_add(1, Ordering::SeqCst) + 1;
            world.connected_at.lock().unwrap().push(Instant::now());
            let is_b = shard.name() == Some("b");
            if world.is(|world| &world.down) {
                return Err(BackendError::connection("down"));
            }
            if !is_b && world.is(|world| &world.a_dies) {
                // First the map of slots is requested; then a does not answer.
                sleep(Duration::from_millis(100)).await;
                world.set(|world| &world.moved, true);
                return Err(BackendError::connection("a is dead"));
            }
            if !is_b && world.is(|world| &world.a_ends) {
                world.set(|world| &world.moved, true);
                return Ok(None);
            }
            if is_b && world.is(|world| &world.b_is_slow) {
                sleep(Duration::from_millis(100)).await;
            }
            let data = if world.is(|world| &world.lost) { "e" } else { "d" };
            let info = ServerInfo { data: Some(data.into()), ..ServerInfo::default() };
            Ok(Some(Arc::new(OneConnection { number, is_b, world: Arc::clone(world), info }) as _))
        }
        .boxed()
    }
}

impl Connection for OneConnection {
    fn server(&self) -> &ServerInfo {
        &self.info
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        if self.world.is(|world| &world.flaps) {
            return sleep(Duration::from_millis(1)).boxed();
        }
        self.world.cut.notified().boxed()
    }

    /// A server that has work answers all the time.
    fn heard_at(&self) -> Option<Instant> {
        let busy_until = *self.world.busy_until.lock().unwrap();
        Some(busy_until?.min(Instant::now()))
    }

    fn send(&self, calls: Arc<[AddressedCall]>) -> Answers {
        let (world, is_b) = (Arc::clone(&self.world), self.is_b);
        let sending = async move {
            if world.is(|world| &world.is_mute) {
                return pending::<Result<_, _>>().await;
            }
            if let Some(done) = world.work(&calls) {
                sleep_until(done).await;
            }
            Ok::<_, BackendError>((world, calls))
        };
        let answered = move |world: Arc<World>, calls: Arc<[AddressedCall]>| {
            let is_hot = world.is(|world| &world.is_hot);
            let parts = [false, true].map(|of_hot| {
                let (world, calls) = (Arc::clone(&world), Arc::clone(&calls));
                async move {
                    let these = |(_, call): &(usize, &AddressedCall)| {
                        (is_hot && &*call.key == "hot") == of_hot
                    };
                    let these: Vec<_> = calls.iter().enumerate().filter(these).collect();
                    if of_hot && !these.is_empty() {
                        world.cool.notified().await;
                    }
                    let memory = world.b_memory.as_ref().filter(|_| is_b).unwrap_or(&world.memory);
                    let answer = |(index, addressed): (usize, &AddressedCall)| {
                        let AddressedCall { key, node, call } = addressed;
                        let counter = memory.counter(key, Instant::now());
                        (index, Answer::from(counter.call(*node, call, Time::ZERO)))
                    };
                    Ok(these.into_iter().map(answer).collect())
                }
            });
            stream::iter(parts).then(|part| part)
        };
        sending
            .into_stream()
            .map_ok(move |(world, calls)| answered(world, calls))
            .try_flatten()
            .boxed()
    }
}

impl OneConnection {
    /// Answers a query, unless the connection is silent or broken.
    fn ask<T: Send + 'static>(&self, ask: impl FnOnce(&MemoryBackend) -> Query<T>) -> Query<T> {
        if self.number <= self.world.silent.load(Ordering::SeqCst) {
            return pending().boxed();
        }
        if self.number <= self.world.broken.load(Ordering::SeqCst) {
            let error = QueryError::Failed(BackendError::connection("gone"));
            return ready(Err(error)).boxed();
        }
        ask(&self.world.memory)
    }
}

impl Queries for OneConnection {
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing> {
        self.ask(|memory| memory.inspect(key, most, rate))
    }

    fn list(&self, key: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        self.ask(|memory| memory.list(key, from, most))
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        if !self.is_b && self.world.a_kept.swap(false, Ordering::SeqCst) {
            return ready(Err(QueryError::Moved)).boxed();
        }
        let lost = &self.world.lost_questions;
        if lost.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1)).is_ok() {
            return pending().boxed();
        }
        self.ask(|memory| memory.overrides(key, known))
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.ask(|memory| memory.set_override(key, name, change))
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.ask(|memory| memory.revoke(key, id, take))
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.ask(|memory| memory.send_message(key, to, message))
    }
}
