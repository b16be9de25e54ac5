//! Custom responses to refused requests: an error envelope like that of OpenAI, which its clients understand.
//!
//! ```sh
//! cargo run --example custom_rejection
//! ```

#![allow(clippy::print_stdout, reason = "shows the response")]

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use serde_json::json;
use tower::ServiceExt;
use tower_semaphore::limit::{BoxError, Refusal, RefusalReason};
use tower_semaphore::{ConcurrencyLimitLayer, Policy, Semaphore};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let semaphore = Semaphore::in_memory();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "chat")
        .limit(1)
        .wait_timeout(std::time::Duration::ZERO)
        .refusal(envelope)
        .build()?;
    let app = Router::new().route("/v1/chat/completions", post(|| async { "{}" })).layer(layer);

    // Shares its permits with the layer of this name, and takes the only one.
    let permit = semaphore.acquire("chat", &Policy::new(1)).await?;
    let refused = app.clone().oneshot(request()?).await?;
    println!("{:?} {}\n{:#?}", refused.version(), refused.status(), refused.headers());
    assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(refused.headers().contains_key(RETRY_AFTER));
    let body = refused.into_body().collect().await?.to_bytes();
    println!("{}", std::str::from_utf8(&body)?);

    permit.release().await?;
    let passed = app.oneshot(request()?).await?;
    println!("\nafter the release: {}", passed.status());
    assert_eq!(passed.status(), StatusCode::OK);

    semaphore.shutdown().await;
    Ok(())
}

/// Makes the response to a refused request.
fn envelope(refusal: &Refusal) -> Response<String> {
    let (kind, message) = match refusal.reason {
        RefusalReason::MissingKey => ("invalid_request_error", "The request names no tenant."),
        reason if reason.is_full() => ("rate_limit_error", "Too many requests are in flight."),
        _ => ("server_error", "The service cannot take your request right now."),
    };
    let code = refusal.reason.as_str();
    let error = json!({ "message": message, "type": kind, "param": null, "code": code });

    let mut response = Response::new(json!({ "error": error }).to_string());
    *response.status_mut() = refusal.status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    if let Some(after) = refusal.retry_after {
        headers.insert(RETRY_AFTER, after.as_secs().into());
    }
    response
}

fn request() -> http::Result<Request<Body>> {
    Request::post("/v1/chat/completions").body(Body::empty())
}
