//! The default response to a rejected request: a problem document.

use http::header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderName, HeaderValue, Response, StatusCode};
use serde_json::json;

use super::refusal::{Refusal, RefusalReason};
use super::refusal_response::{RefusalBody, RefusalResponse};

const RATE_LIMIT: HeaderName = HeaderName::from_static("ratelimit");
const RATE_LIMIT_POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
const PROBLEM: HeaderValue = HeaderValue::from_static("application/problem+json");

/// Status, `Retry-After`, `Cache-Control`, `RateLimit` headers, and a problem document (RFC 9457).
#[derive(Clone, Copy, Debug)]
pub(super) struct Problem {
    /// Whether to send `RateLimit-Policy` and `RateLimit` (draft-ietf-httpapi-ratelimit-headers-11).
    pub(super) rate_limit_fields: bool,
}

impl RefusalResponse for Problem {
    fn response(&self, refusal: &Refusal) -> Response<RefusalBody> {
        let status = refusal.status;
        let (kind, title) = match refusal.reason {
            reason if !reason.is_full() => {
                ("about:blank", status.canonical_reason().unwrap_or("Refused"))
            }
            _ if status == StatusCode::SERVICE_UNAVAILABLE => (
                "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                "Too many requests are in flight",
            ),
            _ => (
                "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "Too many requests of yours are in flight",
            ),
        };
        let mut problem = json!({
            "type": kind,
            "title": title,
            "status": status.as_u16(),
            "reason": refusal.reason.as_str(),
        });
        if refusal.reason == RefusalReason::CostTooHigh {
            problem["detail"] = json!(refusal.to_string());
        }
        if let Some(header) = &refusal.missing_header {
            problem["detail"] = json!(format!("the request has no {header} header"));
        }
        if refusal.reason.is_full() {
            problem["violated-policies"] = json!([refusal.violated()]);
        }

        let mut response = Response::new(RefusalBody::from(problem.to_string()));
        *response.status_mut() = status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, PROBLEM);
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        if let Some(after) = refusal.retry_after {
            headers.insert(RETRY_AFTER, after.as_secs().max(1).into());
        }
        if self.rate_limit_fields && refusal.reason.is_full() {
            for (name, value) in refusal.rate_limit_fields() {
                // Always a valid value, because the builder checks the layer's name.
                if let Ok(value) = HeaderValue::try_from(value) {
                    headers.insert(name, value);
                }
            }
        }
        response
    }
}

impl Refusal {
    /// The policy that was violated: the layer's, or the cap of each tenant.
    fn violated(&self) -> String {
        let policy = &self.policy;
        if self.is_tenant_full { format!("{policy}/each") } else { policy.to_string() }
    }

    /// The headers of draft-ietf-httpapi-ratelimit-headers-11: each policy, and what is left where it is known.
    fn rate_limit_fields(&self) -> [(HeaderName, String); 2] {
        let Self { policy, limit, .. } = self;
        let unit = "qu=\"concurrent-requests\"";
        let mut policies = format!("\"{policy}\";q={limit};{unit}");
        let mut left = format!("\"{policy}\";r=0");
        if let Some(each) = self.each {
            policies += &format!(", \"{policy}/each\";q={each};{unit}");
        }
        if self.is_tenant_full {
            // What is left of the limit would show what other tenants use.
            left = format!("\"{policy}/each\";r=0");
        }
        [(RATE_LIMIT_POLICY, policies), (RATE_LIMIT, left)]
    }
}
