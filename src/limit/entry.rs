//! A request of HTTP on its way in, and what is held while the inner service has it.

use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use http::request::Parts;
use http::{Method, Request};

use super::admission::{Verdict, Wait};
use super::budget::WaitBudget;
use super::connection::{Connection, Inside};
use super::grpc::Dialect;
use super::held::HeldPermit;
use super::refusal::Refusal;
use super::settings::{OnLost, Settings};
use super::shadow::WouldRefuse;
use crate::protocol::session::FurtherIn;
use crate::semaphore::Permit;
use crate::service::passage::Entry;

/// A request that waits for its key, its limit or its permit.
pub(super) struct HttpEntry<B> {
    wait: Wait,
    /// On the connection of the request, until that has its permit.
    inside: Option<Inside>,
    call: Option<Call<B>>,
}

/// The call to make.
struct Call<B> {
    parts: Parts,
    body: B,
}

/// What is held while the inner service has the request.
pub(super) struct Held {
    pub(super) permit: HeldPermit,
    pub(super) would: Option<Box<WouldRefuse>>,
    pub(super) grpc: Option<Dialect>,
    pub(super) is_head: bool,
    /// It asks for a tunnel.
    pub(super) is_tunnel: bool,
    /// The wait that was allowed for the permit.
    allowed: Duration,
}

/// A request that is rejected.
pub(super) struct Rejection {
    pub(super) refusal: Box<Refusal>,
    pub(super) grpc: Option<Dialect>,
}

impl<B> HttpEntry<B> {
    #[inline]
    pub(super) fn new(request: Request<B>, settings: &Settings) -> Self {
        let (mut parts, body) = request.into_parts();
        settings.versions.meet(&mut parts.extensions, &settings.name);
        if let Some(timeout) = &settings.config.client_timeout
            && let Some(timeout) = timeout.read(&parts.headers)
        {
            WaitBudget::end_with_client(&mut parts, timeout);
        }
        let wait = settings.begin(&parts);
        let inside = match &wait {
            Wait::Done(_) => None,
            _ => parts
                .extensions
                .get::<Connection>()
                .and_then(|on| on.enter(&settings.config.semaphore)),
        };
        Self { wait, inside, call: Some(Call { parts, body }) }
    }
}

impl Held {
    fn new(permit: Option<Permit>, allowed: Duration, parts: &Parts, settings: &Settings) -> Self {
        Self {
            grpc: permit.as_ref().and_then(|_| settings.grpc(parts)),
            permit: HeldPermit::new(permit),
            would: None,
            is_head: parts.method == Method::HEAD,
            is_tunnel: parts.method == Method::CONNECT,
            allowed,
        }
    }
}

impl Settings {
    /// The kind of gRPC that the request is, if it is rejected in that way.
    fn grpc(&self, parts: &Parts) -> Option<Dialect> {
        if self.config.grpc_status { Dialect::of_request(parts) } else { None }
    }

    /// Rejects the request, or lets it pass in shadow.
    fn turn_away(&self, mut refusal: Box<Refusal>, parts: &Parts) -> Result<Held, Rejection> {
        refusal.has_rate_limit_fields = self.config.rate_limit_fields;
        let Some(shadow) = &self.shadow else {
            if let Some(outer) = parts.extensions.get::<Permit>() {
                outer.further_in(FurtherIn::Rejected);
            }
            return Err(Rejection { refusal, grpc: self.grpc(parts) });
        };
        let name = self.name_of(refusal.key.as_ref());
        let would = Some(Box::new(shadow.instead_of(*refusal)));
        let permit = Some(Permit::uncounted(name.as_str()));
        Ok(Held { would, ..Held::new(permit, Duration::ZERO, parts, self) })
    }
}

impl<B> Entry for HttpEntry<B> {
    type Settings = Arc<Settings>;
    type Request = Request<B>;
    type Held = Held;
    type Refused = Rejection;

    #[inline]
    fn poll_pass(
        &mut self,
        settings: &Arc<Settings>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Held, Rejection>> {
        let Some(Call { parts, .. }) = &self.call else { return Poll::Pending };
        Poll::Ready(match ready!(self.wait.poll(settings, parts, cx)) {
            Verdict::Pass(permit, allowed) => Ok(Held::new(permit, allowed, parts, settings)),
            Verdict::Refuse(refusal) => settings.turn_away(refusal, parts),
        })
    }

    #[inline]
    fn enter(&mut self, held: &mut Held, settings: &Arc<Settings>) -> Option<Request<B>> {
        // In place: they are large.
        let parts = &mut self.call.as_mut()?.parts;
        let mut waited = Duration::ZERO;
        if let Some(permit) = held.permit.get() {
            waited = permit.waited();
            if let Some(outer) = parts.extensions.insert(permit.clone()) {
                outer.further_in(FurtherIn::Passed);
                parts.extensions.insert(permit.clone().within(outer));
            }
        }
        WaitBudget::pass_on(parts, waited, held.allowed);
        if let Some(would) = &held.would {
            parts.extensions.insert(WouldRefuse::clone(would));
        }
        let Call { parts, body } = self.call.take()?;
        let has_budgets = !settings.config.fair.budgets.is_empty();
        held.permit.begin(self.inside.take(), !settings.policy.linger.is_zero() || has_budgets);
        Some(Request::from_parts(parts, body))
    }

    #[inline]
    fn lease<'a>(held: &'a Held, settings: &Arc<Settings>) -> Option<&'a Permit> {
        held.permit.get().filter(|_| settings.config.on_lost == OnLost::Abort)
    }

    #[inline]
    fn on_pending(held: &Held) {
        held.permit.goes_on();
    }
}
