//! One process's part of all semaphores: the record of each, and the queues of desk and watchdog.

mod ages;
mod calls;
mod overrides;

use std::collections::HashMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::task::Waker;
use std::time::Duration;

use foldhash::fast::RandomState;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use self::ages::Questions;
pub(super) use self::ages::{Told, process};
pub(super) use self::calls::another_answer;
use self::overrides::Known;
pub(super) use self::overrides::LOOK;
use super::health::{Counts, Health, LinkState};
use super::link::Link;
use super::lock;
use super::meter::{Meter, Meters};
use super::places::Places;
use super::policy::Policy;
use super::schedule::Schedule;
use super::wire::{Wire, Wires};
use crate::backend::{Answer, Backend, Call, Mailbox, OVERRIDES, Server, Shard, Word};
use crate::error::BackendError;
use crate::ledger::NodeId;

/// When to look again at a gate that should be idle and is not.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// A gate that is sent on a second time within the first has to wait for the second: two servers can
/// name each other for as long as they do not know of one another's state.
const SENT_ON: (Duration, Duration) = (Duration::from_millis(100), Duration::from_millis(25));

/// One process's `Semaphore`.
pub(crate) struct Node {
    me: Weak<Self>,
    id: NodeId,
    port: Arc<dyn Port>,
    immediate: bool,
    /// Makes the task that carries out what is posted on a wire.
    desk: Box<dyn Fn(Arc<Self>, Arc<Wire>) -> Task + Send + Sync>,
    quarantines: bool,
    gates: Mutex<HashMap<Arc<str>, Arc<Gate>, RandomState>>,
    serial: Arc<AtomicU64>,
    /// Places in use, over all gates.
    live: AtomicUsize,
    wires: Wires,
    overrides: Known,
    questions: Questions,
    counts: Arc<Counts>,
    meters: Meters,
    closed: AtomicBool,
    running: AtomicBool,
    /// There was a connection, to any server.
    was_connected: AtomicBool,
    tasks: Mutex<Tasks>,

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
    /// The way to the server that counts it, and how often that was another one. An answer that is
    /// not from this stay is nobody's: what it was about has been asked for again.
    wire: Arc<Wire>,
    stay: u64,
    moved_at: Option<Instant>,
    /// Nothing is to be sent until then.
    held_until: Option<Instant>,
    /// It stands in the desk's queue.
    queued: bool,
    /// For the calls that someone is carrying out: see [`Node::post`]. `None` meanwhile.
    calls: Option<Vec<Call>>,
    /// It was taken out of the node's list: get a new one.
    retired: bool,
}

/// The tasks of a node, and where they run.
#[derive(Default)]
struct Tasks {
    runtime: Option<Handle>,
    running: Vec<JoinHandle<()>>,
}

/// What a node needs of a [`Backend`], whose type need not be known here.
trait Port: Send + Sync {
    fn key(&self, name: &str) -> Arc<str>;
    fn shard(&self, key: &str) -> Shard;
    fn shards(&self) -> Vec<Shard>;
    fn call_now(&self, call: &Call, now: Instant) -> Answer;
}

impl<B: Backend> Port for B {
    fn key(&self, name: &str) -> Arc<str> {
        B::key(self, name)
    }

    fn shard(&self, key: &str) -> Shard {
        B::shard(self, key)
    }

    fn shards(&self) -> Vec<Shard> {
        B::shards(self)
    }

    fn call_now(&self, call: &Call, now: Instant) -> Answer {
        B::call_now(self, call, now)
    }
}

/// A task of a node's, still to be started.
pub(super) type Task = Pin<Box<dyn Future<Output = Ended> + Send>>;

/// How a task of a node's ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// With the node.
    WithNode,
    /// Because there is nothing more to do for it alone.
    Alone,
}

impl Node {
    pub(super) fn new<B: Backend>(
        id: NodeId,
        backend: &Arc<B>,
        desk: impl Fn(Arc<Self>, Arc<Wire>) -> Task + Send + Sync + 'static,
    ) -> Arc<Self> {
        let node = Arc::new_cyclic(|me| Self {
            me: Weak::clone(me),
            id,
            immediate: backend.is_immediate(),
            port: Arc::clone(backend) as _,
            desk: Box::new(desk),
            quarantines: backend.quarantines(),
            gates: Mutex::default(),
            serial: Arc::new(AtomicU64::new(1)),
            live: AtomicUsize::new(0),
            wires: Wires::default(),
            overrides: Known::new(backend.key(OVERRIDES)),
            questions: Questions::default(),
            counts: Arc::default(),
            meters: Meters::default(),
            closed: AtomicBool::new(false),
            running: AtomicBool::new(false),
            was_connected: AtomicBool::new(false),
            tasks: Mutex::default(),
            looks: Schedule::new(),
        });
        let mailbox: Weak<dyn Mailbox> = Arc::downgrade(&node) as _;
        backend.attach(id, mailbox);
        if node.immediate {
            node.learn_now();
        }
        node
    }

    pub(super) const fn id(&self) -> NodeId {
        self.id
    }

    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
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
        if self.immediate {
            return self.counts.health(LinkState::Embedded, None);
        }
        let wires = self.wires.all();
        let links = wires.iter().map(|wire| wire.link.health());
        let worst = links.max_by_key(|link| match link {
            LinkState::Embedded | LinkState::Up => 0,
            LinkState::Connecting => 1,
            LinkState::Down { .. } => 2,
        });
        let warning = wires.iter().find_map(|wire| wire.link.warning());
        self.counts.health(worst.unwrap_or(LinkState::Connecting), warning)
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
        tasks.running.drain(..).for_each(|task| task.abort());
        tasks.runtime = Some(runtime);
        self.counts.meter.begin(self.immediate);
        let node = Arc::clone(self);
        self.spawn(
            &mut tasks,
            Box::pin(async move {
                super::watchdog::run(node).await;
                Ended::WithNode
            }),
        );
        for wire in self.wires.all().into_iter().filter(|_| !self.immediate) {
            wire.started.store(true, Ordering::Release);
            self.spawn(&mut tasks, (self.desk)(Arc::clone(self), wire));
        }
        Ok(())
    }

    fn spawn(self: &Arc<Self>, tasks: &mut Tasks, task: Task) {
        let Some(runtime) = &tasks.runtime else { return };
        // Whichever ends before its time, all are started anew.
        let running = Running(Some(Arc::clone(self)));
        let task = runtime.spawn(async move {
            let running = running;
            if task.await == Ended::Alone {
                running.disarm();
            }
        });
        tasks.running.push(task);
    }

    // ===== wires =====

    /// The way to a server, with so many gates more on it.
    fn attach(self: &Arc<Self>, shard: &Shard, gates: usize) -> Arc<Wire> {
        let link = || Link::new(self.quarantines, Arc::clone(&self.counts));
        let wire = self.wires.attach(shard, gates, link);
        if self.immediate || wire.started.load(Ordering::Acquire) {
            return wire;
        }
        let mut tasks = lock(&self.tasks);
        if self.running.load(Ordering::Acquire) && !wire.started.swap(true, Ordering::AcqRel) {
            tasks.running.retain(|task| !task.is_finished());
            self.spawn(&mut tasks, (self.desk)(Arc::clone(self), Arc::clone(&wire)));
        }
        wire
    }

    /// This server is none of the backend's any more: forgets it, if no gate is left on it.
    pub(super) fn end(&self, wire: &Arc<Wire>) -> bool {
        let ended = self.wires.end(wire);
        if ended {
            wire.end();
        } else {
            wire.answer_asks(&Answer::Moved);
        }
        ended
    }

    /// Looks where each semaphore of this server is counted now.
    pub(super) fn rehome_all(self: &Arc<Self>, wire: &Arc<Wire>) {
        for gate in self.gates_on(wire) {
            self.rehome(&gate, false);
        }
    }

    /// Sends a gate to the server that counts it now, and asks for everything again there.
    fn rehome(self: &Arc<Self>, gate: &Arc<Gate>, was_sent_on: bool) {
        let wire = self.attach(&self.port.shard(&self.port.key(&gate.name)), 1);
        let now = Instant::now();
        let mut state = gate.lock();
        if state.retired || (Arc::ptr_eq(&state.wire, &wire) && !was_sent_on) {
            drop(state);
            self.wires.detach(&wire);
            return;
        }
        let old = std::mem::replace(&mut state.wire, Arc::clone(&wire));
        state.stay += 1;
        state.queued = false;
        let before = state.moved_at.replace(now);
        if was_sent_on && before.is_some_and(|at| now < at + SENT_ON.0) {
            state.held_until = Some(now + SENT_ON.1);
            self.looks.push(Arc::clone(gate), now + SENT_ON.1);
        }
        // Looked at only now that a new connection would find this gate.
        if let Some((deaf, lost_at)) = wire.link.up() {
            state.places.connected(deaf, lost_at, true);
        } else if let Some(error) = wire.link.down() {
            state.places.unreachable(&error, now);
        }
        let woken = state.places.take_woken();
        self.post(gate, state, now);
        woken.into_iter().for_each(Waker::wake);
        self.wires.detach(&old);
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
        if let Some(gate) = lock(&self.gates).get(name) {
            return Arc::clone(gate);
        }
        let key = self.port.key(name);
        let wire = self.attach(&self.port.shard(&key), 1);
        let mut gates = lock(&self.gates);
        if let Some(gate) = gates.get(name) {
            self.wires.detach(&wire);
            return Arc::clone(gate);
        }
        let name: Arc<str> = name.into();
        let (serial, counts) = (Arc::clone(&self.serial), Arc::clone(&self.counts));
        let gate = Arc::new(Gate {
            node: Arc::clone(self),
            name: Arc::clone(&name),
            state: Mutex::new(GateState {
                places: Places::new(key, self.id, serial, counts, wire.link.conditions())
                    .overridden(self.overrides.of(&name)),
                wire,
                stay: 0,
                moved_at: None,
                held_until: None,
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

    fn gates_on(&self, wire: &Arc<Wire>) -> Vec<Arc<Gate>> {
        let gates = lock(&self.gates);
        gates.values().filter(|gate| Arc::ptr_eq(&gate.lock().wire, wire)).cloned().collect()
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

    // ===== connections =====

    /// There is a new connection; everything is asked for again.
    pub(super) fn connected(self: &Arc<Self>, wire: &Arc<Wire>, server: &Server) {
        let lost_at = wire.link.connected(server);
        let again = self.was_connected.swap(true, Ordering::AcqRel);
        for gate in self.gates_on(wire) {
            gate.update(Instant::now(), |places| places.connected(server.deaf, lost_at, again));
        }
    }

    /// The connection broke. That is no reason yet to turn anyone away.
    pub(super) fn disconnected(&self, wire: &Wire, error: &BackendError) {
        wire.link.disconnected(error);
    }

    /// There is none to be had for now: the policy answers.
    pub(super) fn unreachable(self: &Arc<Self>, wire: &Arc<Wire>, error: &BackendError) {
        wire.link.unreachable(error);
        wire.answer_asks(&Answer::Failed(error.clone()));
        for gate in self.gates_on(wire) {
            let now = Instant::now();
            gate.update(now, |places| places.unreachable(error, now));
        }
        self.overrides_unreachable(wire);
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
            let state = gate.lock();
            if state.places.wake_at() != Some(at) && state.held_until != Some(at) {
                continue;
            }
            drop(state);
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
            self.wires.detach(&state.wire);
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
        let tasks = std::mem::take(&mut lock(&self.tasks).running);
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

    /// No connection is to be had, and none will be waited for: what is still to be given back to
    /// this server ends with its lease.
    pub(super) fn give_up(&self, wire: &Arc<Wire>) {
        let mut gates = lock(&self.gates);
        gates.retain(|_, gate| !Arc::ptr_eq(&gate.lock().wire, wire));
        drop(gates);
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
            // Their gates end here, and they look at the node as they do.
            self.wires.all().iter().for_each(|wire| drop(wire.take_mail()));
        }
    }

    fn wake_tasks(&self) {
        self.wires.all().iter().for_each(|wire| wire.wake());
        self.looks.wake();
    }
}

impl Mailbox for Node {
    fn hint(&self, name: &str, n: u64, lease_end: u64) {
        let Some(node) = self.me.upgrade() else { return };
        let now = Instant::now();
        node.gate(name).update(now, |places| places.hint(n, lease_end, now));
    }

    fn overridden(&self, _name: &str) {
        let Some(node) = self.me.upgrade() else { return };
        if node.immediate {
            return node.learn_now();
        }
        node.overrides.want();
        node.wake_for_overrides();
    }

    fn told(&self, name: &str, word: Word) {
        let Some(node) = self.me.upgrade() else { return };
        node.told(name, word);
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

    /// As [`update`](Self::update), unless the gate has gone to another server since.
    fn update_in(self: &Arc<Self>, stay: u64, now: Instant, act: impl FnOnce(&mut Places)) {
        let mut state = self.lock();
        if state.stay != stay {
            return;
        }
        act(&mut state.places);
        let woken = state.places.take_woken();
        self.node.post(self, state, now);
        woken.into_iter().for_each(Waker::wake);
    }
}

/// Says that the tasks are gone, however they went.
struct Running(Option<Arc<Node>>);

impl Running {
    /// Only this one is gone.
    fn disarm(mut self) {
        self.0 = None;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(node) = &self.0 {
            node.running.store(false, Ordering::Release);
            for wire in node.wires.all() {
                wire.link.ended();
            }
            node.forget_if_over();
        }
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate").field("name", &self.name).finish_non_exhaustive()
    }
}
