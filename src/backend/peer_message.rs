//! Messages between processes about a semaphore, other than hints.

use std::fmt;
use std::sync::Arc;

use crate::name::Name;
use crate::protocol::{NodeId, Rate, Tenant};

/// A message from one process to another about one semaphore. Like a hint, it may arrive late, twice or never.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// Asks how long the receiver has held its permits.
    AskHeld {
        /// The process that asks.
        by: NodeId,
    },
    /// The answer to [`AskHeld`](Self::AskHeld).
    Held {
        /// The process that answers.
        by: NodeId,
        /// The name of the process: host and process id, without white space.
        process: Arc<str>,
        /// Its held places by number, and how long each has been held, in ms.
        held: Vec<(u64, u64)>,
    },
    /// Sent before [`Held`](Self::Held) if tenants share the semaphore: what only this process knows of them.
    Tenants {
        /// The process that answers.
        by: NodeId,
        /// The names of the tenants, as they are stored.
        names: Vec<(Tenant, Arc<str>)>,
        /// Its waiting places by number, and how long each has been waiting, in ms.
        waiting: Vec<(u64, u64)>,
    },
    /// Sent before [`Held`](Self::Held): the limit of the process's policy, its counts, and its rate.
    Counted {
        /// The process that answers.
        by: NodeId,
        /// Its limit; `None` if it has not used the semaphore lately.
        limit: Option<u32>,
        /// How many of its requests were refused.
        refused: u64,
        /// How many of its permits were lost.
        lost: u64,
        /// How many permits it keeps for its next requests; 0 from a process of an older version.
        kept: u64,
        /// The rate in force for its requests; `None` if they have none, it has not used the semaphore lately, or it is
        /// of an older version.
        rate: Option<Rate>,
    },
}

impl PeerMessage {
    /// The most places in one [`Held`](Self::Held).
    pub const HELD_MAX: usize = 1000;
    /// The most tenants, and the most waiting places, in one [`Tenants`](Self::Tenants).
    pub const TENANTS_MAX: usize = 1000;
    /// The longest name of a process, in bytes. It consists of ASCII letters and digits, `.`, `_`, `-` and `:`.
    pub const PROCESS_MAX: usize = 96;
}

/// The text of the message.
impl fmt::Display for PeerMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AskHeld { by } => write!(f, "? {by}"),
            Self::Held { by, process, held } => {
                write!(f, "= {by} {process}")?;
                held.iter().try_for_each(|(n, ms)| write!(f, " {n} {ms}"))
            }
            Self::Tenants { by, names, waiting } => {
                write!(f, "& {by} {}", names.len())?;
                names.iter().try_for_each(|(tenant, name)| write!(f, " {tenant} {name}"))?;
                waiting.iter().try_for_each(|(n, ms)| write!(f, " {n} {ms}"))
            }
            Self::Counted { by, limit, refused, lost, kept, rate } => {
                match limit {
                    Some(limit) => write!(f, "# {by} {limit} {refused} {lost} {kept}")?,
                    None => write!(f, "# {by} - {refused} {lost} {kept}")?,
                }
                rate.map_or(Ok(()), |rate| {
                    write!(f, " {}{}", rate.text(), if rate.is_smooth() { " smooth" } else { "" })
                })
            }
        }
    }
}

impl PeerMessage {
    /// Parses what `Display` writes; `None` for anything else.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut words = text.split(' ');
        let kind = words.next()?;
        let by = words.next().and_then(|by| NodeId::parse(by.as_bytes()))?;
        match kind {
            "?" => Some(Self::AskHeld { by }),
            "=" => {
                let process = words.next().filter(|name| is_plain(name))?.into();
                let mut held = Vec::new();
                while let Some(n) = words.next().filter(|_| held.len() < Self::HELD_MAX) {
                    let ms = words.next()?;
                    held.push((n.parse().ok()?, ms.parse().ok()?));
                }
                Some(Self::Held { by, process, held })
            }
            "&" => {
                let count: usize = words.next()?.parse().ok()?;
                let mut names = Vec::new();
                for _ in 0..count.min(Self::TENANTS_MAX) {
                    let tenant = words.next().and_then(Tenant::parse)?;
                    let name = words.next().and_then(Name::from_stored)?;
                    names.push((tenant, name.as_str().into()));
                }
                let mut waiting = Vec::new();
                while let Some(n) = words.next().filter(|_| waiting.len() < Self::TENANTS_MAX) {
                    let ms = words.next()?;
                    waiting.push((n.parse().ok()?, ms.parse().ok()?));
                }
                Some(Self::Tenants { by, names, waiting })
            }
            "#" => {
                let limit = match words.next()? {
                    "-" => None,
                    limit => Some(limit.parse().ok()?),
                };
                let mut count = || words.next()?.parse().ok();
                let (refused, lost) = (count()?, count()?);
                let kept = count().unwrap_or_default();
                let rate = words.next().and_then(Rate::parse);
                let is_smooth = words.next() == Some("smooth");
                let rate = rate.map(|rate| if is_smooth { rate.spread() } else { rate });
                Some(Self::Counted { by, limit, refused, lost, kept, rate })
            }
            _ => None,
        }
    }
}

/// Returns whether this is a valid name of a process. It comes from any client that may publish, and operators see it.
fn is_plain(name: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"._:-".contains(&c);
    (1..=PeerMessage::PROCESS_MAX).contains(&name.len()) && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::PeerMessage;
    use crate::protocol::{NodeId, Rate, Tenant};

    #[test]
    fn a_message_is_parsed_as_it_was_written() {
        let by = NodeId::new(7);
        let (held, rate) = (vec![(1, 0), (u64::MAX, u64::MAX)], Rate::parse("600/60000"));
        let messages = [
            PeerMessage::AskHeld { by },
            PeerMessage::Held { by, process: "host:1".into(), held: Vec::new() },
            PeerMessage::Held { by, process: "host:1".into(), held: held.clone() },
            PeerMessage::Tenants { by, names: Vec::new(), waiting: Vec::new() },
            PeerMessage::Tenants {
                by,
                names: vec![(Tenant::of_hash(7), "acme%2Feu".into())],
                waiting: held,
            },
            PeerMessage::Counted {
                by,
                limit: None,
                refused: 0,
                lost: u64::MAX,
                kept: 3,
                rate: None,
            },
            PeerMessage::Counted { by, limit: Some(u32::MAX), refused: 1, lost: 0, kept: 0, rate },
            PeerMessage::Counted {
                by,
                limit: None,
                refused: 1,
                lost: 0,
                kept: 0,
                rate: rate.map(Rate::spread),
            },
        ];
        for message in messages {
            assert_eq!(PeerMessage::parse(&message.to_string()), Some(message));
        }
        let older =
            PeerMessage::Counted { by, limit: Some(4), refused: 1, lost: 2, kept: 0, rate: None };
        for text in ["# 00000000007 4 1 2", "# 00000000007 4 1 2 0 0/60000 smooth"] {
            assert_eq!(PeerMessage::parse(text).as_ref(), Some(&older), "{text}");
        }
        for other in [
            "",
            "?",
            "? x",
            "= x",
            "abc 123",
            "= 00000000007",
            "= 00000000007 p 1",
            "&",
            "& 00000000007",
            "& 00000000007 1",
            "& 00000000007 1 00001",
            "& 00000000007 1 0000 x",
            "& 00000000007 1 zzzzz x",
            "& 00000000007 1 00001 <b>",
            "& 00000000007 0 1",
            "# 00000000007",
            "# 00000000007 - 1",
            "# 00000000007 -1 1 1",
            "# 00000000007 4294967296 1 1",
        ] {
            assert_eq!(PeerMessage::parse(other), None, "{other}");
        }
        for name in ["", "<b>", "host\u{202e}:1", &"x".repeat(100)] {
            let message = PeerMessage::Held { by, process: name.into(), held: Vec::new() };
            assert_eq!(PeerMessage::parse(&message.to_string()), None, "{name}");
        }
    }
}
