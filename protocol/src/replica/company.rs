//! Calls that may wait for others, so that one transaction writes them all.
//!
//! Of several transactions over the same value one succeeds, so each that a process could do without costs all that write
//! the key. Calls that change nothing for anybody yet go with the next ones that do.

use super::Replica;
use super::calls::Pending;
use crate::call::Op;

impl Replica {
    /// Whether nobody misses a transaction of these calls for a moment. They are for places that join the queue behind one
    /// of this process, which has something to write in its turn, and for permits that were passed on to the next place.
    ///
    /// A driver waits for some round trips at most: places that others write meanwhile stand before those of the calls.
    #[must_use]
    pub fn may_wait(&self) -> bool {
        let Some(read) = self.known.as_read() else { return false };
        !self.calls.is_empty()
            && self.calls.all_may_wait()
            && self.succession.all_are_in_use(&self.own)
            && (read.view.queues || !self.calls.any_joins())
    }

    /// Notes whether the last call may wait, as long as all permits are in use and a place of this process is in the queue.
    pub(super) fn note_patience(&mut self) {
        let Some(Pending { call, is_patient, .. }) = self.calls.last_mut() else { return };
        *is_patient = call.used.is_empty()
            && call.op.leaving().iter().all(|id| self.succession.has_passed_on(id.n))
            && match &call.op {
                Op::Acquire { ids, max_queue: Some(1..), .. } => {
                    ids.iter().all(|id| id.claim.is_none())
                }
                Op::Release { ids } => !ids.is_empty(),
                _ => false,
            };
    }
}
