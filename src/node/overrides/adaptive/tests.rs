use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{Adaptations, Sending, heard};
use crate::backend::{Change, Overrides};
use crate::node::overrides::pauses::{Outcome, RETRY, Reading};
use crate::protocol::{Adapted, Adaptive, Adjustment, SentUnder, Time};

const RANGE: Adaptive = Adaptive::between(5, 100);
/// The server's clock at the process's moment 0, µs.
const EPOCH: u64 = 1_700_000_000_000_000;

fn x() -> Arc<str> {
    "x".into()
}

fn at(ms: u64) -> Time {
    Time::ZERO + Duration::from_secs(3600) + Duration::from_millis(ms)
}

/// A number that changed at this moment, in ms, and was lowered then.
fn number(limit: u32, ms: u64) -> Adapted {
    let changed = EPOCH + ms * 1000;
    Adapted { limit, lowered: changed, changed }
}

fn under(version: u64) -> SentUnder {
    SentUnder { version, in_use: u32::MAX }
}

/// A message that comes as the number changes.
fn hear(all: &mut Adaptations, adapted: Adapted, asked: u64) -> bool {
    let ms = (adapted.changed - EPOCH) / 1000;
    all.hear("x", heard(adapted, 0, at(ms)), asked)
}

/// Takes in a reading at this moment, in ms, that has this number. Returns whether it changed anything.
fn read(all: &mut Adaptations, adapted: Option<Adapted>, question: u64, ms: u64) -> bool {
    let mut new = Overrides { now: EPOCH / 1000 + ms, ..Overrides::default() };
    if let Some(adapted) = adapted {
        new.adapted_version = adapted.changed;
        new.adapted.insert(x(), adapted);
    }
    let (old, mut changed) = (Overrides::default(), BTreeSet::new());
    all.take_in(&Reading { old: &old, new: &new, question, now: at(ms) }, 0, &mut changed);
    !changed.is_empty()
}

fn limit(all: &Adaptations, ms: u64) -> Option<u32> {
    all.of("x", at(ms)).map(|here| here.adapted.limit)
}

fn adjustment(sending: &Sending) -> Adjustment {
    match sending.change {
        Change::Adapt { adjustment, .. } => adjustment,
        _ => panic!("{sending:?}"),
    }
}

/// Sends everything. Returns the versions under which decreases were asked for.
fn send(all: &mut Adaptations, now: Time) -> Vec<u64> {
    let mut versions = Vec::new();
    while let Some(sending) = all.next(now) {
        assert!(all.next(now).is_none(), "one at a time");
        if let Adjustment::Lower(sent) = adjustment(&sending) {
            versions.push(sent.version);
        }
        all.on_outcome(&sending, Outcome::Recorded, now);
    }
    versions
}

#[test]
fn one_decrease_is_asked_for_under_one_version() {
    let mut all = Adaptations::default();
    assert!(all.lower(&x(), RANGE, under(0), at(0)));
    assert!(!all.lower(&x(), RANGE, under(0), at(0)), "it waits");
    assert_eq!(send(&mut all, at(0)), [0]);
    assert!(!all.lower(&x(), RANGE, under(0), at(1)), "it is answered");
    let lowered = number(90, 1);
    assert!(hear(&mut all, lowered, 0));
    assert!(!all.lower(&x(), RANGE, under(0), at(2000)), "it was sent before the decrease");
    assert!(all.lower(&x(), RANGE, under(lowered.changed), at(2)));
    assert_eq!(send(&mut all, at(2)), [lowered.changed]);
}

#[test]
fn growth_makes_no_signal_stale() {
    let mut all = Adaptations::default();
    let lowered = number(50, 1);
    hear(&mut all, lowered, 0);
    let grown = Adapted { limit: 51, lowered: lowered.lowered, ..number(51, 1500) };
    hear(&mut all, grown, 0);
    assert!(all.lower(&x(), RANGE, under(lowered.changed), at(1600)));
}

#[test]
fn at_the_minimum_nothing_is_asked() {
    let mut all = Adaptations::default();
    hear(&mut all, number(5, 1), 0);
    assert!(!all.lower(&x(), RANGE, under(EPOCH + 1000), at(2)));
    assert!(all.lower(&x(), Adaptive::between(3, 100), under(EPOCH + 1000), at(2)));
}

#[test]
fn at_the_minimum_its_record_is_kept_by_refusals() {
    let half_ms = u64::try_from(Adapted::KEPT.as_millis()).expect("ten minutes") / 2;
    let mut all = Adaptations::default();
    hear(&mut all, number(5, 0), 0);
    assert!(!all.lower(&x(), RANGE, under(EPOCH), at(half_ms - 1)));
    assert!(all.lower(&x(), RANGE, under(EPOCH), at(half_ms)));
    assert_eq!(send(&mut all, at(half_ms)), [EPOCH]);
    assert!(!all.lower(&x(), RANGE, under(EPOCH), at(half_ms + 999)));
    let kept = Adapted { lowered: EPOCH, ..number(5, half_ms) };
    assert!(hear(&mut all, kept, 0));
    assert!(!all.lower(&x(), RANGE, under(EPOCH), at(half_ms + 1000)));
}

#[test]
fn what_was_not_recorded_is_asked_again_by_the_next_response() {
    for outcome in [Outcome::Unanswered, Outcome::Moved] {
        let mut all = Adaptations::default();
        all.lower(&x(), RANGE, under(0), at(0));
        let sending = all.next(at(0)).expect("it is sent");
        all.on_outcome(&sending, outcome, at(1));
        assert!(all.lower(&x(), RANGE, under(0), at(2)), "{outcome:?}");
        assert!(all.next(at(2)).is_none(), "{outcome:?}: not at once");
        assert_eq!(all.due(), Some(at(1) + RETRY));
        assert_eq!(send(&mut all, at(1) + RETRY), [0], "{outcome:?}");
        assert_eq!(all.due(), None);
    }
}

/// The server refuses a name that it does not know if it has as many as may. Those that it knows go on.
#[test]
fn names_without_a_record_do_not_delay_those_that_have_one() {
    let names: Vec<Arc<str>> = (0..50).map(|i| i.to_string().into()).collect();
    let mut all = Adaptations::default();
    hear(&mut all, number(90, 0), 0);
    for (round, known) in [(0, 90), (1, 81), (2, 72)] {
        let begin = 1500 * round;
        for name in &names {
            all.lower(name, RANGE, under(0), at(begin));
        }
        let mut refused = 0;
        assert!(all.lower(&x(), RANGE, under(EPOCH + begin * 1000), at(begin + 1)), "{known}");
        let lowered = loop {
            let sending = all.next(at(begin + 1)).expect("it is sent at once");
            let is_known = sending.name == x();
            let outcome = if is_known { Outcome::Recorded } else { Outcome::Refused };
            all.on_outcome(&sending, outcome, at(begin + 1));
            refused += u32::from(!is_known);
            if is_known {
                break adjustment(&sending);
            }
        };
        assert_eq!(lowered, Adjustment::Lower(under(EPOCH + begin * 1000)));
        assert_eq!(refused, 1, "the others are not asked for");
        assert!(!all.lower(&names[7], RANGE, under(0), at(begin + 1000)), "within a second");
    }
    // What is refused for one that it knows is refused for all.
    all.lower(&x(), RANGE, under(u64::MAX), at(6000));
    let sending = all.next(at(6000)).expect("it is sent");
    all.on_outcome(&sending, Outcome::Refused, at(6000));
    assert!(all.lower(&x(), RANGE, under(u64::MAX), at(6001)));
    assert!(all.next(at(6001)).is_none());
    assert_eq!(all.due(), Some(at(6000) + RETRY));
    assert_eq!(send(&mut all, at(6000) + RETRY), [u64::MAX]);
}

#[test]
fn names_that_nobody_answers_for_fill_no_memory() {
    let mut all = Adaptations::default();
    for i in 0..3 * super::KNOWN_MAX {
        all.lower(&i.to_string().into(), RANGE, under(0), at(0));
        all.forget_ended(at(0));
    }
    assert_eq!(all.by_name.len(), super::KNOWN_MAX);
    assert!(all.unsent.len() <= super::KNOWN_MAX);
    // The next that are sent make room.
    assert!(all.next(at(1) + RETRY).is_none());
    all.forget_ended(at(1) + RETRY);
    assert!(all.by_name.is_empty());
}

#[test]
fn what_could_not_be_sent_in_time_is_dropped() {
    let mut all = Adaptations::default();
    all.lower(&x(), RANGE, under(0), at(0));
    assert!(all.next(at(1) + RETRY).is_none());
    assert!(!all.has_unsent());
    assert!(all.lower(&x(), RANGE, under(0), at(1) + RETRY));
    assert_eq!(send(&mut all, at(1) + RETRY), [0]);
}

#[test]
fn growth_is_asked_for_once_and_never_where_nothing_is_known() {
    let mut all = Adaptations::default();
    assert!(!all.raise(&x(), RANGE, at(0)));
    hear(&mut all, number(50, 0), 0);
    assert!(all.raise(&x(), RANGE, at(0)));
    assert!(!all.raise(&x(), RANGE, at(0)));
    let sending = all.next(at(0)).expect("it is sent");
    assert_eq!(adjustment(&sending), Adjustment::Raise);
    // A refusal counts for more.
    all.raise(&x(), RANGE, at(0));
    all.lower(&x(), RANGE, under(EPOCH), at(0));
    all.on_outcome(&sending, Outcome::Recorded, at(0));
    assert_eq!(send(&mut all, at(0)), [EPOCH]);
}

#[test]
fn the_latest_change_counts_whatever_brings_it() {
    let mut all = Adaptations::default();
    assert!(hear(&mut all, number(90, 1), 0));
    assert!(!hear(&mut all, number(90, 1), 0), "twice");
    assert!(hear(&mut all, number(81, 3), 1));
    assert!(!hear(&mut all, number(90, 2), 1), "late");
    // The answer to question 1 was made before the message.
    assert!(!read(&mut all, Some(number(90, 1)), 1, 4));
    assert_eq!(limit(&all, 4), Some(81));
    assert!(!read(&mut all, Some(number(81, 3)), 2, 5));
    assert!(read(&mut all, Some(number(72, 6)), 3, 7), "a message was lost");
    assert_eq!(limit(&all, 7), Some(72));
}

#[test]
fn a_loss_of_data_ends_it() {
    let mut all = Adaptations::default();
    hear(&mut all, number(90, 1), 3);
    assert!(all.is_unread());
    assert!(!read(&mut all, None, 3, 2), "perhaps the answer was made before the message");
    assert!(all.is_unread(), "the next answer must have all");
    assert!(read(&mut all, None, 4, 3));
    assert!(!all.is_unread());
    assert_eq!(limit(&all, 3), None);
}

#[test]
fn it_ends_by_itself() {
    let kept_ms = u64::try_from(Adapted::KEPT.as_millis()).expect("ten minutes");
    let mut all = Adaptations::default();
    hear(&mut all, number(90, 0), 0);
    assert_eq!(limit(&all, kept_ms - 1), Some(90));
    assert_eq!(limit(&all, kept_ms), None);
    all.forget_ended(at(kept_ms));
    assert!(all.by_name.is_empty());
    // One that a process reads late ends at the same time, and may grow as early.
    read(&mut all, Some(number(90, 0)), 1, 2000);
    let here = all.of("x", at(2000)).expect("a number");
    assert_eq!((here.since, here.ends), (at(0), at(kept_ms)));
    assert!(read(&mut all, Some(number(90, 0)), 2, kept_ms), "it is over");
}

#[test]
fn messages_alone_fill_no_memory() {
    let mut all = Adaptations::default();
    for i in 0..3 * super::KNOWN_MAX {
        all.hear(&i.to_string(), heard(number(90, 0), 0, at(0)), 0);
    }
    assert_eq!(all.by_name.len(), super::KNOWN_MAX);
}
