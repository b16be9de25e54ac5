//! One request on its way: key, limit, permit, response.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::request::Parts;
use http::{Request, Response, StatusCode};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_service::Service;

use super::BoxError;
use super::body::{Cut, ResponseBody};
use super::cached::{Found, LookUp};
use super::connection::Connection;
use super::fair::{Asked, with_cap};
use super::grpc::Dialect;
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
    /// Dropping it at any time leaves nothing: neither a place in the queue nor a permit.
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
        /// What to do is being found out, or the permit is being waited for.
        Waiting { wait: Wait, call: Option<Call<S, B>> },
        Calling {
            #[pin]
            future: F,
            permit: Option<Permit>,
            origin: Origin,
            would: Option<WouldRefuse>,
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
}

impl<S, B> ResponseFuture<S, B>
where
    S: Service<Request<B>>,
{
    pub(super) fn new(service: S, request: Request<B>, settings: Arc<Settings>) -> Self {
        let (parts, body) = request.into_parts();
        let wait = settings.begin(&parts);
        let call = Some(Call { service, parts, body });
        Self { state: State::Waiting { wait, call }, settings }
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
        let key = match (key, self.missing_key) {
            (Some(key), _) => key,
            (None, MissingKey::Shared) => Name::missing(),
            (None, MissingKey::Bypass) => {
                self.meter.of(None).count(Outcome::Bypassed);
                return Wait::Done(Some(Verdict::Pass(None)));
            }
            (None, MissingKey::Reject(status)) => {
                self.meter.of(None).count(Outcome::MissingKey);
                let refusal = Refusal::new(&self.name, None, status);
                return Wait::Done(Some(Verdict::Refuse(refusal.into())));
            }
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
        let Some(fair) = &self.fair else { return self.asked(key, limit, &name, None) };
        match fair.ask(name, parts) {
            Asked::Known(Ok(ask)) => self.asked(key, limit, ask.name(), Some(&ask)),
            Asked::Known(Err((tenant, error))) => self.limit_unknown(key, Some(tenant), error),
            Asked::Later(ask, lookup) => {
                let tenant = ask.tenant().cloned().unwrap_or_else(Name::missing);
                Wait::CachedCap(Box::new(CapLookUp { key, limit, ask, tenant, lookup }))
            }
        }
    }

    /// `ask`: where the name is not all that is asked for.
    fn asked(&self, key: Name, limit: Limit, name: &Name, ask: Option<&Ask>) -> Wait {
        let tenant = ask.and_then(Ask::tenant);
        let meter = self.meter.of(if self.is_metered_by_tenant { tenant } else { Some(&key) });
        let policy = self.policy.with_limit(limit);
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

    fn lease_lost(&self) -> Refusal {
        let mut refusal = Refusal::new(&self.name, None, StatusCode::SERVICE_UNAVAILABLE);
        refusal.reason = RefusalReason::LeaseLost;
        refusal.retry_after(self.retry_after)
    }

    /// How the request says that it is gRPC, if that matters.
    fn grpc(&self, parts: &Parts) -> Option<Dialect> {
        if self.grpc_status { Dialect::of(&parts.headers) } else { None }
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
                            settings.asked(key, *limit, ask.name(), Some(&ask))
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
                StateProj::Waiting { wait, call } => {
                    let Some(waiting) = call else { return Poll::Pending };
                    let mut would = None;
                    let permit = match ready!(wait.poll(settings, &waiting.parts, cx)) {
                        Verdict::Pass(permit) => permit,
                        Verdict::Refuse(refusal) => {
                            let Some(shadow) = &settings.shadow else {
                                let grpc = settings.grpc(&waiting.parts);
                                *call = None;
                                return Poll::Ready(Ok(settings.respond(*refusal, grpc)));
                            };
                            let name = settings.name_of(refusal.key.as_ref());
                            would = Some(shadow.instead_of(*refusal));
                            Some(Permit::uncounted(name.as_str()))
                        }
                    };
                    let Some(Call { mut service, mut parts, body }) = call.take() else {
                        return Poll::Pending;
                    };
                    let mut origin = Origin::default();
                    if let Some(permit) = &permit {
                        origin.grpc = settings.grpc(&parts);
                        origin.connection = parts.extensions.get::<Connection>().cloned();
                        parts.extensions.insert(permit.clone());
                    }
                    if let Some(would) = &would {
                        parts.extensions.insert(would.clone());
                    }
                    let future = service.call(Request::from_parts(parts, body));
                    is_new = true;
                    this.state.set(State::Calling { future, permit, origin, would });
                }
                StateProj::Calling { future, permit, origin, would } => {
                    let abort = settings.on_lost == OnLost::Abort;
                    let leased = permit.as_ref().filter(|_| abort);
                    let mut is_lost = !is_new && leased.is_some_and(Permit::is_lost);
                    let mut response = Poll::Pending;
                    if !is_lost {
                        response = future.poll(cx);
                        is_lost = response.is_pending()
                            && leased.is_some_and(|permit| !permit.on_lost(cx.waker()));
                    }
                    if is_lost {
                        let semaphore = permit.as_ref().map(Permit::name);
                        tracing::debug!(target: "tower_semaphore", semaphore, "cut off before its head: the permit is lost");
                        let grpc = origin.grpc.take();
                        // Neither the handler nor a second answer comes after this.
                        this.state.set(State::Waiting { wait: Wait::Done(None), call: None });
                        return Poll::Ready(Ok(settings.respond(settings.lease_lost(), grpc)));
                    }
                    let response = ready!(response);
                    let permit = match settings.hold_until {
                        HoldUntil::BodyEnd => permit.take(),
                        HoldUntil::ResponseHead => None,
                    };
                    let Origin { grpc, connection } = std::mem::take(origin);
                    let would = would.take();
                    // Done: an error has given the permit back before it is passed on.
                    this.state.set(State::Waiting { wait: Wait::Done(None), call: None });
                    let response = response?;
                    // One that a layer further in refused: its answer needs no permit.
                    let refused = response.extensions().get::<Refusal>().is_some();
                    let permit = permit.filter(|_| !refused);
                    if response.status() == StatusCode::SWITCHING_PROTOCOLS
                        && let (Some(connection), Some(permit)) = (connection, &permit)
                    {
                        connection.keep(permit.clone(), abort);
                    }
                    let cut =
                        abort.then(|| match grpc.and_then(|_| Dialect::of(response.headers())) {
                            Some(Dialect::Grpc) => Cut::Grpc,
                            _ => Cut::Error,
                        });
                    let mut response = response.map(|body| ResponseBody::passed(body, permit, cut));
                    if let Some(would) = would {
                        response.extensions_mut().insert(would);
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
