//! A pause until a time, and the ramp after it.

use std::time::Duration;

use super::Session;
use crate::time::Time;

/// How long each step of the ramp lasts.
const STEP: Duration = Duration::from_millis(250);
/// The steps of the ramp: a second.
const STEPS: u32 = 4;

/// Grants nothing before a time. In the second after it, grants a small part of the limit, which doubles at each step up
/// to a quarter: a fleet that comes back all at once, and a moment too early, is refused all at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) struct Pause {
    until: Option<Time>,
    /// The step of the ramp; 0 before the end.
    step: u32,
}

impl Pause {
    pub(super) fn new(until: Option<Time>, now: Time) -> Self {
        let mut pause = Self { until, step: 0 };
        pause.pass(now);
        pause
    }

    /// Goes on to the step of this moment.
    fn pass(&mut self, now: Time) {
        while self.next().is_some_and(|next| next <= now) {
            self.step += 1;
            if self.step > STEPS {
                *self = Self::default();
            }
        }
    }

    /// When the next step begins.
    pub(super) fn next(&self) -> Option<Time> {
        self.until.map(|until| until + STEP * self.step)
    }

    /// When all of the limit is granted again.
    pub(super) fn over(&self) -> Option<Time> {
        self.until.map(|until| if self.step == 0 { until } else { until + STEP * STEPS })
    }

    /// How much of a limit is granted; `None`: all of it.
    pub(super) fn of(&self, limit: u32) -> Option<u32> {
        self.until.map(|_| match self.step {
            0 => 0,
            step => (limit >> (2 + STEPS - step)).max(1).min(limit),
        })
    }
}

impl Session {
    /// Grants nothing before `until`, whatever else is set, and then a growing part of the limit for a second; `None`
    /// ends both. Requests in flight go on, and those that wait keep their turns.
    pub fn handle_pause(&mut self, until: Option<Time>, now: Time) {
        self.take_pause(Pause::new(until, now), now);
    }

    /// Goes on with the pause.
    pub(super) fn pass_pause(&mut self, now: Time) {
        let mut pause = self.limits.pause();
        pause.pass(now);
        self.take_pause(pause, now);
    }

    fn take_pause(&mut self, pause: Pause, now: Time) {
        if pause != self.limits.pause() {
            let change = self.limits.handle_pause(pause);
            self.follow_limit(change, now);
            self.admit_local(now);
        }
        pause.next().into_iter().for_each(|next| self.want(next));
    }

    /// When the pause ends, or the ramp after it.
    #[must_use]
    pub fn paused_until(&self) -> Option<Time> {
        self.limits.pause().over()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{Pause, STEP, STEPS};
    use crate::time::Time;

    #[test]
    fn at_most_a_quarter_is_granted_in_the_second_after_the_end() {
        let until = Time::ZERO + Duration::from_secs(5);
        let of = |limit, after: Duration| Pause::new(Some(until), until + after).of(limit);
        assert_eq!(Pause::new(Some(until), Time::ZERO).of(30), Some(0));
        let seen: Vec<_> = (0..=STEPS).map(|step| of(100, STEP * step)).collect();
        assert_eq!(seen, [Some(3), Some(6), Some(12), Some(25), None]);
        assert_eq!(of(1, Duration::ZERO), Some(1), "not none");
        assert_eq!(of(0, Duration::ZERO), Some(0), "an operator's pause");
        assert_eq!(of(u32::MAX, STEP), Some(u32::MAX >> 4));
    }

    #[test]
    fn each_step_has_its_time_and_the_last_one_ends_it() {
        let until = Time::ZERO + Duration::from_secs(5);
        let mut pause = Pause::new(Some(until), Time::ZERO);
        assert_eq!((pause.next(), pause.over()), (Some(until), Some(until)));
        let ramp = until + STEP * STEPS;
        for step in 1..=STEPS {
            pause.pass(pause.next().unwrap());
            assert_eq!((pause.next(), pause.over()), (Some(until + STEP * step), Some(ramp)));
        }
        pause.pass(ramp);
        assert_eq!(pause, Pause::default());
        assert_eq!(Pause::new(Some(until), ramp), Pause::default(), "known too late");
    }
}
