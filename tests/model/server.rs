//! The server's side: the real [`Ledger`], and the ways in which one could get it wrong.

use tower_semaphore::ledger::{Ask, Ledger, NodeId, PlaceId, Reply, Standing};

use super::Bug;
use super::process::{Call, Op};

/// Tick 0 by the ledger's clock, µs. A tick is one ms there.
pub(crate) const BASE_US: u64 = 1_700_000_000_000_000;
pub(crate) const BASE_MS: u64 = BASE_US / 1000;
/// Every lease, in ticks.
pub(crate) const LEASE: u8 = 3;
const MAX_QUEUE: u32 = 8;

/// A place's name in the model: process and number.
pub(crate) type Id = (u8, u8);

/// A place as the model looks at it; `ticket` while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stored {
    pub(crate) id: Id,
    pub(crate) end: u8,
    pub(crate) ticket: Option<u16>,
}

pub(crate) const fn place_id((process, n): Id) -> PlaceId {
    PlaceId { node: NodeId::new(process as u64), deaf: false, n: n as u64 }
}

/// The nodes of the model: they give their numbers away to nobody, so they are looked up.
const NODES: [NodeId; 3] = [NodeId::new(0), NodeId::new(1), NodeId::new(2)];

pub(crate) fn id_of(id: PlaceId) -> Id {
    let process = if id.node == NODES[0] {
        0
    } else if id.node == NODES[1] {
        1
    } else {
        2
    };
    (process, u8::try_from(id.n).expect("a small number"))
}

pub(crate) fn end_of(lease_end: u64) -> u8 {
    u8::try_from(lease_end.saturating_sub(BASE_MS)).expect("a small time")
}

pub(crate) fn ticket_of(ticket: u64) -> u16 {
    u16::try_from(ticket - BASE_US).expect("a small ticket")
}

pub(crate) fn stored(ledger: &Ledger) -> Vec<Stored> {
    let mut places: Vec<_> = ledger
        .places()
        .map(|(id, end, ticket)| Stored {
            id: id_of(id),
            end: end_of(end),
            ticket: ticket.map(ticket_of),
        })
        .collect();
    places.sort_unstable_by_key(|place| place.id);
    places
}

/// A ledger with these places: each is written down at the beginning of time, where nothing has
/// expired yet and nothing is granted.
fn rebuilt(places: impl IntoIterator<Item = (PlaceId, u64, Option<u64>)>) -> Ledger {
    let mut ledger = Ledger::new();
    for (id, end, ticket) in places {
        let ask = Ask { now: 0, limit: 0, node: id.node };
        ledger.reassert(ask, end, &[(id, ticket.unwrap_or(end))], &mut |_, _| true);
    }
    ledger
}

/// Carries out a call, in the way of the real ledger but for what `bug` says.
pub(crate) fn carry_out(
    bug: Option<Bug>,
    ledger: &mut Ledger,
    process: u8,
    now: u8,
    call: &Call,
    post: &mut dyn FnMut(Id, u8) -> bool,
) -> Reply {
    let node = NodeId::new(u64::from(process));
    let ask = Ask { now: BASE_US + u64::from(now) * 1000, limit: call.limit, node };
    let now_ms = ask.now / 1000;
    let lease = u64::from(LEASE);
    let mut post = |_: NodeId, grants: &[tower_semaphore::ledger::Grant]| {
        // As PUBLISH does: one message a node, so it is there for all of them or for none.
        let mut heard = true;
        for grant in grants {
            heard &= post(id_of(grant.id), end_of(grant.lease_end));
        }
        heard
    };
    let post = &mut post;
    let has = |asked| bug == Some(asked);
    match &call.op {
        Op::Acquire { ids, wait } => {
            let ids: Vec<_> = ids.iter().map(|n| place_id((process, *n))).collect();
            let known: Vec<_> = ledger.places().filter(|place| ids.contains(&place.0)).collect();
            if let Some((_, end, ticket)) = known.first().copied() {
                if has(Bug::RetryReturnsEarly) {
                    // With a new lease, but without a look at anyone else.
                    let new = now_ms + lease;
                    let places: Vec<_> = ledger
                        .places()
                        .map(|(id, e, t)| (id, if ids.contains(&id) { new } else { e }, t))
                        .collect();
                    *ledger = rebuilt(places);
                    let standing = ticket.map_or(Standing::Held, Standing::Waits);
                    let standings = [standing].into_iter().collect();
                    return Reply { lease_end: new, standings, ..Reply::default() };
                }
                if has(Bug::RetryKeepsOldLease) {
                    let reply =
                        ledger.acquire(ask, lease, wait.then_some(MAX_QUEUE), &[], &ids, post);
                    let places: Vec<_> = ledger
                        .places()
                        .map(|(id, e, t)| (id, if ids.contains(&id) { end } else { e }, t))
                        .collect();
                    *ledger = rebuilt(places);
                    return reply;
                }
            } else if (has(Bug::NewcomerBarges) && *wait) || (has(Bug::TryBarges) && !*wait) {
                let live = ledger.places().filter(|p| p.2.is_none() && p.1 > now_ms).count();
                if live < call.limit as usize {
                    // A forged proof makes it a holder before the queue is looked at.
                    let proofs: Vec<_> = ids.iter().map(|id| (*id, now_ms + lease)).collect();
                    return ledger.reassert(ask, lease, &proofs, post);
                }
            }
            ledger.acquire(ask, lease, wait.then_some(MAX_QUEUE), &[], &ids, post)
        }
        Op::Release { ids } => {
            let ids: Vec<_> = ids.iter().map(|n| place_id((process, *n))).collect();
            let mut ask = ask;
            if has(Bug::ReleaseDoesNotPromote) {
                ask.limit = 0;
            }
            if has(Bug::ReleasePromotesBeforeSweep) {
                // The dead that hold still count while it promotes.
                let dead = ledger
                    .places()
                    .filter(|p| p.2.is_none() && p.1 <= now_ms && !ids.contains(&p.0))
                    .count();
                ask.limit = ask.limit.saturating_sub(u32::try_from(dead).expect("a few"));
            }
            ledger.release(ask, &ids, post)
        }
        Op::Renew { ids } => {
            let ids: Vec<_> = ids.iter().map(|(n, _)| place_id((process, *n))).collect();
            if has(Bug::RenewExtendsBeforeSweep) {
                let places: Vec<_> = ledger
                    .places()
                    .map(|(id, end, t)| {
                        (id, if ids.contains(&id) { now_ms + lease } else { end }, t)
                    })
                    .collect();
                *ledger = rebuilt(places);
            }
            let mut ask = ask;
            if has(Bug::RenewDoesNotPromote) {
                ask.limit = 0;
            }
            ledger.renew(ask, lease, &ids, post)
        }
        Op::Reassert { proofs } => {
            let proofs: Vec<_> = proofs
                .iter()
                .map(|(n, proof)| {
                    let proof = match *proof {
                        Proof::Ticket(ticket) => BASE_US + u64::from(ticket),
                        Proof::End(end) => BASE_MS + u64::from(end),
                    };
                    (place_id((process, *n)), proof)
                })
                .collect();
            ledger.reassert(ask, lease, &proofs, post)
        }
    }
}

/// What a process shows for a place that the server does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Proof {
    Ticket(u16),
    End(u8),
}
