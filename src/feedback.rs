//! What a response of the upstream says about the requests that come next.

use std::time::Duration;

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
}
