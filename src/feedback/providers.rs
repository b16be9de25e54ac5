//! Readers of the responses of upstreams.

use std::time::Duration;

use http::StatusCode;

use super::Feedback;
use super::head::{Head, time};

/// Reads `Retry-After` of responses with the status 429 or 503: seconds, or a date; without it they are
/// [`TooMany`](Feedback::TooMany).
///
/// See the [module](super) for an example.
#[must_use]
pub fn retry_after(head: Head<'_>) -> Feedback {
    retry_after_if(head, &[StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE])
}

/// Reads `Retry-After` of responses with one of these statuses; without it they are [`TooMany`](Feedback::TooMany).
///
/// # Examples
///
/// ```
/// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore, feedback};
/// use http::StatusCode;
///
/// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
/// ConcurrencyLimitLayer::builder(semaphore, "search")
///     .limit(30)
///     .on_response(feedback::retry_after_on([StatusCode::FORBIDDEN, StatusCode::TOO_MANY_REQUESTS]))
///     .build()
/// # }
/// ```
pub fn retry_after_on(
    statuses: impl IntoIterator<Item = StatusCode>,
) -> impl Fn(Head<'_>) -> Feedback + Send + Sync + 'static {
    let statuses: Vec<_> = statuses.into_iter().collect();
    move |head| retry_after_if(head, &statuses)
}

fn retry_after_if(head: Head<'_>, statuses: &[StatusCode]) -> Feedback {
    if statuses.contains(&head.status) {
        Feedback::after(head.retry_after(), Feedback::TooMany)
    } else {
        Feedback::None
    }
}

/// Reads the responses of OpenAI: `retry-after-ms` and `retry-after` of 429 and 503; for 429 without them, when the
/// limits of requests or tokens that are used up begin again (`x-ratelimit-reset-requests: 6m0s`). A 429 without a time
/// says that the account has no credit; a 503 without one is [`TooMany`](Feedback::TooMany).
#[must_use]
pub fn openai(head: Head<'_>) -> Feedback {
    windows(head, &["retry-after-ms"])
}

/// Reads the responses of Azure OpenAI: as [`openai`], and `x-ms-retry-after-ms`. Times of zero and less, which it also
/// sends, say nothing.
#[must_use]
pub fn azure(head: Head<'_>) -> Feedback {
    windows(head, &["retry-after-ms", "x-ms-retry-after-ms"])
}

/// Reads the responses of Groq: `retry-after` of 429 and 503; for 429 without it, when the limits of requests or tokens
/// that are used up begin again (`x-ratelimit-reset-tokens: 7.66s`). 498, which says that its flexible tier is full, is no
/// limit of yours.
#[must_use]
pub fn groq(head: Head<'_>) -> Feedback {
    windows(head, &[])
}

/// Reads the responses of Anthropic: `retry-after` of 429. A 429 without it says that a spend cap is reached, which no
/// wait mends; 529 that the provider is overloaded, which is no limit of yours.
#[must_use]
pub fn anthropic(head: Head<'_>) -> Feedback {
    if head.status != StatusCode::TOO_MANY_REQUESTS || is_final(head) {
        return Feedback::None;
    }
    Feedback::after(head.retry_after(), Feedback::None)
}

/// Reads what providers with OpenAI's fields have in common. `fields`: fields of ms that they prefer to `Retry-After`.
fn windows(head: Head<'_>, fields: &[&str]) -> Feedback {
    let is_limited = head.status == StatusCode::TOO_MANY_REQUESTS;
    if !(is_limited || head.status == StatusCode::SERVICE_UNAVAILABLE) || is_final(head) {
        return Feedback::None;
    }
    let is_some = |time: &Duration| !time.is_zero();
    let named = fields.iter().find_map(|name| head.ms(name).filter(is_some));
    let named = named.or_else(|| head.retry_after().filter(is_some));
    let or = if is_limited { Feedback::None } else { Feedback::TooMany };
    Feedback::after(named.or_else(|| used_up(head).filter(|_| is_limited)), or)
}

/// The time until all limits that are used up begin again.
fn used_up(head: Head<'_>) -> Option<Duration> {
    let reset = |unit: &str| {
        let remaining = head.text(&format!("x-ratelimit-remaining-{unit}"))?;
        time(head.text(&format!("x-ratelimit-reset-{unit}"))?).filter(|_| remaining == "0")
    };
    reset("requests").max(reset("tokens"))
}

/// Whether the provider says that to ask again is of no use.
fn is_final(head: Head<'_>) -> bool {
    head.text("x-should-retry") == Some("false")
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

    use super::{anthropic, azure, groq, openai, retry_after, retry_after_on};
    use crate::feedback::{Feedback, Head};

    type Reader = fn(Head<'_>) -> Feedback;

    /// What a reader says of too many requests without a time.
    const TOO_MANY: Option<u128> = Some(0);

    /// What a reader says, in ms.
    fn ms(reader: impl Fn(Head<'_>) -> Feedback, status: u16, fields: &str) -> Option<u128> {
        let mut headers = HeaderMap::new();
        for line in fields.lines() {
            let (name, value) = line.trim().split_once(": ").unwrap();
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.insert(name, HeaderValue::from_str(value).unwrap());
        }
        match reader(Head::new(StatusCode::from_u16(status).unwrap(), &headers)) {
            Feedback::Backoff(time) => Some(time.as_millis()),
            Feedback::TooMany => TOO_MANY,
            Feedback::None => None,
        }
    }

    #[test]
    fn retry_after_counts_with_its_statuses_alone() {
        for (status, expected) in
            [(429, Some(20_000)), (503, Some(20_000)), (200, None), (500, None), (529, None)]
        {
            assert_eq!(ms(retry_after, status, "retry-after: 20"), expected, "{status}");
        }
        let on = || retry_after_on([StatusCode::FORBIDDEN]);
        assert_eq!(ms(on(), 403, "retry-after: 20"), Some(20_000));
        assert_eq!(ms(on(), 429, "retry-after: 20"), None);
        assert_eq!(ms(retry_after, 429, "x-other: 1"), TOO_MANY);
        assert_eq!(ms(retry_after, 429, "retry-after: 0"), TOO_MANY);
        assert_eq!(ms(retry_after, 503, "x-other: 1"), TOO_MANY);
        assert_eq!(ms(retry_after, 500, "x-other: 1"), None);
        assert_eq!(ms(retry_after, 429, "retry-after: 86400"), Some(86_400_000));
    }

    #[test]
    fn the_fields_of_openai_are_read() {
        let limited = "x-ratelimit-limit-requests: 60
            x-ratelimit-remaining-requests: 0
            x-ratelimit-reset-requests: 1s
            x-ratelimit-remaining-tokens: 149984
            x-ratelimit-reset-tokens: 6m0s";
        for reader in [openai as Reader, azure, groq] {
            assert_eq!(ms(reader, 429, limited), Some(1000), "that of the requests");
            assert_eq!(ms(reader, 503, limited), TOO_MANY, "its own load");
            assert_eq!(ms(reader, 200, limited), None, "it was served");
            let both = limited.replace("149984", "0");
            assert_eq!(ms(reader, 429, &both), Some(360_000), "the longer one");
            assert_eq!(ms(reader, 429, &format!("retry-after: 3\n{limited}")), Some(3000));
            assert_eq!(ms(reader, 503, "retry-after: 3"), Some(3000));
            assert_eq!(ms(reader, 429, "content-type: application/json"), None, "no credit");
            let fin = format!("x-should-retry: false\nretry-after: 3\n{limited}");
            assert_eq!(ms(reader, 429, &fin), None);
        }
        assert_eq!(ms(openai, 429, "retry-after-ms: 1250\nretry-after: 2"), Some(1250));
    }

    #[test]
    fn times_of_zero_and_less_say_nothing() {
        assert_eq!(ms(azure, 429, "retry-after: 0"), None);
        assert_eq!(ms(azure, 429, "retry-after: -1"), None);
        assert_eq!(ms(azure, 429, "retry-after-ms: 0\nretry-after: 2"), Some(2000));
        assert_eq!(ms(azure, 429, "x-ms-retry-after-ms: 700"), Some(700));
        let seconds = "x-ratelimit-remaining-tokens: 0\nx-ratelimit-reset-tokens: 56";
        assert_eq!(ms(azure, 429, seconds), Some(56_000), "a number alone is seconds");
    }

    #[test]
    fn the_fields_of_groq_are_read() {
        let limited = "retry-after: 2
            x-ratelimit-remaining-requests: 14370
            x-ratelimit-reset-requests: 2m59.56s
            x-ratelimit-remaining-tokens: 0
            x-ratelimit-reset-tokens: 7.66s";
        assert_eq!(ms(groq, 429, limited), Some(2000));
        let without = limited.strip_prefix("retry-after: 2\n").unwrap();
        assert_eq!(ms(groq, 429, without), Some(7660));
        assert_eq!(ms(groq, 498, limited), None);
    }

    #[test]
    fn a_limit_of_anthropic_is_told_from_its_load_and_from_a_spend_cap() {
        let limited = "retry-after: 12
            anthropic-ratelimit-requests-remaining: 0
            anthropic-ratelimit-requests-reset: 2026-01-01T00:00:12Z";
        assert_eq!(ms(anthropic, 429, limited), Some(12_000));
        assert_eq!(ms(anthropic, 529, limited), None, "its load");
        assert_eq!(ms(anthropic, 503, limited), None, "its load");
        assert_eq!(ms(anthropic, 429, "anthropic-organization-id: x"), None, "a spend cap");
        assert_eq!(ms(anthropic, 429, "x-should-retry: false\nretry-after: 5"), None);
    }
}
