//! A task of several subtasks, which wake each other.
//!
//! `select!` polls all of its branches at each wake-up. Here each subtask has a waker of its own, and only those that
//! were woken are polled. A subtask that another one wakes while the task runs is polled in the same run: a task that
//! wakes itself would go to the end of its runtime's queue, and have another thread woken to look there.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

use crate::sync::atomic::{AtomicU8, Ordering};

/// How many rounds of polling a run has before other tasks have their turn.
const ROUNDS_MAX: usize = 64;

/// The bit beside those of woken subtasks that is set while the task runs. It looks at the others before it ends, so no
/// wake-up of the task is needed.
const RUNS: u8 = 1 << 7;

/// The subtasks of a task, by number: 0 to `N` - 1, where `N` is at most 7.
pub(crate) struct Subtasks<const N: usize> {
    woken: Arc<Woken>,
    wakers: [Waker; N],
    /// The subtasks to poll in the next run.
    next: AtomicU8,
}

/// A set of subtasks.
#[derive(Clone, Copy)]
pub(crate) struct Which(u8);

#[derive(Default)]
struct Woken {
    subtasks: AtomicU8,
    task: AtomicWaker,
}

struct Subtask {
    woken: Arc<Woken>,
    bit: u8,
}

impl<const N: usize> Subtasks<N> {
    /// Creates the subtasks, all of them woken.
    pub(crate) fn new() -> Self {
        const { assert!(N <= 7, "the eighth bit is taken") };
        let woken = Arc::new(Woken::default());
        let waker = |subtask: usize| {
            Waker::from(Arc::new(Subtask { woken: Arc::clone(&woken), bit: 1 << subtask }))
        };
        let wakers = std::array::from_fn(waker);
        woken.subtasks.store((1 << N) - 1, Ordering::Release);
        Self { woken, wakers, next: AtomicU8::new(0) }
    }

    /// Returns the context in which a subtask is polled.
    pub(crate) fn context(&self, subtask: usize) -> Context<'_> {
        Context::from_waker(&self.wakers[subtask])
    }

    pub(crate) fn wake(&self, subtask: usize) {
        self.wakers[subtask].wake_by_ref();
    }

    /// Has a subtask polled again once the tasks that are ready now have had their turn. Call it while polling.
    pub(crate) fn wake_after_others(&self, subtask: usize) {
        self.next.fetch_or(1 << subtask, Ordering::Relaxed);
    }

    /// Calls `poll` with the subtasks that were woken, until none is left or the task is done.
    pub(crate) fn poll<T>(
        &self,
        cx: &Context<'_>,
        mut poll: impl FnMut(Which) -> Poll<T>,
    ) -> Poll<T> {
        let Woken { subtasks, task } = &*self.woken;
        task.register(cx.waker());
        subtasks.fetch_or(self.next.swap(0, Ordering::Relaxed), Ordering::AcqRel);
        for _ in 0..ROUNDS_MAX {
            let woken = subtasks.swap(RUNS, Ordering::AcqRel) & !RUNS;
            if woken == 0 {
                if self.next.load(Ordering::Relaxed) != 0 {
                    break;
                }
                if subtasks.compare_exchange(RUNS, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    return Poll::Pending;
                }
                continue;
            }
            if let Poll::Ready(done) = poll(Which(woken)) {
                return Poll::Ready(done);
            }
        }
        subtasks.fetch_and(!RUNS, Ordering::AcqRel);
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Which {
    pub(crate) const fn has(self, subtask: usize) -> bool {
        self.0 & (1 << subtask) != 0
    }
}

impl Wake for Subtask {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Otherwise the task runs, or was woken already.
        if self.woken.subtasks.fetch_or(self.bit, Ordering::AcqRel) == 0 {
            self.woken.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use super::{ROUNDS_MAX, Subtasks};

    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Polls the task. Returns which of two subtasks were polled in each round.
    fn rounds(subtasks: &Subtasks<2>, task: &Arc<Task>, act: impl Fn(usize)) -> Vec<[bool; 2]> {
        let (waker, mut rounds) = (Waker::from(Arc::clone(task)), Vec::new());
        let polled = subtasks.poll(&Context::from_waker(&waker), |woken| {
            act(rounds.len());
            rounds.push([woken.has(0), woken.has(1)]);
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        rounds
    }

    #[test]
    fn only_subtasks_that_are_woken_are_polled() {
        let (subtasks, task) = (Subtasks::<2>::new(), Arc::default());
        assert_eq!(rounds(&subtasks, &task, |_| {}), [[true, true]]);
        assert_eq!(rounds(&subtasks, &task, |_| {}), [[false; 2]; 0]);
        subtasks.context(1).waker().wake_by_ref();
        subtasks.context(1).waker().wake_by_ref();
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
        assert_eq!(rounds(&subtasks, &task, |_| {}), [[false, true]]);
    }

    #[test]
    fn a_subtask_that_another_one_wakes_is_polled_in_the_same_run() {
        let (subtasks, task) = (Subtasks::<2>::new(), Arc::default());
        let wake = |round| {
            if round == 0 {
                subtasks.wake(1)
            }
        };
        assert_eq!(rounds(&subtasks, &task, wake), [[true, true], [false, true]]);
        assert_eq!(task.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_subtask_that_lets_others_go_first_is_polled_in_the_next_run() {
        let (subtasks, task) = (Subtasks::<2>::new(), Arc::default());
        let yields = |round| {
            if round == 0 {
                subtasks.wake_after_others(0);
                subtasks.wake(1);
            }
        };
        assert_eq!(rounds(&subtasks, &task, yields), [[true, true], [false, true]]);
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
        subtasks.wake(1);
        assert_eq!(task.0.load(Ordering::Relaxed), 2);
        assert_eq!(rounds(&subtasks, &task, |_| {}), [[true, true]]);
        assert_eq!(rounds(&subtasks, &task, |_| {}), [[false; 2]; 0]);
    }

    #[test]
    fn a_task_that_always_wakes_itself_leaves_others_their_turn() {
        let (subtasks, task) = (Subtasks::<2>::new(), Arc::default());
        assert_eq!(rounds(&subtasks, &task, |_| subtasks.wake(0)).len(), ROUNDS_MAX);
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
        assert_eq!(rounds(&subtasks, &task, |_| {}), [[true, false]]);
    }
}
