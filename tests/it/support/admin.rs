//! The operator's page of a test, and requests to it.

use std::time::Duration;

use axum::Router;
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::Value;
use tower_semaphore::{Name, Policy, Semaphore, admin};

use super::http::{Server, text};

pub(crate) const HOSTILE: [&str; 7] = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "../../x",
    "a/b?c#d",
    "é&amp;",
    "%2F",
    "a'b",
];

/// One process, with the page nested at a path.
pub(crate) async fn window(semaphore: &Semaphore) -> Server {
    Server::start(
        Router::new()
            .nest_service("/ops", admin::without_token(semaphore.clone()).build().unwrap()),
    )
    .await
}

pub(crate) fn policy(limit: u32) -> Policy {
    // A revocation is remembered for a lease.
    let lease = Duration::from_secs(2);
    Policy::builder(limit).wait_timeout(Duration::from_secs(20)).lease(lease).build().unwrap()
}

/// As in a URL: percent-encoded once more.
pub(crate) fn segment(name: &Name) -> String {
    let encoded = name.as_str().bytes().map(|byte| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    encoded.collect()
}

/// Makes a request as an operator does.
pub(crate) async fn ask(
    server: &Server,
    method: Method,
    path: &str,
    body: &str,
) -> (StatusCode, Value) {
    let request = Request::builder()
        .method(method)
        .uri(format!("/ops{path}"))
        .header("host", "localhost")
        .header("x-semaphore-admin", "1")
        .body(Full::from(body.to_owned()))
        .unwrap();
    let response = server.send(request).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap_or(Value::Null))
}

pub(crate) async fn page(server: &Server, path: &str) -> String {
    let response = server.get(&format!("/ops{path}")).await;
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    let policy = response.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(response.headers()["cache-control"], "no-store");
    text(response).await
}
