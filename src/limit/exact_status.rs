//! A response to a rejected request whose status is meant, 200 included.

use http::Response;

/// A response whose status stays as it is, even 200.
///
/// A closure that answers a [`Refusal`](super::Refusal) usually leaves the status alone: a response with 200, the default of
/// [`Response::new`], gets the [status](super::Refusal::status) of the refusal, so that no client takes it for a success.
/// Some protocols report errors with 200. The layers of this crate know a rejection by another mark, not by its
/// status, so it stays one for layers further out and for [`into_error`](super::ConcurrencyLimitLayer::into_error).
///
/// # Examples
///
/// GraphQL:
///
/// ```
/// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
/// use http::Response;
/// use tower_semaphore::limit::{ExactStatus, Refusal};
///
/// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
/// ConcurrencyLimitLayer::builder(semaphore, "graphql")
///     .limit(10)
///     .refusal(|refusal: &Refusal| {
///         let code = refusal.reason.as_str();
///         let errors = format!(r#"{{"errors":[{{"message":"busy","extensions":{{"code":"{code}"}}}}]}}"#);
///         ExactStatus(Response::new(errors))
///     })
///     .build()
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct ExactStatus<R>(pub R);

/// In the extensions of a response on its way to the layer: its status is meant.
#[derive(Clone, Copy)]
struct IsExact;

impl<B> ExactStatus<Response<B>> {
    pub(super) fn mark(self) -> Response<B> {
        let Self(mut response) = self;
        response.extensions_mut().insert(IsExact);
        response
    }
}

/// Takes the mark away.
pub(super) fn unmark<B>(response: &mut Response<B>) -> bool {
    response.extensions_mut().remove::<IsExact>().is_some()
}

#[cfg(feature = "axum")]
impl<R: axum::response::IntoResponse> axum::response::IntoResponse for ExactStatus<R> {
    fn into_response(self) -> axum::response::Response {
        ExactStatus(self.0.into_response()).mark()
    }
}
