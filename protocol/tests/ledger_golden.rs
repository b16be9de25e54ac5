//! The coding of version 1, as it is stored: `tests/golden/ledger-1.txt` has some ledgers in it, and how each came about is
//! here. The file never changes. A later version gets a file of its own.

#[expect(dead_code, reason = "others use more of it")]
mod desk;

use std::fmt::Write;
use std::time::Duration;

use tower_semaphore_protocol::{
    Bound, BoundRate, Charge, Claim, FurtherLimit, Ledger, NodeId, PlaceId, Used, UsedOf,
};

use self::desk::{Desk, LEASE, NODE, claim};

const OTHER: NodeId = NodeId::new(0xfedc_ba98_7654_3210);

fn empty() -> Ledger {
    Ledger::new()
}

fn plain() -> Ledger {
    let mut desk = Desk::new(2);
    let bound = Some(Bound { limit: 300, headroom: 0, rate: None });
    desk.come(None);
    let bounded = PlaceId { bound, ..desk.id_of(OTHER, None) };
    let polls = PlaceId { poll_only: true, n: 1_000_000, ..desk.id(None) };
    desk.acquire_all(Some(10), &[bounded]);
    desk.acquire_all(Some(10), &[polls]);
    desk.now += 1_000_000;
    desk.come(None);
    desk.ledger
}

fn tenants() -> Ledger {
    let mut desk = Desk { headroom: 1, ..Desk::new(6) };
    let capped = claim(1).with_each(Some(2)).with_weight(3);
    desk.come(capped.with_cost(2));
    desk.come(claim(2).with_cost(3));
    // Beyond its cap; of a class that the headroom is kept from; too many; without a tenant.
    desk.come(capped);
    desk.come(claim(3).with_class(1));
    desk.come(claim(2).with_cost(2));
    desk.come(Claim::without_tenant().with_cost(64));
    desk.come(None);
    desk.ledger
}

fn further_limits() -> Ledger {
    let mut desk = Desk { tick: 130, ..Desk::new(3) };
    let [route, model] = [7, 8].map(|number| FurtherLimit::of_hash(number, 1));
    desk.come(claim(1).also(route));
    desk.come(claim(9).also(model));
    // Two are parked at the route, one at its tenant's cap, and one waits for its turn.
    desk.come(claim(1).also(route).also(model));
    desk.come(Claim::without_tenant().also(route));
    desk.come(claim(1).with_each(Some(1)).also(FurtherLimit::of_hash(9, 5)));
    desk.come(None);
    desk.come(claim(2).also(FurtherLimit::of_hash(9, 5)));
    desk.ledger
}

fn one_line_of_two_tenants() -> Ledger {
    // Their hashes are alike.
    let [a, b] = ONE_LINE.map(|tenant| claim(tenant).also(FurtherLimit::of_hash(1, 1)));
    assert_eq!(a.line(), b.line());
    let mut desk = Desk::new(1);
    desk.come(None);
    let first = desk.come(a);
    desk.come(b);
    desk.release(&[first]);
    desk.ledger
}

const ONE_LINE: [u64; 2] = [13_431, 65_542];

fn rates() -> Ledger {
    let mut desk = Desk::new(9);
    let rate = BoundRate::new(3, Duration::from_secs(60))
        .map(|rate| rate.kept_for(Duration::from_secs(100)));
    let short = BoundRate::new(9, Duration::from_millis(1500));
    let mut come = |claim: Claim, rate| {
        let bound = Some(Bound { limit: 9, headroom: 2, rate });
        let id = PlaceId { bound, ..desk.id(claim) };
        desk.acquire_all(Some(10), &[id]);
        id
    };
    let leaves = come(Claim::without_tenant(), rate);
    come(Claim::without_tenant().with_cost(2), rate);
    come(claim(1), short);
    come(claim(1), rate);
    desk.release(&[leaves]);
    desk.ledger
}

fn budgets() -> Ledger {
    let mut desk = Desk::new(9);
    let shared = |taken| Charge::of_hash(3, taken, 60_000_000).unwrap();
    let own = |taken| Charge::of_tenant(3, taken, 1_000_000).unwrap();
    let settles = desk.come(Claim::without_tenant().charged(shared(45_000_000)));
    let used = Used::as_charged(settles.charges()).with(0, UsedOf { used: 40_000_000, ahead: 0 });
    desk.ledger.settle_used(&[(settles, used)], desk.now);
    desk.release(&[settles]);
    desk.come(claim(1).charged(own(900_000)).charged(shared(1)));
    // Its own budget has too little, so its line is asleep; the other waits for the shared one.
    desk.come(claim(1).charged(own(200_000)));
    desk.come(Claim::without_tenant().charged(shared(60_000_000)));
    desk.ledger
}

fn leases() -> Ledger {
    let mut desk = Desk::new(2);
    let held = desk.come(claim(1));
    desk.now += 4_000_000;
    desk.come(claim(1));
    desk.come(claim(2));
    desk.renew(&[held]);
    // What was in flight while the ledger was lost, and a place that waited.
    let proofs =
        [(desk.id(claim(3)), 100_000_000_000_000 - 1), (desk.id(claim(2)), 100_000_000_000_001)];
    desk.ask(NODE, |ledger, caller, post| ledger.reassert(caller, LEASE, &proofs, post));
    desk.ledger
}

/// Name, what there is, and how it came about.
type Golden = (&'static str, &'static str, fn() -> Ledger);

const ALL: [Golden; 8] = [
    ("empty", "no place", empty),
    ("plain", "two places hold, two wait; one of another process, one that polls", plain),
    ("tenants", "one line is stopped by its cap, two wait for their turns", tenants),
    ("further limits", "three lines are parked, one waits for its turn", further_limits),
    ("one line of two tenants", "listed under the one that is gone", one_line_of_two_tenants),
    ("rates", "four starts of two windows; one place has left, one waits", rates),
    ("budgets", "two budgets are not full, one line is asleep", budgets),
    (
        "leases",
        "two lease ends, three permits under a limit of two, and a place with an old ticket",
        leases,
    ),
];

const FILE: &str = include_str!("golden/ledger-1.txt");

/// As the file has it: a comment, the bytes, and an empty line.
fn block((name, what, history): &Golden) -> String {
    let mut bytes = Vec::new();
    history().encode(&mut bytes);
    let mut text = format!("# {name}: {what}\n");
    for line in bytes.chunks(32) {
        let line: Vec<_> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "{}", line.join(" ")).unwrap();
    }
    text
}

#[test]
fn what_is_written_is_what_was_always_written() {
    let text = ALL.iter().map(block).collect::<Vec<_>>().join("\n");
    assert!(text == FILE, "a stored ledger is not what it was:\n{text}");
}

#[test]
fn what_was_always_written_is_read() {
    let mut blocks = FILE.split("\n\n");
    for (name, _, history) in ALL {
        let lines = blocks.next().unwrap().lines().filter(|line| !line.starts_with('#'));
        let bytes = lines.flat_map(str::split_whitespace);
        let bytes: Vec<_> = bytes.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        let (read, built) = (Ledger::decode(&bytes).unwrap(), history());
        assert_eq!(read, built, "{name}");
        let turns = |ledger: &Ledger| {
            let mut turns: Vec<_> =
                ledger.turns().map(|(line, turn)| (line, turn.to_bits())).collect();
            turns.sort_unstable();
            turns
        };
        assert_eq!(turns(&read), turns(&built), "{name}");
    }
    assert_eq!(blocks.next(), None);
}
