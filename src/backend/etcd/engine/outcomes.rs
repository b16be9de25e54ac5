//! What became of transactions.

use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::tracked::State;
use crate::backend::etcd::clock::Now;
use crate::backend::etcd::requests::{Outcome, Stored};
use crate::backend::etcd::wire::WireError;
use crate::protocol::replica::Replica;

/// Half of the most that all processes write of one semaphore, bytes in a ms. Each transaction writes the whole of it, and
/// etcd keeps each version until it is compacted.
const PACE: usize = 2_000;

impl Engine {
    /// Takes what became of a transaction.
    pub(in crate::backend::etcd) fn handle_outcome(
        &mut self,
        key: &Arc<str>,
        outcome: Result<Outcome, &WireError>,
        now: Now,
    ) {
        let revision = match &outcome {
            Ok(Outcome::Committed { revision } | Outcome::Lost(Stored { revision, .. })) => {
                *revision
            }
            _ => 0,
        };
        self.note_revision(revision);
        let Some(tracked) = self.tracked.get_mut(key) else { return };
        let State::InFlight(flight) = std::mem::replace(&mut tracked.state, State::Idle) else {
            return;
        };
        self.in_flight -= 1;
        if revision > 0 {
            tracked.handle_seen(revision, now.time);
            let took = now.time.since(flight.sent);
            self.round_trip = (self.round_trip * 7 + took) / 8;
        }
        let mut pause = Duration::ZERO;
        match outcome {
            Ok(Outcome::Committed { revision }) => {
                tracked.handle_success();
                if flight.writes > 0 {
                    tracked.deference.handle_own_write(self.round_trip, now.time);
                    pause = paced(flight.writes, writers(&tracked.replica));
                }
                tracked.replica.handle_committed(revision);
            }
            Ok(Outcome::Lost(Stored { revision, value })) => {
                let changed = if value.is_some() { revision } else { 0 };
                // As after a restore, with other keys written since.
                self.has_lost_data |= value.is_some() && changed < flight.changed;
                if changed == flight.changed {
                    // A sign of life was not as it should be, which the watch will tell, or a listing.
                    flight.absent.iter().for_each(|row| tracked.replica.handle_back(*row));
                    self.is_list_wanted |= !flight.absent.is_empty();
                    pause = tracked.handle_failure();
                } else {
                    let random = self.random.f64();
                    pause = tracked.handle_loss(flight.writes, self.round_trip, random);
                }
                tracked.replica.handle_lost(revision, value.as_deref());
            }
            Ok(Outcome::Malformed) => {
                pause = tracked.handle_failure();
                tracked.replica.handle_unknown();
            }
            Err(error) => {
                tracked.error = Some(error.clone().into());
                pause = tracked.handle_failure();
                if error.did_nothing() {
                    tracked.replica.handle_refused();
                } else {
                    tracked.replica.handle_unknown();
                }
            }
        }
        if !pause.is_zero() {
            tracked.state = State::Paused(now.time + pause);
            self.wake(key, pause, now);
        }
        self.settle(key, now);
    }
}

/// The processes that have places, and so write the semaphore.
fn writers(replica: &Replica) -> usize {
    let mut nodes: Vec<_> = replica.other_rows().map(|row| row.node).collect();
    nodes.dedup();
    nodes.len() + 1
}

/// For how long to write a semaphore of so many bytes no more, where so many processes do.
fn paced(bytes: usize, writers: usize) -> Duration {
    let ms = bytes.saturating_mul(writers.max(2)) / (2 * PACE);
    Duration::from_millis(u64::try_from(ms).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::paced;

    #[test]
    fn all_that_write_share_the_pace() {
        let of = |bytes, writers| paced(bytes, writers).as_millis();
        assert_eq!(of(50_000, 1), 25);
        assert_eq!(of(50_000, 2), 25);
        assert_eq!(of(50_000, 20), 250);
        assert_eq!(of(1_000, 3), 0, "little is written as often as it changes");
    }
}
