//! The claim of a request on a semaphore that tenants share.

use std::fmt;
use std::num::NonZeroU64;

use super::base36::{read_base36, write_base36};
use super::charge::{Charge, Charges};
use super::further::{Further, FurtherLimit};

/// A tenant by its number: a keyed hash of its name, 24 bits wide.
///
/// Two tenants with one number share a line; for two names the chance is 1 in 1.6·10⁷.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(u32);

impl Tenant {
    /// The highest number.
    pub const MAX: u32 = (1 << 24) - 1;

    /// The tenant whose name has this hash.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the remainder has 24 bits")]
    pub const fn of_hash(hash: u64) -> Self {
        Self((hash % Self::MAX as u64) as u32 + 1)
    }

    /// What stands for the tenant of the requests without one.
    pub const NOBODY: Self = Self(0);

    /// The tenant with this number, 0 of nobody; `None`: there is none.
    pub(crate) fn of_number(number: u64) -> Option<Self> {
        u32::try_from(number).ok().filter(|number| *number <= Self::MAX).map(Self)
    }

    /// The number, from 1 to [`MAX`](Self::MAX); 0 of nobody.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Reads what `Display` writes.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let number = u32::try_from(read_base36(text.as_bytes())?).ok()?;
        let tenant = Self(number);
        ((1..=Self::MAX).contains(&number) && tenant.text() == *text.as_bytes()).then_some(tenant)
    }

    /// Five digits to the base 36.
    pub(crate) fn text(self) -> [u8; 5] {
        let mut text = [0; 5];
        write_base36(&mut text, u64::from(self.0));
        text
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

impl fmt::Debug for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A line of places, by its number. Places of a tenant that have no further limits are one, by the number of the tenant;
/// those that have the same tenant and the same further limits are one, by a number above those of tenants.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LineId(u32);

impl LineId {
    /// The first line of places with further limits.
    pub(crate) const FIRST_FURTHER: Self = Self(1 << 24);
    /// The last one.
    pub(crate) const LAST: Self = Self((1 << 25) - 1);

    /// The number, below 2²⁵.
    #[must_use]
    pub const fn number(self) -> u32 {
        self.0
    }

    /// Whether its places have further limits.
    pub(crate) fn is_further(self) -> bool {
        self >= Self::FIRST_FURTHER
    }

    /// The tenant of a line whose places have none.
    pub(crate) const fn tenant(self) -> Tenant {
        Tenant(self.0)
    }
}

impl From<Tenant> for LineId {
    fn from(Tenant(number): Tenant) -> Self {
        Self(number)
    }
}

/// Five digits to the base 36, as in Redis.
impl fmt::Display for LineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&Tenant(self.0), f)
    }
}

impl fmt::Debug for LineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The tenant of a request, what it is compared by, its further limits, and what it takes of budgets.
///
/// A claim is the end of a [`PlaceId`](super::PlaceId), so the backend finds it with the place and stores it nowhere
/// else.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Claim {
    terms: NonZeroU64,
    further: Further,
    charges: Charges,
}

// From the lowest bit: each 24, class 3, cost - 1 6, 64 - weight 6, tenant 25. So a weight of 1 is not 0, and
// neither is the claim of nobody.
const CLASS_AT: u32 = 24;
const COST_AT: u32 = 27;
const WEIGHT_AT: u32 = 33;
const TENANT_AT: u32 = 39;

impl Claim {
    /// The highest weight.
    pub const WEIGHT_MAX: u32 = 64;
    /// The highest cost, permits.
    pub const COST_MAX: u32 = 64;
    /// The last class.
    pub const CLASS_MAX: u8 = 7;
    /// The highest cap of one tenant, permits.
    pub const EACH_MAX: u32 = (1 << 24) - 1;
    /// Bytes of its text.
    pub(crate) const LEN: usize = 16;

    /// A claim of this tenant: weight 1, one permit, class 0, no cap of its own.
    #[must_use]
    pub fn new(tenant: Tenant) -> Self {
        let weight = u64::from(Self::WEIGHT_MAX - 1) << WEIGHT_AT;
        // Not 0, by the weight.
        let terms = NonZeroU64::new(u64::from(tenant.0) << TENANT_AT | weight);
        let terms = terms.unwrap_or(NonZeroU64::MIN);
        Self { terms, further: Further::NONE, charges: Charges::NONE }
    }

    /// The claim of a request without a tenant: it has a cost and nothing else, and stands in the order of its arrival
    /// among the requests that have no claim.
    #[must_use]
    pub fn without_tenant() -> Self {
        Self::new(Tenant::NOBODY)
    }

    /// The same claim with another weight, clamped to 1 to 64. Without a tenant, this and all but the cost has no effect.
    #[must_use]
    pub fn with_weight(self, weight: u32) -> Self {
        self.with(WEIGHT_AT, 6, Self::WEIGHT_MAX - weight.clamp(1, Self::WEIGHT_MAX))
    }

    /// The same claim to another number of permits, clamped to 1 to 64.
    #[must_use]
    pub fn with_cost(self, cost: u32) -> Self {
        self.with(COST_AT, 6, cost.clamp(1, Self::COST_MAX) - 1)
    }

    /// The same claim in another class, at most 7.
    #[must_use]
    pub fn with_class(self, class: u8) -> Self {
        self.with(CLASS_AT, 3, u32::from(class.min(Self::CLASS_MAX)))
    }

    /// The same claim of a tenant with this cap on its permits in use, at most 2²⁴ − 1.
    #[must_use]
    pub fn with_each(self, each: Option<u32>) -> Self {
        self.with(0, 24, each.map_or(0, |each| each.clamp(1, Self::EACH_MAX)))
    }

    /// The same claim with one limit more: see [`Further::and`].
    #[must_use]
    pub fn also(self, limit: FurtherLimit) -> Self {
        Self { further: self.further.and(limit), ..self }
    }

    /// The same claim with one charge more: see [`Charges::and`]. Without a tenant it takes nothing of a tenant's budget.
    #[must_use]
    pub fn charged(self, charge: Charge) -> Self {
        if charge.is_tenants() && !self.has_tenant() {
            return self;
        }
        Self { charges: self.charges.and(charge), ..self }
    }

    /// What it takes of budgets.
    #[must_use]
    pub const fn charges(self) -> Charges {
        self.charges
    }

    /// Whether it takes anything of a budget.
    #[must_use]
    pub const fn has_charges(self) -> bool {
        !self.charges.is_empty()
    }

    /// The tenant; [`Tenant::NOBODY`] if it has none.
    #[must_use]
    pub const fn tenant(self) -> Tenant {
        Tenant((self.terms.get() >> TENANT_AT) as u32)
    }

    /// Whether it has a tenant.
    #[must_use]
    pub fn has_tenant(self) -> bool {
        self.tenant() != Tenant::NOBODY
    }

    /// Whether it stands in a line; else it is served in the order of arrival.
    #[must_use]
    pub fn is_in_line(self) -> bool {
        self.has_tenant() || self.has_further()
    }

    /// Its further limits.
    #[must_use]
    pub const fn further(self) -> Further {
        self.further
    }

    /// Whether it has further limits.
    #[must_use]
    pub const fn has_further(self) -> bool {
        !self.further.is_empty()
    }

    /// The line in which it stands; `None`: it is served in the order of arrival.
    #[must_use]
    pub fn line(self) -> Option<LineId> {
        if self.has_further() {
            return Some(LineId(LineId::FIRST_FURTHER.0 + self.further.line_of(self.tenant())));
        }
        self.has_tenant().then(|| self.tenant().into())
    }

    /// The tenant's weight: what it has in use is divided by this where tenants are compared.
    #[must_use]
    pub const fn weight(self) -> u32 {
        Self::WEIGHT_MAX - self.bits(WEIGHT_AT, 6)
    }

    /// How many permits the request takes, at once or not at all.
    #[must_use]
    pub const fn cost(self) -> u32 {
        self.bits(COST_AT, 6) + 1
    }

    /// The permits that it takes under all of its limits, and its charges: the work that it is to the backend.
    pub(crate) fn work(self) -> usize {
        self.cost() as usize * (1 + self.further.iter().count()) + self.charges.iter().count()
    }

    /// The class: while a request of a lower class could be served, this one is not.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "three bits")]
    pub const fn class(self) -> u8 {
        self.bits(CLASS_AT, 3) as u8
    }

    /// How many permits the tenant may have in use; `None`: as many as there are.
    #[must_use]
    pub const fn each(self) -> Option<u32> {
        match self.bits(0, 24) {
            0 => None,
            each => Some(each),
        }
    }

    #[expect(clippy::cast_possible_truncation, reason = "24 bits at the most")]
    const fn bits(self, at: u32, width: u32) -> u32 {
        ((self.terms.get() >> at) & ((1 << width) - 1)) as u32
    }

    fn with(self, at: u32, width: u32, value: u32) -> Self {
        if at != COST_AT && !self.has_tenant() {
            return self;
        }
        let mask = ((1u64 << width) - 1) << at;
        let bits = (self.terms.get() & !mask) | (u64::from(value) << at);
        // Neither the tenant nor a weight of 1 is ever taken out of it.
        Self { terms: NonZeroU64::new(bits).unwrap_or(self.terms), ..self }
    }

    /// Whether it asks for more than may ever be in use under its tenant's cap or a further limit.
    pub(crate) fn exceeds_a_cap(self) -> bool {
        let caps = self.each().into_iter().chain(self.further.iter().map(FurtherLimit::cap));
        caps.min().is_some_and(|cap| self.cost() > cap)
    }

    /// The claim at the end of an id: a dot, then to the base 36 the tenant (5 digits), weight (2), cap (5,
    /// 0: none), class (1; 8 more with further limits, which stand before the bound) and cost (2). Scripts cut it by
    /// position.
    pub(crate) fn text(self) -> [u8; Self::LEN] {
        let mut text = [b'.'; Self::LEN];
        write_base36(&mut text[1..6], u64::from(self.tenant().0));
        write_base36(&mut text[6..8], u64::from(self.weight()));
        write_base36(&mut text[8..13], u64::from(self.bits(0, 24)));
        let class = u64::from(self.class()) + if self.has_further() { FURTHER_CLASSES } else { 0 };
        write_base36(&mut text[13..14], class);
        write_base36(&mut text[14..16], u64::from(self.cost()));
        text
    }

    /// Reads what [`text`](Self::text) writes, of a claim with these further limits and charges.
    pub(crate) fn parse(text: &[u8], further: Further, charges: Charges) -> Option<Self> {
        let text: &[u8; Self::LEN] = text.try_into().ok()?;
        let number = |digits: &[u8]| u32::try_from(read_base36(digits)?).ok();
        let tenant = Tenant(number(&text[1..6])?);
        let class = number(&text[13..14])? % (u32::from(Self::CLASS_MAX) + 1);
        let claim = Self::new(tenant)
            .with_weight(number(&text[6..8])?)
            .with_each(Some(number(&text[8..13])?).filter(|each| *each > 0))
            .with_class(u8::try_from(class).ok()?)
            .with_cost(number(&text[14..16])?);
        let claim = charges.iter().fold(Self { further, ..claim }, Self::charged);
        if claim.charges != charges {
            return None;
        }
        // One text for each claim, and no value out of its range.
        (tenant.0 <= Tenant::MAX && claim.text() == *text).then_some(claim)
    }
}

impl fmt::Debug for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.has_charges() {
            f.write_str(std::str::from_utf8(&self.charges.text()).unwrap_or_default())?;
        }
        if let Some(line) = self.line().filter(|_| self.has_further()) {
            f.write_str(std::str::from_utf8(&self.further.text(line.0)).unwrap_or_default())?;
        }
        f.write_str(std::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

/// What is added to the class in the text of a claim with further limits.
const FURTHER_CLASSES: u64 = 8;

#[cfg(test)]
mod tests {
    use super::{Claim, Tenant};
    use crate::charge::Charges;
    use crate::further::{Further, FurtherLimit};

    fn read(text: &[u8], further: Further) -> Option<Claim> {
        Claim::parse(text, further, Charges::NONE)
    }

    #[test]
    fn a_claim_is_read_back_as_it_was_written() {
        for (tenant, weight, cost, class, each) in [
            (1, 1, 1, 0, None),
            (Tenant::MAX, 64, 64, 7, Some(Claim::EACH_MAX)),
            (1234, 3, 16, 1, Some(4)),
            (0, 1, 5, 0, None),
        ] {
            let claim = Claim::new(Tenant(tenant))
                .with_weight(weight)
                .with_cost(cost)
                .with_class(class)
                .with_each(each);
            assert_eq!(claim.tenant(), Tenant(tenant));
            assert_eq!((claim.weight(), claim.cost()), (weight, cost));
            assert_eq!((claim.class(), claim.each()), (class, each));
            assert_eq!(read(&claim.text(), Further::NONE), Some(claim));
        }
        let text = Claim::new(Tenant(1234)).with_each(Some(4)).text();
        assert_eq!(text, *b".000ya0100004001");
    }

    #[test]
    fn further_limits_are_said_by_the_class() {
        let further = Further::NONE.and(FurtherLimit::of_hash(34, 20));
        for (class, digit) in [(0, b'8'), (7, b'f')] {
            let claim =
                Claim::new(Tenant(1234)).with_class(class).also(FurtherLimit::of_hash(34, 20));
            assert_eq!((claim.further(), claim.class()), (further, class));
            assert_eq!(claim.text()[13], digit);
            assert_eq!(read(&claim.text(), further), Some(claim));
            assert_eq!(read(&claim.text(), Further::NONE), None);
        }
        assert_eq!(read(&Claim::new(Tenant(1)).text(), further), None);
        let lines = [Claim::without_tenant(), Claim::new(Tenant(5))].map(Claim::line);
        assert_eq!(lines, [None, Some(Tenant(5).into())]);
        let nobodys = Claim::without_tenant().also(FurtherLimit::of_hash(34, 20));
        assert!(nobodys.line().is_some_and(|line| line.is_further() && line.number() < 1 << 25));
    }

    #[test]
    fn values_out_of_range_are_taken_to_the_nearest() {
        let claim = Claim::new(Tenant(1));
        assert_eq!(claim.with_weight(0).weight(), 1);
        assert_eq!(claim.with_weight(65).weight(), 64);
        assert_eq!(claim.with_cost(0).cost(), 1);
        assert_eq!(claim.with_cost(u32::MAX).cost(), 64);
        assert_eq!(claim.with_class(8).class(), 7);
        assert_eq!(claim.with_each(Some(u32::MAX)).each(), Some(Claim::EACH_MAX));
        assert_eq!(claim.with_each(Some(3)).with_each(None).each(), None);
        let nobodys = Claim::without_tenant();
        assert_eq!(nobodys.with_weight(2).with_class(1).with_each(Some(3)), nobodys);
    }

    #[test]
    fn nothing_else_is_read() {
        for text in [
            "",
            ".",
            ".00000010000001",
            ".0000a00000000001",
            ":0000a01000000001",
            ".0000A01000000001",
            ".0000a1t000000001",
            ".0000a01000000801",
            ".0000a01000000000",
            ".0000a0100000001t",
            ".zzzzz01000000001",
            ".0000a01zzzzz0001",
            ".000000200000001",
            ".000000100001001",
            ".000000100000101",
        ] {
            assert_eq!(read(text.as_bytes(), Further::NONE), None, "{text}");
        }
        assert!(read(b".0000a01000000001", Further::NONE).is_none(), "seventeen bytes");
        assert!(read(b".0000a0100000001", Further::NONE).is_some());
        assert!(read(b".000000100000001", Further::NONE).is_some());
    }

    #[test]
    fn a_tenant_is_read_back_as_it_was_written() {
        for (number, text) in [(1, "00001"), (1234, "000ya"), (Tenant::MAX, "9zldr")] {
            let tenant = Tenant(number);
            assert_eq!((tenant.to_string().as_str(), format!("{tenant:?}").as_str()), (text, text));
            assert_eq!(Tenant::parse(text), Some(tenant));
        }
        for text in [
            "",
            "00000",
            "0001",
            "000001",
            "0000A",
            "9zlds",
            "jz6rj",
            "zzzzz",
            "zzzzzzzzzzzz",
            "-0001",
        ] {
            assert_eq!(Tenant::parse(text), None, "{text}");
        }
    }

    #[test]
    fn each_hash_stands_for_a_tenant() {
        assert_eq!(Tenant::of_hash(0).number(), 1);
        assert_eq!(Tenant::of_hash(u64::from(Tenant::MAX) - 1).number(), Tenant::MAX);
        assert_eq!(Tenant::of_hash(u64::from(Tenant::MAX)).number(), 1);
    }
}
