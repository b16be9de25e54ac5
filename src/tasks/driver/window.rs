//! The bound on what is unanswered on a connection.
//!
//! What a place costs the server depends on its tenants, its queue, and the other processes that call the same server,
//! so no fixed number of places bounds the time of an answer. With fixed numbers, 25 processes with 8,000 tenants each
//! kept a healthy Redis busy for longer than the response timeout, gave up their connections, and came back in step.
//! So the window is bounded in time, as TCP's congestion window is: it grows while answers come soon, and is halved
//! when one takes long. The processes of a fleet share a server without knowing of each other, and a renewal finds
//! little work in front of it.

use std::time::Duration;

use tokio::time::Instant;

use crate::node::server::outbox::Purpose;

/// The size of a new window, and the least and the greatest size, in places. A call counts as eight more.
const FIRST: usize = 256;
const LEAST: usize = 64;
const MOST: usize = 32_768;
/// The most places in one write: this number, or this fraction of the window if that is more.
const WRITE: usize = 256;
const WRITES: usize = 4;
/// An answer is slow if it takes longer than the fastest round trip by this fraction of the response timeout.
const SLOW: u32 = 10;
/// The longest round trip that is attributed to the network, as a fraction of the response timeout.
const ROUND_TRIP: u32 = 2;
/// For renewals alone, the window grows only while answers come within this fraction of what makes one slow: no request
/// waits for a renewal, but requests wait behind them.
const SOON: u32 = 8;
/// How often the fastest round trip is raised, by a quarter and a millisecond: the network may have become slower. That
/// is slow enough that a crowd that stays for hours is not taken for the network.
const AGING: Duration = Duration::from_secs(10);

/// The congestion window of a connection.
#[derive(Debug)]
pub(crate) struct Window {
    size: usize,
    /// Below this size, it doubles with each round trip; above, it grows by [`LEAST`].
    threshold: usize,
    /// The remainder of its growth, less than one place.
    rest: usize,
    response_timeout: Duration,
    round_trip: Duration,
    aged_at: Instant,
    /// When it was last halved. An answer to a call sent before that says nothing about the new size.
    halved_at: Instant,
    /// When a request, or a renewal, last waited for room.
    full_at: Option<Instant>,
    renewals_full_at: Option<Instant>,
}

impl Window {
    pub(crate) fn new(response_timeout: Duration, now: Instant) -> Self {
        Self {
            size: FIRST,
            threshold: MOST,
            rest: 0,
            response_timeout,
            round_trip: response_timeout / ROUND_TRIP,
            aged_at: now,
            halved_at: now,
            full_at: None,
            renewals_full_at: None,
        }
    }

    /// Returns how much more may be sent for this purpose. Renewals have half of the window. Requests have the other
    /// half, and what renewals leave of theirs.
    pub(crate) fn room(&self, purpose: Purpose, of_all: usize, of_this: usize) -> usize {
        let half = (self.size / 2).saturating_sub(of_this);
        let room = match purpose {
            Purpose::KeepAlive => half,
            Purpose::Serve => half.max(self.size.saturating_sub(of_all)),
        };
        room.min(WRITE.max(self.size / WRITES))
    }

    /// Notes that something waits for room.
    pub(crate) const fn on_full(&mut self, purpose: Purpose, now: Instant) {
        match purpose {
            Purpose::KeepAlive => self.renewals_full_at = Some(now),
            Purpose::Serve => self.full_at = Some(now),
        }
    }

    /// Grows or halves by the answer to a write of this cost.
    pub(crate) fn on_answer(&mut self, cost: usize, sent: Instant, now: Instant) {
        let took = now - sent;
        if now >= self.aged_at + AGING {
            self.aged_at = now;
            self.round_trip += self.round_trip / 4 + Duration::from_millis(1);
            self.round_trip = self.round_trip.min(self.response_timeout / ROUND_TRIP);
        }
        self.round_trip = self.round_trip.min(took);
        let slow = self.response_timeout / SLOW;
        if took > self.round_trip + slow {
            if sent >= self.halved_at {
                self.size = (self.size / 2).max(LEAST);
                (self.threshold, self.rest, self.halved_at) = (self.size, 0, now);
            }
        } else if self.full_at.is_some_and(|at| at >= sent)
            || self.renewals_full_at.is_some_and(|at| at >= sent)
                && took < self.round_trip + slow / SOON
        {
            self.grow(cost);
        }
    }

    fn grow(&mut self, cost: usize) {
        if self.size < self.threshold {
            self.size += cost;
        } else {
            self.rest += cost * LEAST;
            self.size += self.rest / self.size;
            self.rest %= self.size;
        }
        self.size = self.size.min(MOST);
    }
}

/// What is unanswered, by purpose, in places.
#[derive(Clone, Copy, Default)]
pub(super) struct Unanswered {
    keep_alive: usize,
    serve: usize,
}

impl Unanswered {
    pub(super) const fn of(&mut self, purpose: Purpose) -> &mut usize {
        match purpose {
            Purpose::KeepAlive => &mut self.keep_alive,
            Purpose::Serve => &mut self.serve,
        }
    }

    pub(super) const fn all(self) -> usize {
        self.keep_alive + self.serve
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(500);

    /// A server that works on one place at a time, and a network with a round trip of 1 ms.
    struct Rig {
        window: Window,
        now: Instant,
        place: Duration,
        purpose: Purpose,
    }

    impl Rig {
        fn new(place_us: u64) -> Self {
            let now = Instant::now();
            let place = Duration::from_micros(place_us);
            Self { window: Window::new(TIMEOUT, now), now, place, purpose: Purpose::Serve }
        }

        /// Fills the window and has all of it answered. Returns how long the last answer took.
        fn round(&mut self) -> Duration {
            let (sent, mut cost, mut writes) = (self.now, 0, Vec::new());
            loop {
                let room = self.window.room(self.purpose, cost, cost);
                if room == 0 {
                    break;
                }
                cost += room;
                writes.push(room);
            }
            self.window.on_full(self.purpose, sent);
            self.now += Duration::from_millis(1);
            for write in writes {
                self.now += self.place * u32::try_from(write).unwrap();
                self.window.on_answer(write, sent, self.now);
            }
            self.now - sent
        }
    }

    #[test]
    fn a_window_fills_a_fast_server_and_spares_a_slow_one() {
        for place_us in [1, 10, 100, 500] {
            let mut rig = Rig::new(place_us);
            let rounds: Vec<_> = (0..200).map(|_| rig.round()).collect();
            let late = &rounds[20..];
            let longest = *late.iter().max().unwrap();
            let (slow, step) = (TIMEOUT / SLOW, rig.place * 256);
            assert!(longest < slow * 3 + step, "{place_us} us: {longest:?}");
            let least = rig.place * u32::try_from(MOST).unwrap();
            let mean = late.iter().sum::<Duration>() / u32::try_from(late.len()).unwrap();
            assert!(mean > least.min(slow / 2), "{place_us} us: {mean:?}");
        }
    }

    #[test]
    fn a_window_that_is_not_filled_does_not_grow() {
        let mut rig = Rig::new(1);
        for _ in 0..1000 {
            let sent = rig.now;
            rig.now += Duration::from_millis(1);
            rig.window.on_answer(9, sent, rig.now);
        }
        assert_eq!(rig.window.size, FIRST);
    }

    #[test]
    fn one_late_window_halves_it_once() {
        let mut rig = Rig::new(1);
        for _ in 0..10 {
            rig.round();
        }
        let (size, sent) = (rig.window.size, rig.now);
        rig.now += TIMEOUT;
        for _ in 0..10 {
            rig.window.on_answer(64, sent, rig.now);
        }
        assert_eq!(rig.window.size, size / 2);
        for _ in 0..20 {
            let sent = rig.now;
            rig.now += TIMEOUT;
            rig.window.on_answer(64, sent, rig.now);
        }
        assert_eq!(rig.window.size, LEAST);
    }

    #[test]
    fn a_far_server_is_not_taken_for_a_slow_one() {
        let mut rig = Rig::new(1);
        for _ in 0..20 {
            let sent = rig.now;
            rig.window.on_full(Purpose::Serve, sent);
            rig.now += Duration::from_millis(200);
            rig.window.on_answer(rig.window.size, sent, rig.now);
        }
        assert_eq!(rig.window.size, MOST);
    }

    #[test]
    fn each_purpose_has_half_of_the_window() {
        let window = Window::new(TIMEOUT, Instant::now());
        assert_eq!(window.room(Purpose::KeepAlive, 0, 0), FIRST / 2);
        assert_eq!(window.room(Purpose::KeepAlive, FIRST, FIRST / 2), 0);
        assert_eq!(window.room(Purpose::Serve, 0, 0), FIRST);
        assert_eq!(window.room(Purpose::Serve, FIRST, 0), FIRST / 2);
        assert_eq!(window.room(Purpose::Serve, FIRST, FIRST / 2), 0);
        assert_eq!(window.room(Purpose::Serve, FIRST - 10, FIRST - 10), 10);
    }

    #[test]
    fn renewals_leave_a_server_time_for_requests() {
        for place_us in [1, 10, 100] {
            let mut rig = Rig { purpose: Purpose::KeepAlive, ..Rig::new(place_us) };
            let longest = (0..200).map(|_| rig.round()).max().unwrap();
            let first = rig.place * u32::try_from(FIRST / 2).unwrap();
            let bound = Duration::from_millis(2) + 3 * TIMEOUT / SLOW / SOON + first;
            assert!(longest < bound, "{place_us} us: {longest:?}");
        }
    }
}
