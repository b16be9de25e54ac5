//! What must hold of further limits, derived from the places of a ledger alone. A ledger is checked against this, which
//! shares no code with it.

use std::collections::{HashMap, HashSet};

use tower_semaphore_protocol::{LINE_MAX, LineId, PlaceId, TICKET_MIN};

use super::fair::{Breach, Done, room};

/// A limit of a claim: the cap of its tenant, or a further limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Limit {
    OfTenant(u32),
    Further(u32),
}

/// The limits of a place, each with its cap.
fn limits_of(id: PlaceId) -> Vec<(Limit, Option<u32>)> {
    let Some(claim) = id.claim else { return Vec::new() };
    let further = claim.further().iter();
    let mut limits: Vec<_> =
        further.map(|limit| (Limit::Further(limit.number()), Some(limit.cap()))).collect();
    if let Some(tenant) = id.tenant() {
        limits.push((Limit::OfTenant(tenant.number()), claim.each()));
    }
    limits
}

/// Whether a place has further limits.
#[must_use]
pub fn has_further(id: &PlaceId) -> bool {
    id.claim.is_some_and(|claim| claim.has_further())
}

/// Judges an operation on a set in which some places have further limits.
#[must_use]
pub fn judge(done: &Done<'_>) -> Option<Breach> {
    passes_a_cap(done).or_else(|| out_of_order(done)).or_else(|| idle(done))
}

/// What is in use under each limit after the operation, and in all.
fn used(done: &Done<'_>) -> (HashMap<Limit, u64>, u64) {
    let (mut used, mut all) = (HashMap::new(), 0);
    for (id, ..) in done.after.iter().filter(|(.., ticket)| ticket.is_none()) {
        let cost = u64::from(id.cost());
        all += cost;
        for (limit, _) in limits_of(*id) {
            *used.entry(limit).or_default() += cost;
        }
    }
    (used, all)
}

/// The places that the operation granted, each with the ticket that it had, or showed; those that were shown to be in
/// flight are none.
fn granted(done: &Done<'_>) -> Vec<(PlaceId, Option<u64>)> {
    let before: HashMap<_, _> = done.before.iter().map(|(id, _, ticket)| (*id, *ticket)).collect();
    let proven: HashSet<_> = done
        .coming
        .iter()
        .filter(|(_, proof)| proof.is_some_and(|proof| proof < TICKET_MIN))
        .map(|(id, _)| *id)
        .collect();
    let shown: HashMap<_, _> = done
        .coming
        .iter()
        .filter_map(|(id, proof)| Some((*id, proof.filter(|proof| *proof >= TICKET_MIN)?)))
        .map(|(id, proof)| (id, proof.clamp(TICKET_MIN + 1, TICKET_MIN + LINE_MAX)))
        .collect();
    let ticket_of =
        |id: &PlaceId| before.get(id).copied().flatten().or_else(|| shown.get(id).copied());
    let holds = done.after.iter().filter(|(.., ticket)| ticket.is_none());
    holds
        .filter(|(id, ..)| !proven.contains(id) && before.get(id) != Some(&None))
        .map(|(id, ..)| (*id, ticket_of(id)))
        .collect()
}

/// A limit has more in use than any of those granted under it may have.
fn passes_a_cap(done: &Done<'_>) -> Option<Breach> {
    let (used, _) = used(done);
    let mut caps: HashMap<Limit, Option<u32>> = HashMap::new();
    for (limit, cap) in granted(done).into_iter().flat_map(|(id, _)| limits_of(id)) {
        caps.entry(limit)
            .and_modify(|most| *most = most.zip(cap).map(|(most, cap)| most.max(cap)))
            .or_insert(cap);
    }
    caps.into_iter().find_map(|(limit, cap)| {
        let used = used.get(&limit).copied().unwrap_or(0);
        let cap = cap.filter(|cap| used > u64::from(*cap))?;
        Some(("each in the server", format!("{used} of {cap} are in use under {limit:?}")))
    })
}

/// A place was granted before an earlier one of its line.
fn out_of_order(done: &Done<'_>) -> Option<Breach> {
    let leaving: HashSet<_> = done.leaving.iter().collect();
    let stays = |id: &PlaceId, end: u64| end > done.now / 1000 && !leaving.contains(id);
    let was_there: HashSet<_> =
        done.before.iter().filter(|(id, end, _)| stays(id, *end)).map(|(id, ..)| *id).collect();
    for (id, turn) in granted(done).into_iter().filter(|(id, _)| id.line().is_some()) {
        let earlier = done.after.iter().find(|(other, _, ticket)| {
            let comes_first = |ticket: u64| turn.is_none_or(|turn| ticket < turn);
            other.line() == id.line()
                && was_there.contains(other)
                && ticket.is_some_and(comes_first)
        });
        if let Some((first, ..)) = earlier {
            return Some(("order", format!("{id} was granted before {first} of its line")));
        }
    }
    None
}

/// A place waits that could have its permit. Where costs or limits differ, it may wait behind another.
fn idle(done: &Done<'_>) -> Option<Breach> {
    let is_alike = |id: &PlaceId| id.cost() == 1 && id.rate().is_none() && id.charges().is_empty();
    let rooms: HashSet<_> = done
        .after
        .iter()
        .map(|(id, ..)| room(*id, done.for_all.then_some(done.limit), (done.limit, done.headroom)))
        .collect();
    let mut caps: HashMap<Limit, HashSet<Option<u32>>> = HashMap::new();
    for (limit, cap) in done.after.iter().flat_map(|(id, ..)| limits_of(*id)) {
        caps.entry(limit).or_default().insert(cap);
    }
    let are_alike = done.after.iter().all(|(id, ..)| is_alike(id))
        && rooms.len() == 1
        && caps.values().all(|caps| caps.len() == 1);
    if !done.promotes || done.more || !are_alike {
        return None;
    }
    let (used, all) = used(done);
    let mut heads: HashMap<Option<LineId>, (u64, PlaceId)> = HashMap::new();
    for (id, end, ticket) in done.after {
        if let Some(ticket) = ticket.filter(|_| *end > done.now / 1000) {
            let head = heads.entry(id.line()).or_insert((ticket, *id));
            *head = (*head).min((ticket, *id));
        }
    }
    heads.into_values().find_map(|(_, id)| {
        let fits = limits_of(id).into_iter().all(|(limit, cap)| {
            let used = used.get(&limit).copied().unwrap_or(0);
            cap.is_none_or(|cap| used < u64::from(cap))
        });
        let is_idle = fits && rooms.iter().all(|room| all < *room);
        is_idle.then(|| ("idle in the server", format!("{id} waits, and all its limits have room")))
    })
}
