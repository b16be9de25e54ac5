//! Queries and messages, which belong to no place, as scripts and commands, and the decoding of their replies.

use std::sync::Arc;

use redis::{Cmd, Value, cmd};

use super::scripts::{self, By};
use super::values::{listing, number, pairs, unexpected};
use crate::backend::{Change, Listing, Names, Overrides, PeerMessage};
use crate::error::BackendError;
use crate::protocol::{NodeId, Override, Pause, PlaceId};

/// The command of a query, and the decoder of its reply.
pub(super) struct QueryCommand<T> {
    pub(super) command: Box<dyn Fn(By) -> Cmd + Send + Sync>,
    read: Box<Read<T>>,
}

type Read<T> = dyn Fn(&Value) -> Option<T> + Send + Sync;

impl<T> QueryCommand<T> {
    fn new(
        command: impl Fn(By) -> Cmd + Send + Sync + 'static,
        read: impl Fn(&Value) -> Option<T> + Send + Sync + 'static,
    ) -> Self {
        Self { command: Box::new(command), read: Box::new(read) }
    }

    /// Decodes the reply.
    ///
    /// # Errors
    ///
    /// If it is not a reply of this version of the scripts.
    pub(super) fn read(&self, value: &Value) -> Result<T, BackendError> {
        (self.read)(value).ok_or_else(|| unexpected(value))
    }
}

pub(super) fn inspect(key: &Arc<str>, most: u32) -> QueryCommand<Listing> {
    let key = Arc::clone(key);
    QueryCommand::new(
        move |by| scripts::call(&scripts::INSPECT, by, &key, 1, 10).arg(most).take(),
        move |value| match value {
            Value::Array(items) => listing(items, most),
            _ => None,
        },
    )
}

/// Lists the keys of semaphores; `pattern` is the key of all names. No character of a prefix is special in a pattern.
pub(super) fn list(pattern: &Arc<str>, from: u64, most: u32) -> QueryCommand<Names> {
    let (pattern, of) = (Arc::clone(pattern), Arc::clone(pattern));
    QueryCommand::new(
        move |_| {
            let mut scan = cmd("SCAN");
            scan.arg(from).arg("MATCH").arg(&*pattern).arg("COUNT").arg(most);
            // The key of the overrides matches the pattern, too; it is a hash.
            scan.arg("TYPE").arg("zset").take()
        },
        move |value| match value {
            Value::Array(items) => names(&of, items),
            _ => None,
        },
    )
}

pub(super) fn overrides(key: &Arc<str>, known: u64) -> QueryCommand<Option<Overrides>> {
    let key = Arc::clone(key);
    QueryCommand::new(
        move |by| scripts::call(&scripts::OVERRIDES, by, &key, 1, 20).arg(known).take(),
        |value| match value {
            Value::Int(1) => Some(None),
            Value::Array(reply) => match &**reply {
                [now, Value::Array(items)] => {
                    Some(Some(Overrides { now: number(now)?, ..read_overrides(items) }))
                }
                _ => None,
            },
            _ => None,
        },
    )
}

pub(super) fn set_override(key: &Arc<str>, name: &Arc<str>, change: Change) -> QueryCommand<()> {
    let (key, name) = (Arc::clone(key), Arc::clone(name));
    QueryCommand::new(
        move |by| {
            let mut command = scripts::call(&scripts::OVERRIDE, by, &key, 9, 200 + name.len());
            command.arg(&*name);
            match &change {
                Change::Limit(None) => command.arg(&["-", "=", "", "0"]),
                Change::Limit(Some(limit)) => command.arg(limit).arg(&["=", "", "0"]),
                Change::Mode(mode) => command.arg(&["=", mode.as_str(), "", "0"]),
                Change::Pause { pause_ms, .. } => command.arg(&["=", "=", "-"]).arg(pause_ms),
                Change::Revoked { id, keep_ms, .. } => {
                    command.arg(&["=", "="]).arg(id.text().as_bytes()).arg(keep_ms)
                }
            };
            command.arg(Overrides::MOST).arg(u8::from(change.is_told()));
            match &change {
                Change::Pause { slack_ms, by, cause, .. } => {
                    command.arg(slack_ms).arg(format!("{by} {cause}")).take()
                }
                _ => command.arg(&["0", ""]).take(),
            }
        },
        done,
    )
}

pub(super) fn revoke(key: &Arc<str>, id: PlaceId, take: bool) -> QueryCommand<Option<u64>> {
    let key = Arc::clone(key);
    QueryCommand::new(
        move |by| {
            let script = match id.claim {
                Some(_) => &scripts::FAIR_REVOKE,
                None => &scripts::REVOKE,
            };
            let mut command = scripts::call(script, by, &key, 2, 50);
            command.arg(id.text().as_bytes()).arg(u8::from(take)).take()
        },
        |value| match value {
            Value::Int(left) => Some(u64::try_from(*left).ok()),
            _ => None,
        },
    )
}

pub(super) fn send_message(key: &Arc<str>, to: NodeId, message: &PeerMessage) -> QueryCommand<()> {
    let prefix = key.split_once(":{").map_or("", |(prefix, _)| prefix);
    let (channel, message) = (format!("{prefix}:@{to}"), format!("{key} {message}"));
    QueryCommand::new(move |_| cmd("PUBLISH").arg(&*channel).arg(&*message).take(), done)
}

fn done(value: &Value) -> Option<()> {
    matches!(value, Value::Int(_)).then_some(())
}

fn names(pattern: &str, items: &[Value]) -> Option<Names> {
    let [next, Value::Array(keys)] = items else { return None };
    let (before, after) = pattern.split_once('*')?;
    let mut names = Vec::with_capacity(keys.len());
    for key in keys {
        let Value::BulkString(key) = key else { return None };
        // A key of another program can have any bytes.
        let key = std::str::from_utf8(key).ok();
        names.extend(key.and_then(|key| key.strip_prefix(before)?.strip_suffix(after)));
    }
    let names = names.into_iter().map(Into::into).collect();
    Some(Names { names, next: number(next)? })
}

/// Decodes the hash of the overrides. Skips fields that this version cannot read, which a later one may have written.
/// If that is the version field, the next query reads everything again.
fn read_overrides(items: &[Value]) -> Overrides {
    let mut read = Overrides::default();
    for (field, value) in pairs(items) {
        let (Some(field), Some(value)) = (text(field), text(value)) else { continue };
        if field == "@" {
            read.version = value.parse().unwrap_or_default();
        } else if let Some(name) = field.strip_prefix("@- ") {
            read.pauses.extend(Pause::parse(value).map(|pause| (name.into(), pause)));
        } else if let Some(place) = field.strip_prefix('@') {
            read.revoked.extend(revoked(place, value));
        } else if let Some(set) = Override::parse(value) {
            read.names.insert(field.into(), set);
        }
    }
    read
}

/// Parses `<id> <name>`, and the end of the record.
fn revoked(place: &str, end: &str) -> Option<((PlaceId, Arc<str>), u64)> {
    let (id, name) = place.split_once(' ')?;
    Some(((PlaceId::parse(id.as_bytes())?, name.into()), end.parse().ok()?))
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(text) => std::str::from_utf8(text).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use super::read_overrides;
    use crate::backend::Overrides;
    use crate::protocol::Mode;

    /// Decodes a hash with these fields.
    fn read(fields: &[(&[u8], &[u8])]) -> Overrides {
        let texts = fields.iter().flat_map(|(field, value)| [field, value]);
        read_overrides(&texts.map(|text| Value::BulkString(text.to_vec())).collect::<Vec<_>>())
    }

    #[test]
    fn a_field_that_cannot_be_read_is_skipped() {
        let good: [(&[u8], &[u8]); 3] =
            [(b"@", b"5"), (b"x", b"2 paused"), (b"@00000000009:1 x", b"7")];
        let all = read(&good);
        assert_eq!(all.version, 5);
        let set = all.of("x");
        assert_eq!((set.limit, set.mode), (Some(2), Mode::Paused));
        let place = ("00000000009:1".parse().unwrap(), "x".into());
        assert_eq!(all.revoked, [(place, 7)].into());
        let foreign: [(&[u8], &[u8]); 14] = [
            (b"a\xff", b"1 open"),
            (b"b", b"\xff"),
            (b"c", b"?"),
            (b"d", b"-1 open"),
            (b"e", b"1 ajar"),
            (b"@nobody", b"9"),
            (b"@nobody x", b"9"),
            (b"@00000000009:1", b"9"),
            (b"@00000000009:2 x", b"soon"),
            (b"@00000000009:2 x", b"9 x"),
            (b"@00000000009:2 x", b""),
            (b"@00000000009:2 \xff", b"9"),
            (b"@00000000009:2\xff x", b"9"),
            (b"@@", b""),
        ];
        for field in foreign {
            for at in 0..=good.len() {
                let mut fields = good.to_vec();
                fields.insert(at, field);
                assert_eq!(read(&fields), all, "{field:?} at {at}");
            }
        }
        let other = [Value::Nil, Value::Int(1)];
        assert_eq!(read_overrides(&other), Overrides::default());
    }

    #[test]
    fn a_version_that_cannot_be_read_is_none_that_is_known() {
        for version in ["", "soon", "-1", "5.5", "18446744073709551616", " 5", "\u{fffd}"] {
            let all = read(&[(b"@", version.as_bytes()), (b"x", b"2 open")]);
            assert_eq!((all.version, all.names.len()), (0, 1), "{version:?}");
        }
        assert_eq!(read(&[(b"@", b"\xff"), (b"x", b"2 open")]).version, 0);
    }
}
