//! Bytes that are no ledger: what each is refused for.

use tower_semaphore_protocol::{DecodeError, Ledger};

/// The parts of a ledger of one place that holds and one that waits.
const PARTS: [&[u8]; 12] = [
    &[1, 1],
    &[1, 7, 0, 0, 0, 0, 0, 0, 0],
    &[1, 0, 50],
    &[1, 0],
    &[1, 0, 2, 0],
    &[1, 9, 0, 2, 0],
    &[0],
    &[0],
    &[0],
    &[0],
    &[0],
    &[0],
];
const VERSION: usize = 0;
const NODES: usize = 1;
const ROWS: usize = 2;
const TERMS: usize = 3;
const HELD: usize = 4;
const WAITING: usize = 5;
const ELSEWHERE: usize = 6;
const TURNS: usize = 7;
const PARKED: usize = 8;
const ASLEEP: usize = 9;
const STARTS: usize = 10;
const BUDGETS: usize = 11;

/// The first ticket of a line.
const TICKET: [u8; 7] = [0x81, 0x80, 0xe9, 0x83, 0xb1, 0xde, 0x16];

fn error(parts: &[(usize, &[u8])]) -> String {
    let mut all = PARTS;
    parts.iter().for_each(|(at, part)| all[*at] = part);
    let error = Ledger::decode(&all.concat()).err();
    error.map_or_else(|| "none".to_owned(), |error| error.to_string())
}

/// The same of a ledger whose waiting place stands in a line: that of tenant 2, or that of its further limit of number 3.
fn error_in_line(is_further: bool, parts: &[(usize, &[u8])]) -> String {
    let terms: [&[u8]; 2] = [&[2, 0, 4, 2, 1, 1, 0, 0], &[2, 0, 12, 2, 1, 1, 0, 0, 3, 9]];
    let waiting = [&[1][..], &TICKET, &[0, 2, 1]].concat();
    let all = [(TERMS, terms[usize::from(is_further)]), (WAITING, &waiting[..])];
    error(&[&all, parts].concat())
}

#[test]
fn a_version_that_is_not_known_is_an_error_of_its_own() {
    assert_eq!(error(&[]), "none");
    let of = |version, oldest_writer| {
        assert_eq!(
            Ledger::decode(&[version, oldest_writer]),
            Err(DecodeError::Version { version, oldest_writer })
        );
    };
    for (version, oldest_writer) in [(2, 1), (2, 2), (1, 2), (0, 1), (1, 0), (255, 255)] {
        of(version, oldest_writer);
    }
    assert_eq!(
        error(&[(VERSION, &[3, 2])]),
        "version of a ledger is 3, to be changed from version 2 on; expected 1"
    );
}

#[test]
fn what_ends_early_or_late_is_refused() {
    let bytes = PARTS.concat();
    for length in 0..bytes.len() {
        assert!(Ledger::decode(&bytes[..length]).is_err(), "{length}");
    }
    assert_eq!(error(&[(BUDGETS, &[])]), "length of a ledger is 30 bytes; expected more");
    assert_eq!(
        error(&[(BUDGETS, &[0, 0])]),
        "number of bytes left at byte 31 of a ledger is 1; expected 0"
    );
}

#[test]
fn a_count_is_bounded_by_the_bytes_that_are_left() {
    let most = [255, 255, 255, 255, 255, 255, 255, 255, 255, 1];
    for part in NODES..=BUDGETS {
        let error = error(&[(part, &most)]);
        assert!(error.contains("is 18446744073709551615; expected at most"), "{part}: {error}");
    }
}

#[test]
fn a_value_out_of_its_range_is_refused() {
    let terms = |terms: &[u8]| {
        let error = error(&[(TERMS, &[&[1], terms].concat())]);
        error
            .split_once(" of a ledger is ")
            .map_or_else(|| error.clone(), |(_, what)| what.to_owned())
    };
    for (bytes, what) in [
        (&[4, 2, 65, 1, 0, 0][..], "65; expected 1 to 64"),
        (&[4, 2, 1, 0, 0, 0], "0; expected 1 to 64"),
        (&[4, 2, 1, 1, 8, 0], "8; expected 0 to 7"),
        (&[4, 128, 128, 128, 8, 1], "16777216; expected 0 to 16777215"),
        (&[4, 2, 1, 1, 0, 255, 255, 255, 127], "268435455; expected 0 to 16777215"),
        (&[1, 255, 255, 255, 255, 16], "4563402751; expected 0 to 4294967295"),
        (&[12, 0, 1, 0, 9], "0; expected 1 to 16777215"),
        (&[12, 0, 1, 3, 0], "0; expected 1 to 16777215"),
        (&[20, 0, 1, 3, 9, 3, 9], "3; expected each number once"),
        (&[36, 0, 1, 3, 9, 8], "8; expected 9 to 86400000000"),
        (&[36, 0, 1, 128, 128, 128, 8, 9, 9], "16777216; expected that of a budget"),
        // A budget of one tenant, of nobody.
        (
            &[36, 0, 1, 131, 148, 129, 8, 9, 9],
            "16796163; expected each number once, and a tenant for its own",
        ),
        (&[7, 9, 0, 0, 232, 7, 0, 0, 1], "0; expected 1 to 4000"),
        (&[7, 9, 0, 1, 231, 7, 0, 0, 1], "999; expected 1000 to 86400000000"),
        (&[7, 9, 0, 1, 232, 7, 28, 0, 1], "28; expected up to a day"),
        (&[2, 9], "2; expected such as go together"),
        (&[8, 9], "8; expected such as go together"),
        (&[100, 0, 1], "100; expected such as go together"),
        (&[132, 0, 1], "132; expected such as go together"),
    ] {
        assert_eq!(terms(bytes), what, "{bytes:?}");
    }
    // 36^11.
    let n = [0, 128, 128, 128, 228, 192, 207, 206, 211, 3, 0];
    assert!(
        error(&[(HELD, &[&[1][..], &n].concat())]).contains("expected below 131621703842267136")
    );
}

#[test]
fn what_is_not_in_order_or_not_used_is_refused() {
    let other = |part, bytes: &[u8], what: &str| assert_eq!(error(&[(part, bytes)]), what);
    let two_nodes = [2, 7, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0];
    let order = "expected one above that before it";
    other(NODES, &two_nodes, &format!("id of a process at byte 11 of a ledger is 7; {order}"));
    let two_nodes = [2, 7, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0];
    other(
        NODES,
        &two_nodes,
        "process at byte 38 of a ledger is 1; expected to be named by an entry",
    );
    other(ROWS, &[1, 2, 50], "process at byte 12 of a ledger is 1; expected below 1");
    other(
        ROWS,
        &[2, 0, 50, 0, 0],
        &format!("row of a process at byte 15 of a ledger is 0; {order}"),
    );
    other(
        ROWS,
        &[2, 0, 50, 0, 1],
        "row at byte 26 of a ledger is 1; expected to be named by an entry",
    );
    other(TERMS, &[2, 0, 0], &format!("terms at byte 16 of a ledger is 1; {order}"));
    other(
        TERMS,
        &[2, 0, 1, 9],
        "terms at byte 26 of a ledger is 1; expected to be named by an entry",
    );
    other(HELD, &[1, 1, 2, 0], "row at byte 17 of a ledger is 1; expected below 1");
    other(HELD, &[1, 0, 2, 1], "terms at byte 19 of a ledger is 1; expected below 1");
    other(
        HELD,
        &[2, 0, 2, 0, 0, 1, 0],
        &format!("number of a place at byte 22 of a ledger is 0; {order}"),
    );
    other(
        WAITING,
        &[1, 9, 0, 0, 0],
        "number of a place at byte 24 of a ledger is 1; expected each place once",
    );
    other(
        HELD,
        &[1, 0, 130, 0, 0],
        "number of a place at byte 18 of a ledger is 2; expected the fewest bytes, of at most 64 bits",
    );
    other(
        BUDGETS,
        &[2, 9, 3, 0, 3],
        &format!("number of a budget at byte 34 of a ledger is 3; {order}"),
    );
    other(
        BUDGETS,
        &[2, 9, 3, 1, 3],
        "number of a budget at byte 34 of a ledger is 3; expected that of a budget, once",
    );
}

#[test]
fn each_line_that_waits_stands_somewhere_once() {
    // Among the turns at the lowest; a tenant's line cannot be parked.
    let turn = [1, 128, 128, 128, 128, 128, 128, 128, 152, 67, 0];
    let in_turn = (TURNS, &turn[..]);
    assert_eq!(error_in_line(false, &[in_turn]), "none");
    assert_eq!(error_in_line(true, &[in_turn]), "none");
    assert_eq!(error_in_line(true, &[(PARKED, &[1, 2, 9, 0])]), "none");
    assert_eq!(error_in_line(true, &[(ASLEEP, &[1, 9, 0])]), "none");
    let ends = |is_further, parts: &[(usize, &[u8])], end: &str| {
        let error = error_in_line(is_further, parts);
        assert!(error.ends_with(end), "{error}");
    };
    ends(false, &[], "is 0; expected to be named by an entry");
    ends(false, &[in_turn, (ASLEEP, &[1, 9, 0])], "is 0; expected one that was not named before");
    ends(
        false,
        &[(PARKED, &[1, 2, 9, 0])],
        "is 0; expected one with further limits, as it is parked",
    );
    ends(
        true,
        &[(PARKED, &[1, 0, 9, 0])],
        "is 0; expected the number of a tenant, or 2^24 and that of a further limit",
    );
    ends(
        true,
        &[(PARKED, &[1, 2, 128, 128, 128, 128, 128, 2, 0])],
        "is 68719476736; expected 36 bits",
    );
    let late = [1, 129, 128, 128, 128, 128, 128, 128, 248, 127, 0];
    ends(true, &[(TURNS, &late)], "expected 4841369599423283200 to 9218868437227405312");
    let listed =
        "expected another tenant than that of the first place, of a line with further limits";
    ends(true, &[in_turn, (ELSEWHERE, &[1, 0, 2])], &format!("is 2; {listed}"));
    ends(false, &[in_turn, (ELSEWHERE, &[1, 0, 3])], &format!("is 3; {listed}"));
    // The ticket of a place without a line.
    let parts = [(WAITING, &[1, 9, 0, 2, 1][..]), in_turn];
    ends(false, &parts, "is 9; expected 100000000000001 to 100000268435455 in a line");
}

#[test]
fn starts_are_in_the_order_of_their_times_and_those_of_a_place_together() {
    let starts = |bytes: &[u8]| error(&[(STARTS, bytes)]);
    let end = |bytes: &[u8], end: &str| assert!(starts(bytes).ends_with(end), "{}", starts(bytes));
    // How many, for how long they are kept, the windows; then time, process, number and window of each.
    assert_eq!(starts(&[2, 9, 1, 9, 5, 0, 2, 0, 0, 0, 0, 0]), "none");
    end(&[2, 9, 1, 9, 5, 0, 2, 0, 1, 0, 0, 0], "is 1; expected the starts of a place together");
    end(
        &[3, 9, 1, 9, 5, 0, 2, 0, 0, 0, 2, 0, 0, 0, 1, 0],
        "is 1; expected the starts of a place together",
    );
    end(&[1, 9, 1, 10, 5, 0, 2, 0], "window at byte 32 of a ledger is 10; expected at most 9");
    end(&[1, 9, 2, 8, 1, 5, 0, 2, 0], "is 1; expected to be named by an entry");
    end(&[1, 9, 1, 9, 5, 1, 2, 0], "is 1; expected below 1");
}
