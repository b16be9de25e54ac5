//! Which ranges a limit can find itself in.

use super::{Limit, Policy};
use crate::error::ConfigError;
use crate::protocol::Adaptive;

impl Policy {
    /// Checks the range of the limit, if that finds itself.
    pub(super) fn validate_adaptive(&self) -> Result<(), ConfigError> {
        let Some(range) = self.adaptive else { return Ok(()) };
        let (min, max, headroom) = (range.min(), range.max(), self.headroom);
        let error = |text: String| Err(ConfigError::new(text));
        if min == 0 {
            return error(format!(
                "adaptive limit is from 0 to {max}, and with 0 no response would ever come that lets it grow; expected \
                 1 or more"
            ));
        }
        if min >= max {
            return error(format!(
                "adaptive limit is from {min} to {max}; expected a minimum below the maximum"
            ));
        }
        let (shortest, longest) = (Adaptive::MIN_INTERVAL, Adaptive::MAX_INTERVAL);
        if !(shortest..=longest).contains(&range.interval()) {
            return error(format!(
                "adaptive limit grows every {:?}; expected {shortest:?} to {longest:?}",
                range.interval()
            ));
        }
        match self.limit {
            Limit::Permits(limit) if limit == max => {}
            Limit::Permits(limit) => {
                return error(format!(
                    "limit is {limit}, and the adaptive limit begins at its maximum of {max}; expected the same number"
                ));
            }
            Limit::Unlimited => {
                return error(format!(
                    "adaptive limit is set without a limit that could be lowered; expected a limit of {max} permits"
                ));
            }
        }
        if headroom >= min {
            return error(format!(
                "headroom is {headroom}, which leaves nothing of the lowest adaptive limit of {min} to the other \
                 classes; expected 0 to {}",
                min - 1
            ));
        }
        Ok(())
    }
}
