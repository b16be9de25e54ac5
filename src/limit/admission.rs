//! What a request needs before it is passed on: its key, the limit of that, and a permit.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::StatusCode;
use http::request::Parts;
use tokio::time::Instant;

use super::budget::{CountedWait, WaitBudget};
use super::cached::{Found, Lookup};
use super::fair::{Asked, TenantSource};
use super::key::{KeyExtractor, MissingKey};
use super::plan::Plan;
use super::refusal::{Refusal, RefusalReason};
use super::required::Required;
use super::settings::{KeySource, LimitSource, Settings};
use super::shadow;
use crate::ask::Ask;
use crate::error::{AcquireError, BackendError};
use crate::metrics::outcome::Outcome;
use crate::name::Name;
use crate::policy::{Limit, Policy};
use crate::semaphore::{Acquire, AcquireRequest, Permit};

/// What a request waits for.
#[allow(clippy::large_enum_variant, reason = "in place: the usual case allocates nothing")]
pub(super) enum Wait {
    /// Nothing: the verdict is there, until it is taken.
    Done(Option<Verdict>),
    Key(BoxFuture<'static, Option<Name>>),
    Limit(Name, BoxFuture<'static, Limit>),
    CachedLimit(Name, Lookup<Limit>),
    CachedPlan(Box<PlanLookup>),
    Permit(PermitWait),
}

/// A request that waits for a permit of its key.
pub(super) struct PermitWait {
    key: Name,
    tenant: Option<Box<Name>>,
    acquire: Acquire,
    /// How long it could wait, if other layers left it all of that.
    allowed: Duration,
    /// In the request's budget, if it came with one.
    counted: Option<CountedWait>,
}

/// A request that waits for the plan of its tenant.
pub(super) struct PlanLookup {
    key: Name,
    limit: Limit,
    ask: Ask,
    tenant: Name,
    lookup: Lookup<Plan>,
}

pub(super) enum Verdict {
    /// With a permit, and the wait that was allowed for it.
    Pass(Option<Permit>, Duration),
    Refuse(Box<Refusal>),
}

impl Verdict {
    /// The request needs no permit.
    const BYPASS: Self = Self::Pass(None, Duration::ZERO);
}

impl Settings {
    /// The first step. Takes the place in the queue at once, unless the key or the limit must be looked up.
    pub(super) fn begin(&self, parts: &Parts) -> Wait {
        if self.config.skip.as_ref().is_some_and(|skip| skip(parts)) {
            self.meter.of(None).count(Outcome::Bypassed);
            return Wait::Done(Some(Verdict::BYPASS));
        }
        match &self.key {
            KeySource::Sync(extractor) => self.keyed(extractor.extract(parts), parts),
            KeySource::Async(extract) => Wait::Key(extract(parts)),
        }
    }

    fn keyed(&self, key: Option<Name>, parts: &Parts) -> Wait {
        let key = match key {
            Some(key) => {
                self.key_required.found();
                key
            }
            None => match self.without(&self.key_required, self.key.extractor(), None, parts) {
                Ok(key) => key,
                Err(verdict) => return Wait::Done(Some(verdict)),
            },
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

    /// The name that requests without a key or a tenant share, or the verdict on such a request.
    fn without(
        &self,
        required: &Required,
        extractor: Option<&dyn KeyExtractor>,
        key: Option<&Name>,
        parts: &Parts,
    ) -> Result<Name, Verdict> {
        let meter = self.meter.of(if self.is_metered_by_tenant { None } else { key });
        let by_extractor =
            || extractor.map_or_else(MissingKey::default, |found| found.missing_key(parts));
        let status = match required.missing.unwrap_or_else(by_extractor) {
            MissingKey::Shared => return Ok(Name::missing()),
            MissingKey::Bypass => {
                required.passed(&self.name);
                meter.count(Outcome::Bypassed);
                return Err(Verdict::BYPASS);
            }
            MissingKey::Reject(status) if status.is_client_error() || status.is_server_error() => {
                status
            }
            // Of an extractor: `build` checks that of the layer.
            MissingKey::Reject(_) => StatusCode::BAD_REQUEST,
        };
        let header = extractor.and_then(|found| found.missing_header(parts));
        required.rejected(&self.name, header.as_ref(), status);
        meter.count(required.part.outcome());
        let mut refusal = Refusal::new(&self.name, key.cloned(), status);
        refusal.reason = required.part.reason();
        refusal.extractor = Some(required.extractor);
        refusal.missing_header = header;
        Err(Verdict::Refuse(refusal.into()))
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
        Wait::Done(Some(Verdict::Refuse(refusal.retry_after(self.config.retry_after).into())))
    }

    fn limited(&self, key: Name, limit: Limit, parts: &Parts) -> Wait {
        let fair = &self.config.fair;
        if !fair.is_set() {
            if key.is_empty() {
                return self.asked(key, limit, &self.full_name, None, parts);
            }
            let name = self.name_of(Some(&key));
            return self.asked(key, limit, &name, None, parts);
        }
        let tenant = match &fair.tenant {
            None => None,
            Some(TenantSource { extractor, required }) => match extractor.extract(parts) {
                Some(tenant) => {
                    required.found();
                    Some(tenant)
                }
                None => match self.without(required, Some(&**extractor), Some(&key), parts) {
                    Ok(tenant) => Some(tenant),
                    Err(verdict) => return Wait::Done(Some(verdict)),
                },
            },
        };
        let name = self.name_of(Some(&key));
        match fair.ask(name, tenant, parts) {
            Asked::Known(Ok(ask)) => self.asked(key, limit, ask.name(), Some(&ask), parts),
            Asked::Known(Err((tenant, error))) => self.limit_unknown(key, Some(tenant), error),
            Asked::Later(ask, lookup) => {
                let tenant = ask.tenant().cloned().unwrap_or_else(Name::missing);
                Wait::CachedPlan(Box::new(PlanLookup { key, limit, ask, tenant, lookup }))
            }
        }
    }

    /// `ask`: `None` where the name is all there is.
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
        let allowed = self.wait_timeout(&key, parts);
        let mut policy = self.policy.clone();
        policy.set_limit(limit);
        let budget = parts.extensions.get::<WaitBudget>().filter(|_| self.shadow.is_none());
        if self.shadow.is_some() {
            policy.wait_timeout = Duration::ZERO;
            // It asks whether a permit is free for all, and is not to keep one.
            policy.reuse = false;
        } else {
            policy.wait_timeout = budget.map_or(allowed, |left| left.left(allowed, Instant::now));
        }
        let answer_timeout = match self.shadow {
            Some(_) => Some(shadow::SHADOW_TIMEOUT),
            None => budget.and_then(WaitBudget::answer_timeout),
        };
        let remembered = Some(&self.remembered).filter(|_| key.is_empty());
        let request = AcquireRequest {
            name,
            ask,
            policy: &policy,
            meter,
            is_out_of_time: policy.wait_timeout.is_zero() && !allowed.is_zero(),
            answer_timeout,
            remembered,
        };
        Wait::Permit(PermitWait {
            key,
            tenant: tenant.cloned().map(Box::new),
            acquire: self.config.semaphore.acquire_for(request),
            allowed,
            counted: budget.and_then(WaitBudget::wait),
        })
    }

    /// How long a request may wait in this layer, whatever others leave of that. In shadow, none waits.
    fn wait_timeout(&self, key: &Name, parts: &Parts) -> Duration {
        match &self.config.wait_timeout {
            _ if self.shadow.is_some() => Duration::ZERO,
            None => self.policy.wait_timeout,
            Some(by) => by(key, parts).min(Policy::MAX_WAIT_TIMEOUT),
        }
    }

    /// The semaphore of this key.
    pub(super) fn name_of(&self, key: Option<&Name>) -> Name {
        let name = self.full_name.clone();
        match key {
            Some(key) => name.join(key),
            None => name,
        }
    }

    /// The key whose semaphore this is; `None` if all requests have one, or the name is stored as a hash.
    pub(super) fn key_of(&self, semaphore: &str) -> Option<Name> {
        Name::from_stored(semaphore.strip_prefix(self.full_name.as_str())?.strip_prefix(':')?)
    }

    fn refused(&self, key: Name, tenant: Option<Name>, error: AcquireError) -> Refusal {
        let mut refusal =
            Refusal::from_error(&self.name, Some(key), self.config.full_status, error);
        refusal.tenant = tenant;
        if refusal.reason == RefusalReason::CostTooHigh {
            return refusal;
        }
        refusal.retry_after(self.config.retry_after)
    }
}

impl Wait {
    pub(super) fn poll(
        &mut self,
        settings: &Settings,
        parts: &Parts,
        cx: &mut Context<'_>,
    ) -> Poll<Verdict> {
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
                Self::CachedPlan(waiting) => {
                    let PlanLookup { key, limit, ask, tenant, lookup } = &mut **waiting;
                    let plan = ready!(lookup.poll(tenant, parts, cx));
                    let (key, ask) = (key.clone(), ask.clone());
                    match plan {
                        Ok(plan) => {
                            let ask = settings.config.fair.with_plan(ask, plan);
                            settings.asked(key, *limit, ask.name(), Some(&ask), parts)
                        }
                        Err(error) => settings.limit_unknown(key, Some(tenant.clone()), error),
                    }
                }
                Self::Permit(waiting) => {
                    let PermitWait { key, tenant, acquire, allowed, counted } = waiting;
                    let answer = ready!(Pin::new(acquire).poll(cx));
                    *counted = None;
                    return Poll::Ready(match answer {
                        Ok(permit) => {
                            if let Some(shadow) = &settings.shadow {
                                shadow.passed();
                            }
                            Verdict::Pass(Some(permit), *allowed)
                        }
                        Err(error) => {
                            let tenant = tenant.take().map(|tenant| *tenant);
                            Verdict::Refuse(settings.refused(key.clone(), tenant, error).into())
                        }
                    });
                }
            };
        }
    }
}
