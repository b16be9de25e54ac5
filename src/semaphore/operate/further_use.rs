//! The further limits of a semaphore, as an inspection sees them.

use std::collections::BTreeMap;

use crate::name::Name;
use crate::node::Node;
use crate::protocol::{FurtherLimit, PlaceId};

/// A [further limit](crate::Ask::also) under which requests hold or wait for permits, as far as their places are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FurtherLimitUse {
    /// Its name, such as `route`, if this process has had a request with it.
    pub name: Option<Name>,
    /// Its value, such as `/chat`, if the name is known.
    pub value: Option<Name>,
    /// The cap of its last listed place.
    pub cap: u32,
    /// The cap that an operator set for requests that come from now on, if the name is known.
    pub set: Option<u32>,
    /// The number of permits that are in use under it.
    pub in_use: u64,
    /// The number of waiting requests that need it, whatever they wait for.
    pub waiting: u64,
}

/// Further limits by number.
#[derive(Default)]
pub(super) struct FurtherUses(BTreeMap<u32, FurtherLimitUse>);

impl FurtherUses {
    pub(super) fn add(&mut self, place: PlaceId, waits: bool) {
        let limits = place.claim.into_iter().flat_map(|claim| claim.further().iter());
        for limit in limits {
            let seen = self.0.entry(limit.number()).or_insert_with(|| unused(limit));
            seen.cap = limit.cap();
            if waits {
                seen.waiting += 1;
            } else {
                seen.in_use += u64::from(place.cost());
            }
        }
    }

    /// Returns them with their names, as far as these are known, the one with the most waiting requests first.
    pub(super) fn named(self, name: &str, own: &Node) -> Vec<FurtherLimitUse> {
        let mut limits: Vec<_> = self.0.into_iter().collect();
        if !limits.is_empty() {
            own.read_limits(name, |names| {
                for (number, seen) in &mut limits {
                    (seen.name, seen.value) = names.of(*number).cloned().unzip();
                }
            });
            let semaphore = Name::from_stored(name);
            for (_, seen) in &mut limits {
                if let (Some(semaphore), Some(limit), Some(value)) =
                    (&semaphore, &seen.name, &seen.value)
                {
                    seen.set = own.overrides.cap_of(semaphore, limit, value);
                }
            }
        }
        let mut limits: Vec<_> = limits.into_iter().map(|(_, limit)| limit).collect();
        limits.sort_by_key(|seen| std::cmp::Reverse((seen.waiting, seen.in_use)));
        limits
    }
}

fn unused(limit: FurtherLimit) -> FurtherLimitUse {
    FurtherLimitUse { name: None, value: None, cap: limit.cap(), set: None, in_use: 0, waiting: 0 }
}
