//! A connection as the process's driver uses it.

use std::fmt;
use std::sync::Arc;

use futures_util::future::BoxFuture;
use futures_util::stream::poll_fn;
use futures_util::{FutureExt, StreamExt};
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::changes::Changes;
use super::link::Link;
use super::queries::Questions;
use super::shared::Shared;
use super::wire::Client;
use crate::backend::{
    AddressedCall, Answers, Change, Connection, Listing, Names, Overrides, PeerMessage, Queries,
    Query, ServerInfo,
};
use crate::protocol::{BoundRate, NodeId, PlaceId};
use crate::sync::{Mutex, lock};

/// A connection to a member, over which this process may write.
pub(super) struct EtcdConnection {
    shared: Arc<Shared>,
    questions: Questions,
    changes: Arc<Changes>,
    number: u64,
    server: ServerInfo,
    /// Taken by [`drive`](Connection::drive).
    link: Mutex<Option<Link>>,
}

impl EtcdConnection {
    pub(super) fn new(
        shared: &Arc<Shared>,
        client: Client,
        number: u64,
        server: ServerInfo,
        link: Link,
    ) -> Self {
        let questions = Questions {
            client,
            keys: shared.keys.clone(),
            environment: Arc::clone(&shared.environment),
            order: Arc::default(),
        };
        let (shared, link) = (Arc::clone(shared), Mutex::new(Some(link)));
        Self { shared, questions, changes: Arc::default(), number, server, link }
    }
}

impl Connection for EtcdConnection {
    fn server(&self) -> &ServerInfo {
        &self.server
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        let link = lock(&self.link).take();
        async move {
            if let Some(link) = link {
                link.use_up().await;
            }
        }
        .boxed()
    }

    fn finish(&self) -> BoxFuture<'_, ()> {
        async {
            if !self.shared.with(|engine, _| engine.close()) {
                return;
            }
            self.shared.called.notify_one();
            while !self.shared.with(|engine, _| engine.own.is_closed()) {
                self.shared.revoked.notified().await;
            }
        }
        .boxed()
    }

    fn heard_at(&self) -> Option<Instant> {
        self.shared.heard_at()
    }

    fn send(&self, calls: Arc<[AddressedCall]>) -> Answers {
        let (batch, mut answers) = mpsc::unbounded_channel();
        self.shared.with(|engine, now| engine.handle_calls(self.number, &calls, &batch, now));
        self.shared.called.notify_one();
        poll_fn(move |cx| answers.poll_recv(cx)).boxed()
    }
}

impl Queries for EtcdConnection {
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing> {
        self.questions.clone().inspect(Arc::clone(key), most, rate).boxed()
    }

    fn list(&self, _: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        self.questions.clone().list(from.map(Into::into), most).boxed()
    }

    fn overrides(&self, _: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        self.questions.clone().overrides(known).boxed()
    }

    fn set_override(&self, _: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        let (changes, questions) = (Arc::clone(&self.changes), self.questions.clone());
        let name = Arc::clone(name);
        async move { changes.ask(&questions, name, change).await }.boxed()
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.questions.clone().revoke(Arc::clone(key), id, take, self.shared.node).boxed()
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        let lease = self.shared.with(|engine, _| engine.own.shortest_lease());
        self.questions.clone().send_message(Arc::clone(key), to, message.clone(), lease).boxed()
    }
}

impl fmt::Debug for EtcdConnection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConnection").field("number", &self.number).finish_non_exhaustive()
    }
}
