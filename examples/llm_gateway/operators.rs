//! The routes for operators: metrics, and the admin page of the semaphore, both behind a password.

use std::ffi::OsString;
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
use tower_semaphore::limit::BoxError;
use tower_semaphore::{ConfigError, Semaphore, admin};

/// The password of the user `operator`.
pub(crate) enum Password {
    /// Never printed.
    Set(String),
    Generated(String),
}

impl Password {
    const LENGTH_MIN: usize = 16;

    /// Returns the password that `ADMIN_PASSWORD` sets, or else a random one.
    pub(crate) fn new(set: Option<OsString>) -> Result<Self, BoxError> {
        let Some(set) = set else {
            return Ok(Self::Generated(format!("{:016x}", getrandom::u64()?)));
        };
        // The error of `into_string` is the password.
        let set = set.into_string().map_err(|_| "ADMIN_PASSWORD is not valid UTF-8")?;
        let (length, min) = (set.chars().count(), Self::LENGTH_MIN);
        if length < min {
            return Err(
                format!("ADMIN_PASSWORD has {length} characters; expected {min} or more").into()
            );
        }
        Ok(Self::Set(set))
    }

    pub(crate) fn text(&self) -> &str {
        let (Self::Set(text) | Self::Generated(text)) = self;
        text
    }
}

/// The hash of the header with the password. Comparing hashes leaks nothing through timing.
#[derive(Clone)]
struct PasswordHash(Arc<[u8; 32]>);

impl PasswordHash {
    fn new(password: &Password) -> Self {
        let credentials = format!("operator:{}", password.text());
        let header = format!("Basic {}", BASE64_STANDARD.encode(credentials));
        Self(Arc::new(Sha256::digest(header).into()))
    }
}

/// The routes for operators. Serve them on a separate address if tenants can reach this one.
pub(crate) fn router(
    semaphore: &Semaphore,
    prometheus: PrometheusHandle,
    password: &Password,
) -> Result<Router, ConfigError> {
    // Requests to it need the password below.
    let admin = admin::without_token(semaphore.clone()).build()?;
    Ok(Router::new()
        .route("/metrics", get(async move || prometheus.render()))
        // Safe against requests from other sites, though a browser sends the password along: every change needs a
        // header that only this page sends.
        .nest_service("/admin", admin)
        .route_layer(from_fn_with_state(PasswordHash::new(password), check)))
}

async fn check(
    State(PasswordHash(password)): State<PasswordHash>,
    request: Request,
    next: Next,
) -> Response {
    let header = request.headers().get(AUTHORIZATION).map_or(&[][..], |value| value.as_bytes());
    let hash: [u8; 32] = Sha256::digest(header).into();
    if hash == *password {
        return next.run(request).await;
    }
    let challenge = [(WWW_AUTHENTICATE, r#"Basic realm="operators", charset="UTF-8""#)];
    (StatusCode::UNAUTHORIZED, challenge).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_that_is_set_is_long_enough_and_not_shown() {
        for (set, length) in [("", 0), ("secret", 6), ("fifteen letters", 15)] {
            let error = Password::new(Some(set.into())).err().unwrap().to_string();
            let expected = format!("ADMIN_PASSWORD has {length} characters; expected 16 or more");
            assert_eq!(error, expected);
        }
        let set = Password::new(Some("sixteen letters!".into())).unwrap();
        assert!(matches!(&set, Password::Set(text) if text == "sixteen letters!"));
    }

    #[test]
    fn a_password_that_is_not_set_is_generated() {
        let (one, other) = (Password::new(None).unwrap(), Password::new(None).unwrap());
        assert!(matches!(&one, Password::Generated(text) if text.len() == 16));
        assert_ne!(one.text(), other.text());
    }
}
