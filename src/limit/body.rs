//! A response body that holds a permit until it ends.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::task::{Context, Poll, Wake, Waker, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tokio::runtime::Handle;

use super::held::HeldPermit;
use super::refusal_response::RefusalBody;
use super::{BoxError, grpc};
use crate::error::LeaseLost;
use crate::semaphore::Permit;

pin_project! {
    /// The response body of [`ConcurrencyLimit`](super::ConcurrencyLimit).
    ///
    /// Releases the permit at the last frame, at an error, or when the body is dropped, whichever comes first, and
    /// before it returns that frame. After an error, or a drop before the end, the permit
    /// [lingers](super::ConcurrencyLimitBuilder::linger) if the layer is configured so. Frames, trailers, size hint
    /// and end of stream are those of the inner body.
    ///
    /// If the permit's lease is lost and the layer aborts on loss, no further frame passes: this body ends with
    /// [`LeaseLost`], or for gRPC with trailers that say `UNAVAILABLE`. The inner body is dropped even while this body
    /// is not polled, on a thread for blocking tasks ([`tokio::task::spawn_blocking`]): one whose drop takes long
    /// blocks no worker of the runtime. If this body is being polled as it learns of the loss, the inner body is
    /// dropped there.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        inner: Inner<B>,
        // See `without_empty_size`.
        hides_empty: bool,
    }
}

pin_project! {
    #[project = InnerProj]
    #[derive(Debug)]
    enum Inner<B> {
        Passed { #[pin] body: B, permit: HeldPermit },
        Leased { leased: Leased<B> },
        Refused { body: RefusalBody },
    }
}

/// A body that ends at the latest when its permit's lease is lost.
struct Leased<B> {
    shared: Arc<Shared<B>>,
    cut: Cut,
}

/// How an aborted body ends.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// With [`LeaseLost`].
    Error,
    /// With gRPC trailers.
    Grpc,
}

impl Cut {
    fn frame(self, lost: LeaseLost) -> Result<Frame<Bytes>, BoxError> {
        match self {
            Self::Error => Err(lost.into()),
            Self::Grpc => Ok(Frame::trailers(grpc::lost())),
        }
    }
}

/// Logs that a body was aborted.
fn tell(lost: &LeaseLost) {
    let semaphore = lost.name();
    tracing::debug!(target: "tower_semaphore", semaphore, "aborted in its response body: the permit is lost");
}

/// Shared with the watchdog, which drops the inner body when the lease is lost: while a slow client keeps the body
/// from being polled, its source would go on otherwise.
struct Shared<B> {
    state: Mutex<State<B>>,
    /// The lease is lost; the holder of the lock acts on it.
    is_lost: AtomicBool,
}

enum State<B> {
    Flows {
        body: Pin<Box<B>>,
        /// Empty once it was released: the rest of the body needs none.
        permit: HeldPermit,
        reader: Option<Waker>,
    },
    /// `None` once the reader was told.
    Lost(Option<LeaseLost>),
}

impl<B> State<B> {
    /// Returns the permit, unless it was released.
    fn permit(&self) -> Option<&Permit> {
        match self {
            Self::Flows { permit, .. } => permit.get(),
            Self::Lost(_) => None,
        }
    }

    /// Drops the body. A panic in that must not end the task that calls this.
    fn end(self) {
        if catch_unwind(AssertUnwindSafe(|| drop(self))).is_err() {
            tracing::error!(target: "tower_semaphore", "a response body panicked as it was dropped");
        }
    }
}

impl<B: Body + Send + 'static> ResponseBody<B> {
    /// Holds the permit, if any, until the body ends. `cut`: how the body ends if the permit is lost; `None`: it
    /// goes on.
    pub(super) fn passed(body: B, mut permit: HeldPermit, cut: Option<Cut>) -> Self {
        // A server does not poll a body that is at its end.
        if body.is_end_stream() {
            permit.end();
        }
        let inner = match cut {
            Some(cut) if permit.get().is_some() => {
                Inner::Leased { leased: Leased::new(body, permit, cut) }
            }
            _ => Inner::Passed { body, permit },
        };
        Self { inner, hides_empty: false }
    }
}

/// The default body, without a permit: for responses that other layers make.
impl<B: Default> Default for ResponseBody<B> {
    fn default() -> Self {
        Self {
            inner: Inner::Passed { body: B::default(), permit: HeldPermit::default() },
            hides_empty: false,
        }
    }
}

impl<B> ResponseBody<B> {
    pub(super) const fn refused(body: RefusalBody) -> Self {
        Self { inner: Inner::Refused { body }, hides_empty: false }
    }

    /// Hides that the body is empty. The response to HEAD has no body, which says nothing about the length of that to
    /// GET; a router that finds its size to be 0 would add `content-length: 0`.
    pub(super) const fn hide_empty_size(&mut self) {
        self.hides_empty = true;
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match self.project().inner.project() {
            InnerProj::Passed { mut body, permit } => {
                let frame = ready!(body.as_mut().poll_frame(cx));
                match Passed::of(&frame, &*body) {
                    Passed::Bytes(bytes) => permit.passed(bytes),
                    Passed::End => permit.end(),
                    // Before its end, so it lingers.
                    Passed::Error => drop(std::mem::take(permit)),
                }
                Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
            }
            InnerProj::Leased { leased } => leased.poll_frame(cx),
            InnerProj::Refused { body } => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.inner {
            Inner::Passed { body, .. } => body.is_end_stream(),
            Inner::Leased { leased } => leased.shared.look(|state| match state {
                State::Flows { body, .. } => body.is_end_stream(),
                State::Lost(untold) => untold.is_none(),
            }),
            Inner::Refused { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        let size = match &self.inner {
            Inner::Passed { body, .. } => body.size_hint(),
            Inner::Leased { leased } => leased.shared.look(|state| match state {
                State::Flows { body, .. } => body.size_hint(),
                State::Lost(_) => SizeHint::default(),
            }),
            Inner::Refused { body } => body.size_hint(),
        };
        let hides = self.hides_empty && size.exact() == Some(0);
        if hides { SizeHint::default() } else { size }
    }
}

impl<B: Send + 'static> Leased<B> {
    fn new(body: B, permit: HeldPermit, cut: Cut) -> Self {
        let flows = State::Flows { body: Box::pin(body), permit, reader: None };
        let shared = Arc::new(Shared { state: Mutex::new(flows), is_lost: AtomicBool::new(false) });
        let alarm = Waker::from(Arc::clone(&shared));
        let is_lost =
            shared.look(|state| state.permit().is_some_and(|permit| !permit.on_lost(&alarm)));
        if is_lost {
            alarm.wake();
        }
        Self { shared, cut }
    }
}

impl<B> Leased<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.shared.lock()
    }
}

impl<B> Leased<B>
where
    B: Body<Data = Bytes>,
    B::Error: Into<BoxError>,
{
    fn poll_frame(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = self.poll_body(cx);
        // If the watchdog found the lock taken, it left this to us.
        if self.shared.is_lost.load(Ordering::SeqCst) {
            self.shared.cut().into_iter().for_each(State::end);
        }
        frame
    }

    fn poll_body(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut state = self.lock();
        // The lease before the frame: a process that was suspended past its end sends nothing more.
        let lost = state.permit().filter(|permit| permit.is_lost()).map(LeaseLost::of);
        if let Some(lost) = lost {
            let flows = std::mem::replace(&mut *state, State::Lost(None));
            // Outside the lock, as the drop of a body can do anything.
            drop(state);
            tell(&lost);
            drop(flows);
            return Poll::Ready(Some(self.cut.frame(lost)));
        }
        let frame = match &mut *state {
            State::Flows { body, permit, reader } => {
                let Poll::Ready(frame) = body.as_mut().poll_frame(cx) else {
                    if !reader.as_ref().is_some_and(|reader| reader.will_wake(cx.waker())) {
                        *reader = Some(cx.waker().clone());
                    }
                    return Poll::Pending;
                };
                match Passed::of(&frame, &**body) {
                    Passed::Bytes(bytes) => permit.passed(bytes),
                    passed => {
                        let (mut permit, reader) = (std::mem::take(permit), reader.take());
                        // Released outside the lock, before the frame is returned.
                        drop(state);
                        if let Passed::End = passed {
                            permit.end();
                        }
                        drop((permit, reader));
                    }
                }
                frame
            }
            State::Lost(untold) => {
                return Poll::Ready(untold.take().map(|lost| self.cut.frame(lost)));
            }
        };
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }
}

/// The permit's record holds the alarm and the alarm the permit; dropping the body breaks the cycle.
impl<B> Drop for Leased<B> {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.lock(), State::Lost(None));
        drop(state);
    }
}

impl<B> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the inner body after a loss of the lease, for the caller to drop, and wakes the reader.
    ///
    /// Never blocks. If the body is being polled, the task that polls it does this.
    fn cut(&self) -> Option<State<B>> {
        self.is_lost.store(true, Ordering::SeqCst);
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let lost = state.permit().map(LeaseLost::of)?;
        let mut flows = std::mem::replace(&mut *state, State::Lost(Some(lost.clone())));
        drop(state);
        tell(&lost);
        let reader = match &mut flows {
            State::Flows { reader, .. } => reader.take(),
            State::Lost(_) => None,
        };
        if let Some(reader) = reader {
            reader.wake();
        }
        Some(flows)
    }

    /// Reads the state, and acts on a loss that came while it had the lock.
    fn look<T>(&self, look: impl FnOnce(&State<B>) -> T) -> T {
        let seen = look(&self.lock());
        if self.is_lost.load(Ordering::SeqCst) {
            self.cut().into_iter().for_each(State::end);
        }
        seen
    }
}

impl<B: Send + 'static> Wake for Shared<B> {
    /// The watchdog or a driver calls this, and has others to tell: the drop of a body may take long.
    fn wake(self: Arc<Self>) {
        let Some(flows) = self.cut() else { return };
        let Ok(runtime) = Handle::try_current() else { return flows.end() };
        // Panics where the system has no thread for it: the body is dropped once there is one, or with the runtime.
        let spawn = || drop(runtime.spawn_blocking(|| flows.end()));
        if catch_unwind(AssertUnwindSafe(spawn)).is_err() {
            tracing::error!(target: "tower_semaphore", "there is no thread to drop a response body");
        }
    }
}

/// What a frame means for the permit.
enum Passed {
    /// Data; more frames may come.
    Bytes(usize),
    /// The last frame. Nothing comes after trailers, even if the body is not at its end.
    End,
    Error,
}

impl Passed {
    fn of<B: Body<Data = Bytes>>(frame: &Option<Result<Frame<Bytes>, B::Error>>, body: &B) -> Self {
        match frame {
            Some(Err(_)) => Self::Error,
            Some(Ok(frame)) if frame.trailers_ref().is_some_and(grpc::is_broken_off) => Self::Error,
            Some(Ok(frame)) if !frame.is_trailers() && !body.is_end_stream() => {
                Self::Bytes(frame.data_ref().map_or(0, Bytes::len))
            }
            Some(Ok(_)) | None => Self::End,
        }
    }
}

impl<B> fmt::Debug for Leased<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leased").finish_non_exhaustive()
    }
}
