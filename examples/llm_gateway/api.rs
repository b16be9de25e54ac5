//! The API for tenants: one answer as a stream of events, or a conversation over a WebSocket.

use std::future::pending;
use std::time::Duration;

use axum::extract::ws::{CloseFrame, Message, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{Extension, State};
use axum::middleware::from_fn_with_state;
use axum::response::Response;
use axum::routing::{any, post};
use axum::{Router, body::Body};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use http::StatusCode;
use http::header::{CONNECTION, TRANSFER_ENCODING};
use http::request::Parts;
use tokio::sync::watch;
use tower_semaphore::limit::{BoxError, ExtensionKey};
use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Permit, Semaphore};

use crate::llm::Llm;
use crate::tenants::{ApiKeys, Tenant, authenticate};

#[derive(Clone)]
struct Api {
    llm: Llm,
    stopping: watch::Receiver<bool>,
}

/// The routes for tenants, behind their API keys.
pub(crate) fn router(
    semaphore: &Semaphore,
    llm: Llm,
    stopping: watch::Receiver<bool>,
) -> Result<Router, ConfigError> {
    // An open socket costs memory here and nothing at the provider, so it has its own limit.
    let sockets = ConcurrencyLimitLayer::builder(semaphore, "sockets")
        .key(ExtensionKey::<Tenant>::new())
        .limit_by(|_: &Name, parts: &Parts| Tenant::plan_of(parts).sockets())
        // Lets a client reconnect before its last socket is noticed to be gone.
        .wait_timeout(Duration::from_millis(500))
        .build()?;
    Ok(Router::new()
        .route("/v1/chat", post(chat))
        .route("/v1/live", any(live).layer(sockets))
        // Outermost: what it rejects takes no permit.
        .route_layer(from_fn_with_state(ApiKeys::new(), authenticate))
        .with_state(Api { llm, stopping }))
}

/// Streams one answer. A refusal of the quota is a response like any other.
async fn chat(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    prompt: String,
) -> Result<Response, StatusCode> {
    let answer = api.llm.ask(tenant, prompt).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    // The body of the response is that of the provider, and holds the permit.
    let mut response = answer.map(Body::new);
    for of_one_hop in [CONNECTION, TRANSFER_ENCODING] {
        response.headers_mut().remove(of_one_hop);
    }
    Ok(response)
}

/// Opens a socket. The handler keeps the permit, because the response to an upgrade ends at once.
async fn live(
    State(api): State<Api>,
    Extension(tenant): Extension<Tenant>,
    permit: Permit,
    upgrade: WebSocketUpgrade,
) -> Response {
    upgrade.on_upgrade(move |socket| converse(api, tenant, permit, socket))
}

/// Answers each prompt, until the client leaves, the permit is lost, or this process stops. A new prompt interrupts the
/// answer to the last one.
async fn converse(mut api: Api, tenant: Tenant, permit: Permit, mut socket: WebSocket) {
    let mut answer: Option<BoxStream<'static, Result<String, BoxError>>> = None;
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                Some(Ok(Message::Text(prompt))) => {
                    answer = Some(api.llm.clone().tokens(tenant, prompt.to_string()));
                }
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                _ => return,
            },
            token = next(&mut answer) => {
                let text = match token {
                    Some(Ok(token)) => token,
                    Some(Err(error)) => {
                        answer = None;
                        error.to_string()
                    }
                    None => {
                        answer = None;
                        continue;
                    }
                };
                if socket.send(Message::text(text)).await.is_err() {
                    return;
                }
            },
            () = permit.lost() => return close(socket, close_code::AGAIN, "permit lost").await,
            () = stopped(&mut api.stopping) => {
                return close(socket, close_code::AWAY, "shutting down").await;
            }
        }
    }
}

/// The next token of an answer; never ready without one.
async fn next<S: StreamExt + Unpin>(answer: &mut Option<S>) -> Option<S::Item> {
    match answer {
        Some(answer) => answer.next().await,
        None => pending().await,
    }
}

/// Returns once this process is told to stop.
pub(crate) async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone.
    let _ = stopping.wait_for(|stop| *stop).await;
}

async fn close(mut socket: WebSocket, code: u16, reason: &'static str) {
    let frame = CloseFrame { code, reason: reason.into() };
    // A client that has left already needs none.
    let _ = socket.send(Message::Close(Some(frame))).await;
}
