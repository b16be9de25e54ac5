//! Permits that are passed on, kept and recalled.

mod alone;
mod handed;
mod kept;
mod short_replies;
mod spare;

use super::*;
use crate::claim::{Claim, Tenant};
use crate::ledger::Hint;
use crate::overrides::{Mode, Override};

const REUSE: AcquireOptions = AcquireOptions { reuse_ms: 50, ..OPTIONS };

/// A request, its call, which has no reply yet, and when that was sent.
type Sent = (usize, Call, Time);

fn claim(tenant: u32) -> Option<Claim> {
    Some(Claim::new(Tenant::of_hash(u64::from(tenant))))
}

impl Rig {
    /// A request that has its permit.
    fn holder(&mut self, options: AcquireOptions) -> usize {
        let index = self.request_with(options);
        self.settle();
        assert_eq!(self.progress(index), Progress::Held);
        index
    }

    fn recall(&mut self) {
        let now = self.now();
        self.session.handle_recall(now);
    }

    /// A request comes and has its permit, and nothing is sent for it.
    fn reuses(&mut self, options: AcquireOptions) -> bool {
        let index = self.request_with(options);
        let is_held = self.progress(index) == Progress::Held;
        assert_eq!(is_held, !self.session.places.get(index).unwrap().is_joining());
        self.leave(index);
        is_held
    }

    /// Permits of the other process.
    fn in_use_elsewhere(&self) -> usize {
        let places = self.ledger.places();
        places.filter(|(id, _, ticket)| id.node == OTHER && ticket.is_none()).count()
    }

    fn kept(&self) -> usize {
        self.session.kept()
    }

    fn sent(&mut self, options: AcquireOptions) -> Sent {
        let index = self.request_with(options);
        (index, self.call().expect("it asks"), self.now())
    }

    fn answer_to(&mut self, (_, call, sent): &Sent) {
        let reply = self.carry_out(call);
        self.reply(&call.op, &reply, *sent);
    }

    /// The same for a request that is granted its permit by a short reply.
    fn answer_in_short_to(&mut self, (index, call, sent): &Sent) {
        let Reply { lease_end, statuses, .. } = self.carry_out(call);
        self.reply(&call.op, &Reply { lease_end, statuses, ..Reply::default() }, *sent);
        assert_eq!(self.progress(*index), Progress::Held);
    }

    /// A reply to a renewal of this place alone. It counts the places of all processes.
    fn renew(&mut self, index: usize) {
        let (id, sent, limit) = (self.id(index), self.now(), self.limit);
        let op = Op::Renew { lease_ms: 3000, ids: Ids::from_buf([id]) };
        let reply = self.carry_out(&Call { limit, max_waiting: 100, ..Call::of(op.clone()) });
        self.reply(&op, &reply, sent);
    }
}

/// A session that keeps the permit of its last request.
fn keeper(limit: u32) -> Rig {
    let mut rig = Rig::new(limit);
    let held = rig.holder(REUSE);
    rig.leave(held);
    assert_eq!((rig.kept(), rig.calls()), (1, vec![]), "kept, and nothing is sent");
    rig
}
