//! What becomes of a permit once there is a response.

use self::sealed::Sealed;
use crate::semaphore::Permit;

mod sealed {
    pub trait Sealed<Response> {}
}

/// Decides what becomes of a permit once the inner service has responded.
///
/// Implemented by [`Release`] and by closures that take the response and its [`Permit`]: see
/// [`PermitLayer::keep`](super::PermitLayer::keep). Sealed: nothing else can implement it.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not say what becomes of a permit after a response of the type `{Response}`",
    label = "not a `KeepPermit<{Response}>`",
    note = "a closure is one if it takes the response and a `Permit`"
)]
pub trait KeepPermit<Response>: Sealed<Response> {
    /// What the caller gets in place of the response.
    type Output;

    /// Makes it. The permit is released when its last clone is dropped.
    fn keep(&self, response: Response, permit: Permit) -> Self::Output;
}

/// Releases the permit before the caller sees the response: the default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Release;

impl<Response> Sealed<Response> for Release {}

impl<F, Response, Output> Sealed<Response> for F where F: Fn(Response, Permit) -> Output {}

impl<Response> KeepPermit<Response> for Release {
    type Output = Response;

    fn keep(&self, response: Response, permit: Permit) -> Response {
        drop(permit);
        response
    }
}

impl<F, Response, Output> KeepPermit<Response> for F
where
    F: Fn(Response, Permit) -> Output,
{
    type Output = Output;

    fn keep(&self, response: Response, permit: Permit) -> Output {
        self(response, permit)
    }
}
