//! The upload of a request: its body on the way to the upstream.
//!
//! It ends with its response at the latest, because the permit does: what the upstream did not wait for is not sent to
//! it. A client of HTTP/1.1 that is in the middle of its body would not see a response behind which its connection is
//! reset (RFC 9112, 9.6), so the rest is read for a while, and discarded.

use std::fmt;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use axum::BoxError;
use axum::body::Bytes;
use axum::http::request::Parts;
use axum::http::{Version, header};
use http_body::{Body as HttpBody, Frame, SizeHint};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::timeout;

use super::connection::{Exchange, Uploading};
use super::progress::{Progress, Waits};
use super::server::Rests;

/// How long the rest of an upload is read, and how long for its next part: those of nginx.
const DISCARDS: Duration = Duration::from_secs(30);
const NEXT: Duration = Duration::from_secs(5);

/// A request's body that records when it moves, and that its [`Upload`] can end.
pub(crate) struct RequestBody(Arc<Upload>);

/// A request's body as the other parts of its exchange see it.
pub(crate) struct Upload {
    progress: Arc<Progress>,
    state: Mutex<State>,
}

struct State {
    body: Source,
    /// What takes the body.
    sender: Option<Waker>,
    /// What waits until nothing takes it any longer.
    end: Option<Waker>,
    /// Counts as a stream of its connection until then.
    stream: Option<Arc<Stream>>,
}

/// A request on a connection of HTTP/2, which counts them by the clones of this.
pub(crate) struct Stream(pub(crate) Arc<()>);

enum Source {
    Flows(Arriving),
    Cut,
    Over,
    /// Nothing takes it any longer.
    Gone,
}

/// A body, and what becomes of the rest of it.
struct Arriving {
    body: Incoming,
    /// In HTTP/1, where the next head is behind it.
    rest: Option<(Uploading, Rests)>,
    /// The client waits to be asked for it.
    waits: bool,
}

/// The response was over before the upload.
#[derive(Debug)]
struct CutOff(h2::Error);

impl fmt::Display for CutOff {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the response was over before the upload")
    }
}

impl std::error::Error for CutOff {
    /// With which HTTP/2 resets the stream.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.0)
    }
}

impl RequestBody {
    pub(crate) fn new(parts: &Parts, body: Incoming, exchange: &Exchange, rests: Rests) -> Self {
        let progress = Arc::clone(exchange.progress());
        let body = if body.is_end_stream() {
            progress.set_waits(Waits::Nothing);
            Source::Over
        } else {
            let rest = (parts.version != Version::HTTP_2).then(|| (exchange.uploads(), rests));
            let waits = parts.headers.contains_key(header::EXPECT);
            Source::Flows(Arriving { body, rest, waits })
        };
        let state = Mutex::new(State { body, sender: None, end: None, stream: None });
        Self(Arc::new(Upload { progress, state }))
    }

    pub(crate) const fn upload(&self) -> &Arc<Upload> {
        &self.0
    }
}

impl Upload {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) const fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Counts as a stream of a connection until nothing takes the body any longer.
    pub(crate) fn occupy(&self, stream: Arc<Stream>) {
        let mut state = self.lock();
        if !matches!(state.body, Source::Gone) {
            state.stream = Some(stream);
        }
    }

    /// Ends the upload, unless it has ended: not one byte more is sent. Returns whether what takes the body waited for
    /// more of it, and so lets go of it soon; `None`: there was nothing to end.
    pub(crate) fn cut(&self) -> Option<bool> {
        let mut state = self.lock();
        if !matches!(state.body, Source::Flows(_)) {
            return None;
        }
        let body = std::mem::replace(&mut state.body, Source::Cut);
        let sender = state.sender.take();
        drop(state);
        self.progress.set_waits(Waits::Nothing);
        if let Source::Flows(arriving) = body {
            arriving.discard();
        }
        let waited = sender.is_some();
        if let Some(sender) = sender {
            sender.wake();
        }
        Some(waited)
    }

    /// Ready once nothing takes the body any longer.
    pub(crate) fn poll_gone(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.lock();
        if matches!(state.body, Source::Gone) {
            return Poll::Ready(());
        }
        state.end = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl Arriving {
    /// Reads the rest for a while. In HTTP/2 its stream is reset instead (RFC 9113, 8.1).
    fn discard(mut self) {
        // A client that was not asked for its body yet need not send it.
        let Some((uploading, rests)) = self.rest.take().filter(|_| !self.waits) else { return };
        rests.read(async move {
            let all =
                async { while let Ok(Some(Ok(_))) = timeout(NEXT, self.body.frame()).await {} };
            let _ = timeout(DISCARDS, all).await;
            // The connection ends with it, or its next head begins.
            drop((self, uploading));
        });
    }
}

impl HttpBody for RequestBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut state = self.0.lock();
        let arriving = match &mut state.body {
            Source::Flows(arriving) => arriving,
            Source::Cut => {
                state.body = Source::Over;
                let reason = h2::Error::from(h2::Reason::CANCEL);
                return Poll::Ready(Some(Err(CutOff(reason).into())));
            }
            Source::Over | Source::Gone => return Poll::Ready(None),
        };
        arriving.waits = false;
        let frame = Pin::new(&mut arriving.body).poll_frame(cx);
        if frame.is_pending() {
            state.sender = Some(cx.waker().clone());
            self.0.progress.set_waits(Waits::Client);
            return Poll::Pending;
        }
        let frame = ready!(frame);
        self.0.progress.moved();
        if matches!(frame, Some(Ok(_))) && !arriving.body.is_end_stream() {
            state.sender = None;
            self.0.progress.set_waits(Waits::Upstream);
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        self.0.progress.set_waits(Waits::Nothing);
        let over = std::mem::replace(&mut state.body, Source::Over);
        drop(state);
        // The next head may begin.
        drop(over);
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.0.lock().body, Source::Over)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.0.lock().body {
            Source::Flows(arriving) => arriving.body.size_hint(),
            Source::Cut => SizeHint::default(),
            Source::Over | Source::Gone => SizeHint::with_exact(0),
        }
    }
}

impl Drop for RequestBody {
    fn drop(&mut self) {
        self.0.cut();
        let mut state = self.0.lock();
        state.body = Source::Gone;
        let (stream, end) = (state.stream.take(), state.end.take());
        drop(state);
        drop(stream);
        if let Some(end) = end {
            end.wake();
        }
    }
}
