//! How long this machine was suspended.
//!
//! Leases go on in Redis while a machine is suspended. The clock behind [`Instant`] does not, on Linux, Android and
//! Apple's systems; each of them has another clock that does. On Windows `Instant` itself goes on.

use std::time::Duration;

use tokio::time::Instant;

pub(crate) use imp::{check, noticed};

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
mod imp {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant as StdInstant;

    use rustix::time::{ClockId, clock_gettime};

    use super::{Duration, Instant};

    /// The clock that goes on during a suspension.
    #[cfg(not(target_vendor = "apple"))]
    const BOOT_CLOCK: ClockId = ClockId::Boottime;
    /// There, `Instant` reads `CLOCK_UPTIME_RAW`, and this is the one that goes on.
    #[cfg(target_vendor = "apple")]
    const BOOT_CLOCK: ClockId = ClockId::Monotonic;

    /// How much the clocks may differ without a suspension, since they are not read at the same moment.
    const GRAIN: Duration = Duration::from_micros(100);

    /// What both clocks showed at first. Here the one that stops is read first, later it is read last, so a pause
    /// between the two reads never looks like a suspension.
    static BEGINNING: LazyLock<(StdInstant, Duration)> =
        LazyLock::new(|| (StdInstant::now(), since_boot()));
    /// In nanoseconds.
    static NOTICED: AtomicU64 = AtomicU64::new(0);

    /// Returns how long the machine has been suspended since this process began, as of the last [`check`].
    pub(crate) fn noticed() -> Duration {
        Duration::from_nanos(NOTICED.load(Ordering::Relaxed))
    }

    /// Compares the clocks and returns how long the machine has been suspended. `now` was read just before.
    pub(crate) fn check(now: Instant) -> Duration {
        let noticed = noticed();
        if ahead_by(since_boot(), now.into_std()) <= noticed + GRAIN {
            return noticed;
        }
        // Read again: a test may have paused Tokio's clock, or this thread may have been stopped after `now` was read.
        let since_boot = since_boot();
        let suspended = ahead_by(since_boot, StdInstant::now());
        if suspended <= noticed + GRAIN {
            return noticed;
        }
        let ns = u64::try_from(suspended.as_nanos()).unwrap_or(u64::MAX);
        let before = NOTICED.fetch_max(ns, Ordering::Relaxed);
        if before < ns {
            let seconds = suspended.saturating_sub(Duration::from_nanos(before)).as_secs_f64();
            tracing::info!(
                target: "tower_semaphore",
                seconds,
                "this machine was suspended; permits whose leases ended meanwhile are lost"
            );
        }
        Duration::from_nanos(before.max(ns))
    }

    fn since_boot() -> Duration {
        let time = clock_gettime(BOOT_CLOCK);
        let secs = u64::try_from(time.tv_sec).unwrap_or(0);
        Duration::new(secs, u32::try_from(time.tv_nsec).unwrap_or(0))
    }

    /// Returns how far the clock that goes on is ahead of the other, compared with the beginning.
    fn ahead_by(since_boot: Duration, now: StdInstant) -> Duration {
        let (first_now, first_since_boot) = *BEGINNING;
        let passed = since_boot.saturating_sub(first_since_boot);
        passed.saturating_sub(now.saturating_duration_since(first_now))
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
mod imp {
    use super::{Duration, Instant};

    pub(crate) const fn noticed() -> Duration {
        Duration::ZERO
    }

    pub(crate) const fn check(_: Instant) -> Duration {
        Duration::ZERO
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, advance};

    use super::check;

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_a_test_pauses_or_advances_is_no_suspension() {
        assert_eq!(check(Instant::now()), Duration::ZERO);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(check(Instant::now()), Duration::ZERO, "paused");
        advance(Duration::from_secs(3600)).await;
        assert_eq!(check(Instant::now()), Duration::ZERO, "advanced");
    }
}
