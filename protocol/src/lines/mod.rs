//! Whose turn it is, among tenants that wait for permits of one semaphore.
//!
//! Max-min fairness over permits in use: the next permit goes to the tenant with the fewest units in use by weight, in the
//! best class that waits; among equals, to the one that has been at that level longest. Within a tenant: first come,
//! first served. A tenant that neither holds nor waits is forgotten.
//!
//! Each waiting tenant has a *line* with a *turn*: a number, the lowest of which is next. It is made of class, level and
//! time, in a double like Redis' scores, so that the scripts in `lua/` compute the same number. Turns are derived: [`Lines::settle`] computes one from the first
//! place of the line and from what its tenant has in use.

mod asleep;
mod further;
mod spot;
mod standing;

use std::collections::{BTreeMap, BTreeSet};

use smallvec::SmallVec;

pub(crate) use self::further::Full;
use self::further::FurtherLines;
pub(crate) use self::spot::{Code, Spot, limits_of, spots_of};
pub(crate) use self::standing::{Standing, TURNS};
use super::claim::{Claim, LineId, Tenant};
use super::moments::Moments;

/// One level of a turn: above any time in µs for a century.
const LEVEL: f64 = 4_503_599_627_370_496.0; // 2^52

/// One unit in use at weight 1, in levels: so that the level is a whole number at each weight.
const UNIT: u64 = 64;

/// The turn of a line that is stopped: it never comes.
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

/// Whether this is the turn of such a line, whenever that came to its level.
fn is_turn_at(turn: f64, class: u8, units: u64, weight: u32) -> bool {
    let (first, factor) = (first_turn(units, weight), class_factor(class));
    (first * factor..(first + LEVEL) * factor).contains(&turn)
}

/// What is known of the places that wait in lines.
pub(crate) trait Register<I> {
    /// The claim of a place.
    fn claim_of(&self, id: I) -> Claim;

    /// When the place with this ticket in a line came, µs.
    fn arrival_of(&self, ticket: u64, now: u64) -> u64;
}

/// The lines of one semaphore. `I` names a place; places of a line are ordered by their tickets.
///
/// After each change, the caller has them settled.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lines<I> {
    tenants: BTreeMap<Tenant, Line<I>>,
    further: FurtherLines<I>,
    /// The turns of the lines that wait for one, by the bits of the number: positive doubles are ordered as those are.
    turns: BTreeSet<(u64, LineId)>,
    /// Until when lines wait for their tenants' own budgets, µs. These have no turn.
    asleep: Moments<LineId, u64>,
    /// Of all tenants.
    units: u64,
    waiting: u64,
    changed: Changed,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Line<I> {
    queue: BTreeSet<(u64, I)>,
    units: u64,
    /// The bits of its turn.
    turn: Option<u64>,
}

/// What is to be settled, in the order in which it changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
struct Changed {
    /// Lines with further limits.
    lines: SmallVec<[LineId; 2]>,
    tenants: SmallVec<[Tenant; 4]>,
    /// The claims of places that left: room came free under their limits.
    left: SmallVec<[Claim; 2]>,
}

impl<I: Copy + Ord> Lines<I> {
    pub(crate) const fn new() -> Self {
        Self {
            tenants: BTreeMap::new(),
            further: FurtherLines::new(),
            turns: BTreeSet::new(),
            asleep: Moments::new(),
            units: 0,
            waiting: 0,
            changed: Changed {
                lines: SmallVec::new_const(),
                tenants: SmallVec::new_const(),
                left: SmallVec::new_const(),
            },
        }
    }

    /// Whether no place holds or waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.tenants.is_empty() && self.further.is_empty()
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

    fn queue_of(&self, line: LineId) -> Option<&BTreeSet<(u64, I)>> {
        if line.is_further() {
            return self.further.queue_of(line);
        }
        self.tenants.get(&line.tenant()).map(|line| &line.queue)
    }

    /// Places that wait in a line.
    pub(crate) fn waiting_in(&self, line: LineId) -> u64 {
        self.queue_of(line).map_or(0, |queue| queue.len() as u64)
    }

    /// The last ticket in a line.
    pub(crate) fn last_ticket(&self, line: LineId) -> Option<u64> {
        Some(self.queue_of(line)?.last()?.0)
    }

    /// Whether a line is stopped, by its tenant's own cap or because its head can never be served.
    pub(crate) fn is_stopped(&self, line: LineId) -> bool {
        if line.is_further() {
            return self.further.is_stopped(line);
        }
        let turn = self.tenants.get(&line.tenant()).and_then(|line| line.turn);
        turn == Some(STOPPED.to_bits())
    }

    /// Whether no line waits for its turn. Lines that are stopped, parked or asleep do not.
    pub(crate) fn nobody_in_turn(&self) -> bool {
        self.next().is_none()
    }

    /// The turn that comes next, and its line.
    pub(crate) fn next(&self) -> Option<(f64, LineId)> {
        let (bits, line) = self.turns.first()?;
        let turn = f64::from_bits(*bits);
        (turn < STOPPED).then_some((turn, *line))
    }

    /// The first place of a line.
    pub(crate) fn head(&self, line: LineId) -> Option<I> {
        Some(self.queue_of(line)?.first()?.1)
    }

    /// Adds a place to its line.
    pub(crate) fn join(&mut self, claim: Claim, ticket: u64, id: I) {
        let line = line_of(claim);
        if line.is_further() {
            self.waiting += u64::from(self.further.join(line, claim.tenant(), ticket, id));
            if !self.further.stands(line) && !self.is_asleep(line) {
                self.changed.lines.push(line);
            }
        } else {
            self.waiting += u64::from(self.line(line.tenant()).queue.insert((ticket, id)));
            if !self.is_asleep(line) {
                self.changed.tenants.push(line.tenant());
            }
        }
    }

    /// Has the line of this claim settled: its head may be another now, or the limits may have changed.
    pub(crate) fn touch(&mut self, claim: Claim) {
        match line_of(claim) {
            line if line.is_further() => self.changed.lines.push(line),
            line => self.changed.tenants.push(line.tenant()),
        }
    }

    /// The same for the line of its tenant, if any, that has no further limits.
    pub(crate) fn touch_tenant(&mut self, claim: Claim) {
        self.changed.tenants.push(claim.tenant());
    }

    /// Removes a place from its line, if it is there.
    pub(crate) fn leave(&mut self, claim: Claim, ticket: u64, id: I) {
        if self.take_out(line_of(claim), ticket, id) {
            self.waiting -= 1;
        }
        self.left(claim);
    }

    fn take_out(&mut self, line: LineId, ticket: u64, id: I) -> bool {
        if line.is_further() {
            return self.further.take_out(line, ticket, id);
        }
        let line = self.tenants.get_mut(&line.tenant());
        line.is_some_and(|line| line.queue.remove(&(ticket, id)))
    }

    /// Counts a place that holds from now on.
    pub(crate) fn hold(&mut self, claim: Claim) {
        self.count(claim);
        // A line that is asleep stays so: a grant brings it no nearer.
        if !self.is_asleep(claim.tenant().into()) {
            self.changed.tenants.push(claim.tenant());
        }
    }

    fn count(&mut self, claim: Claim) {
        let cost = u64::from(claim.cost());
        self.line(claim.tenant()).units += cost;
        self.units += cost;
        self.further.count(claim);
    }

    /// Removes a place that held.
    pub(crate) fn free(&mut self, claim: Claim) {
        if let Some(line) = self.tenants.get_mut(&claim.tenant()) {
            let cost = u64::from(claim.cost()).min(line.units);
            line.units -= cost;
            self.units -= cost;
        }
        self.further.discount(claim);
        self.left(claim);
    }

    /// A place left, or would have: what waits for that is settled.
    pub(crate) fn left(&mut self, claim: Claim) {
        self.touch(claim);
        self.changed.tenants.push(claim.tenant());
        self.changed.left.push(claim);
    }

    /// The head of a line has its permit from now on.
    pub(crate) fn grant(
        &mut self,
        claim: Claim,
        ticket: u64,
        id: I,
        now: u64,
        of: &impl Register<I>,
    ) {
        let line = line_of(claim);
        if self.take_out(line, ticket, id) {
            self.waiting -= 1;
        }
        self.hold(claim);
        if line.is_further() {
            self.pass_on(line, now, of);
            self.settle(now, of);
            self.come_back_for(claim, now, of);
        } else {
            self.settle(now, of);
        }
    }

    /// Brings the turns up to date after what changed. A line that stays at its level keeps its time.
    pub(crate) fn settle(&mut self, now: u64, of: &impl Register<I>) {
        let Changed { lines, tenants, left } = std::mem::take(&mut self.changed);
        for (i, line) in lines.iter().enumerate() {
            if !lines[..i].contains(line) {
                self.settle_further(*line, now, of);
            }
        }
        for tenant in tenants {
            self.settle_tenant(tenant, now, of);
        }
        if !self.further.is_empty() {
            self.make_up_for(&left, now, of);
        }
    }

    /// Sets a tenant's turn to what its line and its use imply.
    fn settle_tenant(&mut self, tenant: Tenant, now: u64, of: &impl Register<I>) {
        let Some(line) = self.tenants.get(&tenant) else { return };
        let turn = line.queue.first().map(|(_, id)| {
            let claim = of.claim_of(*id);
            if !fits_each(line.units, claim) {
                return STOPPED.to_bits();
            }
            let (class, weight) = (claim.class(), claim.weight());
            match line.turn {
                Some(before) if is_turn_at(f64::from_bits(before), class, line.units, weight) => {
                    before
                }
                _ => turn(class, line.units, weight, now).to_bits(),
            }
        });
        self.set_turn(tenant, turn);
    }

    /// Stops a line until it is settled again.
    pub(crate) fn stop(&mut self, claim: Claim, now: u64, of: &impl Register<I>) {
        let line = line_of(claim);
        if line.is_further() {
            self.stop_further(line, now, of);
        } else {
            self.set_turn(line.tenant(), Some(STOPPED.to_bits()));
        }
    }

    fn set_turn(&mut self, tenant: Tenant, turn: Option<u64>) {
        self.asleep.set(tenant.into(), None);
        let Some(line) = self.tenants.get_mut(&tenant) else { return };
        let before = std::mem::replace(&mut line.turn, turn);
        if line.queue.is_empty() && line.units == 0 {
            self.tenants.remove(&tenant);
        }
        if before == turn {
            return;
        }
        if let Some(before) = before {
            self.turns.remove(&(before, tenant.into()));
        }
        if let Some(turn) = turn {
            self.turns.insert((turn, tenant.into()));
        }
    }

    fn line(&mut self, tenant: Tenant) -> &mut Line<I> {
        let none = || Line { queue: BTreeSet::new(), units: 0, turn: None };
        self.tenants.entry(tenant).or_insert_with(none)
    }

    /// All places that wait.
    #[cfg(test)]
    pub(crate) fn places(&self) -> impl Iterator<Item = I> + '_ {
        let of_tenants = self.tenants.values().map(|line| &line.queue);
        of_tenants.chain(self.further.queues()).flat_map(|queue| queue.iter().map(|(_, id)| *id))
    }

    /// The turns as scores, to compare them with those in Redis.
    pub(crate) fn turns(&self) -> impl Iterator<Item = (LineId, f64)> + '_ {
        let turns = self.turns.iter().map(|(bits, line)| (*line, f64::from_bits(*bits)));
        turns.chain(self.further.parked()).chain(self.sleepers())
    }
}

/// The line of a place; that of nobody if it has neither a tenant nor further limits.
pub(crate) fn line_of(claim: Claim) -> LineId {
    claim.line().unwrap_or_else(|| Tenant::NOBODY.into())
}

/// Whether a claim fits under its tenant's own cap, if the tenant has `units` in use.
pub(crate) fn fits_each(units: u64, claim: Claim) -> bool {
    claim.each().is_none_or(|each| units + u64::from(claim.cost()) <= u64::from(each))
}

#[cfg(test)]
mod tests {
    use super::{Lines, Register, STOPPED, turn};
    use crate::claim::{Claim, LineId, Tenant};

    const NOW: u64 = 1_795_169_853_126_543;

    /// All places have one claim.
    struct All(Claim);

    impl Register<u8> for All {
        fn claim_of(&self, _: u8) -> Claim {
            self.0
        }

        fn arrival_of(&self, ticket: u64, _: u64) -> u64 {
            ticket
        }
    }

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
        let next = |since, units| Some((turn(0, units, 2, since), LineId::from(a)));
        lines.join(claim, 1, 1);
        lines.settle(NOW, &All(claim));
        assert_eq!(lines.next(), next(NOW, 0));
        lines.join(claim, 2, 2);
        lines.settle(NOW + 100, &All(claim));
        assert_eq!(lines.next(), next(NOW, 0));
        lines.hold(claim);
        lines.settle(NOW + 200, &All(claim));
        assert_eq!(lines.next(), next(NOW + 200, 1));
    }

    #[test]
    fn a_tenant_is_forgotten_with_its_last_place() {
        let (a, mut lines) = (Tenant::of_hash(1), Lines::new());
        let claim = Claim::new(a).with_each(Some(1));
        lines.hold(claim);
        lines.join(claim, 1, 1);
        lines.settle(NOW, &All(claim));
        assert!(lines.is_stopped(a.into()) && lines.nobody_in_turn());
        lines.free(claim);
        lines.settle(NOW, &All(claim));
        assert_eq!(lines.next().map(|(_, line)| line), Some(a.into()));
        lines.leave(claim, 1, 1);
        lines.settle(NOW, &All(claim));
        assert!(lines.is_empty() && lines.turns().next().is_none());
    }
}
