//! A connection in use: what the engine asks for is sent over it, and what comes is passed to the engine.

mod event;
mod readings;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;
use tokio::time::{Instant, timeout};

use self::event::{Event, Timers};
use self::readings::{SEMAPHORES_MAX, page_of, read_message};
pub(super) use self::readings::{Signs, behind, signs};
use super::clock::Now;
use super::engine::{Engine, Request};
use super::keys::Folder;
use super::requests::{self, Outcome};
use super::shared::Shared;
use super::status::warning;
use super::wire::messages::{
    EventType, KeyValue, LeaseGrantRequest, LeaseGrantResponse, LeaseRevokeRequest, RangeRequest,
    StatusResponse, TxnResponse,
};
use super::wire::{
    Client, Driver, KeepAlive, KeptAlive, KeyRange, Reason, Watch, WatchMessage, WireError,
};
use crate::error::BackendError;
use crate::protocol::liveness::{Action, LeaseId, RequestId, Row, Seen, Sign, Term};

/// How long an answer may take. The member is given up then.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// The folders that are watched, in this order.
const SEMAPHORES: usize = 0;
const SIGNS: usize = 1;
const MESSAGES: usize = 2;
const OVERRIDES: usize = 3;

/// A connection to a member, with everything that is under way on it. Its end is that of the connection.
pub(super) struct Link {
    shared: Arc<Shared>,
    number: u64,
    client: Client,
    driver: Driver,
    keep_alive: KeepAlive,
    /// The keepalives that are not answered, in their order.
    kept: VecDeque<(RequestId, LeaseId)>,
    /// `None`: another one is being opened.
    watch: Option<Watch>,
    answers: FuturesUnordered<BoxFuture<'static, Result<Answered, WireError>>>,
    timers: Timers,
    /// Why it ended, or why etcd refused what it needs.
    error: Option<BackendError>,
    has_warned: bool,
}

/// An answer of the member.
enum Answered {
    Granted(RequestId, Result<LeaseGrantResponse, WireError>),
    Sign(RequestId, Result<(Option<Sign>, Term), WireError>),
    Revoked(RequestId, Result<(), WireError>),
    Transaction(Arc<str>, Result<TxnResponse, WireError>),
    Listed(Result<Signs, WireError>),
    Searched(Result<(Vec<KeyValue>, bool), WireError>),
    /// The signs of life before another watch.
    Watched(Result<Signs, WireError>),
    Status(Result<StatusResponse, WireError>),
}

impl Link {
    /// `signs`: those after which the watch begins.
    pub(super) fn new(
        shared: &Arc<Shared>,
        number: u64,
        (client, driver): (Client, Driver),
        (rows, revision): Signs,
    ) -> Self {
        shared.with(|engine, now| engine.handle_connected(number, rows, revision, now));
        let keep_alive = client.keep_alive();
        let mut link = Self {
            shared: Arc::clone(shared),
            number,
            client,
            driver,
            keep_alive,
            kept: VecDeque::new(),
            watch: None,
            answers: FuturesUnordered::new(),
            timers: Timers::new(),
            error: None,
            has_warned: false,
        };
        link.watch(revision);
        link
    }

    /// Runs until this process may write.
    ///
    /// # Errors
    ///
    /// If the connection breaks, or the member does not answer.
    pub(super) async fn register(&mut self) -> Result<(), BackendError> {
        let number = self.number;
        self.run(|engine, now| engine.is_registered(number, now)).await
    }

    /// The last refusal of what every process needs.
    pub(super) fn refusal(&mut self) -> Option<BackendError> {
        self.error.take()
    }

    /// Runs until the connection ends.
    pub(super) async fn use_up(mut self) {
        let result = self.run(|_, _| false).await;
        self.error = result.err();
    }

    async fn run(&mut self, is_done: impl Fn(&Engine, Now) -> bool) -> Result<(), BackendError> {
        loop {
            let (due, done) = self.send_requests(&is_done);
            if done {
                return Ok(());
            }
            self.timers.set_due(due);
            match self.next_event().await {
                Event::Closed => {
                    return Err(BackendError::connection("etcd closed the connection"));
                }
                Event::KeptAlive(kept) => self.handle_kept_alive(kept?)?,
                Event::Answered(answered) => self.handle_answer(answered?)?,
                Event::Due => {
                    if self.shared.with(Engine::handle_timeout) {
                        return Err(WireError::silent().into());
                    }
                }
                Event::StatusDue => {
                    let client = self.client.clone();
                    self.ask(async move { Answered::Status(client.status().await) });
                }
                Event::Called => {}
                Event::Watched(message) => self.handle_watch(message?)?,
                Event::Silent => self.watch.iter().for_each(Watch::progress),
            }
        }
    }

    /// Sends what the engine asks for. Returns when it is to be asked again, and whether it is done.
    fn send_requests(&mut self, is_done: impl Fn(&Engine, Now) -> bool) -> (Option<Instant>, bool) {
        loop {
            let polled = self.shared.with(|engine, now| match engine.poll_request(now) {
                Some(request) => Ok(request),
                None => {
                    let timeout = engine.poll_timeout().and_then(|at| now.instant_of(at));
                    Err((timeout, is_done(engine, now)))
                }
            });
            match polled {
                Ok(request) => self.send(request),
                Err(waits) => return waits,
            }
        }
    }

    fn send(&mut self, request: Request) {
        let (client, keys) = (self.client.clone(), self.shared.keys.clone());
        match request {
            Request::Sign(request) => self.send_for_sign(request.id, request.action),
            Request::Transaction { key, transaction } => {
                let request = requests::transaction(&keys, &key, &transaction);
                self.ask(async move { Answered::Transaction(key, client.txn(request).await) });
            }
            Request::List => {
                self.ask(async move { Answered::Listed(signs(&client, &keys).await) });
            }
            Request::Search { from } => {
                let Folder { key, range_end } = keys.semaphores();
                let key = from.map_or(key, Bytes::from);
                let request =
                    RangeRequest { key, range_end, limit: SEMAPHORES_MAX, ..Default::default() };
                self.ask(async move {
                    let page = client.range(request).await;
                    Answered::Searched(page.map(|page| (page.kvs, page.more)))
                });
            }
        }
    }

    fn send_for_sign(&mut self, id: RequestId, action: Action) {
        let (client, keys, node) =
            (self.client.clone(), self.shared.keys.clone(), self.shared.node);
        match action {
            Action::KeepAlive { lease } => {
                if self.keep_alive.send(lease) {
                    self.kept.push_back((id, lease));
                } else {
                    self.shared.with(|engine, now| engine.own.handle_refused(id, now.time));
                }
            }
            Action::Grant { seconds } => self.ask(async move {
                let request = LeaseGrantRequest { ttl: seconds.into(), id: 0 };
                Answered::Granted(id, client.lease_grant(request).await)
            }),
            Action::PutSign { seconds, lease, over } => self.ask(async move {
                let request = requests::put_sign(&keys, Row { node, seconds }, lease, over);
                let response = client.txn(request).await;
                Answered::Sign(id, response.map(|response| requests::sign_in(&response)))
            }),
            Action::ReadSign { seconds } => self.ask(async move {
                let request = requests::read(keys.sign(Row { node, seconds }));
                let response = client.range(request).await;
                let sign = response.map(|response| requests::sign(&response, response.header));
                Answered::Sign(id, sign)
            }),
            Action::Revoke { lease } => self.ask(async move {
                let response = client.lease_revoke(LeaseRevokeRequest { id: lease }).await;
                Answered::Revoked(id, response.map(drop))
            }),
        }
    }

    fn ask(&self, answer: impl Future<Output = Answered> + Send + 'static) {
        let answer = timeout(ANSWER_TIMEOUT, answer);
        self.answers.push(answer.map(|answer| answer.map_err(|_| WireError::silent())).boxed());
    }

    fn watch(&mut self, revision: u64) {
        let keys = &self.shared.keys;
        let start_revision = i64::try_from(revision).map_or(0, |revision| revision + 1);
        let folder = |Folder { key, range_end }| KeyRange { key, range_end, start_revision };
        let single = |key| KeyRange { key, range_end: Bytes::new(), start_revision };
        let ranges = vec![
            folder(keys.semaphores()),
            folder(keys.signs()),
            single(keys.messages(self.shared.node)),
            single(keys.overrides()),
        ];
        self.watch = Some(self.client.watch(ranges));
    }

    // ===== what comes =====

    fn handle_kept_alive(&mut self, kept: KeptAlive) -> Result<(), BackendError> {
        let KeptAlive { lease, ttl, term } = kept;
        let Some((id, _)) = self.kept.pop_front().filter(|(_, asked)| *asked == lease) else {
            return Err(BackendError::connection("etcd answered a keepalive that was not sent"));
        };
        self.shared.heard();
        self.shared.with(|engine, now| {
            match ttl {
                Some(ttl) => engine.own.handle_kept_alive(id, seconds(ttl), term, now.time),
                None => engine.own.handle_no_lease(id, now.time),
            }
            engine.handle_own_sign(now);
        });
        Ok(())
    }

    fn handle_answer(&mut self, answered: Answered) -> Result<(), BackendError> {
        self.shared.heard();
        match answered {
            Answered::Granted(id, Ok(LeaseGrantResponse { id: lease, ttl, .. })) => {
                let ttl = u64::try_from(ttl).map_or(0, seconds);
                self.with_own_sign(|engine, now| {
                    engine.own.handle_granted(id, lease, ttl, now.time);
                });
            }
            Answered::Sign(id, Ok((sign, term))) => self.with_own_sign(|engine, now| {
                engine.own.handle_sign(id, sign, term, now.time);
            }),
            Answered::Revoked(id, Ok(())) => {
                self.shared.with(|engine, _| engine.own.handle_revoked(id));
                self.shared.revoked.notify_one();
            }
            Answered::Granted(id, Err(error))
            | Answered::Sign(id, Err(error))
            | Answered::Revoked(id, Err(error)) => self.handle_refused_sign(id, error)?,
            Answered::Transaction(key, Ok(response)) => {
                let outcome = requests::outcome(&response);
                let is_malformed = outcome == Outcome::Malformed;
                let has_lost_data = self.shared.with(|engine, now| {
                    engine.handle_outcome(&key, Ok(outcome), now);
                    engine.has_lost_data()
                });
                if has_lost_data {
                    return Err(BackendError::connection("etcd has older data than before"));
                }
                if is_malformed {
                    return Err(BackendError::connection(
                        "etcd's answer is of another transaction",
                    ));
                }
            }
            Answered::Transaction(key, Err(error)) => {
                let is_over = ends_connection(&error);
                self.shared.with(|engine, now| engine.handle_outcome(&key, Err(&error), now));
                if is_over {
                    return Err(error.into());
                }
            }
            Answered::Listed(listed) => {
                let listed = self.unless_refused(listed)?;
                self.shared.with(|engine, now| engine.handle_listed(listed, now));
            }
            Answered::Searched(page) => {
                let page = self.unless_refused(page)?.map(|(kvs, more)| page_of(kvs, more));
                self.shared.with(|engine, now| engine.handle_searched(page, now));
            }
            Answered::Watched(signs) => {
                let (rows, revision) = signs?;
                self.shared.with(|engine, now| engine.handle_watched(rows, revision, now));
                self.watch(revision);
            }
            Answered::Status(status) => {
                if let Some(status) = self.unless_refused(status)? {
                    self.shared.warn(warning(&status).as_deref());
                }
            }
        }
        Ok(())
    }

    fn with_own_sign(&self, act: impl FnOnce(&mut Engine, Now)) {
        self.shared.with(|engine, now| {
            act(engine, now);
            engine.handle_own_sign(now);
        });
    }

    fn handle_refused_sign(&mut self, id: RequestId, error: WireError) -> Result<(), BackendError> {
        self.shared.with(|engine, now| match error.reason() {
            Reason::LeaseNotFound => engine.own.handle_no_lease(id, now.time),
            _ => engine.own.handle_refused(id, now.time),
        });
        self.shared.revoked.notify_one();
        if ends_connection(&error) {
            return Err(error.into());
        }
        self.error = Some(error.into());
        Ok(())
    }

    /// What was read; `None` if that was refused.
    fn unless_refused<T>(&mut self, read: Result<T, WireError>) -> Result<Option<T>, BackendError> {
        match read {
            Ok(read) => Ok(Some(read)),
            Err(error) if ends_connection(&error) => Err(error.into()),
            Err(error) => {
                if !std::mem::replace(&mut self.has_warned, true) {
                    let text = "etcd refuses to be read, so places of processes that died may stay";
                    tracing::warn!(target: "tower_semaphore", %error, "{text}");
                }
                self.error = Some(error.into());
                Ok(None)
            }
        }
    }

    fn handle_watch(&mut self, message: WatchMessage) -> Result<(), BackendError> {
        self.shared.heard();
        match message {
            WatchMessage::Created { .. } | WatchMessage::Progress { .. } => {
                self.shared.with(|engine, now| engine.handle_watch(now));
            }
            WatchMessage::Canceled { error, compact_revision, .. } => {
                if compact_revision == 0 {
                    return Err(error.into());
                }
                // What it missed is read by those who need it.
                self.watch = None;
                let (client, keys) = (self.client.clone(), self.shared.keys.clone());
                self.ask(async move { Answered::Watched(signs(&client, &keys).await) });
            }
            WatchMessage::Events { range, events, .. } => {
                let keys = &self.shared.keys;
                self.shared.with(|engine, now| {
                    engine.handle_watch(now);
                    for event in events {
                        let is_put = event.r#type == EventType::Put as i32;
                        let Some(kv) = event.kv else { continue };
                        let revision = requests::unsigned(kv.mod_revision);
                        match range {
                            SEMAPHORES => {
                                if let Ok(key) = std::str::from_utf8(&kv.key) {
                                    let value = is_put.then_some(&*kv.value);
                                    engine.handle_value(key, revision, value, now);
                                }
                            }
                            SIGNS => {
                                if let Some(row) = keys.row(&kv.key) {
                                    let seen = if is_put { Seen::Alive } else { Seen::Gone };
                                    engine.handle_sign(row, seen, revision, now);
                                }
                            }
                            MESSAGES if is_put => {
                                if let Some((name, message)) = read_message(&kv.value) {
                                    engine.deliveries.peer(name, message);
                                }
                            }
                            OVERRIDES => engine.deliveries.overridden(),
                            _ => {}
                        }
                    }
                });
            }
        }
        Ok(())
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        let error = self.error.take();
        let error =
            error.unwrap_or_else(|| BackendError::connection("the connection to etcd was closed"));
        let number = self.number;
        self.shared.with(|engine, now| engine.handle_disconnected(number, &error, now));
    }
}

/// Whether the connection is of no further use after this error: a cluster without space refuses every transaction, so an
/// outage is what it is.
fn ends_connection(error: &WireError) -> bool {
    error.is_connection() || error.reason() == Reason::NoSpace
}

fn seconds(ttl: u64) -> u32 {
    u32::try_from(ttl).unwrap_or(u32::MAX)
}
