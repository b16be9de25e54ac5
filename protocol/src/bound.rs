//! The limit that a place is judged by.

use super::base36::{read_base36, write_base36};
use super::bound_rate::BoundRate;

/// The limit, the headroom and the rate of the policy that a place was requested with.
///
/// A bound is a part of the [`PlaceId`](super::PlaceId), so whichever process grants the place judges it by the policy of
/// its own request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Bound {
    /// Permits of the semaphore.
    pub limit: u32,
    /// The permits that are reserved for requests of class 0.
    pub headroom: u32,
    /// How many permits may be granted within a time. Only places with a claim have one.
    pub rate: Option<BoundRate>,
}

impl Bound {
    /// Bytes of its text, and of the limit alone.
    pub(crate) const LEN: usize = 15;
    pub(crate) const LIMIT_LEN: usize = 8;

    /// Returns how many permits may be in use once a request of this class is granted.
    #[must_use]
    pub const fn room(self, class: u8) -> u64 {
        let headroom = if class == 0 { 0 } else { self.headroom };
        self.limit.saturating_sub(headroom) as u64
    }

    /// A hyphen, then limit and headroom to the base 36, seven digits each. Scripts cut it by position. The rate stands
    /// before it.
    pub(crate) fn text(self) -> [u8; Self::LEN] {
        let mut text = [b'-'; Self::LEN];
        write_base36(&mut text[1..Self::LIMIT_LEN], u64::from(self.limit));
        write_base36(&mut text[Self::LIMIT_LEN..], u64::from(self.headroom));
        text
    }

    /// Reads what [`text`](Self::text) writes, or its first part, if the id has no claim.
    pub(crate) fn parse(text: &[u8], has_claim: bool) -> Option<Self> {
        let length = if has_claim { Self::LEN } else { Self::LIMIT_LEN };
        let digits = text.strip_prefix(b"-").filter(|_| text.len() == length)?;
        let (limit, headroom) = digits.split_at(Self::LIMIT_LEN - 1);
        let number = |digits| u32::try_from(read_base36(digits)?).ok();
        Some(Self { limit: number(limit)?, headroom: number(headroom)?, rate: None })
    }
}

#[cfg(test)]
mod tests {
    use super::Bound;

    #[test]
    fn a_bound_is_read_back_as_it_was_written() {
        for (limit, headroom) in [(0, 0), (10, 2), (u32::MAX, u32::MAX)] {
            let bound = Bound { limit, headroom, rate: None };
            assert_eq!(Bound::parse(&bound.text(), true), Some(bound));
            let limit_alone = &bound.text()[..Bound::LIMIT_LEN];
            assert_eq!(Bound::parse(limit_alone, false), Some(Bound { headroom: 0, ..bound }));
        }
        assert_eq!(Bound { limit: 46, headroom: 2, rate: None }.text(), *b"-000001a0000002");
    }

    #[test]
    fn nothing_else_is_read() {
        let long: &[u8] = b"-000000a0000000";
        for (text, has_claim) in [
            (&b""[..], false),
            (b"-", false),
            (b"-00000a", false),
            (b"-0000000a", false),
            (b"-zzzzzzz", false),
            (b":000000a", false),
            (b"-000000 ", false),
            (b"-000000a", true),
            (long, false),
        ] {
            assert_eq!(Bound::parse(text, has_claim), None, "{text:?}");
        }
        assert!(Bound::parse(long, true).is_some());
    }
}
