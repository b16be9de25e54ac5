//! A request on its way through the layer: admitted, passed on, answered.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::BoxError;
use super::admission::{Verdict, Wait};
use super::body::{Cut, ResponseBody};
use super::budget::WaitBudget;
use super::connection::{Connection, Inside, is_upgrade};
use super::grpc::Dialect;
use super::held::HeldPermit;
use super::refusal::{Refusal, RefusalReason};
use super::refusal_response::RefusalBody;
use super::settings::{HoldUntil, OnLost, Settings};
use super::shadow::WouldRefuse;
use crate::protocol::session::FurtherIn;
use crate::semaphore::Permit;

pin_project! {
    /// The future of [`ConcurrencyLimit`](super::ConcurrencyLimit).
    ///
    /// A request has its place in the queue from the call on, unless its key or limit must be looked up first: a future
    /// that is kept without being polled keeps it, and a permit with it.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future removes the request from the queue, and its position is lost. A permit that was granted
    /// is released, after its [linger](super::ConcurrencyLimitBuilder::linger) if the inner service was called.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B, S::Future>,
        // On the connection of the request, until that has its permit.
        inside: Option<Inside>,
        settings: Arc<Settings>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        /// Waits for its key, its limit or its permit; once it has `passed`, for the inner service to be ready, which is
        /// rare.
        Waiting { wait: Wait, passed: Option<Box<Passed>>, call: Option<Call<S, B>> },
        Calling {
            #[pin]
            future: F,
            permit: HeldPermit,
            origin: Origin,
            would: Option<Box<WouldRefuse>>,
        },
    }
}

/// A request that may go on.
struct Passed {
    permit: Option<Permit>,
    would: Option<Box<WouldRefuse>>,
    /// The wait that was allowed for the permit.
    allowed: Duration,
}

/// The call to make.
struct Call<S, B> {
    service: S,
    parts: Parts,
    body: B,
}

/// What is needed of a request after the inner service has taken it.
#[derive(Default)]
struct Origin {
    grpc: Option<Dialect>,
    is_head: bool,
    /// It asks for a tunnel.
    is_tunnel: bool,
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    #[inline]
    pub(super) fn new(service: S, request: Request<B>, settings: Arc<Settings>) -> Self {
        let (mut parts, body) = request.into_parts();
        if let Some(timeout) = &settings.client_timeout
            && let Some(timeout) = timeout.read(&parts.headers)
        {
            WaitBudget::end_with_client(&mut parts, timeout);
        }
        let wait = settings.begin(&parts);
        let inside = match &wait {
            Wait::Done(_) => None,
            _ => parts.extensions.get::<Connection>().and_then(|on| on.enter(&settings.semaphore)),
        };
        let call = Some(Call { service, parts, body });
        Self { state: State::Waiting { wait, passed: None, call }, inside, settings }
    }
}

impl Settings {
    /// The response to a request whose permit was lost before there was one.
    fn lost<B>(&self, permit: Option<&Permit>, grpc: Option<Dialect>) -> Response<ResponseBody<B>> {
        let semaphore = permit.map(Permit::name);
        tracing::debug!(target: "tower_semaphore", semaphore, "aborted before its response: the permit is lost");
        let key = semaphore.and_then(|name| self.key_of(name));
        let mut refusal = Refusal::new(&self.name, key, StatusCode::SERVICE_UNAVAILABLE);
        refusal.reason = RefusalReason::LeaseLost;
        refusal.waited = permit.map_or(Duration::ZERO, Permit::waited);
        self.respond(refusal.retry_after(self.retry_after), grpc)
    }

    /// The kind of gRPC that the request is, if it is rejected in that way.
    fn grpc(&self, parts: &Parts) -> Option<Dialect> {
        if self.grpc_status { Dialect::of_request(parts) } else { None }
    }

    fn respond<B>(&self, refusal: Refusal, grpc: Option<Dialect>) -> Response<ResponseBody<B>> {
        let response = match (grpc, &self.response) {
            (Some(grpc), _) => grpc.refuse(&refusal),
            (None, Some(own)) => own.response(&refusal),
            (None, None) => refusal.response(),
        };
        RefusalBody::mark(response, refusal).map(ResponseBody::refused)
    }
}

impl<S, B, F> State<S, B, F> {
    /// The future has its output.
    const fn over() -> Self {
        Self::Waiting { wait: Wait::Done(None), passed: None, call: None }
    }
}

/// Polls what needs the permit; `None` if that is lost. The task is woken when it is lost later. A permit that
/// `is_new` is not checked beforehand.
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

impl<S, ReqBody, ResBody> Future for ResponseFuture<S, ReqBody>
where
    S: Service<Request<ReqBody>, Response = Response<ResBody>>,
    ResBody: Body<Data = Bytes> + Send + 'static,
    ResBody::Error: Into<BoxError>,
{
    type Output = Result<Response<ResponseBody<ResBody>>, S::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let settings = &**this.settings;
        let abort = settings.on_lost == OnLost::Abort;
        // A permit that was just granted is valid; one of an earlier poll may be lost by now.
        let mut is_new = false;
        loop {
            match this.state.as_mut().project() {
                StateProj::Waiting { wait, passed, call } => {
                    let Some(waiting) = call else { return Poll::Pending };
                    let pass = match passed.take() {
                        Some(pass) => *pass,
                        None => {
                            is_new = true;
                            match ready!(wait.poll(settings, &waiting.parts, cx)) {
                                Verdict::Pass(permit, allowed) => {
                                    Passed { permit, would: None, allowed }
                                }
                                Verdict::Refuse(mut refusal) => {
                                    refusal.has_rate_limit_fields = settings.rate_limit_fields;
                                    let Some(shadow) = &settings.shadow else {
                                        let grpc = settings.grpc(&waiting.parts);
                                        let extensions = &waiting.parts.extensions;
                                        if let Some(outer) = extensions.get::<Permit>() {
                                            outer.further_in(FurtherIn::Rejected);
                                        }
                                        *call = None;
                                        return Poll::Ready(Ok(settings.respond(*refusal, grpc)));
                                    };
                                    let name = settings.name_of(refusal.key.as_ref());
                                    let permit = Some(Permit::uncounted(name.as_str()));
                                    let would = Some(Box::new(shadow.instead_of(*refusal)));
                                    Passed { permit, would, allowed: Duration::ZERO }
                                }
                            }
                        }
                    };
                    let leased = pass.permit.as_ref().filter(|_| abort);
                    let ready =
                        poll_leased(leased, is_new, cx, |cx| waiting.service.poll_ready(cx));
                    let Some(ready) = ready else {
                        let grpc = settings.grpc(&waiting.parts);
                        this.state.set(State::over());
                        return Poll::Ready(Ok(settings.lost(pass.permit.as_ref(), grpc)));
                    };
                    match ready {
                        Poll::Ready(Ok(())) => {}
                        Poll::Ready(Err(error)) => {
                            this.state.set(State::over());
                            return Poll::Ready(Err(error));
                        }
                        Poll::Pending => {
                            *passed = Some(Box::new(pass));
                            return Poll::Pending;
                        }
                    }
                    let Passed { permit, would, allowed } = pass;
                    // In place: they are large.
                    let parts = &mut waiting.parts;
                    let is_head = parts.method == Method::HEAD;
                    let is_tunnel = parts.method == Method::CONNECT;
                    let mut origin = Origin { is_head, is_tunnel, ..Origin::default() };
                    if let Some(permit) = &permit {
                        origin.grpc = settings.grpc(parts);
                        if let Some(outer) = parts.extensions.insert(permit.clone()) {
                            outer.further_in(FurtherIn::Passed);
                            parts.extensions.insert(permit.clone().within(outer));
                        }
                    }
                    let waited = permit.as_ref().map_or(Duration::ZERO, Permit::waited);
                    WaitBudget::pass_on(parts, waited, allowed);
                    if let Some(would) = &would {
                        parts.extensions.insert(WouldRefuse::clone(would));
                    }
                    let Some(Call { mut service, parts, body }) = call.take() else {
                        return Poll::Pending;
                    };
                    let future = service.call(Request::from_parts(parts, body));
                    let lingers = !settings.policy.linger.is_zero();
                    let inside = this.inside.take().filter(|_| permit.is_some());
                    let permit = HeldPermit::new(permit, inside, lingers);
                    this.state.set(State::Calling { future, permit, origin, would });
                }
                StateProj::Calling { future, permit, origin, would } => {
                    let leased = permit.get().filter(|_| abort);
                    let Some(response) = poll_leased(leased, is_new, cx, |cx| future.poll(cx))
                    else {
                        let (permit, grpc) = (std::mem::take(permit), origin.grpc.take());
                        // Drops the call.
                        this.state.set(State::over());
                        return Poll::Ready(Ok(settings.lost(permit.get(), grpc)));
                    };
                    let Poll::Ready(response) = response else {
                        permit.goes_on();
                        return Poll::Pending;
                    };
                    let mut permit = std::mem::take(permit);
                    let Origin { grpc, is_head, is_tunnel } = std::mem::take(origin);
                    let would = would.take();
                    this.state.set(State::over());
                    let response = match response {
                        Ok(response) => response,
                        // Released before the caller sees the error.
                        Err(error) => {
                            drop(permit);
                            return Poll::Ready(Err(error));
                        }
                    };
                    if let Some(refusal) = RefusalBody::refusal_of(&response) {
                        // A layer further in rejected or aborted it: that response needs no permit.
                        permit.refused(refusal.reason);
                    } else {
                        permit.for_body(&response, is_head);
                    }
                    if is_upgrade(response.status(), is_tunnel) {
                        permit.upgraded(abort);
                    }
                    // The connection holds a clone of its own.
                    if settings.hold_until == HoldUntil::ResponseHead {
                        permit.end();
                    }
                    let cut =
                        abort.then(|| match grpc.and_then(|_| Dialect::of(response.headers())) {
                            Some(Dialect::Grpc) => Cut::Grpc,
                            _ => Cut::Error,
                        });
                    let mut response = response.map(|body| ResponseBody::passed(body, permit, cut));
                    if is_head && !response.headers().contains_key(CONTENT_LENGTH) {
                        response = response.map(ResponseBody::without_empty_size);
                    }
                    if let Some(would) = would {
                        response.extensions_mut().insert(*would);
                    }
                    return Poll::Ready(Ok(response));
                }
            }
        }
    }
}

impl<S, B> fmt::Debug for ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").field("settings", &self.settings).finish_non_exhaustive()
    }
}
