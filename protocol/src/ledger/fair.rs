//! Places with a tenant: the lines of those.

use smallvec::SmallVec;

use super::{Place, TICKET_MIN};
use crate::claim::{Claim, Tenant};
use crate::id::PlaceId;
use crate::lines::Lines;

/// The highest ticket of a place in a tenant's line, above [`TICKET_MIN`]. A ticket is the time in ms, or one more than
/// the last of the line, so that a line that returns after a loss of data is ahead of later places. Beyond this, places
/// are ordered by their ids.
pub const LINE_MAX: u64 = (1 << 28) - 1;

/// Half of them are for the time, which begins again every 37 hours; the others for a line that is not empty
/// then.
const LINE_TIMES: u64 = 1 << 27;

/// The ticket of a place that joins a tenant's line behind this one.
pub(super) fn next_in_line(now: u64, last: Option<u64>) -> u64 {
    let time = TICKET_MIN + 1 + now / 1000 % LINE_TIMES;
    last.map_or(time, |last| time.max(last + 1)).min(TICKET_MIN + LINE_MAX)
}

/// The places with a tenant.
#[derive(Clone, Debug)]
pub(super) struct FairPlaces {
    pub(super) lines: Lines<PlaceId>,
    /// Places that wait or hold.
    pub(super) count: usize,
    /// Tenants to settle.
    pub(super) touched: SmallVec<[Tenant; 4]>,
}

impl FairPlaces {
    pub(super) const fn new() -> Self {
        Self { lines: Lines::new(), count: 0, touched: SmallVec::new_const() }
    }

    /// Adds a place, or changes one that was `before`.
    pub(super) fn put(
        &mut self,
        id: PlaceId,
        claim: Claim,
        before: Option<Place>,
        ticket: Option<u64>,
    ) {
        let tenant = claim.tenant();
        match (before, ticket) {
            // A renewal: a stopped line is examined again.
            (Some(_), Some(_)) if self.lines.is_stopped(tenant) => self.touched.push(tenant),
            (Some(_), _) => {}
            (None, Some(ticket)) => {
                self.count += 1;
                self.lines.join(tenant, ticket, id);
                self.touched.push(tenant);
            }
            (None, None) => {
                self.count += 1;
                self.lines.hold(tenant, claim.cost());
                self.touched.push(tenant);
            }
        }
    }

    pub(super) fn take(&mut self, id: PlaceId, claim: Claim, place: Place) {
        let tenant = claim.tenant();
        self.count -= 1;
        match place.ticket {
            Some(ticket) => self.lines.leave(tenant, ticket, id),
            None => self.lines.free(tenant, claim.cost()),
        }
        self.touched.push(tenant);
    }

    /// Before any newcomer of the same call: a release takes a tenant below its cap, its stopped line runs again, and a
    /// newcomer must not overtake it.
    pub(super) fn settle(&mut self, tenant: Tenant, now: u64) {
        // All places of a line have a claim.
        self.lines.settle(tenant, now, |id| id.claim.unwrap_or_else(|| Claim::new(tenant)));
    }
}

/// The ticket that a proof gives a place back.
pub(super) fn ticket_of(id: PlaceId, proof: u64) -> u64 {
    match id.tenant() {
        Some(_) => proof.clamp(TICKET_MIN + 1, TICKET_MIN + LINE_MAX),
        None => proof,
    }
}
