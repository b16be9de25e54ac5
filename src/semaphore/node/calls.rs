//! What a node has to send, and what becomes of the answers.

use std::sync::{Arc, MutexGuard};
use std::task::Waker;

use tokio::time::Instant;

use super::{Gate, GateState, Node};
use crate::backend::{Answer, Call, Listing, Op, Shard};
use crate::error::BackendError;
use crate::semaphore::places::Places;
use crate::semaphore::wire::{Mail, Sender, Wire};
use crate::semaphore::{ANSWER_TIMEOUT, lock};

/// How often a question is sent on before it is given up.
const ASKED_MAX: usize = 5;

impl Node {
    /// Sees to it that what the gate has to send is sent; `now` is not later than that.
    ///
    /// Where the backend answers at once, that is done here; by one at a time for each gate, so
    /// that its calls keep their order.
    pub(super) fn post<'a>(
        self: &Arc<Self>,
        gate: &'a Arc<Gate>,
        mut state: MutexGuard<'a, GateState>,
        now: Instant,
    ) {
        if let Some(at) = state.places.rescheduled() {
            self.looks.push(Arc::clone(gate), at);
        }
        if !self.immediate && state.places.take_doubt() {
            self.overrides.doubt(gate);
            self.wake_for_overrides();
        }
        if !state.places.has_mail() || state.held_until.is_some_and(|until| now < until) {
            return;
        }
        if !self.immediate {
            if !std::mem::replace(&mut state.queued, true) {
                let wire = Arc::clone(&state.wire);
                drop(state);
                wire.post(Arc::clone(gate));
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
                if state.places.take_doubt() {
                    drop(state);
                    self.learn_now();
                    state = gate.lock();
                    state.places.doubt_settled(now);
                }
            }
        }
        let woken = state.places.take_woken();
        drop(state);
        woken.into_iter().for_each(Waker::wake);
    }

    /// All that is to be sent there now, each call with whom its answer is for.
    pub(in crate::semaphore) fn collect(
        self: &Arc<Self>,
        wire: &Arc<Wire>,
        now: Instant,
    ) -> (Vec<Call>, Vec<Sender>) {
        let Mail { gates, asks } = wire.take_mail();
        let (mut calls, mut senders) = (Vec::new(), Vec::new());
        for gate in gates {
            let mut state = gate.lock();
            // It may have gone elsewhere meanwhile.
            if !Arc::ptr_eq(&state.wire, wire) {
                continue;
            }
            state.queued = false;
            let stay = state.stay;
            state.places.collect(now, &mut calls);
            drop(state);
            senders.resize_with(calls.len(), || Sender::Gate(Arc::clone(&gate), stay));
        }
        for (call, to) in asks {
            let learns = matches!(call.op, Op::Overrides { .. });
            calls.push(call);
            senders.push(if learns {
                Sender::Overrides(Arc::clone(self), Vec::new(), Some(to))
            } else {
                Sender::Ask(to)
            });
        }
        if let Some((call, to)) = self.question_about_overrides(wire) {
            calls.push(call);
            senders.push(to);
        }
        (calls, senders)
    }

    pub(in crate::semaphore) fn answered(
        call: &Call,
        to: Sender,
        answer: Answer,
        sent: Instant,
        now: Instant,
    ) {
        match (to, answer) {
            (Sender::Gate(gate, stay), Answer::Moved) => {
                if gate.lock().stay == stay {
                    gate.node.rehome(&gate, true);
                }
            }
            (Sender::Gate(gate, stay), answer) => {
                let counts = &gate.node.counts;
                counts.meter.answered(&call.op, &answer, now - sent);
                if let Answer::Failed(error) = &answer {
                    counts.tell_of_refusal(&gate.name, error);
                }
                gate.update_in(stay, now, |places| places.answered(&call.op, answer, sent, now));
            }
            (Sender::Ask(to), answer) => {
                let _ = to.send(answer);
            }
            (Sender::Overrides(node, doubting, to), answer) => {
                node.overrides_answered(answer.clone(), doubting, now);
                let _ = to.map(|to| to.send(answer));
            }
        }
    }

    pub(in crate::semaphore) fn unanswered(
        call: &Call,
        sender: Sender,
        error: &BackendError,
        sent: Instant,
    ) {
        match sender {
            Sender::Gate(gate, stay) => {
                let now = Instant::now();
                gate.node.counts.meter.unanswered(&call.op, now - sent);
                gate.update_in(stay, now, |places| places.unanswered(&call.op));
            }
            Sender::Ask(to) => {
                let _ = to.send(Answer::Failed(error.clone()));
            }
            Sender::Overrides(node, doubting, to) => {
                node.overrides.unanswered(doubting);
                let _ = to.map(|to| to.send(Answer::Failed(error.clone())));
            }
        }
    }

    /// A question that belongs to no place, to the server that counts the semaphore of this name.
    pub(in crate::semaphore) async fn ask(
        self: &Arc<Self>,
        name: &str,
        op: Op,
    ) -> Result<Answer, BackendError> {
        self.answer(None, name, op).await
    }

    /// The same, to a server of one's choice.
    pub(in crate::semaphore) async fn ask_at(
        self: &Arc<Self>,
        server: &Shard,
        name: &str,
        op: Op,
    ) -> Result<Answer, BackendError> {
        self.answer(Some(server), name, op).await
    }

    async fn answer(
        self: &Arc<Self>,
        server: Option<&Shard>,
        name: &str,
        op: Op,
    ) -> Result<Answer, BackendError> {
        let call = Call { key: self.port.key(name), node: self.id, limit: 0, op };
        let answer = if self.immediate {
            self.port.call_now(&call, Instant::now())
        } else {
            self.ensure_running()?;
            tokio::time::timeout(ANSWER_TIMEOUT, self.ask_until_answered(server, call))
                .await
                .map_err(|_| no_answer())??
        };
        match answer {
            Answer::Failed(error) => Err(error),
            answer => Ok(answer),
        }
    }

    async fn ask_until_answered(
        self: &Arc<Self>,
        server: Option<&Shard>,
        call: Call,
    ) -> Result<Answer, BackendError> {
        for _ in 0..ASKED_MAX {
            let wire = match server {
                Some(server) => self.attach(server, 0),
                None => self.attach(&self.port.shard(&call.key), 0),
            };
            if let Some(error) = wire.link.down() {
                return Err(error);
            }
            match wire.ask(call.clone()).await.map_err(|_| no_answer())? {
                Answer::Moved => {}
                answer => return Ok(answer),
            }
        }
        Err(no_answer())
    }

    /// Who holds and who waits.
    pub(in crate::semaphore) async fn list(
        self: &Arc<Self>,
        name: &str,
        most: u32,
    ) -> Result<Listing, BackendError> {
        match self.ask(name, Op::Inspect { most }).await? {
            Answer::Listing(listing) => Ok(listing),
            _ => Err(another_answer()),
        }
    }

    /// The gate of a name, if there is one; nothing may come of what is done with it.
    pub(in crate::semaphore) fn look_at<T>(
        &self,
        name: &str,
        act: impl FnOnce(&mut Places) -> T,
    ) -> Option<T> {
        let gate = lock(&self.gates).get(name).cloned();
        gate.map(|gate| gate.look(act))
    }

    /// All servers that count semaphores, as far as that is known.
    pub(in crate::semaphore) fn servers(&self) -> Vec<Shard> {
        self.port.shards()
    }
}

pub(super) fn no_answer() -> BackendError {
    BackendError::call("the backend gave no answer in time")
}

pub(in crate::semaphore) fn another_answer() -> BackendError {
    BackendError::call("an answer to another question")
}
