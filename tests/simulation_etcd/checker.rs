//! What must hold in every run.
//!
//! | rule | what it says |
//! |---|---|
//! | `cap` | clients never believe in more permits than the limit; nor tenants, nor those under a further limit |
//! | `hangs` | a request is answered by its wait timeout; a shutdown ends |
//! | `answer` | a rejection is one that can be; without a fault near, nothing is unavailable, and no permit is lost |
//! | `served` | after the faults, each process is granted each name |
//! | `spins` | no future is polled again and again while no time passes |
//! | `work` | a process sends a bounded number of requests in a second |
//! | `left` | in the end, neither a place nor a sign of life nor a record is stored |
//! | `rate` | no time has more starts than a rate allows |
//! | `history` | the values that were stored keep the rules of the judge |

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use tower_semaphore::protocol::replica::Value;

use crate::history::{Change, Entry as Version, Snapshot};
use crate::judge::{Rule, judge};
use crate::plan::{Kind, Plan, Planted};
use crate::process::{EPOCH, Entry, Holding, Seen};
use crate::store::Store;

/// How long after a fault its effects may show, in ms.
const AFTER_FAULT: u64 = 9000;
/// The most requests of a process in a second.
const REQUESTS_MAX: u64 = 600;

/// A rule that is broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// In ms.
    pub at: u64,
    pub rule: &'static str,
    pub what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: at {} ms: {}", self.rule, self.at, self.what)
    }
}

pub struct Checker<'a> {
    plan: &'a Plan,
    pub violations: Vec<Violation>,
    pub counts: BTreeMap<&'static str, u64>,
    pub hash: u64,
    /// By process and request.
    held: BTreeMap<(u64, u64), Holding>,
    /// Requests that are not answered.
    asking: BTreeSet<(u64, u64)>,
}

impl<'a> Checker<'a> {
    #[must_use]
    pub fn new(plan: &'a Plan) -> Self {
        Self {
            plan,
            violations: Vec::new(),
            counts: BTreeMap::new(),
            hash: plan.seed,
            held: BTreeMap::new(),
            asking: BTreeSet::new(),
        }
    }

    pub fn breaks(&mut self, at: u64, rule: &'static str, what: String) {
        self.violations.push(Violation { at, rule, what });
    }

    pub fn count(&mut self, what: &'static str, by: u64) {
        *self.counts.entry(what).or_default() += by;
    }

    pub fn digest(&mut self, value: u64) {
        self.hash = (self.hash.rotate_left(5) ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    /// A client of this process saw something.
    pub fn handle(&mut self, process: u64, entry: Entry) {
        let Entry { at, number, seen } = entry;
        let id = (process, number);
        self.digest(at);
        self.digest(number);
        self.digest(match &seen {
            Seen::Begins => 1,
            Seen::Granted(_) => 2,
            Seen::Rejected => 3,
            Seen::Unavailable => 4,
            Seen::Leaves => 5,
            Seen::GivesBack => 6,
            Seen::Lost => 7,
            Seen::Breaks(..) => 8,
            Seen::ShutDown => 9,
        });
        match seen {
            Seen::Begins => _ = self.asking.insert(id),
            _ => _ = self.asking.remove(&id),
        }
        match seen {
            Seen::Begins => self.count("requests", 1),
            Seen::Granted(holding) => {
                self.count("granted", 1);
                self.held.insert(id, holding);
            }
            Seen::Rejected => self.count("rejected", 1),
            Seen::Leaves => self.count("left early", 1),
            Seen::GivesBack => _ = self.held.remove(&id),
            Seen::Unavailable => {
                self.count("unavailable", 1);
                self.check_fault_near(at, process, "unavailable");
            }
            Seen::Lost => {
                self.count("lost", 1);
                self.held.remove(&id);
                self.check_fault_near(at, process, "a permit is lost");
            }
            Seen::Breaks(rule, what) => {
                self.breaks(at, rule, format!("process {process}, request {number}: {what}"));
            }
            Seen::ShutDown => {}
        }
    }

    fn check_fault_near(&mut self, at: u64, process: u64, what: &str) {
        let is_near = |fault: &crate::plan::Fault| {
            fault.at <= at && at <= fault.at + fault.lasts + AFTER_FAULT
        };
        if !self.plan.faults.iter().any(is_near) {
            self.breaks(at, "answer", format!("process {process}: {what}, with no fault near"));
        }
    }

    /// A process is gone, with all that it held.
    pub fn gone(&mut self, process: u64) {
        self.held.retain(|(of, _), _| *of != process);
        self.asking.retain(|(of, _)| *of != process);
    }

    /// Whether no request waits, and none has a permit.
    #[must_use]
    pub fn is_at_rest(&self) -> bool {
        self.held.is_empty() && self.asking.is_empty()
    }

    /// Checks what the processes believe that run, in which a client can notice a loss.
    pub fn check_held(&mut self, at: u64, is_running: impl Fn(u64) -> bool) {
        let mut sums: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
        for holding in self.held.iter().filter(|((of, _), _)| is_running(*of)).map(|(_, h)| h) {
            let name = &self.plan.names[holding.name];
            let own = (name.name.as_str(), name.limit);
            let also = holding.also.iter().map(|(what, most)| (what.as_str(), *most));
            for (what, most) in also.chain([own]) {
                let sum = sums.entry(what).or_insert((0, most));
                sum.0 += holding.cost;
            }
        }
        let over = sums.iter().find(|(_, (sum, most))| sum > most);
        if let Some((what, (sum, most))) = over {
            let what = format!("{sum} permits of {what} are believed in, of {most}");
            // The first of them tells all.
            if self.violations.iter().all(|violation| violation.rule != "cap") {
                self.breaks(at, "cap", what);
            }
        }
    }

    /// Checks that no place is stored.
    pub fn check_no_places(&mut self, at: u64, store: &Store) {
        for (key, kv) in store.keys() {
            let key = String::from_utf8_lossy(key);
            if key.starts_with("semaphore/s/")
                && let Ok(value) = Value::decode(&kv.value)
                && value.ledger.places().next().is_some()
            {
                let places: Vec<_> = value.ledger.places().collect();
                self.breaks(at, "left", format!("{key} has places: {places:?}"));
            }
        }
    }

    /// Checks that nothing is stored.
    pub fn check_nothing(&mut self, at: u64, store: &Store) {
        let keys = store.keys().keys().map(|key| String::from_utf8_lossy(key));
        // What operators did is recorded for an hour.
        let keys: Vec<_> = keys.filter(|key| *key != "semaphore/o").collect();
        if !keys.is_empty() {
            self.breaks(at, "left", format!("stored at the end: {keys:?}"));
        }
    }

    pub fn check_work(&mut self, requests: &BTreeMap<(usize, u64), u64>) {
        let most = requests.iter().max_by_key(|(_, count)| **count);
        if let Some((&(process, second), &count)) = most {
            let counted = self.counts.entry("most requests of a process in a second").or_default();
            *counted = count.max(*counted);
            if count > REQUESTS_MAX {
                let what = format!("{count} requests of slot {process} in a second");
                self.breaks(second * 1000, "work", what);
            }
        }
        self.count("requests to the cluster", requests.values().sum());
    }

    // ===== the history =====

    /// Judges everything that was stored.
    pub fn check_history(&mut self, store: &Store) {
        let mut versions: Vec<Version> = Vec::new();
        for change in store.log() {
            self.digest(change.at);
            let Some(mut version) = Version::read(&change.event) else { continue };
            if let Change::Semaphore { value: Some(value), .. } = &mut version.change {
                // By one clock: those of the processes may be off.
                value.time = EPOCH + change.at * 1000;
            }
            versions.push(version);
        }
        if self.plan.planted == Some(Planted::HidesChange) {
            let is_value =
                |v: &Version| matches!(v.change, Change::Semaphore { value: Some(_), .. });
            let at = versions.iter().position(|v| v.version == 2 && is_value(v));
            at.into_iter().for_each(|at| _ = versions.remove(at));
        }
        for kind in [Kind::Plain, Kind::Mixed, Kind::Fair, Kind::Rated] {
            self.judge(kind, &versions);
        }
        self.check_rates(store);
    }

    fn judge(&mut self, kind: Kind, versions: &[Version]) {
        let of = |name: &str| self.plan.names.iter().find(|of| of.name == name);
        let is_meant = |version: &&Version| match &version.change {
            Change::Semaphore { name, .. } => of(name).is_some_and(|of| of.kind == kind),
            Change::Sign { .. } => true,
        };
        let meant: Vec<_> = versions.iter().filter(is_meant).cloned().collect();
        let report = judge(&meant, |name| of(name).map_or(0, |of| of.limit.into()));
        let applies = |rule: Rule| match rule {
            Rule::Complete | Rule::Cap | Rule::Stay | Rule::Forgotten | Rule::Returned => true,
            Rule::Tail | Rule::Newcomer => kind != Kind::Fair,
            // Processes ask with different limits, and each leaves nothing free by its own.
            Rule::Heads | Rule::Idle => kind == Kind::Plain,
        };
        for violation in report.violations.iter().filter(|violation| applies(violation.rule)) {
            self.breaks(0, "history", violation.to_string());
        }
        if kind == Kind::Plain {
            self.count("signs of life that went", report.signs_gone as u64);
            self.count("signs of life that came back", report.signs_back as u64);
        }
        self.count("versions", report.versions as u64);
        self.count("granted from a queue", report.granted as u64);
        self.count("granted at once", report.at_once as u64);
        self.count("places that returned", report.returned as u64);
        let forgotten = report.forgotten.values().flatten().sum::<usize>();
        self.count("places that were forgotten", forgotten as u64);
    }

    /// Judges the starts under a rate, by the clocks that the values have.
    fn check_rates(&mut self, store: &Store) {
        let mut before: BTreeMap<String, Snapshot> = BTreeMap::new();
        let mut starts: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for change in store.log() {
            let Some(version) = Version::read(&change.event) else { continue };
            let Change::Semaphore { name, value } = version.change else { continue };
            if value.is_none() && !self.plan.has_one_time() {
                // The process that removed the starts took them for over by its own clock.
                starts.remove(&name);
            }
            let value = value.unwrap_or_default();
            let was = before.insert(name.clone(), value.clone()).unwrap_or_default();
            let holds = |of: &Snapshot, id| of.places.get(id).is_some_and(|p| p.ticket.is_none());
            let new = value.places.keys().filter(|id| holds(&value, id) && !holds(&was, id));
            starts.entry(name).or_default().extend(new.map(|_| value.time));
        }
        for name in &self.plan.names {
            let (Some((most, window)), Some(starts)) = (name.rate, starts.get(&name.name)) else {
                continue;
            };
            let most = most as usize;
            let over = starts.windows(most + 1).find(|some| {
                some[most].saturating_sub(some[0]) < window * 1000 && some[most] >= some[0]
            });
            if let Some(over) = over {
                let at = (over[0] - EPOCH.min(over[0])) / 1000;
                let took = over[most] - over[0];
                let what = format!("{}: {} starts within {took} µs", name.name, most + 1);
                self.violations.push(Violation { at, rule: "rate", what });
            }
        }
    }
}
