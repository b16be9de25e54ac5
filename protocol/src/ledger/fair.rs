//! Places with a tenant or with further limits: the lines of those.

use super::{Place, TICKET_MIN};
use crate::claim::Claim;
use crate::id::PlaceId;
use crate::lines::{Lines, Register};

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

/// When the place with this ticket in a line came, µs: to the ms, and by less than a day ago or ahead.
fn arrival_of(ticket: u64, now: u64) -> u64 {
    let now_ms = now / 1000;
    let time = (ticket - TICKET_MIN - 1) % LINE_TIMES;
    let ago = (now_ms % LINE_TIMES + LINE_TIMES - time) % LINE_TIMES;
    let arrived_ms =
        if ago < LINE_TIMES / 2 { now_ms.saturating_sub(ago) } else { now_ms + (LINE_TIMES - ago) };
    arrived_ms * 1000
}

/// Places say themselves what they claim.
pub(super) struct OfPlaces;

impl Register<PlaceId> for OfPlaces {
    fn claim_of(&self, id: PlaceId) -> Claim {
        // All places of a line have a claim.
        id.claim.unwrap_or_else(Claim::without_tenant)
    }

    fn arrival_of(&self, ticket: u64, now: u64) -> u64 {
        arrival_of(ticket, now)
    }
}

/// The places with a tenant or with further limits.
#[derive(Clone, Debug)]
pub(super) struct FairPlaces {
    pub(super) lines: Lines<PlaceId>,
    /// Places that wait or hold.
    pub(super) count: usize,
}

impl FairPlaces {
    pub(super) const fn new() -> Self {
        Self { lines: Lines::new(), count: 0 }
    }

    /// Adds a place, or changes one that was `before`.
    pub(super) fn put(
        &mut self,
        id: PlaceId,
        claim: Claim,
        before: Option<Place>,
        ticket: Option<u64>,
    ) {
        match (before, ticket) {
            // A renewal: a stopped line is examined again.
            (Some(_), Some(_)) if claim.line().is_some_and(|line| self.lines.is_stopped(line)) => {
                self.lines.touch(claim);
            }
            (Some(_), _) => {}
            (None, Some(ticket)) => {
                self.count += 1;
                self.lines.join(claim, ticket, id);
                // Several places can have the last ticket: then their ids decide the order.
                let is_last = ticket == TICKET_MIN + LINE_MAX;
                if is_last || claim.line().is_some_and(|line| self.lines.is_stopped(line)) {
                    self.lines.touch(claim);
                }
            }
            (None, None) => {
                self.count += 1;
                self.lines.hold(claim);
            }
        }
    }

    pub(super) fn take(&mut self, id: PlaceId, claim: Claim, place: Place) {
        self.count -= 1;
        match place.ticket {
            Some(ticket) => self.lines.leave(claim, ticket, id),
            None => self.lines.free(claim),
        }
    }
}

/// The ticket that a proof gives a place back.
pub(super) fn ticket_of(id: PlaceId, proof: u64) -> u64 {
    match id.line() {
        Some(_) => proof.clamp(TICKET_MIN + 1, TICKET_MIN + LINE_MAX),
        None => proof,
    }
}
