//! Limits that find themselves, as this process knows them, and what it asks of them.
//!
//! The server that keeps the overrides has one record of each (`lua/adapt.lua`), which a message brings to every process
//! as it changes; readings have all of them. A process asks for a decrease when the upstream refuses one of its requests,
//! and for growth when requests wait; the server decides, by the versions that both know.
//!
//! *What is bounded.* One request of a process is in flight. It asks once for a decrease under one version, however many
//! responses say the same, and for nothing for [`RETRY`] after a request that was refused or not answered. If the server
//! refuses a name without a record, it has as many as may, so only names without one wait. What could not be sent within
//! [`RETRY`] is dropped: the next response, or the next interval, asks again.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::pauses::{Outcome, RETRY, Reading};
use crate::backend::{Change, Overrides};
use crate::protocol::session::AdaptedHere;
use crate::protocol::{Adapted, Adaptive, Adjustment, SentUnder, Time};

/// The most names of which a process knows something by messages alone, which any client can send, or by its own
/// responses.
const KNOWN_MAX: usize = 2 * Overrides::ADAPTED_MOST;

/// The limits that find themselves.
#[derive(Default)]
pub(super) struct Adaptations {
    by_name: HashMap<Arc<str>, Entry>,
    /// The names for which something is to be sent.
    unsent: VecDeque<Arc<str>>,
    /// The number of requests that were sent, and whether the last one is unanswered.
    sent: u64,
    is_sending: bool,
    /// Nothing is sent before this.
    not_before: Option<Time>,
    /// Nothing is sent before this for a name without a record.
    new_not_before: Option<Time>,
    /// The last question that was asked when a message last brought something.
    heard: Option<u64>,
}

#[derive(Default)]
struct Entry {
    known: Option<Known>,
    /// What is to be sent, and since when.
    wish: Option<(Adaptive, Adjustment, Time)>,
    /// The version under which a decrease was last asked for, and when.
    lowered: Option<(u64, Time)>,
}

#[derive(Clone, Copy)]
struct Known {
    here: AdaptedHere,
    /// The last question that was asked when a message brought it: its answer may be older.
    heard: u64,
}

/// A request that is sent.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) name: Arc<str>,
    pub(super) change: Change,
    number: u64,
}

impl Entry {
    fn is_over(&self, now: Time) -> bool {
        let is_asked = self.lowered.is_some_and(|(_, at)| now < at + RETRY);
        self.known.is_none_or(|known| known.here.ends <= now) && self.wish.is_none() && !is_asked
    }
}

impl Adaptations {
    /// Returns the limit of a name, if one is in force.
    pub(super) fn of(&self, name: &str, now: Time) -> Option<AdaptedHere> {
        let known = self.by_name.get(name)?.known?;
        Some(known.here).filter(|here| now < here.ends)
    }

    /// Notes that the upstream refused a request that was sent under this. Returns whether to ask for a decrease.
    pub(super) fn lower(
        &mut self,
        name: &Arc<str>,
        range: Adaptive,
        sent: SentUnder,
        now: Time,
    ) -> bool {
        let known = self.of(name, now);
        let is_known = known.is_some_and(|here| sent.version < here.adapted.lowered);
        let is_lowest = known.is_some_and(|here| {
            let is_lowest = range.clamp(here.adapted.limit) == range.min();
            // Refusals keep the record.
            is_lowest && now + Adapted::KEPT / 2 < here.ends
        });
        if is_known || is_lowest {
            return false;
        }
        if known.is_none() && self.is_full(name, now) {
            return false;
        }
        let entry = self.by_name.entry(Arc::clone(name)).or_default();
        if entry.lowered.is_some_and(|(version, at)| sent.version <= version && now < at + RETRY) {
            return false;
        }
        entry.lowered = Some((sent.version, now));
        self.wish(name, range, Adjustment::Lower(sent), now);
        true
    }

    /// Whether there is no room for a name without a record, on the server or here.
    fn is_full(&self, name: &str, now: Time) -> bool {
        let has_room = self.by_name.len() < KNOWN_MAX || self.by_name.contains_key(name);
        !has_room || self.new_not_before.is_some_and(|at| now < at)
    }

    /// Notes that requests wait for the limit. Returns whether to ask for growth.
    pub(super) fn raise(&mut self, name: &Arc<str>, range: Adaptive, now: Time) -> bool {
        let entry = self.by_name.get(name).filter(|entry| entry.known.is_some());
        if entry.is_none_or(|entry| entry.wish.is_some()) {
            return false;
        }
        self.wish(name, range, Adjustment::Raise, now);
        true
    }

    fn wish(&mut self, name: &Arc<str>, range: Adaptive, adjustment: Adjustment, now: Time) {
        let entry = self.by_name.entry(Arc::clone(name)).or_default();
        if entry.wish.replace((range, adjustment, now)).is_none() {
            self.unsent.push_back(Arc::clone(name));
        }
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Returns when the next request is due that has to wait. While one is in flight, none is.
    pub(super) fn due(&self) -> Option<Time> {
        self.not_before.filter(|_| !self.is_sending && self.has_unsent())
    }

    /// Returns the next request to send.
    pub(super) fn next(&mut self, now: Time) -> Option<Sending> {
        if self.is_sending || self.not_before.is_some_and(|at| now < at) {
            return None;
        }
        self.not_before = None;
        while let Some(name) = self.unsent.pop_front() {
            let wish = self.by_name.get_mut(&name).and_then(|entry| entry.wish.take());
            let waits = self.new_not_before.is_some_and(|at| now < at);
            if let Some((range, adjustment, at)) = wish
                && now <= at + RETRY
                && !(waits && self.of(&name, now).is_none())
            {
                (self.is_sending, self.sent) = (true, self.sent + 1);
                let change = Change::Adapt { range, adjustment };
                return Some(Sending { name, change, number: self.sent });
            }
        }
        None
    }

    /// Notes what came of a request, once.
    pub(super) fn on_outcome(&mut self, of: &Sending, outcome: Outcome, now: Time) {
        if !self.is_sending || self.sent != of.number {
            return;
        }
        self.is_sending = false;
        if outcome != Outcome::Recorded {
            let is_new = self.of(&of.name, now).is_none();
            if outcome == Outcome::Refused && is_new {
                self.new_not_before = Some(now + RETRY);
            } else {
                self.not_before = Some(now + RETRY);
            }
            self.by_name.get_mut(&of.name).into_iter().for_each(|entry| entry.lowered = None);
        }
    }

    /// Whether a message has brought something that is in no reading: if it is lost there, the versions may be those from
    /// before.
    pub(super) const fn is_unread(&self) -> bool {
        self.heard.is_some()
    }

    /// Takes in a message; `asked`: the number of the last question. Returns whether it is news.
    pub(super) fn hear(&mut self, name: &str, here: AdaptedHere, asked: u64) -> bool {
        self.heard = Some(asked);
        let Some(entry) = self.by_name.get_mut(name) else {
            let has_room = self.by_name.len() < KNOWN_MAX;
            let entry = Entry { known: Some(Known { here, heard: asked }), ..Entry::default() };
            if has_room {
                self.by_name.insert(name.into(), entry);
            }
            return has_room;
        };
        let is_newer = |known: Known| known.here.adapted.changed < here.adapted.changed;
        let is_news = entry.known.is_none_or(is_newer);
        if is_news {
            entry.known = Some(Known { here, heard: asked });
        }
        is_news
    }

    /// Takes in a reading that differs from the one before, and adds the names whose limit changed.
    pub(super) fn take_in(
        &mut self,
        reading: &Reading<'_>,
        spread: u16,
        changed: &mut BTreeSet<Arc<str>>,
    ) {
        let (new, now_us) = (reading.new, reading.new.now.saturating_mul(1000));
        self.heard = self.heard.filter(|heard| *heard >= reading.question);
        for (name, adapted) in &new.adapted {
            if !adapted.left(now_us).is_zero() {
                self.by_name.entry(Arc::clone(name)).or_default();
            }
        }
        for (name, entry) in &mut self.by_name {
            let of_record = new.adapted.get(name).copied();
            let record = of_record.filter(|adapted| !adapted.left(now_us).is_zero());
            let before = entry.known.map(|known| known.here.adapted);
            // A message brought it after this reading was made.
            let is_later = entry.known.is_some_and(|known| {
                known.heard >= reading.question && known.here.adapted.changed > new.adapted_version
            });
            if before == record || is_later {
                continue;
            }
            entry.known = record.map(|adapted| Known {
                here: read(adapted, now_us, spread, reading.now),
                heard: 0,
            });
            if record.is_none() {
                // Versions from before a loss of data say nothing.
                entry.lowered = None;
            }
            changed.insert(Arc::clone(name));
        }
        self.forget_ended(reading.now);
    }

    /// Forgets what is over.
    pub(super) fn forget_ended(&mut self, now: Time) {
        self.by_name.retain(|_, entry| !entry.is_over(now));
    }
}

/// Returns a record as this process counts its times. It ends no earlier than by the server's clock, and grows no earlier,
/// because the answer came later than the server's time in it.
fn read(adapted: Adapted, now_us: u64, spread: u16, now: Time) -> AdaptedHere {
    let age = Duration::from_micros(now_us.saturating_sub(adapted.changed));
    let since = Time::ZERO + now.elapsed_since_epoch().saturating_sub(age);
    AdaptedHere { adapted, since, ends: now + adapted.left(now_us), spread }
}

/// Returns what a message brings, which was sent as the limit changed.
pub(super) fn heard(adapted: Adapted, spread: u16, now: Time) -> AdaptedHere {
    AdaptedHere { adapted, since: now, ends: now + Adapted::KEPT, spread }
}

#[cfg(all(test, not(shuttle)))]
mod tests;
