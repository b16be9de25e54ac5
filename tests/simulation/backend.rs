//! Everything that touches the seam of the crate: the backend as its processes see it, and what a server does with a
//! call. No other file knows calls or answers.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use foldhash::fast::FixedState;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::{Instant, timeout};
use tower_semaphore::BackendError;
use tower_semaphore::backend::seam::{
    self, AddressedCall, Answer, Backend, Change, Connection, InOrder, Listing, Mailbox, Names,
    Overrides, PeerMessage, Queries, Query, QueryError, ServerInfo, Shard,
};
use tower_semaphore_protocol::{
    Adapted, Adaptive, Adjustment, BoundRate, Call, Caller, Grant, Ledger, NodeId, Op, PlaceId,
    PlaceStatus, RateUsage, Reply, SentUnder, WORK_MAX,
};

use crate::fair::{Breach, Done, Judge, Stored};
use crate::naive::Naive;
use crate::plan::Planted;

/// The longest time that a connection may take to open.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(500);

// ===== the side of the process =====

/// A process's end of the network.
#[derive(Debug)]
pub struct Port {
    seed: u64,
    quarantines: bool,
    planted: Option<Planted>,
    state: Mutex<PortState>,
}

#[derive(Default)]
struct PortState {
    /// When the process's clock started, and the virtual time at that moment.
    started: Option<(Instant, u64)>,
    /// How long its clock stood still while time passed, in µs.
    stood: u64,
    /// The places that it released, by name, for a planted fault.
    released: HashMap<Arc<str>, Vec<PlaceId>, FixedState>,
    sent: Vec<Sent>,
    lanes: HashMap<u64, LaneState, FixedState>,
    last_lane: u64,
    /// The server that counts each name, as far as this process knows; the last one is that of the
    /// overrides.
    homes: Vec<usize>,
    servers: usize,
    mailbox: Option<Weak<dyn Mailbox>>,
    /// The number of answers that were seen, for planted faults.
    seen: u64,
    unanswered_max: usize,
    /// By name, when the backend last answered that places of this process have permits, in µs.
    granted_at: HashMap<usize, u64, FixedState>,
    /// The recalls that came: when, and for which name.
    recalls: Vec<(u64, usize)>,
}

#[derive(Default)]
struct LaneState {
    opened: Option<Result<Option<ServerInfo>, BackendError>>,
    broken: bool,
    last_batch: u64,
    batches: VecDeque<BatchState>,
    /// Names with grants in answers that are not taken before an earlier batch is answered.
    behind: Vec<usize>,
    connecting: Option<Waker>,
    closing: Option<Waker>,
    heard_at: Option<Instant>,
}

impl LaneState {
    /// The names with grants in these answers, or in others that waited for them.
    fn grants_of(&mut self, answers: &Answers) -> Vec<usize> {
        let number = answers.number;
        let is_open = |batch: &&BatchState| batch.answers.is_none() && batch.number != number;
        let first = self.batches.iter().filter(is_open).map(|batch| batch.number).min();
        let mut names = self.behind.clone();
        names.extend(&answers.grants);
        match first {
            Some(first) if first < number => self.behind.extend(&answers.grants),
            _ => self.behind.clear(),
        }
        names
    }
}

struct BatchState {
    number: u64,
    /// A query is sent alone, and bounded elsewhere.
    is_query: bool,
    answers: Option<Vec<Response>>,
    waker: Option<Waker>,
}

/// A message that a process sent.
#[derive(Debug)]
pub struct Sent {
    /// When it was sent, in µs.
    pub at: u64,
    /// Its connection.
    pub lane: u64,
    /// The message.
    pub what: Outgoing,
}

/// The content of a message from a process.
#[derive(Debug)]
pub enum Outgoing {
    /// A connection to a server.
    Connect(usize),
    /// Requests, in one write.
    Batch(Batch),
    /// Closes the connection.
    Close,
}

/// Requests that were sent in one write.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The number of the write on its connection.
    pub number: u64,
    calls: Arc<[Request]>,
}

/// A request to a server, carried out in its turn.
#[derive(Clone, Debug)]
enum Request {
    Call(AddressedCall),
    Query(Arc<str>, Question),
}

/// A query or a command that belongs to no place.
#[derive(Clone, Debug)]
enum Question {
    Inspect { most: u32, rate: Option<BoundRate> },
    List { from: u64, most: u32 },
    Overrides { known: u64 },
    Override { name: Arc<str>, change: Change },
    Revoke { id: PlaceId, take: bool },
    Tell { to: NodeId, message: PeerMessage },
}

/// The answer of a server to a request.
#[derive(Clone, Debug)]
enum Response {
    Reply {
        reply: Box<Reply>,
        late: bool,
    },
    Listing(Listing),
    Names(Names),
    Overrides(Option<Box<Overrides>>),
    Done,
    Revoked(Option<u64>),
    Failed(BackendError),
    /// The same, and nothing was written.
    Refused(BackendError),
    Moved,
}

impl Request {
    const fn key(&self) -> &Arc<str> {
        match self {
            Self::Call(call) => &call.key,
            Self::Query(key, _) => key,
        }
    }

    fn places(&self) -> usize {
        match self {
            Self::Call(addressed) => places(&addressed.call.op),
            Self::Query(..) => 1,
        }
    }
}

/// The answers to a batch.
#[derive(Clone, Debug)]
pub struct Answers {
    number: u64,
    answers: Vec<Response>,
    /// The servers that count the names now, for names that were requested from the wrong server.
    homes: Vec<(usize, usize)>,
    /// The names for which they may grant a place that had no permit.
    grants: Vec<usize>,
}

/// A message that comes to a process.
#[derive(Clone, Debug)]
pub enum Incoming {
    /// The connection is open.
    Opened {
        /// Its number.
        lane: u64,
        /// It cannot receive hints.
        poll_only: bool,
        /// The server, and the generation of its data.
        data: (usize, u64),
        /// The age of the data, in µs.
        age: Option<u64>,
    },
    /// It cannot be opened.
    Refused {
        /// Its number.
        lane: u64,
        /// Why.
        why: &'static str,
        /// The servers that count the names now, according to another server.
        homes: Option<Vec<usize>>,
    },
    /// Answers.
    Answers {
        /// Their connection.
        lane: u64,
        /// The batch that they answer.
        answers: Answers,
    },
    /// A part of a write is answered.
    Heard {
        /// Its connection.
        lane: u64,
    },
    /// The connection is closed.
    Broken {
        /// Its number.
        lane: u64,
    },
    /// A message from another process or an operator.
    Message(Message),
}

/// A message from a server that is no answer.
#[derive(Clone, Debug)]
pub enum Message {
    /// Places were granted.
    Hint(Arc<str>, Grant),
    /// Another process waits.
    Recall(Arc<str>),
    /// An override of a name changed.
    Overridden,
    /// The adaptive limit of a name changed.
    Adapted(Arc<str>, Adapted),
    /// A message from another process.
    Told(Arc<str>, PeerMessage),
}

impl Port {
    /// Creates the port of a process that has not started.
    #[must_use]
    pub fn new(seed: u64, quarantines: bool, homes: Vec<usize>, servers: usize) -> Self {
        let state = PortState { homes, servers, ..PortState::default() };
        Self { seed, quarantines, planted: None, state: Mutex::new(state) }
    }

    /// Creates the port of a process with a planted fault.
    #[must_use]
    pub const fn planted(mut self, planted: Option<Planted>) -> Self {
        self.planted = planted;
        self
    }

    /// Starts the process. Its clock shows `now`, in µs.
    pub fn start(&self, now: u64) {
        self.state().started = Some((Instant::now(), now));
    }

    /// Returns the virtual time, in µs.
    pub fn now(&self) -> u64 {
        now_of(&self.state())
    }

    /// Returns the instant of a virtual time.
    pub fn instant(&self, at: u64) -> Instant {
        let state = self.state();
        let (started, began) = state.started.unwrap_or_else(|| (Instant::now(), at));
        started + Duration::from_micros(at.saturating_sub(began + state.stood))
    }

    /// Notes that its clock stood still until now, in µs.
    pub fn stood_still(&self, now: u64) {
        let mut state = self.state();
        state.stood += now.saturating_sub(now_of(&state));
    }

    /// Takes the messages sent since the last call.
    pub fn take_sent(&self) -> Vec<Sent> {
        std::mem::take(&mut self.state().sent)
    }

    /// Takes the recalls that came since the last call: when, in µs, and for which name.
    pub fn take_recalls(&self) -> Vec<(u64, usize)> {
        std::mem::take(&mut self.state().recalls)
    }

    /// Returns whether the backend has just answered that a place of a name has a permit.
    pub fn hears_of(&self, name: usize) -> bool {
        let state = self.state();
        state.granted_at.get(&name) == Some(&now_of(&state))
    }

    /// Returns the id of the process.
    pub const fn node(&self) -> Option<NodeId> {
        Some(NodeId::new(self.seed))
    }

    /// Returns the most unanswered writes at a time over one connection.
    pub fn unanswered_max(&self) -> usize {
        self.state().unanswered_max
    }

    /// Delivers a message.
    pub fn deliver(&self, incoming: Incoming) {
        let mut state = self.state();
        let mut woken: Vec<Option<Waker>> = Vec::new();
        match incoming {
            Incoming::Opened { lane, poll_only, data: (server, generation), age } => {
                if let Some(lane) = state.lanes.get_mut(&lane) {
                    let server = ServerInfo {
                        poll_only,
                        data: Some(format!("{server}.{generation}")),
                        age: age.map(Duration::from_micros),
                        warning: None,
                    };
                    lane.opened = Some(Ok(Some(server)));
                    woken.push(lane.connecting.take());
                }
            }
            Incoming::Refused { lane, why, homes } => {
                if let Some(homes) = homes {
                    state.homes = homes;
                }
                if let Some(lane) = state.lanes.get_mut(&lane) {
                    lane.opened = Some(Err(BackendError::connection(why)));
                    woken.push(lane.connecting.take());
                }
            }
            Incoming::Answers { lane, mut answers } => {
                self.plant(&mut state, &mut answers);
                if self.planted == Some(Planted::LosesAnswers) {
                    state.seen += 1;
                    if state.seen.is_multiple_of(100) {
                        return;
                    }
                }
                let now = now_of(&state);
                let names = match state.lanes.get_mut(&lane) {
                    Some(lane) => lane.grants_of(&answers),
                    None => Vec::new(),
                };
                state.granted_at.extend(names.into_iter().map(|name| (name, now)));
                for (name, home) in &answers.homes {
                    if let Some(known) = state.homes.get_mut(*name) {
                        *known = *home;
                    }
                }
                if let Some(batch) = state
                    .lanes
                    .get_mut(&lane)
                    .and_then(|lane| lane.batches.iter_mut().find(|b| b.number == answers.number))
                {
                    batch.answers = Some(answers.answers);
                    woken.push(batch.waker.take());
                }
            }
            Incoming::Heard { lane } => {
                if let Some(lane) = state.lanes.get_mut(&lane) {
                    lane.heard_at = Some(Instant::now());
                }
            }
            Incoming::Broken { lane } => {
                if let Some(lane) = state.lanes.get_mut(&lane) {
                    lane.broken = true;
                    woken.push(lane.closing.take());
                    woken.push(lane.connecting.take());
                    woken.extend(lane.batches.iter_mut().map(|batch| batch.waker.take()));
                }
            }
            Incoming::Message(message) => {
                let mailbox = state.mailbox.as_ref().and_then(Weak::upgrade);
                let now = now_of(&state);
                match &message {
                    Message::Hint(key, _) => {
                        state.granted_at.extend(name_of(key).map(|name| (name, now)));
                    }
                    Message::Recall(key) => {
                        state.recalls.extend(name_of(key).map(|name| (now, name)));
                    }
                    Message::Overridden | Message::Adapted(..) | Message::Told(..) => {}
                }
                drop(state);
                let Some(mailbox) = mailbox else { return };
                match message {
                    Message::Hint(key, grant) => mailbox.hint(&key, grant.into()),
                    Message::Recall(_) if self.is_deaf_to_recalls() => {}
                    Message::Recall(key) => mailbox.recall(&key),
                    Message::Overridden => mailbox.overridden(),
                    Message::Adapted(name, adapted) => mailbox.adapted(&name, adapted),
                    Message::Told(key, message) => mailbox.message(&key, message),
                }
                return;
            }
        }
        drop(state);
        woken.into_iter().flatten().for_each(Waker::wake);
    }

    fn release_again(&self, calls: &mut [AddressedCall]) {
        for addressed in calls {
            let Op::Release { ids } = &mut addressed.call.op else { continue };
            let mut state = self.state();
            let released = state.released.entry(Arc::clone(&addressed.key)).or_default();
            let news = ids.to_vec();
            ids.extend(released.iter().copied().take(500));
            released.extend(news);
        }
    }

    fn is_deaf_to_recalls(&self) -> bool {
        matches!(self.planted, Some(Planted::IgnoresRecalls | Planted::NeverHearsOfOthers))
    }

    fn plant(&self, state: &mut PortState, answers: &mut Answers) {
        match self.planted {
            Some(Planted::LosesGrants) => {
                for answer in &mut answers.answers {
                    if let Response::Reply { reply, .. } = answer
                        && reply.statuses.first() == Some(&PlaceStatus::Held)
                    {
                        state.seen += 1;
                        if state.seen.is_multiple_of(20) {
                            reply.statuses[0] = PlaceStatus::NoPermit;
                        }
                    }
                }
            }
            Some(Planted::NeverRenews) => {
                for answer in &mut answers.answers {
                    if let Response::Reply { reply, .. } = answer {
                        state.seen += 1;
                        if state.seen > 50 && reply.lease_end > 0 && reply.granted.is_empty() {
                            *answer = Response::Failed(BackendError::call("planted"));
                        }
                    }
                }
            }
            Some(Planted::NeverHearsOfOthers) => {
                for answer in &mut answers.answers {
                    if let Response::Reply { reply, .. } = answer {
                        let usage = reply.usage.iter_mut();
                        usage.for_each(|of| (of.in_use, of.waiting) = (of.in_use.min(1), 0));
                    }
                }
            }
            Some(Planted::TakesOthersForOwn) => {
                for answer in &mut answers.answers {
                    if let Response::Reply { reply, .. } = answer {
                        let is_waiting = |it: &&PlaceStatus| it.ticket().is_some();
                        let own = reply.statuses.iter().filter(is_waiting).count() as u64;
                        let usage = reply.usage.iter_mut().filter(|_| own > 0);
                        usage.for_each(|of| of.waiting = own);
                    }
                }
            }
            _ => {}
        }
    }

    fn state(&self) -> MutexGuard<'_, PortState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send(&self, lane: u64, what: Outgoing) {
        let mut state = self.state();
        let at = now_of(&state);
        state.sent.push(Sent { at, lane, what });
    }
}

fn now_of(state: &PortState) -> u64 {
    let Some((started, began)) = state.started else { return 0 };
    let since = Instant::now().saturating_duration_since(started);
    began + state.stood + u64::try_from(since.as_micros()).unwrap_or(0)
}

/// Returns the name of a key; `None` if it is of no single name.
#[must_use]
pub fn name_of(key: &str) -> Option<usize> {
    key.strip_prefix(['n', 'l'])?.parse().ok()
}

/// The simulated backend, as one process sees it.
#[derive(Clone, Debug)]
pub struct SimBackend(pub Arc<Port>);

impl Backend for SimBackend {
    fn attach(&self, _: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.0.state().mailbox = Some(mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        name.into()
    }

    fn seed(&self) -> u64 {
        self.0.seed
    }

    fn suspended(&self) -> Option<Duration> {
        if self.0.planted == Some(Planted::ForgetsSuspension) {
            return Some(Duration::ZERO);
        }
        Some(Duration::from_micros(self.0.state().stood))
    }

    fn shard(&self, key: &str) -> Shard {
        let state = self.0.state();
        let home = match name_of(key) {
            Some(name) => state.homes.get(name),
            None => state.homes.last(),
        };
        shard(home.copied().unwrap_or(0))
    }

    fn shards(&self) -> Vec<Shard> {
        (0..self.0.state().servers).map(shard).collect()
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        async move {
            let port = Arc::clone(&self.0);
            if port.planted == Some(Planted::NeverConnects) {
                return Err(BackendError::connection("planted"));
            }
            let server = shard.name().and_then(|name| name.parse().ok()).unwrap_or(0);
            let times = if port.planted == Some(Planted::ConnectsAgain) { 40 } else { 1 };
            let mut lane = 0;
            for _ in 0..times {
                lane = {
                    let mut state = port.state();
                    state.last_lane += 1;
                    let lane = state.last_lane;
                    state.lanes.insert(lane, LaneState::default());
                    lane
                };
                port.send(lane, Outgoing::Connect(server));
            }
            let info = ServerInfo::default();
            let mut opening =
                SimLane { port: Arc::clone(&port), lane, server: info, order: InOrder::default() };
            let opened = timeout(CONNECT_TIMEOUT, Opening(&port, lane)).await;
            let late = || Err(BackendError::connection("no connection in time"));
            match opened.unwrap_or_else(|_| late())? {
                Some(server) => {
                    opening.server = server;
                    Ok(Some(Arc::new(opening) as Arc<dyn Connection>))
                }
                None => Ok(None),
            }
        }
        .boxed()
    }

    fn quarantine(&self) -> Option<Duration> {
        self.0.quarantines.then_some(Duration::ZERO)
    }
}

fn shard(server: usize) -> Shard {
    Shard::named(server.to_string())
}

struct Opening<'a>(&'a Port, u64);

impl Future for Opening<'_> {
    type Output = Result<Option<ServerInfo>, BackendError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.state();
        let Some(lane) = state.lanes.get_mut(&self.1) else { return Poll::Pending };
        match lane.opened.take() {
            Some(opened) => Poll::Ready(opened),
            None if lane.broken => {
                Poll::Ready(Err(BackendError::connection("closed while it opened")))
            }
            None => {
                lane.connecting = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

/// A connection to a simulated server.
#[derive(Debug)]
pub struct SimLane {
    port: Arc<Port>,
    lane: u64,
    server: ServerInfo,
    order: InOrder,
}

impl Connection for SimLane {
    fn server(&self) -> &ServerInfo {
        &self.server
    }

    fn drive(&self) -> BoxFuture<'_, ()> {
        std::future::poll_fn(|cx| {
            let mut state = self.port.state();
            match state.lanes.get_mut(&self.lane) {
                Some(lane) if !lane.broken => {
                    lane.closing = Some(cx.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .boxed()
    }

    fn heard_at(&self) -> Option<Instant> {
        self.port.state().lanes.get(&self.lane)?.heard_at
    }

    fn send(&self, calls: Arc<[AddressedCall]>) -> seam::Answers {
        let mut calls = calls.to_vec();
        if self.port.planted == Some(Planted::ReleasesAgain) {
            self.port.release_again(&mut calls);
        }
        let sending = self.begin(&calls.into_iter().map(Request::Call).collect());
        let answer = |response| match response {
            Response::Reply { reply, late } => {
                Answer::Reply { reply: *reply, late, leases_from: None }
            }
            Response::Moved => Answer::Moved,
            Response::Failed(error) => Answer::Failed(error),
            Response::Refused(error) => Answer::Refused(error),
            other => Answer::Failed(BackendError::call(format!("{other:?}"))),
        };
        self.order.answer(
            sending.map(move |answers| Ok(answers?.into_iter().map(answer).enumerate().collect())),
        )
    }
}

impl Queries for SimLane {
    fn inspect(&self, key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> Query<Listing> {
        self.ask(key, Question::Inspect { most, rate }, |response| match response {
            Response::Listing(listing) => Ok(listing),
            other => Err(other),
        })
    }

    fn list(&self, key: &Arc<str>, from: Option<&str>, most: u32) -> Query<Names> {
        let from = from.map_or(0, |from| from.parse().unwrap());
        self.ask(key, Question::List { from, most }, |response| match response {
            Response::Names(names) => Ok(names),
            other => Err(other),
        })
    }

    fn overrides(&self, key: &Arc<str>, known: u64) -> Query<Option<Overrides>> {
        self.ask(key, Question::Overrides { known }, |response| match response {
            Response::Overrides(news) => Ok(news.map(|news| *news)),
            other => Err(other),
        })
    }

    fn set_override(&self, key: &Arc<str>, name: &Arc<str>, change: Change) -> Query<()> {
        self.ask(key, Question::Override { name: Arc::clone(name), change }, done)
    }

    fn revoke(&self, key: &Arc<str>, id: PlaceId, take: bool) -> Query<Option<u64>> {
        self.ask(key, Question::Revoke { id, take }, |response| match response {
            Response::Revoked(left) => Ok(left),
            other => Err(other),
        })
    }

    fn send_message(&self, key: &Arc<str>, to: NodeId, message: &PeerMessage) -> Query<()> {
        self.ask(key, Question::Tell { to, message: message.clone() }, done)
    }
}

fn done(response: Response) -> Result<(), Response> {
    match response {
        Response::Done => Ok(()),
        other => Err(other),
    }
}

impl SimLane {
    fn begin(&self, calls: &Arc<[Request]>) -> Sending {
        let mut state = self.port.state();
        let mut number = 0;
        if let Some(lane) = state.lanes.get_mut(&self.lane) {
            lane.last_batch += 1;
            number = lane.last_batch;
            let is_query = matches!(&**calls, [Request::Query(..)]);
            lane.batches.push_back(BatchState { number, is_query, answers: None, waker: None });
            let ahead = if self.port.planted == Some(Planted::WritesAhead) { 64 } else { 0 };
            let unanswered = ahead + lane.batches.iter().filter(|batch| !batch.is_query).count();
            state.unanswered_max = state.unanswered_max.max(unanswered);
        }
        drop(state);
        let times = if self.port.planted == Some(Planted::SendsAgain) { 40 } else { 1 };
        for _ in 0..times {
            let batch = Batch { number, calls: Arc::clone(calls) };
            self.port.send(self.lane, Outgoing::Batch(batch));
        }
        Sending { port: Arc::clone(&self.port), lane: self.lane, number }
    }

    fn ask<T: Send + 'static>(
        &self,
        key: &Arc<str>,
        question: Question,
        read: impl FnOnce(Response) -> Result<T, Response> + Send + 'static,
    ) -> Query<T> {
        let sending = self.begin(&[Request::Query(Arc::clone(key), question)].into());
        async move {
            let mut answers = sending.await.map_err(QueryError::Failed)?;
            match read(answers.remove(0)) {
                Ok(answer) => Ok(answer),
                Err(Response::Moved) => Err(QueryError::Moved),
                Err(Response::Failed(error) | Response::Refused(error)) => {
                    Err(QueryError::Failed(error))
                }
                Err(other) => Err(QueryError::Failed(BackendError::call(format!("{other:?}")))),
            }
        }
        .boxed()
    }
}

impl Drop for SimLane {
    fn drop(&mut self) {
        self.port.state().lanes.remove(&self.lane);
        self.port.send(self.lane, Outgoing::Close);
    }
}

struct Sending {
    port: Arc<Port>,
    lane: u64,
    number: u64,
}

impl Future for Sending {
    type Output = Result<Vec<Response>, BackendError>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.port.state();
        let Some(lane) = state.lanes.get_mut(&self.lane) else { return Poll::Pending };
        let broken = lane.broken;
        let Some(at) = lane.batches.iter().position(|batch| batch.number == self.number) else {
            return Poll::Pending;
        };
        if let Some(answers) = lane.batches[at].answers.take() {
            lane.batches.remove(at);
            return Poll::Ready(Ok(answers));
        }
        if broken {
            return Poll::Ready(Err(BackendError::connection("the connection was cut")));
        }
        lane.batches[at].waker = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Drop for Sending {
    fn drop(&mut self) {
        if let Some(lane) = self.port.state().lanes.get_mut(&self.lane) {
            lane.batches.retain(|batch| batch.number != self.number);
        }
    }
}

// ===== the side of the server =====

/// The data of a server.
#[derive(Clone, Debug, Default)]
pub struct Store {
    ledgers: BTreeMap<Arc<str>, Book>,
    overrides: Overrides,
    /// The number of operations, for planted faults.
    done: u64,
}

/// The places of a name, and the judge of whose turn it is.
#[derive(Clone, Debug)]
pub struct Book {
    ledger: Kind,
    judge: Judge,
    /// Whether tenants share it, or did.
    is_fair: bool,
}

#[derive(Clone, Debug)]
enum Kind {
    Shipped(Ledger),
    Naive(Naive),
}

macro_rules! delegate {
    ($book:expr, $ledger:ident => $call:expr) => {
        match &mut $book.ledger {
            Kind::Shipped($ledger) => $call,
            Kind::Naive($ledger) => $call,
        }
    };
}

impl Book {
    fn new(planted: Option<Planted>) -> Self {
        let ledger = match planted {
            Some(Planted::WorksUnbounded) => Kind::Shipped(Ledger::with_work_max(usize::MAX)),
            Some(bug) if bug.is_of_tenants() => Kind::Naive(Naive::new(bug)),
            _ => Kind::Shipped(Ledger::with_work_max(WORK_MAX)),
        };
        Self { ledger, judge: Judge::default(), is_fair: false }
    }

    /// Returns the permits in use.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        match &self.ledger {
            Kind::Shipped(ledger) => ledger.in_use(),
            Kind::Naive(ledger) => ledger.in_use(),
        }
    }

    /// Returns the number of waiting places.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        match &self.ledger {
            Kind::Shipped(ledger) => ledger.waiting(),
            Kind::Naive(ledger) => ledger.waiting(),
        }
    }

    /// Returns its places.
    pub fn places(&self) -> impl Iterator<Item = Stored> + '_ {
        let (shipped, naive) = match &self.ledger {
            Kind::Shipped(ledger) => (Some(ledger.places()), None),
            Kind::Naive(ledger) => (None, Some(ledger.places())),
        };
        shipped.into_iter().flatten().chain(naive.into_iter().flatten())
    }

    fn usage_of(&self, rate: BoundRate, now: u64) -> RateUsage {
        match &self.ledger {
            Kind::Shipped(ledger) => ledger.usage_of(rate, now),
            Kind::Naive(_) => RateUsage::unused(rate),
        }
    }

    fn is_empty(&self) -> bool {
        match &self.ledger {
            Kind::Shipped(ledger) => ledger.is_empty(),
            Kind::Naive(ledger) => ledger.is_empty(),
        }
    }

    /// Returns the number of its places.
    #[must_use]
    pub fn count(&self) -> u64 {
        if self.is_fair { self.places().count() as u64 } else { self.in_use() + self.waiting() }
    }

    /// Returns whether tenants share it, or will with this call.
    fn comes(&mut self, op: &Op) -> bool {
        let is_fair = |id: &PlaceId| id.claim.is_some();
        self.is_fair |= match op {
            Op::Acquire { ids, .. } => ids.iter().any(is_fair),
            Op::Reassert { proofs, .. } => proofs.iter().any(|(id, _)| is_fair(id)),
            _ => false,
        };
        self.is_fair
    }

    fn judge(&mut self, done: &Done<'_>) -> Option<Breach> {
        let breach = self.judge.judge(done);
        match &self.ledger {
            Kind::Shipped(ledger) if breach.is_none() => {
                self.judge.compare(&ledger.turns().collect::<Vec<_>>())
            }
            _ => breach,
        }
    }
}

/// The calls that a server refuses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Refuses {
    /// Those that need memory.
    pub no_memory: bool,
    /// Those that write.
    pub read_only: bool,
    /// All calls.
    pub loading: bool,
    /// Calls that are not needed for permits.
    pub no_rights: bool,
    /// Calls for places, after they were carried out.
    pub fails_after: bool,
}

/// The circumstances in which a batch is carried out.
pub struct Site<'a> {
    /// The server that counts each name; the last one is that of the overrides.
    pub homes: &'a [usize],
    /// The index of this server.
    pub server: usize,
    /// Its clock, in µs.
    pub now: u64,
    /// The calls that it refuses.
    pub refuses: Refuses,
    /// The names for which it refuses all calls.
    pub forbidden: &'a BTreeSet<usize>,
    /// Whether calls that were sent later were carried out before.
    pub late: bool,
    /// Returns whether a process listens.
    pub listens: &'a mut dyn FnMut(NodeId) -> bool,
    /// Receives each operation on places.
    pub audit: &'a mut dyn FnMut(&Step<'_>),
    /// Whether each grant is checked: not among thousands, which would take too long.
    pub judges: bool,
    /// A planted fault.
    pub planted: Option<Planted>,
    /// The changes of adaptive limits.
    pub adapted: Vec<AdaptedStep>,
}

/// A change of an adaptive limit, for the checker.
#[derive(Clone, Copy, Debug)]
pub struct AdaptedStep {
    /// The name.
    pub name: usize,
    /// The server's clock, in µs.
    pub now: u64,
    /// The limit before it; `None`: that of the policy.
    pub before: Option<Adapted>,
    /// The limit after it.
    pub after: Adapted,
}

/// An operation on the places of a name, for the checker.
#[derive(Debug)]
pub struct Step<'a> {
    /// The name.
    pub name: usize,
    /// What was called.
    pub op: &'static str,
    /// The process that called.
    pub node: Option<NodeId>,
    /// The server's clock, in ms.
    pub now: u64,
    /// The limit that the caller supplied.
    pub limit: u32,
    /// Whether the limit applies to all places, whatever limits they have.
    pub for_all: bool,
    /// Whether places may be counted past the limit.
    pub proves: bool,
    /// Whether the call promotes.
    pub promotes: bool,
    /// The number of places that the call names.
    pub ids: usize,
    /// The places before the call, if they are needed.
    pub before: Option<&'a [(PlaceId, u64, Option<u64>)]>,
    /// The number of places before the call, and of those that waited.
    pub count_before: u64,
    /// See there.
    pub waiting_before: u64,
    /// The reply says that the bound on work was reached.
    pub more: bool,
    /// The number of places that leave with the call.
    pub leaving: usize,
    /// The number of places that were taken from the head of the queue.
    pub passed: usize,
    /// The ledger after the call.
    pub after: &'a Book,
    /// If tenants share it: what was wrong with the order of turns.
    pub turns: Option<Option<Breach>>,
}

impl Batch {
    /// Returns the number of calls, and of the places that they name.
    #[must_use]
    pub fn size(&self) -> (usize, usize) {
        (self.calls.len(), self.calls.iter().map(Request::places).sum())
    }

    /// Returns whether it sets an override.
    #[must_use]
    pub fn sets_overrides(&self) -> bool {
        let sets =
            |request: &Request| matches!(request, Request::Query(_, Question::Override { .. }));
        self.calls.iter().any(sets)
    }

    /// Returns the names whose places it takes or restores.
    pub fn takes(&self) -> impl Iterator<Item = usize> + '_ {
        let takes = |op: &Op| matches!(op, Op::Acquire { .. } | Op::Reassert { .. });
        let taking = self.calls.iter().filter_map(move |request| match request {
            Request::Call(addressed) if takes(&addressed.call.op) => Some(&addressed.key),
            _ => None,
        });
        taking.filter_map(|key| name_of(key))
    }

    /// Describes the request in a short text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for request in &*self.calls {
            let AddressedCall { key, call, .. } = match request {
                Request::Call(addressed) => addressed,
                Request::Query(key, question) => {
                    text += &format!("{key} {question:?}; ");
                    continue;
                }
            };
            let limit = call.limit;
            text += &match &call.op {
                Op::Acquire { leaving, ids, max_queue, .. } => {
                    format!("{key} acquire{:?}", ns(ids))
                        + &format!(" leaving{:?} of {limit} queue {max_queue:?}; ", ns(leaving))
                }
                Op::Release { ids } => format!("{key} release{:?} of {limit}; ", ns(ids)),
                Op::Renew { ids, .. } => format!("{key} renew{:?} of {limit}; ", ns(ids)),
                Op::Reassert { proofs, .. } => {
                    let ids: Vec<_> =
                        proofs.iter().map(|(id, proof)| (id.n >> 20, *proof)).collect();
                    format!("{key} reassert{ids:?} of {limit}; ")
                }
                Op::Audit { .. } => format!("{key} audit; "),
            };
        }
        text
    }
}

fn ns(ids: &[PlaceId]) -> Vec<u64> {
    ids.iter().map(|id| id.n >> 20).collect()
}

impl Answers {
    /// Describes the answer in a short text.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = String::new();
        for answer in &self.answers {
            text += &match answer {
                Response::Reply { reply, late } => {
                    let granted: Vec<_> = reply.granted.iter().map(|g| g.id.n >> 20).collect();
                    let late = if *late { " late" } else { "" };
                    format!("{:?} granted{granted:?}{late}; ", reply.statuses)
                }
                Response::Listing(listing) => {
                    format!("{} in use, {} waiting; ", listing.in_use, listing.waiting)
                }
                answer => format!("{answer:?}; "),
            };
        }
        text
    }

    /// Returns a number for the hash of a run.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let of = |answer: &Response| match answer {
            Response::Reply { reply, .. } => {
                let usage = reply.usage.unwrap_or_default();
                reply.lease_end
                    ^ (usage.in_use << 8)
                    ^ (usage.waiting << 16)
                    ^ ((reply.granted.len() as u64) << 24)
            }
            Response::Listing(listing) => listing.in_use ^ (listing.waiting << 32),
            Response::Failed(_) => 1,
            Response::Refused(_) => 6,
            Response::Moved => 2,
            Response::Revoked(left) => 3 ^ left.unwrap_or(5),
            _ => 4,
        };
        self.answers
            .iter()
            .fold(self.number, |sum, answer| sum.rotate_left(7).wrapping_mul(31) ^ of(answer))
    }
}

fn places(op: &Op) -> usize {
    if let Op::Audit { .. } = op { 1 } else { op.places() }
}

impl Store {
    /// Carries out a batch. Returns the messages that it causes, each with its receiver; `None` for all.
    pub fn carry_out(
        &mut self,
        batch: &Batch,
        site: &mut Site<'_>,
    ) -> (Answers, Vec<(Option<NodeId>, Message)>) {
        let mut messages = Vec::new();
        let mut answers = Vec::with_capacity(batch.calls.len());
        let mut homes = Vec::new();
        let mut grants = Vec::new();
        for request in &*batch.calls {
            let name = name_of(request.key());
            let at = name.unwrap_or(site.homes.len() - 1);
            let anywhere =
                matches!(request, Request::Query(_, Question::List { .. } | Question::Tell { .. }));
            if !anywhere && site.homes.get(at).is_some_and(|home| *home != site.server) {
                homes.push((at, site.homes[at]));
                answers.push(Response::Moved);
                continue;
            }
            let is_forbidden = name.is_some_and(|name| site.forbidden.contains(&name));
            let why = if is_forbidden { Some("NOPERM") } else { refused(request, site.refuses) };
            answers.push(match (why, request) {
                // Not every error does so.
                (Some("READONLY"), _) => Response::Failed(BackendError::call("READONLY")),
                (Some(why), _) => Response::Refused(BackendError::call(why)),
                (None, Request::Call(call)) => {
                    let answer = self.one(call, name, site, &mut messages);
                    if site.refuses.fails_after {
                        Response::Failed(BackendError::call("ERR"))
                    } else {
                        grants.extend(name.filter(|_| may_grant(&answer)));
                        answer
                    }
                }
                (None, Request::Query(key, question)) => {
                    self.answer(key, question, name, site, &mut messages)
                }
            });
        }
        (Answers { number: batch.number, answers, homes, grants }, messages)
    }

    fn answer(
        &mut self,
        key: &Arc<str>,
        question: &Question,
        name: Option<usize>,
        site: &mut Site<'_>,
        messages: &mut Vec<(Option<NodeId>, Message)>,
    ) -> Response {
        let now = site.now;
        match question {
            Question::Inspect { most, rate } => {
                Response::Listing(list(self.ledgers.get(key), now, *most, *rate))
            }
            Question::Overrides { known } => {
                let read = || {
                    let mut read = Overrides { now: now / 1000, ..self.overrides.clone() };
                    if site.planted == Some(Planted::IgnoresPauses) {
                        read.pauses.clear();
                    }
                    if site.planted == Some(Planted::NumberBeatsOperator) {
                        let adapted = &read.adapted;
                        read.names.retain(|name, _| !adapted.contains_key(name));
                    }
                    Box::new(read)
                };
                let news = (*known != self.overrides.version).then(read);
                Response::Overrides(news)
            }
            Question::Override { name, change } => {
                if let Change::Adapt { range, adjustment } = change {
                    return self.adapt(name, *range, *adjustment, site, messages);
                }
                let before = self.overrides.version;
                if !self.overrides.change(name, change.clone(), now / 1000) {
                    return Response::Failed(BackendError::call("too many overrides"));
                }
                let is_changed = self.overrides.version != before;
                if is_changed {
                    // By the clock, as in Redis: no version is used again after a loss of data.
                    self.overrides.version = now.max(before + 1);
                }
                if is_changed && change.is_told() {
                    messages.push((None, Message::Overridden));
                }
                Response::Done
            }
            Question::List { from, most } => self.names(*from, *most),
            Question::Tell { to, message } => {
                let told = Message::Told(Arc::clone(key), message.clone());
                messages.push((Some(*to), told));
                Response::Done
            }
            Question::Revoke { id, take } => {
                self.done += 1;
                let planted = site.planted;
                let ledger =
                    self.ledgers.entry(Arc::clone(key)).or_insert_with(|| Book::new(planted));
                let waiting_before = ledger.waiting();
                let count_before = ledger.count();
                let before: Option<Vec<_>> =
                    (ledger.waiting() > 0 || ledger.is_fair).then(|| ledger.places().collect());
                let is_fair = ledger.is_fair;
                let revoked = delegate!(ledger, ledger => ledger.revoke(*id, *take, now));
                let turns = before.as_deref().filter(|_| is_fair).map(|before| {
                    let after: Vec<_> = ledger.places().collect();
                    ledger.judge(&Done {
                        before,
                        after: &after,
                        now,
                        limit: 0,
                        headroom: 0,
                        for_all: true,
                        leaving: &[*id],
                        used: &[],
                        coming: &[],
                        promotes: false,
                        more: false,
                    })
                });
                if let Some(name) = name {
                    (site.audit)(&Step {
                        name,
                        op: if *take { "revoke" } else { "look" },
                        node: None,
                        now: now / 1000,
                        limit: 0,
                        for_all: true,
                        proves: false,
                        promotes: false,
                        ids: 1,
                        before: before.as_deref(),
                        count_before,
                        waiting_before,
                        more: false,
                        leaving: 1,
                        passed: 0,
                        after: ledger,
                        turns,
                    });
                }
                if ledger.is_empty() {
                    self.ledgers.remove(key);
                }
                Response::Revoked(revoked.map(|end| end.saturating_sub(now / 1000)))
            }
        }
    }

    fn adapt(
        &mut self,
        name: &Arc<str>,
        range: Adaptive,
        adjustment: Adjustment,
        site: &mut Site<'_>,
        messages: &mut Vec<(Option<NodeId>, Message)>,
    ) -> Response {
        let now = site.now;
        let is_known = self.overrides.adapted.contains_key(name);
        let (range, adjustment) = match (site.planted, adjustment) {
            (Some(Planted::LowersAtEach), Adjustment::Lower(sent)) => {
                (range, Adjustment::Lower(SentUnder { version: u64::MAX, ..sent }))
            }
            (Some(Planted::LeavesRange), Adjustment::Lower(sent)) => (
                Adaptive::between(1, range.max()),
                Adjustment::Lower(SentUnder { in_use: 1, ..sent }),
            ),
            (Some(Planted::GrowsByRefusals), Adjustment::Lower(_)) if is_known => {
                (range, Adjustment::Raise)
            }
            (Some(Planted::NeverGrows), Adjustment::Raise) => return Response::Done,
            unchanged => (range, unchanged.1),
        };
        let change = Change::Adapt { range, adjustment };
        let is_raised = matches!(adjustment, Adjustment::Raise);
        // A second time, as if the interval had passed.
        let twice = is_raised && site.planted == Some(Planted::GrowsAtOnce);
        for at in [now, now + 1_000_000].into_iter().take(1 + usize::from(twice)) {
            let all = &mut self.overrides;
            let version = all.version;
            let before = all.adapted.get(name).copied().filter(|one| !one.left(now).is_zero());
            if !all.change(name, change.clone(), at / 1000) {
                return Response::Failed(BackendError::call("too many adaptive limits"));
            }
            let after = all.adapted.get(name).copied();
            if let Some(after) = after.filter(|_| all.version != version) {
                // As for the others.
                all.version = now.max(version + 1);
                if let Some(name) = name_of(name) {
                    site.adapted.push(AdaptedStep { name, now, before, after });
                }
                messages.push((None, Message::Adapted(Arc::clone(name), after)));
            }
        }
        Response::Done
    }

    /// Returns the adaptive limit of a name, if one is in force.
    #[must_use]
    pub fn adapted_of(&self, name: usize, now: u64) -> Option<Adapted> {
        let all = self.overrides.adapted.iter();
        let of_name = all.filter(|(key, _)| name_of(key) == Some(name)).map(|(_, one)| *one);
        of_name.into_iter().find(|one| !one.left(now).is_zero())
    }

    fn one(
        &mut self,
        AddressedCall { key, node, call }: &AddressedCall,
        name: Option<usize>,
        site: &mut Site<'_>,
        messages: &mut Vec<(Option<NodeId>, Message)>,
    ) -> Response {
        let now = site.now;
        self.done += 1;
        let planted = site.planted;
        let ledger = self.ledgers.entry(Arc::clone(key)).or_insert_with(|| Book::new(planted));
        let ids = places(&call.op);
        let is_fair = ledger.comes(&call.op);
        let waiting_before = ledger.waiting();
        let count_before = ledger.count();
        let is_tight =
            ledger.waiting() > 0 || ledger.in_use() + ids as u64 > u64::from(call.limit) || is_fair;
        let is_tight = is_tight && site.judges;
        let before: Option<Vec<_>> = is_tight.then(|| ledger.places().collect());
        let is_lowest =
            planted == Some(Planted::GoesByTheLowest) && !matches!(call.op, Op::Acquire { .. });
        let limit = if is_lowest { call.limit.min(1) } else { call.limit };
        let mut caller = Caller {
            now,
            limit,
            headroom: call.headroom,
            for_all: call.for_all || is_lowest || planted == Some(Planted::JudgesByCaller),
            max_waiting: call.max_waiting,
            node: *node,
            recalls: call.recalls,
        };
        let listens = &mut *site.listens;
        let mut posted = 0;
        let mut post = |node: NodeId, grants: &[Grant]| {
            posted += grants.len();
            let is_heard = listens(node);
            if is_heard {
                for grant in grants {
                    messages.push((Some(node), Message::Hint(Arc::clone(key), *grant)));
                }
                if grants.is_empty() {
                    messages.push((Some(node), Message::Recall(Arc::clone(key))));
                }
            }
            is_heard
        };
        let op = match &call.op {
            Op::Acquire { .. } => "acquire",
            Op::Release { .. } => "release",
            Op::Renew { .. } => "renew",
            Op::Reassert { .. } => "reassert",
            Op::Audit { .. } => "look",
        };
        match (site.planted, op) {
            (Some(Planted::GrantsOneTooMany), "acquire") if self.done.is_multiple_of(10) => {
                caller.limit += 1
            }
            (Some(Planted::ForgetsToPromote), _) => {
                caller.limit = caller.limit.min(u32::try_from(ledger.in_use()).unwrap_or(u32::MAX));
            }
            (Some(Planted::RefusesReleases), "release") if self.done.is_multiple_of(10) => {
                return Response::Failed(BackendError::call("planted"));
            }
            (Some(Planted::DropsReleases), "release") if self.done.is_multiple_of(10) => {
                return Response::Reply { reply: Box::default(), late: false };
            }
            (Some(Planted::AnswersWithoutDoing), "acquire") if self.done.is_multiple_of(10) => {
                if let Op::Acquire { leaving, ids, lease_ms, .. } = &call.op
                    && leaving.is_empty()
                {
                    let statuses = ids.iter().map(|_| PlaceStatus::Held).collect();
                    let lease_end = now / 1000 + lease_ms;
                    let reply = Reply { lease_end, statuses, ..Reply::default() };
                    return Response::Reply { reply: Box::new(reply), late: false };
                }
            }
            _ => {}
        }
        let mut put_back = None;
        if site.planted == Some(Planted::PromotesOutOfOrder)
            && op == "release"
            && ledger.waiting() >= 2
        {
            let waiting = ledger.places().filter_map(|(id, _, ticket)| Some((ticket?, id)));
            put_back = waiting.min();
            if let Some((_, head)) = put_back {
                let caller = Caller { limit: 0, ..caller };
                delegate!(ledger, ledger => ledger.release(caller, &[head], &mut |_, _| true));
            }
        }
        if let Kind::Shipped(ledger) = &mut ledger.ledger {
            ledger.settle_used(&call.used, caller.now);
        }
        let reply = delegate!(ledger, ledger => match &call.op {
            Op::Acquire { leaving, lease_ms, max_queue, ids } => {
                ledger.acquire(caller, *lease_ms, *max_queue, leaving, ids, &mut post)
            }
            Op::Release { ids } => ledger.release(caller, ids, &mut post),
            Op::Renew { lease_ms, ids } => ledger.renew(caller, *lease_ms, ids, &mut post),
            Op::Reassert { lease_ms, proofs } => {
                ledger.reassert(caller, *lease_ms, proofs, &mut post)
            }
            Op::Audit { most } => {
                let found = ledger.audit(now, *node, *most as usize);
                Reply { found, ..Reply::default() }
            }
        });
        if let Some((ticket, head)) = put_back {
            let (lease, caller) = (3000, Caller { limit: 0, ..caller });
            let proofs = [(head, ticket)];
            delegate!(ledger, ledger => {
                ledger.reassert(caller, lease, &proofs, &mut |_, _| true)
            });
        }
        let promotes =
            matches!(op, "acquire" | "renew" | "reassert") || (op == "release" && count_before > 0);
        let (leaving, coming): (&[PlaceId], Vec<_>) = match &call.op {
            Op::Acquire { leaving, ids, .. } => {
                (leaving, ids.iter().map(|id| (*id, None)).collect())
            }
            Op::Release { ids } => (ids, Vec::new()),
            Op::Reassert { proofs, .. } => {
                (&[], proofs.iter().map(|(id, proof)| (*id, Some(*proof))).collect())
            }
            _ => (&[], Vec::new()),
        };
        let turns = before.as_deref().filter(|_| is_fair).map(|before| {
            let after: Vec<_> = ledger.places().collect();
            ledger.judge(&Done {
                before,
                after: &after,
                now,
                limit,
                headroom: call.headroom,
                for_all: call.for_all,
                leaving,
                used: &call.used,
                coming: &coming,
                promotes,
                more: reply.more,
            })
        });
        if let Some(name) = name {
            (site.audit)(&Step {
                name,
                op,
                node: Some(*node),
                now: now / 1000,
                limit,
                for_all: call.for_all,
                proves: op == "reassert",
                promotes,
                ids,
                before: before.as_deref(),
                count_before,
                waiting_before,
                more: reply.more,
                leaving: match &call.op {
                    Op::Acquire { leaving, .. } => leaving.len(),
                    Op::Release { ids } => ids.len(),
                    _ => 0,
                },
                passed: posted + reply.granted.len(),
                after: ledger,
                turns,
            });
        }
        if ledger.is_empty() {
            self.ledgers.remove(key);
        }
        Response::Reply { reply: Box::new(reply), late: site.late }
    }

    fn names(&self, from: u64, most: u32) -> Response {
        let all: Vec<_> = self.ledgers.keys().cloned().collect();
        let passed = usize::try_from(from).unwrap_or(usize::MAX);
        let names: Vec<_> = all.iter().skip(passed).take(most as usize).cloned().collect();
        let next = from.saturating_add(names.len() as u64);
        let next = (next < all.len() as u64).then(|| next.to_string().into());
        Response::Names(Names { names, next })
    }

    /// Returns all places whose leases run: their name, their process, and whether they wait.
    pub fn living(&self, now: u64) -> impl Iterator<Item = (usize, PlaceId, Option<u64>)> + '_ {
        let ledgers = self.ledgers.iter().filter_map(|(key, l)| Some((name_of(key)?, l)));
        ledgers.flat_map(move |(name, ledger)| {
            let living = ledger.places().filter(move |(_, end, _)| *end > now / 1000);
            living.map(move |(id, _, ticket)| (name, id, ticket))
        })
    }

    /// Returns the limit that an operator set instead of the policies'.
    #[must_use]
    pub fn override_of(&self, name: usize) -> (Option<u32>, bool) {
        let set = self.overrides.names.iter().find(|(key, _)| name_of(key) == Some(name));
        set.map_or((None, false), |(_, over)| (over.limit, over.mode.as_str() == "paused"))
    }

    /// Gives a name away to another server.
    pub fn hand_over(&mut self, name: usize, to: &mut Self) {
        let key = self.ledgers.keys().find(|key| name_of(key) == Some(name)).cloned();
        if let Some((key, ledger)) = key.and_then(|key| self.ledgers.remove_entry(&key)) {
            to.ledgers.insert(key, ledger);
        }
    }

    /// Takes over the overrides.
    pub fn take_overrides(&mut self, from: &mut Self) {
        self.overrides = std::mem::take(&mut from.overrides);
    }

    /// Loses all data.
    pub fn forget(&mut self) {
        *self = Self { done: self.done, ..Self::default() };
    }
}

/// Returns whether an answer can be why a place has a permit: by itself, or with a hint that came before it.
fn may_grant(answer: &Response) -> bool {
    let Response::Reply { reply, .. } = answer else { return false };
    let is_there = |it: &PlaceStatus| *it == PlaceStatus::Held || it.ticket().is_some();
    !reply.granted.is_empty() || reply.statuses.iter().any(is_there)
}

fn refused(request: &Request, refuses: Refuses) -> Option<&'static str> {
    let Refuses { no_memory, read_only, loading, no_rights, fails_after: _ } = refuses;
    match request {
        _ if loading => Some("LOADING"),
        Request::Call(AddressedCall {
            call: Call { op: Op::Acquire { .. } | Op::Reassert { .. }, .. },
            ..
        })
        | Request::Query(_, Question::Override { .. })
            if no_memory =>
        {
            Some("OOM")
        }
        Request::Query(..)
        | Request::Call(AddressedCall { call: Call { op: Op::Audit { .. }, .. }, .. })
            if no_rights =>
        {
            Some("NOPERM")
        }
        Request::Query(
            _,
            Question::Inspect { .. } | Question::List { .. } | Question::Overrides { .. },
        )
        | Request::Call(AddressedCall { call: Call { op: Op::Audit { .. }, .. }, .. }) => None,
        _ if read_only => Some("READONLY"),
        _ => None,
    }
}

fn list(ledger: Option<&Book>, now: u64, most: u32, rate: Option<BoundRate>) -> Listing {
    let Some(ledger) = ledger else {
        return Listing { now, rate: rate.map(RateUsage::unused), ..Listing::default() };
    };
    let mut places: Vec<_> = ledger.places().filter(|(_, end, _)| *end > now / 1000).collect();
    places.sort_unstable_by_key(|(id, end, _)| (*end, *id));
    let waiting = places.iter().filter(|(_, _, ticket)| ticket.is_some()).count() as u64;
    let held = places.iter().filter(|(_, _, ticket)| ticket.is_none());
    let in_use = held.map(|(id, ..)| u64::from(id.cost())).sum();
    places.truncate(most as usize);
    let rate = rate.or_else(|| places.iter().rev().find_map(|(id, ..)| id.rate()));
    let rate = rate.map(|rate| ledger.usage_of(rate, now));
    Listing { now, in_use, waiting, places, rate, budgets: Vec::new() }
}

impl std::fmt::Debug for PortState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PortState").field("homes", &self.homes).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Site<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Site").field("server", &self.server).finish_non_exhaustive()
    }
}
