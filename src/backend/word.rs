//! What processes say to each other about a semaphore, beside hints.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::ledger::NodeId;

/// A word from one process to another, about one semaphore. As a hint, it may come late, twice or
/// never.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Word {
    /// For how long have you had your permits?
    Asks {
        /// Who wants to know.
        by: NodeId,
    },
    /// The answer to that.
    Tells {
        /// Who has them.
        by: NodeId,
        /// What its process is called: host and process id, without white space.
        process: Arc<str>,
        /// Its places that have a permit, by number, and for how long they have had it, ms.
        held: Vec<(u64, u64)>,
    },
}

/// As it stands in a message.
impl fmt::Display for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Asks { by } => write!(f, "? {by}"),
            Self::Tells { by, process, held } => {
                write!(f, "= {by} {process}")?;
                held.iter().try_for_each(|(n, ms)| write!(f, " {n} {ms}"))
            }
        }
    }
}

/// As it stands in a message.
impl FromStr for Word {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let mut words = text.split(' ');
        let kind = words.next().ok_or(())?;
        let by = words.next().and_then(|by| NodeId::parse(by.as_bytes())).ok_or(())?;
        match kind {
            "?" => Ok(Self::Asks { by }),
            "=" => {
                let process = words.next().ok_or(())?.into();
                let mut held = Vec::new();
                while let Some(n) = words.next() {
                    let ms = words.next().ok_or(())?;
                    held.push((n.parse().map_err(|_| ())?, ms.parse().map_err(|_| ())?));
                }
                Ok(Self::Tells { by, process, held })
            }
            _ => Err(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Word;
    use crate::ledger::NodeId;

    #[test]
    fn what_is_said_is_understood() {
        let by = NodeId::new(7);
        let held = vec![(1, 0), (u64::MAX, u64::MAX)];
        let words = [
            Word::Asks { by },
            Word::Tells { by, process: "host:1".into(), held: Vec::new() },
            Word::Tells { by, process: "host:1".into(), held },
        ];
        for word in words {
            assert_eq!(word.to_string().parse(), Ok(word));
        }
        for other in ["", "?", "? x", "= x", "abc 123", "= 00000000007", "= 00000000007 p 1"] {
            assert_eq!(other.parse::<Word>(), Err(()), "{other}");
        }
    }
}
