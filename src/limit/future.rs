//! One request on its way: key, limit, permit, response.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::CONTENT_LENGTH;
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::Instant;
use tower_service::Service;

use super::BoxError;
use super::body::{Cut, ResponseBody};
use super::budget::WaitBudget;
use super::cached::{Found, LookUp};
use super::connection::Connection;
use super::fair::{Asked, with_cap};
use super::grpc::Dialect;
use super::held::HeldPermit;
use super::key::MissingKey;
use super::refusal::{Refusal, RefusalReason};
use super::settings::{HoldUntil, KeySource, LimitSource, OnLost, Settings};
use super::shadow::{self, WouldRefuse};
use crate::error::{AcquireError, BackendError};
use crate::metrics::outcome::Outcome;
use crate::name::Name;
use crate::semaphore::{Acquire, Ask, Limit, Permit, Policy};

pin_project! {
    /// The future of [`ConcurrencyLimit`](super::ConcurrencyLimit).
    ///
    /// # Cancel safety
    ///
    /// Dropping it removes the request from the queue, and its turn is lost; a permit that it has is released,
    /// after its [linger](super::ConcurrencyLimitBuilder::linger) if the request was passed on.
    pub struct ResponseFuture<S, B>
    where
        S: Service<Request<B>>,
    {
        #[pin]
        state: State<S, B, S::Future>,
        settings: Arc<Settings>,
    }
}

pin_project! {
    #[project = StateProj]
    enum State<S, B, F> {
        /// What to do is being found out, or the permit is being waited for; once it has `passed`, the service
        /// inside is made ready.
        Waiting { wait: Wait, passed: Option<Passed>, call: Option<Call<S, B>> },
        Calling {
            #[pin]
            future: F,
            permit: HeldPermit,
            origin: Origin,
            would: Option<Box<WouldRefuse>>,
        },
    }
}

enum Wait {
    /// A verdict that needs no waiting.
    Done(Option<Verdict>),
    Key(BoxFuture<'static, Option<Name>>),
    Limit(Name, BoxFuture<'static, Limit>),
    CachedLimit(Name, LookUp),
    /// The cap of its tenant.
    CachedCap(Box<CapLookUp>),
    /// Of a key, and for a tenant if requests have one.
    Permit(Name, Option<Box<Name>>, Acquire),
}

/// A request that waits for the cap of its tenant.
struct CapLookUp {
    key: Name,
    limit: Limit,
    ask: Ask,
    tenant: Name,
    lookup: LookUp,
}

enum Verdict {
    Pass(Option<Permit>),
    Refuse(Box<Refusal>),
}

/// A request that may go on.
struct Passed {
    permit: Option<Permit>,
    would: Option<Box<WouldRefuse>>,
}

/// The call that is to be made.
struct Call<S, B> {
    service: S,
    parts: Parts,
    body: B,
}

/// What must be known of a request when its parts are gone.
#[derive(Default)]
struct Origin {
    grpc: Option<Dialect>,
    connection: Option<Connection>,
    is_head: bool,
    /// It asks for a tunnel over a connection of its own.
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
        let call = Some(Call { service, parts, body });
        Self { state: State::Waiting { wait, passed: None, call }, settings }
    }
}

impl Settings {
    /// The first step. The place in the queue is taken here already, if nothing must be waited for.
    fn begin(&self, parts: &Parts) -> Wait {
        if self.skip.as_ref().is_some_and(|skip| skip(parts)) {
            self.meter.of(None).count(Outcome::Bypassed);
            return Wait::Done(Some(Verdict::Pass(None)));
        }
        match &self.key {
            KeySource::Sync(extractor) => self.keyed(extractor.extract(parts), parts),
            KeySource::Async(extract) => Wait::Key(extract(parts)),
        }
    }

    fn keyed(&self, key: Option<Name>, parts: &Parts) -> Wait {
        let Some(key) = key.or_else(|| self.shared_key(parts)) else {
            return self.without_key(parts);
        };
        match &self.limit {
            LimitSource::Fixed(limit) => self.limited(key, *limit, parts),
            LimitSource::Sync(limit) => {
                let limit = limit(&key, parts);
                self.limited(key, limit, parts)
            }
            LimitSource::Async(limit) => {
                let limit = limit(&key, parts);
                Wait::Limit(key, limit)
            }
            LimitSource::Cached(limits) => match limits.find(&key, parts) {
                Found::Known(limit) => self.looked_up(key, limit, parts),
                Found::Later(lookup) => Wait::CachedLimit(key, lookup),
            },
        }
    }

    /// What becomes of a request without a key: as it is set, or as its extractor says.
    fn missing_key(&self, parts: &Parts) -> MissingKey {
        self.missing_key.unwrap_or_else(|| match &self.key {
            KeySource::Sync(extractor) => extractor.missing_key(parts),
            KeySource::Async(_) => MissingKey::default(),
        })
    }

    fn shared_key(&self, parts: &Parts) -> Option<Name> {
        matches!(self.missing_key(parts), MissingKey::Shared).then(Name::missing)
    }

    fn without_key(&self, parts: &Parts) -> Wait {
        let MissingKey::Reject(status) = self.missing_key(parts) else {
            self.meter.of(None).count(Outcome::Bypassed);
            return Wait::Done(Some(Verdict::Pass(None)));
        };
        tracing::debug!(
            target: "tower_semaphore",
            layer = &*self.name,
            %status,
            "the request has no key for this layer: see its `key` and `on_missing_key`"
        );
        self.meter.of(None).count(Outcome::MissingKey);
        let refusal = Refusal::new(&self.name, None, status);
        Wait::Done(Some(Verdict::Refuse(refusal.into())))
    }

    fn looked_up(&self, key: Name, limit: Result<Limit, BackendError>, parts: &Parts) -> Wait {
        match limit {
            Ok(limit) => self.limited(key, limit, parts),
            Err(error) => self.limit_unknown(key, None, error),
        }
    }

    fn limit_unknown(&self, key: Name, tenant: Option<Name>, error: BackendError) -> Wait {
        let label = if self.is_metered_by_tenant { tenant.as_ref() } else { Some(&key) };
        self.meter.of(label).count(Outcome::Unavailable);
        let mut refusal = Refusal::new(&self.name, Some(key), StatusCode::SERVICE_UNAVAILABLE);
        refusal.reason = RefusalReason::LimitUnknown;
        refusal.error = Some(error);
        refusal.tenant = tenant;
        Wait::Done(Some(Verdict::Refuse(refusal.retry_after(self.retry_after).into())))
    }

    fn limited(&self, key: Name, limit: Limit, parts: &Parts) -> Wait {
        let name = self.name_of(Some(&key));
        let Some(fair) = &self.fair else { return self.asked(key, limit, &name, None, parts) };
        match fair.ask(name, parts) {
            Asked::Known(Ok(ask)) => self.asked(key, limit, ask.name(), Some(&ask), parts),
            Asked::Known(Err((tenant, error))) => self.limit_unknown(key, Some(tenant), error),
            Asked::Later(ask, lookup) => {
                let tenant = ask.tenant().cloned().unwrap_or_else(Name::missing);
                Wait::CachedCap(Box::new(CapLookUp { key, limit, ask, tenant, lookup }))
            }
        }
    }

    /// `ask`: where the name is not all that is asked for.
    #[inline]
    fn asked(
        &self,
        key: Name,
        limit: Limit,
        name: &Name,
        ask: Option<&Ask>,
        parts: &Parts,
    ) -> Wait {
        let tenant = ask.and_then(Ask::tenant);
        let meter = self.meter.of(if self.is_metered_by_tenant { tenant } else { Some(&key) });
        let mut policy = self.policy.clone().with_limit(limit);
        policy.wait_timeout = self.wait_timeout(&key, parts);
        let acquire = match self.shadow {
            None => self.semaphore.acquire_measured(name, ask, &policy, meter),
            Some(_) => {
                let policy = Policy { wait_timeout: Duration::ZERO, ..policy };
                let acquire = self.semaphore.acquire_measured(name, ask, &policy, meter);
                acquire.answer_timeout(shadow::SHADOW_TIMEOUT)
            }
        };
        Wait::Permit(key, tenant.cloned().map(Box::new), acquire)
    }

    /// How long a request may wait, by all that says so.
    fn wait_timeout(&self, key: &Name, parts: &Parts) -> Duration {
        let wait_timeout = match &self.wait_timeout {
            None => self.policy.wait_timeout,
            Some(by) => by(key, parts).min(Policy::MAX_WAIT_TIMEOUT),
        };
        match parts.extensions.get::<WaitBudget>() {
            Some(budget) => budget.left(wait_timeout, Instant::now),
            None => wait_timeout,
        }
    }

    /// The semaphore of this key.
    fn name_of(&self, key: Option<&Name>) -> Name {
        let name = self.full_name.clone();
        match key {
            Some(key) => name.join(key),
            None => name,
        }
    }

    fn refused(&self, key: Name, tenant: Option<Name>, error: AcquireError) -> Refusal {
        let mut refusal = Refusal::from_error(&self.name, Some(key), self.full_status, error);
        refusal.tenant = tenant;
        if refusal.reason == RefusalReason::CostTooHigh {
            return refusal;
        }
        refusal.retry_after(self.retry_after)
    }

    /// The response to a request whose permit was lost before there was one.
    fn lost<B>(&self, permit: Option<&Permit>, grpc: Option<Dialect>) -> Response<ResponseBody<B>> {
        let semaphore = permit.map(Permit::name);
        tracing::debug!(target: "tower_semaphore", semaphore, "cut off before its head: the permit is lost");
        let mut refusal = Refusal::new(&self.name, None, StatusCode::SERVICE_UNAVAILABLE);
        refusal.reason = RefusalReason::LeaseLost;
        self.respond(refusal.retry_after(self.retry_after), grpc)
    }

    /// How the request says that it is gRPC, if that matters.
    fn grpc(&self, parts: &Parts) -> Option<Dialect> {
        if self.grpc_status { Dialect::of_request(parts) } else { None }
    }

    fn respond<B>(&self, refusal: Refusal, grpc: Option<Dialect>) -> Response<ResponseBody<B>> {
        let response = match grpc {
            Some(grpc) => grpc.refuse(&refusal),
            None => self.response.response(&refusal),
        };
        let mut response = response.map(ResponseBody::refused);
        response.extensions_mut().insert(refusal);
        response
    }
}

impl<S, B, F> State<S, B, F> {
    /// The request is answered.
    const fn over() -> Self {
        Self::Waiting { wait: Wait::Done(None), passed: None, call: None }
    }
}

impl Wait {
    fn poll(&mut self, settings: &Settings, parts: &Parts, cx: &mut Context<'_>) -> Poll<Verdict> {
        loop {
            *self = match self {
                Self::Done(verdict) => match verdict.take() {
                    Some(verdict) => return Poll::Ready(verdict),
                    None => return Poll::Pending,
                },
                Self::Key(extract) => {
                    let key = ready!(extract.as_mut().poll(cx));
                    settings.keyed(key, parts)
                }
                Self::Limit(key, limit) => {
                    let limit = ready!(limit.as_mut().poll(cx));
                    let key = key.clone();
                    settings.limited(key, limit, parts)
                }
                Self::CachedLimit(key, lookup) => {
                    let limit = ready!(lookup.poll(key, parts, cx));
                    let key = key.clone();
                    settings.looked_up(key, limit, parts)
                }
                Self::CachedCap(waiting) => {
                    let CapLookUp { key, limit, ask, tenant, lookup } = &mut **waiting;
                    let cap = ready!(lookup.poll(tenant, parts, cx));
                    let key = key.clone();
                    match cap {
                        Ok(cap) => {
                            let ask = with_cap(ask.clone(), cap);
                            settings.asked(key, *limit, ask.name(), Some(&ask), parts)
                        }
                        Err(error) => settings.limit_unknown(key, Some(tenant.clone()), error),
                    }
                }
                Self::Permit(key, tenant, acquire) => {
                    return Poll::Ready(match ready!(Pin::new(acquire).poll(cx)) {
                        Ok(permit) => {
                            if let Some(shadow) = &settings.shadow {
                                shadow.passed();
                            }
                            Verdict::Pass(Some(permit))
                        }
                        Err(error) => Verdict::Refuse(
                            settings
                                .refused(key.clone(), tenant.take().map(|tenant| *tenant), error)
                                .into(),
                        ),
                    });
                }
            };
        }
    }
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
        // Just granted, a permit is good; later the lease may be over when the handler is asked.
        let mut is_new = false;
        loop {
            match this.state.as_mut().project() {
                StateProj::Waiting { wait, passed, call } => {
                    let Some(waiting) = call else { return Poll::Pending };
                    if passed.is_none() {
                        let mut would = None;
                        let permit = match ready!(wait.poll(settings, &waiting.parts, cx)) {
                            Verdict::Pass(permit) => permit,
                            Verdict::Refuse(refusal) => {
                                let Some(shadow) = &settings.shadow else {
                                    let grpc = settings.grpc(&waiting.parts);
                                    if let Some(outer) = waiting.parts.extensions.get::<Permit>() {
                                        outer.refused_further_in(true);
                                    }
                                    *call = None;
                                    return Poll::Ready(Ok(settings.respond(*refusal, grpc)));
                                };
                                let name = settings.name_of(refusal.key.as_ref());
                                would = Some(Box::new(shadow.instead_of(*refusal)));
                                Some(Permit::uncounted(name.as_str()))
                            }
                        };
                        *passed = Some(Passed { permit, would });
                        is_new = true;
                    }
                    let Some(Passed { permit, would }) = passed else { return Poll::Pending };
                    let leased = permit.as_ref().filter(|_| settings.on_lost == OnLost::Abort);
                    let mut is_lost = !is_new && leased.is_some_and(Permit::is_lost);
                    let mut ready = Poll::Pending;
                    if !is_lost {
                        ready = waiting.service.poll_ready(cx);
                        is_lost = ready.is_pending()
                            && leased.is_some_and(|permit| !permit.on_lost(cx.waker()));
                    }
                    if is_lost {
                        let grpc = settings.grpc(&waiting.parts);
                        let permit = permit.take();
                        this.state.set(State::over());
                        return Poll::Ready(Ok(settings.lost(permit.as_ref(), grpc)));
                    }
                    let (permit, would) = match ready!(ready) {
                        Ok(()) => (permit.take(), would.take()),
                        Err(error) => {
                            this.state.set(State::over());
                            return Poll::Ready(Err(error));
                        }
                    };
                    let Some(Call { mut service, mut parts, body }) = call.take() else {
                        return Poll::Pending;
                    };
                    let is_head = parts.method == Method::HEAD;
                    let is_tunnel =
                        parts.method == Method::CONNECT && parts.version <= Version::HTTP_11;
                    let mut origin = Origin { is_head, is_tunnel, ..Origin::default() };
                    if let Some(permit) = &permit {
                        origin.grpc = settings.grpc(&parts);
                        origin.connection = parts.extensions.get::<Connection>().cloned();
                        if let Some(outer) = parts.extensions.insert(permit.clone()) {
                            outer.refused_further_in(false);
                            parts.extensions.insert(permit.clone().within(outer));
                        }
                    }
                    let waited = permit.as_ref().map_or(Duration::ZERO, Permit::waited);
                    WaitBudget::pass_on(&mut parts, waited, settings.policy.wait_timeout);
                    if let Some(would) = &would {
                        parts.extensions.insert(WouldRefuse::clone(would));
                    }
                    let future = service.call(Request::from_parts(parts, body));
                    let permit = HeldPermit::new(permit, !settings.policy.linger.is_zero());
                    this.state.set(State::Calling { future, permit, origin, would });
                }
                StateProj::Calling { future, permit, origin, would } => {
                    let abort = settings.on_lost == OnLost::Abort;
                    let leased = permit.get().filter(|_| abort);
                    let mut is_lost = !is_new && leased.is_some_and(Permit::is_lost);
                    let mut response = Poll::Pending;
                    if !is_lost {
                        response = future.poll(cx);
                        is_lost = response.is_pending()
                            && leased.is_some_and(|permit| !permit.on_lost(cx.waker()));
                    }
                    if is_lost {
                        let (permit, grpc) = (std::mem::take(permit), origin.grpc.take());
                        // Neither the handler nor a second answer comes after this.
                        this.state.set(State::over());
                        return Poll::Ready(Ok(settings.lost(permit.get(), grpc)));
                    }
                    let response = ready!(response);
                    let mut permit = std::mem::take(permit);
                    let Origin { grpc, connection, is_head, is_tunnel } = std::mem::take(origin);
                    let would = would.take();
                    this.state.set(State::over());
                    let response = match response {
                        Ok(response) => response,
                        // The permit is given back before the error is passed on.
                        Err(error) => {
                            drop(permit);
                            return Poll::Ready(Err(error));
                        }
                    };
                    if let Some(refusal) = response.extensions().get::<Refusal>() {
                        // A layer further in refused it, or cut it off: its answer needs no permit.
                        permit.refused(refusal.reason);
                    } else {
                        permit.for_body(&response, is_head);
                        if settings.hold_until == HoldUntil::ResponseHead {
                            permit.end();
                        }
                    }
                    let is_upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS
                        || (is_tunnel && response.status().is_success());
                    if is_upgraded
                        && let (Some(connection), Some(permit)) = (connection, permit.get())
                    {
                        connection.keep(permit.clone(), abort);
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
