//! Turns between processes that write the same key.
//!
//! Of several transactions over the same value one succeeds, and the process that sent it knows the newest value first, so
//! it would win again and again. A process that wrote therefore lets those go first that wrote shortly before it: each of
//! them once, for at most as long as their transactions take. Those that lost try again at once.

use std::time::Duration;

use crate::protocol::{NodeId, Time};

/// A process that wrote within so many round trips is one that contends: some lose several rounds.
const RECENT: u32 = 256;

/// The most processes for which one waits.
const OTHERS_MAX: usize = 16;

/// The longest round trip that is believed.
const ROUND_TRIP_MAX: Duration = Duration::from_millis(20);

/// Who writes a key, and whose turn it is.
#[derive(Debug, Default)]
pub(super) struct Deference {
    /// Other processes that wrote lately, and when that was heard of.
    others: Vec<(NodeId, Time)>,
    /// Those that go first, and until when at most.
    first: Vec<NodeId>,
    until: Time,
    /// Two round trips after the last write: who has something to write does so within that.
    quiet_at: Time,
    round_trip: Duration,
}

impl Deference {
    /// Another process wrote. Returns whether this one was waiting for that alone.
    pub(super) fn handle_write(&mut self, by: NodeId, now: Time) -> bool {
        self.others.retain(|(node, _)| *node != by);
        if self.others.len() >= OTHERS_MAX {
            self.others.remove(0);
        }
        self.others.push((by, now));
        self.quiet_at = now + self.round_trip * 2;
        let had_to_wait = !self.first.is_empty();
        self.first.retain(|node| *node != by);
        had_to_wait && self.first.is_empty()
    }

    /// This process wrote.
    pub(super) fn handle_own_write(&mut self, round_trip: Duration, now: Time) {
        self.round_trip = round_trip.min(ROUND_TRIP_MAX);
        self.others.retain(|(_, at)| now < *at + self.round_trip * RECENT);
        self.first = self.others.iter().map(|(node, _)| *node).collect();
        let count = u32::try_from(self.first.len()).unwrap_or(u32::MAX);
        // Most of them lose at first, and need another one.
        self.until = now + self.round_trip.saturating_mul(count.saturating_mul(2));
        self.quiet_at = now + self.round_trip * 2;
    }

    /// For how long others go first.
    pub(super) fn pause(&mut self, now: Time) -> Option<Duration> {
        let until = self.until.min(self.quiet_at);
        if now >= until {
            self.first.clear();
        }
        (!self.first.is_empty()).then(|| until.since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(2);

    fn at(ms: u64) -> Time {
        Time::since_epoch(Duration::from_millis(1000 + ms))
    }

    #[test]
    fn who_wrote_lets_each_of_those_that_write_go_first_once() {
        let [one, two] = [1, 2].map(NodeId::new);
        let mut deference = Deference::default();
        deference.handle_own_write(ROUND_TRIP, at(0));
        assert_eq!(deference.pause(at(0)), None, "nobody else writes");
        assert!(!deference.handle_write(one, at(1)) && !deference.handle_write(two, at(2)));
        assert_eq!(deference.pause(at(2)), None, "this process lost, and tries again");
        deference.handle_own_write(ROUND_TRIP, at(3));
        assert_eq!(deference.pause(at(3)), Some(ROUND_TRIP * 2));
        assert!(!deference.handle_write(one, at(6)) && !deference.handle_write(one, at(6)));
        assert_eq!(deference.pause(at(6)), Some(ROUND_TRIP * 2));
        assert!(deference.handle_write(two, at(9)));
        assert_eq!(deference.pause(at(9)), None);
    }

    #[test]
    fn nobody_waits_for_a_process_that_has_nothing_to_write() {
        let [one, two] = [1, 2].map(NodeId::new);
        let mut deference = Deference::default();
        deference.handle_write(one, at(0));
        deference.handle_write(two, at(0));
        deference.handle_own_write(ROUND_TRIP, at(1));
        assert_eq!(deference.pause(at(2)), Some(Duration::from_millis(3)));
        assert_eq!(deference.pause(at(5)), None, "both had their time");
        deference.handle_own_write(ROUND_TRIP, at(520));
        assert_eq!(deference.pause(at(520)), None, "they wrote long ago");
    }

    #[test]
    fn those_that_go_first_and_their_time_are_bounded() {
        let mut deference = Deference::default();
        for node in 0..1000 {
            deference.handle_write(NodeId::new(node), at(0));
        }
        deference.handle_own_write(Duration::from_secs(5), at(0));
        let mut now = at(0);
        for _ in 0..1000 {
            now = now + Duration::from_millis(1);
            deference.handle_write(NodeId::new(2000), now);
        }
        assert_eq!(deference.pause(at(639)), Some(Duration::from_millis(1)));
        assert_eq!(deference.pause(at(640)), None);
    }
}
