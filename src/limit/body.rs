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

use super::held::HeldPermit;
use super::refusal::RefusalBody;
use super::{BoxError, grpc};
use crate::error::LeaseLost;
use crate::semaphore::Permit;

pin_project! {
    /// The response body of [`ConcurrencyLimit`](super::ConcurrencyLimit).
    ///
    /// Gives the permit back at the last frame, at an error, or when it is dropped, whichever comes
    /// first; before the end is passed on. At an error, or when it is dropped before its end, the permit
    /// [lingers](super::ConcurrencyLimitBuilder::linger), if the layer says so. Frames, trailers, size and end are those of the body
    /// inside. If the permit's lease is lost and the layer is set to abort, the body inside is dropped
    /// then and there, even if nobody asks for frames, and this one ends with [`LeaseLost`], or for
    /// gRPC with trailers that say `UNAVAILABLE`, before one more frame passes.
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

/// A body that ends with the lease of its permit.
struct Leased<B> {
    shared: Arc<Shared<B>>,
    cut: Cut,
}

/// How a body ends that is cut off.
#[derive(Clone, Copy)]
pub(super) enum Cut {
    /// With [`LeaseLost`].
    Error,
    /// With the trailers of gRPC.
    Grpc,
}

impl Cut {
    fn frame(self) -> Result<Frame<Bytes>, BoxError> {
        match self {
            Self::Error => Err(LeaseLost::new().into()),
            Self::Grpc => Ok(Frame::trailers(grpc::lost())),
        }
    }
}

/// Shared with the watchdog, which says that the lease is lost: a client that reads slowly lets nobody ask for
/// frames, and the source behind the body would go on.
struct Shared<B> {
    state: Mutex<State<B>>,
    /// The lease is lost, and the holder of the lock is to see to it.
    is_lost: AtomicBool,
}

enum State<B> {
    Flows {
        body: Pin<Box<B>>,
        permit: HeldPermit,
        reader: Option<Waker>,
    },
    /// The permit was given back; what is left of the body needs none.
    Ends {
        body: Pin<Box<B>>,
    },
    Lost {
        told: bool,
    },
}

impl<B> State<B> {
    /// Says that this was cut off.
    fn tell(&self) {
        if let Self::Flows { permit, .. } = self {
            let semaphore = permit.get().map(Permit::name);
            tracing::debug!(target: "tower_semaphore", semaphore, "cut off in its body: the permit is lost");
        }
    }
}

impl<B: Body + Send + 'static> ResponseBody<B> {
    /// Holds the permit, if any, until the body ends. `cut`: not longer than its lease.
    pub(super) fn passed(body: B, mut permit: HeldPermit, cut: Option<Cut>) -> Self {
        // Nobody need ask a body for frames that says beforehand that it has none.
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

/// The default body, and no permit: what other layers answer with on their own.
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

    /// The same body, that does not say so if it is empty. In answer to HEAD an upstream sends none, which is not
    /// the length that its response to GET has; yet a router that asks for it writes `content-length: 0`.
    pub(super) fn without_empty_size(self) -> Self {
        Self { hides_empty: true, ..self }
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
                    // Not at its end.
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
                State::Flows { body, .. } | State::Ends { body } => body.is_end_stream(),
                State::Lost { told } => *told,
            }),
            Inner::Refused { body } => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        let size = match &self.inner {
            Inner::Passed { body, .. } => body.size_hint(),
            Inner::Leased { leased } => leased.shared.look(|state| match state {
                State::Flows { body, .. } | State::Ends { body } => body.size_hint(),
                State::Lost { .. } => SizeHint::default(),
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
        let is_lost = shared.look(|state| match state {
            State::Flows { permit, .. } => {
                permit.get().is_some_and(|permit| !permit.on_lost(&alarm))
            }
            State::Ends { .. } | State::Lost { .. } => false,
        });
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
        // If that was while we had the lock, it was left to us.
        if self.shared.is_lost.load(Ordering::SeqCst) {
            self.shared.cut();
        }
        frame
    }

    fn poll_body(&self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let mut state = self.lock();
        // First the lease, then the frame: a process that slept past it sends nothing more.
        if matches!(&*state, State::Flows { permit, .. } if permit.get().is_some_and(Permit::is_lost))
        {
            let flows = std::mem::replace(&mut *state, State::Lost { told: true });
            // The body's end may do whatever it likes: outside of the lock.
            drop(state);
            flows.tell();
            drop(flows);
            return Poll::Ready(Some(self.cut.frame()));
        }
        let (frame, passed) = match &mut *state {
            State::Flows { body, reader, .. } => {
                let Poll::Ready(frame) = body.as_mut().poll_frame(cx) else {
                    if !reader.as_ref().is_some_and(|reader| reader.will_wake(cx.waker())) {
                        *reader = Some(cx.waker().clone());
                    }
                    return Poll::Pending;
                };
                let passed = Passed::of(&frame, &**body);
                (frame, passed)
            }
            State::Ends { body } => (ready!(body.as_mut().poll_frame(cx)), Passed::Bytes(0)),
            State::Lost { told: true } => return Poll::Ready(None),
            State::Lost { told } => {
                *told = true;
                return Poll::Ready(Some(self.cut.frame()));
            }
        };
        if let Passed::Bytes(bytes) = passed {
            if let State::Flows { permit, .. } = &mut *state {
                permit.passed(bytes);
            }
        } else {
            let flows = std::mem::replace(&mut *state, State::Lost { told: true });
            if let State::Flows { body, mut permit, .. } = flows {
                *state = State::Ends { body };
                // Given back outside of the lock, before the end is passed on.
                drop(state);
                if let Passed::End = passed {
                    permit.end();
                }
                drop(permit);
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }
}

/// The permit's record holds the alarm, and the alarm the permit: dropping the body parts them.
impl<B> Drop for Leased<B> {
    fn drop(&mut self) {
        let state = std::mem::replace(&mut *self.lock(), State::Lost { told: true });
        drop(state);
    }
}

impl<B> Shared<B> {
    fn lock(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lease is lost: the source behind the body stops, and the reader is told.
    ///
    /// Never waits: the watchdog calls it, and has others to tell. If the body is being polled just now,
    /// the task that polls it sees to this.
    fn cut(&self) {
        self.is_lost.store(true, Ordering::SeqCst);
        let mut state = match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(state)) => state.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        if !matches!(&*state, State::Flows { .. }) {
            return;
        }
        let mut flows = std::mem::replace(&mut *state, State::Lost { told: false });
        drop(state);
        flows.tell();
        let reader = match &mut flows {
            State::Flows { reader, .. } => reader.take(),
            State::Ends { .. } | State::Lost { .. } => None,
        };
        // The end of a body is not ours: a panic in it must not end the task that looks after all permits.
        if catch_unwind(AssertUnwindSafe(|| drop(flows))).is_err() {
            tracing::error!(target: "tower_semaphore", "a response body panicked as it was dropped");
        }
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// A look at the state. A loss that is told meanwhile is left to the one that has the lock.
    fn look<T>(&self, look: impl FnOnce(&State<B>) -> T) -> T {
        let seen = look(&self.lock());
        if self.is_lost.load(Ordering::SeqCst) {
            self.cut();
        }
        seen
    }
}

impl<B: Send + 'static> Wake for Shared<B> {
    fn wake(self: Arc<Self>) {
        self.cut();
    }
}

/// What a frame was of its body.
enum Passed {
    /// So many bytes; more frames may come.
    Bytes(usize),
    /// The last one. Nothing comes after trailers, whether or not the body says so.
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
