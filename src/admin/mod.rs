//! An operator's window: what goes on, as JSON and as a page, and the means to act on it.
//!
//! [`router`] is for mounting where you want, **behind your own authentication**: anyone who reaches it
//! can pause, drain and revoke. Nothing is loaded from elsewhere.
//!
//! ```
//! use axum::Router;
//! use tower_semaphore::{Semaphore, admin};
//!
//! let semaphore = Semaphore::in_memory();
//! let app: Router = Router::new().nest("/admin", admin::router(semaphore));
//! ```
//!
//! | request | what |
//! |---|---|
//! | `GET /` | the page: all semaphores, and what is set |
//! | `GET /page/{name}` | the page of one: holders, queue, plots of use and waiting |
//! | `GET /semaphores?most=100` | names and counts; `next`, if it is not null, is the `from` of the next page; `away` tells why some are missing |
//! | `GET /semaphores/{name}` | tenants, holders and waiters |
//! | `GET /overrides` | what is set in place of policies |
//! | `PUT /semaphores/{name}/limit` | sets a limit: `{"limit": 5}` |
//! | `DELETE /semaphores/{name}/limit` | the policy's own limit counts again |
//! | `PUT /semaphores/{name}/tenants/{tenant}/limit` | sets the cap of a tenant: `{"limit": 5}`; see [`Semaphore::set_tenant_limit`] |
//! | `PUT /semaphores/{name}/tenants/{tenant}/weight` | sets the weight of a tenant: `{"weight": 2}` |
//! | `DELETE /semaphores/{name}/tenants/{tenant}/limit`, `…/weight` | what its requests say counts again |
//! | `POST /semaphores/{name}/pause`, `…/resume` | see [`Semaphore::pause`] |
//! | `POST /semaphores/{name}/drain` | returns immediately unless `{"timeout_ms": 5000}` is set, at most 60000; `empty` tells whether nobody holds or waits |
//! | `DELETE /semaphores/{name}/permits/{id}` | see [`Semaphore::revoke`] |
//!
//! Names stand here [as they are stored](Name::as_str), percent-encoded once more in a URL: `acme/eu`
//! of the layer `tenant` is `tenant:acme%2Feu`, and in a URL `tenant:acme%252Feu`.
//!
//! Requests that change something must have a header `x-semaphore-admin`, whatever its value: a page of
//! another site cannot send that, so no operator's browser does it on such a page's behalf.
//! Errors are problem documents.

mod history;
mod json;
mod page;

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post, put};
use http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY};
use http::header::{X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use serde_json::json;

use self::history::History;
use crate::error::BackendError;
#[cfg(doc)]
use crate::name::Name;
use crate::semaphore::Semaphore;

/// What a request that changes something must have.
const MARK: HeaderName = HeaderName::from_static("x-semaphore-admin");

/// What a browser may do with these pages: load our script and style, and speak to us.
const POLICY: HeaderValue = HeaderValue::from_static(
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; base-uri 'none'; \
     form-action 'none'; frame-ancestors 'none'",
);

#[derive(Clone)]
struct Window {
    semaphore: Semaphore,
    history: Arc<History>,
}

/// The routes of the window. See the [module](self) for what they do, and for who must not reach them.
///
/// The plots show what was seen while someone looked at the page: 120 samples at the most, for the 64
/// names that were looked at last.
pub fn router(semaphore: Semaphore) -> Router {
    let window = Window { semaphore, history: Arc::default() };
    Router::new()
        .route("/", get(page::all))
        .route("/page/{name}", get(page::one))
        .route("/admin.js", get(page::script))
        .route("/admin.css", get(page::style))
        .route("/semaphores", get(json::list))
        .route("/semaphores/{name}", get(json::inspect))
        .route("/overrides", get(json::overrides))
        .route("/semaphores/{name}/limit", put(json::set_limit).delete(json::clear_limit))
        .route(
            "/semaphores/{name}/tenants/{tenant}/limit",
            put(json::set_tenant_limit).delete(json::clear_tenant_limit),
        )
        .route(
            "/semaphores/{name}/tenants/{tenant}/weight",
            put(json::set_tenant_weight).delete(json::clear_tenant_weight),
        )
        .route("/semaphores/{name}/pause", post(json::pause))
        .route("/semaphores/{name}/resume", post(json::resume))
        .route("/semaphores/{name}/drain", post(json::drain))
        .route("/semaphores/{name}/permits/{id}", delete(json::revoke))
        .layer(middleware::from_fn(guard))
        .with_state(window)
}

/// Lets nothing pass that another site can make a browser send, and tells browsers what not to do.
async fn guard(request: Request, next: Next) -> Response {
    let mut response = if request.method().is_safe() || request.headers().contains_key(&MARK) {
        next.run(request).await
    } else {
        let detail = format!("a request that changes something needs a header {MARK}");
        Problem::new(StatusCode::FORBIDDEN, detail).into_response()
    };
    let headers: &mut HeaderMap = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, POLICY);
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(X_FRAME_OPTIONS, HeaderValue::from_static("DENY"));
    headers.insert(REFERRER_POLICY, HeaderValue::from_static("no-referrer"));
    response
}

/// What is wrong with a request.
struct Problem {
    status: StatusCode,
    detail: String,
}

impl Problem {
    fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into() }
    }

    fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

impl From<BackendError> for Problem {
    fn from(error: BackendError) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, detail } = self;
        let title = status.canonical_reason().unwrap_or_default();
        let body = json!({ "title": title, "status": status.as_u16(), "detail": detail });
        (status, [(CONTENT_TYPE, "application/problem+json")], body.to_string()).into_response()
    }
}
