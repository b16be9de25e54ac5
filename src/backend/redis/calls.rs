//! Operations on places as calls of scripts, and the decoding of their replies.

use redis::{Cmd, Value};
use smallvec::smallvec;

use super::scripts::{self, By, Lua};
use super::values::{grants, listing, number, reply, unexpected};
use crate::backend::{AddressedCall, Answer};
use crate::error::BackendError;
use crate::protocol::{Op, PlaceId, PlaceStatus, Reply, Used};

/// Upper bounds for the bytes of an id without a claim, of one with a claim, and of everything else in a call.
const ID: usize = 32;
const FAIR_ID: usize = 55;
const REST: usize = 90;
/// The most arguments before the places.
const ARGUMENTS: usize = 10;

/// Whether any place of the call has a claim.
fn has_claims(op: &Op) -> bool {
    let any = |ids: &[PlaceId]| ids.iter().any(|id| id.claim.is_some());
    match op {
        Op::Acquire { leaving, ids, .. } => any(ids) || any(leaving),
        Op::Release { ids } | Op::Renew { ids, .. } => any(ids),
        Op::Reassert { proofs, .. } => proofs.iter().any(|(id, _)| id.claim.is_some()),
        Op::Audit { .. } => false,
    }
}

/// Returns the call, with its arguments in the order in which the script's header lists them. `counted` is whether
/// `PUBLISH` returns the number of receivers, which it does not in a cluster.
pub(super) fn command(addressed: &AddressedCall, by: By, counted: bool) -> Cmd {
    let AddressedCall { key, node, call } = addressed;
    let has_claims = has_claims(&call.op);
    let places = match &call.op {
        Op::Reassert { proofs, .. } => 2 * proofs.len(),
        Op::Audit { .. } => 0,
        op => op.places(),
    };
    let id = if has_claims { FAIR_ID } else { ID };
    let mut command =
        scripts::call(script(&call.op), by, key, ARGUMENTS + places, REST + places * id);
    if let Op::Audit { most } = &call.op {
        // The rate does not matter.
        command.arg(*most).arg(0).arg(0);
        return command;
    }
    let (node, counted) = (node.text(), u8::from(counted));
    command.arg(call.limit).arg(u8::from(call.for_all));
    command.arg(if has_claims { i64::from(call.headroom) } else { -1 });
    if let Op::Acquire { lease_ms, .. }
    | Op::Renew { lease_ms, .. }
    | Op::Reassert { lease_ms, .. } = &call.op
    {
        command.arg(*lease_ms);
    }
    if let Op::Acquire { max_queue, .. } = &call.op {
        command.arg(max_queue.map_or(-1, i64::from)).arg(call.max_waiting);
    }
    command.arg(counted).arg(&node[..]);
    match &call.op {
        Op::Acquire { leaving, ids, .. } => {
            command.arg(leaving.len()).arg(u8::from(call.recalls));
            push_leaving(&mut command, leaving, &call.used, &node);
            for id in ids {
                command.arg(id.text_of(&node).as_bytes());
            }
        }
        Op::Release { ids } => push_leaving(&mut command, ids, &call.used, &node),
        Op::Renew { ids, .. } => {
            for id in ids {
                command.arg(id.text_of(&node).as_bytes());
            }
        }
        Op::Reassert { proofs, .. } => {
            for (id, proof) in proofs {
                command.arg(id.text_of(&node).as_bytes()).arg(*proof);
            }
        }
        Op::Audit { .. } => {}
    }
    command
}

/// Adds the ids of places that leave, each with what it used of its budgets, if that is said: see `lua/used.lua`.
fn push_leaving(command: &mut Cmd, ids: &[PlaceId], used: &[(PlaceId, Used)], node: &[u8; 11]) {
    let mut used = used.iter().peekable();
    for id in ids {
        let text = id.text_of(node);
        match used.next_if(|(of, _)| of == id) {
            None => command.arg(text.as_bytes()),
            Some((_, used)) => command.arg([text.as_bytes(), &used.text(id.charges())].concat()),
        };
    }
}

fn script(op: &Op) -> &'static Lua {
    match op {
        Op::Acquire { .. } => &scripts::ACQUIRE,
        Op::Release { .. } => &scripts::RELEASE,
        Op::Renew { .. } => &scripts::RENEW,
        Op::Reassert { .. } => &scripts::REASSERT,
        Op::Audit { .. } => &scripts::INSPECT,
    }
}

/// Decodes the reply of a script, as its header describes it.
///
/// # Errors
///
/// If no script of this version sends such a reply.
fn decode(
    AddressedCall { node, call, .. }: &AddressedCall,
    value: &Value,
) -> Result<Reply, BackendError> {
    let reply = match (&call.op, value) {
        // The short form: every place holds.
        (Op::Acquire { ids, .. } | Op::Renew { ids, .. }, Value::Int(_)) => {
            number(value).map(|lease_end| {
                let statuses = smallvec![PlaceStatus::Held; ids.len()];
                Reply { lease_end, statuses, ..Reply::default() }
            })
        }
        (Op::Acquire { ids, .. } | Op::Renew { ids, .. }, Value::Array(items)) => {
            reply(items, ids.len())
        }
        (Op::Reassert { proofs, .. }, Value::Array(items)) => reply(items, proofs.len()),
        (Op::Release { .. }, Value::Array(items)) => {
            // Grants are pairs: an odd item says when to call again.
            let (items, more, opens_in) = match &**items {
                [items @ .., Value::Int(again)] if items.len().is_multiple_of(2) => match *again {
                    1 => (items, true, 0),
                    ms if ms < 0 => (items, false, ms.unsigned_abs()),
                    _ => return Err(unexpected(value)),
                },
                items => (items, false, 0),
            };
            grants(items).map(|granted| Reply { granted, more, opens_in, ..Reply::default() })
        }
        (Op::Audit { most }, Value::Array(items)) => listing(items, *most).map(|listing| {
            let own = listing.places.iter().map(|(id, ..)| *id).filter(|id| id.node == *node);
            Reply { found: own.collect(), ..Reply::default() }
        }),
        _ => None,
    };
    reply.ok_or_else(|| unexpected(value))
}

/// Decodes the reply of a script as the answer to a call.
pub(super) fn answer(call: &AddressedCall, value: &Value, late: bool) -> Answer {
    match decode(call, value) {
        Ok(reply) => Answer::Reply { reply, late, leases_from: None },
        Err(error) => Answer::Failed(error),
    }
}

/// Decodes any bytes as the reply to any call, for the fuzz targets and the tests below.
#[cfg(any(test, fuzzing))]
pub(crate) fn decode_wire(
    op: u8,
    places: usize,
    wire: &[u8],
) -> Option<Result<Reply, BackendError>> {
    use crate::protocol::{Call, Ids, NodeId};
    let value = redis::parse_redis_value(wire).ok()?;
    let node = NodeId::new(1);
    let ids: Ids = (0..places as u64)
        .map(|n| PlaceId { node, poll_only: false, n, bound: None, claim: None })
        .collect();
    let op = match op % 5 {
        0 => Op::Acquire { leaving: Vec::new(), lease_ms: 1000, max_queue: None, ids },
        1 => Op::Release { ids },
        2 => Op::Renew { lease_ms: 1000, ids },
        3 => Op::Reassert { lease_ms: 1000, proofs: ids.into_iter().map(|id| (id, 1)).collect() },
        _ => Op::Audit { most: 1000 },
    };
    let answer = decode(
        &AddressedCall { key: "x".into(), node, call: Call { limit: 1, ..Call::of(op) } },
        &value,
    );
    if let Ok(reply) = &answer {
        assert!(reply.statuses.is_empty() || reply.statuses.len() == places);
    }
    Some(answer)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::decode_wire;
    use crate::backend::redis::messages::{hints, peer_message};
    use crate::protocol::{Reply, Usage};

    /// An item of a script's reply, or nearly one.
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
        fn no_reply_of_redis_makes_the_decoder_panic(
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
                let _ = peer_message(message);
            }
        }
    }

    /// The decoded reply to a call with one id; `None` if it is invalid.
    fn decoded(op: u8, wire: &str) -> Option<Reply> {
        decode_wire(op, 1, wire.as_bytes())?.ok()
    }

    const GRANT: &str = "$13\r\n00000000001:1\r\n$13\r\n1795169853126\r\n";

    #[test]
    fn a_release_says_more_by_an_odd_item() {
        const RELEASE: u8 = 1;
        for (wire, granted, more) in [
            ("*0\r\n".to_owned(), 0, false),
            ("*1\r\n:1\r\n".to_owned(), 0, true),
            (format!("*2\r\n{GRANT}"), 1, false),
            (format!("*3\r\n{GRANT}:1\r\n"), 1, true),
        ] {
            let reply = decoded(RELEASE, &wire).unwrap();
            assert_eq!((reply.granted.len(), reply.more), (granted, more), "{wire:?}");
        }
        for wire in ["*1\r\n:2\r\n".to_owned(), format!("*3\r\n{GRANT}$1\r\n1\r\n")] {
            assert_eq!(decoded(RELEASE, &wire), None, "{wire:?}");
        }
    }

    #[test]
    fn other_calls_say_more_by_an_earliest_of_one() {
        for op in [0, 2, 3] {
            let wire = |earliest: u64, rest: &str, items: u8| {
                format!("*{items}\r\n:1795169853126\r\n:{earliest}\r\n:3\r\n:9\r\n:1\r\n{rest}")
            };
            for (earliest, shown, more) in [(0, 0, false), (1, 0, true), (2, 2, false)] {
                let reply = decoded(op, &wire(earliest, GRANT, 7)).unwrap();
                assert_eq!((reply.earliest, reply.more), (shown, more));
                let usage = Some(Usage { in_use: 3, waiting: 9 });
                assert_eq!((reply.usage, reply.granted.len()), (usage, 1));
            }
            // The mark of a release is invalid here.
            assert_eq!(decoded(op, &wire(1, ":1\r\n", 6)), None);
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
