//! Questions for overrides, and the callers that wait for the answers.

use std::sync::Arc;

use shuttle::future::block_on;
use shuttle::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use shuttle::thread::{JoinHandle, spawn};
use tokio::sync::Notify;
use tokio::time::Instant;

use super::backend::TestBackend;
use super::{NAME, either, explore, policy, process};
use crate::backend::Overrides;
use crate::node::overrides::OverrideCache;
use crate::protocol::{Override, Time};
use crate::semaphore::Semaphore;
use crate::semaphore::place_handle::{PlaceHandle, PlaceOf};
use crate::tasks::driver;

/// A server that keeps overrides. Here these have only a version.
struct Keeper {
    cache: OverrideCache,
    set: AtomicU64,
    /// The highest version that a session with gone places needs.
    checked: AtomicU64,
    wake: Notify,
    is_over: AtomicBool,
}

impl Keeper {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            cache: OverrideCache::new("!overrides".into()),
            set: AtomicU64::new(0),
            checked: AtomicU64::new(0),
            wake: Notify::new(),
            is_over: AtomicBool::new(false),
        })
    }

    /// Changes the overrides, and waits until the change is known, as `Node::catch_up` does.
    fn set_and_catch_up(&self) {
        let version = self.set.fetch_add(1, Ordering::SeqCst) + 1;
        let question = self.cache.want_answer();
        block_on(async {
            loop {
                let changed = self.cache.changed();
                if let Some(outcome) = self.cache.outcome(question) {
                    return outcome.expect("an answer");
                }
                self.wake.notify_one();
                changed.await;
            }
        });
        assert!(self.cache.version() >= version, "the answer is from before the question");
    }

    /// Asks, and takes the answer in.
    fn ask(&self, breaks: bool) {
        let (question, checking) = self.cache.begin(Instant::now());
        let needed = if checking.is_empty() { 0 } else { self.checked.load(Ordering::SeqCst) };
        if breaks {
            return self.cache.abandon(question, checking);
        }
        let version = self.set.load(Ordering::SeqCst);
        assert!(version >= needed);
        let new = Overrides { version, ..Overrides::default() };
        self.cache.take_in(question, Ok(Some(new)), Time::ZERO);
        self.cache.set_applied(question);
    }

    /// Asks whenever a question is due, as a driver does. A connection can break; the next one begins with the
    /// question.
    fn drive(&self) {
        let mut may_break = true;
        while !self.is_over.load(Ordering::SeqCst) {
            if self.cache.due(Instant::now()).is_some() {
                let breaks = may_break && either();
                may_break = false;
                self.ask(breaks);
                if breaks {
                    self.ask(false);
                }
            } else {
                block_on(self.wake.notified());
            }
        }
    }

    fn end(&self, drives: JoinHandle<()>) {
        self.is_over.store(true, Ordering::SeqCst);
        self.wake.notify_one();
        drives.join().unwrap();
    }
}

#[test]
fn an_answer_belongs_to_a_question_that_was_asked_after_it_was_wanted() {
    explore(|| {
        let keeper = Keeper::new();
        let driven = Arc::clone(&keeper);
        let drives = spawn(move || driven.drive());
        let asks: Vec<_> = (0..2)
            .map(|_| {
                let keeper = Arc::clone(&keeper);
                spawn(move || keeper.set_and_catch_up())
            })
            .collect();
        asks.into_iter().for_each(|asks| asks.join().unwrap());
        keeper.end(drives);
    });
}

#[test]
fn the_answer_of_a_former_keeper_is_not_taken_for_a_later_one() {
    explore(|| {
        let keeper = Keeper::new();
        let (former, driven) = (Arc::clone(&keeper), Arc::clone(&keeper));
        // The former keeper's question is unanswered while the connection to the next keeper opens.
        let asks = spawn(move || former.ask(false));
        let drives = spawn(move || {
            driven.ask(false);
            driven.drive();
        });
        keeper.set_and_catch_up();
        asks.join().unwrap();
        keeper.end(drives);
    });
}

#[test]
fn a_session_that_found_places_gone_is_answered_by_a_later_question() {
    explore(|| {
        let backend = TestBackend::remote();
        let process = process(&backend);
        let node = process.node();
        let place = PlaceHandle::take(
            &process.inner.tasks,
            PlaceOf::plain(&NAME.into(), &node.meters.of("default", std::time::Duration::ZERO)),
            1,
            &policy(1),
            Instant::now(),
        )
        .expect("a place");
        let keeper = Keeper::new();
        let driven = Arc::clone(&keeper);
        let drives = spawn(move || driven.drive());
        let (checked, session) = (Arc::clone(&keeper), Arc::clone(place.session()));
        let checks = spawn(move || {
            let version = checked.set.fetch_add(1, Ordering::SeqCst) + 1;
            checked.checked.store(version, Ordering::SeqCst);
            checked.cache.check_revocations(&session, 0);
            checked.wake.notify_one();
        });
        keeper.set_and_catch_up();
        checks.join().unwrap();
        keeper.end(drives);
        let is_answered = keeper.cache.take_checking().is_empty();
        assert!(
            is_answered || keeper.cache.due(Instant::now()).is_some(),
            "nobody asks for a session that waits"
        );
        drop(place);
    });
}

#[test]
fn an_operator_is_answered_over_a_connection_that_opens() {
    explore(|| {
        let process: Semaphore = process(&TestBackend::remote());
        let node = process.node();
        let shard = node.backend().shard(node.overrides.key());
        let server = node.servers.attach(&shard, 0);
        let driven = Arc::clone(node);
        let drives = spawn(move || block_on(driver::run(driven, server)));
        let sets: Vec<_> = [3, 4]
            .into_iter()
            .map(|limit| {
                let process = process.clone();
                spawn(move || block_on(process.set_limit(NAME, limit)).expect("it is set"))
            })
            .collect();
        sets.into_iter().for_each(|sets| sets.join().unwrap());
        let Override { limit, .. } = node.overrides.of(NAME);
        assert!(limit.is_some(), "what was set is not known");
        node.close();
        drives.join().unwrap();
    });
}
