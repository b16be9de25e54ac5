//! What the engine asks of the cluster, and when.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use super::Engine;
use super::tracked::{Flight, State, Tracked};
use crate::backend::etcd::clock::Now;
use crate::protocol::Time;
use crate::protocol::liveness;
use crate::protocol::replica::Transaction;

/// The most transactions under way at a time.
const TRANSACTIONS_MAX: usize = 64;

/// A watch that has been silent for this time may be of no use: what is known is read again before anything rests on it.
const WATCH_SILENT: Duration = Duration::from_secs(1);

/// What is to be sent to the cluster.
pub(in crate::backend::etcd) enum Request {
    /// For the signs of life of this process.
    Sign(liveness::Request),
    Transaction {
        key: Arc<str>,
        transaction: Transaction,
    },
    /// All signs of life.
    List,
    /// A page of all semaphores, from this key on; `None`: from the first.
    Search {
        from: Option<Vec<u8>>,
    },
}

impl Engine {
    /// Returns the next request.
    pub(in crate::backend::etcd) fn poll_request(&mut self, now: Now) -> Option<Request> {
        self.connection?;
        if let Some(request) = self.own.poll_request(now.time) {
            return Some(Request::Sign(request));
        }
        self.poll_cleanups(now);
        if let Some(request) = self.poll_transaction(now) {
            return Some(request);
        }
        // Before its first lease, this process could track nothing that it finds.
        if now.time < self.read_at || self.own.shortest().is_none() {
            return None;
        }
        if take(&mut self.is_list_wanted) {
            return Some(Request::List);
        }
        self.forgetting.search.poll().map(|from| Request::Search { from })
    }

    fn poll_cleanups(&mut self, now: Now) {
        while let Some(cleanup) = self.others.poll_cleanup(now.time) {
            let Some(ended) = self.forgetting.ask(cleanup, &self.others) else {
                self.is_list_wanted = true;
                continue;
            };
            let node = ended.row().node;
            let is_concerned =
                |tracked: &Tracked| tracked.replica.other_rows().any(|row| row.node == node);
            for key in self.keys_of(is_concerned) {
                if let Some(tracked) = self.tracked.get_mut(&key) {
                    self.forgetting.note(&key, &mut tracked.replica);
                }
                self.settle(&key, now);
            }
            self.forgetting.settle(&mut self.others);
        }
    }

    fn poll_transaction(&mut self, now: Now) -> Option<Request> {
        while self.in_flight < TRANSACTIONS_MAX
            && let Some(key) = self.queue.pop_front()
        {
            // It may have been dropped, and tracked anew, since.
            let tracked = self.tracked.get_mut(&key);
            let is_queued = |tracked: &&mut Tracked| matches!(tracked.state, State::Queued);
            let Some(tracked) = tracked.filter(is_queued) else { continue };
            let shortest = self.own.shortest().unwrap_or_default();
            let mut seconds = tracked.pending.iter().map(|pending| pending.seconds);
            // Of a lease that has run out, a session would ask again at once, and be answered from the replica.
            let is_alive = |seconds| self.own.is_alive(seconds, now.time);
            if !is_alive(shortest) || !seconds.all(is_alive) {
                tracked.state = State::Parked;
                self.parked.push(key);
                continue;
            }
            if let Some(pause) = tracked.deference.pause(now.time) {
                tracked.state = State::Defers;
                self.wake(&key, pause, now);
                continue;
            }
            if let Some(pause) = tracked.gather(self.round_trip, now.time) {
                tracked.state = State::Gathers;
                self.wake(&key, pause, now);
                continue;
            }
            tracked.state = State::Idle;
            if self.watch_heard_at.is_some_and(|at| now.time < at + WATCH_SILENT)
                && tracked.is_recent(&self.own, now.time)
            {
                tracked.replica.handle_fresh(now.time + Duration::from_millis(1));
            } else {
                tracked.replica.handle_fresh(Time::ZERO);
            }
            if let Some(transaction) = tracked.replica.poll_transaction(now.time, now.wall) {
                tracked.state = State::InFlight(Flight::new(&transaction, now.time));
                self.in_flight += 1;
                return Some(Request::Transaction { key, transaction });
            }
            // Renewals may have been answered without one.
            self.hear(&key, now);
        }
        None
    }

    /// Returns when to poll for requests again, if nothing happens before.
    pub(in crate::backend::etcd) fn poll_timeout(&self) -> Option<Time> {
        let is_reading = self.is_list_wanted || self.forgetting.search.is_due();
        let read_at = Some(self.read_at).filter(|_| is_reading && self.own.shortest().is_some());
        let timer = self.timers.first().map(|(at, _)| *at);
        let timeouts = [self.own.poll_timeout(), self.others.poll_timeout(), timer, read_at];
        timeouts.into_iter().flatten().min()
    }

    /// Does what is due. Returns whether the member did not answer in time.
    pub(in crate::backend::etcd) fn handle_timeout(&mut self, now: Now) -> bool {
        while let Some((at, key)) = self.timers.pop_first() {
            if at > now.time {
                self.timers.insert((at, key));
                break;
            }
            if let Some(tracked) = self.tracked.get_mut(&key) {
                tracked.wakes_at = None;
                match tracked.state {
                    // It was woken for something else.
                    State::Paused(until) if now.time < until => {
                        self.wake(&key, until.since(now.time), now);
                    }
                    State::Paused(_) | State::Defers | State::Gathers => {
                        tracked.state = State::Idle
                    }
                    _ => {}
                }
                self.settle(&key, now);
            }
        }
        self.own.handle_timeout(now.time)
    }
}
