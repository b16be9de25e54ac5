//! For how long a request may wait, in all layers together.

use std::time::Duration;

use http::request::Parts;
use http::{HeaderMap, HeaderName};
use tokio::time::Instant;

/// Waits that are shorter are not kept: they are the backend's answer, or no wait at all.
const GRAIN: Duration = Duration::from_millis(1);

/// For how long a request may still wait for permits, in all layers that it passes.
///
/// It stands in the request's extensions. Each layer adds what the request has waited in it. A layer lets it
/// wait for its own [`wait_timeout`](super::ConcurrencyLimitBuilder::wait_timeout), or for what is left of the
/// longest one so far, whichever is shorter. So the waits of stacked layers do not add up: all together are no
/// longer than the longest wait timeout among them.
///
/// A layer or handler further out can set a deadline of its own, past which none of the layers further in
/// waits. It does not end a wait that has begun, nor the request itself.
///
/// ```
/// use std::time::Duration;
/// use http::Request;
/// use tower_semaphore::limit::WaitBudget;
///
/// let mut request = Request::new(());
/// request.extensions_mut().insert(WaitBudget::of(Duration::from_millis(300)));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitBudget {
    deadline: Option<Instant>,
    waited: Duration,
    /// The longest wait timeout of the layers in which it waited.
    longest: Duration,
}

impl WaitBudget {
    /// A budget that ends after this time, from now on.
    #[must_use]
    pub fn of(budget: Duration) -> Self {
        // Too far away for a clock is no deadline.
        Self { deadline: Instant::now().checked_add(budget), ..Self::default() }
    }

    /// A budget that ends at this moment.
    #[must_use]
    pub const fn until(deadline: Instant) -> Self {
        Self { deadline: Some(deadline), waited: Duration::ZERO, longest: Duration::ZERO }
    }

    /// The moment after which no layer lets the request wait, if one was set.
    #[must_use]
    pub const fn deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// How long the request has waited, in the layers that it has passed.
    #[must_use]
    pub const fn waited(&self) -> Duration {
        self.waited
    }

    /// What a layer may still wait that would let a request wait for so long.
    pub(super) fn left(&self, wait_timeout: Duration, now: impl Fn() -> Instant) -> Duration {
        let budget = wait_timeout.max(self.longest);
        let left = wait_timeout.min(budget.saturating_sub(self.waited));
        match self.deadline {
            Some(deadline) if !left.is_zero() => {
                left.min(deadline.saturating_duration_since(now()))
            }
            _ => left,
        }
    }

    /// A client waits no longer than this, from now on.
    pub(super) fn end_with_client(parts: &mut Parts, timeout: Duration) {
        let Some(deadline) = Instant::now().checked_add(timeout) else { return };
        let mut budget = parts.extensions.get::<Self>().copied().unwrap_or_default();
        budget.deadline = Some(budget.deadline.map_or(deadline, |before| before.min(deadline)));
        parts.extensions.insert(budget);
    }

    /// A request is passed on that has waited in a layer with this wait timeout.
    pub(super) fn pass_on(parts: &mut Parts, waited: Duration, wait_timeout: Duration) {
        if waited < GRAIN {
            return;
        }
        let mut budget = parts.extensions.get::<Self>().copied().unwrap_or_default();
        budget.waited += waited;
        budget.longest = budget.longest.max(wait_timeout);
        parts.extensions.insert(budget);
    }
}

/// Where a request says how long its client waits for the answer.
///
/// A request never waits for permits past that; it never waits longer because of it. See
/// [`client_timeout`](super::ConcurrencyLimitBuilder::client_timeout).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientTimeout {
    header: HeaderName,
    unit: Unit,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unit {
    Grpc,
    Milliseconds,
    Seconds,
}

impl ClientTimeout {
    /// The field `grpc-timeout`, as gRPC writes it: up to eight digits and a unit.
    #[must_use]
    pub const fn grpc() -> Self {
        Self { header: HeaderName::from_static("grpc-timeout"), unit: Unit::Grpc }
    }

    /// This field, a whole number of milliseconds.
    #[must_use]
    pub const fn milliseconds(header: HeaderName) -> Self {
        Self { header, unit: Unit::Milliseconds }
    }

    /// This field, a number of seconds, whole or with a fraction.
    #[must_use]
    pub const fn seconds(header: HeaderName) -> Self {
        Self { header, unit: Unit::Seconds }
    }

    /// `None` if the field is missing, or cannot be read.
    pub(super) fn read(&self, headers: &HeaderMap) -> Option<Duration> {
        let value = headers.get(&self.header)?.to_str().ok()?;
        match self.unit {
            Unit::Grpc => grpc_timeout(value),
            Unit::Milliseconds => digits(value).map(Duration::from_millis),
            Unit::Seconds => seconds(value),
        }
    }
}

fn digits(text: &str) -> Option<u64> {
    let are_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    are_digits.then(|| text.parse().ok()).flatten()
}

fn seconds(text: &str) -> Option<Duration> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_decimal = digits(whole).is_some() && digits(fraction).is_some();
    if !is_decimal {
        return None;
    }
    Duration::try_from_secs_f64(text.parse().ok()?).ok()
}

/// <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md#requests>
fn grpc_timeout(text: &str) -> Option<Duration> {
    let (unit_at, unit) = text.char_indices().next_back()?;
    let number = text.get(..unit_at).filter(|number| number.len() <= 8).and_then(digits)?;
    Some(match unit {
        'H' => Duration::from_secs(number * 3600),
        'M' => Duration::from_secs(number * 60),
        'S' => Duration::from_secs(number),
        'm' => Duration::from_millis(number),
        'u' => Duration::from_micros(number),
        'n' => Duration::from_nanos(number),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(timeout: &ClientTimeout, value: &str) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        headers.insert(timeout.header.clone(), value.parse().unwrap());
        timeout.read(&headers)
    }

    #[test]
    fn what_a_client_says_is_read_in_its_unit() {
        let grpc = ClientTimeout::grpc();
        for (value, expected) in [
            ("2H", Duration::from_secs(7200)),
            ("3M", Duration::from_secs(180)),
            ("99999999S", Duration::from_secs(99_999_999)),
            ("250m", Duration::from_millis(250)),
            ("7u", Duration::from_micros(7)),
            ("8n", Duration::from_nanos(8)),
        ] {
            assert_eq!(read(&grpc, value), Some(expected), "{value}");
        }
        let header = HeaderName::from_static("x-timeout");
        let ms = ClientTimeout::milliseconds(header.clone());
        assert_eq!(read(&ms, "1500"), Some(Duration::from_millis(1500)));
        let seconds = ClientTimeout::seconds(header);
        assert_eq!(read(&seconds, "2"), Some(Duration::from_secs(2)));
        assert_eq!(read(&seconds, "0.25"), Some(Duration::from_millis(250)));
    }

    #[test]
    fn what_cannot_be_read_is_no_timeout() {
        let header = HeaderName::from_static("x-timeout");
        let all = [
            ClientTimeout::grpc(),
            ClientTimeout::milliseconds(header.clone()),
            ClientTimeout::seconds(header),
        ];
        let bad = ["", "-1", "+1", "1e3", "inf", "NaN", "1x", "S", "123456789S", "é", "1.", ".5"];
        for timeout in &all {
            for value in bad {
                assert_eq!(read(timeout, value), None, "{timeout:?} {value}");
            }
            let huge = "9".repeat(400);
            assert_eq!(read(timeout, &huge), None, "{timeout:?}");
            assert_eq!(timeout.read(&HeaderMap::new()), None);
        }
    }

    #[test]
    fn a_layer_waits_for_what_those_outside_it_left() {
        let (now, second) = (Instant::now(), Duration::from_secs(1));
        let budget = WaitBudget { waited: second, ..WaitBudget::default() };
        assert_eq!(budget.left(3 * second, || now), 2 * second);
        assert_eq!(budget.left(second / 2, || now), Duration::ZERO);
        let budget = WaitBudget { longest: 2 * second, ..budget };
        assert_eq!(budget.left(second / 2, || now), second / 2);
        assert_eq!(budget.left(5 * second, || now), 4 * second);
        let budget = WaitBudget::until(now + second);
        assert_eq!(budget.left(3 * second, || now), second);
        assert_eq!(budget.left(second / 2, || now), second / 2);
        assert_eq!(budget.left(second, || now + 2 * second), Duration::ZERO);
    }
}
