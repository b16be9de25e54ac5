//! Places whose leases were ended from outside.

use super::promote::work_of;
use super::{Ledger, Place};
use crate::id::{NodeId, PlaceId};

impl Ledger {
    /// Removes the places of a node with this lease end, ms, whatever the time. Returns whether some are left: then the
    /// caller calls again.
    ///
    /// A backend can have leases of its own, one for all places of a process that have one length. No lease end is a
    /// time then: it says which lease a place has, and the backend is told when that ends. One call removes as much as
    /// one sweep does, and those that wait before those that hold, so that none of them is granted in between. What the
    /// places started counts on, and what they took of budgets stays taken.
    ///
    /// It grants nothing, as [`revoke`](Self::revoke) does not: a process that finds the leases of others ended need not
    /// know their limit. One that does calls [`release`](Self::release) next, or any other operation that promotes, on
    /// the same ledger before it is written; then the next in turn is granted in the write that removes the dead.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore_protocol::{Caller, Ledger, NodeId, PlaceId};
    ///
    /// // Not a time, but the lease of 5 s of each process.
    /// const LEASE: u64 = 5_000;
    /// let [dead, alive] = [1, 2].map(NodeId::new);
    /// let id = |node| PlaceId { node, poll_only: false, n: 1, bound: None, claim: None };
    /// let caller = |node| Caller {
    ///     now: 1000,
    ///     limit: 1,
    ///     headroom: 0,
    ///     for_all: false,
    ///     max_waiting: 0,
    ///     node,
    ///     recalls: false,
    /// };
    /// let mut ledger = Ledger::new();
    /// for node in [dead, alive] {
    ///     ledger.acquire(caller(node), LEASE - 1, Some(10), &[], &[id(node)], &mut |_, _| true);
    /// }
    ///
    /// assert!(!ledger.forget(dead, LEASE, 2000));
    /// let reply = ledger.release(caller(alive), &[], &mut |_, _| true);
    /// assert_eq!(reply.granted[0].id, id(alive));
    /// ```
    #[must_use = "some can be left"]
    pub fn forget(&mut self, node: NodeId, lease_end: u64, now: u64) -> bool {
        self.forget_some(node, now, |place| place.lease_end == lease_end)
    }

    /// Whether a place holds.
    pub(crate) fn is_held(&self, id: &PlaceId) -> bool {
        self.places.get(id).is_some_and(|place| place.ticket.is_none())
    }

    /// The places that wait, in the order of the queue, with their lease ends; none where lines decide on the order.
    pub(crate) fn queue(&self) -> impl Iterator<Item = (PlaceId, u64)> {
        let queue = self.queue.iter().filter(|_| self.lines.is_none());
        queue.filter_map(|(_, id)| Some((*id, self.places.get(id)?.lease_end)))
    }

    /// Has a place hold in place of another one, which leaves, whoever comes before it in the queue and whatever the limit: no
    /// permit is granted. If others removed it while it waited, it is back, because it is in use.
    pub(crate) fn hand_down(&mut self, from: &PlaceId, to: &PlaceId) {
        let Some(Place { lease_end, ticket: None }) = self.places.get(from).copied() else {
            return;
        };
        if let Some(Place { ticket: Some(ticket), .. }) = self.places.get(to).copied() {
            self.queue.remove(&(ticket, *to));
        }
        self.take(from);
        self.put(*to, lease_end, None);
    }

    /// Removes all places of a node that wait, as [`forget`](Self::forget) does, whatever their leases.
    ///
    /// They hold nothing, so they can go as soon as their process may be dead, which is when the shortest of its leases
    /// has ended: it asks again with their tickets if it lives. Until they are gone they are granted like others, to
    /// nobody.
    #[must_use = "some can be left"]
    pub fn forget_waiting(&mut self, node: NodeId, now: u64) -> bool {
        self.forget_some(node, now, |place| place.ticket.is_some())
    }

    fn forget_some(&mut self, node: NodeId, now: u64, is_meant: impl Fn(Place) -> bool) -> bool {
        let is_dead = |(id, place): &(&PlaceId, &Place)| id.node == node && is_meant(**place);
        let dead = self.places.iter().filter(is_dead);
        let mut dead: Vec<_> =
            dead.map(|(id, place)| (place.ticket.is_none(), id.n, *id)).collect();
        if dead.is_empty() {
            return false;
        }
        dead.sort_unstable();
        self.take_passed();
        let (mut budget, mut taken) = (self.work_max, 0);
        for (.., id) in &dead {
            if budget == 0 {
                break;
            }
            budget = budget.saturating_sub(work_of(id));
            self.take(id);
            taken += 1;
        }
        self.settle(now);
        taken < dead.len()
    }
}
