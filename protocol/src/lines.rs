//! Whose turn it is, among tenants that wait for permits of one semaphore.
//!
//! Max-min fairness over permits in use: the next permit goes to the tenant with the fewest units in use by weight, in the
//! best class that waits; among equals, to the one that has been at that level longest. Within a tenant: first come,
//! first served. A tenant that neither holds nor waits is forgotten.
//!
//! Each waiting tenant has a *line* with a *turn*: a number, the lowest of which is next. It is made of class, level and
//! time, in a double like Redis' scores, so that the scripts in `lua/` compute the same number. Turns are derived: [`Lines::settle`] computes one from the first
//! place of the line and from what its tenant has in use.

use std::collections::{BTreeMap, BTreeSet};

use super::claim::{Claim, Tenant};

/// One level of a turn: above any time in µs for a century.
const LEVEL: f64 = 4_503_599_627_370_496.0; // 2^52

/// One unit in use at weight 1, in levels: so that the level is a whole number at each weight.
const UNIT: u64 = 64;

/// The turn of a line that its tenant's own cap stops: it never comes.
pub(crate) const STOPPED: f64 = f64::INFINITY;

/// The turn of a line whose tenant has been at this level since a time (µs); the lowest is next.
pub(crate) fn turn(class: u8, units: u64, weight: u32, since: u64) -> f64 {
    (first_turn(units, weight) + since as f64) * class_factor(class)
}

fn first_turn(units: u64, weight: u32) -> f64 {
    let level = units.saturating_mul(UNIT) / u64::from(weight);
    (level as f64 + 1.0) * LEVEL
}

fn class_factor(class: u8) -> f64 {
    // 2^80, by class.
    f64::from_bits((1023 + 80 * u64::from(class)) << 52)
}

/// The lines of one semaphore. `I` names a place; places of a line are ordered by their tickets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lines<I> {
    tenants: BTreeMap<Tenant, Line<I>>,
    /// The turns of the tenants that wait, by the bits of the number: positive doubles are ordered as those
    /// are.
    turns: BTreeSet<(u64, Tenant)>,
    /// Of all tenants.
    units: u64,
    waiting: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Line<I> {
    queue: BTreeSet<(u64, I)>,
    units: u64,
    /// The bits of its turn.
    turn: Option<u64>,
}

impl<I: Copy + Ord> Lines<I> {
    pub(crate) const fn new() -> Self {
        Self { tenants: BTreeMap::new(), turns: BTreeSet::new(), units: 0, waiting: 0 }
    }

    /// Whether no place holds or waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.tenants.is_empty()
    }

    /// Units in use by all tenants.
    pub(crate) const fn units(&self) -> u64 {
        self.units
    }

    /// Places that wait.
    pub(crate) const fn waiting(&self) -> u64 {
        self.waiting
    }

    /// Units in use by a tenant.
    pub(crate) fn units_of(&self, tenant: Tenant) -> u64 {
        self.tenants.get(&tenant).map_or(0, |line| line.units)
    }

    /// Places that wait in a tenant's line.
    pub(crate) fn waiting_of(&self, tenant: Tenant) -> u64 {
        self.tenants.get(&tenant).map_or(0, |line| line.queue.len() as u64)
    }

    /// The last ticket in a tenant's line.
    pub(crate) fn last_ticket(&self, tenant: Tenant) -> Option<u64> {
        let (ticket, _) = self.tenants.get(&tenant)?.queue.last()?;
        Some(*ticket)
    }

    /// Whether a line is stopped by its tenant's own cap.
    pub(crate) fn is_stopped(&self, tenant: Tenant) -> bool {
        self.tenants.get(&tenant).is_some_and(|line| line.turn == Some(STOPPED.to_bits()))
    }

    /// Whether no line waits for its turn. Stopped lines do not.
    pub(crate) fn nobody_in_turn(&self) -> bool {
        self.next().is_none()
    }

    /// The turn that comes next, and its tenant.
    pub(crate) fn next(&self) -> Option<(f64, Tenant)> {
        let (bits, tenant) = self.turns.first()?;
        let turn = f64::from_bits(*bits);
        (turn < STOPPED).then_some((turn, *tenant))
    }

    /// The first place of a tenant's line.
    pub(crate) fn head(&self, tenant: Tenant) -> Option<I> {
        let (_, id) = self.tenants.get(&tenant)?.queue.first()?;
        Some(*id)
    }

    /// Adds a place to a line. After this and each of the next three, the caller settles the tenant.
    pub(crate) fn join(&mut self, tenant: Tenant, ticket: u64, id: I) {
        if self.line(tenant).queue.insert((ticket, id)) {
            self.waiting += 1;
        }
    }

    /// Removes a place from a line, if it is there.
    pub(crate) fn leave(&mut self, tenant: Tenant, ticket: u64, id: I) {
        if let Some(line) = self.tenants.get_mut(&tenant)
            && line.queue.remove(&(ticket, id))
        {
            self.waiting -= 1;
        }
    }

    /// Counts `cost` more units in use by a tenant.
    pub(crate) fn hold(&mut self, tenant: Tenant, cost: u32) {
        self.line(tenant).units += u64::from(cost);
        self.units += u64::from(cost);
    }

    /// Counts `cost` fewer units in use by a tenant.
    pub(crate) fn free(&mut self, tenant: Tenant, cost: u32) {
        let Some(line) = self.tenants.get_mut(&tenant) else { return };
        let cost = u64::from(cost).min(line.units);
        line.units -= cost;
        self.units -= cost;
    }

    /// Sets a tenant's turn to what its line and its use imply. A line that stays at its level keeps its time.
    pub(crate) fn settle(&mut self, tenant: Tenant, now: u64, claim_of: impl Fn(I) -> Claim) {
        let Some(line) = self.tenants.get(&tenant) else { return };
        let turn = line.queue.first().map(|(_, id)| {
            let claim = claim_of(*id);
            if !fits_each(line.units, claim) {
                return STOPPED.to_bits();
            }
            let factor = class_factor(claim.class());
            let first = first_turn(line.units, claim.weight());
            let level = first * factor..(first + LEVEL) * factor;
            match line.turn {
                Some(before) if level.contains(&f64::from_bits(before)) => before,
                _ => ((first + now as f64) * factor).to_bits(),
            }
        });
        self.set_turn(tenant, turn);
    }

    /// Stops a line until it is settled again.
    pub(crate) fn stop(&mut self, tenant: Tenant) {
        self.set_turn(tenant, Some(STOPPED.to_bits()));
    }

    fn set_turn(&mut self, tenant: Tenant, turn: Option<u64>) {
        let Some(line) = self.tenants.get_mut(&tenant) else { return };
        let before = std::mem::replace(&mut line.turn, turn);
        if line.queue.is_empty() && line.units == 0 {
            self.tenants.remove(&tenant);
        }
        if before == turn {
            return;
        }
        if let Some(before) = before {
            self.turns.remove(&(before, tenant));
        }
        if let Some(turn) = turn {
            self.turns.insert((turn, tenant));
        }
    }

    fn line(&mut self, tenant: Tenant) -> &mut Line<I> {
        let none = || Line { queue: BTreeSet::new(), units: 0, turn: None };
        self.tenants.entry(tenant).or_insert_with(none)
    }

    /// All places that wait.
    #[cfg(test)]
    pub(crate) fn places(&self) -> impl Iterator<Item = I> + '_ {
        self.tenants.values().flat_map(|line| line.queue.iter().map(|(_, id)| *id))
    }

    /// The turns, to compare them with those in Redis.
    pub(crate) fn turns(&self) -> impl Iterator<Item = (Tenant, f64)> + '_ {
        self.turns.iter().map(|(bits, tenant)| (*tenant, f64::from_bits(*bits)))
    }
}

/// Whether a claim fits under its tenant's own cap, if the tenant has `units` in use.
pub(crate) fn fits_each(units: u64, claim: Claim) -> bool {
    claim.each().is_none_or(|each| units + u64::from(claim.cost()) <= u64::from(each))
}

#[cfg(test)]
mod tests {
    use super::{Lines, STOPPED, turn};
    use crate::claim::{Claim, Tenant};

    const NOW: u64 = 1_795_169_853_126_543;

    #[test]
    fn a_turn_goes_by_class_then_level_then_time() {
        let turns = [
            turn(0, 0, 1, NOW),
            turn(0, 0, 1, NOW + 1),
            turn(0, 1, 2, NOW),
            turn(0, 1, 1, NOW),
            turn(0, 1, 1, NOW + 64),
            turn(0, 1_000_000, 1, 0),
            turn(1, 0, 64, 0),
            turn(7, 0, 1, 0),
            turn(7, u64::from(u32::MAX), 1, NOW),
            STOPPED,
        ];
        assert!(turns.is_sorted_by(|a, b| a < b), "{turns:?}");
    }

    #[test]
    fn a_line_keeps_its_time_while_it_stays_at_its_level() {
        let (a, mut lines) = (Tenant::of_hash(1), Lines::new());
        let claim = Claim::new(a).with_weight(2);
        lines.join(a, 1, 1);
        lines.settle(a, NOW, |_| claim);
        assert_eq!(lines.next(), Some((turn(0, 0, 2, NOW), a)));
        lines.join(a, 2, 2);
        lines.settle(a, NOW + 100, |_| claim);
        assert_eq!(lines.next(), Some((turn(0, 0, 2, NOW), a)));
        lines.hold(a, 1);
        lines.settle(a, NOW + 200, |_| claim);
        assert_eq!(lines.next(), Some((turn(0, 1, 2, NOW + 200), a)));
    }

    #[test]
    fn a_tenant_is_forgotten_with_its_last_place() {
        let (a, mut lines) = (Tenant::of_hash(1), Lines::new());
        let claim = |_| Claim::new(a).with_each(Some(1));
        lines.hold(a, 1);
        lines.join(a, 1, 1);
        lines.settle(a, NOW, claim);
        assert!(lines.is_stopped(a) && lines.nobody_in_turn());
        lines.free(a, 1);
        lines.settle(a, NOW, claim);
        assert_eq!(lines.next().map(|(_, tenant)| tenant), Some(a));
        lines.leave(a, 1, 1);
        lines.settle(a, NOW, claim);
        assert!(lines.is_empty() && lines.turns().next().is_none());
    }
}
