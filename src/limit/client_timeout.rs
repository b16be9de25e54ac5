//! How long a request says that its client waits.

use std::time::Duration;

use http::{HeaderMap, HeaderName};

/// The header in which a request says how long its client waits for the response.
///
/// A request does not wait for a permit past that time, nor longer than the layer allows because of it. See
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
    /// The header `grpc-timeout`, as gRPC writes it: up to eight digits and a unit.
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use tower_semaphore::limit::ClientTimeout;
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// // `grpc-timeout: 250m` is a quarter of a second.
    /// ConcurrencyLimitLayer::builder(semaphore, "model")
    ///     .limit(10)
    ///     .client_timeout(ClientTimeout::grpc())
    ///     .build()
    /// # }
    /// ```
    #[must_use]
    pub const fn grpc() -> Self {
        Self { header: HeaderName::from_static("grpc-timeout"), unit: Unit::Grpc }
    }

    /// This header, a whole number of milliseconds.
    ///
    /// ```
    /// use http::HeaderName;
    /// use tower_semaphore::limit::ClientTimeout;
    ///
    /// // What Envoy sends to its upstreams.
    /// let header = HeaderName::from_static("x-envoy-expected-rq-timeout-ms");
    /// let timeout = ClientTimeout::milliseconds(header);
    /// ```
    #[must_use]
    pub const fn milliseconds(header: HeaderName) -> Self {
        Self { header, unit: Unit::Milliseconds }
    }

    /// This header, a number of seconds, whole or with a fraction.
    ///
    /// ```
    /// use http::HeaderName;
    /// use tower_semaphore::limit::ClientTimeout;
    ///
    /// // `x-request-timeout: 2.5`
    /// let timeout = ClientTimeout::seconds(HeaderName::from_static("x-request-timeout"));
    /// ```
    #[must_use]
    pub const fn seconds(header: HeaderName) -> Self {
        Self { header, unit: Unit::Seconds }
    }

    /// `None` if the header is missing, or cannot be read.
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
}
