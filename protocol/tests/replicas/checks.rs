//! Checks each value that the key had against the one before.

use std::collections::{BTreeMap, BTreeSet};

use tower_semaphore_protocol::{NodeId, PlaceId};

use super::store::{Request, Version};
use super::{SHORT_S, store::Store};

type Places = BTreeMap<PlaceId, (u64, Option<u64>)>;

/// `answered`: when the process of a place learned that it joined.
pub(crate) fn check(
    store: &Store,
    tenants: bool,
    answered: &BTreeMap<PlaceId, usize>,
) -> Result<(), String> {
    let mut left = BTreeSet::new();
    let values: Vec<_> = store.history.iter().map(places_and_time).collect();
    for (pair, values) in store.history.windows(2).zip(values.windows(2)) {
        let [(before, time_before), (after, time)] = values else { continue };
        let said = |what: Result<(), String>| {
            what.map_err(|what| format!("revision {}: {what}", pair[1].revision))
        };
        said(check_limit(before, after, pair[1].by.as_ref()))?;
        if !tenants {
            said(check_order(before, after, &left))?;
        }
        said(check_returns(before, after, &left, &pair[1], answered))?;
        said(check_forgotten(before, after, &pair[1]))?;
        if pair[1].bytes.is_some() && time <= time_before {
            return Err(format!("revision {}: time goes back", pair[1].revision));
        }
        left.extend(before.keys().filter(|id| !after.contains_key(id)).copied());
    }
    Ok(())
}

fn places_and_time(version: &Version) -> (Places, u64) {
    let value = version.value();
    let places = value.ledger.places();
    (places.map(|(id, lease_end, ticket)| (id, (lease_end, ticket))).collect(), value.time)
}

fn held(places: &Places) -> impl Iterator<Item = &PlaceId> {
    places.iter().filter(|(_, (_, ticket))| ticket.is_none()).map(|(id, _)| id)
}

fn waiting(places: &Places) -> impl Iterator<Item = (PlaceId, u64)> {
    places.iter().filter_map(|(id, (_, ticket))| Some((*id, (*ticket)?)))
}

/// No permit is granted past the limit.
fn check_limit(before: &Places, after: &Places, by: Option<&Request>) -> Result<(), String> {
    let count = |places: &Places, node| held(places).filter(|id| id.node == node).count();
    let limit = by.map_or(0, |request| request.limit);
    let nodes: BTreeSet<_> = held(after).map(|id| id.node).collect();
    // A process may pass on what it has.
    let more = |node: &NodeId| count(after, *node).saturating_sub(count(before, *node));
    let (in_use, granted) = (held(after).count(), nodes.iter().map(more).sum::<usize>());
    if granted > 0 && in_use > limit as usize {
        return Err(format!(
            "{in_use} permits in use, {granted} of them new, the limit is {limit}"
        ));
    }
    Ok(())
}

/// Only tails join, and only heads are granted, or what is back: see [`check_returns`].
fn check_order(before: &Places, after: &Places, left: &BTreeSet<PlaceId>) -> Result<(), String> {
    let is_waiting = |id: &PlaceId| after.get(id).is_some_and(|(_, ticket)| ticket.is_some());
    let stay = waiting(before).filter(|(id, _)| is_waiting(id));
    let last = stay.map(|(_, ticket)| ticket).max().unwrap_or(0);
    for (id, ticket) in waiting(after) {
        match before.get(&id) {
            None if ticket <= last => return Err(format!("{id} joins before others")),
            Some((_, Some(old))) if *old != ticket => return Err(format!("{id} moves")),
            Some((_, None)) => return Err(format!("{id} held, and waits")),
            _ => {}
        }
    }
    let still = waiting(after).filter(|(id, _)| before.contains_key(id)).min_by_key(|(_, t)| *t);
    let Some((first, ticket)) = still else { return Ok(()) };
    for id in held(after) {
        match before.get(id) {
            None if left.contains(id) => {}
            None => return Err(format!("{id} is granted, and {first} waits")),
            Some((_, Some(own))) if *own > ticket => {
                return Err(format!("{id} is granted before {first}"));
            }
            _ => {}
        }
    }
    Ok(())
}

/// An id that has left returns only if its process did not know yet that it had joined; where the key is absent, by a
/// transaction that was made before that; or with a permit that its process had passed on to it.
fn check_returns(
    before: &Places,
    after: &Places,
    left: &BTreeSet<PlaceId>,
    version: &Version,
    answered: &BTreeMap<PlaceId, usize>,
) -> Result<(), String> {
    for id in after.keys().filter(|id| !before.contains_key(id) && left.contains(id)) {
        let made = version.by.as_ref().map_or(0, |request| request.step);
        let is_asked = answered.get(id).is_none_or(|step| made <= *step);
        let is_late = version.step > made && before.is_empty();
        let is_first = answered.get(id).is_none_or(|step| version.step <= *step);
        let by = version.by.as_ref().map(|request| request.node);
        let count = |places: &Places| held(places).filter(|other| other.node == id.node).count();
        let has_succeeded = by == Some(id.node)
            && after.get(id).is_some_and(|(_, ticket)| ticket.is_none())
            && count(after) <= count(before);
        if !(is_asked && (is_first || is_late) || has_succeeded) {
            return Err(format!("{id} is back"));
        }
    }
    Ok(())
}

/// Nobody removes a place of another process whose sign of life is there, but an operator.
fn check_forgotten(before: &Places, after: &Places, version: &Version) -> Result<(), String> {
    let Some(by) = &version.by else { return Ok(()) };
    let gone = before.iter().filter(|(id, _)| !after.contains_key(id) && id.node != by.node);
    for (id, (lease_end, ticket)) in gone {
        let shows_life = |node: NodeId, seconds: u32| version.signs.contains(&(node, seconds));
        let lives = shows_life(id.node, u32::try_from(lease_end % 1_000_000_000 / 1000).unwrap());
        let may_wait = ticket.is_none() || shows_life(id.node, SHORT_S);
        if lives && may_wait {
            return Err(format!("{id} is forgotten, and its process lives"));
        }
    }
    Ok(())
}
