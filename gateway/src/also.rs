//! Further limits of a rule.

use std::collections::HashSet;

use serde::Deserializer;
use tower_semaphore::limit::{ConcurrencyLimitBuilder, HeaderKey, PathKey, PeerIpKey};
use tower_semaphore::{Ask, Limit};

use super::args::{self, Key};
use super::file;

/// A limit beside that of the key: its name, what it is counted by, and its permits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Also {
    pub(crate) name: String,
    pub(crate) by: Key,
    pub(crate) permits: u32,
}

/// Reads `NAME:SPEC=N`, such as `model:header:x-model=10`.
pub(crate) fn also(text: &str) -> Result<Also, String> {
    const ALLOWED: &str = "expected NAME:SPEC=N, such as route:path=20 or model:header:x-model=10";
    let (rest, permits) = text.rsplit_once('=').ok_or(ALLOWED)?;
    let (name, spec) = rest.split_once(':').ok_or(ALLOWED)?;
    let by = args::tenant(spec)?;
    Ok(Also { name: name.to_owned(), by, permits: args::in_range(permits, 1, u32::MAX)? })
}

impl Also {
    pub(crate) fn apply(&self, builder: ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder {
        let (name, cap) = (&*self.name, Limit::Permits(self.permits));
        match &self.by {
            // No text of it is read.
            Key::Global => builder,
            Key::Path => builder.also(name, PathKey, cap),
            Key::PeerIp => builder.also(name, PeerIpKey::from_extension(), cap),
            Key::Header(header) => builder.also(name, HeaderKey::new(header.clone()), cap),
        }
    }
}

/// Checks further limits against each other.
pub(crate) fn check(also: &[Also]) -> Result<(), String> {
    if also.len() > Ask::MAX_FURTHER {
        return Err(format!(
            "{} further limits; expected at most {}",
            also.len(),
            Ask::MAX_FURTHER
        ));
    }
    let mut seen = HashSet::new();
    match also.iter().find(|one| !seen.insert(&one.name)) {
        Some(twice) => Err(format!("{:?} is given twice; expected each name once", twice.name)),
        None => Ok(()),
    }
}

pub(crate) fn from_file<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<Also>, D::Error> {
    file::list(d, "also", "route:path=20", also)
}

#[cfg(test)]
mod tests {
    use super::{Also, also, check};
    use crate::args::Key;

    #[test]
    fn a_further_limit_is_read() {
        let route = Also { name: "route".into(), by: Key::Path, permits: 20 };
        assert_eq!(also("route:path=20").as_ref(), Ok(&route));
        let model = also("model:header:x-model=10").unwrap();
        assert_eq!((model.name.as_str(), model.permits), ("model", 10));
        assert!(matches!(model.by, Key::Header(name) if name == "x-model"));
        assert!(also("client:peer-ip=4294967295").is_ok());
        assert_eq!(check(&[route.clone(), also("model:path=1").unwrap()]), Ok(()));
        assert!(check(&[route.clone(), route.clone()]).unwrap_err().contains("\"route\""));
        let many = ["a", "b", "c", "d"].map(|name| Also { name: name.into(), ..route.clone() });
        assert!(check(&many).unwrap_err().contains("at most 3"));
    }

    #[test]
    fn nothing_else_is_one() {
        for text in ["", "route", "route=20", "route:path", "route:path=", "route:path=0"] {
            assert!(also(text).is_err(), "{text}");
        }
        for text in ["route:global=2", "route:header:=2", "route:path=-1", "r:header:a b=1"] {
            assert!(also(text).is_err(), "{text}");
        }
    }
}
