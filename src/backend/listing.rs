//! What a ledger shows to operators.

use super::Listing;
use crate::protocol::{BoundRate, Ledger};

/// The most budgets that a listing has.
const BUDGETS_MAX: usize = 100;

/// Lists the places of a ledger at `now`, µs since 1970: see [`Queries::inspect`](super::Queries::inspect).
pub(super) fn of(ledger: &Ledger, now: u64, most: u32, rate: Option<BoundRate>) -> Listing {
    let mut places: Vec<_> =
        ledger.places().filter(|(_, lease_end, _)| *lease_end > now / 1000).collect();
    places.sort_unstable_by_key(|(id, lease_end, _)| (*lease_end, *id));
    let waiting = places.iter().filter(|(_, _, ticket)| ticket.is_some()).count() as u64;
    let held = places.iter().filter(|(_, _, ticket)| ticket.is_none());
    let in_use = held.map(|(id, ..)| u64::from(id.cost())).sum();
    places.truncate(most as usize);
    let rate = rate.or_else(|| places.iter().rev().find_map(|(id, ..)| id.rate()));
    let rate = rate.map(|rate| ledger.usage_of(rate, now));
    let budgets =
        ledger.budgets().filter(|(_, full_at)| *full_at > now).take(BUDGETS_MAX).collect();
    Listing { now, in_use, waiting, places, rate, budgets }
}
