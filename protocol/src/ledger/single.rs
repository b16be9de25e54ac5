//! Calls for one place, where nobody waits and no place has a claim.

use super::{Done, Ledger};
use crate::call::Single;

impl Ledger {
    /// Carries out a call for one place, as of `now` (µs since 1970). `None`: that takes a look at other places, and
    /// nothing was done; [`acquire`](Self::acquire) and [`release`](Self::release) do it.
    #[inline]
    pub fn try_single(&mut self, single: Single, now: u64) -> Option<Done> {
        if !self.queue.is_empty() || self.lines.is_some() {
            return None;
        }
        match single {
            Single::Acquire { id, limit, lease_ms } => {
                // Each place holds one permit.
                if id.claim.is_some() || self.places.len() as u64 >= u64::from(limit) {
                    return None;
                }
                let lease_end = (now / 1000).saturating_add(lease_ms);
                self.put(id, lease_end, None);
                Some(Done { lease_end, in_use: self.places.len() as u64 })
            }
            Single::Release { id } => {
                if id.claim.is_some() {
                    return None;
                }
                self.take(&id);
                Some(Done::default())
            }
        }
    }
}
