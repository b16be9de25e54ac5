//! The head of a response, and the times in its fields.

use std::time::{Duration, SystemTime};

use http::header::{DATE, RETRY_AFTER};
use http::{HeaderMap, Response, StatusCode};

/// The head of a response of the upstream: its status and its header fields.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use http::{Response, StatusCode, header::RETRY_AFTER};
/// use tower_semaphore::feedback::{self, Feedback, Head};
///
/// # fn main() -> Result<(), http::Error> {
/// let response = Response::builder().status(429).header(RETRY_AFTER, "20").body(())?;
/// let said = feedback::retry_after(Head::of(&response));
/// assert_eq!(said, Feedback::Backoff(Duration::from_secs(20)));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Head<'a> {
    /// The status.
    pub status: StatusCode,
    /// The header fields.
    pub headers: &'a HeaderMap,
}

impl<'a> Head<'a> {
    /// Creates a head.
    #[must_use]
    pub const fn new(status: StatusCode, headers: &'a HeaderMap) -> Self {
        Self { status, headers }
    }

    /// Returns the head of a response.
    #[must_use]
    pub fn of<B>(response: &'a Response<B>) -> Self {
        Self::new(response.status(), response.headers())
    }

    /// The time in `Retry-After`: seconds, or until a date. A date counts from the response's own `Date`, if it has one,
    /// because the upstream's clock may differ from that of this process.
    pub(super) fn retry_after(self) -> Option<Duration> {
        let text = self.text(RETRY_AFTER.as_str())?;
        if let Some(seconds) = seconds(text) {
            return Some(seconds);
        }
        let until = httpdate::parse_http_date(text).ok()?;
        let date = self.text(DATE.as_str()).and_then(|date| httpdate::parse_http_date(date).ok());
        until.duration_since(date.unwrap_or_else(SystemTime::now)).ok()
    }

    /// The time in a field of milliseconds.
    pub(super) fn ms(self, name: &str) -> Option<Duration> {
        seconds(self.text(name)?).map(|ms| ms / 1000)
    }

    pub(super) fn text(self, name: &str) -> Option<&'a str> {
        self.headers.get(name)?.to_str().ok().map(str::trim)
    }
}

/// Parses decimal digits, with or without a fraction; `None` for anything else, a sign included.
fn seconds(text: &str) -> Option<Duration> {
    let is_plain = text.bytes().all(|c| c.is_ascii_digit() || c == b'.');
    let number: f64 = text.parse().ok().filter(|_| is_plain)?;
    Duration::try_from_secs_f64(number).ok()
}

/// Parses a time such as `6m0s`, `2m59.56s`, `120ms` or `1h`; a number alone is seconds.
pub(super) fn time(text: &str) -> Option<Duration> {
    if let Some(seconds) = seconds(text) {
        return Some(seconds);
    }
    let (mut rest, mut sum) = (text, Duration::ZERO);
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit() && c != '.')?;
        let (number, after) = rest.split_at(digits);
        let units = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, after) = after.split_at(units);
        let seconds_in = match unit {
            "ms" => 0.001,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3600.0,
            "d" => 86_400.0,
            _ => return None,
        };
        let part = seconds(number)?.as_secs_f64() * seconds_in;
        sum = sum.checked_add(Duration::try_from_secs_f64(part).ok()?)?;
        rest = after;
    }
    (!text.is_empty()).then_some(sum)
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use http::header::{DATE, RETRY_AFTER};
    use http::{HeaderMap, HeaderValue, StatusCode};

    use super::{Head, time};

    fn retry_after(fields: &[(http::HeaderName, &str)]) -> Option<Duration> {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.insert(name, HeaderValue::from_str(value).unwrap());
        }
        Head::new(StatusCode::TOO_MANY_REQUESTS, &headers).retry_after()
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let seconds = |text| retry_after(&[(RETRY_AFTER, text)]);
        assert_eq!(seconds("20"), Some(Duration::from_secs(20)));
        assert_eq!(seconds(" 0.5 "), Some(Duration::from_millis(500)));
        assert_eq!(seconds("0"), Some(Duration::ZERO));
        for none in ["", "-1", "+1", "soon", "1e9", "inf", "NaN", ".", "1.2.3", "20s"] {
            assert_eq!(seconds(none), None, "{none:?}");
        }
        assert!(seconds("99999999999999999999999999").is_none(), "no duration");
        let until = (RETRY_AFTER, "Sun, 06 Nov 1994 08:50:07 GMT");
        let at = |date| retry_after(&[until.clone(), (DATE, date)]);
        assert_eq!(at("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::from_secs(30)));
        assert_eq!(at("Sun, 06 Nov 1994 08:51:37 GMT"), None, "it has passed");
        assert_eq!(at("?"), None, "by the own clock it has passed long ago");
        assert_eq!(seconds("Sunday, 06-Nov-94 08:50:07 GMT"), None);
        let soon = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(30));
        let left = seconds(&soon).expect("a time");
        assert!(left > Duration::from_secs(20) && left <= Duration::from_secs(30), "{left:?}");
    }

    #[test]
    fn times_with_units_are_parsed() {
        let ms = |text| time(text).map(|time| time.as_micros());
        assert_eq!(ms("1s"), Some(1_000_000));
        assert_eq!(ms("6m0s"), Some(360_000_000));
        assert_eq!(ms("2m59.56s"), Some(179_560_000));
        assert_eq!(ms("120ms"), Some(120_000));
        assert_eq!(ms("1h2m3s"), Some(3_723_000_000));
        assert_eq!(ms("1d"), Some(86_400_000_000));
        assert_eq!(ms("7"), Some(7_000_000));
        for none in ["", "s", "1x", "1s2", "-1s", "1.2.3s", "1 s", "€", "1€", "1e300h"] {
            assert_eq!(time(none), None, "{none:?}");
        }
        assert_eq!(time(&format!("{}h", "9".repeat(40))), None);
    }
}
