//! What a request takes of budgets, such as tokens a minute.

use std::fmt;
use std::num::NonZeroU64;

use smallvec::SmallVec;

use super::base36::{read_base36, write_base36};

/// How much further ahead than any charge takes it a budget may be, µs. Beyond that, the clock has stepped back since.
pub(crate) const AHEAD: u64 = 1_000_000;

/// What a request takes of a budget: a part of its time.
///
/// A budget refills evenly. Of 80,000 tokens a minute, a token takes 750 µs; a request takes as many as it is estimated to
/// use. The backend keeps one number for a budget: when it will be full again (the *generic cell rate algorithm*, ITU-T
/// I.371). A request is granted only if that is, with what it takes, no further ahead than the burst.
///
/// The number is a keyed hash of the budget's name, 24 bits wide, as that of a
/// [further limit](super::FurtherLimit). A budget that each tenant has for itself has a number above these, from the name
/// and that of the tenant: where it has too little, it holds up only the tenant's own requests.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Charge {
    // A part of every place's id, so it is small: the number, then what it takes.
    packed: NonZeroU64,
    burst: u64,
}

/// A day in µs needs no more.
const TAKEN_BITS: u32 = 37;

impl Charge {
    /// The highest number of a budget that all share.
    pub const NUMBER_MAX: u32 = (1 << 24) - 1;
    /// The lowest and the highest number of a budget of one tenant: to the base 36, these begin with a letter.
    const TENANTS: (u32, u32) = (10 * 36u32.pow(4), 36u32.pow(5) - 1);
    /// The longest burst: a day, in µs.
    pub const BURST_MAX: u64 = 24 * 60 * 60 * 1_000_000;
    /// Bytes of its text.
    const LEN: usize = 21;

    /// The charge of a budget whose name has this hash: `taken` of its time, of which `burst` may be taken at once (µs).
    /// `None`: it takes more than that, or the burst is 0 or more than a day.
    #[must_use]
    pub fn of_hash(hash: u64, taken: u64, burst: u64) -> Option<Self> {
        Self::new(hash % u64::from(Self::NUMBER_MAX) + 1, taken, burst)
    }

    /// The same of a budget of one tenant; the hash is that of both names.
    #[must_use]
    pub fn of_tenant(hash: u64, taken: u64, burst: u64) -> Option<Self> {
        let (first, last) = (u64::from(Self::TENANTS.0), u64::from(Self::TENANTS.1));
        Self::new(first + hash % (last - first + 1), taken, burst)
    }

    /// The charge of the budget with this number; `None`: there is no such number, or the rest is out of range.
    pub(crate) fn of_number(number: u32, taken: u64, burst: u64) -> Option<Self> {
        Self::new(number.into(), taken, burst).filter(|_| Self::is_number(number))
    }

    fn new(number: u64, taken: u64, burst: u64) -> Option<Self> {
        let in_range = (1..=Self::BURST_MAX).contains(&burst) && taken <= burst;
        let packed = NonZeroU64::new(number << TAKEN_BITS | taken).filter(|_| in_range)?;
        Some(Self { packed, burst })
    }

    /// The number of the budget: from 1 to [`NUMBER_MAX`](Self::NUMBER_MAX), or above that if it is one tenant's.
    #[must_use]
    pub const fn number(self) -> u32 {
        (self.packed.get() >> TAKEN_BITS) as u32
    }

    /// Reads the number of a budget: five digits to the base 36.
    #[must_use]
    pub fn parse_number(digits: &[u8]) -> Option<u32> {
        let number = u32::try_from(read_base36(digits)?).ok().filter(|_| digits.len() == 5)?;
        Self::is_number(number).then_some(number)
    }

    /// Whether a budget can have this number.
    pub(crate) fn is_number(number: u32) -> bool {
        let (first, last) = Self::TENANTS;
        (1..=Self::NUMBER_MAX).contains(&number) || (first..=last).contains(&number)
    }

    /// Whether the budget is that of one tenant.
    #[must_use]
    pub const fn is_tenants(self) -> bool {
        self.number() >= Self::TENANTS.0
    }

    /// What the request takes, µs.
    #[must_use]
    pub const fn taken(self) -> u64 {
        self.packed.get() & ((1 << TAKEN_BITS) - 1)
    }

    /// What may be taken at once, µs.
    #[must_use]
    pub const fn burst(self) -> u64 {
        self.burst
    }

    /// Number, what it takes, and burst to the base 36: 5, 8 and 8 digits.
    fn text(self) -> [u8; Self::LEN] {
        let mut text = [0; Self::LEN];
        write_base36(&mut text[..5], u64::from(self.number()));
        write_base36(&mut text[5..13], self.taken());
        write_base36(&mut text[13..], self.burst());
        text
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let text: &[u8; Self::LEN] = text.try_into().ok()?;
        let number = Self::parse_number(&text[..5])?.into();
        let charge = Self::new(number, read_base36(&text[5..13])?, read_base36(&text[13..])?)?;
        (charge.text() == *text).then_some(charge)
    }
}

/// Such as `01a2b 750us≤60000000us`: the number to the base 36, what it takes, and the burst.
impl fmt::Debug for Charge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 5];
        write_base36(&mut digits, u64::from(self.number()));
        let number = std::str::from_utf8(&digits).unwrap_or_default();
        write!(f, "{number} {}us≤{}us", self.taken(), self.burst())
    }
}

/// The charges of a request: of up to two budgets.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Charges {
    charges: [Option<Charge>; Self::MAX],
}

impl Charges {
    /// The most budgets of a request.
    pub const MAX: usize = 2;
    /// The most bytes of its text.
    pub(crate) const LEN: usize = 1 + Self::MAX * Charge::LEN;

    /// No charge.
    pub const NONE: Self = Self { charges: [None; Self::MAX] };

    /// These charges and one more. Of two of one budget the first counts, and a third budget is left out.
    #[must_use]
    pub fn and(mut self, charge: Charge) -> Self {
        for slot in &mut self.charges {
            match slot {
                Some(known) if known.number() != charge.number() => continue,
                Some(_) => {}
                None => *slot = Some(charge),
            }
            break;
        }
        self
    }

    /// The charges, in the order in which they were named.
    pub fn iter(self) -> impl Iterator<Item = Charge> {
        self.charges.into_iter().map_while(|charge| charge)
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.charges[0].is_none()
    }

    /// A dollar sign and the text of each charge. It follows the number of a place, and its rate.
    pub(crate) fn text(self) -> SmallVec<[u8; Self::LEN]> {
        let mut text = SmallVec::new();
        text.push(b'$');
        self.iter().for_each(|charge| text.extend_from_slice(&charge.text()));
        text
    }

    /// Reads what [`text`](Self::text) writes.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let (mut charges, mut count) = (Self::NONE, 0);
        for charge in text.strip_prefix(b"$")?.chunks(Charge::LEN) {
            charges = charges.and(Charge::parse(charge)?);
            count += 1;
        }
        (count > 0 && charges.iter().count() == count).then_some(charges)
    }
}

impl fmt::Debug for Charges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

/// What a request has truly used of its budgets, in the order of its [charges](Charges), and what others have: in µs of
/// each.
///
/// It replaces the charges once, when the place leaves. What a request used beyond its charge counts as far as the budget
/// is then no further ahead than twice the burst: one report that is wrong stops a budget for no longer than a burst takes
/// to refill.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Used([UsedOf; Charges::MAX]);

/// The same of one budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct UsedOf {
    /// What the request used.
    pub used: u64,
    /// In what time at least the budget is full again, up to its burst: whoever provides it has counted more.
    pub ahead: u64,
}

impl Used {
    /// The highest value: more has the same effect.
    pub const MAX: u64 = 3 * Charge::BURST_MAX;
    /// Bytes of the text of one charge.
    const LEN: usize = 16;
    /// Nothing.
    pub const NOTHING: Self = Self([UsedOf { used: 0, ahead: 0 }; Charges::MAX]);

    /// As much as was charged.
    #[must_use]
    pub fn as_charged(charges: Charges) -> Self {
        let used_of = |charge: Charge| UsedOf { used: charge.taken(), ahead: 0 };
        Self(charges.charges.map(|charge| charge.map_or_else(UsedOf::default, used_of)))
    }

    /// The same, but not less than was charged.
    #[must_use]
    pub(crate) fn at_least(self, charges: Charges) -> Self {
        charges.iter().enumerate().fold(self, |used, (index, charge)| {
            let of = used.of(index);
            used.with(index, UsedOf { used: of.used.max(charge.taken()), ..of })
        })
    }

    /// The same, where this is said of the budget of this index.
    #[must_use]
    pub fn with(mut self, index: usize, UsedOf { used, ahead }: UsedOf) -> Self {
        let of = UsedOf { used: used.min(Self::MAX), ahead: ahead.min(Self::MAX) };
        self.0.get_mut(index).into_iter().for_each(|known| *known = of);
        self
    }

    /// What is said of the budget of this index.
    #[must_use]
    pub fn of(self, index: usize) -> UsedOf {
        self.0.get(index).copied().unwrap_or_default()
    }

    /// What is said of each, for at least as many as there are charges.
    pub fn iter(self) -> impl Iterator<Item = UsedOf> {
        self.0.into_iter()
    }

    /// What follows the id of a place that leaves: an equals sign, and for each charge two numbers of eight digits to the
    /// base 36: what was used, and in what time the budget is full again at least.
    #[must_use]
    pub fn text(self, charges: Charges) -> SmallVec<[u8; 1 + Self::LEN * Charges::MAX]> {
        let mut text = SmallVec::new();
        text.push(b'=');
        for (of, _) in self.iter().zip(charges.iter()) {
            let mut digits = [0; Self::LEN];
            write_base36(&mut digits[..8], of.used);
            write_base36(&mut digits[8..], of.ahead);
            text.extend_from_slice(&digits);
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::{Charge, Charges, Used, UsedOf};

    fn charge(number: u64, taken: u64, burst: u64) -> Charge {
        Charge::of_hash(number - 1, taken, burst).unwrap()
    }

    #[test]
    fn charges_are_read_back_as_they_were_written() {
        let max = u64::from(Charge::NUMBER_MAX);
        let longest = charge(max, Charge::BURST_MAX, Charge::BURST_MAX);
        let two = Charges::NONE.and(charge(35, 750, 60_000_000)).and(longest);
        assert_eq!(two.iter().collect::<Vec<_>>(), [charge(35, 750, 60_000_000), longest]);
        let text = two.text();
        assert_eq!(&text[..], b"$0000z000000ku000zq0ao9zldr13owbuo013owbuo0");
        assert_eq!(text.len(), Charges::LEN);
        assert_eq!(Charges::parse(&text), Some(two));
        assert_eq!(format!("{:?}", charge(35, 750, 6000)), "0000z 750us≤6000us");
    }

    #[test]
    fn the_numbers_of_tenants_budgets_begin_with_a_letter() {
        let of = |hash| Charge::of_tenant(hash, 750, 6000).unwrap();
        let (first, last) = (of(0), of(u64::from(Charge::TENANTS.1 - Charge::TENANTS.0)));
        assert_eq!(format!("{first:?} {last:?}"), "a0000 750us≤6000us zzzzz 750us≤6000us");
        assert_eq!(of(u64::from(Charge::TENANTS.1 - Charge::TENANTS.0) + 1), first);
        assert!(first.is_tenants() && last.is_tenants() && !charge(35, 1, 9).is_tenants());
        let two = Charges::NONE.and(first).and(last);
        assert_eq!(Charges::parse(&two.text()), Some(two));
    }

    #[test]
    fn of_one_budget_the_first_counts_and_a_third_is_left_out() {
        let two = Charges::NONE.and(charge(3, 1, 9)).and(charge(3, 2, 9)).and(charge(4, 3, 9));
        assert_eq!(two.iter().map(Charge::taken).collect::<Vec<_>>(), [1, 3]);
        assert_eq!(two.and(charge(5, 4, 9)), two);
    }

    #[test]
    fn nothing_else_is_read() {
        for text in [
            "",
            "$",
            "$0000z000000ku00zq0ao",
            "$0000z000000ku00zq0ao00",
            "$00000000000ku00zq0ao0",
            "$0000z000000ku00000000",
            "$0000z000000ku000000k0",
            "$9zlds000000ku00zq0ao0",
            "$9zzzz000000ku00zq0ao0",
            "$0000Z000000ku00zq0ao0",
            "$0000z000000kuzzzzzzzz",
            "$0000z000000ku00zq0ao00000z000000ku00zq0ao0",
            "/0000z000000ku00zq0ao0",
        ] {
            assert_eq!(Charges::parse(text.as_bytes()), None, "{text}");
        }
        assert_eq!(Charge::of_hash(1, 2, 1), None);
        assert_eq!(Charge::of_hash(1, 0, 0), None);
        assert_eq!(Charge::of_hash(1, 0, Charge::BURST_MAX + 1), None);
    }

    #[test]
    fn what_was_used_follows_the_id() {
        let charges = Charges::NONE.and(charge(3, 7, 9)).and(charge(4, 8, 9));
        let used = Used::as_charged(charges);
        assert_eq!(&used.text(charges)[..], b"=00000007000000000000000800000000");
        let of = UsedOf { used: 36, ahead: 37 };
        let used = used.with(1, of).with(2, of);
        assert_eq!(&used.text(charges)[..], b"=00000007000000000000001000000011");
        assert_eq!((used.of(1), used.of(2)), (of, UsedOf::default()));
        let most = used.with(0, UsedOf { used: u64::MAX, ahead: u64::MAX });
        assert_eq!(most.of(0), UsedOf { used: Used::MAX, ahead: Used::MAX });
        let one = Charges::NONE.and(charge(3, 7, 9));
        assert_eq!(&used.text(one)[..], b"=0000000700000000");
    }
}
