//! Messages to a process: hints, changes of overrides, and peer messages.

use crate::backend::PeerMessage;
use crate::protocol::{Hint, Numbered, PlaceId};

/// Parses hints: `<key> <n> <lease_end> ...`, with bound and claim of a place after its number.
pub(super) fn hints(message: &[u8]) -> Option<(&str, impl Iterator<Item = Hint>)> {
    let mut words = std::str::from_utf8(message).ok()?.split(' ');
    let key = words.next()?;
    let pairs = std::iter::from_fn(move || {
        let Numbered { n, bound, claim } = PlaceId::parse_number(words.next()?.as_bytes())?;
        Some(Hint { n, bound, claim, lease_end: words.next()?.parse().ok()? })
    });
    Some((key, pairs))
}

/// Parses a message of another process: `<key> <message>`.
pub(super) fn peer_message(message: &[u8]) -> Option<PeerMessage> {
    let (_, text) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    PeerMessage::parse(text)
}

/// Whether a message says that another process waits: the key is all of it.
pub(super) fn is_recall(message: &[u8]) -> bool {
    !message.contains(&b' ')
}
