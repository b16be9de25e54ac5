//! Queries and messages, which belong to no place, as scripts and commands, and the decoding of their replies.

use std::sync::Arc;

use redis::{Cmd, Value, cmd};

use super::scripts::{self, By};
use super::values::{listing, number, pairs, unexpected};
use crate::backend::{Change, Listing, Names, Overrides, PeerMessage};
use crate::error::BackendError;
use crate::protocol::{
    Adapted, Adaptive, Adjustment, BoundRate, NodeId, Override, Pause, PlaceId, Rate, SentUnder,
};

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

pub(super) fn inspect(key: &Arc<str>, most: u32, rate: Option<BoundRate>) -> QueryCommand<Listing> {
    let key = Arc::clone(key);
    let starts = rate.map_or(0, BoundRate::starts);
    let window_us = rate.map_or(0, BoundRate::window_us);
    QueryCommand::new(
        move |by| {
            let mut call = scripts::call(&scripts::INSPECT, by, &key, 3, 25);
            call.arg(most).arg(starts).arg(window_us).take()
        },
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

/// Returns the key of the pauses, in the slot of the overrides.
fn pauses(overrides: &str) -> String {
    format!("{overrides}:pauses")
}

/// Returns the key of the adaptive limits, in the same slot.
fn adaptive(overrides: &str) -> String {
    format!("{overrides}:adaptive")
}

pub(super) fn overrides(key: &Arc<str>, known: u64) -> QueryCommand<Option<Overrides>> {
    let (key, pauses, adaptive) = (Arc::clone(key), pauses(key), adaptive(key));
    QueryCommand::new(
        move |by| {
            let keys = [&*key, &pauses, &adaptive];
            scripts::call_with(&scripts::OVERRIDES, by, keys, 1, 20).arg(known).take()
        },
        |value| match value {
            Value::Int(1) => Some(None),
            Value::Array(reply) => match &**reply {
                [now, Value::Array(set), Value::Array(pauses), Value::Array(adapted)] => {
                    let mut read = Overrides { now: number(now)?, ..Overrides::default() };
                    read_overrides(&mut read, set);
                    read_pauses(&mut read, pauses);
                    read_adapted(&mut read, adapted);
                    Some(Some(read))
                }
                _ => None,
            },
            _ => None,
        },
    )
}

/// Reads each of the overrides, the pauses and the adaptive limits alone: while their slot migrates, no node may have
/// all.
pub(super) fn overrides_apart(key: &Arc<str>) -> [QueryCommand<Overrides>; 3] {
    let alone = |key: Arc<str>, fields: fn(&mut Overrides, &[Value])| {
        let command = move |by| scripts::call(&scripts::OVERRIDES, by, &key, 1, 1).arg("-").take();
        QueryCommand::new(command, move |value| {
            let Value::Array(reply) = value else { return None };
            let [now, Value::Array(items), ..] = &**reply else { return None };
            let mut read = Overrides { now: number(now)?, ..Overrides::default() };
            fields(&mut read, items);
            Some(read)
        })
    };
    [
        alone(Arc::clone(key), read_overrides),
        alone(pauses(key).into(), read_pauses),
        alone(adaptive(key).into(), read_adapted),
    ]
}

/// Puts together what was read apart. The time is the earliest, so that nothing ends too early.
pub(super) fn put_together(set: Overrides, pauses: Overrides, adaptive: Overrides) -> Overrides {
    let versions = [set.version, pauses.version, adaptive.version];
    Overrides {
        version: versions.into_iter().fold(0, u64::saturating_add),
        pauses_version: pauses.pauses_version,
        adapted_version: adaptive.adapted_version,
        now: pauses.now.min(adaptive.now),
        pauses: pauses.pauses,
        resumed: pauses.resumed,
        adapted: adaptive.adapted,
        ..set
    }
}

pub(super) fn set_override(key: &Arc<str>, name: &Arc<str>, change: Change) -> QueryCommand<()> {
    let (pauses, adaptive) = (pauses(key), adaptive(key));
    let (key, name) = (Arc::clone(key), Arc::clone(name));
    QueryCommand::new(
        move |by| match &change {
            Change::Resume => pause(by, &pauses, &name, [0; 3], ""),
            Change::Pause { pause_ms, slack_ms, seen, by: process, cause } => {
                let why = format!("{process} {cause}");
                pause(by, &pauses, &name, [*pause_ms, *slack_ms, *seen], &why)
            }
            Change::Adapt { range, adjustment } => adapt(by, &adaptive, &name, *range, *adjustment),
            Change::Rate(_) => override_of(by, &key, &format!("{name}{RATE_FIELD}"), &change),
            _ => override_of(by, &key, &name, &change),
        },
        done,
    )
}

/// Calls `lua/pause.lua`. `times`: how long to pause, the slack, and the version that is known.
fn pause(by: By, key: &str, name: &str, times: [u64; 3], why: &str) -> Cmd {
    let mut command = scripts::call(&scripts::PAUSE, by, key, 6, 200 + name.len());
    command.arg(name).arg(&times).arg(why).arg(Overrides::PAUSES_MOST).take()
}

/// Calls `lua/adapt.lua`.
fn adapt(by: By, key: &str, name: &str, range: Adaptive, adjustment: Adjustment) -> Cmd {
    let mut command = scripts::call(&scripts::ADAPT, by, key, 7, 80 + name.len());
    command.arg(name);
    match adjustment {
        Adjustment::Lower(SentUnder { version, in_use }) => command.arg(version).arg(in_use),
        Adjustment::Raise => command.arg("").arg(""),
    };
    let interval_ms = u64::try_from(range.interval().as_millis()).unwrap_or(u64::MAX);
    command.arg(range.min()).arg(range.max()).arg(interval_ms).arg(Overrides::ADAPTED_MOST).take()
}

/// Ends the field that keeps the rate of a name. It is no tenant's: see [`limit_field`](crate::tenants::limit_field). A
/// field of its own, because earlier versions read that of the name as a whole.
const RATE_FIELD: &str = "@@rate";

/// Calls `lua/override.lua`.
fn override_of(by: By, key: &str, name: &str, change: &Change) -> Cmd {
    let mut command = scripts::call(&scripts::OVERRIDE, by, key, 7, 100 + name.len());
    command.arg(name);
    match change {
        Change::Limit(Some(limit)) => command.arg(limit).arg(&["=", "", "0"]),
        // A mode that an override without it has.
        Change::Rate(Some(rate)) => command.arg(rate.text()).arg(&["open", "", "0"]),
        Change::Mode(mode) => command.arg(&["=", mode.as_str(), "", "0"]),
        Change::Revoked { id, keep_ms, .. } => {
            command.arg(&["=", "="]).arg(id.text().as_bytes()).arg(keep_ms)
        }
        Change::Limit(None)
        | Change::Rate(None)
        | Change::Resume
        | Change::Pause { .. }
        | Change::Adapt { .. } => command.arg(&["-", "=", "", "0"]),
    };
    command.arg(Overrides::MOST).arg(u8::from(change.is_told())).take()
}

pub(super) fn revoke(key: &Arc<str>, id: PlaceId, take: bool) -> QueryCommand<Option<u64>> {
    let key = Arc::clone(key);
    QueryCommand::new(
        move |by| {
            let mut command = scripts::call(&scripts::REVOKE, by, &key, 2, 50);
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
    let next: u64 = number(next)?;
    Some(Names { names, next: (next > 0).then(|| next.to_string().into()) })
}

/// Decodes the hash of the overrides. Skips fields that this version cannot read, which a later one may have written.
/// If that is the version field, the next query reads everything again.
fn read_overrides(read: &mut Overrides, items: &[Value]) {
    for (field, value) in texts(items) {
        if field == "@" {
            read.version = value.parse().unwrap_or_default();
        } else if let Some(place) = field.strip_prefix('@') {
            read.revoked.extend(revoked(place, value));
        } else if let Some(name) = field.strip_suffix(RATE_FIELD) {
            let rate = value.strip_suffix(" open").and_then(Rate::parse);
            read.rates.extend(rate.map(|rate| (name.into(), rate)));
        } else if let Some(set) = Override::parse(value) {
            read.names.insert(field.into(), set);
        }
    }
}

/// Decodes the hash of the pauses, like that of the overrides, and adds up the versions.
fn read_pauses(read: &mut Overrides, items: &[Value]) {
    for (field, value) in texts(items) {
        if field == "@" {
            read.pauses_version = value.parse().unwrap_or_default();
            read.version = read.version.saturating_add(read.pauses_version);
        } else if let Some((pause, resumed)) = Pause::parse(value) {
            let name: Arc<str> = field.into();
            if resumed > 0 {
                read.resumed.insert(Arc::clone(&name), resumed);
            }
            if pause.until > 0 {
                read.pauses.insert(name, pause);
            }
        }
    }
}

/// Decodes the hash of the adaptive limits, like the others.
fn read_adapted(read: &mut Overrides, items: &[Value]) {
    let version =
        texts(items).find(|(field, _)| *field == "@").and_then(|(_, text)| text.parse().ok());
    read.adapted_version = version.unwrap_or_default();
    read.version = read.version.saturating_add(read.adapted_version);
    let records = texts(items).filter_map(|(field, value)| {
        let adapted = Adapted::parse(value, read.adapted_version)?;
        Some((field.into(), adapted)).filter(|_| field != "@")
    });
    read.adapted = records.collect();
}

/// The fields and values that are text.
fn texts(items: &[Value]) -> impl Iterator<Item = (&str, &str)> {
    pairs(items).filter_map(|(field, value)| Some((text(field)?, text(value)?)))
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
    use crate::protocol::{Mode, Rate};

    /// Decodes a hash with these fields.
    fn read(fields: &[(&[u8], &[u8])]) -> Overrides {
        let texts = fields.iter().flat_map(|(field, value)| [field, value]);
        let items: Vec<_> = texts.map(|text| Value::BulkString(text.to_vec())).collect();
        let mut read = Overrides::default();
        read_overrides(&mut read, &items);
        read
    }

    #[test]
    fn a_field_that_cannot_be_read_is_skipped() {
        let good: [(&[u8], &[u8]); 4] = [
            (b"@", b"5"),
            (b"x", b"2 paused"),
            (b"x@@rate", b"600/60000 open"),
            (b"@00000000009:1 x", b"7"),
        ];
        let all = read(&good);
        assert_eq!(all.version, 5);
        let set = all.of("x");
        assert_eq!(
            (set.limit, set.mode, set.rate),
            (Some(2), Mode::Paused, Rate::parse("600/60000"))
        );
        let place = ("00000000009:1".parse().unwrap(), "x".into());
        assert_eq!(all.revoked, [(place, 7)].into());
        let foreign: [(&[u8], &[u8]); 20] = [
            (b"x", b"600/60000 open"),
            (b"y@@rate", b"600/60000"),
            (b"y@@rate", b"0/60000 open"),
            (b"y@@rate", b"1/0 open"),
            (b"y@@rate", b"1/86400001 open"),
            (b"y@@rate", b"9000/10 open"),
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
        let (other, mut none) = ([Value::Nil, Value::Int(1)], Overrides::default());
        read_overrides(&mut none, &other);
        assert_eq!(none, Overrides::default());
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
