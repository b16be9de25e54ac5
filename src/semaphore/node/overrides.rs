//! What operators set in place of policies, as this process knows it.
//!
//! One server keeps it. It is read anew when the connection to that opens, when a message says that
//! something was set, and each second while this process uses any semaphore.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::{Gate, Node};
use crate::backend::{Answer, Call, OVERRIDES, Op, Override, Overrides};
use crate::error::BackendError;
use crate::ledger::PlaceId;
use crate::semaphore::lock;
use crate::semaphore::wire::{Sender, Wire};

/// How often to look, for messages that are lost or may not be had.
pub(in crate::semaphore) const LOOK: Duration = Duration::from_secs(1);
/// How long a connection to another server than the one that keeps it waits for it.
const PATIENCE: Duration = Duration::from_millis(250);
/// Who is sent on a second time within this asks with the next look.
const SENT_ON: Duration = Duration::from_millis(100);

/// What is known, and whether to ask again.
pub(super) struct Known {
    /// Where it is kept.
    key: Arc<str>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    overrides: Overrides,
    /// It was asked for, and there was an answer.
    was_read: bool,
    /// To be asked for with the next write.
    wanted: bool,
    /// A question is on its way. What is wanted meanwhile is asked for after it.
    asking: bool,
    /// The last question failed: said once.
    failed: bool,
    /// When another server was named as the one that keeps it.
    moved_at: Option<Instant>,
    /// Who wants to know, from a question that is asked from here on, whether places that are gone were
    /// revoked.
    doubting: Vec<Arc<Gate>>,
}

/// What an answer brought.
#[derive(Default)]
struct News {
    /// The names for which something else is set.
    names: HashSet<Arc<str>>,
    /// Places that were revoked, and the names of their semaphores.
    revoked: Vec<(PlaceId, Arc<str>)>,
    /// There is another question to be asked.
    again: bool,
}

impl Node {
    // ===== questions =====

    fn overrides_call(&self) -> Call {
        let op = Op::Overrides { known: self.overrides.version() };
        Call { key: Arc::clone(&self.overrides.key), node: self.id, limit: 0, op }
    }

    /// Whether this is the way to the server that keeps what operators set.
    fn keeps_overrides(&self, wire: &Wire) -> bool {
        self.port.shard(&self.overrides.key) == *wire.shard()
    }

    /// With what the connection to the server that keeps it begins, so that what goes out first goes by
    /// it.
    pub(in crate::semaphore) fn first_question(
        self: &Arc<Self>,
        wire: &Wire,
    ) -> Option<(Call, Sender)> {
        let doubting = self.keeps_overrides(wire).then(|| self.overrides.begin())?;
        Some((self.overrides_call(), Sender::Overrides(Arc::clone(self), doubting, None)))
    }

    /// With what the others' begin, once: unless the server that keeps it is away, it is known then too.
    pub(in crate::semaphore) async fn read_overrides(self: &Arc<Self>) {
        if !self.overrides.was_read() && !self.is_closed() {
            let _ = timeout(PATIENCE, self.catch_up()).await;
        }
    }

    /// The question that is due on this wire, if there is one.
    pub(super) fn question_about_overrides(
        self: &Arc<Self>,
        wire: &Wire,
    ) -> Option<(Call, Sender)> {
        if !self.overrides.is_due() || !self.keeps_overrides(wire) {
            return None;
        }
        let doubting = self.overrides.begin();
        Some((self.overrides_call(), Sender::Overrides(Arc::clone(self), doubting, None)))
    }

    /// It is time to ask, if any semaphore is used.
    pub(in crate::semaphore) fn look_for_overrides(self: &Arc<Self>, wire: &Arc<Wire>) {
        if self.is_closed() || lock(&self.gates).is_empty() {
            return;
        }
        // Every desk looks, so that there is one where it is kept.
        if Arc::ptr_eq(&self.attach(&self.port.shard(&self.overrides.key), 0), wire) {
            self.overrides.want();
        }
    }

    /// Has what is wanted be asked for now, if there is a way to the server that keeps it.
    pub(super) fn wake_for_overrides(&self) {
        let keeper = self.port.shard(&self.overrides.key);
        let wires = self.wires.all().into_iter();
        wires.filter(|wire| *wire.shard() == keeper).for_each(|wire| wire.wake());
    }

    /// Has this process go by what operators set before now.
    pub(in crate::semaphore) async fn catch_up(self: &Arc<Self>) -> Result<(), BackendError> {
        if self.immediate {
            self.learn_now();
            return Ok(());
        }
        self.ask(OVERRIDES, self.overrides_call().op).await.map(drop)
    }

    // ===== answers =====

    pub(super) fn overrides_answered(
        self: &Arc<Self>,
        answer: Answer,
        doubting: Vec<Arc<Gate>>,
        now: Instant,
    ) {
        if matches!(answer, Answer::Moved) {
            if self.overrides.moved(doubting, now) {
                self.attach(&self.port.shard(&self.overrides.key), 0).wake();
            }
            return;
        }
        self.learn(answer, now);
        settle(doubting, now);
    }

    /// The server that keeps it is away. Whoever doubts goes by what is known.
    pub(super) fn overrides_unreachable(&self, wire: &Wire) {
        if self.keeps_overrides(wire) {
            settle(self.overrides.take_doubting(), Instant::now());
        }
    }

    /// Goes by what operators set from here on; says whether that is news.
    fn learn(self: &Arc<Self>, answer: Answer, now: Instant) -> bool {
        let News { names, revoked, again } = self.overrides.answered(answer);
        let known = |name: &str| lock(&self.gates).get(name).cloned();
        for name in &names {
            if let Some(gate) = known(name) {
                // Whatever is known by then: another thread may have learned something newer.
                gate.update(now, |places| places.set_override(self.overrides.of(name)));
            }
        }
        for (id, name) in &revoked {
            if let Some(gate) = known(name) {
                gate.update(now, |places| places.revoked(*id, now));
            }
        }
        if again {
            self.wake_for_overrides();
        }
        !names.is_empty() || !revoked.is_empty()
    }

    /// The same, where the backend answers at once.
    pub(super) fn learn_now(self: &Arc<Self>) {
        loop {
            let now = Instant::now();
            let answer = self.port.call_now(&self.overrides_call(), now);
            if !self.learn(answer, now) {
                return;
            }
        }
    }

    // ===== what is known =====

    /// All names for which operators set something, as far as that is known here.
    pub(in crate::semaphore) fn overrides(&self) -> Vec<(Arc<str>, Override)> {
        self.overrides.all()
    }

    /// What operators set for a name, as far as that is known here.
    pub(in crate::semaphore) fn override_of(&self, name: &str) -> Override {
        self.overrides.of(name)
    }
}

fn settle(doubting: Vec<Arc<Gate>>, now: Instant) {
    for gate in doubting {
        gate.update(now, |places| places.doubt_settled(now));
    }
}

impl Known {
    pub(super) fn new(key: Arc<str>) -> Self {
        Self { key, state: Mutex::default() }
    }

    pub(super) fn of(&self, name: &str) -> Override {
        lock(&self.state).overrides.of(name)
    }

    fn all(&self) -> Vec<(Arc<str>, Override)> {
        let state = lock(&self.state);
        let all = state.overrides.names.iter();
        all.map(|(name, over)| (Arc::clone(name), *over)).collect()
    }

    fn version(&self) -> u64 {
        lock(&self.state).overrides.version
    }

    pub(super) fn want(&self) {
        lock(&self.state).wanted = true;
    }

    /// The same, for a gate that found places gone.
    pub(super) fn doubt(&self, gate: &Arc<Gate>) {
        let mut state = lock(&self.state);
        state.wanted = true;
        state.doubting.push(Arc::clone(gate));
    }

    fn was_read(&self) -> bool {
        lock(&self.state).was_read
    }

    /// Whether to ask now.
    fn is_due(&self) -> bool {
        let state = lock(&self.state);
        state.wanted && !state.asking
    }

    /// A question goes out now; says who is to be told when it is answered.
    fn begin(&self) -> Vec<Arc<Gate>> {
        let mut state = lock(&self.state);
        state.wanted = false;
        state.asking = true;
        std::mem::take(&mut state.doubting)
    }

    fn take_doubting(&self) -> Vec<Arc<Gate>> {
        std::mem::take(&mut lock(&self.state).doubting)
    }

    /// Another server keeps it. Says whether to ask there at once.
    fn moved(&self, doubting: Vec<Arc<Gate>>, now: Instant) -> bool {
        let mut state = lock(&self.state);
        state.asking = false;
        state.wanted = true;
        state.doubting.extend(doubting);
        let before = state.moved_at.replace(now);
        before.is_none_or(|at| now > at + SENT_ON)
    }

    /// A question was answered.
    fn answered(&self, answer: Answer) -> News {
        let mut state = lock(&self.state);
        state.asking = false;
        state.was_read = true;
        let mut news = News { again: state.wanted, ..News::default() };
        match answer {
            Answer::Overrides(None) => state.failed = false,
            Answer::Overrides(Some(new)) => {
                let old = std::mem::replace(&mut state.overrides, new);
                let new = &state.overrides;
                let names = old.names.keys().chain(new.names.keys());
                news.names.extend(names.filter(|name| old.of(name) != new.of(name)).cloned());
                let revoked =
                    new.revoked.iter().filter(|(id, new)| old.revoked.get(id) != Some(new));
                news.revoked.extend(revoked.map(|(id, new)| (*id, Arc::clone(&new.name))));
                state.failed = false;
            }
            Answer::Failed(error) if !state.failed => {
                state.failed = true;
                tracing::warn!(target: "tower_semaphore", %error, "what operators set cannot be read, so policies alone count");
            }
            _ => {}
        }
        news
    }

    /// The connection broke. The next one begins with a question.
    pub(super) fn unanswered(&self, doubting: Vec<Arc<Gate>>) {
        let mut state = lock(&self.state);
        state.asking = false;
        state.wanted = false;
        state.doubting.extend(doubting);
    }
}
