//! The overrides as they are stored: lines of text, so that an operator can read them.
//!
//! The first line has the version of this form and of the overrides. Each other line is one record, which begins with its
//! kind: `o` an override, `r` a rate, `p` a pause, with the last resume, `a` an adaptive limit, `v` a revoked place.

use std::fmt::Write;
use std::sync::Arc;

use crate::backend::Overrides;
use crate::error::BackendError;
use crate::protocol::{Adapted, Override, Pause, PauseCause, PlaceId, Rate};

/// What the first line begins with.
const VERSION: &str = "1";

/// Returns the text; `None` if nothing is set.
pub(super) fn encode(set: &Overrides) -> Option<Vec<u8>> {
    let Overrides { version, pauses_version, adapted_version, now: _, .. } = set;
    let mut text = format!("{VERSION} {version} {pauses_version} {adapted_version}\n");
    let mut records = Vec::new();
    for (name, Override { limit, mode, .. }) in &set.names {
        let limit = limit.map_or_else(|| "-".to_owned(), |limit| limit.to_string());
        records.push(format!("o {name} {limit} {}", mode.as_str()));
    }
    records.extend(set.rates.iter().map(|(name, rate)| format!("r {name} {}", rate.text())));
    for name in set.pauses.keys().chain(set.resumed.keys()) {
        let resumed = set.resumed.get(name).copied().unwrap_or_default();
        let none = Pause::new(0, "-".into(), PauseCause::Operator);
        let Pause { until, by, cause, .. } = set.pauses.get(name).unwrap_or(&none);
        records.push(format!("p {name} {until} {resumed} {by} {cause}"));
    }
    for (name, Adapted { limit, lowered, changed }) in &set.adapted {
        records.push(format!("a {name} {limit} {lowered} {changed}"));
    }
    for ((id, name), end) in &set.revoked {
        records.push(format!("v {name} {id} {end}"));
    }
    if records.is_empty() {
        return None;
    }
    records.sort_unstable();
    records.dedup();
    for record in records {
        // Writing to a string does not fail.
        _ = writeln!(text, "{record}");
    }
    Some(text.into_bytes())
}

/// Reads the text. A record that another program wrote is left out.
///
/// # Errors
///
/// If a later version of this crate wrote it: a change by this one could lose what it does not know.
pub(super) fn decode(bytes: &[u8]) -> Result<Overrides, BackendError> {
    let mut lines = std::str::from_utf8(bytes).unwrap_or_default().lines();
    let first = lines.next().unwrap_or_default();
    let mut versions = first.split(' ').skip(1).map(|version| version.parse().ok());
    let mut version = || versions.next().flatten();
    let numbers = (version(), version(), version());
    let (Some(version), Some(pauses_version), Some(adapted_version)) = numbers else {
        return Err(unreadable(first));
    };
    if first.split(' ').next() != Some(VERSION) {
        return Err(unreadable(first));
    }
    let mut set = Overrides { version, pauses_version, adapted_version, ..Overrides::default() };
    for line in lines {
        _ = read(&mut set, line);
    }
    Ok(set)
}

fn read(set: &mut Overrides, line: &str) -> Option<()> {
    let (kind, rest) = line.split_once(' ')?;
    let (name, rest) = rest.split_once(' ')?;
    let name: Arc<str> = name.into();
    match kind {
        "o" => _ = set.names.insert(name, Override::parse(rest)?),
        "r" => _ = set.rates.insert(name, Rate::parse(rest)?),
        "p" => {
            let (pause, resumed) = Pause::parse(rest)?;
            if resumed > 0 {
                set.resumed.insert(Arc::clone(&name), resumed);
            }
            if pause.until > 0 {
                set.pauses.insert(name, pause);
            }
        }
        "a" => {
            let mut numbers = rest.split(' ').map(|number| number.parse::<u64>().ok());
            let limit = u32::try_from(numbers.next()??).ok()?;
            let (lowered, changed) = (numbers.next()??, numbers.next()??);
            set.adapted.insert(name, Adapted { limit, lowered, changed });
        }
        "v" => {
            let (id, end) = rest.split_once(' ')?;
            set.revoked.insert((PlaceId::parse(id.as_bytes())?, name), end.parse().ok()?);
        }
        _ => {}
    }
    Some(())
}

fn unreadable(first: &str) -> BackendError {
    let shown: String = first.chars().take(80).collect();
    BackendError::call(format!(
        "overrides in etcd begin with {shown:?}; expected version {VERSION}"
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::{decode, encode};
    use crate::backend::{Change, Overrides};
    use crate::protocol::{Adaptive, Adjustment, Mode, PauseCause, Rate};

    fn set() -> Overrides {
        let mut set = Overrides::default();
        let (x, y): (Arc<str>, Arc<str>) = ("x".into(), "y@acme".into());
        let pause = |pause_ms| Change::Pause {
            pause_ms,
            slack_ms: 0,
            seen: u64::MAX,
            by: "host:1".into(),
            cause: PauseCause::Status(429),
        };
        let id = "00000000009:1".parse().unwrap();
        let adapt = Change::Adapt {
            range: Adaptive::between(1, 100),
            adjustment: Adjustment::Lower(Default::default()),
        };
        for (name, change) in [
            (&x, Change::Limit(Some(5))),
            (&x, Change::Mode(Mode::Draining)),
            (&y, Change::Limit(Some(7))),
            (&y, Change::Mode(Mode::Paused)),
            (&x, Change::Rate(Rate::parse("600/60000"))),
            (&x, pause(1000)),
            (&y, Change::Resume),
            (&y, pause(2000)),
            (&x, adapt),
            (&x, Change::Revoked { id, keep_ms: 1000, tell: true }),
        ] {
            assert!(set.change(name, change, 1_700_000_000_000));
        }
        set
    }

    #[test]
    fn what_is_written_is_read() {
        let set = set();
        let text = encode(&set).unwrap();
        assert_eq!(decode(&text).unwrap(), set, "{}", String::from_utf8_lossy(&text));
        assert_eq!(encode(&Overrides::default()), None);
    }

    #[test]
    fn a_record_of_another_program_is_left_out() {
        let set = set();
        let mut text = encode(&set).unwrap();
        for other in ["", "x", "o x", "o z 5 ajar", "r z 0", "p z 1", "a z 1 2", "v z 1", "? z 1"] {
            text.extend(format!("{other}\n").into_bytes());
        }
        assert_eq!(decode(&text).unwrap(), set);
    }

    #[test]
    fn another_version_is_refused() {
        for other in ["", "2 1 1 1\n", "1 1 1\n", "1 x 1 1\n", "\u{fffd}"] {
            let error = decode(other.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("expected version 1"), "{error}");
        }
    }
}
