//! Ids of processes and of their places, and their text in Redis.

use std::error::Error;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use smallvec::SmallVec;

use super::base36::read_base36;
use super::bound::Bound;
use super::bound_rate::BoundRate;
use super::charge::Charges;
use super::claim::{Claim, LineId, Tenant};
use super::further::Further;

/// The id of one process's `Semaphore`: 64 random bits.
///
/// Its text has eleven digits in base 62.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u64);

/// The id of a place: `<node>:<n>`, or `~<node>:<n>` for a node without a mailbox; followed by its [`Bound`] if it may
/// wait, and by its [`Claim`] where tenants share the semaphore.
///
/// The process makes it before it sends anything, so that every operation can be repeated, and never reuses it. Its text
/// has at most 146 bytes. Ids are ordered by their texts, as Redis orders members of equal score.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct PlaceId {
    /// The process that the place belongs to.
    pub node: NodeId,
    /// Whether hints could not reach the process when it made the place.
    pub poll_only: bool,
    /// The place's number in that process, below [`PlaceId::N_MAX`].
    pub n: u64,
    /// The limit that it is judged by when its turn comes; `None`: that of the caller. A place that may not wait has
    /// none, unless it has a rate.
    pub bound: Option<Bound>,
    /// Its claim among tenants, or its cost; `None`: it is served in order of arrival.
    pub claim: Option<Claim>,
}

/// An id without its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Numbered {
    /// The place's number.
    pub n: u64,
    /// The limit that it is judged by.
    pub bound: Option<Bound>,
    /// Its claim among tenants.
    pub claim: Option<Claim>,
}

/// The places of one operation. A single place, the usual case, needs no allocation.
pub type Ids = SmallVec<[PlaceId; 1]>;

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const NODE_LEN: usize = 11;
const ID_LEN: usize =
    1 + NODE_LEN + 1 + 11 + BoundRate::LEN + Charges::LEN + Further::LEN + Bound::LEN + Claim::LEN;

impl NodeId {
    /// Creates a node id from a number, which should be random.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    pub(crate) const fn number(self) -> u64 {
        self.0
    }

    /// The text, as backends and ids of places have it.
    #[must_use]
    pub fn text(self) -> [u8; NODE_LEN] {
        let mut text = [0; NODE_LEN];
        let mut rest = self.0;
        for digit in text.iter_mut().rev() {
            *digit = DIGITS[(rest % 62) as usize];
            rest /= 62;
        }
        text
    }
}

/// The text of a place's id.
#[derive(Clone, Debug)]
pub struct IdText {
    text: [u8; ID_LEN],
    len: usize,
}

impl IdText {
    /// The text, in ASCII.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.text[..self.len]
    }
}

impl PlaceId {
    /// The numbers of places are below this: eleven digits in base 36.
    pub const N_MAX: u64 = 36u64.pow(11);
    /// The first id in order.
    pub const FIRST: Self =
        Self { node: NodeId(0), poll_only: false, n: 0, bound: None, claim: None };

    /// Its tenant, if it has one.
    #[must_use]
    pub fn tenant(&self) -> Option<Tenant> {
        self.claim.map(Claim::tenant).filter(|tenant| *tenant != Tenant::NOBODY)
    }

    /// Its claim, if it stands in a line: it has a tenant or further limits. `None`: it is served in order of arrival.
    #[must_use]
    pub fn claim_in_line(&self) -> Option<Claim> {
        self.claim.filter(|claim| claim.is_in_line())
    }

    /// The line in which it stands; `None`: it is served in order of arrival.
    #[must_use]
    pub fn line(&self) -> Option<LineId> {
        self.claim?.line()
    }

    /// The rate that its grant observes, if it has one.
    #[must_use]
    pub fn rate(&self) -> Option<BoundRate> {
        self.bound?.rate
    }

    /// What it takes of budgets.
    #[must_use]
    pub fn charges(&self) -> Charges {
        self.claim.map_or(Charges::NONE, Claim::charges)
    }

    /// The number of permits that it takes.
    #[must_use]
    pub fn cost(&self) -> u32 {
        self.claim.map_or(1, Claim::cost)
    }

    /// The permits that it takes under all of its limits.
    pub(crate) fn work(&self) -> usize {
        self.claim.map_or(1, Claim::work)
    }

    /// The text, as backends have it.
    #[must_use]
    pub fn text(&self) -> IdText {
        self.text_of(&self.node.text())
    }

    /// Like [`text`](Self::text), with the known text of the node.
    #[must_use]
    pub fn text_of(&self, node: &[u8; NODE_LEN]) -> IdText {
        let mut text = [0; ID_LEN];
        let mut len = 0;
        if self.poll_only {
            text[0] = b'~';
            len = 1;
        }
        text[len..len + NODE_LEN].copy_from_slice(node);
        text[len + NODE_LEN] = b':';
        len += NODE_LEN + 1;
        let mut digits = [0; 11];
        let (mut rest, mut at) = (self.n % Self::N_MAX, 11);
        loop {
            at -= 1;
            digits[at] = b"0123456789abcdefghijklmnopqrstuvwxyz"[(rest % 36) as usize];
            rest /= 36;
            if rest == 0 {
                break;
            }
        }
        text[len..len + 11 - at].copy_from_slice(&digits[at..]);
        len += 11 - at;
        if let Some(rate) = self.rate().filter(|_| self.claim.is_some()) {
            text[len..len + BoundRate::LEN].copy_from_slice(&rate.text());
            len += BoundRate::LEN;
        }
        if let Some(claim) = self.claim.filter(|claim| claim.has_charges()) {
            let charges = claim.charges().text();
            text[len..len + charges.len()].copy_from_slice(&charges);
            len += charges.len();
        }
        if let Some(claim) = self.claim.filter(|claim| claim.has_further()) {
            let line = claim.line().map_or(0, LineId::number);
            let further = claim.further().text(line);
            text[len..len + further.len()].copy_from_slice(&further);
            len += further.len();
        }
        if let Some(bound) = self.bound {
            // Only a claim has a class, and so a use for the headroom.
            let width = if self.claim.is_some() { Bound::LEN } else { Bound::LIMIT_LEN };
            text[len..len + width].copy_from_slice(&bound.text()[..width]);
            len += width;
        }
        if let Some(claim) = self.claim {
            text[len..len + Claim::LEN].copy_from_slice(&claim.text());
            len += Claim::LEN;
        }
        IdText { text, len }
    }

    /// Parses an id; `None` for anything that `Display` does not write.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (poll_only, rest) = match text.strip_prefix(b"~") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (node, n) = (rest.get(..NODE_LEN)?, rest.get(NODE_LEN..)?.strip_prefix(b":")?);
        let Numbered { n, bound, claim } = Self::parse_number(n)?;
        let id = Self { node: NodeId::parse(node)?, poll_only, n, bound, claim };
        // One text for each id: no leading zeros, no capitals.
        (id.text().as_bytes() == text).then_some(id)
    }

    /// Reads the part of an id that a hint carries: the number, and what follows it.
    #[must_use]
    pub fn parse_number(text: &[u8]) -> Option<Numbered> {
        let (text, claim) = split_at_mark(text, b'.');
        let (text, bound) = split_at_mark(text, b'-');
        let (text, further) = split_at_mark(text, b'+');
        let further = further.map_or(Some(Further::NONE), Further::parse)?;
        let (n, charges) = split_at_mark(text, b'$');
        let charges = charges.map_or(Some(Charges::NONE), Charges::parse)?;
        let claim = match claim {
            Some(claim) => Some(Claim::parse(claim, further, charges)?),
            None if further.is_empty() && charges.is_empty() => None,
            None => return None,
        };
        let mut bound = match bound {
            Some(bound) => Some(Bound::parse(bound, claim.is_some())?),
            None => None,
        };
        let n = match n.iter().position(|c| *c == b'/') {
            Some(at) => {
                bound.as_mut().filter(|_| claim.is_some())?.rate =
                    Some(BoundRate::parse(&n[at..])?);
                &n[..at]
            }
            None => n,
        };
        Some(Numbered { n: Self::parse_n(n)?, bound, claim })
    }

    fn parse_n(digits: &[u8]) -> Option<u64> {
        if digits.is_empty() { None } else { read_base36(digits) }
    }
}

/// What stands before the mark, and from it on, if it is there.
fn split_at_mark(text: &[u8], mark: u8) -> (&[u8], Option<&[u8]>) {
    match text.iter().position(|c| *c == mark) {
        Some(at) => (&text[..at], Some(&text[at..])),
        None => (text, None),
    }
}

impl NodeId {
    /// Reads a node's text.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.len() != NODE_LEN {
            return None;
        }
        let number = text.iter().try_fold(0u64, |n, c| {
            let digit = DIGITS.binary_search(c).ok()? as u64;
            n.checked_mul(62)?.checked_add(digit)
        })?;
        Some(Self(number))
    }
}

// A number is used once in a process, so the rest need not be hashed.
impl Hash for PlaceId {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.node.hash(state);
        self.n.hash(state);
    }
}

impl PartialOrd for PlaceId {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for PlaceId {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        // As Redis orders their texts. These are written only if processes and digits do not tell. Numbers that no place
        // has come last.
        let texts = || self.text().as_bytes().cmp(other.text().as_bytes());
        let begins = |id: &Self| (id.poll_only, id.node, first_digits(id.n));
        begins(self).cmp(&begins(other)).then_with(texts).then(self.n.cmp(&other.n))
    }
}

/// Orders numbers by their digits to the base 36 from the left. Whatever follows the digits of an id is below any digit.
const fn first_digits(n: u64) -> u64 {
    let mut aligned = n % PlaceId::N_MAX;
    while aligned > 0 && aligned < PlaceId::N_MAX / 36 {
        aligned *= 36;
    }
    aligned
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for PlaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(self.text().as_bytes()).unwrap_or_default())
    }
}

impl fmt::Debug for PlaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PlaceId {
    type Err = ParsePlaceIdError;

    fn from_str(text: &str) -> Result<Self, ParsePlaceIdError> {
        Self::parse(text.as_bytes())
            .ok_or_else(|| ParsePlaceIdError { text: text.chars().take(ID_LEN).collect() })
    }
}

/// A text that is no id of a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParsePlaceIdError {
    text: String,
}

impl fmt::Display for ParsePlaceIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "place id {:?}; expected one that an inspection tells", self.text)
    }
}

impl Error for ParsePlaceIdError {}
