//! Lines of places with further limits.
//!
//! Such a line waits for its turn like that of a tenant. If one of its limits is full when its turn comes, it *parks* at
//! that limit; when the limit gets room, the first that is parked there comes back among the turns. So each limit has
//! its own order, and a full one delays nobody else.
//!
//! Nobody is forgotten: if a limit has room for the head of the first line that is parked at it, a line that needs that
//! limit stands among the turns. For a limit gets room only when a place leaves, and whenever a place leaves, or a line
//! stands among the turns no more or with another head, the first that is parked at each of its limits comes back. While
//! permits are granted, limits only lose room, so that a line parks once at most.
//!
//! A line whose head was granted parks at once, if a limit keeps back the next: its turn would come only for that.

use std::collections::{BTreeMap, BTreeSet};

use super::spot::{Code, Spot, limits_of, spots_of};
use super::{LEVEL, Lines, Register, STOPPED, class_factor, is_turn_at, line_of, turn};
use crate::charge::{AHEAD, Charge};
use crate::claim::{Claim, LineId, Tenant};
use crate::further::FurtherLimit;

/// How many lines of a tenant get their turns anew when a place of it leaves, and how many are parked anew until that
/// counts as work.
const RETIMED_MAX: usize = 16;

/// A limit that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// The cap of the tenant.
    Tenant,
    /// The further limit of this index.
    Further(u8),
}

/// The lines whose places have further limits, and what is in use under those.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct FurtherLines<I> {
    lines: BTreeMap<LineId, FurtherLine<I>>,
    /// Units in use, by the spot of the limit.
    units: BTreeMap<Spot, u64>,
    parked: BTreeSet<(Spot, Code, LineId)>,
    of_tenants: BTreeSet<(Tenant, LineId)>,
    /// How many lines were parked anew since that was asked for.
    passed: usize,
    /// Where lines were parked whose first places do not need that limit.
    vacated: Vec<Spot>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct FurtherLine<I> {
    /// That of the place that came first.
    tenant: Tenant,
    queue: BTreeSet<(u64, I)>,
    /// `None`: it is to be settled.
    stands: Option<Stands>,
}

/// Where a line stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Stands {
    /// Among the turns; the bits of its own.
    InTurn(u64),
    /// It is parked.
    At(Spot, Code),
}

impl<I: Copy + Ord> FurtherLines<I> {
    pub(super) const fn new() -> Self {
        Self {
            lines: BTreeMap::new(),
            units: BTreeMap::new(),
            parked: BTreeSet::new(),
            of_tenants: BTreeSet::new(),
            passed: 0,
            vacated: Vec::new(),
        }
    }

    /// Whether no place waits.
    pub(super) fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    pub(super) fn queue_of(&self, line: LineId) -> Option<&BTreeSet<(u64, I)>> {
        self.lines.get(&line).map(|line| &line.queue)
    }

    #[cfg(test)]
    pub(super) fn queues(&self) -> impl Iterator<Item = &BTreeSet<(u64, I)>> {
        self.lines.values().map(|line| &line.queue)
    }

    pub(super) fn is_stopped(&self, line: LineId) -> bool {
        let stands = self.lines.get(&line).and_then(|line| line.stands);
        stands == Some(Stands::InTurn(STOPPED.to_bits()))
    }

    /// Whether the line has been settled since it began, and is not asleep.
    pub(super) fn stands(&self, line: LineId) -> bool {
        self.lines.get(&line).is_some_and(|line| line.stands.is_some())
    }

    /// The lines, by their numbers.
    pub(super) fn waiting(&self) -> impl Iterator<Item = LineId> + '_ {
        self.lines.keys().copied()
    }

    /// Those that are parked, by where they are, the first of each to come back first.
    pub(super) fn by_spot(&self) -> impl Iterator<Item = (Spot, Code, LineId)> + '_ {
        self.parked.iter().copied()
    }

    /// Each line's first place, and the tenant that it is listed under.
    pub(super) fn listed(&self) -> impl Iterator<Item = (LineId, Option<I>, Tenant)> + '_ {
        let head = |line: &FurtherLine<I>| line.queue.first().map(|(_, id)| *id);
        self.lines.iter().map(move |(id, line)| (*id, head(line), line.tenant))
    }

    /// Lists a line under this tenant. Returns whether that is another than before.
    pub(super) fn list_under(&mut self, line: LineId, tenant: Tenant) -> bool {
        let Some(known) = self.lines.get_mut(&line) else { return false };
        let before = std::mem::replace(&mut known.tenant, tenant);
        self.of_tenants.remove(&(before, line));
        self.of_tenants.insert((tenant, line));
        before != tenant
    }

    /// Returns whether the place was not there before.
    pub(super) fn join(&mut self, line: LineId, tenant: Tenant, ticket: u64, id: I) -> bool {
        let none = || FurtherLine { tenant, queue: BTreeSet::new(), stands: None };
        let known = self.lines.entry(line).or_insert_with(none);
        self.of_tenants.insert((known.tenant, line));
        known.queue.insert((ticket, id))
    }

    /// Returns whether the place was there.
    pub(super) fn take_out(&mut self, line: LineId, ticket: u64, id: I) -> bool {
        self.lines.get_mut(&line).is_some_and(|line| line.queue.remove(&(ticket, id)))
    }

    pub(super) fn count(&mut self, claim: Claim) {
        for limit in claim.further().iter() {
            *self.units.entry(Spot::of_limit(limit)).or_default() += u64::from(claim.cost());
        }
    }

    pub(super) fn discount(&mut self, claim: Claim) {
        for spot in claim.further().iter().map(Spot::of_limit) {
            if let Some(units) = self.units.get_mut(&spot) {
                *units = units.saturating_sub(u64::from(claim.cost()));
                if *units == 0 {
                    self.units.remove(&spot);
                }
            }
        }
    }

    fn units_of(&self, spot: Spot) -> u64 {
        self.units.get(&spot).copied().unwrap_or(0)
    }

    /// The line that is the first to come back from there.
    fn first_at(&self, spot: Spot) -> Option<(Code, LineId)> {
        let mut from = self.parked.range((spot, Code::LOWEST, LineId::FIRST_FURTHER)..);
        let (at, code, line) = from.next()?;
        (*at == spot).then_some((*code, *line))
    }

    /// The lines that are parked, with their scores in Redis.
    pub(super) fn parked(&self) -> impl Iterator<Item = (LineId, f64)> + '_ {
        self.parked.iter().map(|(spot, code, line)| (*line, code.score(*spot)))
    }

    /// Those of a tenant's lines that get their turns anew: if there are many, some, and later others.
    fn lines_of(&self, tenant: Tenant, now: u64) -> Vec<LineId> {
        let last = LineId::LAST;
        let all = || self.of_tenants.range((tenant, LineId::FIRST_FURTHER)..=(tenant, last));
        let count = all().count();
        let spare = count.saturating_sub(RETIMED_MAX);
        let from = usize::try_from(now % (count.max(1) as u64)).unwrap_or(0).min(spare);
        all().skip(from).take(RETIMED_MAX).map(|(_, line)| *line).collect()
    }
}

impl<I: Copy + Ord> Lines<I> {
    /// The lines whose places have further limits, and their tenants.
    pub(crate) fn further_lines(&self) -> impl Iterator<Item = (LineId, Tenant)> + '_ {
        self.further.of_tenants.iter().map(|(tenant, line)| (*line, *tenant))
    }

    /// Whether a place with further limits waits.
    pub(crate) fn has_further(&self) -> bool {
        !self.further.is_empty()
    }

    /// Units in use under a further limit.
    pub(crate) fn units_under(&self, limit: FurtherLimit) -> u64 {
        self.further.units_of(Spot::of_limit(limit))
    }

    /// How many lines were parked anew since the last call of this.
    pub(crate) const fn take_passed(&mut self) -> usize {
        std::mem::replace(&mut self.further.passed, 0)
    }

    /// The first limit that is full for this claim, besides that of the semaphore.
    pub(crate) fn full(&self, claim: Claim) -> Option<Full> {
        let cost = u64::from(claim.cost());
        let is_full = |spot, cap: u32| self.used_at(spot, claim) + cost > u64::from(cap);
        if claim.each().is_some_and(|each| is_full(Spot::of_tenant(claim.tenant()), each)) {
            return Some(Full::Tenant);
        }
        let mut further = claim.further().iter();
        let index = further.position(|limit| is_full(Spot::of_limit(limit), limit.cap()))?;
        u8::try_from(index).ok().map(Full::Further)
    }

    pub(crate) fn used_at(&self, spot: Spot, claim: Claim) -> u64 {
        if spot == Spot::of_tenant(claim.tenant()) {
            self.units_of(claim.tenant())
        } else {
            self.further.units_of(spot)
        }
    }

    /// Where a place that comes now would park: at the first of its limits that keeps it back, because it is full, or
    /// because a line whose turn is earlier waits there for more room.
    pub(crate) fn spot_of_newcomer(&self, claim: Claim, now: u64) -> Option<Spot> {
        self.kept_back(claim, self.code(claim, now, now))
    }

    fn code(&self, claim: Claim, since: u64, now: u64) -> Code {
        Code::new(claim.class(), self.level_units(claim), claim.weight(), since, now)
    }

    /// The units that count for its level: without a tenant, none do.
    fn level_units(&self, claim: Claim) -> u64 {
        if claim.has_tenant() { self.units_of(claim.tenant()) } else { 0 }
    }

    fn kept_back(&self, claim: Claim, code: Code) -> Option<Spot> {
        let cost = u64::from(claim.cost());
        let keeps = |(spot, cap): &(Spot, u32)| {
            self.used_at(*spot, claim) + cost > u64::from(*cap)
                || self.further.first_at(*spot).is_some_and(|(first, _)| first < code)
        };
        limits_of(claim).find(keeps).map(|(spot, _)| spot)
    }

    /// Whether every limit of this claim has room for it.
    pub(crate) fn has_room(&self, claim: Claim) -> bool {
        self.full(claim).is_none()
    }

    /// A line that has only just begun parks at once.
    pub(crate) fn park_new(&mut self, claim: Claim, spot: Spot, now: u64) {
        let Some(line) = claim.line() else { return };
        let code = self.code(claim, now, now);
        self.stand(line, Some(Stands::At(spot, code)));
    }

    /// Sets where a line stands to what its head and its tenant's use imply; one that is parked stays there if its head
    /// needs that limit.
    pub(super) fn settle_further(&mut self, line: LineId, now: u64, of: &impl Register<I>) {
        let Some(known) = self.further.lines.get(&line) else { return };
        let Some((_, head)) = known.queue.first() else {
            self.end(line);
            return;
        };
        // The places of a line can differ in whether their tenant has a cap.
        let claim = of.claim_of(*head);
        let needs = |spot| limits_of(claim).any(|(at, _)| at == spot);
        let of_tenant = Spot::of_tenant(claim.tenant());
        match known.stands {
            Some(Stands::At(spot, _)) if needs(spot) => return,
            Some(Stands::At(spot, _)) => self.further.vacated.push(spot),
            // The head before it may have needed that.
            Some(Stands::InTurn(bits))
                if bits != STOPPED.to_bits() && claim.has_tenant() && !needs(of_tenant) =>
            {
                self.further.vacated.push(of_tenant);
            }
            _ => {}
        }
        self.set_turn_further(line, now, of);
    }

    /// Gives a line the turn that its head and its tenant's use imply.
    fn set_turn_further(&mut self, line: LineId, now: u64, of: &impl Register<I>) {
        let Some(known) = self.further.lines.get(&line) else { return };
        let Some(head) = known.queue.first().copied() else { return };
        let before = match known.stands {
            Some(Stands::InTurn(bits)) => Some(f64::from_bits(bits)),
            _ => None,
        };
        let turn = self.turn_of(head, before, now, of);
        self.stand(line, Some(Stands::InTurn(turn.to_bits())));
    }

    /// After the grant of the head of a line: it gets its next turn, or parks at once, or ends.
    pub(super) fn pass_on(&mut self, line: LineId, now: u64, of: &impl Register<I>) {
        if self.further.queue_of(line).is_none_or(BTreeSet::is_empty) {
            self.end(line);
            return;
        }
        self.set_turn_further(line, now, of);
        if let Some((spot, code, _)) = self.kept_back_at(line, now, of) {
            self.stand(line, Some(Stands::At(spot, code)));
        }
    }

    /// Where the line would park if its turn came, and the claim of its head.
    fn kept_back_at(
        &self,
        line: LineId,
        now: u64,
        of: &impl Register<I>,
    ) -> Option<(Spot, Code, Claim)> {
        let known = self.further.lines.get(&line)?;
        let Some(Stands::InTurn(bits)) = known.stands else { return None };
        let claim = of.claim_of(known.queue.first()?.1);
        let code = self.code(claim, since_of(f64::from_bits(bits)), now);
        self.kept_back(claim, code).map(|spot| (spot, code, claim))
    }

    fn end(&mut self, line: LineId) {
        self.stand(line, None);
        if let Some(ended) = self.further.lines.remove(&line) {
            self.further.of_tenants.remove(&(ended.tenant, line));
        }
    }

    /// The turn of a line with this head; `before`: that which it had.
    fn turn_of(
        &self,
        (ticket, id): (u64, I),
        before: Option<f64>,
        now: u64,
        of: &impl Register<I>,
    ) -> f64 {
        let claim = of.claim_of(id);
        if !claim.has_tenant() {
            return turn(0, 0, 1, of.arrival_of(ticket, now));
        }
        let (class, units, weight) = (claim.class(), self.level_units(claim), claim.weight());
        match before {
            Some(before) if is_turn_at(before, class, units, weight) => before,
            _ => turn(class, units, weight, now),
        }
    }

    pub(super) fn stand(&mut self, line: LineId, stands: Option<Stands>) {
        self.asleep.set(line, None);
        let Some(known) = self.further.lines.get_mut(&line) else { return };
        match std::mem::replace(&mut known.stands, stands) {
            Some(Stands::InTurn(bits)) => _ = self.turns.remove(&(bits, line)),
            Some(Stands::At(spot, code)) => _ = self.further.parked.remove(&(spot, code, line)),
            None => {}
        }
        match stands {
            Some(Stands::InTurn(bits)) => _ = self.turns.insert((bits, line)),
            Some(Stands::At(spot, code)) => _ = self.further.parked.insert((spot, code, line)),
            None => {}
        }
    }

    pub(super) fn stop_further(&mut self, line: LineId, now: u64, of: &impl Register<I>) {
        self.stand(line, Some(Stands::InTurn(STOPPED.to_bits())));
        self.make_way(line, now, of);
    }

    /// A line waits for its turn no more: what is parked at the limits of its first place comes back.
    pub(super) fn make_way(&mut self, line: LineId, now: u64, of: &impl Register<I>) {
        if let Some(head) = self.head(line) {
            self.come_back_for(of.claim_of(head), now, of);
        }
    }

    /// After places have left: their tenants' lines get their turns anew, and what is parked at their limits comes back,
    /// or where a line stood first.
    pub(super) fn make_up_for(&mut self, left: &[Claim], now: u64, of: &impl Register<I>) {
        let mut spots = std::mem::take(&mut self.further.vacated);
        for (i, claim) in left.iter().enumerate() {
            let is_first = left[..i].iter().all(|before| before.tenant() != claim.tenant());
            if is_first && claim.has_tenant() {
                self.retime(claim.tenant(), now, &mut spots, of);
            }
        }
        spots.extend(left.iter().flat_map(|claim| spots_of(*claim)));
        let mut seen = BTreeSet::new();
        for spot in spots {
            if seen.insert(spot) {
                self.come_back(spot, now, of);
            }
        }
    }

    /// `spots`: gets those where another line can be the first now.
    fn retime(&mut self, tenant: Tenant, now: u64, spots: &mut Vec<Spot>, of: &impl Register<I>) {
        let units = self.units_of(tenant);
        for line in self.further.lines_of(tenant, now) {
            if self.is_asleep(line) {
                self.settle_further(line, now, of);
                continue;
            }
            let Some(known) = self.further.lines.get(&line) else { continue };
            let Some((_, head)) = known.queue.first() else { continue };
            // Its own weight: that of its tenant may have been changed since the place came that left.
            let weight = of.claim_of(*head).weight();
            let stands = match known.stands {
                Some(Stands::InTurn(bits)) => {
                    let before = f64::from_bits(bits);
                    let class = class_of(before);
                    if before == STOPPED || is_turn_at(before, class, units, weight) {
                        continue;
                    }
                    Stands::InTurn(turn(class, units, weight, now).to_bits())
                }
                Some(Stands::At(spot, code)) if code.has_other_level(units, weight) => {
                    spots.push(spot);
                    Stands::At(spot, code.at_level(units, weight, now))
                }
                _ => continue,
            };
            self.stand(line, Some(stands));
        }
    }

    /// A place with this claim was first of a line that stood among the turns, and is so no more. It may have been the one
    /// for which others stayed parked at its limits.
    pub(super) fn come_back_for(&mut self, claim: Claim, now: u64, of: &impl Register<I>) {
        limits_of(claim).for_each(|(spot, _)| self.come_back(spot, now, of));
    }

    /// The first line that is parked there comes back among the turns, if the limit has room for its head.
    pub(super) fn come_back(&mut self, spot: Spot, now: u64, of: &impl Register<I>) {
        loop {
            let Some((code, line)) = self.further.first_at(spot) else { return };
            let Some(head) = self.further.queue_of(line).and_then(|queue| queue.first()).copied()
            else {
                return;
            };
            let claim = of.claim_of(head.1);
            let mut caps = limits_of(claim).filter(|(at, _)| *at == spot).map(|(_, cap)| cap);
            let used = self.used_at(spot, claim) + u64::from(claim.cost());
            if caps.next().is_some_and(|cap| used > u64::from(cap)) {
                return;
            }
            // Its tenant may have got permits by other lines since it parked: then it is not the first.
            let anew = self.code(claim, now, now);
            // After some, one comes back all the same: once its turn comes, it parks.
            if claim.has_tenant() && code.is_below(anew) && self.further.passed < RETIMED_MAX {
                self.further.passed += 1;
                self.stand(line, Some(Stands::At(spot, anew)));
                continue;
            }
            let turn = if claim.has_tenant() {
                let since = if code.is_level_with(anew) { code.since(now) } else { now };
                turn(claim.class(), self.level_units(claim), claim.weight(), since)
            } else {
                self.turn_of(head, None, now, of)
            };
            self.stand(line, Some(Stands::InTurn(turn.to_bits())));
            return;
        }
    }

    /// Gives the line that is next its turn anew, if its tenant got permits by other lines since. Returns whether it did.
    pub(crate) fn restamp(&mut self, line: LineId, now: u64, of: &impl Register<I>) -> bool {
        let Some(known) = self.further.lines.get(&line) else { return false };
        let (Some(Stands::InTurn(bits)), Some((_, head))) = (known.stands, known.queue.first())
        else {
            return false;
        };
        let claim = of.claim_of(*head);
        let (class, units, weight) = (claim.class(), self.level_units(claim), claim.weight());
        let anew = turn(class, units, weight, now);
        let is_late = claim.has_tenant() && f64::from_bits(bits) < turn(class, units, weight, 0);
        if is_late {
            self.stand(line, Some(Stands::InTurn(anew.to_bits())));
        }
        is_late
    }

    /// Parks the line that is next, if one of its limits keeps it back. Returns whether it did.
    pub(crate) fn park(&mut self, line: LineId, now: u64, of: &impl Register<I>) -> bool {
        let Some((spot, code, claim)) = self.kept_back_at(line, now, of) else { return false };
        self.stand(line, Some(Stands::At(spot, code)));
        // Also at its own: there can be room for the one that is ahead of it.
        self.come_back_for(claim, now, of);
        true
    }

    /// A place of this line was renewed: a line that is parked ahead of the present goes to the front of its level, and one
    /// that is asleep for longer than its budgets can need is settled: the clock has stepped back since.
    pub(crate) fn renewed(&mut self, claim: Claim, now: u64, of: &impl Register<I>) {
        let line = line_of(claim);
        if let Some(until) = self.asleep.of(line) {
            let own = claim.charges().iter().filter(|charge| charge.is_tenants());
            let longest = own.map(Charge::burst).max().unwrap_or(0);
            if until > now + 2 * longest + AHEAD {
                self.touch(claim);
            }
            return;
        }
        let Some(known) = self.further.lines.get(&line) else { return };
        if let Some(Stands::At(spot, code)) = known.stands
            && code.not_ahead_of(now) != code
        {
            self.stand(line, Some(Stands::At(spot, code.not_ahead_of(now))));
            self.come_back(spot, now, of);
        }
    }
}

/// The class of a turn.
fn class_of(turn: f64) -> u8 {
    let exponent = (turn.to_bits() >> 52).saturating_sub(1023 + 52);
    u8::try_from(exponent / 80).unwrap_or(0)
}

/// The time in a turn, µs.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below 2⁵²")]
fn since_of(turn: f64) -> u64 {
    let turn = turn / class_factor(class_of(turn));
    (turn - (turn / LEVEL).floor() * LEVEL) as u64
}
