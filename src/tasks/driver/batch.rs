//! The calls of one write: how they are collected from sessions, and how their answers are passed back.

use std::sync::Arc;

use tokio::time::Instant;

use crate::backend::{AddressedCall, Answer};
use crate::node::server::outbox::Purpose;
use crate::node::shared_session::SharedSession;
use crate::node::{Node, Server};
use crate::protocol::session::{Sending, Session};
use crate::protocol::{Op, Time};

/// The cost of a call without its places, as the number of places that keep a server busy for as long.
const CALL_COST: usize = 8;

/// The calls of one write, until it is answered.
pub(super) struct Batch {
    calls: Arc<[AddressedCall]>,
    /// Those of the calls that are not answered yet.
    senders: Vec<Option<(Arc<SharedSession>, u64)>>,
    pub(super) sent: Instant,
    /// The same as a `Time`: the start of the leases that this write takes or renews.
    sent_at: Time,
    pub(super) purpose: Purpose,
    /// No call is answered yet.
    pub(super) is_silent: bool,
    unanswered: usize,
    /// The number of places, and [`CALL_COST`] for each call.
    pub(super) cost: usize,
}

/// What came of the answers to some calls.
pub(super) struct Taken {
    /// How many requests they may have woken.
    pub(super) woken: usize,
    /// The part of the batch's cost that these calls had.
    pub(super) cost: usize,
}

impl Batch {
    /// Collects the calls of the next write from the outbox of a server, as far as there is room. Returns `None` if
    /// there are none.
    pub(super) fn collect(
        node: &Node,
        server: &Arc<Server>,
        purpose: Purpose,
        room: usize,
        sent: Instant,
    ) -> Option<Self> {
        let sent_at = node.clock.time(sent);
        let (mut calls, mut senders, mut cost) = (Vec::new(), Vec::new(), 0);
        while cost < room
            && let Some(shared) = server.outbox.pop(purpose)
        {
            let collected = Collected { calls: &mut calls, senders: &mut senders };
            let room = room - cost;
            cost += collect_of(node, server, &shared, (purpose, room), sent_at, collected);
        }
        let calls: Arc<[_]> = (!calls.is_empty()).then(|| calls.into())?;
        let (unanswered, senders) = (calls.len(), senders.into_iter().map(Some).collect());
        Some(Self { calls, senders, sent, sent_at, purpose, is_silent: true, unanswered, cost })
    }

    pub(super) fn calls(&self) -> Arc<[AddressedCall]> {
        Arc::clone(&self.calls)
    }

    /// Whether all of its calls are answered.
    pub(super) const fn is_answered(&self) -> bool {
        self.unanswered == 0
    }

    /// Passes answers to their sessions.
    pub(super) fn take_answers(&mut self, node: &Node, answers: Vec<(usize, Answer)>) -> Taken {
        self.is_silent = false;
        let (mut woken, mut cost) = (0, 0);
        let (sent, now) = (self.sent_at, node.clock.now());
        let after = now.since(sent);
        for (index, answer) in answers {
            let sender = self.senders.get_mut(index).and_then(Option::take);
            let (Some(addressed), Some(sender)) = (self.calls.get(index), &sender) else {
                continue;
            };
            self.unanswered -= 1;
            cost += cost_of(&addressed.call.op);
            let (shared, stay) = sender;
            let op = &addressed.call.op;
            let fail = |error, handle: fn(&mut Session, &Op, Time)| {
                node.counts.meter.on_answer(op, false, after);
                node.counts.log_refused_call(shared.name(), error);
                node.act_in(sender, now, Some(error), |session, now| handle(session, op, now));
            };
            match answer {
                Answer::Moved => {
                    let is_here = shared.lock().stay == *stay;
                    if is_here {
                        node.rehome(shared, true);
                    }
                }
                Answer::Reply { reply, late, leases_from } => {
                    let leases_from = leases_from.map_or(sent, |from| self.time_of(from));
                    let sent = Sending::at(sent).late(late).leases_from(leases_from);
                    node.counts.meter.on_answer(op, true, after);
                    node.counts.meter.on_reply(op, &reply);
                    woken += reply.granted.len();
                    if let Op::Acquire { ids, .. } | Op::Release { ids } = op {
                        woken += ids.len();
                    }
                    node.act_in(sender, now, None, |session, now| {
                        session.handle_reply(op, &reply, sent, now);
                    });
                }
                Answer::Failed(error) => fail(&error, Session::handle_call_error),
                Answer::Refused(error) => fail(&error, Session::handle_call_refused),
            }
        }
        if node.counts.log_lost(false).is_some() {
            // The watchdog logs the rest.
            node.sessions.timers.wake();
        }
        Taken { woken, cost }
    }

    /// The time of an instant, by its distance from the sending: the machine may have been suspended since then, and a
    /// lease must not seem to begin later than it did.
    fn time_of(&self, at: Instant) -> Time {
        match self.sent.checked_duration_since(at) {
            Some(before) => self.sent_at.checked_sub(before).unwrap_or_default(),
            None => self.sent_at + at.saturating_duration_since(self.sent),
        }
    }

    /// Notifies the sessions that their calls remain unanswered. They request again what they need.
    pub(super) fn abandon(self, node: &Node) {
        let now = Instant::now();
        for (addressed, sender) in self.calls.iter().zip(&self.senders) {
            let Some(sender) = sender else { continue };
            let op = &addressed.call.op;
            node.counts.meter.on_unanswered(op, now - self.sent);
            node.act_in(sender, node.clock.time(now), None, |session, _| {
                session.handle_unanswered(op)
            });
        }
    }
}

fn cost_of(op: &Op) -> usize {
    CALL_COST + op.places()
}

/// The calls of a write, and the sessions that make them, each with its current stay.
pub(crate) struct Collected<'a> {
    pub(crate) calls: &'a mut Vec<AddressedCall>,
    pub(crate) senders: &'a mut Vec<(Arc<SharedSession>, u64)>,
}

/// Collects the calls of one session for one purpose, as far as there is room. Returns their cost.
pub(crate) fn collect_of(
    node: &Node,
    server: &Arc<Server>,
    shared: &Arc<SharedSession>,
    (purpose, room): (Purpose, usize),
    now: Time,
    Collected { calls, senders }: Collected<'_>,
) -> usize {
    let mut state = shared.lock();
    // It may have been collected already, or have moved.
    if !Arc::ptr_eq(&state.server, server) || !state.queued.take(purpose) {
        return 0;
    }
    let (stay, mut cost) = (state.stay, 0);
    while cost < room {
        let most = (room - cost).saturating_sub(CALL_COST).max(CALL_COST);
        let call = match purpose {
            Purpose::KeepAlive => state.session.poll_keep_alive(most, now),
            Purpose::Serve => state.session.poll_serving(most, now),
        };
        let Some(call) = call else { break };
        cost += cost_of(&call.op);
        calls.push(AddressedCall { key: Arc::clone(shared.key()), node: node.id(), call });
        senders.push((Arc::clone(shared), stay));
    }
    state.enqueue(shared);
    cost
}
