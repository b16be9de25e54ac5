//! A ledger with a clock, for tests.

use tower_semaphore_protocol::{
    Caller, Claim, Grant, Ledger, NodeId, PlaceId, PlaceStatus, Reply, Tenant, WORK_MAX,
};

pub(crate) const NODE: NodeId = NodeId::new(1);
pub(crate) const BEGAN: u64 = 1_795_169_853_126_543;
pub(crate) const LEASE: u64 = 10_000;

/// A ledger with a clock and the limits of its callers; its places are numbered as they come.
pub(crate) struct Desk {
    pub(crate) ledger: Ledger,
    pub(crate) now: u64,
    /// How long after one operation the next one is, µs.
    pub(crate) tick: u64,
    pub(crate) limit: u32,
    pub(crate) headroom: u32,
    pub(crate) max_waiting: u32,
    pub(crate) next: u64,
    pub(crate) gone: Vec<NodeId>,
    pub(crate) posted: Vec<Grant>,
}

pub(crate) fn claim(tenant: u64) -> Claim {
    Claim::new(Tenant::of_hash(tenant))
}

impl Desk {
    pub(crate) fn new(limit: u32) -> Self {
        Self::bounded(limit, WORK_MAX)
    }

    pub(crate) fn bounded(limit: u32, work_max: usize) -> Self {
        Self {
            ledger: Ledger::with_work_max(work_max),
            now: BEGAN,
            tick: 100,
            limit,
            headroom: 0,
            max_waiting: u32::MAX,
            next: 0,
            gone: Vec::new(),
            posted: Vec::new(),
        }
    }

    pub(crate) fn id(&mut self, claim: impl Into<Option<Claim>>) -> PlaceId {
        self.id_of(NODE, claim)
    }

    pub(crate) fn id_of(&mut self, node: NodeId, claim: impl Into<Option<Claim>>) -> PlaceId {
        self.next += 1;
        PlaceId { node, poll_only: false, n: self.next, bound: None, claim: claim.into() }
    }

    pub(crate) fn ask(
        &mut self,
        node: NodeId,
        run: impl FnOnce(&mut Ledger, Caller, &mut dyn FnMut(NodeId, &[Grant]) -> bool) -> Reply,
    ) -> Reply {
        let Self { ledger, now, tick, limit, headroom, max_waiting, gone, posted, .. } = self;
        // Time passes, so that no two things happen at one moment.
        *now += *tick;
        let caller = Caller {
            now: *now,
            limit: *limit,
            headroom: *headroom,
            for_all: false,
            max_waiting: *max_waiting,
            node,
            recalls: false,
        };
        run(ledger, caller, &mut |to, grants| {
            posted.extend(grants);
            !gone.contains(&to)
        })
    }

    pub(crate) fn acquire_all(&mut self, max_queue: Option<u32>, ids: &[PlaceId]) -> Reply {
        self.ask(ids[0].node, |ledger, caller, post| {
            ledger.acquire(caller, LEASE, max_queue, &[], ids, post)
        })
    }

    /// A place comes, and waits if it must.
    pub(crate) fn come(&mut self, claim: impl Into<Option<Claim>>) -> PlaceId {
        let id = self.id(claim);
        self.acquire_all(Some(10_000), &[id]);
        id
    }

    pub(crate) fn status_of(&mut self, max_queue: Option<u32>, claim: Claim) -> PlaceStatus {
        let id = self.id(claim);
        self.acquire_all(max_queue, &[id]).statuses[0]
    }

    pub(crate) fn release(&mut self, ids: &[PlaceId]) -> Reply {
        self.ask(NODE, |ledger, caller, post| ledger.release(caller, ids, post))
    }

    /// Releases one place and says which is granted for it.
    pub(crate) fn hand_over(&mut self, id: PlaceId) -> Vec<PlaceId> {
        self.release(&[id]).granted.iter().map(|grant| grant.id).collect()
    }

    pub(crate) fn renew(&mut self, ids: &[PlaceId]) -> Reply {
        self.ask(NODE, |ledger, caller, post| ledger.renew(caller, LEASE, ids, post))
    }

    pub(crate) fn holds(&self, id: PlaceId) -> bool {
        self.ledger.places().any(|(place, _, ticket)| place == id && ticket.is_none())
    }

    pub(crate) fn waits(&self, id: PlaceId) -> bool {
        self.ledger.places().any(|(place, _, ticket)| place == id && ticket.is_some())
    }
}
