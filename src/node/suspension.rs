//! For how long this machine was suspended: by that much the clock that leases are counted by stood still.
//!
//! The clock behind [`Instant`] stands still on Linux, Android and Apple's systems while the machine is suspended, and
//! each of them has another that goes on. On Windows `Instant` itself goes on.

use std::time::Duration;

use tokio::time::Instant;

pub(crate) use imp::{look, noticed};

#[cfg(any(target_os = "linux", target_os = "android", target_vendor = "apple"))]
mod imp {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Instant as StdInstant;

    use rustix::time::{ClockId, clock_gettime};

    use super::{Duration, Instant};

    #[cfg(not(target_vendor = "apple"))]
    const GOES_ON: ClockId = ClockId::Boottime;
    /// `Instant` is another one there.
    #[cfg(target_vendor = "apple")]
    const GOES_ON: ClockId = ClockId::Monotonic;

    /// What the clocks may differ by without a suspension: they are not read in the same moment.
    const GRAIN: Duration = Duration::from_micros(100);

    /// What both clocks showed in the beginning. The one that stands still was read first, and is read last from then
    /// on: so a pause between the reads never looks like a suspension.
    static BEGINNING: LazyLock<(StdInstant, Duration)> =
        LazyLock::new(|| (StdInstant::now(), goes_on()));
    /// ns.
    static NOTICED: AtomicU64 = AtomicU64::new(0);

    /// Returns for how long the machine was suspended since the beginning of this process, as far as that was noticed.
    pub(crate) fn noticed() -> Duration {
        Duration::from_nanos(NOTICED.load(Ordering::Relaxed))
    }

    /// As [`noticed`], after a look at the clocks. `now` was read just before.
    pub(crate) fn look(now: Instant) -> Duration {
        let noticed = noticed();
        if beyond(goes_on(), now.into_std()) <= noticed + GRAIN {
            return noticed;
        }
        // A test may have paused the clock of Tokio, and this thread may have stood still since `now` was read.
        let went_on = goes_on();
        let suspended = beyond(went_on, StdInstant::now());
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

    fn goes_on() -> Duration {
        let time = clock_gettime(GOES_ON);
        let secs = u64::try_from(time.tv_sec).unwrap_or(0);
        Duration::new(secs, u32::try_from(time.tv_nsec).unwrap_or(0))
    }

    /// By how much the clock that goes on has gone further than the other since the beginning.
    fn beyond(went_on: Duration, stood: StdInstant) -> Duration {
        let (stood_first, went_on_first) = *BEGINNING;
        let went_on = went_on.saturating_sub(went_on_first);
        went_on.saturating_sub(stood.saturating_duration_since(stood_first))
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android", target_vendor = "apple")))]
mod imp {
    use super::{Duration, Instant};

    pub(crate) const fn noticed() -> Duration {
        Duration::ZERO
    }

    pub(crate) const fn look(_: Instant) -> Duration {
        Duration::ZERO
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use std::time::Duration;

    use tokio::time::{Instant, advance};

    use super::look;

    #[tokio::test(start_paused = true)]
    async fn a_clock_that_a_test_pauses_or_advances_is_no_suspension() {
        assert_eq!(look(Instant::now()), Duration::ZERO);
        std::thread::sleep(Duration::from_millis(5));
        assert_eq!(look(Instant::now()), Duration::ZERO, "paused");
        advance(Duration::from_secs(3600)).await;
        assert_eq!(look(Instant::now()), Duration::ZERO, "advanced");
    }
}
