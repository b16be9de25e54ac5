//! The scripts of `lua/`: how they are called, and what they answer.

use std::sync::LazyLock;

use deadpool_redis::redis::{Cmd, Pipeline, Script, Value};
use smallvec::smallvec;

use crate::backend::{Answer, Call, Change, Listing, Op, Override, Overrides, Revocation, Word};
use crate::error::BackendError;
use crate::ledger::{Grant, PlaceId, Reply, Standing, TICKET_MIN};

/// What several scripts have in common, and where they say that it goes.
const PIECES: [(&str, &str); 6] = [
    ("--@clock", include_str!("../../../lua/clock.lua")),
    ("--@queued", include_str!("../../../lua/queued.lua")),
    ("--@sweep", include_str!("../../../lua/sweep.lua")),
    ("--@promote", include_str!("../../../lua/promote.lua")),
    ("--@write", include_str!("../../../lua/write.lua")),
    ("--@answer", include_str!("../../../lua/answer.lua")),
];

/// What a member begins with that is a ticket: see `lua/queued.lua`.
const QUEUED: [u8; 52] = [b'q'; 52];

/// A script's text and its name in Redis.
struct Lua {
    text: String,
    hash: String,
}

impl Lua {
    fn new(script: &str) -> Self {
        let mut text = script.to_owned();
        for (place, piece) in PIECES {
            text = text.replacen(place, piece, 1);
        }
        let hash = Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }
}

macro_rules! lua {
    ($file:literal) => {
        LazyLock::new(|| Lua::new(include_str!(concat!("../../../lua/", $file))))
    };
}

static ACQUIRE: LazyLock<Lua> = lua!("acquire.lua");
static RELEASE: LazyLock<Lua> = lua!("release.lua");
static RENEW: LazyLock<Lua> = lua!("renew.lua");
static REASSERT: LazyLock<Lua> = lua!("reassert.lua");
static INSPECT: LazyLock<Lua> = lua!("inspect.lua");
static OVERRIDES: LazyLock<Lua> = lua!("overrides.lua");
static OVERRIDE: LazyLock<Lua> = lua!("override.lua");
static REVOKE: LazyLock<Lua> = lua!("revoke.lua");

/// `None`: that takes a command and no script.
fn script(op: &Op) -> Option<&'static Lua> {
    let script = match op {
        Op::Acquire { .. } => &ACQUIRE,
        Op::Release { .. } => &RELEASE,
        Op::Renew { .. } => &RENEW,
        Op::Reassert { .. } => &REASSERT,
        Op::Inspect { .. } => &INSPECT,
        Op::Overrides { .. } => &OVERRIDES,
        Op::Override { .. } => &OVERRIDE,
        Op::Revoke { .. } => &REVOKE,
        Op::List { .. } | Op::Tell { .. } => return None,
    };
    Some(script)
}

/// Makes all scripts known, so that none has to be sent a second time, out of its turn.
pub(super) fn load() -> Pipeline {
    let mut pipeline = Pipeline::new();
    for script in [&ACQUIRE, &RELEASE, &RENEW, &REASSERT, &INSPECT, &OVERRIDES, &OVERRIDE, &REVOKE]
    {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(&*script.text);
    }
    pipeline
}

/// The call by the script's hash; Redis answers NOSCRIPT if it does not know that.
pub(super) fn evalsha(call: &Call, counted: bool) -> Cmd {
    script(&call.op)
        .map_or_else(|| command(call), |script| arguments("EVALSHA", &script.hash, call, counted))
}

/// The call with the script's text, which Redis knows from then on.
pub(super) fn eval(call: &Call, counted: bool) -> Cmd {
    script(&call.op)
        .map_or_else(|| command(call), |script| arguments("EVAL", &script.text, call, counted))
}

/// What is no script.
fn command(call: &Call) -> Cmd {
    let mut command = Cmd::new();
    match &call.op {
        // Keys of semaphores. No character of a prefix means anything but itself in a pattern.
        Op::List { from, most } => {
            command.arg("SCAN").arg(*from).arg("MATCH").arg(&*call.key).arg("COUNT").arg(*most);
            // The overrides' key looks like one of theirs.
            command.arg("TYPE").arg("zset");
        }
        Op::Tell { to, word } => {
            let prefix = call.key.split_once(":{").map_or("", |(prefix, _)| prefix);
            let message = format!("{} {word}", call.key);
            command.arg("PUBLISH").arg(format!("{prefix}:@{to}")).arg(message);
        }
        _ => {}
    }
    command
}

/// In the order in which the scripts' headers list them. `counted`: PUBLISH tells whether a node
/// listens, as it does where there is one server.
fn arguments(name: &str, script: &str, call: &Call, counted: bool) -> Cmd {
    // Of one place and of all that is not a place, with room to spare.
    const ID: usize = 24;
    const REST: usize = 80;
    let places = match &call.op {
        Op::Acquire { leaving, ids, .. } => leaving.len() + ids.len(),
        Op::Release { ids } | Op::Renew { ids, .. } => ids.len(),
        Op::Reassert { proofs, .. } => 2 * proofs.len(),
        _ => 1,
    };
    let size = name.len() + script.len() + call.key.len() + REST + places * ID;
    let mut command = Cmd::with_capacity(10 + places, size);
    command.arg(name).arg(script).arg(1).arg(&*call.key);
    match &call.op {
        Op::Inspect { most } => {
            command.arg(*most);
            return command;
        }
        Op::Overrides { known } => {
            command.arg(*known);
            return command;
        }
        Op::Override { name, change } => {
            command.arg(&**name);
            match change {
                Change::Limit(None) => command.arg(&["-", "=", "", "0"]),
                Change::Limit(Some(limit)) => command.arg(*limit).arg(&["=", "", "0"]),
                Change::Mode(mode) => command.arg(&["=", mode.as_str(), "", "0"]),
                Change::Revoked { id, keep_ms } => {
                    command.arg(&["=", "="]).arg(id.text().as_bytes()).arg(*keep_ms)
                }
            };
            command.arg(Overrides::MOST);
            return command;
        }
        Op::Revoke { id, take } => {
            command.arg(id.text().as_bytes()).arg(u8::from(*take));
            return command;
        }
        _ => {}
    }
    command.arg(call.limit);
    match &call.op {
        Op::Acquire { lease_ms, max_queue, .. } => {
            command.arg(*lease_ms).arg(max_queue.map_or(-1, i64::from));
        }
        Op::Renew { lease_ms, .. } | Op::Reassert { lease_ms, .. } => {
            command.arg(*lease_ms);
        }
        _ => {}
    }
    let node = call.node.text();
    command.arg(u8::from(counted)).arg(&node[..]);
    match &call.op {
        Op::Acquire { leaving, ids, .. } => {
            command.arg(leaving.len());
            for id in leaving.iter().chain(ids) {
                command.arg(id.text_of(&node).as_bytes());
            }
        }
        Op::Release { ids } | Op::Renew { ids, .. } => {
            for id in ids {
                command.arg(id.text_of(&node).as_bytes());
            }
        }
        Op::Reassert { proofs, .. } => {
            for (id, proof) in proofs {
                command.arg(id.text_of(&node).as_bytes()).arg(*proof);
            }
        }
        _ => {}
    }
    command
}

/// What a script answered, in the shape that the scripts' headers tell.
pub(super) fn decode(call: &Call, value: &Value) -> Result<Answer, BackendError> {
    let answer = match (&call.op, value) {
        // In short: every place holds.
        (Op::Acquire { ids, .. } | Op::Renew { ids, .. }, Value::Int(_)) => {
            number(value).map(|lease_end| {
                let standings = smallvec![Standing::Held; ids.len()];
                Answer::of(Reply { lease_end, standings, ..Reply::default() })
            })
        }
        (Op::Acquire { ids, .. } | Op::Renew { ids, .. }, Value::Array(items)) => {
            reply(items, ids.len()).map(Answer::of)
        }
        (Op::Reassert { proofs, .. }, Value::Array(items)) => {
            reply(items, proofs.len()).map(Answer::of)
        }
        (Op::Release { .. }, Value::Array(items)) => {
            grants(items).map(|granted| Answer::of(Reply { granted, ..Reply::default() }))
        }
        (Op::Inspect { most }, Value::Array(items)) => listing(items, *most).map(Answer::Listing),
        (Op::Overrides { .. }, Value::Int(1)) => Some(Answer::Overrides(None)),
        (Op::Overrides { .. }, Value::Array(items)) => {
            overrides(items).map(|read| Answer::Overrides(Some(read)))
        }
        (Op::Override { .. } | Op::Tell { .. }, Value::Int(_)) => Some(Answer::Done),
        (Op::Revoke { .. }, Value::Int(left)) => Some(Answer::Revoked(u64::try_from(*left).ok())),
        (Op::List { .. }, Value::Array(items)) => names(&call.key, items),
        _ => None,
    };
    answer.ok_or_else(|| unexpected(value))
}

impl Answer {
    const fn of(reply: Reply) -> Self {
        Self::Reply { reply, late: false }
    }
}

fn reply(items: &[Value], standings: usize) -> Option<Reply> {
    let [lease_end, earliest, in_use, waiting, rest @ ..] = items else { return None };
    let (standings, granted) = rest.split_at_checked(standings)?;
    Some(Reply {
        lease_end: number(lease_end)?,
        earliest: number(earliest)?,
        in_use: number(in_use)?,
        waiting: number(waiting)?,
        standings: standings.iter().map(standing).collect::<Option<_>>()?,
        granted: grants(granted)?,
    })
}

fn grants(items: &[Value]) -> Option<Vec<Grant>> {
    pairs(items)
        .map(|(id, lease_end)| Some(Grant { id: place(id)?, lease_end: number(lease_end)? }))
        .collect()
}

fn listing(items: &[Value], most: u32) -> Option<Listing> {
    let [now, in_use, waiting, leases, rest @ ..] = items else { return None };
    let leases = usize::try_from(number(leases)?).ok()?;
    let (leases, tickets) = rest.split_at_checked(leases.checked_mul(2)?)?;
    let mut places = Vec::with_capacity(leases.len());
    for (id, lease_end) in pairs(leases) {
        places.push((place(id)?, number(lease_end)?, None));
    }
    for (member, ticket) in pairs(tickets) {
        let Value::BulkString(member) = member else { return None };
        let id = PlaceId::parse(member.strip_prefix(&QUEUED)?)?;
        // One whose lease has ended, or that is past the list, is left out.
        if let Some(place) = places.iter_mut().find(|place| place.0 == id) {
            place.2 = Some(number(ticket)?);
        }
    }
    let (now, mut in_use, mut waiting) = (number(now)?, number(in_use)?, number(waiting)?);
    if leases.len() / 2 < most as usize {
        // All are here, so those that the script counted and that have expired can be left out.
        waiting = places.iter().filter(|(_, _, ticket)| ticket.is_some()).count() as u64;
        in_use = places.len() as u64 - waiting;
    }
    Some(Listing { now, in_use, waiting, places })
}

fn names(pattern: &str, items: &[Value]) -> Option<Answer> {
    let [next, Value::Array(keys)] = items else { return None };
    let (before, after) = pattern.split_once('*')?;
    let mut names = Vec::with_capacity(keys.len());
    for key in keys {
        let Value::BulkString(key) = key else { return None };
        // A key of someone else's may be anything.
        let key = std::str::from_utf8(key).ok();
        names.extend(key.and_then(|key| key.strip_prefix(before)?.strip_suffix(after)));
    }
    let names = names.into_iter().map(Into::into).collect();
    Some(Answer::Names { names, next: number(next)? })
}

/// A field that this version cannot read is passed over: a later one may have written it.
fn overrides(items: &[Value]) -> Option<Overrides> {
    let mut read = Overrides::default();
    for (field, value) in pairs(items) {
        let (Value::BulkString(field), Value::BulkString(value)) = (field, value) else {
            return None;
        };
        let (field, value) = (std::str::from_utf8(field).ok()?, std::str::from_utf8(value).ok()?);
        if field == "@" {
            read.version = value.parse().ok()?;
        } else if let Some(id) = field.strip_prefix('@') {
            let (id, (end, name)) = (PlaceId::parse(id.as_bytes())?, value.split_once(' ')?);
            let revocation = Revocation { name: name.into(), end: end.parse().ok()? };
            read.revoked.insert(id, revocation);
        } else if let Ok(over) = value.parse::<Override>() {
            read.names.insert(field.into(), over);
        }
    }
    Some(read)
}

fn pairs(items: &[Value]) -> impl Iterator<Item = (&Value, &Value)> {
    items.chunks_exact(2).map(|pair| (&pair[0], &pair[1]))
}

fn standing(value: &Value) -> Option<Standing> {
    match value {
        Value::Int(0) => Some(Standing::Gone),
        Value::Int(1) => Some(Standing::Held),
        Value::Int(-1) => Some(Standing::NoPermit),
        Value::Int(-2) => Some(Standing::QueueFull),
        value => number(value).filter(|ticket| *ticket >= TICKET_MIN).map(Standing::Waits),
    }
}

fn place(value: &Value) -> Option<PlaceId> {
    match value {
        Value::BulkString(text) => PlaceId::parse(text),
        Value::SimpleString(text) => PlaceId::parse(text.as_bytes()),
        _ => None,
    }
}

fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
        _ => None,
    }
}

fn unexpected(value: &Value) -> BackendError {
    let shown: String = format!("{value:?}").chars().take(200).collect();
    BackendError::call(format!("Redis answered what no script of this version does: {shown}"))
}

/// A hint: `<key> <n> <lease_end> ...`.
pub(super) fn hints(message: &[u8]) -> Option<(&str, impl Iterator<Item = (u64, u64)>)> {
    let mut words = std::str::from_utf8(message).ok()?.split(' ');
    let key = words.next()?;
    let pairs = std::iter::from_fn(move || {
        let n = PlaceId::parse_n(words.next()?.as_bytes())?;
        Some((n, words.next()?.parse().ok()?))
    });
    Some((key, pairs))
}

/// What another process says: `<key> <word>`.
pub(super) fn word(message: &[u8]) -> Option<Word> {
    let (_, text) = std::str::from_utf8(message).ok()?.split_once(' ')?;
    text.starts_with(['?', '=']).then(|| text.parse().ok())?
}

/// A message of `lua/override.lua`: `<key> <name>`.
pub(super) fn overridden(message: &[u8]) -> Option<&str> {
    Some(std::str::from_utf8(message).ok()?.split_once(' ')?.1)
}

/// For the fuzz targets and the test below: any bytes, as the answer to any call.
#[cfg(any(test, fuzzing))]
pub(crate) fn decode_wire(
    op: u8,
    places: usize,
    wire: &[u8],
) -> Option<Result<Answer, BackendError>> {
    use crate::ledger::{Ids, NodeId};
    let value = deadpool_redis::redis::parse_redis_value(wire).ok()?;
    let node = NodeId::new(1);
    let ids: Ids = (0..places as u64).map(|n| PlaceId { node, deaf: false, n }).collect();
    let op = match op % 5 {
        0 => Op::Acquire { leaving: Ids::new(), lease_ms: 1000, max_queue: None, ids },
        1 => Op::Release { ids },
        2 => Op::Renew { lease_ms: 1000, ids },
        3 => Op::Reassert { lease_ms: 1000, proofs: ids.into_iter().map(|id| (id, 1)).collect() },
        _ => Op::Inspect { most: 1000 },
    };
    let answer = decode(&Call { key: "x".into(), node, limit: 1, op }, &value);
    if let Ok(Answer::Reply { reply, .. }) = &answer {
        assert!(reply.standings.is_empty() || reply.standings.len() == places);
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::{decode_wire, hints, word};

    /// Something that a script answers, or nearly.
    fn item() -> impl Strategy<Value = String> {
        let number = prop_oneof![
            (-3..3i64).prop_map(i128::from),
            any::<i64>().prop_map(i128::from),
            any::<u64>().prop_map(i128::from),
            Just(i128::from(u64::MAX)),
        ];
        let bulk = |text: String| format!("${}\r\n{text}\r\n", text.len());
        prop_oneof![
            4 => (-3..3i64).prop_map(|n| format!(":{n}\r\n")),
            2 => any::<i64>().prop_map(|n| format!(":{n}\r\n")),
            2 => number.prop_map(move |n| bulk(n.to_string())),
            2 => "q?~?[0-9A-Za-z]{11}:[0-9a-z]{1,11}".prop_map(bulk),
            1 => Just("$-1\r\n".to_owned()),
            1 => Just("-ERR no\r\n".to_owned()),
            1 => Just("*0\r\n".to_owned()),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 5000, failure_persistence: None, ..ProptestConfig::default()
        })]

        #[test]
        fn no_answer_of_redis_makes_the_decoder_panic(
            op in 0..5u8,
            places in 0..4usize,
            items in vec(item(), 0..12),
        ) {
            let wire = format!("*{}\r\n{}", items.len(), items.concat());
            prop_assert!(decode_wire(op, places, wire.as_bytes()).is_some());
        }

        #[test]
        fn no_hint_makes_the_decoder_panic(
            any in vec(any::<u8>(), 0..60),
            near in "[a-z:{}]{0,5}( [?=])?( [0-9a-z]{0,13}){0,7}",
        ) {
            for message in [&any, near.as_bytes()] {
                if let Some((_, hints)) = hints(message) {
                    hints.for_each(drop);
                }
                let _ = word(message);
            }
        }
    }

    #[test]
    fn the_corpus_of_replies_holds() {
        let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/reply");
        let mut understood = 0;
        for entry in std::fs::read_dir(dir).unwrap() {
            let data = std::fs::read(entry.unwrap().path()).unwrap();
            let [op, places, wire @ ..] = &*data else { continue };
            understood +=
                usize::from(matches!(decode_wire(*op, usize::from(*places), wire), Some(Ok(_))));
            if let Some((_, hints)) = hints(wire) {
                hints.for_each(drop);
            }
        }
        assert!(understood > 5, "{understood}");
    }
}
