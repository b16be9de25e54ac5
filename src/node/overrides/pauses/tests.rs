//! A process and its server, without a connection.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::{ANNOUNCED_INTERVAL, KNOWN_MAX, Length, Outcome, Pauses, RETRY, Reading, SLACK};
use crate::backend::{Change, Overrides};
use crate::protocol::{PauseCause, Time};

const MINUTE: Duration = Duration::from_secs(60);

/// A process and its server, with one clock.
#[derive(Default)]
struct Rig {
    pauses: Pauses,
    read: Overrides,
    server: Overrides,
    question: u64,
    now: Time,
}

impl Rig {
    fn ask(&mut self, name: &str, pause: Duration) -> bool {
        self.ask_at_most(name, pause, Duration::from_secs(3600))
    }

    fn ask_at_most(&mut self, name: &str, pause: Duration, most: Duration) -> bool {
        let (seen, length) = (self.read.pauses_version, Length { pause, most });
        self.pauses.ask(&name.into(), length, PauseCause::Status(429), seen, self.now)
    }

    /// Sends the next record. Returns its name, if there was one.
    fn send(&mut self, outcome: Outcome) -> Option<Arc<str>> {
        let record = self.pauses.next(ANNOUNCED_INTERVAL, self.now)?;
        if outcome == Outcome::Recorded {
            self.set(&record.name.clone(), record.change.clone());
        }
        self.pauses.on_outcome(&record, outcome, self.question + 1, self.now);
        Some(record.name)
    }

    fn set(&mut self, name: &str, change: Change) {
        assert!(self.server.change(&name.into(), change, self.now_ms()));
    }

    fn now_ms(&self) -> u64 {
        self.now.nanos() / 1_000_000
    }

    /// Asks, and takes the answer in. Returns the names that changed.
    fn read(&mut self) -> Vec<String> {
        let new = Overrides { now: self.now_ms(), ..self.server.clone() };
        let old = std::mem::replace(&mut self.read, new);
        self.question += 1;
        let mut changed = BTreeSet::new();
        let (new, question, now) = (&self.read, self.question, self.now);
        self.pauses.take_in(&Reading { old: &old, new, question, now }, &mut changed);
        self.pauses.forget_ended(self.now);
        changed.iter().map(ToString::to_string).collect()
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
    }

    fn left(&self, name: &str) -> Option<Duration> {
        self.pauses.of(name, self.now).map(|(.., left)| left)
    }
}

#[test]
fn a_record_is_sent_once_and_read_back() {
    let mut rig = Rig::default();
    assert!(rig.ask("x", MINUTE));
    assert!(!rig.ask("x", MINUTE), "it ends as late");
    assert_eq!(rig.send(Outcome::Recorded).as_deref(), Some("x"));
    assert_eq!(rig.send(Outcome::Recorded), None);
    assert_eq!(rig.read(), Vec::<String>::new(), "the end is the same");
    assert_eq!(rig.left("x"), Some(MINUTE + SLACK));
    rig.pass(MINUTE + SLACK);
    rig.read();
    assert!(rig.pauses.known.is_empty() && !rig.pauses.has_unsent());
}

#[test]
fn one_record_is_in_flight_and_a_refused_one_waits_with_all_others() {
    let mut rig = Rig::default();
    for name in ["a", "b", "c"] {
        rig.ask(name, MINUTE);
    }
    let first = rig.pauses.next(ANNOUNCED_INTERVAL, rig.now).unwrap();
    assert!(rig.pauses.next(ANNOUNCED_INTERVAL, rig.now).is_none());
    rig.pauses.on_outcome(&first, Outcome::Refused, 1, rig.now);
    rig.pass(RETRY - Duration::from_millis(1));
    assert_eq!(rig.send(Outcome::Recorded), None);
    rig.pass(Duration::from_millis(1));
    // Each has its turn.
    for name in ["b", "c", "a"] {
        assert_eq!(rig.send(Outcome::Recorded).as_deref(), Some(name));
    }
    // What is said of a record a second time changes nothing.
    rig.ask("d", MINUTE);
    let last = rig.pauses.next(ANNOUNCED_INTERVAL, rig.now).unwrap();
    rig.pauses.on_outcome(&first, Outcome::Refused, 1, rig.now);
    rig.pauses.on_outcome(&last, Outcome::Unanswered, 1, rig.now);
    rig.pauses.on_outcome(&last, Outcome::Recorded, 1, rig.now);
    assert_eq!(rig.send(Outcome::Recorded).as_deref(), Some("d"), "the next connection does");
}

#[test]
fn servers_that_redirect_to_each_other_are_asked_once_a_second() {
    let mut rig = Rig::default();
    rig.ask("x", MINUTE);
    assert!(rig.send(Outcome::Moved).is_some());
    assert!(rig.send(Outcome::Moved).is_some(), "at once, the first time");
    assert!(rig.send(Outcome::Moved).is_none());
    rig.pass(RETRY);
    assert!(rig.send(Outcome::Recorded).is_some());
}

#[test]
fn a_later_end_that_is_asked_for_while_a_record_is_in_flight_is_sent_too() {
    let mut rig = Rig::default();
    rig.ask("x", MINUTE);
    let first = rig.pauses.next(ANNOUNCED_INTERVAL, rig.now).unwrap();
    rig.ask("x", 2 * MINUTE);
    rig.pauses.on_outcome(&first, Outcome::Recorded, 1, rig.now);
    assert_eq!(rig.pauses.due(), Some(rig.now + ANNOUNCED_INTERVAL));
    rig.pass(ANNOUNCED_INTERVAL - Duration::from_millis(1));
    assert_eq!(rig.send(Outcome::Recorded), None);
    rig.pass(Duration::from_millis(1));
    assert!(rig.send(Outcome::Recorded).is_some());
    rig.read();
    assert_eq!(rig.left("x"), Some(2 * MINUTE + SLACK - ANNOUNCED_INTERVAL));
    assert_eq!(rig.pauses.due(), None);
}

#[test]
fn a_resume_ends_what_was_asked_for_before_it_was_read() {
    for outcome in [Outcome::Recorded, Outcome::Unanswered, Outcome::Refused] {
        let mut rig = Rig::default();
        rig.ask("x", MINUTE);
        rig.send(outcome);
        rig.set("x", Change::Resume);
        rig.pass(RETRY);
        // A repeat changes nothing.
        rig.send(Outcome::Recorded);
        assert!(rig.server.pauses.is_empty(), "{outcome:?}");
        assert_eq!(rig.read(), ["x"]);
        assert_eq!(rig.left("x"), None);
        assert!(!rig.pauses.has_unsent());
        // What the upstream says after that counts.
        assert!(rig.ask("x", MINUTE));
        rig.send(Outcome::Recorded);
        rig.read();
        assert_eq!(rig.left("x"), Some(MINUTE + SLACK));
    }
}

#[test]
fn a_record_that_was_lost_is_sent_again_and_is_no_longer() {
    let mut rig = Rig::default();
    rig.ask("x", MINUTE);
    rig.send(Outcome::Recorded);
    rig.read();
    rig.pass(MINUTE / 2);
    rig.server = Overrides::default();
    assert_eq!(rig.read(), Vec::<String>::new());
    assert_eq!(rig.send(Outcome::Recorded).as_deref(), Some("x"));
    rig.read();
    assert_eq!(rig.left("x"), Some(MINUTE / 2 + SLACK));
    // A resume counts, although its version is lower than those before the loss.
    rig.server = Overrides::default();
    rig.read();
    let before = rig.now;
    rig.now = Time::ZERO;
    rig.set("x", Change::Resume);
    rig.now = before;
    rig.send(Outcome::Recorded);
    assert!(rig.server.pauses.is_empty());
    assert_eq!(rig.read(), ["x"]);
    // One that hardly lasts is not worth it.
    rig.ask("y", Duration::from_secs(2));
    rig.send(Outcome::Recorded);
    rig.read();
    rig.pass(Duration::from_millis(1300));
    rig.server = Overrides::default();
    rig.read();
    assert!(rig.left("y").is_some() && !rig.pauses.has_unsent());
}

/// Nobody read while nothing was there, as in a failover.
#[test]
fn a_resume_right_after_a_loss_counts_though_the_clock_is_behind() {
    let mut rig = Rig::default();
    rig.ask("x", MINUTE);
    rig.send(Outcome::Recorded);
    rig.read();
    rig.server = Overrides::default();
    let before = rig.now;
    rig.now = Time::ZERO;
    rig.set("x", Change::Resume);
    rig.now = before;
    assert_eq!(rig.read(), ["x"]);
    assert!(rig.left("x").is_none() && !rig.pauses.has_unsent());
    // What the upstream says after that counts, and the next reading has the same resume.
    rig.ask("x", MINUTE);
    rig.send(Outcome::Recorded);
    rig.set("y", Change::Resume);
    rig.read();
    assert_eq!(rig.left("x"), Some(MINUTE + SLACK));
}

#[test]
fn an_answer_from_before_a_record_says_nothing_of_it() {
    let mut rig = Rig::default();
    rig.ask("x", MINUTE);
    let record = rig.pauses.next(ANNOUNCED_INTERVAL, rig.now).unwrap();
    rig.set("x", record.change.clone());
    // A question is in flight: only the one after it must find the record.
    rig.pauses.on_outcome(&record, Outcome::Recorded, rig.question + 2, rig.now);
    let server = std::mem::take(&mut rig.server);
    rig.read();
    assert!(!rig.pauses.has_unsent());
    rig.server = server;
    rig.read();
    assert!(!rig.pauses.has_unsent());
    rig.server = Overrides::default();
    rig.read();
    assert!(rig.pauses.has_unsent());
}

#[test]
fn a_record_from_before_the_clock_stepped_back_lasts_no_longer_than_a_pause_may() {
    let mut rig = Rig::default();
    rig.pass(Duration::from_secs(100 * 3600));
    rig.ask("x", MINUTE);
    rig.send(Outcome::Recorded);
    let stepped = Overrides { now: 0, ..rig.server.clone() };
    let mut rig = Rig { server: stepped, ..Rig::default() };
    rig.read();
    let hour = Duration::from_secs(3600);
    assert_eq!(rig.left("x"), Some(hour + SLACK));
    // It is not longer because something else changes.
    rig.pass(hour);
    rig.set("y", Change::Limit(Some(1)));
    rig.read();
    assert_eq!(rig.left("x"), Some(SLACK));
    rig.pass(SLACK);
    rig.set("y", Change::Limit(Some(2)));
    rig.read();
    rig.set("y", Change::Limit(Some(3)));
    rig.read();
    assert_eq!(rig.left("x"), None);
}

#[test]
fn nothing_is_kept_of_pauses_that_are_over_although_no_server_answers() {
    let mut rig = Rig::default();
    for i in 0..100_000 {
        rig.ask(&i.to_string(), Duration::from_secs(1));
    }
    assert_eq!(rig.pauses.known.len(), KNOWN_MAX);
    assert_eq!(rig.pauses.unsent.len(), KNOWN_MAX);
    rig.pass(Duration::from_secs(1) + SLACK);
    assert!(rig.ask("x", MINUTE), "the others are over");
    assert_eq!(rig.pauses.known.len(), 1);
    rig.pass(MINUTE + SLACK);
    rig.pauses.forget_ended(rig.now);
    assert!(rig.pauses.known.is_empty() && rig.pauses.unsent.is_empty());
    // What only the slack is left of is not sent.
    rig.ask("x", Duration::from_secs(1));
    rig.pass(Duration::from_secs(1));
    assert_eq!(rig.send(Outcome::Recorded), None);
    assert!(rig.ask("x", Duration::from_secs(1)));
    assert!(rig.send(Outcome::Recorded).is_some());
}

#[test]
fn a_pause_lasts_longer_than_was_asked_for_by_a_part_of_it_and_never_than_it_may() {
    let ms = Duration::from_millis;
    for (pause, most, lasts) in [
        (16, 60_000, 18),
        (16, 17, 17),
        (16, 16, 16),
        (800, 60_000, 900),
        (2000, 60_000, 2250),
        (59_900, 60_000, 60_000),
        (60_000, 3_600_000, 60_250),
    ] {
        let mut rig = Rig::default();
        // Not at a whole ms.
        rig.pass(Duration::from_nanos(1));
        rig.ask_at_most("x", ms(pause), ms(most));
        assert_eq!(rig.left("x"), Some(ms(lasts)), "{pause} of {most}");
        rig.pass(Duration::from_nanos(1));
        rig.send(Outcome::Recorded);
        let ends = rig.server.pauses["x"].until;
        assert!(ends <= lasts, "{pause} of {most}: {ends}");
    }
}

#[test]
fn a_record_that_is_repeated_is_not_sent_once_more_for_a_later_end_that_it_has() {
    let mut rig = Rig::default();
    rig.ask("x", MINUTE);
    rig.send(Outcome::Unanswered);
    rig.ask("x", 2 * MINUTE);
    rig.pass(ANNOUNCED_INTERVAL / 2);
    assert!(rig.send(Outcome::Recorded).is_some());
    rig.pass(ANNOUNCED_INTERVAL / 2);
    assert_eq!(rig.send(Outcome::Recorded), None);
}

#[test]
fn a_thousand_responses_a_second_are_ten_records_however_short_their_pauses_are() {
    let ms = Duration::from_millis;
    for (pause, most, steps) in [(12, 60_000, 1), (1, 60_000, 2), (12, 12, 1), (60_000, 60_000, 1)]
    {
        let mut rig = Rig::default();
        let mut records = Vec::new();
        for _ in 0..1000 / steps {
            rig.ask_at_most("x", ms(pause), ms(most));
            assert!(rig.left("x").is_some_and(|left| left >= ms(pause)), "it applies here");
            if rig.send(Outcome::Recorded).is_some() {
                records.push(rig.now);
            }
            rig.pass(ms(steps));
            rig.read();
        }
        let gaps = records.windows(2).map(|pair| pair[1].since(pair[0]));
        assert!(gaps.min() >= Some(ANNOUNCED_INTERVAL), "{pause}: {records:?}");
        assert!(records.len() >= 9, "{pause}: {records:?}");
        // Another process does not find it over, unless it is shorter than that.
        let ends = rig.server.pauses["x"].until;
        assert!(ends + 100 >= rig.now_ms(), "{pause}: {ends}");
        // Nothing is kept of it.
        rig.pass(ms(pause) + SLACK);
        rig.read();
        assert!(rig.pauses.known.is_empty() && !rig.pauses.has_unsent(), "{pause}");
    }
}
