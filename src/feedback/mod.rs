//! What a response of the upstream says about the requests that come next.
//!
//! An upstream that is asked too often answers 429, mostly with the time after which to ask again. Only one request of
//! one process sees that, and the others go on. A layer passes it on to the whole fleet: no permit is granted until
//! then, requests in flight go on, and those that wait keep their turns.
//!
//! ```
//! # use std::time::Duration;
//! # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore, feedback};
//! # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
//! ConcurrencyLimitLayer::builder(semaphore, "openai")
//!     .limit(30)
//!     .on_response(feedback::openai)
//!     .max_pause(Duration::from_secs(60))
//!     .build()
//! # }
//! ```
//!
//! # Which semaphore is paused
//!
//! That of the request: its name and its key. So choose the key by what the upstream counts. If it counts all requests
//! of an account and the layer has a key for each user, the response to one user pauses that user alone.
//!
//! # Readers
//!
//! A reader is a function of the status and the headers. It never sees the body or its trailers, and the response is
//! passed on unchanged. A gRPC server says most of what it says in trailers, under the status 200: pass that on with
//! [`Permit::feedback`](crate::Permit::feedback).
//!
//! | reader | pauses for | not for |
//! |---|---|---|
//! | [`retry_after`] | 429 and 503 with `Retry-After` | the same without it |
//! | [`retry_after_on`] | the same with other statuses | |
//! | [`openai`], [`groq`] | 429 with a time; 503 with `Retry-After` | 429 without one: the account has no credit; `x-should-retry: false` |
//! | [`azure`] | the same, and Azure's own field | times of 0 and less, which it also sends |
//! | [`anthropic`] | 429 with `Retry-After` | 429 without it: a spend cap; 529, which is the provider's load and no limit of yours |
//!
//! A time is at most [`max_pause`](crate::PolicyBuilder::max_pause), whatever the upstream says. Without HTTP, or with a
//! client that is no Tower service, pass it on with [`Permit::feedback`](crate::Permit::feedback).
//!
//! # Limits that find themselves
//!
//! If the limit [finds itself](crate::PolicyBuilder::adaptive), each response that pauses lowers it, too, and so does one
//! that is [`TooMany`](Feedback::TooMany): 429 and 503 without a time for [`retry_after`], 503 without one for [`openai`],
//! [`groq`] and [`azure`]. Other limits stay as they are.

mod head;
mod providers;

use std::time::Duration;

use http::HeaderName;

pub use self::head::Head;
pub use self::providers::{anthropic, azure, groq, openai, retry_after, retry_after_on};

/// What a response of the upstream says about the requests that come next.
///
/// See [`Permit::feedback`](crate::Permit::feedback).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Feedback {
    /// Nothing.
    #[default]
    None,
    /// That the upstream refuses requests for this long from now on.
    Backoff(Duration),
    /// That the upstream is asked too much at a time. Without effect unless the limit
    /// [finds itself](crate::PolicyBuilder::adaptive).
    TooMany,
}

/// Returns a reader of the whole number in this header field, such as how many tokens a response used, for
/// [`settle_by`](crate::limit::ConcurrencyLimitBuilder::settle_by) and
/// [`left_by`](crate::limit::ConcurrencyLimitBuilder::left_by). It finds nothing where the field is missing, or is anything
/// else than decimal digits.
///
/// # Examples
///
/// ```
/// use http::{HeaderName, Response};
/// use tower_semaphore::feedback::{self, Head};
///
/// # fn main() -> Result<(), http::Error> {
/// const LEFT: HeaderName = HeaderName::from_static("x-ratelimit-remaining-tokens");
/// let response = Response::builder().header(LEFT, "1950").body(())?;
/// assert_eq!(feedback::header_number(LEFT)(Head::of(&response)), Some(1950));
/// # Ok(()) }
/// ```
pub fn header_number(
    field: HeaderName,
) -> impl Fn(Head<'_>) -> Option<u64> + Clone + Send + Sync + 'static {
    move |head| {
        let text = head.headers.get(&field)?.to_str().ok()?.trim();
        text.parse().ok().filter(|_| text.bytes().all(|c| c.is_ascii_digit()))
    }
}

impl Feedback {
    /// A time that is there and not zero; else `or`.
    fn after(time: Option<Duration>, or: Self) -> Self {
        time.filter(|time| !time.is_zero()).map_or(or, Self::Backoff)
    }
}
