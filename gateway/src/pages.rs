//! Serves the gateway's own pages, as it serves requests to the upstream: on an address of their own, and with the same
//! timeouts.

use std::future::pending;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{Response, StatusCode};
use axum::response::IntoResponse;
use hyper::body::Incoming;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tower::ServiceExt;

use super::body::ResponseBody;
use super::connections::Connections;
use super::problem::problem;
use super::progress::Bounds;
use super::server::{self, Listener, Peer, Serve};
use super::upload::RequestBody;

/// Connections to one address. Beyond that, and if none is idle, the oldest one is closed, so a probe is always answered.
const CONNECTIONS: usize = 16;

/// How long a page may take, with the request's body: longer than the longest drain, 60 s.
const ANSWER: Duration = Duration::from_secs(70);

struct Pages(Router);

/// Serves the pages until the task is aborted. `name` is what is logged; `others` are connections that can be closed if
/// file descriptors run out.
pub(crate) async fn serve(
    name: &str,
    address: SocketAddr,
    router: Router,
    bounds: Bounds,
    others: &Arc<Connections>,
) -> io::Result<JoinHandle<()>> {
    let socket = TcpListener::bind(address)
        .await
        .map_err(|error| io::Error::new(error.kind(), format!("--{name}: {address}: {error}")))?;
    tracing::info!("{name} on http://{}", socket.local_addr()?);
    let open = Connections::new(true);
    let listener = Listener { socket, most: CONNECTIONS, open, others: vec![Arc::clone(others)] };
    let pages = Arc::new(Pages(router));
    Ok(tokio::spawn(async move { server::run(listener, &pages, bounds, pending()).await }))
}

impl Serve for Pages {
    async fn serve(
        self: Arc<Self>,
        request: Request<Incoming>,
        from: Peer,
    ) -> Response<ResponseBody> {
        let (parts, incoming) = request.into_parts();
        let exchange = from.activity.begin(parts.version, None);
        let body = Body::new(RequestBody::new(&parts, incoming, &exchange, from.rests));
        let answer = self.0.clone().oneshot(Request::from_parts(parts, body));
        let response = match tokio::time::timeout(ANSWER, answer).await {
            Ok(response) => response.into_response(),
            Err(_) => problem(StatusCode::REQUEST_TIMEOUT, "the request took too long"),
        };
        response.map(|body| ResponseBody::new(body, exchange, None))
    }
}
