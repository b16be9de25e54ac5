//! The operator's page: what goes on, as JSON and as HTML, and the means to act on it.
//!
//! A client that reaches it can pause, drain and revoke. So it answers requests to loopback alone, by `Host`, until
//! [other hosts are allowed](AdminBuilder::allow_host); and it has a [token](AdminBuilder::token), for where your own
//! authentication is not in front of it. Nothing is loaded from elsewhere, and all links are relative: it can be
//! nested, and stand behind a proxy that strips a prefix.
//!
//! ```
//! use axum::Router;
//! use tower_semaphore::{ConfigError, Semaphore, admin};
//!
//! # fn example(token: &str) -> Result<Router, ConfigError> {
//! let semaphore = Semaphore::in_memory();
//! let admin = admin::builder(semaphore).allow_host("ops.example").token(token).build()?;
//! let app: Router = Router::new().nest("/ops/semaphores/", admin);
//! # Ok(app) }
//! ```
//!
//! Behind a proxy that changes the last segment of its path, nest it at a path that ends with `/`, or at the root.
//!
//! | request | what |
//! |---|---|
//! | `GET /`, `GET /page/` | the page: all semaphores, and what is set |
//! | `GET /page/{name}` | the page of one: state and limit, plots, tenants, processes, holders, queue |
//! | `GET /semaphores?most=100` | names, counts and limits; `next`, if it is not null, is the `from` of the next page; `away` tells why some are missing |
//! | `GET /semaphores/{name}` | the limit in force (see [`Inspection::limit`]), tenants, processes, holders and waiters |
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

mod access;
mod actions;
mod builder;
mod extract;
mod history;
mod page;
mod plot;
mod problem;
mod view;

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware;
use axum::routing::{delete, get, post, put};

use self::access::Access;
pub use self::builder::{AdminBuilder, builder};
use self::history::History;
#[cfg(doc)]
use crate::name::Name;
#[cfg(doc)]
use crate::semaphore::Inspection;
use crate::semaphore::Semaphore;

/// The longest body that is read.
const BODY_MAX: usize = 4096;

#[derive(Clone)]
struct Window {
    semaphore: Semaphore,
    history: Arc<History>,
}

/// The routes of the page, for loopback, without a token: those of a [`builder`] at which nothing was set.
///
/// The plots show what was seen while someone looked at the page: the last four minutes, for the 64 names that were
/// looked at last.
///
/// ```
/// use axum::Router;
/// use tower_semaphore::{Semaphore, admin};
///
/// let app: Router = Router::new().nest("/admin", admin::router(Semaphore::in_memory()));
/// ```
pub fn router(semaphore: Semaphore) -> Router {
    routes(semaphore, Arc::default())
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
        .route(
            "/semaphores/{name}/tenants/{tenant}/limit",
            put(actions::set_tenant_limit).delete(actions::clear_tenant_limit),
        )
        .route(
            "/semaphores/{name}/tenants/{tenant}/weight",
            put(actions::set_tenant_weight).delete(actions::clear_tenant_weight),
        )
        .route("/semaphores/{name}/pause", post(actions::pause))
        .route("/semaphores/{name}/resume", post(actions::resume))
        .route("/semaphores/{name}/drain", post(actions::drain))
        .route("/semaphores/{name}/permits/{id}", delete(actions::revoke))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(middleware::from_fn_with_state(access, access::guard))
        .with_state(window)
}
