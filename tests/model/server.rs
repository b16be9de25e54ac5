//! The server: the shipped [`Ledger`], and ways in which a ledger could be wrong.

use std::hash::{Hash, Hasher};

use tower_semaphore_protocol::session::PLACES_MAX;
use tower_semaphore_protocol::{Call, Grant, Ledger, NodeId, Op, PlaceId, Reply};
use tower_semaphore_protocol::{Caller, PlaceStatus};

use super::Bug;
use super::fair::{Breach, Done, Judge, Stored as Known};

/// A tick, which is one renewal interval, by the server's clock.
pub(crate) const TICK_MS: u64 = 1000;
/// Tick 0, by the server's clock.
const BASE_MS: u64 = 1_700_000_000_000;

/// The id of a place in the model: its process, and the serial part of its number.
pub(crate) type Id = (u8, u32);

/// A place as the model reads it, with its ticket while it waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Stored {
    pub(crate) id: Id,
    pub(crate) place: PlaceId,
    pub(crate) end: u64,
    pub(crate) ticket: Option<u64>,
}

/// The ledger, and a list of its places, which saves listing them for each read.
#[derive(Clone, Debug, Default)]
pub(crate) struct Server {
    pub(crate) ledger: Ledger,
    pub(crate) places: Vec<Stored>,
    /// The stored turns, if tenants share it, and their judge.
    turns: Vec<(u32, u64)>,
    judge: Judge,
}

impl PartialEq for Server {
    fn eq(&self, other: &Self) -> bool {
        (&self.places, &self.turns, &self.judge) == (&other.places, &other.turns, &other.judge)
    }
}

impl Eq for Server {}

impl Hash for Server {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (&self.places, &self.turns, &self.judge).hash(state);
    }
}

/// The nodes of the model, kept because a node does not reveal its number.
pub(crate) const NODES: [NodeId; 3] = [NodeId::new(0), NodeId::new(1), NodeId::new(2)];

/// Returns the process of a node.
pub(crate) fn process_of(node: NodeId) -> u8 {
    u8::from(node != NODES[0]) + u8::from(node == NODES[2])
}

pub(crate) fn id_of(place: PlaceId) -> Id {
    (process_of(place.node), u32::try_from(place.n / PLACES_MAX as u64).expect("a small number"))
}

/// Returns the time of the server's clock, in ms.
pub(crate) fn server_ms(tick: u8, step: i8) -> u64 {
    (BASE_MS + u64::from(tick) * TICK_MS).saturating_add_signed(i64::from(step) * 1000)
}

impl Server {
    pub(crate) fn list(&mut self) {
        let places = self.ledger.places();
        self.places = places
            .map(|(place, end, ticket)| Stored { id: id_of(place), place, end, ticket })
            .collect();
        self.places.sort_unstable_by_key(|place| place.id);
        let turns = self.ledger.turns();
        self.turns = turns.map(|(tenant, turn)| (tenant.number(), turn.to_bits())).collect();
    }

    /// Judges whose turn it was among tenants. The places are those after the call.
    pub(crate) fn judge(&mut self, before: &[Stored], call: &Call, now_ms: u64) -> Option<Breach> {
        let known = |places: &[Stored]| -> Vec<Known> {
            places.iter().map(|place| (place.place, place.end, place.ticket)).collect()
        };
        let is_fair = |stored: &Stored| stored.place.claim.is_some();
        if !before.iter().chain(&self.places).any(is_fair) {
            return None;
        }
        let (leaving, coming): (&[PlaceId], Vec<_>) = match &call.op {
            Op::Acquire { leaving, ids, .. } => {
                (leaving, ids.iter().map(|id| (*id, None)).collect())
            }
            Op::Release { ids } => (ids, Vec::new()),
            Op::Reassert { proofs, .. } => {
                (&[], proofs.iter().map(|(id, proof)| (*id, Some(*proof))).collect())
            }
            Op::Renew { .. } | Op::Audit { .. } => (&[], Vec::new()),
        };
        let breach = self.judge.judge(&Done {
            before: &known(before),
            after: &known(&self.places),
            now: now_ms * 1000,
            limit: call.limit,
            headroom: call.headroom,
            for_all: call.for_all,
            leaving,
            used: &call.used,
            coming: &coming,
            promotes: !matches!(call.op, Op::Audit { .. }),
            more: false,
        });
        breach.or_else(|| self.judge.compare(&self.ledger.turns().collect::<Vec<_>>()))
    }
}

/// Returns the number of permits that a place takes.
pub(crate) fn cost(place: &PlaceId) -> usize {
    place.cost() as usize
}

/// Creates a ledger with these places. Each is written at the beginning of time, when nothing has expired and nothing
/// is granted.
fn rebuilt(places: impl IntoIterator<Item = (PlaceId, u64, Option<u64>)>) -> Ledger {
    let mut ledger = Ledger::new();
    for (id, end, ticket) in places {
        let caller = Caller {
            now: 0,
            limit: 0,
            headroom: 0,
            for_all: true,
            max_waiting: 0,
            node: id.node,
            recalls: false,
        };
        ledger.reassert(caller, end, &[(id, ticket.unwrap_or(end))], &mut |_, _| true);
    }
    ledger
}

/// Creates the same ledger with other lease ends for some places.
fn with_ends(ledger: &Ledger, end_of: impl Fn(PlaceId, u64) -> u64) -> Ledger {
    let places: Vec<_> = ledger.places().map(|(id, e, t)| (id, end_of(id, e), t)).collect();
    rebuilt(places)
}

/// Carries out a call as the shipped ledger does, except for the effect of `bug`.
pub(crate) fn carry_out(
    bug: Option<Bug>,
    ledger: &mut Ledger,
    process: u8,
    now_ms: u64,
    call: &Call,
    post: &mut dyn FnMut(NodeId, &[Grant]) -> bool,
) -> Reply {
    let node = NODES[usize::from(process)];
    let caller = Caller {
        now: now_ms * 1000,
        limit: call.limit,
        headroom: call.headroom,
        for_all: call.for_all,
        max_waiting: call.max_waiting,
        node,
        recalls: call.recalls,
    };
    let has = |asked| bug == Some(asked);
    if has(Bug::StartsForgotten) {
        *ledger = rebuilt(ledger.places());
    }
    match &call.op {
        Op::Acquire { leaving, lease_ms, max_queue, ids } => {
            let lease = *lease_ms;
            let known = ledger.places().find(|place| ids.contains(&place.0));
            if let Some((_, end, ticket)) = known {
                if has(Bug::RetryReturnsEarly) {
                    // With a new lease, but without a look at other places.
                    let new = now_ms + lease;
                    *ledger = with_ends(ledger, |id, e| if ids.contains(&id) { new } else { e });
                    let status = ticket.map_or(PlaceStatus::Held, PlaceStatus::Waiting);
                    let statuses = [status].into_iter().collect();
                    return Reply { lease_end: new, statuses, ..Reply::default() };
                }
                if has(Bug::RetryKeepsOldLease) {
                    let reply = ledger.acquire(caller, lease, *max_queue, leaving, ids, post);
                    *ledger = with_ends(ledger, |id, e| if ids.contains(&id) { end } else { e });
                    return reply;
                }
            } else if (has(Bug::NewcomerBarges) && max_queue.is_some())
                || (has(Bug::TryBarges) && max_queue.is_none())
            {
                let live = ledger.places().filter(|p| p.2.is_none() && p.1 > now_ms).count();
                if live < call.limit as usize {
                    // A forged proof makes it a holder before the queue is examined.
                    let proofs: Vec<_> = ids.iter().map(|id| (*id, now_ms + lease)).collect();
                    return ledger.reassert(caller, lease, &proofs, post);
                }
            }
            ledger.acquire(caller, lease, *max_queue, leaving, ids, post)
        }
        Op::Release { ids } => {
            let mut caller = caller;
            if has(Bug::ReleaseDoesNotPromote) {
                (caller.limit, caller.for_all) = (0, true);
            }
            if has(Bug::ReleasePromotesBeforeSweep) {
                // Dead holders still count while it promotes.
                let dead = ledger
                    .places()
                    .filter(|p| p.2.is_none() && p.1 <= now_ms && !ids.contains(&p.0))
                    .count();
                caller.limit = caller.limit.saturating_sub(u32::try_from(dead).expect("a few"));
                caller.for_all = true;
            }
            ledger.release(caller, ids, post)
        }
        Op::Renew { lease_ms, ids } => {
            if has(Bug::RenewExtendsBeforeSweep) {
                let new = now_ms + lease_ms;
                *ledger = with_ends(ledger, |id, e| if ids.contains(&id) { new } else { e });
            }
            let mut caller = caller;
            if has(Bug::RenewDoesNotPromote) {
                caller.limit = 0;
            }
            ledger.renew(caller, *lease_ms, ids, post)
        }
        Op::Reassert { lease_ms, proofs } => ledger.reassert(caller, *lease_ms, proofs, post),
        Op::Audit { most } => {
            Reply { found: ledger.audit(caller.now, node, *most as usize), ..Reply::default() }
        }
    }
}
