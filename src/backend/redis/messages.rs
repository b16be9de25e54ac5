//! What other processes and scripts send to a process: hints, news of overrides, and peer messages.

use crate::backend::PeerMessage;
use crate::protocol::id::PlaceId;

/// A hint: `<key> <n> <lease_end> ...`.
pub(super) fn hints(message: &[u8]) -> Option<(&str, impl Iterator<Item = (u64, u64)>)> {
    let mut words = std::str::from_utf8(message).ok()?.split(' ');
    let key = words.next()?;
    let pairs = std::iter::from_fn(move || {
        let n = PlaceId::parse_n(words.next()?.as_bytes())?;
        Some((n, words.next()?.parse().ok()?))
    });
    Some((key, pairs))
}

/// A message of another process: `<key> <message>`.
pub(super) fn peer_message(message: &[u8]) -> Option<PeerMessage> {
    let (_, text) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    text.starts_with(['?', '=']).then(|| text.parse().ok())?
}
