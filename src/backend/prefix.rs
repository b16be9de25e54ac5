//! The prefix of all keys of a backend.

/// The longest prefix, in bytes.
const LENGTH_MAX: usize = 40;

/// What a prefix may be.
pub(super) const ALLOWED: &str = "1 to 40 of A-Z a-z 0-9 . _ -";

/// Returns whether a prefix is one of those [`ALLOWED`].
pub(super) fn is_allowed(prefix: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    !prefix.is_empty() && prefix.len() <= LENGTH_MAX && prefix.chars().all(allowed)
}
