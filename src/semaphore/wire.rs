//! A node's way to one server of its backend: how things stand with it, and what goes there.
//!
//! Most backends have one server. Where they have several, each has its own connection and its own
//! desk, so that one that is away harms only the semaphores that it counts.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::{Notify, oneshot};

use super::link::Link;
use super::lock;
use super::node::{Gate, Node};
use crate::backend::{Answer, Call, Shard};

/// Questions and words that wait to be sent, from which on no more words are taken.
const TOLD_MAX: usize = 1000;

/// One server, as a node sees it.
pub(super) struct Wire {
    shard: Shard,
    pub(super) link: Link,
    /// Its desk was started, in the runtime that there is.
    pub(super) started: AtomicBool,
    /// Its desk is gone for good. Changed while the mail is locked.
    ended: AtomicBool,
    mail: Mutex<Mail>,
    came: Notify,
}

/// What the desk is to send.
#[derive(Default)]
pub(super) struct Mail {
    pub(super) gates: VecDeque<Arc<Gate>>,
    pub(super) asks: VecDeque<(Call, oneshot::Sender<Answer>)>,
}

/// Whom the answer to a call is for.
pub(super) enum Sender {
    /// A gate, if it has not gone to another server since: see [`Gate`].
    Gate(Arc<Gate>, u64),
    Ask(oneshot::Sender<Answer>),
    /// What operators set: for the gates that wait for that, and for one who asked.
    Overrides(Arc<Node>, Vec<Arc<Gate>>, Option<oneshot::Sender<Answer>>),
}

/// A node's wires, each with the number of gates that are on it.
#[derive(Default)]
pub(super) struct Wires(Mutex<Vec<(Arc<Wire>, usize)>>);

impl Wires {
    pub(super) fn all(&self) -> Vec<Arc<Wire>> {
        lock(&self.0).iter().map(|(wire, _)| Arc::clone(wire)).collect()
    }

    /// The way to a server, with so many gates more on it.
    pub(super) fn attach(
        &self,
        shard: &Shard,
        gates: usize,
        link: impl FnOnce() -> Link,
    ) -> Arc<Wire> {
        let mut wires = lock(&self.0);
        if let Some((wire, count)) = wires.iter_mut().find(|(wire, _)| wire.shard() == shard) {
            *count += gates;
            return Arc::clone(wire);
        }
        let wire = Arc::new(Wire::new(shard.clone(), link()));
        wires.push((Arc::clone(&wire), gates));
        wire
    }

    /// One gate less.
    pub(super) fn detach(&self, wire: &Arc<Wire>) {
        let mut wires = lock(&self.0);
        if let Some((_, count)) = wires.iter_mut().find(|(known, _)| Arc::ptr_eq(known, wire)) {
            *count -= 1;
        }
    }

    /// Forgets a wire, if no gate is left on it.
    pub(super) fn end(&self, wire: &Arc<Wire>) -> bool {
        let mut wires = lock(&self.0);
        let before = wires.len();
        wires.retain(|(known, gates)| *gates > 0 || !Arc::ptr_eq(known, wire));
        wires.len() < before
    }
}

impl Wire {
    fn new(shard: Shard, link: Link) -> Self {
        let (started, ended) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { shard, link, started, ended, mail: Mutex::default(), came: Notify::new() }
    }

    pub(super) const fn shard(&self) -> &Shard {
        &self.shard
    }

    pub(super) fn post(&self, gate: Arc<Gate>) {
        lock(&self.mail).gates.push_back(gate);
        self.wake();
    }

    pub(super) fn ask(&self, call: Call) -> oneshot::Receiver<Answer> {
        let (to, answer) = oneshot::channel();
        let mut mail = lock(&self.mail);
        // Whoever found it just before it ended has to look for another.
        if self.ended.load(Ordering::Acquire) {
            let _ = to.send(Answer::Moved);
            return answer;
        }
        mail.asks.push_back((call, to));
        drop(mail);
        self.wake();
        answer
    }

    /// Nobody sends anything there any more.
    pub(super) fn end(&self) {
        let mail = lock(&self.mail);
        self.ended.store(true, Ordering::Release);
        drop(mail);
        self.answer_asks(&Answer::Moved);
    }

    /// Sends what needs no answer, unless too much is waiting to be sent.
    pub(super) fn tell(&self, call: Call) {
        let mut mail = lock(&self.mail);
        if mail.asks.len() < TOLD_MAX {
            mail.asks.push_back((call, oneshot::channel().0));
            drop(mail);
            self.wake();
        }
    }

    pub(super) fn take_mail(&self) -> Mail {
        std::mem::take(&mut *lock(&self.mail))
    }

    /// Answers the questions that were not sent yet.
    pub(super) fn answer_asks(&self, answer: &Answer) {
        for (_, to) in std::mem::take(&mut lock(&self.mail).asks) {
            let _ = to.send(answer.clone());
        }
    }

    pub(super) async fn mail_came(&self) {
        self.came.notified().await;
    }

    pub(super) fn wake(&self) {
        self.came.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Wires;
    use crate::backend::{Answer, Call, Op, Shard};
    use crate::ledger::NodeId;
    use crate::semaphore::link::Link;

    #[test]
    fn a_question_to_a_server_that_is_none_any_more_is_sent_on() {
        let wires = Wires::default();
        let wire = wires.attach(&Shard::default(), 0, || Link::new(false, Arc::default()));
        let op = Op::Inspect { most: 1 };
        let call = Call { key: "x".into(), node: NodeId::new(1), limit: 0, op };
        let mut before = wire.ask(call.clone());
        assert!(before.try_recv().is_err());
        assert!(wires.end(&wire));
        wire.end();
        for mut answer in [before, wire.ask(call)] {
            assert!(matches!(answer.try_recv(), Ok(Answer::Moved)));
        }
    }
}
