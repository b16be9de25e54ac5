//! A backend that checks its calls: no id is used twice, and no two calls of one process run at a time.

use std::collections::HashSet;
use std::sync::{Arc, Weak};

use futures_util::future::{BoxFuture, pending, ready};
use futures_util::{FutureExt, StreamExt};
use tokio::time::Instant;

use crate::backend::{
    AddressedCall, Answer, Answers, Backend, Change, Connection, Counter, Embedded, Listing,
    Mailbox, MemoryBackend, Names, Overrides, PeerMessage, Queries, Query, ServerInfo, Shard,
};
use crate::error::BackendError;
use crate::protocol::{BoundRate, NodeId, Op, PlaceId, Reply, Time};
use crate::sync::atomic::{AtomicUsize, Ordering};

#[derive(Clone)]
pub(super) struct TestBackend(Arc<Inner>);

struct Inner {
    memory: MemoryBackend,
    is_embedded: bool,
    /// The server that counts all semaphores.
    home: AtomicUsize,
    // Of `std`, so that a check adds no point at which threads can switch.
    seen: std::sync::Mutex<Seen>,
    info: ServerInfo,
}

#[derive(Default)]
struct Seen {
    acquired: Vec<PlaceId>,
    calling: HashSet<NodeId>,
}

impl TestBackend {
    fn new(is_embedded: bool) -> Self {
        let (memory, home) = (MemoryBackend::new(), AtomicUsize::new(0));
        let (seen, info) = (std::sync::Mutex::default(), ServerInfo::default());
        Self(Arc::new(Inner { memory, is_embedded, home, seen, info }))
    }

    /// Creates a backend in this process.
    pub(super) fn embedded() -> Self {
        Self::new(true)
    }

    /// Creates a backend behind a connection, which answers a call when its future is polled.
    pub(super) fn remote() -> Self {
        Self::new(false)
    }

    /// Moves all semaphores to another server.
    pub(super) fn move_home(&self) {
        self.0.home.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.memory.is_empty()
    }

    /// Returns the places that were requested, in their order.
    pub(super) fn acquired(&self) -> Vec<PlaceId> {
        self.seen().acquired.clone()
    }

    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.0.seen.lock().expect("not poisoned")
    }

    /// Carries out a call, and checks it.
    fn checked(
        &self,
        node: NodeId,
        call: &crate::protocol::Call,
        carry_out: impl FnOnce() -> Reply,
    ) -> Reply {
        let mut seen = self.seen();
        assert!(seen.calling.insert(node), "two calls of one session at a time");
        if let Op::Acquire { ids, .. } = &call.op {
            ids.iter().for_each(|id| seen.acquire(*id));
        }
        drop(seen);
        let reply = carry_out();
        self.seen().calling.remove(&node);
        reply
    }
}

impl Seen {
    fn acquire(&mut self, id: PlaceId) {
        assert!(!self.acquired.contains(&id), "{id} is used twice");
        self.acquired.push(id);
    }
}

impl Backend for TestBackend {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.memory.attach(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        name.into()
    }

    fn embedded(&self) -> Option<&dyn Embedded> {
        self.0.is_embedded.then_some(self)
    }

    fn shard(&self, _: &str) -> Shard {
        Shard::named(self.0.home.load(Ordering::Acquire).to_string())
    }

    fn connect<'a>(
        &'a self,
        _: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        ready(Ok(Some(Arc::new(self.clone()) as Arc<dyn Connection>))).boxed()
    }
}

impl Embedded for TestBackend {
    fn counter(&self, key: &Arc<str>, epoch: Instant) -> Arc<dyn Counter> {
        let counter = self.0.memory.counter(key, epoch);
        Arc::new(TestCounter { backend: self.clone(), counter })
    }
}

struct TestCounter {
    backend: TestBackend,
    counter: Arc<dyn Counter>,
}

impl Counter for TestCounter {
    fn call(&self, node: NodeId, call: &crate::protocol::Call, now: Time) -> Reply {
        self.backend.checked(node, call, || self.counter.call(node, call, now))
    }
}

impl Connection for TestBackend {
    fn server(&self) -> &ServerInfo {
        &self.0.info
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        pending().boxed()
    }

    fn send(&self, calls: Arc<[AddressedCall]>) -> Answers {
        let backend = self.clone();
        let answers = async move {
            let answer = |AddressedCall { key, node, call }: &AddressedCall| {
                let counter = backend.0.memory.counter(key, Instant::now());
                let carry_out = || counter.call(*node, call, Time::ZERO);
                let reply = backend.checked(*node, call, carry_out);
                Answer::from(reply)
            };
            Ok(calls.iter().map(answer).enumerate().collect())
        };
        answers.into_stream().boxed()
    }
}

impl Queries for TestBackend {
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing> {
        self.0.memory.inspect(key, most, rate)
    }

    fn list(&self, key: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        self.0.memory.list(key, from, most)
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        self.0.memory.overrides(key, known)
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.0.memory.set_override(key, name, change)
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.0.memory.revoke(key, id, take)
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.0.memory.send_message(key, to, message)
    }
}
