//! Time during which this process could run.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Once, OnceLock};
use std::thread::{sleep, spawn};
use std::time::{Duration, Instant};

/// How often the pulse beats.
const PULSE: Duration = Duration::from_millis(5);
/// It is late by less than this on a machine that is busy now and then.
const LATE: Duration = Duration::from_millis(20);

/// Measures how long something took, without the time in which this whole process stood still because the machine ran
/// something else: for bounds on the crate, which cannot be faster than its machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stopwatch {
    began: Instant,
    stalled: Duration,
}

impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self { stalled: stalled(), began: Instant::now() }
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.began.elapsed().saturating_sub(stalled().saturating_sub(self.stalled))
    }
}

/// Returns how long this process stood still since the first call.
fn stalled() -> Duration {
    static EPOCH: OnceLock<Instant> = OnceLock::new();
    static PULSES: Once = Once::new();
    static STALLED_US: AtomicU64 = AtomicU64::new(0);
    static LAST_US: AtomicU64 = AtomicU64::new(0);
    let epoch = *EPOCH.get_or_init(Instant::now);
    let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap();
    let late = move |last: u64| {
        let late = epoch.elapsed().saturating_sub(Duration::from_micros(last) + PULSE);
        if late < LATE { Duration::ZERO } else { late }
    };
    PULSES.call_once(|| {
        LAST_US.store(micros(epoch.elapsed()), Ordering::SeqCst);
        spawn(move || {
            loop {
                sleep(PULSE);
                let late = late(LAST_US.load(Ordering::SeqCst));
                STALLED_US.fetch_add(micros(late), Ordering::SeqCst);
                LAST_US.store(micros(epoch.elapsed()), Ordering::SeqCst);
            }
        });
    });
    // A stall that has just ended may not be counted yet.
    let last = LAST_US.load(Ordering::SeqCst);
    Duration::from_micros(STALLED_US.load(Ordering::SeqCst)) + late(last)
}
