//! The operator's page: the state of all semaphores as HTML and JSON, and the actions of an operator.
//!
//! A client that the page serves can change limits, pause, drain and revoke. The page therefore requires a token
//! ([`with_token`]), unless you say that it need not ([`without_token`]). It accepts only requests whose `Host` is
//! loopback, until you [allow other hosts](AdminBuilder::allow_host). The page loads nothing from other servers, and all its links are relative: it
//! can be nested, and it works behind a proxy that strips a prefix.
//!
//! # Examples
//!
//! ```
//! use axum::Router;
//! use tower_semaphore::{ConfigError, Semaphore, admin};
//!
//! # fn example(token: &str) -> Result<Router, ConfigError> {
//! let semaphore = Semaphore::in_memory();
//! let admin = admin::with_token(semaphore, token).allow_host("ops.example").build()?;
//! // At `/ops` and `/ops/`; `Router::nest` would serve only the one of them that it is given.
//! let app: Router = Router::new().nest_service("/ops", admin);
//! # Ok(app) }
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! #     use tower::ServiceExt;
//! #     for path in ["/ops", "/ops/", "/ops/page/", "/ops/semaphores"] {
//! #         let request = http::Request::get(path).header("host", "ops.example");
//! #         let request = request.header("authorization", "Bearer 0123456789abcdef");
//! #         let app = example("0123456789abcdef").unwrap();
//! #         let response = app.oneshot(request.body(axum::body::Body::empty()).unwrap()).await;
//! #         assert_eq!(response.unwrap().status(), 200, "{path}");
//! #     }
//! # }
//! ```
//!
//! Behind a proxy that changes the last segment of the path, open the page at a path that ends with `/`.
//!
//! # Routes
//!
//! | request | response or effect |
//! |---|---|
//! | `GET /`, `GET /page/` | the page of all semaphores and overrides |
//! | `GET /page/{name}` | the page of one semaphore: state and limit, plots, tenants, processes, holders, queue |
//! | `GET /semaphores?most=100` | names, counts and limits; pass `next`, unless it is null, as `from` to get the next page; `away` says why some are missing |
//! | `GET /semaphores/{name}` | the limit in force (see [`Inspection::limit`]), tenants, processes, holders and waiters |
//! | `GET /overrides` | what operators set in place of policies |
//! | `PUT /semaphores/{name}/limit` | sets a limit: `{"limit": 5}` |
//! | `DELETE /semaphores/{name}/limit` | clears the limit; that of the policy applies again |
//! | `PUT /semaphores/{name}/rate` | sets a rate: `{"starts": 300, "window_ms": 60000}`. See [`Semaphore::set_rate`] |
//! | `DELETE /semaphores/{name}/rate` | clears the rate; that of the policy applies again |
//! | `PATCH /semaphores/{name}/tenants/{tenant}` | sets the cap and the weight of a tenant: `{"limit": 5, "weight": 2}`, or one of them; `null` clears it. See [`Semaphore::set_tenant`] |
//! | `PUT /semaphores/{name}/limits/{limit}/{value}` | sets the cap of a further limit, such as that of a route: `{"limit": 5}`. See [`Semaphore::set_further_limit`] |
//! | `DELETE /semaphores/{name}/limits/{limit}/{value}` | clears it; what requests ask for applies again |
//! | `POST /semaphores/{name}/pause`, `…/resume` | see [`Semaphore::pause`] |
//! | `POST /semaphores/{name}/drain` | drains, see [`Semaphore::drain`]; returns immediately unless `{"timeout_ms": 5000}` is set, at most 60000; `empty` says whether no request holds or waits |
//! | `DELETE /semaphores/{name}/permits/{id}` | see [`Semaphore::revoke`] |
//!
//! Names are given [as they are stored](Name::as_str), and percent-encoded once more in a URL: `acme/eu`
//! of the layer `tenant` is `tenant:acme%2Feu`, and `tenant:acme%252Feu` in a URL.
//!
//! Requests that change something need the header `x-semaphore-admin`, with any value. A page of another site cannot
//! make a browser send it (CSRF). Errors are problem documents (RFC 9457).

mod access;
mod actions;
mod builder;
mod extract;
mod fair_share;
mod history;
mod page;
mod plot;
mod problem;
mod view;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use axum::routing::{delete, get, patch, post, put};

use self::access::Access;
pub use self::builder::{AdminBuilder, with_token, without_token};
use self::history::History;
#[cfg(doc)]
use crate::name::Name;
#[cfg(doc)]
use crate::semaphore::Inspection;
use crate::semaphore::Semaphore;

/// The longest request body that is read.
const BODY_MAX: usize = 4096;

#[derive(Clone)]
struct Window {
    semaphore: Semaphore,
    history: Arc<History>,
}

fn routes(semaphore: Semaphore, access: Arc<Access>) -> Router {
    let window = Window { semaphore, history: Arc::default() };
    Router::new()
        .route("/", get(page::all))
        .route("/page/", get(page::all))
        .route("/page/{name}", get(page::one))
        .route("/admin.js", get(page::script))
        .route("/admin.css", get(page::style))
        .route("/semaphores", get(view::list))
        .route("/semaphores/{name}", get(view::inspect))
        .route("/overrides", get(view::overrides))
        .route("/semaphores/{name}/limit", put(actions::set_limit).delete(actions::clear_limit))
        .route("/semaphores/{name}/rate", put(actions::set_rate).delete(actions::clear_rate))
        .route("/semaphores/{name}/tenants/{tenant}", patch(actions::set_tenant))
        .route(
            "/semaphores/{name}/limits/{limit}/{value}",
            put(actions::set_further_limit).delete(actions::clear_further_limit),
        )
        .route("/semaphores/{name}/pause", post(actions::pause))
        .route("/semaphores/{name}/resume", post(actions::resume))
        .route("/semaphores/{name}/drain", post(actions::drain))
        .route("/semaphores/{name}/permits/{id}", delete(actions::revoke))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(middleware::from_fn_with_state(access, access::guard))
        .with_state(window)
}
