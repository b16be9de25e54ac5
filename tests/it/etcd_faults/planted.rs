//! Tests of the judge with small histories: one without a fault passes, and each planted fault is found, alone.

use tower_semaphore::protocol::NodeId;
use tower_semaphore::protocol::liveness::Row;

use super::history::{Change, Entry, Id, Place, Snapshot};
use super::judge::{Report, Rule, excuse, judge};

const LIMIT: u64 = 1;
const MS: u64 = 1000;
/// The first time, as etcd's values have it.
const START: u64 = 1_800_000_000_000_000;

const A: NodeId = NodeId::new(1);
const B: NodeId = NodeId::new(2);
const C: NodeId = NodeId::new(3);

/// A history of one semaphore, built value by value.
struct History {
    entries: Vec<Entry>,
    now: u64,
    version: i64,
}

fn place(ticket: Option<u64>) -> Place {
    Place { seconds: 1, cost: 1, ticket }
}

fn held(node: NodeId, n: u64) -> (Id, Place) {
    ((node, n), place(None))
}

fn waits(node: NodeId, n: u64, ticket: u64) -> (Id, Place) {
    ((node, n), place(Some(ticket)))
}

impl History {
    /// All processes live.
    fn new() -> Self {
        let mut history = Self { entries: Vec::new(), now: START, version: 0 };
        for node in [A, B, C] {
            history.sign(node, 1);
        }
        history
    }

    fn push(&mut self, version: i64, change: Change) {
        let revision = self.entries.len() as i64 + 2;
        self.entries.push(Entry { revision, version, change });
    }

    fn sign(&mut self, node: NodeId, version: i64) {
        let row = Row { node, seconds: 1 };
        self.push(version, Change::Sign { row, is_there: version > 0 });
    }

    fn put(&mut self, writer: NodeId, places: &[(Id, Place)]) {
        self.put_as(writer, true, places);
    }

    fn put_as(&mut self, writer: NodeId, is_promoted: bool, places: &[(Id, Place)]) {
        self.now += MS;
        self.version += 1;
        let places = places.iter().copied().collect();
        let value = Snapshot { writer: Some(writer), time: self.now, is_promoted, places };
        self.push(self.version, Change::Semaphore { name: "x".to_owned(), value: Some(value) });
    }

    fn delete(&mut self) {
        self.version = 0;
        self.push(0, Change::Semaphore { name: "x".to_owned(), value: None });
    }

    fn judge(&self) -> Report {
        judge(&self.entries, |_| LIMIT)
    }

    /// Expects this violation and no other, of the last entry.
    #[track_caller]
    fn breaks(&self, rule: Rule) {
        let found = self.judge().violations;
        let rules: Vec<_> = found.iter().map(|found| found.rule).collect();
        assert_eq!(rules, [rule], "{found:?}");
        assert_eq!(found[0].revision, self.entries.last().unwrap().revision);
        // What came before it was without fault, so the rule is not broken by everything.
        let before = &self.entries[..self.entries.len() - 1];
        assert!(judge(before, |_| LIMIT).violations.is_empty());
    }

    #[track_caller]
    fn is_clean(&self) -> Report {
        let report = self.judge();
        assert!(report.violations.is_empty(), "{:?}", report.violations);
        report
    }

    /// `A` holds; `B` and `C` wait, in this order.
    fn queue() -> Self {
        let mut history = Self::new();
        history.put(A, &[held(A, 1)]);
        history.put(B, &[held(A, 1), waits(B, 1, 10)]);
        history.put(C, &[held(A, 1), waits(B, 1, 10), waits(C, 1, 11)]);
        history
    }

    /// The grace of a row passes.
    fn wait_for_grace(&mut self) {
        self.now += 2000 * MS;
    }
}

#[test]
fn a_queue_that_is_served_in_order_is_without_fault() {
    let mut history = History::queue();
    history.put(A, &[held(B, 1), waits(C, 1, 11)]);
    history.put(B, &[held(C, 1), waits(B, 2, 12)]);
    history.put(C, &[held(B, 2)]);
    history.delete();
    history.put(C, &[held(C, 2)]);
    let report = history.is_clean();
    assert_eq!((report.versions, report.granted, report.at_once), (8, 3, 2));
    assert_eq!((report.returned, report.forgotten.len()), (0, 0));
}

#[test]
fn the_dead_are_forgotten_without_fault() {
    let mut history = History::queue();
    history.sign(A, 0);
    history.sign(B, 0);
    // The waiting one at once, the other after the grace.
    history.put_as(C, false, &[held(A, 1), waits(C, 1, 11)]);
    history.wait_for_grace();
    history.put(C, &[held(C, 1)]);
    // Returns with its ticket.
    history.sign(B, 1);
    history.put(B, &[held(C, 1), waits(B, 2, 10)]);
    let report = history.is_clean();
    assert_eq!(report.forgotten["x"], [1, 1]);
    assert_eq!((report.returned, report.signs_gone, report.signs_back), (1, 2, 1));
}

#[test]
fn a_missed_version_is_found() {
    let mut history = History::queue();
    history.version += 1;
    history.put(A, &[held(B, 1), waits(C, 1, 11)]);
    history.breaks(Rule::Complete);
    // A deletion that was missed.
    let mut history = History::queue();
    history.version = 0;
    history.put(A, &[held(B, 1), waits(C, 1, 11)]);
    history.breaks(Rule::Complete);
    // A sign of life that went unseen.
    let mut history = History::queue();
    history.sign(A, 1);
    history.breaks(Rule::Complete);
    let mut history = History::new();
    history.delete();
    history.breaks(Rule::Complete);
}

#[test]
fn a_permit_above_the_limit_is_found() {
    let mut history = History::new();
    history.put(A, &[held(A, 1)]);
    history.put(B, &[held(A, 1), held(B, 1)]);
    history.breaks(Rule::Cap);
    // One place of a higher cost, too.
    let mut history = History::new();
    history.put(A, &[((A, 1), Place { cost: 2, ..place(None) })]);
    history.breaks(Rule::Cap);
}

#[test]
fn a_newcomer_in_the_midst_of_the_queue_is_found() {
    for ticket in [9, 10, 11] {
        let mut history = History::queue();
        let places = [held(A, 1), waits(B, 1, 10), waits(C, 1, 11), waits(A, 2, ticket)];
        history.put(A, &places);
        history.breaks(Rule::Tail);
    }
}

#[test]
fn a_ticket_of_another_process_is_no_proof() {
    let mut history = History::queue();
    history.sign(B, 0);
    history.put_as(C, false, &[held(A, 1), waits(C, 1, 11)]);
    history.put(A, &[held(A, 1), waits(C, 1, 11), waits(A, 2, 10)]);
    history.breaks(Rule::Tail);
}

#[test]
fn a_ticket_is_a_proof_only_once() {
    let mut history = History::queue();
    history.put(B, &[held(A, 1), waits(C, 1, 11)]);
    history.put(B, &[held(A, 1), waits(C, 1, 11), waits(B, 2, 10)]);
    history.is_clean();
    history.put(B, &[held(A, 1), waits(C, 1, 11), waits(B, 2, 10), waits(B, 3, 10)]);
    history.breaks(Rule::Tail);
}

#[test]
fn a_ticket_that_was_used_is_no_proof() {
    // Unless the grant was in vain.
    let granted = || {
        let mut history = History::queue();
        history.put(A, &[held(B, 1), waits(C, 1, 11)]);
        history
    };
    let mut history = granted();
    history.sign(B, 0);
    history.wait_for_grace();
    history.put_as(A, false, &[waits(C, 1, 11)]);
    history.put_as(B, false, &[waits(B, 2, 10), waits(C, 1, 11)]);
    history.is_clean();
    let mut history = granted();
    history.put_as(B, false, &[waits(C, 1, 11)]);
    history.put_as(B, false, &[waits(B, 2, 10), waits(C, 1, 11)]);
    history.breaks(Rule::Tail);
}

#[test]
fn a_grant_out_of_turn_is_found() {
    let mut history = History::queue();
    history.put(A, &[held(C, 1), waits(B, 1, 10)]);
    history.breaks(Rule::Heads);
}

#[test]
fn a_permit_that_is_passed_on_over_a_return_is_excused_once() {
    let returned = || {
        let mut history = History::queue();
        history.sign(B, 0);
        history.put_as(C, false, &[held(A, 1), waits(C, 1, 11), waits(C, 2, 12)]);
        history.put(A, &[held(C, 1), waits(C, 2, 12)]);
        history.sign(B, 1);
        history.put(B, &[held(C, 1), waits(B, 2, 10), waits(C, 2, 12)]);
        history
    };
    let mut history = returned();
    history.put(C, &[held(C, 2), waits(B, 2, 10)]);
    history.put(C, &[held(C, 2), waits(B, 2, 10), waits(C, 3, 13)]);
    history.is_clean();
    history.put(C, &[held(C, 3), waits(B, 2, 10)]);
    history.breaks(Rule::Heads);
    // Another process has nothing to pass on.
    let mut history = returned();
    history.put_as(C, false, &[waits(B, 2, 10), waits(C, 2, 12)]);
    history.put(A, &[held(C, 2), waits(B, 2, 10)]);
    history.breaks(Rule::Heads);
    // A place that did not return is passed by nobody.
    let mut history = History::new();
    history.put(C, &[held(C, 1), waits(B, 1, 10), waits(C, 2, 11)]);
    history.put(C, &[held(C, 2), waits(B, 1, 10)]);
    history.breaks(Rule::Heads);
}

#[test]
fn a_newcomer_that_passes_the_queue_is_found() {
    let mut history = History::queue();
    history.put(A, &[held(A, 2), waits(B, 1, 10), waits(C, 1, 11)]);
    history.breaks(Rule::Newcomer);
    // Newcomers of the same transaction wait behind it.
    let mut history = History::new();
    history.put(A, &[held(A, 1), waits(A, 2, 10)]);
    history.is_clean();
}

#[test]
fn a_grant_at_once_after_a_return_is_excused_once() {
    let mut history = History::queue();
    history.sign(B, 0);
    history.put_as(C, false, &[held(A, 1), waits(C, 1, 11)]);
    history.sign(B, 1);
    history.put_as(A, false, &[waits(C, 1, 11)]);
    history.put(B, &[held(B, 2), waits(C, 1, 11)]);
    history.is_clean();
    history.put(B, &[held(B, 3), waits(C, 1, 11)]);
    history.breaks(Rule::Newcomer);
}

#[test]
fn a_permit_that_nobody_gets_is_found() {
    let mut history = History::queue();
    history.put_as(A, false, &[waits(B, 1, 10), waits(C, 1, 11)]);
    history.is_clean();
    history.put(A, &[waits(B, 1, 10), waits(C, 1, 11)]);
    history.breaks(Rule::Idle);
}

#[test]
fn a_permit_that_becomes_a_ticket_is_found() {
    let mut history = History::queue();
    history.put_as(B, false, &[waits(A, 1, 5), waits(B, 1, 10), waits(C, 1, 11)]);
    history.breaks(Rule::Stay);
    let mut history = History::queue();
    history.put(B, &[held(A, 1), waits(B, 1, 12), waits(C, 1, 11)]);
    history.breaks(Rule::Stay);
}

#[test]
fn a_living_process_that_is_forgotten_is_found() {
    // The one that holds, and one that waits.
    let mut history = History::queue();
    history.put(C, &[held(B, 1), waits(C, 1, 11)]);
    history.breaks(Rule::Forgotten);
    let mut history = History::queue();
    history.put(C, &[held(A, 1), waits(C, 1, 11)]);
    history.breaks(Rule::Forgotten);
    // One whose sign of life is there again.
    let mut history = History::queue();
    history.sign(A, 0);
    history.wait_for_grace();
    history.put(C, &[held(A, 1), waits(B, 1, 10), waits(C, 1, 11), waits(C, 2, 12)]);
    history.sign(A, 1);
    history.put(C, &[held(B, 1), waits(C, 1, 11), waits(C, 2, 12)]);
    history.breaks(Rule::Forgotten);
}

#[test]
fn a_permit_that_is_forgotten_before_the_grace_is_found() {
    let mut history = History::queue();
    history.sign(A, 0);
    history.now += 1998 * MS;
    history.put(C, &[held(B, 1), waits(C, 1, 11)]);
    history.breaks(Rule::Forgotten);
    // The grace counts from the last end of the sign.
    let mut history = History::queue();
    history.sign(A, 0);
    history.wait_for_grace();
    history.put(B, &[held(A, 1), waits(B, 1, 10), waits(C, 1, 11), waits(B, 2, 12)]);
    history.sign(A, 1);
    history.sign(A, 0);
    history.put(C, &[held(B, 1), waits(C, 1, 11), waits(B, 2, 12)]);
    history.breaks(Rule::Forgotten);
}

#[test]
fn a_deletion_that_forgets_the_living_is_found() {
    let mut history = History::queue();
    history.delete();
    history.breaks(Rule::Forgotten);
    let mut history = History::queue();
    history.sign(A, 0);
    history.sign(B, 0);
    history.delete();
    history.is_clean();
}

#[test]
fn an_id_that_comes_back_is_found() {
    let mut history = History::queue();
    history.put(A, &[held(B, 1), waits(C, 1, 11)]);
    history.put(A, &[held(B, 1), waits(C, 1, 11), waits(A, 1, 12)]);
    history.breaks(Rule::Returned);
    // Another process repeats it at an absent key.
    let mut history = History::new();
    history.put(A, &[held(A, 1)]);
    history.delete();
    history.put(B, &[held(A, 1)]);
    history.breaks(Rule::Returned);
}

#[test]
fn an_id_may_come_back_after_it_was_forgotten_or_at_an_absent_key() {
    let mut history = History::queue();
    history.sign(B, 0);
    history.put_as(C, false, &[held(A, 1), waits(C, 1, 11)]);
    history.sign(B, 1);
    history.put(B, &[held(A, 1), waits(C, 1, 11), waits(B, 1, 12)]);
    history.is_clean();
    let mut history = History::new();
    history.put(A, &[held(A, 1)]);
    history.delete();
    history.put(A, &[held(A, 1)]);
    history.is_clean();
}

#[test]
fn only_what_restored_data_can_cause_is_excused_and_only_until_it_is_settled() {
    let mut over = History::new();
    over.put(A, &[held(A, 1), held(B, 1)]);
    let mut out_of_turn = History::queue();
    out_of_turn.put(A, &[held(C, 1), waits(B, 1, 10)]);
    let mut idle = History::queue();
    idle.put(A, &[waits(B, 1, 10), waits(C, 1, 11)]);
    for (history, is_excusable) in [(over, true), (out_of_turn, true), (idle, false)] {
        let found = history.judge().violations;
        let at = found[0].revision;
        for (unsettled, is_unsettled) in [
            (Some(1..=at), true),
            (Some(1..=at - 1), false),
            (Some(at + 1..=at + 9), false),
            (None, false),
        ] {
            let (excused, others) = excuse(&found, unsettled.as_ref());
            assert_eq!(excused.len() + others.len(), found.len());
            assert_eq!(others.is_empty(), is_excusable && is_unsettled, "{found:?} {unsettled:?}");
        }
    }
}
