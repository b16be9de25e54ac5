//! How many places of a session are in which state.

use std::collections::BTreeMap;

use super::place::State;
use super::tenants::Tenants;
use crate::claim::Claim;

/// Counts the places of a session, so that no question about them looks at each.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Counts {
    /// Permits in flight.
    in_flight: u64,
    /// Places that wait.
    waiting: u64,
    /// Places that have no answer yet.
    joining: u64,
    /// Places in flight by policy.
    admitted: u64,
    /// The limits of the places that wait, and how many have each.
    limits: BTreeMap<u32, u64>,
    /// The places that have a claim.
    tenants: Tenants,
}

impl Counts {
    /// Permits in flight.
    pub(super) const fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Places that wait.
    pub(super) const fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Whether a place waits.
    pub(super) const fn has_waiting(&self) -> bool {
        self.waiting > 0
    }

    /// Whether a place waits, is in flight or has no answer yet.
    pub(super) const fn is_any(&self) -> bool {
        self.in_flight + self.waiting + self.joining > 0
    }

    /// Whether a permit is in flight by policy.
    pub(super) const fn has_admitted(&self) -> bool {
        self.admitted > 0
    }

    /// The highest limit of the places that wait.
    pub(super) fn highest_limit(&self) -> Option<u32> {
        self.limits.last_key_value().map(|(limit, _)| *limit)
    }

    pub(super) const fn tenants(&self) -> &Tenants {
        &self.tenants
    }

    pub(super) const fn tenants_mut(&mut self) -> &mut Tenants {
        &mut self.tenants
    }

    /// Counts a new place, which is joining.
    pub(super) const fn add_joining(&mut self) {
        self.joining += 1;
    }

    /// Counts the place at `index` in its new state.
    #[inline]
    pub(super) fn change(
        &mut self,
        index: usize,
        (limit, claim): (u32, Option<Claim>),
        (before, after): (State, State),
    ) {
        if let Some(claim) = claim {
            self.tenants.change(index, claim, before, after);
        }
        self.count(before, limit, claim, false);
        self.count(after, limit, claim, true);
    }

    /// Removes the place at `index` from the counts.
    #[inline]
    pub(super) fn remove(
        &mut self,
        index: usize,
        (limit, claim): (u32, Option<Claim>),
        state: State,
    ) {
        self.count(state, limit, claim, false);
        if let Some(claim) = claim {
            self.tenants.remove(index, claim, state);
        }
    }

    /// A place that waits has another limit.
    pub(super) fn change_limit(&mut self, before: u32, after: u32) {
        self.count_limit(before, false);
        self.count_limit(after, true);
    }

    #[inline]
    fn count(&mut self, state: State, limit: u32, claim: Option<Claim>, is_in: bool) {
        let (count, by) = match state {
            State::Held | State::Admitted { .. } => {
                if matches!(state, State::Admitted { .. }) {
                    self.admitted = if is_in { self.admitted + 1 } else { self.admitted - 1 };
                }
                (&mut self.in_flight, claim.map_or(1, |claim| u64::from(claim.cost())))
            }
            State::Waiting { .. } => {
                self.count_limit(limit, is_in);
                (&mut self.waiting, 1)
            }
            State::Joining { .. } => (&mut self.joining, 1),
            _ => return,
        };
        *count = if is_in { *count + by } else { *count - by };
    }

    #[inline(never)]
    fn count_limit(&mut self, limit: u32, is_in: bool) {
        let count = self.limits.entry(limit).or_default();
        if is_in {
            *count += 1;
        } else if *count > 1 {
            *count -= 1;
        } else {
            self.limits.remove(&limit);
        }
    }
}

#[cfg(test)]
impl Counts {
    /// Checks the counts against the places.
    pub(super) fn check(&self, places: &super::places::Places) {
        use super::place::Place;
        let count = |is: fn(&Place) -> bool| places.iter().filter(|(_, place)| is(place)).count();
        let held = places.iter().filter(|(_, place)| place.is_in_flight());
        let units = held.map(|(_, place)| u64::from(place.cost())).sum::<u64>();
        assert_eq!(self.in_flight, units, "in flight");
        assert_eq!(self.waiting, count(Place::is_waiting) as u64, "waiting");
        assert_eq!(self.joining, count(Place::is_joining) as u64, "joining");
        let admitted = count(|place| matches!(place.state, State::Admitted { .. }));
        assert_eq!(self.admitted, admitted as u64, "admitted");
    }
}
