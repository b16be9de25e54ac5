//! What operators see: metrics, and the page of the semaphore. Both behind a password.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use base64::prelude::{BASE64_STANDARD, Engine as _};
use http::StatusCode;
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use metrics_exporter_prometheus::PrometheusHandle;
use sha2::{Digest, Sha256};
use tower_semaphore::{Semaphore, admin};

/// The password of the user `operator`.
#[derive(Clone)]
pub(crate) struct Password {
    /// Of the header that has it. Compared instead of the password, so that the time tells nothing.
    hash: Arc<[u8; 32]>,
}

impl Password {
    pub(crate) fn new(password: &str) -> Self {
        let header = format!("Basic {}", BASE64_STANDARD.encode(format!("operator:{password}")));
        Self { hash: Arc::new(Sha256::digest(header).into()) }
    }
}

/// The routes for operators. Serve them on an address of their own where tenants can reach this one.
pub(crate) fn router(
    semaphore: &Semaphore,
    prometheus: PrometheusHandle,
    password: &Password,
) -> Router {
    Router::new()
        .route("/metrics", get(async move || prometheus.render()))
        // A page of another site cannot act through an operator's browser, though that sends the
        // password along: what changes something needs a header that only this page sends.
        .nest("/admin", admin::router(semaphore.clone()))
        .route_layer(from_fn_with_state(password.clone(), check))
}

async fn check(State(password): State<Password>, request: Request, next: Next) -> Response {
    let header = request.headers().get(AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
    let hash: [u8; 32] = Sha256::digest(header).into();
    if hash == *password.hash {
        return next.run(request).await;
    }
    let challenge = [(WWW_AUTHENTICATE, r#"Basic realm="operators", charset="UTF-8""#)];
    (StatusCode::UNAUTHORIZED, challenge).into_response()
}
