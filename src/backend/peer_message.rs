//! What processes say to each other about a semaphore, beside hints.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::name::Name;
use crate::protocol::claim::Tenant;
use crate::protocol::id::NodeId;

/// A message from one process to another, about one semaphore. As a hint, it may come late, twice or
/// never.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerMessage {
    /// For how long have you had your permits?
    AskHeld {
        /// The process that asks.
        by: NodeId,
    },
    /// The answer to that.
    Held {
        /// The process that answers.
        by: NodeId,
        /// What its process is called: host and process id, without white space.
        process: Arc<str>,
        /// Its places that have a permit, by number, and for how long they have had it, ms.
        held: Vec<(u64, u64)>,
    },
    /// Sent ahead of that, where tenants share the semaphore: what nobody else knows of them.
    Tenants {
        /// The process that answers.
        by: NodeId,
        /// What they are called: names as they are stored.
        names: Vec<(Tenant, Arc<str>)>,
        /// Its places that wait, by number, and for how long they have been waiting, ms.
        waiting: Vec<(u64, u64)>,
    },
    /// Sent ahead of [`Held`](Self::Held), too: the limit of a process's policy, and what it counted.
    Counted {
        /// The process that answers.
        by: NodeId,
        /// Its limit; `None`: it has not used the semaphore lately.
        limit: Option<u32>,
        /// How many of its requests were refused.
        refused: u64,
        /// How many permits were lost to their holders in it.
        lost: u64,
    },
}

impl PeerMessage {
    /// Of how many places a process tells at the most.
    pub const HELD_MAX: usize = 1000;
    /// How many tenants and waiting places a process tells of at the most.
    pub const TENANTS_MAX: usize = 1000;
    /// Bytes of a process's name, at the most: ASCII letters and digits, `.`, `_`, `-` and `:`.
    pub const PROCESS_MAX: usize = 96;
}

/// As it stands in a message.
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
            Self::Counted { by, limit: Some(limit), refused, lost } => {
                write!(f, "# {by} {limit} {refused} {lost}")
            }
            Self::Counted { by, limit: None, refused, lost } => {
                write!(f, "# {by} - {refused} {lost}")
            }
        }
    }
}

/// As it stands in a message.
impl FromStr for PeerMessage {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split(' ');
        let kind = words.next().ok_or(())?;
        let by = words.next().and_then(|by| NodeId::parse(by.as_bytes())).ok_or(())?;
        match kind {
            "?" => Ok(Self::AskHeld { by }),
            "=" => {
                let process = words.next().filter(|name| is_plain(name)).ok_or(())?.into();
                let mut held = Vec::new();
                while let Some(n) = words.next().filter(|_| held.len() < Self::HELD_MAX) {
                    let ms = words.next().ok_or(())?;
                    held.push((n.parse().map_err(|_| ())?, ms.parse().map_err(|_| ())?));
                }
                Ok(Self::Held { by, process, held })
            }
            "&" => {
                let count: usize = words.next().ok_or(())?.parse().map_err(|_| ())?;
                let mut names = Vec::new();
                for _ in 0..count.min(Self::TENANTS_MAX) {
                    let tenant = words.next().and_then(Tenant::parse).ok_or(())?;
                    let name = words.next().and_then(Name::from_stored).ok_or(())?;
                    names.push((tenant, name.as_str().into()));
                }
                let mut waiting = Vec::new();
                while let Some(n) = words.next().filter(|_| waiting.len() < Self::TENANTS_MAX) {
                    let ms = words.next().ok_or(())?;
                    waiting.push((n.parse().map_err(|_| ())?, ms.parse().map_err(|_| ())?));
                }
                Ok(Self::Tenants { by, names, waiting })
            }
            "#" => {
                let limit = match words.next().ok_or(())? {
                    "-" => None,
                    limit => Some(limit.parse().map_err(|_| ())?),
                };
                let mut count = || words.next().ok_or(())?.parse().map_err(|_| ());
                Ok(Self::Counted { by, limit, refused: count()?, lost: count()? })
            }
            _ => Err(()),
        }
    }
}

/// Whether a process can be called so: host and process id. Nothing else is shown to an operator.
fn is_plain(name: &str) -> bool {
    let plain = |c: u8| c.is_ascii_alphanumeric() || b"._:-".contains(&c);
    (1..=PeerMessage::PROCESS_MAX).contains(&name.len()) && name.bytes().all(plain)
}

#[cfg(test)]
mod tests {
    use super::PeerMessage;
    use crate::protocol::claim::Tenant;
    use crate::protocol::id::NodeId;

    #[test]
    fn what_is_said_is_understood() {
        let by = NodeId::new(7);
        let held = vec![(1, 0), (u64::MAX, u64::MAX)];
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
            PeerMessage::Counted { by, limit: None, refused: 0, lost: u64::MAX },
            PeerMessage::Counted { by, limit: Some(u32::MAX), refused: 1, lost: 0 },
        ];
        for message in messages {
            assert_eq!(message.to_string().parse(), Ok(message));
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
            assert_eq!(other.parse::<PeerMessage>(), Err(()), "{other}");
        }
        for name in ["", "<b>", "host\u{202e}:1", &"x".repeat(100)] {
            let message = PeerMessage::Held { by, process: name.into(), held: Vec::new() };
            assert_eq!(message.to_string().parse::<PeerMessage>(), Err(()), "{name}");
        }
    }
}
