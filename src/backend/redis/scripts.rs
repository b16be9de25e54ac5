//! The scripts of `lua/`: how they are called, and what they answer.

use std::sync::LazyLock;

use deadpool_redis::redis::{Cmd, Pipeline, Script, Value, cmd};

use crate::backend::{Answer, Call, Listing, Op};
use crate::error::BackendError;
use crate::ledger::{Grant, PlaceId, Reply, Standing, TICKET_MIN};

/// A script's text and its name in Redis.
struct Lua {
    text: &'static str,
    hash: String,
}

macro_rules! lua {
    ($file:literal) => {
        LazyLock::new(|| {
            let text = concat!(
                include_str!("../../../lua/prelude.lua"),
                "\n",
                include_str!(concat!("../../../lua/", $file))
            );
            Lua { text, hash: Script::new(text).get_hash().to_owned() }
        })
    };
}

static ACQUIRE: LazyLock<Lua> = lua!("acquire.lua");
static RELEASE: LazyLock<Lua> = lua!("release.lua");
static RENEW: LazyLock<Lua> = lua!("renew.lua");
static REASSERT: LazyLock<Lua> = lua!("reassert.lua");
static INSPECT: LazyLock<Lua> = lua!("inspect.lua");

fn script(op: &Op) -> &'static Lua {
    match op {
        Op::Acquire { .. } => &ACQUIRE,
        Op::Release { .. } => &RELEASE,
        Op::Renew { .. } => &RENEW,
        Op::Reassert { .. } => &REASSERT,
        Op::Inspect { .. } => &INSPECT,
    }
}

/// Makes all scripts known, so that none has to be sent a second time, out of its turn.
pub(super) fn load() -> Pipeline {
    let mut pipeline = Pipeline::new();
    for script in [&ACQUIRE, &RELEASE, &RENEW, &REASSERT, &INSPECT] {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(script.text);
    }
    pipeline
}

/// The call by the script's hash; Redis answers NOSCRIPT if it does not know that.
pub(super) fn evalsha(call: &Call) -> Cmd {
    let mut command = cmd("EVALSHA");
    command.arg(&*script(&call.op).hash);
    arguments(command, call)
}

/// The call with the script's text, which Redis knows from then on.
pub(super) fn eval(call: &Call) -> Cmd {
    let mut command = cmd("EVAL");
    command.arg(script(&call.op).text);
    arguments(command, call)
}

/// In the order in which the scripts' headers list them.
fn arguments(mut command: Cmd, call: &Call) -> Cmd {
    /// A standalone server's PUBLISH tells whether a node listens.
    const COUNTED: u8 = 1;
    command.arg(1).arg(&*call.key);
    if let Op::Inspect { most } = &call.op {
        command.arg(*most);
        return command;
    }
    command.arg(call.limit);
    match &call.op {
        Op::Acquire { lease_ms, max_queue, .. } => {
            command.arg(*lease_ms).arg(max_queue.map_or(-1, i64::from));
        }
        Op::Renew { lease_ms, .. } | Op::Reassert { lease_ms, .. } => {
            command.arg(*lease_ms);
        }
        Op::Release { .. } | Op::Inspect { .. } => {}
    }
    command.arg(COUNTED).arg(&call.node.text()[..]);
    match &call.op {
        Op::Acquire { ids, .. } | Op::Release { ids } | Op::Renew { ids, .. } => {
            for id in ids {
                command.arg(id.text().as_bytes());
            }
        }
        Op::Reassert { proofs, .. } => {
            for (id, proof) in proofs {
                command.arg(id.text().as_bytes()).arg(*proof);
            }
        }
        Op::Inspect { .. } => {}
    }
    command
}

/// What a script answered, in the shape that the scripts' headers tell.
pub(super) fn decode(call: &Call, value: &Value) -> Result<Answer, BackendError> {
    let Value::Array(items) = value else { return Err(unexpected(value)) };
    let answer = match &call.op {
        Op::Acquire { ids, .. } | Op::Renew { ids, .. } => reply(items, ids.len()),
        Op::Reassert { proofs, .. } => reply(items, proofs.len()),
        Op::Release { .. } => reply(items, 0),
        Op::Inspect { .. } => listing(items).map(Answer::Listing),
    };
    answer.ok_or_else(|| unexpected(value))
}

fn reply(items: &[Value], standings: usize) -> Option<Answer> {
    let [lease_end, earliest, in_use, waiting, rest @ ..] = items else { return None };
    let (standings, granted) = rest.split_at_checked(standings)?;
    let reply = Reply {
        lease_end: number(lease_end)?,
        earliest: number(earliest)?,
        in_use: number(in_use)?,
        waiting: number(waiting)?,
        standings: standings.iter().map(standing).collect::<Option<_>>()?,
        granted: pairs(granted)
            .map(|(id, lease_end)| Some(Grant { id: place(id)?, lease_end: number(lease_end)? }))
            .collect::<Option<_>>()?,
    };
    Some(Answer::Reply { reply, late: false })
}

fn listing(items: &[Value]) -> Option<Listing> {
    let [now, in_use, waiting, leases, rest @ ..] = items else { return None };
    let leases = usize::try_from(number(leases)?).ok()?;
    let (leases, tickets) = rest.split_at_checked(leases * 2)?;
    let mut places = Vec::with_capacity(leases.len());
    for (id, lease_end) in pairs(leases) {
        places.push((place(id)?, number(lease_end)?, None));
    }
    for (member, ticket) in pairs(tickets) {
        let Value::BulkString(member) = member else { return None };
        let id = PlaceId::parse(member.strip_prefix(b"q")?)?;
        // One whose lease has ended, or that is past the list, is left out.
        if let Some(place) = places.iter_mut().find(|place| place.0 == id) {
            place.2 = Some(number(ticket)?);
        }
    }
    Some(Listing { now: number(now)?, in_use: number(in_use)?, waiting: number(waiting)?, places })
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
