//! Subtasks of a task that other threads wake.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use shuttle::future::block_on;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread::spawn;

use super::{either, explore};
use crate::tasks::driver::subtasks::Subtasks;

const SUBTASKS: usize = 2;
/// How often each subtask is woken.
const TIMES: usize = 2;

/// Each subtask sees what it was woken for, even if it is woken while the task runs, or lets others go first.
#[test]
fn a_subtask_that_is_woken_is_polled_after_that() {
    explore(|| {
        let subtasks = Arc::new(Subtasks::<SUBTASKS>::new());
        let sent: Arc<[AtomicUsize; SUBTASKS]> = Arc::default();
        let wakers: Vec<_> = (0..SUBTASKS)
            .map(|subtask| {
                let (subtasks, sent) = (Arc::clone(&subtasks), Arc::clone(&sent));
                spawn(move || {
                    for _ in 0..TIMES {
                        sent[subtask].fetch_add(1, Ordering::SeqCst);
                        subtasks.wake(subtask);
                    }
                })
            })
            .collect();
        let (mut seen, mut may_yield) = ([0; SUBTASKS], true);
        block_on(poll_fn(|cx| {
            subtasks.poll(cx, |woken| {
                for subtask in (0..SUBTASKS).filter(|subtask| woken.has(*subtask)) {
                    if std::mem::take(&mut may_yield) && either() {
                        subtasks.wake_after_others(subtask);
                        continue;
                    }
                    seen[subtask] = sent[subtask].load(Ordering::SeqCst);
                }
                if seen == [TIMES; SUBTASKS] { Poll::Ready(()) } else { Poll::Pending }
            })
        }));
        for waker in wakers {
            waker.join().expect("a thread that only wakes");
        }
    });
}
