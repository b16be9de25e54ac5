//! Why bytes are not read.

use std::error::Error;
use std::fmt;

use super::VERSION;
#[cfg(doc)]
use crate::ledger::Ledger;

/// The error of [`Ledger::decode`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DecodeError {
    /// The version is not known, or may not be changed by a process of this one.
    Version {
        /// The version of the bytes.
        version: u8,
        /// The oldest version whose processes may change them.
        oldest_writer: u8,
    },
    /// The bytes end before the ledger does.
    Truncated {
        /// How many there are.
        length: usize,
    },
    /// A value is out of its range, contradicts another, or is not written as `encode` writes it.
    Malformed {
        /// Where the value begins.
        at: usize,
        /// What it is.
        field: &'static str,
        /// The value.
        value: u64,
        /// What is allowed.
        expected: String,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { version, oldest_writer } => write!(
                f,
                "version of a ledger is {version}, to be changed from version {oldest_writer} on; expected {VERSION}"
            ),
            Self::Truncated { length } => {
                write!(f, "length of a ledger is {length} bytes; expected more")
            }
            Self::Malformed { at, field, value, expected } => {
                write!(f, "{field} at byte {at} of a ledger is {value}; expected {expected}")
            }
        }
    }
}

impl Error for DecodeError {}
