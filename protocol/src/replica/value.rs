//! The stored value: a ledger as bytes, behind a header of the replica's own.

use std::error::Error;
use std::fmt;
use std::ops::RangeInclusive;

use crate::id::NodeId;
use crate::ledger::{DecodeError, Ledger, TICKET_MIN};
use crate::row::ROW_BASE;

/// The version of the header.
const VERSION: u8 = 1;

/// The oldest version whose processes may change what is written.
const OLDEST_WRITER: u8 = 1;

/// The length of the header: two versions, flags, time, `helped` and the writer.
pub(super) const HEADER_LEN: usize = 3 + 3 * 8;

/// The flag of a value whose writer could not promote.
const NOT_PROMOTED: u8 = 1;

/// The latest time, µs: no lease end is reached, whatever the clocks say.
pub(super) const TIME_MAX: u64 = ROW_BASE * 1000 - 1;

/// How far ahead of its writer's clock a value may be, µs.
const AHEAD_MAX: u64 = 10_000_000;

/// The lease end of the longest lease, ms.
const LEASE_END_MAX: u64 = ROW_BASE + u32::MAX as u64 * 1000;

/// One semaphore as it is stored under one key of a store.
///
/// A [`Replica`](super::Replica) reads and writes these. An operator's process that lists or revokes places reads and writes
/// them, too, with the same compare-and-swap.
///
/// # Examples
///
/// ```
/// use tower_semaphore_protocol::NodeId;
/// use tower_semaphore_protocol::replica::Value;
///
/// let value = Value { writer: NodeId::new(7), ..Value::default() };
/// assert_eq!(Value::decode(&value.encode())?, value);
/// # Ok::<(), tower_semaphore_protocol::replica::ValueError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Value {
    /// When it was written, µs since 1970 by the writer's clock: see [`next_time`](Self::next_time). Makes tickets and
    /// turns; no place ends by it.
    pub time: u64,
    /// All intents up to this revision are carried out. There are none yet: it is kept as it is.
    pub helped: u64,
    /// The process that wrote it.
    pub writer: NodeId,
    /// Whether the writer granted the permits that were free. One that only removes places does not know the limit.
    pub is_promoted: bool,
    /// The semaphore.
    pub ledger: Ledger,
}

impl Default for Value {
    /// What an absent key stands for.
    fn default() -> Self {
        let (writer, ledger) = (NodeId::new(0), Ledger::new());
        Self { time: 0, helped: 0, writer, is_promoted: true, ledger }
    }
}

impl Value {
    /// The time of the next value, if its writer's clock is at `clock`, µs since 1970.
    ///
    /// It is later than the time of this value, unless that is more than 10 s ahead of the clock: then a clock was wrong,
    /// and rates and budgets would stand still until it is reached.
    #[must_use]
    pub fn next_time(&self, clock: u64) -> u64 {
        // Tickets are times, and below these are lease ends.
        let clock = clock.clamp(TICKET_MIN, TIME_MAX);
        if self.time > clock + AHEAD_MAX {
            return clock;
        }
        clock.max(self.time + 1).min(TIME_MAX)
    }

    /// When the key is of no further use, µs since 1970, if no place joins until then: what its rates and budgets remember
    /// counts no more. `None` while there are places.
    #[must_use]
    pub fn over_at(&self) -> Option<u64> {
        let has_places = self.ledger.places().next().is_some();
        (!has_places).then(|| self.ledger.kept_until().unwrap_or(0))
    }

    /// Whether it says the same as an absent key.
    pub(super) fn is_over(&self) -> bool {
        self.over_at().is_some_and(|at| at <= self.time)
    }

    /// The value as bytes. Equal semaphores have equal bytes behind the header.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let flags = if self.is_promoted { 0 } else { NOT_PROMOTED };
        let mut out = vec![VERSION, OLDEST_WRITER, flags];
        for number in [self.time, self.helped, self.writer.number()] {
            out.extend(number.to_le_bytes());
        }
        self.ledger.encode(&mut out);
        out
    }

    /// The process that wrote a value, without reading the rest of it. `None` if its header is not known.
    #[must_use]
    pub fn writer_of(bytes: &[u8]) -> Option<NodeId> {
        let number = bytes.get(HEADER_LEN - 8..)?.first_chunk()?;
        let is_known = bytes.starts_with(&[VERSION]);
        is_known.then(|| NodeId::new(u64::from_le_bytes(*number)))
    }

    /// Reads what [`encode`](Self::encode) writes.
    ///
    /// # Errors
    ///
    /// [`ValueError::Version`], or [`ValueError::Ledger`] with [`DecodeError::Version`], if a process of this version may
    /// not change the value. Any other error if the bytes are not as `encode` writes them.
    pub fn decode(bytes: &[u8]) -> Result<Self, ValueError> {
        if let [version, oldest_writer, ..] = *bytes
            && (version, oldest_writer) != (VERSION, OLDEST_WRITER)
        {
            return Err(ValueError::Version { version, oldest_writer });
        }
        let truncated = ValueError::Truncated { length: bytes.len() };
        let (header, ledger) = bytes.split_at_checked(HEADER_LEN).ok_or(truncated)?;
        let number = |at: usize| {
            let bytes = header[3 + 8 * at..].first_chunk();
            bytes.map_or(0, |bytes| u64::from_le_bytes(*bytes))
        };
        let flags = within("flags", header[2].into(), 0..=NOT_PROMOTED.into())?;
        let value = Self {
            time: within("time", number(0), 0..=TIME_MAX)?,
            helped: number(1),
            writer: NodeId::new(number(2)),
            is_promoted: flags == 0,
            ledger: Ledger::decode(ledger).map_err(ValueError::Ledger)?,
        };
        for (_, lease_end, _) in value.ledger.places() {
            within("lease end", lease_end, ROW_BASE + 1000..=LEASE_END_MAX)?;
            within("milliseconds of a lease end", lease_end % 1000, 0..=0)?;
        }
        Ok(value)
    }
}

fn within(
    field: &'static str,
    value: u64,
    expected: RangeInclusive<u64>,
) -> Result<u64, ValueError> {
    if expected.contains(&value) {
        return Ok(value);
    }
    Err(ValueError::Malformed { field, value, expected: (*expected.start(), *expected.end()) })
}

/// The error of [`Value::decode`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ValueError {
    /// The version is not known, or may not be changed by a process of this one.
    Version {
        /// The version of the bytes.
        version: u8,
        /// The oldest version whose processes may change them.
        oldest_writer: u8,
    },
    /// The bytes end within the header.
    Truncated {
        /// How many there are.
        length: usize,
    },
    /// A number is out of its range.
    Malformed {
        /// What it is.
        field: &'static str,
        /// The number.
        value: u64,
        /// The lowest and the highest that are allowed.
        expected: (u64, u64),
    },
    /// The ledger behind the header is not read.
    Ledger(DecodeError),
}

impl fmt::Display for ValueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { version, oldest_writer } => write!(
                f,
                "version of a semaphore is {version}, to be changed from version {oldest_writer} on; expected {VERSION}"
            ),
            Self::Truncated { length } => {
                write!(f, "length of a semaphore is {length} bytes; expected more")
            }
            Self::Malformed { field, value, expected: (from, to) } => {
                write!(f, "{field} of a semaphore is {value}; expected {from} to {to}")
            }
            Self::Ledger(error) => error.fmt(f),
        }
    }
}

impl Error for ValueError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Ledger(error) => Some(error),
            _ => None,
        }
    }
}
