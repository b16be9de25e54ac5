//! Limits beside that of the semaphore, each of which a request counts under, too.

use std::fmt;

use smallvec::SmallVec;

use super::base36::{read_base36, write_base36};
use super::claim::Tenant;

/// A limit beside that of the semaphore, such as that of a route, and how many permits may be in use under it.
///
/// The number is a keyed hash of the limit's name and value, 24 bits wide. Two limits with one number are one; for two the
/// chance is 1 in 1.6·10⁷.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FurtherLimit {
    number: u32,
    cap: u32,
}

impl FurtherLimit {
    /// The highest number.
    pub const NUMBER_MAX: u32 = (1 << 24) - 1;
    /// The highest cap, permits.
    pub const CAP_MAX: u32 = (1 << 24) - 1;
    /// Bytes of its text.
    const LEN: usize = 10;

    /// The limit whose name and value have this hash, with a cap that is clamped to 1 to 2²⁴ − 1.
    #[must_use]
    #[expect(clippy::cast_possible_truncation, reason = "the remainder has 24 bits")]
    pub const fn of_hash(hash: u64, cap: u32) -> Self {
        let number = (hash % Self::NUMBER_MAX as u64) as u32 + 1;
        let cap = match cap {
            0 => 1,
            cap if cap > Self::CAP_MAX => Self::CAP_MAX,
            cap => cap,
        };
        Self { number, cap }
    }

    /// The number, from 1 to [`NUMBER_MAX`](Self::NUMBER_MAX).
    #[must_use]
    pub const fn number(self) -> u32 {
        self.number
    }

    /// How many permits may be in use under it.
    #[must_use]
    pub const fn cap(self) -> u32 {
        self.cap
    }

    /// Number and cap to the base 36, five digits each.
    fn text(self) -> [u8; Self::LEN] {
        let mut text = [0; Self::LEN];
        write_base36(&mut text[..5], u64::from(self.number));
        write_base36(&mut text[5..], u64::from(self.cap));
        text
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (number, cap) = text.split_at_checked(5)?;
        let read = |digits| u32::try_from(read_base36(digits)?).ok();
        let limit = Self { number: read(number)?, cap: read(cap)? };
        let in_range = (1..=Self::NUMBER_MAX).contains(&limit.number)
            && (1..=Self::CAP_MAX).contains(&limit.cap);
        (in_range && limit.text() == *text).then_some(limit)
    }
}

/// Such as `01a2b≤20`: the number to the base 36, and the cap.
impl fmt::Debug for FurtherLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut digits = [0; 5];
        write_base36(&mut digits, u64::from(self.number));
        write!(f, "{}≤{}", std::str::from_utf8(&digits).unwrap_or_default(), self.cap)
    }
}

/// Up to three further limits of a request.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Further {
    // Three words and no length: a part of every place's id.
    limits: [Option<Packed>; Self::MAX],
}

/// A limit in one word: the number, then the cap in 24 bits.
type Packed = std::num::NonZeroU64;

impl Further {
    /// The most limits of a request.
    pub const MAX: usize = 3;
    /// The most bytes of its text.
    pub(crate) const LEN: usize = 6 + Self::MAX * FurtherLimit::LEN;

    /// No limit.
    pub const NONE: Self = Self { limits: [None; Self::MAX] };

    /// These limits and one more. Of two with one number the lower cap counts, in the place of the first. A fourth is left
    /// out.
    #[must_use]
    pub fn and(mut self, limit: FurtherLimit) -> Self {
        for slot in &mut self.limits {
            match slot.map(unpack) {
                Some(known) if known.number != limit.number => continue,
                Some(known) => {
                    *slot = pack(FurtherLimit { cap: known.cap.min(limit.cap), ..limit })
                }
                None => *slot = pack(limit),
            }
            break;
        }
        self
    }

    /// The limits, in the order in which they were named.
    pub fn iter(self) -> impl Iterator<Item = FurtherLimit> {
        self.limits.into_iter().map_while(|limit| limit.map(unpack))
    }

    /// Whether there is none.
    #[must_use]
    pub const fn is_empty(self) -> bool {
        self.limits[0].is_none()
    }

    /// Its line among those with further limits: a hash of the tenant and the numbers of the limits, 24 bits wide.
    pub(crate) fn line_of(self, tenant: Tenant) -> u32 {
        // Multiplied by 2⁶⁴ ÷ φ, as Knuth's multiplicative hashing has it (The Art of Computer Programming 3, 6.4).
        const FACTOR: u64 = 0x9e37_79b9_7f4a_7c15;
        let numbers = self.iter().map(|limit| u64::from(limit.number));
        let mix = |hash: u64, number: u64| (hash ^ number).wrapping_mul(FACTOR).rotate_left(29);
        let hash = numbers.fold(mix(FACTOR, u64::from(tenant.number())), mix);
        (hash >> 40) as u32
    }

    /// A plus, the number of the line in five digits to the base 36, and the text of each limit. It stands before the bound,
    /// or else the claim.
    pub(crate) fn text(self, line: u32) -> SmallVec<[u8; Self::LEN]> {
        let mut digits = [0; 5];
        write_base36(&mut digits, u64::from(line));
        let mut text = SmallVec::new();
        text.push(b'+');
        text.extend_from_slice(&digits);
        self.iter().for_each(|limit| text.extend_from_slice(&limit.text()));
        text
    }

    /// Reads what [`text`](Self::text) writes; the caller compares the line.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let limits = text.strip_prefix(b"+")?.get(5..)?;
        let mut further = Self::NONE;
        let mut count = 0;
        for limit in limits.chunks(FurtherLimit::LEN) {
            further = further.and(FurtherLimit::parse(limit)?);
            count += 1;
        }
        (count > 0 && further.iter().count() == count).then_some(further)
    }
}

fn pack(limit: FurtherLimit) -> Option<Packed> {
    Packed::new(u64::from(limit.number) << 24 | u64::from(limit.cap))
}

#[expect(clippy::cast_possible_truncation, reason = "24 bits each")]
fn unpack(packed: Packed) -> FurtherLimit {
    let packed = packed.get();
    FurtherLimit { number: (packed >> 24) as u32, cap: packed as u32 & FurtherLimit::CAP_MAX }
}

impl fmt::Debug for Further {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::{Further, FurtherLimit};
    use crate::claim::Tenant;

    fn limit(number: u64, cap: u32) -> FurtherLimit {
        FurtherLimit::of_hash(number - 1, cap)
    }

    #[test]
    fn limits_are_read_back_as_they_were_written() {
        let max = u64::from(FurtherLimit::NUMBER_MAX);
        let further = Further::NONE.and(limit(35, 20)).and(limit(max, u32::MAX)).and(limit(1, 0));
        let all: Vec<_> = further.iter().collect();
        assert_eq!(all, [limit(35, 20), limit(max, FurtherLimit::CAP_MAX), limit(1, 1)]);
        let text = further.text(7);
        assert_eq!(&text[..], b"+000070000z0000k9zldr9zldr0000100001");
        assert_eq!(text.len(), Further::LEN);
        assert_eq!(Further::parse(&text), Some(further));
        assert_eq!(format!("{further:?}"), "[0000z≤20, 9zldr≤16777215, 00001≤1]");
    }

    #[test]
    fn of_one_number_the_lower_cap_counts_and_a_fourth_limit_is_left_out() {
        let one = Further::NONE.and(limit(3, 20)).and(limit(4, 5)).and(limit(3, 7));
        assert_eq!(one, Further::NONE.and(limit(3, 7)).and(limit(4, 5)));
        let three = one.and(limit(5, 5));
        assert_eq!(three.and(limit(6, 1)), three);
        assert_eq!(three.and(limit(5, 1)).iter().last(), Some(limit(5, 1)));
    }

    #[test]
    fn nothing_else_is_read() {
        for text in [
            "",
            "+",
            "+00007",
            "+000070000z0000",
            "+000070000z0000k0",
            "+000070000000001",
            "+000070000100000",
            "+000070000A00001",
            "-000070000z0000k",
            "+00007zzzzz00001",
            "+000070000100001000010000100001",
            "+0000700001000010000200001000030000100004",
        ] {
            assert_eq!(Further::parse(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn a_line_is_of_a_tenant_and_the_limits_and_not_of_their_caps() {
        let [a, b] = [1, 2].map(Tenant::of_hash);
        let one = Further::NONE.and(limit(3, 20));
        let two = one.and(limit(4, 5));
        let lines = [one.line_of(a), one.line_of(b), two.line_of(a), one.line_of(Tenant::NOBODY)];
        for (i, line) in lines.iter().enumerate() {
            assert!(*line <= FurtherLimit::NUMBER_MAX && !lines[..i].contains(line), "{lines:?}");
        }
        assert_eq!(one.line_of(a), Further::NONE.and(limit(3, 1)).line_of(a));
    }
}
