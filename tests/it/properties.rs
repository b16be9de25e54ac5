//! The checks of the fuzz targets in the normal run, on bytes that are likely to matter and on the whole
//! corpus. Private functions are checked where they are.

#[path = "../../fuzz/checks.rs"]
mod checks;

use std::path::Path;

use proptest::collection::vec;
use proptest::prelude::*;

/// Runs a check on every file of a corpus.
fn corpus(target: &str, check: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target);
    let mut files = 0;
    for entry in
        std::fs::read_dir(&dir).unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
    {
        let path = entry.unwrap().path();
        let data = std::fs::read(&path).unwrap();
        let checked = std::panic::catch_unwind(|| check(&data));
        assert!(checked.is_ok(), "{}", path.display());
        files += 1;
    }
    assert!(files > 3, "{target}: {files} files");
}

#[test]
fn the_corpus_of_names_holds() {
    corpus("name", checks::names);
}

#[test]
fn the_corpus_of_headers_holds() {
    corpus("headers", |data| {
        checks::headers(data);
        checks::policies(data);
    });
}

#[test]
fn the_corpus_of_place_ids_holds() {
    corpus("place_id", checks::place_ids);
}

#[test]
fn the_corpus_of_ledgers_holds() {
    corpus("ledger", checks::ledgers);
}

/// One part of a name: valid and invalid characters, and lengths around the bounds.
fn part() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..6),
        "[a-c:%#!|.-]{0,5}".prop_map(String::into_bytes),
        "[ab]{58,68}".prop_map(String::into_bytes),
        "(%|:|é){18,24}".prop_map(String::into_bytes),
    ]
}

/// Two names as the check reads them, often nearly equal.
fn two_names() -> impl Strategy<Value = Vec<u8>> {
    let list = || vec(part(), 1..5).prop_map(|parts| parts.join(&b'|'));
    (list(), list(), any::<prop::sample::Index>(), any::<u8>(), 0..4u8).prop_map(
        |(one, other, at, byte, how)| {
            let mut two = one.clone();
            match how {
                _ if two.is_empty() => {}
                0 => two = other,
                1 => two[at.index(one.len())] = byte,
                2 => two.insert(at.index(one.len()), byte),
                _ => drop(two.remove(at.index(one.len()))),
            }
            [one, two].join(&b'\n')
        },
    )
}

/// The text of an id, sometimes with an error in it.
fn id_text() -> impl Strategy<Value = Vec<u8>> {
    let text = "~?[0-9A-Za-z]{10,12}:?[0-9a-zA-Z]{0,12}".prop_map(String::into_bytes);
    prop_oneof![text, vec(any::<u8>(), 0..40)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn two_names_are_one_only_if_their_parts_are(data in two_names()) {
        checks::names(&data);
    }

    #[test]
    fn whatever_a_layer_accepts_gives_a_response_that_is_well_formed(
        full in 100..700u16,
        missing in 390..610u16,
        rest in vec(any::<u8>(), 9),
        name in "[A-Za-z0-9._-]{0,42}|[ -~]{1,5}",
    ) {
        let mut data = full.to_le_bytes().to_vec();
        data.extend(missing.to_le_bytes());
        data.extend(rest);
        data.extend(name.into_bytes());
        checks::headers(&data);
    }

    #[test]
    fn a_policy_takes_what_is_in_its_range(data in vec(any::<u8>(), 16), small in 0..40_000u64, wait in 0..4_000_000u64) {
        checks::policies(&data);
        checks::policies(&[small.to_le_bytes(), wait.to_le_bytes()].concat());
    }

    #[test]
    fn an_id_is_read_as_it_was_written_and_nothing_else_is(
        text in id_text(),
        two in vec(any::<u8>(), 34),
        same_node in any::<bool>(),
    ) {
        checks::place_ids(&text);
        let mut two = two;
        if same_node {
            two.copy_within(0..8, 17);
        }
        checks::place_ids(&two);
    }
}
