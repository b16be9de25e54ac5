//! Where lines park, and in which order they come back.

use crate::claim::{Claim, Tenant};
use crate::further::FurtherLimit;

use super::UNIT;

/// A limit at which a line can park: the cap of a tenant, or a further limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Spot(u32);

impl Spot {
    /// The spot with this number; `None`: there is none.
    pub(crate) fn of_number(number: u64) -> Option<Self> {
        let (tenants, both) = (Tenant::MAX, FurtherLimit::NUMBER_MAX + 1);
        let number = u32::try_from(number).ok()?;
        let is_spot = (1..=tenants).contains(&number) || (both + 1..2 * both).contains(&number);
        is_spot.then_some(Self(number))
    }

    /// That of the tenant or, above those, of the further limit.
    pub(crate) const fn number(self) -> u32 {
        self.0
    }

    pub(crate) const fn of_tenant(tenant: Tenant) -> Self {
        Self(tenant.number())
    }

    pub(crate) const fn of_limit(limit: FurtherLimit) -> Self {
        Self(FurtherLimit::NUMBER_MAX + 1 + limit.number())
    }
}

/// The turn of a line among those that are parked at one spot, in 36 bits, the lowest first: its class, its level as a
/// number of five bits of exponent and four of mantissa, and since when it is at that level, in steps of which it keeps
/// 24 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Code(u64);

/// What one step of the time is in µs, less than a permit takes from one process to another, and how many there are before
/// it begins again: half an hour.
const STEP_US: u64 = 125;
const STEPS: u64 = 1 << 24;

impl Code {
    pub(crate) const LOWEST: Self = Self(0);
    const MAX: u64 = (1 << 36) - 1;

    /// The code with these bits; `None`: they are more than 36.
    pub(crate) fn of_bits(bits: u64) -> Option<Self> {
        (bits <= Self::MAX).then_some(Self(bits))
    }

    pub(crate) const fn bits(self) -> u64 {
        self.0
    }

    /// The turn of a line of this class, whose tenant has so many units in use, since then; if that is before the time
    /// began again, it is the first of its level.
    pub(super) fn new(class: u8, units: u64, weight: u32, since: u64, now: u64) -> Self {
        let level = short_level(units, weight);
        let is_before = since / STEP_US / STEPS < now / STEP_US / STEPS;
        let step = if is_before { 0 } else { step_of(since) };
        Self(u64::from(class) << 33 | level << 24 | step)
    }

    /// Whether both are of one class and level.
    pub(super) const fn is_level_with(self, other: Self) -> bool {
        self.0 / STEPS == other.0 / STEPS
    }

    /// Whether this one is of a lower class, or a lower level.
    pub(super) const fn is_below(self, other: Self) -> bool {
        self.0 / STEPS < other.0 / STEPS
    }

    /// The same class, at this level since then.
    pub(super) fn at_level(self, units: u64, weight: u32, since: u64) -> Self {
        let class = self.0 >> 33 << 33;
        Self(class | short_level(units, weight) << 24 | step_of(since))
    }

    /// Whether its level is another than this.
    pub(super) fn has_other_level(self, units: u64, weight: u32) -> bool {
        self.0 >> 24 & 511 != short_level(units, weight)
    }

    /// Since when it is at its level, in µs.
    pub(super) fn since(self, now: u64) -> u64 {
        let steps = now / STEP_US;
        let before = steps.wrapping_sub(self.0) % STEPS;
        steps.saturating_sub(before) * STEP_US
    }

    /// The same, ahead of all of its level, if its time is ahead of the present: it has begun again, or the clock stepped
    /// back. It would be the last until then.
    pub(super) fn not_ahead_of(self, now: u64) -> Self {
        if self.0 % STEPS > step_of(now) { Self(self.0 / STEPS * STEPS) } else { self }
    }

    /// As a score in Redis, of a line that is parked at this spot: negative, and closer to 0 than any line's places. All
    /// 16 lower bits of the spot's number and the code fit into a double's mantissa, the upper ones into its exponent.
    pub(crate) fn score(self, Spot(spot): Spot) -> f64 {
        let mantissa = (1u64 << 52) + (u64::from(spot & 0xffff) << 36) + (Self::MAX - self.0);
        let exponent = 1023 + u64::from(spot >> 16) - 600;
        -(mantissa as f64) * f64::from_bits(exponent << 52)
    }
}

const fn step_of(us: u64) -> u64 {
    us / STEP_US % STEPS
}

/// The level in nine bits: exact below 32, so half a unit of weight 1, and to one part in sixteen above.
fn short_level(units: u64, weight: u32) -> u64 {
    let level = units.saturating_mul(UNIT) / u64::from(weight);
    if level < 16 {
        return level;
    }
    let exponent = u64::from(level.ilog2());
    ((exponent - 4) * 16 + (level >> (exponent - 4))).min(511)
}

/// The limits of a claim besides that of the semaphore, in the order in which they are examined: where a line parks that
/// one of them keeps back, and the cap.
pub(crate) fn limits_of(claim: Claim) -> impl Iterator<Item = (Spot, u32)> {
    let of_tenant = claim.each().map(|each| (Spot::of_tenant(claim.tenant()), each));
    let further = claim.further().iter().map(|limit| (Spot::of_limit(limit), limit.cap()));
    of_tenant.into_iter().chain(further)
}

/// The spots that gain room when a place leaves: whatever its own cap, that of its tenant.
pub(crate) fn spots_of(claim: Claim) -> impl Iterator<Item = Spot> {
    let of_tenant = claim.has_tenant().then(|| Spot::of_tenant(claim.tenant()));
    of_tenant.into_iter().chain(claim.further().iter().map(Spot::of_limit))
}

#[cfg(test)]
mod tests {
    use super::{Code, STEP_US, STEPS, Spot, short_level};
    use crate::claim::Tenant;
    use crate::further::FurtherLimit;

    const NOW: u64 = 1_795_169_853_126_543;

    #[test]
    fn codes_are_ordered_by_class_then_level_then_time() {
        let code = |class, units, weight, since| Code::new(class, units, weight, since, NOW);
        let codes = [
            code(0, 0, 1, NOW),
            code(0, 0, 1, NOW + STEP_US),
            code(0, 1, 64, NOW),
            code(0, 1, 3, NOW),
            code(0, 1, 1, NOW),
            code(0, 16, 1, NOW),
            code(0, 17, 1, NOW),
            code(0, 1 << 24, 1, NOW),
            code(1, 0, 1, NOW),
            code(7, u64::from(u32::MAX), 1, NOW),
        ];
        assert!(codes.is_sorted_by(|a, b| a < b), "{codes:?}");
        assert_eq!(code(0, u64::MAX, 1, NOW).0 >> 24, 511);
    }

    #[test]
    fn a_short_level_never_falls_and_is_close() {
        let mut last = 0;
        for level in 0..10_000u64 {
            // With weight 64 a unit is a level.
            let short = short_level(level, 64);
            assert!((last..=last + 1).contains(&short), "{level}");
            last = short;
        }
        assert_eq!([31, 32, 33, 34].map(|level| short_level(level, 64)), [31, 32, 32, 33]);
    }

    #[test]
    fn scores_are_ordered_by_spot_and_code_and_lie_between_lines_and_starts() {
        let spots = [
            Spot::of_tenant(Tenant::of_hash(0)),
            Spot::of_tenant(Tenant::of_hash(u64::from(Tenant::MAX) - 1)),
            Spot::of_limit(FurtherLimit::of_hash(0, 1)),
            Spot::of_limit(FurtherLimit::of_hash(u64::from(FurtherLimit::NUMBER_MAX) - 1, 1)),
        ];
        let codes = [Code::LOWEST, Code(1), Code::new(3, 9, 2, NOW, NOW), Code(Code::MAX)];
        for spot in spots {
            let scores = codes.map(|code| code.score(spot));
            assert!(scores.is_sorted_by(|a, b| a < b), "{scores:?}");
            assert!(scores.iter().all(|score| (-3e-9..0.0).contains(score)), "{scores:?}");
        }
        for two in spots.windows(2) {
            assert!(Code::LOWEST.score(two[0]) > Code(Code::MAX).score(two[1]), "{two:?}");
        }
    }

    #[test]
    fn the_time_of_a_code_is_that_of_the_last_half_hour() {
        for ago in [0, STEP_US, 60_000_000, (STEPS - 1) * STEP_US] {
            let since = Code::new(1, 2, 1, NOW - ago, NOW - ago).since(NOW);
            assert!(since <= NOW - ago && NOW - ago - since < STEP_US, "{ago}");
        }
        let ahead = Code::new(1, 2, 1, NOW + STEP_US, NOW);
        assert_eq!(ahead.not_ahead_of(NOW), Code(ahead.0 / STEPS * STEPS));
        assert_eq!(ahead.not_ahead_of(NOW + STEP_US), ahead);
    }

    #[test]
    fn a_code_knows_its_level() {
        let code = Code::new(2, 3, 1, NOW, NOW);
        let other = Code::new(2, 3, 1, NOW + 64_000_000, NOW);
        assert!(code.is_level_with(other) && !code.is_below(other) && !other.is_below(code));
        assert!(code.is_below(Code::new(2, 4, 1, 0, 0)) && code.is_below(Code::new(3, 0, 1, 0, 0)));
        assert!(!code.has_other_level(6, 2) && code.has_other_level(2, 1));
        assert_eq!(
            code.at_level(4, 1, NOW + 64_000_000),
            Code::new(2, 4, 1, NOW + 64_000_000, NOW)
        );
    }
}
