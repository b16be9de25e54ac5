//! The default response to a rejected request: a problem document.

use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use serde_json::json;

use super::refusal::{Refusal, RefusalReason};
use super::refusal_response::RefusalBody;
use crate::error::{ByTime, QUARANTINE, Rejected, Seconds, Within};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");

impl Refusal {
    /// Makes the default response: status, `Retry-After`, `Cache-Control`, the headers `RateLimit-Policy` and
    /// `RateLimit` where the layer [sends them](super::ConcurrencyLimitBuilder::rate_limit_fields), and a problem
    /// document (RFC 9457).
    ///
    /// For a closure that answers only some refusals in its own words, and for a handler that got one as the
    /// [error](super::ConcurrencyLimitLayer::into_error) of a client. With the feature `axum` a refusal is
    /// `IntoResponse`, too, so a handler can return it. A gRPC call never gets this response from a layer; a handler of
    /// one makes a status of its own.
    ///
    /// # Examples
    ///
    /// ```
    /// # use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Semaphore};
    /// use http::Response;
    /// use tower_semaphore::limit::{Refusal, RefusalBody, RefusalReason};
    ///
    /// # fn layer(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    /// ConcurrencyLimitLayer::builder(semaphore, "openai")
    ///     .limit(10)
    ///     .refusal(|refusal: &Refusal| match refusal.reason {
    ///         RefusalReason::QueueTimeout => Response::new(RefusalBody::from("all lines are busy".to_owned())),
    ///         _ => refusal.response(),
    ///     })
    ///     .build()
    /// # }
    /// ```
    #[must_use]
    pub fn response(&self) -> Response<RefusalBody> {
        let status = self.status;
        let mut problem = json!({
            "type": self.problem_type(),
            "title": self.title(),
            "status": status.as_u16(),
            "reason": self.reason.as_str(),
        });
        if let Some(detail) = self.detail() {
            problem["detail"] = json!(detail);
        }
        if let Some(rejected) = &self.rejected {
            if let Some(ahead) = rejected.ahead() {
                problem["ahead"] = json!(ahead);
            }
            if let Some(wait) = rejected.expected_wait() {
                problem["expected-wait"] = json!(wait.as_millis().div_ceil(100) as f64 / 10.0);
            }
        }
        if self.reason.is_full()
            && let Some(violated) = self.violated()
        {
            problem["violated-policies"] = json!([violated]);
        }

        let mut response = Response::new(RefusalBody::from(problem.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, PROBLEM);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(after) = self.retry_after {
            headers.insert(RETRY_AFTER, after.as_secs().max(1).into());
        }
        if self.has_rate_limit_fields
            && self.reason.is_full()
            && let Some(rejected) = &self.rejected
        {
            for (name, value) in self.rate_limit_fields(rejected) {
                // Always a valid value, because the builder checks the layer's name.
                if let Ok(value) = HeaderValue::try_from(value) {
                    headers.insert(name, value);
                }
            }
        }
        response
    }

    fn problem_type(&self) -> &'static str {
        if !self.reason.is_full() {
            "about:blank"
        } else if self.status == StatusCode::SERVICE_UNAVAILABLE {
            "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity"
        } else {
            "https://iana.org/assignments/http-problem-types#quota-exceeded"
        }
    }

    /// Names what was full: requests of the tenant are blamed only where its own cap or its own queue was.
    fn title(&self) -> &'static str {
        match self.reason {
            RefusalReason::QueueFull if self.tenant.is_some() => {
                "Too many requests of the tenant are waiting"
            }
            RefusalReason::QueueFull => "Too many requests are waiting",
            _ if !self.reason.is_full() => self.status.canonical_reason().unwrap_or("Refused"),
            _ if let Some(by) = self.by_time() => match by {
                ByTime::Rate => "Too many requests have started lately",
                ByTime::Either => "No start was allowed in time",
                ByTime::Budget(_) => "Too much of a budget is used",
            },
            _ if self.is_tenant_full() => "Too many requests of the tenant are in flight",
            _ => "Too many requests are in flight",
        }
    }

    /// Without counts, which are not the client's business.
    fn detail(&self) -> Option<String> {
        let (policy, waited) = (&self.policy, Within(self.waited().unwrap_or_default()));
        Some(match self.reason {
            RefusalReason::Limit if self.rejected.as_ref().is_some_and(|of| of.limit == 0) => {
                format!("the limit of {policy} is 0")
            }
            RefusalReason::Limit
                if self.rejected.as_ref().is_some_and(Rejected::is_behind_others) =>
            {
                format!("other requests wait for {policy}, and are served first")
            }
            RefusalReason::Limit => format!("all permits of {policy} are in use"),
            RefusalReason::TenantLimit if self.each() == Some(0) => {
                format!("the tenant may have no permits of {policy}")
            }
            RefusalReason::TenantLimit => {
                format!("all permits of {policy} that the tenant may have are in use")
            }
            RefusalReason::FurtherLimit => match self.limit_name() {
                Some(limit) => {
                    format!("all permits of {policy} that its {limit} limit allows are in use")
                }
                None => format!("all permits of {policy} that a further limit allows are in use"),
            },
            RefusalReason::QueueFull if self.tenant.is_some() => {
                format!("the tenant's queue for {policy} is full")
            }
            RefusalReason::QueueFull => format!("the queue of {policy} is full"),
            RefusalReason::QueueTimeout if let Some(by) = self.by_time() => {
                let what = match by {
                    ByTime::Rate => "the rate".to_owned(),
                    ByTime::Budget(Some(of)) => format!("the {} budget", of.budget.name()),
                    ByTime::Budget(None) => "a budget".to_owned(),
                    ByTime::Either => "the rate or a budget".to_owned(),
                };
                format!("{what} of {policy} allowed no start {waited}")
            }
            RefusalReason::QueueTimeout if self.is_tenant_full() => format!(
                "none of the permits of {policy} that the tenant may have came free {waited}"
            ),
            RefusalReason::QueueTimeout => {
                let full = self
                    .limit_name()
                    .map(|limit| format!("; its {limit} limit was full when it began to wait"));
                format!("no permit of {policy} came free {waited}{}", full.unwrap_or_default())
            }
            RefusalReason::Hopeless => {
                format!("no permit of {policy} will come free in time")
            }
            RefusalReason::CostTooHigh => self.to_string(),
            RefusalReason::Rate => {
                format!("as many requests of {policy} have started lately as its rate allows")
            }
            RefusalReason::Budget => match self.limit_name() {
                Some(budget) => format!("the {budget} budget of {policy} is used up"),
                None => format!("a budget of {policy} is used up"),
            },
            RefusalReason::MissingKey | RefusalReason::MissingTenant => {
                format!("the request has no {} header", self.missing_header.as_ref()?)
            }
            RefusalReason::Quarantine => QUARANTINE.to_owned(),
            RefusalReason::Paused => format!("an operator paused {policy}"),
            RefusalReason::UpstreamPause => {
                let left = Seconds(self.ends_in().unwrap_or_default());
                format!("{policy} is paused for another {left}")
            }
            RefusalReason::Draining => format!("{policy} is being drained"),
            RefusalReason::Revoked => format!("an operator revoked the place for {policy}"),
            RefusalReason::LimitUnknown => format!("the limit of {policy} cannot be looked up"),
            RefusalReason::Unavailable => format!("permits of {policy} cannot be counted"),
            RefusalReason::Closed => format!("permits of {policy} are no longer granted here"),
            RefusalReason::LeaseLost => format!("the permit of {policy} was lost"),
        })
    }

    /// The further limit that was full, or the budget that is used up.
    fn limit_name(&self) -> Option<&str> {
        self.rejected.as_ref()?.limit_name()
    }

    /// The cap of the tenant, if there is one.
    fn each(&self) -> Option<u32> {
        self.rejected.as_ref()?.each
    }

    /// The policy that was violated: the layer's limit or rate, or the cap of each tenant. `None` if the layer has no limit
    /// and something else than the rate kept the request back, such as the process's own share in an outage.
    fn violated(&self) -> Option<String> {
        let policy = &self.policy;
        match &self.rejected {
            _ if self.is_tenant_full() => Some(format!("{policy}/each")),
            Some(rejected) if let Some(limit) = rejected.limit_name() => {
                Some(format!("{policy}/{limit}"))
            }
            // A budget that is known has a name; of several, none is blamed.
            Some(rejected) if let Some(by) = rejected.by_time() => {
                matches!(by, ByTime::Rate).then(|| format!("{policy}/rate"))
            }
            Some(rejected) if rejected.limit == u32::MAX => None,
            _ => Some(policy.to_string()),
        }
    }

    /// The headers of draft-ietf-httpapi-ratelimit-headers-11: each policy, and what is left of the one that was violated.
    /// That has no unit for what a budget counts, so its amount, which would be taken for requests, is not among them.
    fn rate_limit_fields(&self, rejected: &Rejected) -> Vec<(HeaderName, String)> {
        let (policy, limit) = (&self.policy, rejected.limit);
        let unit = "qu=\"concurrent-requests\"";
        let mut policies = Vec::new();
        if limit < u32::MAX {
            policies.push(format!("\"{policy}\";q={limit};{unit}"));
        }
        if let Some(rate) = rejected.rate() {
            // The window is in whole seconds there.
            let window = Some(rate.window()).filter(|window| window.subsec_nanos() == 0);
            let window =
                window.map_or_else(String::new, |window| format!(";w={}", window.as_secs()));
            policies.push(format!("\"{policy}/rate\";q={}{window}", rate.starts()));
        }
        if let Some(each) = rejected.each {
            policies.push(format!("\"{policy}/each\";q={each};{unit}"));
        }
        if let Some((limit, cap)) = rejected.further() {
            policies.push(format!("\"{policy}/{limit}\";q={cap};{unit}"));
        }
        let is_of_time = rejected.by_time().is_some() && !self.is_tenant_full();
        let next = rejected.ends_in.filter(|_| is_of_time);
        let next = next.map(|left| format!(";t={}", left.as_secs_f64().ceil())).unwrap_or_default();
        // What is left of the limit would show what other tenants use.
        let left = self.violated().map(|violated| format!("\"{violated}\";r=0{next}"));
        let left = left.map(|left| (RATE_LIMIT, left));
        let policies = Some(policies).filter(|all| !all.is_empty());
        let policies = policies.map(|all| (RATE_LIMIT_POLICY, all.join(", ")));
        policies.into_iter().chain(left).collect()
    }
}
