//! The response to a rejected request, and its body.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use sync_wrapper::SyncWrapper;

use super::BoxError;
#[cfg(any(doc, not(feature = "axum")))]
use super::exact_status::ExactStatus;
use super::exact_status::unmark;
use super::refusal::Refusal;

/// Makes the response to a rejected request.
///
/// Implemented by closures that take a [`&Refusal`](Refusal) and return a [`Response`], or with the feature `axum`
/// anything that is `IntoResponse`. If the response of a closure has the status 200, which is the default of
/// [`Response::new`], it gets the [status](Refusal::status) of the refusal, unless it is wrapped in an [`ExactStatus`].
///
/// See [`refusal`](super::ConcurrencyLimitBuilder::refusal).
///
/// ```
/// use http::Response;
/// use tower_semaphore::limit::{Refusal, RefusalResponse};
///
/// fn is_response(_: impl RefusalResponse) {}
///
/// is_response(|refusal: &Refusal| {
///     Response::new(format!("come back later: {}", refusal.reason.as_str()))
/// });
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not make the response to a rejected request",
    label = "not a `RefusalResponse`",
    note = "a closure is one if it takes `&Refusal`, is `Send + Sync + 'static`, and returns `Response<B>` with a \
            body of `Bytes` (with the feature `axum`, anything that is `IntoResponse`)",
    note = "the argument needs its type: `|refusal: &Refusal| ...`"
)]
pub trait RefusalResponse: Send + Sync + 'static {
    /// Makes the response.
    fn response(&self, refusal: &Refusal) -> Response<RefusalBody>;
}

impl<F, R> RefusalResponse for F
where
    F: Fn(&Refusal) -> R + Send + Sync + 'static,
    R: IntoRefusalResponse,
{
    fn response(&self, refusal: &Refusal) -> Response<RefusalBody> {
        let mut response = self(refusal).into_refusal_response();
        let is_exact = unmark(&mut response);
        if response.status() == StatusCode::OK && !is_exact {
            *response.status_mut() = refusal.status;
        }
        response
    }
}

/// What a closure that is a [`RefusalResponse`] can return: a [`Response`] with a body of [`Bytes`], or with the
/// feature `axum` anything that is `IntoResponse`; or an [`ExactStatus`] around it.
///
/// This trait is sealed. For a type of your own, implement `IntoResponse`, or return a [`Response`] from the
/// closure.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a response to a rejected request",
    label = "not a `Response<B>` with a body of `Bytes`",
    note = "with the feature `axum`, anything that is `axum::response::IntoResponse` is one"
)]
pub trait IntoRefusalResponse: sealed::Sealed {
    /// Converts into the response.
    fn into_refusal_response(self) -> Response<RefusalBody>;
}

/// If others could implement it, the feature `axum` would implement it twice for a type that is `IntoResponse`.
mod sealed {
    #[diagnostic::on_unimplemented(
        message = "`{Self}` cannot be made an `IntoRefusalResponse`",
        label = "the trait is sealed",
        note = "return a `Response<B>` from the closure; or, with the feature `axum`, implement \
                `axum::response::IntoResponse`"
    )]
    pub trait Sealed {}
}

#[cfg(not(feature = "axum"))]
impl<B> sealed::Sealed for Response<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
}

#[cfg(not(feature = "axum"))]
impl<B> IntoRefusalResponse for Response<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    fn into_refusal_response(self) -> Response<RefusalBody> {
        self.map(RefusalBody::new)
    }
}

#[cfg(not(feature = "axum"))]
impl<B> sealed::Sealed for ExactStatus<Response<B>> where Response<B>: IntoRefusalResponse {}

#[cfg(not(feature = "axum"))]
impl<B> IntoRefusalResponse for ExactStatus<Response<B>>
where
    Response<B>: IntoRefusalResponse,
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    fn into_refusal_response(self) -> Response<RefusalBody> {
        self.mark().map(RefusalBody::new)
    }
}

#[cfg(feature = "axum")]
impl<R: axum::response::IntoResponse> sealed::Sealed for R {}

#[cfg(feature = "axum")]
impl<R: axum::response::IntoResponse> IntoRefusalResponse for R {
    fn into_refusal_response(self) -> Response<RefusalBody> {
        self.into_response().map(RefusalBody::new)
    }
}

/// The body of the response to a rejected request.
pub struct RefusalBody {
    inner: Inner,
    /// As long as this is here, so is the body.
    is_here: Option<Arc<()>>,
}

/// In the extensions of a rejection: the body that it came with.
///
/// A handler that is rejected as a client of its own may answer with the extensions of that response, the [`Refusal`]
/// among them, and a body of its own. That response is no rejection.
#[derive(Clone)]
struct CameWith(Weak<()>);

enum Inner {
    Text(Full<Bytes>),
    Other(SyncWrapper<UnsyncBoxBody<Bytes, BoxError>>, Rest),
}

/// The size of what is left of a body. Kept beside it, because a [`SyncWrapper`] gives no shared access.
struct Rest {
    size: SizeHint,
    is_end: bool,
}

impl Rest {
    fn of(body: &impl Body) -> Self {
        Self { size: body.size_hint(), is_end: body.is_end_stream() }
    }
}

impl RefusalBody {
    /// Wraps a body.
    ///
    /// ```
    /// use bytes::Bytes;
    /// use http_body_util::Full;
    /// use tower_semaphore::limit::RefusalBody;
    ///
    /// let body = RefusalBody::new(Full::new(Bytes::from_static(b"busy")));
    /// ```
    pub fn new<B>(body: B) -> Self
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let body = body.map_err(Into::into).boxed_unsync();
        let rest = Rest::of(&body);
        Self { inner: Inner::Other(SyncWrapper::new(body), rest), is_here: None }
    }
}

impl From<String> for RefusalBody {
    fn from(text: String) -> Self {
        Self { inner: Inner::Text(Full::from(text)), is_here: None }
    }
}

impl RefusalBody {
    /// Has a response say that it is a rejection, and why.
    pub(super) fn mark(mut response: Response<Self>, refusal: Refusal) -> Response<Self> {
        let is_here = response.body_mut().is_here.insert(Arc::default());
        let came_with = CameWith(Arc::downgrade(is_here));
        let extensions = response.extensions_mut();
        extensions.insert(refusal);
        extensions.insert(came_with);
        response
    }

    /// Why a layer further in rejected the request of this response; `None` where that is no rejection, whatever its
    /// extensions say.
    pub(super) fn refusal_of<B>(response: &Response<B>) -> Option<&Refusal> {
        let CameWith(body) = response.extensions().get()?;
        if body.strong_count() > 0 { response.extensions().get() } else { None }
    }
}

impl Body for RefusalBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.inner {
            Inner::Text(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            Inner::Other(body, rest) => {
                let frame = Pin::new(body.get_mut()).poll_frame(cx);
                *rest = Rest::of(body.get_mut());
                frame
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Text(body) => body.is_end_stream(),
            Inner::Other(_, rest) => rest.is_end,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Text(body) => body.size_hint(),
            Inner::Other(_, rest) => rest.size,
        }
    }
}

impl fmt::Debug for RefusalBody {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RefusalBody").finish_non_exhaustive()
    }
}
