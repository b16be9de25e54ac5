//! Names of semaphores, safe to stand in a key.

use std::fmt;

use sha2::{Digest, Sha256};
use smallvec::SmallVec;

/// A part longer than this, once encoded, is replaced by its hash.
const PART_MAX: usize = 64;
/// A name longer than this is replaced by its hash as a whole.
const NAME_MAX: usize = 128;

/// The name of a semaphore: one part or several, of any bytes.
///
/// Bytes other than `A-Z a-z 0-9 . _ -` are written as `%XX`, so that no input reaches the syntax
/// of keys; a part that is longer than 64 bytes when written so is replaced by `#` and its SHA-256
/// in hex, and a whole name of more than 128 by `##` and its own. Two names are equal only if their parts are:
/// different values never share a permit (short of a collision of SHA-256). How a name was put
/// together does not matter.
///
/// ```
/// use tower_semaphore::Name;
///
/// let name = Name::new("tenant").part("acme/eu");
/// assert_eq!(name.as_str(), "tenant:acme%2Feu");
/// ```
#[derive(PartialEq, Eq, Hash)]
pub struct Name {
    // Encoded, so ASCII. Inline as long as it is of usual length.
    text: SmallVec<[u8; 56]>,
    // What stands for it if it is too long.
    short: Option<Box<str>>,
}

impl Name {
    /// A name of one part.
    pub fn new(part: impl AsRef<[u8]>) -> Self {
        let mut name = Self::empty();
        encode(part.as_ref(), &mut name.text);
        name
    }

    /// The name with one more part behind it.
    #[must_use]
    pub fn part(mut self, part: impl AsRef<[u8]>) -> Self {
        self.text.push(b':');
        encode(part.as_ref(), &mut self.text);
        self.bounded()
    }

    /// The name with all parts of another one behind it.
    #[must_use]
    pub fn join(mut self, other: &Self) -> Self {
        if other.text.is_empty() {
            return self;
        }
        if !self.text.is_empty() {
            self.text.push(b':');
        }
        self.text.extend_from_slice(&other.text);
        self.bounded()
    }

    /// A name of no part, which adds nothing to another one.
    pub(crate) const fn empty() -> Self {
        Self { text: SmallVec::new_const(), short: None }
    }

    /// A name that no part can have.
    pub(crate) fn missing() -> Self {
        Self { text: SmallVec::from_slice(b"!"), short: None }
    }

    /// The name that is [stored](Self::as_str) so; `None` for a text that is none.
    ///
    /// ```
    /// use tower_semaphore::Name;
    ///
    /// let name = Name::new("tenant").part("acme/eu");
    /// assert_eq!(Name::from_stored("tenant:acme%2Feu"), Some(name));
    /// assert_eq!(Name::from_stored("acme/eu"), None);
    /// ```
    #[must_use]
    pub fn from_stored(text: &str) -> Option<Self> {
        let known = |c: u8| c.is_ascii_alphanumeric() || b"._-%:#!".contains(&c);
        let fits = !text.is_empty() && text.len() <= NAME_MAX && text.bytes().all(known);
        fits.then(|| Self { text: SmallVec::from_slice(text.as_bytes()), short: None })
    }

    /// The name as it is stored: ASCII, at most 128 bytes.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.short.as_deref().unwrap_or_else(|| std::str::from_utf8(&self.text).unwrap_or_default())
    }

    fn bounded(mut self) -> Self {
        self.short = (self.text.len() > NAME_MAX).then(|| {
            // Two of them, which no part begins with: the text of a long name, sent as one part, is
            // another name.
            let mut short = SmallVec::from_slice(b"#");
            hash(&self.text, &mut short);
            std::str::from_utf8(&short).unwrap_or_default().into()
        });
        self
    }
}

// By hand, because the derived one copies byte by byte.
impl Clone for Name {
    fn clone(&self) -> Self {
        Self { text: SmallVec::from_slice(&self.text), short: self.short.clone() }
    }
}

impl<T: AsRef<[u8]>> From<T> for Name {
    fn from(part: T) -> Self {
        Self::new(part)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self.as_str(), f)
    }
}

fn encode(part: &[u8], out: &mut SmallVec<[u8; 56]>) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let start = out.len();
    if part.is_empty() {
        // A lone `%` is written for nothing else.
        out.push(b'%');
    }
    for byte in part {
        if byte.is_ascii_alphanumeric() || b"._-".contains(byte) {
            out.push(*byte);
        } else {
            out.extend_from_slice(&[
                b'%',
                HEX[usize::from(byte >> 4)],
                HEX[usize::from(byte & 15)],
            ]);
        }
        if out.len() - start > PART_MAX {
            out.truncate(start);
            hash(part, out);
            return;
        }
    }
}

fn hash(bytes: &[u8], out: &mut SmallVec<[u8; 56]>) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    out.push(b'#');
    for byte in Sha256::digest(bytes) {
        out.push(HEX[usize::from(byte >> 4)]);
        out.push(HEX[usize::from(byte & 15)]);
    }
}
