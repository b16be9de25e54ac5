//! One process's part of all semaphores: the record of each, and the queues of desk and watchdog.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::Waker;
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::health::{Counts, Health, LinkState};
use super::link::Link;
use super::lock;
use super::meter::{Meter, Meters};
use super::places::Places;
use super::policy::Policy;
use super::schedule::Schedule;
use crate::backend::{Answer, Backend, Call, Listing, Mailbox, Op, Server};
use crate::error::BackendError;
use crate::ledger::NodeId;

/// When to look again at a gate that should be idle and is not.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// One process's `Semaphore`.
pub(crate) struct Node {
    me: Weak<Self>,
    id: NodeId,
    port: Arc<dyn Port>,
    immediate: bool,
    /// Makes the tasks that carry out what is posted here.
    workers: Box<dyn Fn(Arc<Self>) -> Vec<Task> + Send + Sync>,
    gates: Mutex<HashMap<Arc<str>, Arc<Gate>, RandomState>>,
    serial: Arc<AtomicU64>,
    /// Places in use, over all gates.
    live: AtomicUsize,
    link: Link,
    counts: Arc<Counts>,
    meters: Meters,
    closed: AtomicBool,
    running: AtomicBool,
    tasks: Mutex<Vec<JoinHandle<()>>>,

    // The desk's queue.
    mail: Mutex<Mail>,
    mail_came: Notify,

    // The watchdog's queue.
    looks: Schedule<Arc<Gate>>,
}

/// One process's record of one semaphore.
pub(crate) struct Gate {
    node: Arc<Node>,
    name: Arc<str>,
    state: Mutex<GateState>,
}

struct GateState {
    places: Places,
    /// It stands in the desk's queue.
    queued: bool,
    /// For the calls that someone is carrying out: see [`Node::post`]. `None` meanwhile.
    calls: Option<Vec<Call>>,
    /// It was taken out of the node's list: get a new one.
    retired: bool,
}

/// What the desk is to send.
#[derive(Default)]
struct Mail {
    gates: VecDeque<Arc<Gate>>,
    asks: VecDeque<(Call, oneshot::Sender<Answer>)>,
}

/// Whom the answer to a call is for.
pub(super) enum Sender {
    Gate(Arc<Gate>),
    Ask(oneshot::Sender<Answer>),
}

/// What a node needs of a [`Backend`], whose type need not be known here.
trait Port: Send + Sync {
    fn key(&self, name: &str) -> Arc<str>;
    fn call_now(&self, call: &Call, now: Instant) -> Answer;
}

impl<B: Backend> Port for B {
    fn key(&self, name: &str) -> Arc<str> {
        B::key(self, name)
    }

    fn call_now(&self, call: &Call, now: Instant) -> Answer {
        B::call_now(self, call, now)
    }
}

/// A task of a node's, still to be started.
pub(super) type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Node {
    pub(super) fn new<B: Backend>(
        id: NodeId,
        backend: &Arc<B>,
        workers: impl Fn(Arc<Self>) -> Vec<Task> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let counts = Arc::<Counts>::default();
        let link = Link::new(backend.quarantines(), Arc::clone(&counts));
        let node = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            id,
            immediate: backend.is_immediate(),
            port: Arc::clone(backend) as _,
            workers: Box::new(workers),
            gates: Mutex::default(),
            serial: Arc::new(AtomicU64::new(1)),
            live: AtomicUsize::new(0),
            link,
            counts,
            meters: Meters::default(),
            closed: AtomicBool::new(false),
            running: AtomicBool::new(false),
            tasks: Mutex::default(),
            mail: Mutex::default(),
            mail_came: Notify::new(),
            looks: Schedule::new(),
        });
        let mailbox: Weak<dyn Mailbox> = Arc::downgrade(&node) as _;
        backend.attach(id, mailbox);
        node
    }

    pub(super) const fn id(&self) -> NodeId {
        self.id
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Why the backend cannot be asked at present, if so.
    pub(super) fn down(&self) -> Option<BackendError> {
        if self.immediate { None } else { self.link.down() }
    }

    /// What counts the requests under a policy.
    pub(super) fn meter(&self, policy: &Policy) -> Meter {
        self.meters.of(policy)
    }

    /// Tells of permits that were lost since the last time; says when there is more to tell.
    pub(super) fn tell_of_lost(&self) -> Option<Instant> {
        self.counts.tell_of_lost(false)
    }

    /// As that, by one who does not stay: the watchdog tells the rest.
    pub(super) fn wake_to_tell(&self) {
        if self.tell_of_lost().is_some() {
            self.looks.wake();
        }
    }

    pub(super) fn health(&self) -> Health {
        let link = if self.immediate { LinkState::Embedded } else { self.link.health() };
        self.counts.health(link)
    }

    /// Starts the tasks, if they do not run: at first use, because only then is there a runtime, and
    /// again if that runtime was shut down meanwhile.
    pub(super) fn ensure_running(self: &Arc<Self>) -> Result<(), BackendError> {
        if self.running.load(Ordering::Acquire) {
            return Ok(());
        }
        let runtime = Handle::try_current().map_err(|_| {
            BackendError::call("a semaphore needs a Tokio runtime; there is none here")
        })?;
        let mut tasks = lock(&self.tasks);
        if self.running.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        tasks.drain(..).for_each(|task| task.abort());
        self.counts.meter.begin(self.immediate);
        for worker in (self.workers)(Arc::clone(self)) {
            // Whichever ends before its time, all are started anew.
            let running = Running(Arc::clone(self));
            tasks.push(runtime.spawn(async move {
                let _running = running;
                worker.await;
            }));
        }
        Ok(())
    }

    // ===== gates =====

    /// Does something with the record of a semaphore, and posts what comes of it.
    pub(super) fn with_gate<T>(
        self: &Arc<Self>,
        name: &str,
        now: Instant,
        mut act: impl FnMut(&mut Places) -> T,
    ) -> (Arc<Gate>, T) {
        loop {
            let gate = self.gate(name);
            let mut state = gate.lock();
            if !state.retired {
                let result = act(&mut state.places);
                self.post(&gate, state, now);
                return (gate, result);
            }
        }
    }

    fn gate(self: &Arc<Self>, name: &str) -> Arc<Gate> {
        let mut gates = lock(&self.gates);
        if let Some(gate) = gates.get(name) {
            return Arc::clone(gate);
        }
        let name: Arc<str> = name.into();
        let (serial, counts) = (Arc::clone(&self.serial), Arc::clone(&self.counts));
        let key = self.port.key(&name);
        let gate = Arc::new(Gate {
            node: Arc::clone(self),
            name: Arc::clone(&name),
            state: Mutex::new(GateState {
                places: Places::new(key, self.id, serial, counts, self.link.conditions()),
                queued: false,
                calls: Some(Vec::new()),
                retired: false,
            }),
        });
        gates.insert(name, Arc::clone(&gate));
        gate
    }

    fn all_gates(&self) -> Vec<Arc<Gate>> {
        lock(&self.gates).values().cloned().collect()
    }

    pub(super) fn place_taken(&self) {
        self.live.fetch_add(1, Ordering::AcqRel);
    }

    pub(super) fn place_left(&self) {
        if self.live.fetch_sub(1, Ordering::AcqRel) == 1 && self.is_closed() {
            self.wake_tasks();
            self.forget_if_over();
        }
    }

    // ===== calls =====

    /// Sees to it that what the gate has to send is sent; `now` is not later than that.
    ///
    /// Where the backend answers at once, that is done here; by one at a time for each gate, so
    /// that its calls keep their order.
    fn post<'a>(
        self: &Arc<Self>,
        gate: &'a Arc<Gate>,
        mut state: MutexGuard<'a, GateState>,
        now: Instant,
    ) {
        if let Some(at) = state.places.rescheduled() {
            self.looks.push(Arc::clone(gate), at);
        }
        if !state.places.has_mail() {
            return;
        }
        if !self.immediate {
            if !std::mem::replace(&mut state.queued, true) {
                drop(state);
                lock(&self.mail).gates.push_back(Arc::clone(gate));
                self.mail_came.notify_one();
            }
            return;
        }
        // Whoever has the buffer is carrying out the calls, and sees to these too.
        let Some(mut calls) = state.calls.take() else { return };
        loop {
            state.places.collect(now, &mut calls);
            if calls.is_empty() {
                state.calls = Some(calls);
                if let Some(at) = state.places.rescheduled() {
                    self.looks.push(Arc::clone(gate), at);
                }
                break;
            }
            for call in calls.drain(..) {
                drop(state);
                let answer = self.port.call_now(&call, now);
                self.counts.meter.answered_here(&call.op, &answer);
                state = gate.lock();
                state.places.answered(&call.op, answer, now, now);
            }
        }
        let woken = state.places.take_woken();
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// All that is to be sent now, each call with whom its answer is for.
    pub(super) fn collect(&self, now: Instant) -> (Vec<Call>, Vec<Sender>) {
        let Mail { gates, asks } = std::mem::take(&mut *lock(&self.mail));
        let (mut calls, mut senders) = (Vec::new(), Vec::new());
        for gate in gates {
            let mut state = gate.lock();
            state.queued = false;
            state.places.collect(now, &mut calls);
            drop(state);
            senders.resize_with(calls.len(), || Sender::Gate(Arc::clone(&gate)));
        }
        for (call, to) in asks {
            calls.push(call);
            senders.push(Sender::Ask(to));
        }
        (calls, senders)
    }

    pub(super) async fn mail_came(&self) {
        self.mail_came.notified().await;
    }

    pub(super) fn answered(call: &Call, to: Sender, answer: Answer, sent: Instant, now: Instant) {
        match to {
            Sender::Gate(gate) => {
                let counts = &gate.node.counts;
                counts.meter.answered(&call.op, &answer, now - sent);
                if let Answer::Failed(error) = &answer {
                    counts.tell_of_refusal(&gate.name, error);
                }
                gate.update(now, |places| places.answered(&call.op, answer, sent, now));
            }
            Sender::Ask(to) => {
                let _ = to.send(answer);
            }
        }
    }

    pub(super) fn unanswered(call: &Call, sender: Sender, error: &BackendError, sent: Instant) {
        match sender {
            Sender::Gate(gate) => {
                let now = Instant::now();
                gate.node.counts.meter.unanswered(&call.op, now - sent);
                gate.update(now, |places| places.unanswered(&call.op));
            }
            Sender::Ask(to) => {
                let _ = to.send(Answer::Failed(error.clone()));
            }
        }
    }

    /// A question that belongs to no place.
    pub(super) async fn ask(self: &Arc<Self>, name: &str, op: Op) -> Result<Listing, BackendError> {
        let call = Call { key: self.port.key(name), node: self.id, limit: 0, op };
        let answer = if self.immediate {
            self.port.call_now(&call, Instant::now())
        } else {
            self.ensure_running()?;
            if let Some(error) = self.down() {
                return Err(error);
            }
            let (to, answer) = oneshot::channel();
            lock(&self.mail).asks.push_back((call, to));
            self.mail_came.notify_one();
            tokio::time::timeout(super::ANSWER_TIMEOUT, answer)
                .await
                .map_err(|_| no_answer())?
                .map_err(|_| no_answer())?
        };
        match answer {
            Answer::Listing(listing) => Ok(listing),
            Answer::Failed(error) => Err(error),
            Answer::Reply { .. } => Err(BackendError::call("an answer to another question")),
        }
    }

    // ===== connection =====

    /// There is a new connection; everything is asked for again.
    pub(super) fn connected(self: &Arc<Self>, server: &Server) {
        let lost_at = self.link.connected(server);
        for gate in self.all_gates() {
            gate.update(Instant::now(), |places| places.connected(server.deaf, lost_at));
        }
    }

    /// The connection broke. That is no reason yet to turn anyone away.
    pub(super) fn disconnected(&self, error: &BackendError) {
        self.link.disconnected(error);
    }

    /// There is none to be had for now: the policy answers.
    pub(super) fn unreachable(self: &Arc<Self>, error: &BackendError) {
        self.link.unreachable(error);
        for (_, to) in std::mem::take(&mut lock(&self.mail).asks) {
            let _ = to.send(Answer::Failed(error.clone()));
        }
        for gate in self.all_gates() {
            let now = Instant::now();
            gate.update(now, |places| places.unreachable(error, now));
        }
    }

    // ===== time =====

    pub(super) async fn look_came(&self) {
        self.looks.came().await;
    }

    /// Looks at every gate that is due; says when the next one is.
    pub(super) fn look(self: &Arc<Self>) -> Option<Instant> {
        loop {
            let now = Instant::now();
            let (at, gate) = match self.looks.due(now) {
                Ok(due) => due,
                Err(next) => return next,
            };
            // Only the last time that was asked for counts; the others are left over.
            if gate.lock().places.wake_at() != Some(at) {
                continue;
            }
            let mut next = None;
            gate.update(now, |places| next = places.tick(now));
            match next {
                Some(at) => self.looks.push(gate, at),
                None => self.retire(&gate),
            }
        }
    }

    /// Forgets a gate that nobody uses.
    fn retire(&self, gate: &Arc<Gate>) {
        let mut gates = lock(&self.gates);
        let mut state = gate.lock();
        if state.places.is_idle() && !state.queued {
            state.retired = true;
            gates.remove(&gate.name);
            return;
        }
        // Something is still to be sent, or someone came just now: then he set a time himself.
        let at = state.places.look_again(Instant::now() + LOOK_AGAIN);
        drop(state);
        drop(gates);
        self.looks.push(Arc::clone(gate), at);
    }

    // ===== the end =====

    /// No new places from here on. The tasks end when the last place is gone.
    pub(super) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        self.wake_tasks();
    }

    /// Gives back all places.
    pub(super) fn give_back(self: &Arc<Self>) {
        for gate in self.all_gates() {
            let now = Instant::now();
            gate.update(now, |places| places.close(now));
        }
        self.counts.tell_of_lost(true);
    }

    /// Whether nothing is left to do.
    pub(super) fn is_finished(&self) -> bool {
        self.is_closed() && {
            let gates = lock(&self.gates);
            gates.values().all(|gate| !gate.lock().places.is_busy())
        }
    }

    /// Waits for the tasks.
    pub(super) async fn join(&self) {
        let tasks = std::mem::take(&mut *lock(&self.tasks));
        for task in tasks {
            let _ = task.await;
        }
    }

    /// Nothing more can be done: takes the circle of node and gates apart.
    pub(super) fn forget(&self) {
        lock(&self.gates).clear();
        self.looks.clear();
        self.wake_tasks();
    }

    /// The last handle is gone. The tasks, if they run, see to what is left.
    pub(super) fn abandon(&self) {
        self.close();
        self.forget_if_over();
    }

    /// Where no task will see to what is left, nobody needs it any more.
    fn forget_if_over(&self) {
        if self.is_closed() && !self.running.load(Ordering::Acquire) {
            self.forget();
            let mail = std::mem::take(&mut *lock(&self.mail));
            // Its gates end here, and they look at the node as they do.
            drop(mail);
        }
    }

    fn wake_tasks(&self) {
        self.mail_came.notify_one();
        self.looks.wake();
    }
}

impl Mailbox for Node {
    fn hint(&self, name: &str, n: u64, lease_end: u64) {
        let Some(node) = self.me.upgrade() else { return };
        let now = Instant::now();
        node.gate(name).update(now, |places| places.hint(n, lease_end, now));
    }
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, GateState> {
        lock(&self.state)
    }

    pub(super) fn node(&self) -> &Arc<Node> {
        &self.node
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Does something that comes to nothing elsewhere.
    pub(super) fn look<T>(&self, act: impl FnOnce(&mut Places) -> T) -> T {
        act(&mut self.lock().places)
    }

    /// Does something that may have to be sent, or may wake someone; `now` is not later than this.
    pub(super) fn update<T>(
        self: &Arc<Self>,
        now: Instant,
        act: impl FnOnce(&mut Places) -> T,
    ) -> T {
        let mut state = self.lock();
        let result = act(&mut state.places);
        let woken = state.places.take_woken();
        self.node.post(self, state, now);
        woken.into_iter().for_each(Waker::wake);
        result
    }
}

/// Says that the tasks are gone, however they went.
struct Running(Arc<Node>);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.running.store(false, Ordering::Release);
        self.0.link.ended();
        self.0.forget_if_over();
    }
}

fn no_answer() -> BackendError {
    BackendError::call("the backend gave no answer in time")
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("name", &self.name).finish_non_exhaustive()
    }
}
