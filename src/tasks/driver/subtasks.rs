//! A task of several parts, which wake each other.
//!
//! A wake-up names the part that it concerns, and only that part is polled. A part that is woken by another one, while
//! the task runs, is polled in the same run: a task that wakes itself would go to the end of its runtime's queue, and
//! have another thread woken to look there.

use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use futures_util::task::AtomicWaker;

use crate::sync::atomic::{AtomicU8, Ordering};

/// How often parts are polled before other tasks have their turn.
const ROUNDS_MAX: usize = 64;

/// Stands beside the parts that are woken: the task runs, and looks at them before it ends.
const RUNS: u8 = 1 << 7;

/// The parts of a task, by number: 0 to `N` - 1, and `N` is 7 at most.
pub(crate) struct Parts<const N: usize> {
    woken: Arc<Woken>,
    wakers: [Waker; N],
    /// To be polled in the next run.
    next: AtomicU8,
}

/// Some of the parts.
#[derive(Clone, Copy)]
pub(crate) struct Which(u8);

#[derive(Default)]
struct Woken {
    parts: AtomicU8,
    task: AtomicWaker,
}

struct Part {
    woken: Arc<Woken>,
    bit: u8,
}

impl<const N: usize> Parts<N> {
    /// All of them are woken.
    pub(crate) fn new() -> Self {
        const { assert!(N <= 7, "the eighth bit is taken") };
        let woken = Arc::new(Woken::default());
        let waker =
            |part: usize| Waker::from(Arc::new(Part { woken: Arc::clone(&woken), bit: 1 << part }));
        let wakers = std::array::from_fn(waker);
        woken.parts.store((1 << N) - 1, Ordering::Release);
        Self { woken, wakers, next: AtomicU8::new(0) }
    }

    /// The context in which a part is polled.
    pub(crate) fn context(&self, part: usize) -> Context<'_> {
        Context::from_waker(&self.wakers[part])
    }

    pub(crate) fn wake(&self, part: usize) {
        self.wakers[part].wake_by_ref();
    }

    /// Has a part polled once the tasks that are ready now have had their turn. Called by a part as it is polled.
    pub(crate) fn wake_after_others(&self, part: usize) {
        self.next.fetch_or(1 << part, Ordering::Relaxed);
    }

    /// Calls `poll` with the parts that were woken, until none is or the task is done.
    pub(crate) fn poll<T>(
        &self,
        cx: &Context<'_>,
        mut poll: impl FnMut(Which) -> Poll<T>,
    ) -> Poll<T> {
        let Woken { parts, task } = &*self.woken;
        task.register(cx.waker());
        parts.fetch_or(self.next.swap(0, Ordering::Relaxed), Ordering::AcqRel);
        for _ in 0..ROUNDS_MAX {
            let woken = parts.swap(RUNS, Ordering::AcqRel) & !RUNS;
            if woken == 0 {
                if self.next.load(Ordering::Relaxed) != 0 {
                    break;
                }
                if parts.compare_exchange(RUNS, 0, Ordering::AcqRel, Ordering::Acquire).is_ok() {
                    return Poll::Pending;
                }
                continue;
            }
            if let Poll::Ready(done) = poll(Which(woken)) {
                return Poll::Ready(done);
            }
        }
        parts.fetch_and(!RUNS, Ordering::AcqRel);
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Which {
    pub(crate) const fn has(self, part: usize) -> bool {
        self.0 & (1 << part) != 0
    }
}

impl Wake for Part {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Else it runs, or was woken already.
        if self.woken.parts.fetch_or(self.bit, Ordering::AcqRel) == 0 {
            self.woken.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use super::{Parts, ROUNDS_MAX};

    #[derive(Default)]
    struct Task(AtomicUsize);

    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Polls, and returns which of two parts were polled in each round.
    fn rounds(parts: &Parts<2>, task: &Arc<Task>, act: impl Fn(usize)) -> Vec<[bool; 2]> {
        let (waker, mut rounds) = (Waker::from(Arc::clone(task)), Vec::new());
        let polled = parts.poll(&Context::from_waker(&waker), |woken| {
            act(rounds.len());
            rounds.push([woken.has(0), woken.has(1)]);
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        rounds
    }

    #[test]
    fn only_parts_that_are_woken_are_polled() {
        let (parts, task) = (Parts::<2>::new(), Arc::default());
        assert_eq!(rounds(&parts, &task, |_| {}), [[true, true]]);
        assert_eq!(rounds(&parts, &task, |_| {}), [[false; 2]; 0]);
        parts.context(1).waker().wake_by_ref();
        parts.context(1).waker().wake_by_ref();
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
        assert_eq!(rounds(&parts, &task, |_| {}), [[false, true]]);
    }

    #[test]
    fn a_part_that_another_one_wakes_is_polled_in_the_same_run() {
        let (parts, task) = (Parts::<2>::new(), Arc::default());
        let wake = |round| {
            if round == 0 {
                parts.wake(1)
            }
        };
        assert_eq!(rounds(&parts, &task, wake), [[true, true], [false, true]]);
        assert_eq!(task.0.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn a_part_that_lets_others_go_first_is_polled_in_the_next_run() {
        let (parts, task) = (Parts::<2>::new(), Arc::default());
        let yields = |round| {
            if round == 0 {
                parts.wake_after_others(0);
                parts.wake(1);
            }
        };
        assert_eq!(rounds(&parts, &task, yields), [[true, true], [false, true]]);
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
        parts.wake(1);
        assert_eq!(task.0.load(Ordering::Relaxed), 2);
        assert_eq!(rounds(&parts, &task, |_| {}), [[true, true]]);
        assert_eq!(rounds(&parts, &task, |_| {}), [[false; 2]; 0]);
    }

    #[test]
    fn a_task_that_always_wakes_itself_leaves_others_their_turn() {
        let (parts, task) = (Parts::<2>::new(), Arc::default());
        assert_eq!(rounds(&parts, &task, |_| parts.wake(0)).len(), ROUNDS_MAX);
        assert_eq!(task.0.load(Ordering::Relaxed), 1);
        assert_eq!(rounds(&parts, &task, |_| {}), [[true, false]]);
    }
}
