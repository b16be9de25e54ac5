//! Names of semaphores, safe to use in a key.

use std::fmt;
use std::hash::{Hash, Hasher};

use sha2::{Digest, Sha256};
use smallvec::SmallVec;

/// A part longer than this, once encoded, is replaced by its hash.
const PART_MAX: usize = 64;
/// A name longer than this is replaced by its hash as a whole.
const NAME_MAX: usize = 128;
/// A SHA-256 in hex.
const HASH_LEN: usize = 64;

/// The name of a semaphore: one part or several, of any bytes.
///
/// Bytes other than `A-Z a-z 0-9 . _ -` are encoded as `%XX`, so no input reaches the syntax of keys. A part that is
/// longer than 64 bytes when encoded is replaced by `#` and its SHA-256 in hex, and a whole name of more than 128
/// bytes by `##` and its SHA-256. Two names are equal only if their parts are: different values never share a permit,
/// short of a collision of SHA-256. How the parts were appended does not matter. Names are compared by their
/// [stored](Self::as_str) text, so a name that is [parsed](Self::from_stored) from the backend equals the original.
///
/// # Examples
///
/// ```
/// use tower_semaphore::Name;
///
/// let name = Name::new("tenant").part("acme/eu");
/// assert_eq!(name.as_str(), "tenant:acme%2Feu");
/// ```
pub struct Name {
    // Encoded, so it is ASCII. Inline at usual lengths.
    text: SmallVec<[u8; 56]>,
    // Stored instead of a text that is too long. The text is kept because more parts may follow.
    short: Option<Box<str>>,
}

impl Name {
    /// Creates a name of one part.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Name;
    ///
    /// assert_eq!(Name::new("acme/eu").as_str(), "acme%2Feu");
    /// ```
    pub fn new(part: impl AsRef<[u8]>) -> Self {
        let mut name = Self::empty();
        encode(part.as_ref(), &mut name.text);
        name
    }

    /// Appends a part.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Name;
    ///
    /// let name = Name::new("route").part("POST").part("/chat");
    /// assert_eq!(name.as_str(), "route:POST:%2Fchat");
    /// ```
    #[must_use]
    pub fn part(mut self, part: impl AsRef<[u8]>) -> Self {
        self.separate();
        encode(part.as_ref(), &mut self.text);
        self.bounded()
    }

    /// Appends all parts of another name.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Name;
    ///
    /// let tenant = Name::new("acme").part("eu");
    /// assert_eq!(Name::new("tenant").join(&tenant).as_str(), "tenant:acme:eu");
    /// ```
    #[must_use]
    pub fn join(mut self, other: &Self) -> Self {
        if other.text.is_empty() {
            return self;
        }
        self.separate();
        self.text.extend_from_slice(&other.text);
        self.bounded()
    }

    /// Appends a separator, if there is a part before it.
    fn separate(&mut self) {
        if !self.text.is_empty() {
            self.text.push(b':');
        }
    }

    /// Creates a name without parts. Joining it to another name changes nothing.
    pub(crate) const fn empty() -> Self {
        Self { text: SmallVec::new_const(), short: None }
    }

    /// Returns whether it has no part.
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty()
    }

    /// Creates the name that stands for a missing one. No part is encoded as this.
    pub(crate) fn missing() -> Self {
        Self { text: SmallVec::from_slice(b"!"), short: None }
    }

    /// Parses a name from its [stored](Self::as_str) text. Returns `None` for any other text.
    ///
    /// The result equals the name that was stored, whatever its length. The parts of a name that was replaced by its
    /// hash cannot be restored: appending a part to the result makes another name than appending it to the original.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Name;
    ///
    /// let name = Name::new("tenant").part("acme/eu");
    /// assert_eq!(Name::from_stored("tenant:acme%2Feu"), Some(name));
    /// assert_eq!(Name::from_stored("acme/eu"), None);
    ///
    /// let long = Name::new("a".repeat(64)).part("b".repeat(64));
    /// assert_eq!(Name::from_stored(long.as_str()), Some(long));
    /// ```
    #[must_use]
    pub fn from_stored(text: &str) -> Option<Self> {
        let fits = text.len() <= NAME_MAX && text.split(':').all(is_part);
        fits.then(|| Self { text: SmallVec::from_slice(text.as_bytes()), short: None })
    }

    /// Returns the name as it is stored: ASCII, at most 128 bytes.
    #[must_use]
    pub fn as_str(&self) -> &str {
        self.short.as_deref().unwrap_or_else(|| std::str::from_utf8(&self.text).unwrap_or_default())
    }

    fn stored(&self) -> &[u8] {
        self.short.as_deref().map_or(&self.text, str::as_bytes)
    }

    fn bounded(mut self) -> Self {
        self.short = (self.text.len() > NAME_MAX).then(|| {
            // No part begins with `##`, so a client that sends this text as a part gets another name.
            let mut short = SmallVec::from_slice(b"#");
            hash(&self.text, &mut short);
            std::str::from_utf8(&short).unwrap_or_default().into()
        });
        self
    }
}

// Not derived, because the derived `Clone` copies byte by byte.
impl Clone for Name {
    fn clone(&self) -> Self {
        Self { text: SmallVec::from_slice(&self.text), short: self.short.clone() }
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.stored() == other.stored()
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.stored().hash(state);
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
        // No other part is encoded as a lone `%`.
        out.push(b'%');
    }
    for byte in part {
        if is_plain(*byte) {
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

const fn is_plain(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-')
}

/// Returns whether this is the text of a part as [`encode`] writes it, the mark of a missing name, or the hash of a
/// whole name.
fn is_part(text: &str) -> bool {
    if let Some(hash) = text.strip_prefix('#') {
        let hash = hash.strip_prefix('#').unwrap_or(hash);
        let is_hex = |c: u8| matches!(c, b'0'..=b'9' | b'a'..=b'f');
        return hash.len() == HASH_LEN && hash.bytes().all(is_hex);
    }
    matches!(text, "%" | "!") || (1..=PART_MAX).contains(&text.len()) && is_encoded(text.as_bytes())
}

fn is_encoded(mut text: &[u8]) -> bool {
    let digit = |c: u8| match c {
        b'0'..=b'9' => Some(c - b'0'),
        b'A'..=b'F' => Some(c - b'A' + 10),
        _ => None,
    };
    loop {
        text = match text {
            [] => return true,
            [b'%', high, low, rest @ ..] => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) if !is_plain(high << 4 | low) => rest,
                _ => return false,
            },
            [plain, rest @ ..] if is_plain(*plain) => rest,
            _ => return false,
        };
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
