//! The way of a request through a layer: it gets its permit, then the inner service, then an answer.
//!
//! One machine with two faces: [`PermitLayer`](super::PermitLayer), for requests of any type, and
//! [`ConcurrencyLimitLayer`](crate::ConcurrencyLimitLayer), for those of HTTP. What differs is their [`Entry`].

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use pin_project_lite::pin_project;
use tower_service::Service;

use crate::semaphore::Permit;

/// A request on its way in, as a face sees it.
pub(crate) trait Entry {
    /// The settings of the layer.
    type Settings;
    /// What the inner service takes.
    type Request;
    /// What is held while the inner service has the request: its permit, and what the answer depends on.
    type Held;
    /// What a request without a permit is answered with.
    type Refused;

    /// Waits until the request may pass.
    fn poll_pass(
        &mut self,
        settings: &Self::Settings,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Self::Held, Self::Refused>>;

    /// Hands the request to the inner service. `None` if that was done.
    fn enter(&mut self, held: &mut Self::Held, settings: &Self::Settings) -> Option<Self::Request>;

    /// Returns the permit whose loss ends the request.
    fn lease<'a>(held: &'a Self::Held, settings: &Self::Settings) -> Option<&'a Permit>;

    /// Notes that the inner service did not answer yet.
    fn on_pending(held: &Self::Held);
}

/// How a request left the machine.
pub(crate) enum Exit<E: Entry, A> {
    /// Without a permit.
    Refused(E::Refused),
    /// Its permit was lost before there was an answer; the call was dropped.
    Lost(E::Held),
    /// The inner service answered, or failed to become ready.
    Answered(A, E::Held),
}

pin_project! {
    /// The machine. The permit is released after the inner future, in whatever state this is dropped.
    pub(crate) struct Passage<S, E, F>
    where
        E: Entry,
    {
        #[pin]
        state: State<S, E, F, E::Held>,
    }
}

pin_project! {
    #[project = StateProj]
    #[project_replace = StateOwned]
    enum State<S, E, F, H> {
        // Waits for its permit; once that is `held`, for the inner service to be ready, which is rare.
        Entering { entry: E, service: S, held: Option<Box<H>> },
        Calling {
            #[pin]
            future: F,
            held: H,
        },
        Done,
    }
}

/// What the inner service answered.
type Answer<S, R> = Result<<S as Service<R>>::Response, <S as Service<R>>::Error>;

/// What one step led to: `None` if another follows.
type Step<E, A> = Poll<Option<Exit<E, A>>>;

impl<S, E, F> Passage<S, E, F>
where
    E: Entry,
{
    #[inline]
    pub(crate) const fn new(service: S, entry: E) -> Self {
        Self { state: State::Entering { entry, service, held: None } }
    }
}

impl<S, E> Passage<S, E, S::Future>
where
    E: Entry,
    S: Service<E::Request>,
{
    /// Never ready again once it was.
    #[inline]
    pub(crate) fn poll(
        self: Pin<&mut Self>,
        settings: &E::Settings,
        cx: &mut Context<'_>,
    ) -> Poll<Exit<E, Answer<S, E::Request>>> {
        let mut state = self.project().state;
        // A permit that was just granted is valid; one of an earlier poll may be lost by now.
        let mut is_new = false;
        loop {
            let step = match state.as_mut().project() {
                StateProj::Entering { .. } => state.as_mut().enter(settings, &mut is_new, cx),
                StateProj::Calling { .. } => state.as_mut().call(settings, is_new, cx),
                StateProj::Done => Poll::Pending,
            };
            if let Some(exit) = ready!(step) {
                return Poll::Ready(exit);
            }
        }
    }
}

impl<S, E> State<S, E, S::Future, E::Held>
where
    E: Entry,
    S: Service<E::Request>,
{
    /// Gets the permit, then the inner service, and calls it.
    #[inline]
    fn enter(
        mut self: Pin<&mut Self>,
        settings: &E::Settings,
        is_new: &mut bool,
        cx: &mut Context<'_>,
    ) -> Step<E, Answer<S, E::Request>> {
        let StateProj::Entering { entry, service, held: kept } = self.as_mut().project() else {
            return Poll::Ready(None);
        };
        let mut held = match kept.take() {
            Some(held) => *held,
            None => {
                *is_new = true;
                match ready!(entry.poll_pass(settings, cx)) {
                    Ok(held) => held,
                    Err(refused) => return self.end(Exit::Refused(refused)),
                }
            }
        };
        let lease = E::lease(&held, settings);
        match poll_leased(lease, *is_new, cx, |cx| service.poll_ready(cx)) {
            Some(Poll::Ready(Ok(()))) => {}
            Some(Poll::Ready(Err(error))) => return self.end(Exit::Answered(Err(error), held)),
            Some(Poll::Pending) => {
                *kept = Some(Box::new(held));
                return Poll::Pending;
            }
            None => return self.end(Exit::Lost(held)),
        }
        let Some(request) = entry.enter(&mut held, settings) else { return Poll::Pending };
        let future = service.call(request);
        self.set(Self::Calling { future, held });
        Poll::Ready(None)
    }

    /// Waits for the answer of the inner service.
    #[inline]
    fn call(
        mut self: Pin<&mut Self>,
        settings: &E::Settings,
        is_new: bool,
        cx: &mut Context<'_>,
    ) -> Step<E, Answer<S, E::Request>> {
        let StateProj::Calling { future, held } = self.as_mut().project() else {
            return Poll::Ready(None);
        };
        let lease = E::lease(held, settings);
        let polled = poll_leased(lease, is_new, cx, |cx| future.poll(cx));
        if let Some(Poll::Pending) = polled {
            E::on_pending(held);
            return Poll::Pending;
        }
        // Drops the call, before the permit in any case.
        let StateOwned::Calling { held, .. } = self.project_replace(Self::Done) else {
            return Poll::Pending;
        };
        Poll::Ready(Some(match polled {
            Some(Poll::Ready(answer)) => Exit::Answered(answer, held),
            _ => Exit::Lost(held),
        }))
    }

    /// Drops the entry, with what is left of the request.
    fn end<A>(self: Pin<&mut Self>, exit: Exit<E, A>) -> Step<E, A> {
        self.project_replace(Self::Done);
        Poll::Ready(Some(exit))
    }
}

/// Polls what needs the permit; `None` if that is lost. The task is woken when it is lost later. A permit that
/// `is_new` is not checked beforehand.
#[inline]
fn poll_leased<T>(
    permit: Option<&Permit>,
    is_new: bool,
    cx: &mut Context<'_>,
    poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
) -> Option<Poll<T>> {
    if !is_new && permit.is_some_and(Permit::is_lost) {
        return None;
    }
    let polled = poll(cx);
    let is_lost = polled.is_pending() && permit.is_some_and(|permit| !permit.on_lost(cx.waker()));
    (!is_lost).then_some(polled)
}
