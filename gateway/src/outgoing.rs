//! A request's body on its way to the upstream.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::HeaderName;
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Sleep;

use super::headers;

/// How long an upstream may take to answer `Expect: 100-continue` before it is sent the body all the same, because
/// many servers ignore the field (RFC 9110, 10.1.1).
const CONTINUE_WITHIN: Duration = Duration::from_secs(1);

/// Waits for the upstream if it has to agree to it, and has no trailers that rules or proxies stand for.
pub(crate) struct OutgoingBody {
    inner: Body,
    /// The header fields that rules read.
    read: Arc<[HeaderName]>,
    waits: Option<(Arc<Expectation>, Pin<Box<Sleep>>)>,
}

/// What the upstream says to `Expect: 100-continue`.
#[derive(Debug, Default)]
pub(crate) struct Expectation(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    answer: Answer,
    sender: Option<Waker>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Answer {
    #[default]
    None,
    /// The body is sent.
    Continue,
    /// A response is on its way instead.
    Final,
    /// That is over.
    Over,
}

impl OutgoingBody {
    pub(crate) fn new(
        inner: Body,
        read: Arc<[HeaderName]>,
        expects: Option<Arc<Expectation>>,
    ) -> Self {
        let waits = expects.map(|expects| {
            let late = tokio::time::sleep(CONTINUE_WITHIN);
            (expects, Box::pin(late))
        });
        Self { inner, read, waits }
    }
}

impl Expectation {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, answer: Answer) {
        let mut state = self.lock();
        if state.answer == Answer::Continue || state.answer == Answer::Over {
            return;
        }
        state.answer = answer;
        if let Some(sender) = state.sender.take() {
            drop(state);
            sender.wake();
        }
    }

    /// The body is to be sent.
    pub(crate) fn proceed(&self) {
        self.set(Answer::Continue);
    }

    /// The response has begun. Until what this returns is dropped, a body that was not asked for waits; then it fails,
    /// which ends the connection that it was meant for.
    pub(crate) fn responded(self: &Arc<Self>) -> impl Send + Sync + 'static {
        struct Response(Arc<Expectation>);
        impl Drop for Response {
            fn drop(&mut self) {
                self.0.set(Answer::Over);
            }
        }
        self.set(Answer::Final);
        Response(Arc::clone(self))
    }
}

impl HttpBody for OutgoingBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        if let Some((expects, late)) = &mut self.waits {
            let mut state = expects.lock();
            match state.answer {
                Answer::Continue => {}
                Answer::None if late.as_mut().poll(cx).is_ready() => {
                    state.answer = Answer::Continue;
                }
                Answer::None | Answer::Final => {
                    state.sender = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                Answer::Over => {
                    return Poll::Ready(Some(Err("the upstream did not ask for the body".into())));
                }
            }
            drop(state);
            self.waits = None;
        }
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(cx));
        let frame = frame.map(|frame| {
            let mut frame = frame?;
            if let Some(trailers) = frame.trailers_mut() {
                headers::strip_trailers(trailers, &self.read);
            }
            Ok(frame)
        });
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
