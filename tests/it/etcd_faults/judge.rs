//! Judges the history of the semaphores: each version against the one before it.
//!
//! The load has one limit for each name, equal costs, and neither tenants nor rates nor budgets. The rules and their
//! exceptions:
//!
//! * **complete**: no version of a key is missing. Without this, the other rules would prove nothing.
//! * **cap**: the permits in use are never above the limit.
//! * **tail**: a place that is new and waits has a ticket later than all that waited before it. Except one that returns
//!   with its ticket: the same process had a place with this ticket, which left while it waited, or which another process
//!   removed, even after a grant of which its own has not heard.
//! * **heads**: of the places that waited before, the ones that now hold have lower tickets than those that still wait.
//!   Except where a process passed on permits that it has, in a value of its own and without one more, over a place that
//!   returned with its ticket: it may have told of that before the return. Each process may do so once to each return.
//! * **newcomer**: a place that is new holds at once only if nobody who waited before still waits. Except one that returns
//!   with a ticket, as above, that is lower than those of all who still wait: its value does not show the ticket any more,
//!   so each ticket of a place that another process removed excuses one such grant.
//! * **idle**: the writer of a value that is promoted left no permit free while a place waits.
//! * **stay**: a place that holds does not wait again, and one that waits keeps its ticket.
//! * **forgotten**: a place is removed by its own process. Others remove a waiting one only while the sign of life of the
//!   shortest row of its process is absent, and one that holds only while that of its own row is, and only a grace after
//!   that has gone: half of its lease, at least 2 s. Its end is not later than the time of any value before it, and a value is not older than its time, so
//!   what the history shows of the grace is never too short. A deletion names no writer and no time: it may remove the
//!   places of one living process, and of any others whose signs are absent.
//! * **returned**: an id that is gone does not come back. Except, as the protocol says: an acquire whose answer is unknown
//!   is repeated after another process removed its place; and a transaction that was made for an absent key is carried
//!   out at a later absence, with places of its own process alone.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use tower_semaphore::protocol::NodeId;
use tower_semaphore::protocol::liveness::Row;

use super::history::{Change, Entry, Id, Place, Snapshot};

/// What a history breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rule {
    Complete,
    Cap,
    Tail,
    Heads,
    Newcomer,
    Idle,
    Stay,
    Forgotten,
    Returned,
}

#[derive(Clone, Debug)]
pub(super) struct Violation {
    pub(super) rule: Rule,
    pub(super) revision: i64,
    pub(super) what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "revision {}: {:?}: {}", self.revision, self.rule, self.what)
    }
}

/// What a history shows, so that a test can tell that there was something to judge.
#[derive(Clone, Debug, Default)]
pub(super) struct Report {
    pub(super) violations: Vec<Violation>,
    pub(super) versions: usize,
    /// Places that waited and were granted, and that held at once.
    pub(super) granted: usize,
    pub(super) at_once: usize,
    /// The most permits that were held, by name.
    pub(super) most_held: BTreeMap<String, u64>,
    /// Places that another process removed, by name: held ones and waiting ones.
    pub(super) forgotten: BTreeMap<String, [usize; 2]>,
    /// Places that came back with the ticket of one that was gone.
    pub(super) returned: usize,
    /// How often a sign of life went, and came back after that.
    pub(super) signs_gone: usize,
    pub(super) signs_back: usize,
}

/// Judges a history in the order of its revisions. Each name has the limit that `limit` returns.
pub(super) fn judge(history: &[Entry], limit: impl Fn(&str) -> u64) -> Report {
    let mut judge = Judge::default();
    for entry in history {
        judge.revision = entry.revision;
        match &entry.change {
            Change::Sign { row, is_there } => judge.handle_sign(*row, *is_there, entry.version),
            Change::Semaphore { name, value } => {
                judge.report.versions += 1;
                let mut of = judge.names.remove(name).unwrap_or_default();
                judge.check_version(&format!("semaphore {name}"), of.version, entry.version);
                of.version = entry.version;
                judge.handle_value(name, &mut of, value.as_ref(), limit(name));
                judge.names.insert(name.clone(), of);
            }
        }
    }
    judge.report
}

/// Parts those violations that are excused from the others. After older data were restored, places that these do not have come
/// back beside those that they have: until that is settled, there can be too many, and their order is not that of arrival.
pub(super) fn excuse<'a>(
    violations: &'a [Violation],
    unsettled: Option<&RangeInclusive<i64>>,
) -> (Vec<&'a Violation>, Vec<&'a Violation>) {
    let is_excused = |violation: &&Violation| {
        let is_order = matches!(violation.rule, Rule::Tail | Rule::Heads | Rule::Newcomer);
        (is_order || violation.rule == Rule::Cap)
            && unsettled.is_some_and(|range| range.contains(&violation.revision))
    };
    violations.iter().partition(is_excused)
}

#[derive(Default)]
struct Judge {
    report: Report,
    revision: i64,
    names: BTreeMap<String, Name>,
    signs: BTreeMap<Row, Sign>,
    /// The latest time of a value so far.
    latest: u64,
}

/// A semaphore so far.
#[derive(Default)]
struct Name {
    version: i64,
    /// `None`: the key is absent.
    value: Option<Snapshot>,
    /// The places that are gone, and whether another process removed them.
    gone: BTreeMap<Id, bool>,
    /// The last tickets of the places that are there.
    had: BTreeMap<Id, u64>,
    /// The tickets with which places can return.
    tickets: BTreeSet<(NodeId, u64)>,
    /// Those of places that another process removed, and that have not returned.
    unclaimed: BTreeSet<(NodeId, u64)>,
    /// The places that returned and wait, and the processes that passed permits on over them since.
    back: BTreeMap<Id, BTreeSet<NodeId>>,
}

#[derive(Default)]
struct Sign {
    version: i64,
    is_there: bool,
    /// It was there at this time, or went later.
    gone_after: u64,
}

impl Judge {
    fn report(&mut self, rule: Rule, what: String) {
        self.report.violations.push(Violation { rule, revision: self.revision, what });
    }

    fn check_version(&mut self, key: &str, before: i64, version: i64) {
        // A deletion counts as 0, and deletes what is there.
        let follows = if version == 0 { before > 0 } else { version == before + 1 };
        if !follows {
            self.report(Rule::Complete, format!("{key}: version {version} follows {before}"));
        }
    }

    fn handle_sign(&mut self, row: Row, is_there: bool, version: i64) {
        let sign = self.signs.entry(row).or_default();
        let before = std::mem::replace(&mut sign.version, version);
        let was_gone = sign.gone_after > 0 && !sign.is_there;
        self.report.signs_gone += usize::from(sign.is_there && !is_there);
        self.report.signs_back += usize::from(was_gone && is_there);
        sign.is_there = is_there;
        sign.gone_after = self.latest.max(1);
        self.check_version(&format!("sign {row:?}"), before, version);
    }

    fn handle_value(&mut self, name: &str, of: &mut Name, value: Option<&Snapshot>, limit: u64) {
        let (was, nothing) = (of.value.take(), Snapshot::default());
        let (before, after) = (was.as_ref().unwrap_or(&nothing), value.unwrap_or(&nothing));
        let most = self.report.most_held.entry(name.to_owned()).or_default();
        *most = after.held().max(*most);
        if after.held() > limit {
            self.report(Rule::Cap, format!("{name}: {} held, limit {limit}", after.held()));
        }
        self.check_removed(name, of, before, value);
        self.check_stayed(name, of, before, after);
        self.check_added(name, of, was.as_ref(), after);
        let head = after.waiting().min_by_key(|(_, ticket)| *ticket).map(|(id, _)| id);
        let head = head.map(|id| u64::from(after.places[id].cost));
        if after.is_promoted && head.is_some_and(|cost| after.held() + cost <= limit) {
            self.report(Rule::Idle, format!("{name}: {} held, and a place waits", after.held()));
        }
        self.latest = self.latest.max(after.time);
        of.value = value.cloned();
    }

    fn check_removed(
        &mut self,
        name: &str,
        of: &mut Name,
        before: &Snapshot,
        value: Option<&Snapshot>,
    ) {
        let removed = before.places.iter();
        let removed = removed.filter(|(id, _)| !value.is_some_and(|v| v.places.contains_key(id)));
        let mut living = BTreeSet::new();
        for (id, place) in removed {
            let is_other = match value {
                Some(value) => value.writer != Some(id.0),
                None => !self.lives(before, id, place),
            };
            of.gone.insert(*id, is_other);
            let had = of.had.remove(id).filter(|_| is_other || place.ticket.is_some());
            of.tickets.extend(had.map(|ticket| (id.0, ticket)));
            if is_other {
                of.unclaimed.extend(had.map(|ticket| (id.0, ticket)));
                let counts = self.report.forgotten.entry(name.to_owned()).or_default();
                counts[usize::from(place.ticket.is_some())] += 1;
            } else {
                living.insert(id.0);
            }
            if let Some(value) = value.filter(|_| is_other)
                && let Some(why) = self.why_not_forgotten(before, id, place, value.time)
            {
                let writer = value.writer;
                self.report(Rule::Forgotten, format!("{name}: {id:?} by {writer:?}, but {why}"));
            }
        }
        if value.is_none() && living.len() > 1 {
            self.report(Rule::Forgotten, format!("{name}: deleted, with places of {living:?}"));
        }
    }

    /// The row whose sign of life counts for a place: that with the shortest lease if it waits.
    fn row_of(&self, before: &Snapshot, id: &Id, place: &Place) -> Row {
        let shortest = || {
            let signs = self.signs.keys().filter(|row| row.node == id.0).map(|row| row.seconds);
            let places = before.places.iter().filter(|((node, _), _)| *node == id.0);
            signs.chain(places.map(|(_, place)| place.seconds)).min()
        };
        let seconds = place.ticket.and_then(|_| shortest()).unwrap_or(place.seconds);
        Row { node: id.0, seconds }
    }

    fn lives(&self, before: &Snapshot, id: &Id, place: &Place) -> bool {
        self.signs.get(&self.row_of(before, id, place)).is_some_and(|sign| sign.is_there)
    }

    fn why_not_forgotten(
        &self,
        before: &Snapshot,
        id: &Id,
        place: &Place,
        time: u64,
    ) -> Option<String> {
        if self.lives(before, id, place) {
            return Some("its process lives".to_owned());
        }
        if place.ticket.is_some() {
            return None;
        }
        let since = self.signs.get(&self.row_of(before, id, place))?.gone_after;
        let grace = (Duration::from_secs(place.seconds.into()) / 2).max(Duration::from_secs(2));
        let elapsed = u128::from(time.saturating_sub(since));
        (elapsed < grace.as_micros())
            .then(|| format!("its sign was there {elapsed} µs before; the grace is {grace:?}"))
    }

    fn check_stayed(&mut self, name: &str, of: &mut Name, before: &Snapshot, after: &Snapshot) {
        let still = before.waiting().filter(|(id, _)| after.ticket(id).is_some());
        let still: BTreeMap<Id, u64> = still.map(|(id, ticket)| (*id, ticket)).collect();
        of.back.retain(|id, _| still.contains_key(id));
        let passes_on = |node: NodeId| {
            after.writer == Some(node) && after.held_by(node) <= before.held_by(node)
        };
        let mut passed = BTreeSet::new();
        for (id, was) in &before.places {
            let Some(is) = after.places.get(id) else { continue };
            match (was.ticket, is.ticket) {
                (Some(ticket), None) => {
                    self.report.granted += 1;
                    for (other, earlier) in still.iter().filter(|(_, earlier)| **earlier < ticket) {
                        let is_back = of.back.get(other).is_some_and(|by| !by.contains(&id.0));
                        if is_back && passes_on(id.0) {
                            passed.insert((*other, id.0));
                            continue;
                        }
                        let what =
                            format!("{name}: {id:?} of {ticket} before {other:?} of {earlier}");
                        self.report(Rule::Heads, what);
                        break;
                    }
                }
                (was, is) if was != is => {
                    self.report(Rule::Stay, format!("{name}: {id:?} had {was:?}, has {is:?}"));
                }
                _ => {}
            }
        }
        for (other, by) in passed {
            of.back.entry(other).or_default().insert(by);
        }
    }

    fn check_added(
        &mut self,
        name: &str,
        of: &mut Name,
        before: Option<&Snapshot>,
        after: &Snapshot,
    ) {
        let waited = |id: &Id| before.is_some_and(|before| before.ticket(id).is_some());
        let tickets = before.into_iter().flat_map(Snapshot::waiting).map(|(_, ticket)| ticket);
        let last = tickets.max();
        let still = after.waiting().filter(|(id, _)| waited(id)).map(|(_, ticket)| ticket);
        let first_left = still.min();
        for (id, place) in &after.places {
            if before.is_some_and(|before| before.places.contains_key(id)) {
                continue;
            }
            if let Some(by_other) = of.gone.remove(id)
                && !(after.writer == Some(id.0) && (by_other || before.is_none()))
            {
                self.report(Rule::Returned, format!("{name}: {id:?}"));
            }
            if let Some(ticket) = place.ticket {
                of.had.insert(*id, ticket);
                of.unclaimed.remove(&(id.0, ticket));
                let is_old = of.tickets.remove(&(id.0, ticket));
                self.report.returned += usize::from(is_old);
                if is_old {
                    of.back.insert(*id, BTreeSet::new());
                }
                if !is_old && last.is_some_and(|last| ticket <= last) {
                    let what = format!("{name}: {id:?} joins with {ticket}, the last is {last:?}");
                    self.report(Rule::Tail, what);
                }
                continue;
            }
            self.report.at_once += 1;
            let Some(first_left) = first_left else { continue };
            let old = of.unclaimed.range((id.0, 0)..(id.0, first_left)).next().copied();
            match old {
                Some(old) => _ = of.unclaimed.remove(&old),
                None => self.report(
                    Rule::Newcomer,
                    format!("{name}: {id:?} holds at once, {first_left} still waits"),
                ),
            }
        }
    }
}
