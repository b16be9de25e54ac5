//! Response bodies that record their progress.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};

use axum::BoxError;
use axum::body::{Body, Bytes};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::Instant;

use super::connection::Exchange;
use super::progress::Progress;
use super::room::Place;

/// A response's body that can be cut off while it is not being read, which releases its permits at once.
pub(crate) struct ResponseBody {
    shared: Arc<Shared>,
    exchange: Exchange,
    /// Released with the request.
    _place: Option<Place>,
}

/// A response as the watch over its connection sees it.
pub(crate) struct Shared {
    state: Mutex<State>,
    progress: Arc<Progress>,
}

enum State {
    Flows { body: Body, reader: Option<Waker> },
    Cut { told: bool },
}

impl ResponseBody {
    pub(crate) fn new(body: Body, exchange: Exchange, place: Option<Place>) -> Self {
        let progress = Arc::clone(exchange.progress());
        progress.moved();
        let state = Mutex::new(State::Flows { body, reader: None });
        let shared = Arc::new(Shared { state, progress });
        exchange.responds(&shared);
        Self { shared, exchange, _place: place }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of the last progress.
    pub(crate) fn last(&self) -> Instant {
        self.progress.last()
    }

    pub(crate) fn is_of(&self, progress: &Arc<Progress>) -> bool {
        Arc::ptr_eq(&self.progress, progress)
    }

    pub(crate) fn is_cut(&self) -> bool {
        matches!(&*self.lock(), State::Cut { .. })
    }

    /// Drops the inner body; the next poll returns an error.
    pub(crate) fn cut(&self) {
        let mut state = self.lock();
        if matches!(&*state, State::Cut { .. }) {
            return;
        }
        let flows = std::mem::replace(&mut *state, State::Cut { told: false });
        // Releases permits outside the lock.
        drop(state);
        if let State::Flows { reader: Some(reader), .. } = flows {
            reader.wake();
        }
    }
}

impl HttpBody for ResponseBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = match &mut *self.shared.lock() {
            State::Flows { body, reader } => {
                let frame = Pin::new(body).poll_frame(cx);
                if frame.is_pending() {
                    *reader = Some(cx.waker().clone());
                }
                ready!(frame).map(|frame| frame.map_err(Into::into))
            }
            State::Cut { told: true } => None,
            State::Cut { told } => {
                *told = true;
                Some(Err("the response made no progress within the idle timeout".into()))
            }
        };
        self.shared.progress.moved();
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            self.exchange.passed(data.len());
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        match &*self.shared.lock() {
            State::Flows { body, .. } => body.is_end_stream(),
            State::Cut { told } => *told,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &*self.shared.lock() {
            State::Flows { body, .. } => body.size_hint(),
            State::Cut { .. } => SizeHint::default(),
        }
    }
}
