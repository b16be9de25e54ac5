//! One process: the shipped machines, a clock of its own, and places that rely on leases.

use std::collections::BTreeMap;
use std::time::Duration;

use tower_semaphore_protocol::liveness::{
    Grace, OtherRows, OwnRows, RequestId, Revision, Row, deadline,
};
use tower_semaphore_protocol::{NodeId, Time};

use super::plan::Removed;
use super::store::Micros;

/// The lengths of leases in use: what is asked for. The store grants 2 s for the first.
pub(crate) const LENGTHS: [u64; 3] = [1, 4, 9];

/// What the process believes of its place in a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) id: u64,
    /// The newest revision of a value that showed it.
    pub(crate) seen_at: Revision,
    pub(crate) relied_until: Time,
}

#[derive(Debug)]
pub(crate) struct Process {
    n: u64,
    pub(crate) node: NodeId,
    pub(crate) own: OwnRows,
    pub(crate) others: OtherRows,
    pub(crate) is_dead: bool,
    pub(crate) is_connected: bool,
    /// Answers and events of earlier connections are dropped.
    pub(crate) connection: u64,
    /// The connection that events are for.
    pub(crate) watching: u64,
    pub(crate) is_at_deposed: bool,
    pub(crate) frozen_until: Micros,
    pub(crate) thaws_timers_first: bool,
    pub(crate) cut_until: Micros,
    pub(crate) lossy_until: Micros,
    pub(crate) deaf_until: Micros,
    /// No fault begins before this.
    pub(crate) spared_until: Micros,
    pub(crate) watch_at: Micros,
    pub(crate) timer_at: Micros,
    pub(crate) places: BTreeMap<u32, Place>,
    pub(crate) granted: BTreeMap<u32, u32>,
    pub(crate) kept_alive_sent: BTreeMap<RequestId, Time>,
    /// When a keepalive that was sent then was answered.
    pub(crate) answered: BTreeMap<Time, Time>,
    next_place: u64,
    /// How much faster than true time its clock runs, in parts per million.
    drift: i64,
}

impl Process {
    pub(crate) fn new(n: u64, drift: i64, grace: Grace) -> Self {
        let node = NodeId::new(n);
        let mut own = OwnRows::new(Duration::from_secs(LENGTHS[0]));
        LENGTHS.iter().for_each(|seconds| own.add(Duration::from_secs(*seconds)));
        Self {
            n,
            node,
            own,
            others: OtherRows::new(node, grace),
            is_dead: false,
            is_connected: false,
            connection: 0,
            watching: 0,
            is_at_deposed: false,
            frozen_until: 0,
            thaws_timers_first: false,
            cut_until: 0,
            lossy_until: 0,
            deaf_until: 0,
            spared_until: 0,
            watch_at: 0,
            timer_at: Micros::MAX,
            places: BTreeMap::new(),
            granted: BTreeMap::new(),
            kept_alive_sent: BTreeMap::new(),
            answered: BTreeMap::new(),
            next_place: n << 32,
            drift,
        }
    }

    /// Its monotonic clock.
    pub(crate) fn clock(&self, now: Micros) -> Time {
        let drifted = i128::from(now) * i128::from(1_000_000 + self.drift) / 1000;
        Time::since_epoch(Duration::from_nanos(u64::try_from(drifted).unwrap()))
    }

    /// When its clock shows this, at the earliest.
    pub(crate) fn true_time(&self, at: Time) -> Micros {
        let micros = i128::from(at.nanos()) * 1000 / i128::from(1_000_000 + self.drift);
        u64::try_from(micros).unwrap() + 1
    }

    pub(crate) fn row(&self, seconds: u32) -> Row {
        Row { node: self.node, seconds }
    }

    pub(crate) fn rows(&self) -> Vec<u32> {
        let leases = LENGTHS.iter().map(|seconds| Duration::from_secs(*seconds));
        leases.filter_map(|lease| self.own.row_for(lease)).collect()
    }

    pub(crate) fn next_place(&mut self) -> u64 {
        self.next_place += 1;
        self.next_place
    }

    /// A value of this revision has this place of the row.
    pub(crate) fn handle_value(&mut self, seconds: u32, found: Option<u64>, revision: Revision) {
        match (self.places.get_mut(&seconds), found) {
            (Some(place), Some(id)) if place.id == id => {
                place.seen_at = place.seen_at.max(revision)
            }
            (Some(place), _) if place.seen_at < revision => {
                self.places.remove(&seconds);
            }
            (None, Some(id)) if id >> 32 == self.n => {
                let place = Place { id, seen_at: revision, relied_until: Time::ZERO };
                self.places.insert(seconds, place);
            }
            _ => {}
        }
    }

    /// Renews what is known, as a session does.
    pub(crate) fn renew(&mut self, removed: Option<Removed>) {
        for (seconds, place) in &mut self.places {
            let (from, at) = (self.own.leases_from(*seconds), self.own.registered_at(*seconds));
            let (Some(from), Some(at)) = (from, at) else { continue };
            if place.seen_at < at && removed != Some(Removed::RegisteredAt) {
                continue;
            }
            let from = match removed {
                Some(Removed::Sending) => self.answered.get(&from).copied().unwrap_or(from),
                _ => from,
            };
            let until = match removed {
                Some(Removed::Margin) => from + Duration::from_secs(u64::from(*seconds)),
                _ => deadline(from, *seconds),
            };
            place.relied_until = place.relied_until.max(until);
        }
    }

    /// The places that it relies on now.
    pub(crate) fn relied(&self, now: Micros) -> impl Iterator<Item = (Row, u64)> + '_ {
        let (now, is_alive) = (self.clock(now), !self.is_dead);
        let places =
            self.places.iter().filter(move |(_, place)| is_alive && now < place.relied_until);
        places.map(|(seconds, place)| (self.row(*seconds), place.id))
    }

    pub(crate) fn disconnect(&mut self, now: Micros) {
        let local = self.clock(now);
        self.is_connected = false;
        self.connection += 1;
        self.own.handle_disconnected(local);
        self.others.handle_disconnected();
    }
}
