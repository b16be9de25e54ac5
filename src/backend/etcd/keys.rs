//! The names of all keys in etcd.

use std::sync::Arc;

use bytes::Bytes;

use crate::protocol::NodeId;
use crate::protocol::liveness::Row;

/// Keys, below a prefix:
///
/// | key | what it is |
/// |---|---|
/// | `s/<name>/L` | a semaphore |
/// | `n/<node>/<seconds>` | the sign of life of a process, for the places whose leases have that length |
/// | `m/<node>` | the last message to a process |
/// | `o` | the overrides |
///
/// Names are [encoded](crate::Name), so that nothing in them reaches this syntax.
#[derive(Clone, Debug)]
pub(super) struct Keys {
    prefix: Arc<str>,
}

/// All keys that begin alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Folder {
    pub(super) key: Bytes,
    pub(super) range_end: Bytes,
}

impl Folder {
    /// The keys that begin with this and a slash.
    fn of(mut path: String) -> Self {
        path.push('/');
        let key = Bytes::from(path.clone());
        // The character behind the slash ends the range.
        path.pop();
        path.push('0');
        Self { key, range_end: path.into() }
    }
}

impl Keys {
    /// `prefix` is one that is [allowed](crate::backend::prefix::is_allowed).
    pub(super) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.into() }
    }

    pub(super) fn semaphore(&self, name: &str) -> Arc<str> {
        format!("{}/s/{name}/L", self.prefix).into()
    }

    /// Returns the name in a semaphore's key.
    pub(super) fn name<'a>(&self, key: &'a str) -> Option<&'a str> {
        let name = key.strip_prefix(&*self.prefix)?.strip_prefix("/s/")?.strip_suffix("/L")?;
        Some(name).filter(|name| !name.contains('/'))
    }

    pub(super) fn semaphores(&self) -> Folder {
        Folder::of(format!("{}/s", self.prefix))
    }

    pub(super) fn sign(&self, Row { node, seconds }: Row) -> Bytes {
        format!("{}/n/{node}/{seconds}", self.prefix).into()
    }

    /// Returns the row whose sign of life has this key.
    pub(super) fn row(&self, key: &[u8]) -> Option<Row> {
        let key = std::str::from_utf8(key).ok()?;
        let (node, seconds) =
            key.strip_prefix(&*self.prefix)?.strip_prefix("/n/")?.split_once('/')?;
        let row = Row { node: NodeId::parse(node.as_bytes())?, seconds: seconds.parse().ok()? };
        Some(row).filter(|row| self.sign(*row) == key)
    }

    /// What is sent to a process.
    pub(super) fn messages(&self, node: NodeId) -> Bytes {
        format!("{}/m/{node}", self.prefix).into()
    }

    pub(super) fn overrides(&self) -> Bytes {
        format!("{}/o", self.prefix).into()
    }

    pub(super) fn signs(&self) -> Folder {
        Folder::of(format!("{}/n", self.prefix))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Name;

    const ROW: Row = Row { node: NodeId::new(u64::MAX), seconds: 30 };

    #[test]
    fn a_semaphore_is_found_by_its_key() {
        let keys = Keys::new("p");
        let name = Name::new("a/b").part("c");
        let key = keys.semaphore(name.as_str());
        assert_eq!(&*key, "p/s/a%2Fb:c/L");
        assert_eq!(keys.name(&key), Some(name.as_str()));
        for other in ["q/s/a/L", "p/s/a/i/x", "p/s/a/b/L", "p/n/a/L", "p/s/a"] {
            assert_eq!(keys.name(other), None, "{other}");
        }
    }

    #[test]
    fn a_sign_of_life_is_found_by_its_key() {
        let keys = Keys::new("p");
        let key = keys.sign(ROW);
        assert_eq!(keys.row(&key), Some(ROW));
        let text = std::str::from_utf8(&key).unwrap();
        for other in [format!("{text}0x"), text.replace("30", "030"), text.replace("p/", "q/")] {
            assert_eq!(keys.row(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_folder_has_its_keys_and_no_others() {
        let keys = Keys::new("p");
        let Folder { key, range_end } = keys.semaphores();
        let has = |name: &str| (&key[..]..&range_end[..]).contains(&name.as_bytes());
        assert!(has(&keys.semaphore("a")) && has(&keys.semaphore("~")));
        assert!(!has("p/s") && !has("p/t") && !has("p/n/a") && !has("p2/s/a/L"));
        assert!(!has(std::str::from_utf8(&keys.sign(ROW)).unwrap()));
    }
}
