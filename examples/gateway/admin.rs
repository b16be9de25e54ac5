//! The operator's window, on an address of its own.

use std::io;
use std::net::{IpAddr, SocketAddr};

use axum::Router;
use axum::extract::Request;
use axum::http::header::HOST;
use axum::http::{StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tower_semaphore::{Semaphore, admin};

/// Serves it, and what `status` has, until the task is aborted.
pub(crate) async fn serve(
    address: SocketAddr,
    semaphore: Semaphore,
    status: Router,
) -> io::Result<JoinHandle<()>> {
    let listener = TcpListener::bind(address).await?;
    tracing::info!("admin on http://{}", listener.local_addr()?);
    let mut app = admin::router(semaphore).merge(status);
    if address.ip().is_loopback() {
        app = app.layer(middleware::from_fn(only_by_address));
    } else {
        tracing::warn!("whoever reaches {address} can pause, drain and revoke");
    }
    Ok(tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(%error, "the admin page is gone");
        }
    }))
}

/// A site may have its name lead to this machine, so that its pages could speak to us as their own.
async fn only_by_address(request: Request, next: Next) -> Response {
    let host = request.headers().get(HOST).and_then(|host| host.to_str().ok());
    let host = host.and_then(|host| host.parse::<Uri>().ok());
    let host = host.as_ref().and_then(Uri::host).unwrap_or_default();
    let plain = host.trim_start_matches('[').trim_end_matches(']');
    if host == "localhost" || plain.parse::<IpAddr>().is_ok() {
        return next.run(request).await;
    }
    (StatusCode::FORBIDDEN, "host: allowed: localhost, or an IP address\n").into_response()
}
