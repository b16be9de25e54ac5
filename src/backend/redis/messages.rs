//! Messages to a process: hints, changes of overrides, and peer messages.

use crate::backend::PeerMessage;
use crate::protocol::{Adapted, Hint, Numbered, PlaceId};

/// Parses hints: `<key> <n> <lease_end> ...`, where `<n>` includes bound and claim of the place.
pub(super) fn hints(message: &[u8]) -> Option<(&str, impl Iterator<Item = Hint>)> {
    let mut words = std::str::from_utf8(message).ok()?.split(' ');
    let key = words.next()?;
    let pairs = std::iter::from_fn(move || {
        let Numbered { n, bound, claim } = PlaceId::parse_number(words.next()?.as_bytes())?;
        Some(Hint { n, bound, claim, lease_end: words.next()?.parse().ok()? })
    });
    Some((key, pairs))
}

/// Parses the message of `lua/adapt.lua`: `<key> <name> <limit> <lowered> <changed>`.
pub(super) fn adapted(message: &[u8]) -> Option<(&str, Adapted)> {
    let (_, text) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    let (name, record) = text.split_once(' ')?;
    Some((name, Adapted::parse(record, u64::MAX)?))
}

/// Parses a message from another process: `<key> <message>`.
pub(super) fn peer_message(message: &[u8]) -> Option<PeerMessage> {
    let (_, text) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    PeerMessage::parse(text)
}

/// Returns whether a message is a recall, which consists of the key alone.
pub(super) fn is_recall(message: &[u8]) -> bool {
    !message.contains(&b' ')
}
