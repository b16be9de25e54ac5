//! A response body that holds a permit until it ends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::BoxError;
use super::refusal::RefusalBody;
use crate::error::LeaseLost;
use crate::semaphore::Permit;

pin_project! {
    /// The response body of [`ConcurrencyLimit`](super::ConcurrencyLimit).
    ///
    /// Gives the permit back at the last frame, at an error, or when it is dropped, whichever comes
    /// first; before the end is passed on. Frames, trailers, size and end are those of the body
    /// inside. If the permit's lease is lost and the layer is set to abort, it ends with
    /// [`LeaseLost`] before one more frame passes.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        inner: Inner<B>,
    }
}

pin_project! {
    #[project = InnerProj]
    #[derive(Debug)]
    enum Inner<B> {
        Passed { #[pin] body: B, hold: Option<Hold> },
        Refused { body: RefusalBody },
        Aborted,
    }
}

#[derive(Debug)]
struct Hold {
    permit: Permit,
    abort: bool,
}

impl<B: Body> ResponseBody<B> {
    /// Holds the permit, if any, until the body ends. `abort`: not longer than its lease.
    pub(super) fn passed(body: B, permit: Option<Permit>, abort: bool) -> Self {
        // Nobody need ask a body for frames that says beforehand that it has none.
        let permit = permit.filter(|_| !body.is_end_stream());
        let hold = permit.map(|permit| Hold { permit, abort });
        Self { inner: Inner::Passed { body, hold } }
    }

    pub(super) const fn refused(body: RefusalBody) -> Self {
        Self { inner: Inner::Refused { body } }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut inner = self.project().inner;
        let (mut body, hold) = match inner.as_mut().project() {
            InnerProj::Passed { body, hold } => (body, hold),
            InnerProj::Refused { body } => return Pin::new(body).poll_frame(cx),
            InnerProj::Aborted => return Poll::Ready(None),
        };
        // First the lease, then the frame: a process that slept past it sends nothing more.
        if let Some(Hold { permit, abort: true }) = hold
            && permit.poll_lost(cx).is_ready()
        {
            inner.set(Inner::Aborted);
            return Poll::Ready(Some(Err(LeaseLost::new().into())));
        }
        let frame = ready!(body.as_mut().poll_frame(cx));
        // Nothing comes after trailers, whether or not the body says so.
        let more = matches!(&frame, Some(Ok(frame)) if !frame.is_trailers());
        if !more || body.is_end_stream() {
            *hold = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Passed { body, .. } => body.is_end_stream(),
            Inner::Refused { body } => body.is_end_stream(),
            Inner::Aborted => true,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.inner {
            Inner::Passed { body, .. } => body.size_hint(),
            Inner::Refused { body } => body.size_hint(),
            Inner::Aborted => SizeHint::with_exact(0),
        }
    }
}
