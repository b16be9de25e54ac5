//! Parts of a task that other threads wake.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;

use shuttle::future::block_on;
use shuttle::sync::atomic::{AtomicUsize, Ordering};
use shuttle::thread::spawn;

use super::{either, explore};
use crate::tasks::driver::subtasks::Parts;

const PARTS: usize = 2;
/// How often each part is woken.
const TIMES: usize = 2;

/// Each part sees what it was woken for, also if it is woken while the task runs, or lets others go first.
#[test]
fn a_part_that_is_woken_is_polled_after_that() {
    explore(|| {
        let parts = Arc::new(Parts::<PARTS>::new());
        let sent: Arc<[AtomicUsize; PARTS]> = Arc::default();
        let wakers: Vec<_> = (0..PARTS)
            .map(|part| {
                let (parts, sent) = (Arc::clone(&parts), Arc::clone(&sent));
                spawn(move || {
                    for _ in 0..TIMES {
                        sent[part].fetch_add(1, Ordering::SeqCst);
                        parts.wake(part);
                    }
                })
            })
            .collect();
        let (mut seen, mut may_yield) = ([0; PARTS], true);
        block_on(poll_fn(|cx| {
            parts.poll(cx, |woken| {
                for part in (0..PARTS).filter(|part| woken.has(*part)) {
                    if std::mem::take(&mut may_yield) && either() {
                        parts.wake_after_others(part);
                        continue;
                    }
                    seen[part] = sent[part].load(Ordering::SeqCst);
                }
                if seen == [TIMES; PARTS] { Poll::Ready(()) } else { Poll::Pending }
            })
        }));
        for waker in wakers {
            waker.join().expect("a thread that only wakes");
        }
    });
}
