//! A call, carried out: which operation of the ledger it is.

use super::{Caller, Ledger, Post, Reply};
use crate::call::{Call, Op};
use crate::id::NodeId;

impl Ledger {
    /// Carries out a call of a node at `now`, in µs since 1970: first what the places that leave have used, then the
    /// operation.
    #[inline]
    pub fn carry_out(&mut self, node: NodeId, call: &Call, now: u64, post: Post<'_>) -> Reply {
        self.carry_out_for(node, call, call.op.lease_ms(), now, post)
    }

    /// The same, with another length of the lease than that of the call.
    #[inline]
    pub(crate) fn carry_out_for(
        &mut self,
        node: NodeId,
        call: &Call,
        lease_ms: u64,
        now: u64,
        post: Post<'_>,
    ) -> Reply {
        let Call { limit, headroom, for_all, max_waiting, recalls, .. } = *call;
        let caller = Caller { now, limit, headroom, for_all, max_waiting, node, recalls };
        self.settle_used(&call.used, now);
        match &call.op {
            Op::Acquire { leaving, max_queue, ids, .. } => {
                self.acquire(caller, lease_ms, *max_queue, leaving, ids, post)
            }
            Op::Release { ids } => self.release(caller, ids, post),
            Op::Renew { ids, .. } => self.renew(caller, lease_ms, ids, post),
            Op::Reassert { proofs, .. } => self.reassert(caller, lease_ms, proofs, post),
            Op::Audit { most } => {
                let found = self.audit(now, node, *most as usize);
                Reply { found, ..Reply::default() }
            }
        }
    }
}
