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
use tokio::time::timeout;
use tower_semaphore::limit::{BoxError, ExtensionKey};
use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Name, Permit, Semaphore};

use crate::llm::Llm;
use crate::tenants::{ApiKeys, Tenant, authenticate};

/// How long a client may take to read a message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for the last message, which a shutdown waits for.
const FAREWELL_TIMEOUT: Duration = Duration::from_secs(1);

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

/// Talks until the client leaves, the permit is lost, or this process stops; then it says so.
async fn converse(mut api: Api, tenant: Tenant, permit: Permit, mut socket: WebSocket) {
    let (code, reason) = tokio::select! {
        // Dropping it ends an answer, and a write that the client does not read.
        () = talk(&api.llm, tenant, &mut socket) => return,
        () = permit.lost() => (close_code::AGAIN, "permit lost"),
        () = stopped(&mut api.stopping) => (close_code::AWAY, "shutting down"),
    };
    let frame = CloseFrame { code, reason: reason.into() };
    // A client that has left, or does not read, gets none.
    let _ = send(&mut socket, Message::Close(Some(frame)), FAREWELL_TIMEOUT).await;
}

/// Answers each prompt, until the client leaves or reads no more. A new prompt interrupts the answer to the last one.
async fn talk(llm: &Llm, tenant: Tenant, socket: &mut WebSocket) {
    let mut answer: Option<BoxStream<'static, Result<String, BoxError>>> = None;
    loop {
        tokio::select! {
            message = socket.recv() => match message {
                Some(Ok(Message::Text(prompt))) => {
                    answer = Some(llm.clone().tokens(tenant, prompt.to_string()));
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
                if send(socket, Message::text(text), WRITE_TIMEOUT).await.is_err() {
                    return;
                }
            },
        }
    }
}

/// Sends a message. A client that does not read would hold its permits without end, and the shutdown.
async fn send(socket: &mut WebSocket, message: Message, within: Duration) -> Result<(), BoxError> {
    timeout(within, socket.send(message)).await??;
    Ok(())
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

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use futures_util::SinkExt;
    use socket2::SockRef;
    use tokio::net::{TcpListener, TcpSocket, TcpStream};
    use tokio::sync::watch;
    use tokio::time::{sleep, timeout};
    use tokio_tungstenite::WebSocketStream;
    use tokio_tungstenite::tungstenite::Message;
    use tokio_tungstenite::tungstenite::client::IntoClientRequest;
    use tower_semaphore::{Name, Semaphore};

    use crate::llm::{self, Llm};
    use crate::provider::{self, Provider};

    struct Running {
        semaphore: Semaphore,
        address: SocketAddr,
        stop: watch::Sender<bool>,
    }

    impl Running {
        async fn start() -> Self {
            let semaphore = Semaphore::in_memory();
            let provider = provider::serve(Arc::new(Provider::default())).await.unwrap();
            let llm = Llm::new(&llm::quota(&semaphore).unwrap(), provider);
            let stop = watch::Sender::new(false);
            let app = super::router(&semaphore, llm, stop.subscribe()).unwrap();
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            tokio::spawn(async { axum::serve(listener, app).await });
            Self { semaphore, address, stop }
        }

        /// A socket of `hobby` with small buffers at this end.
        async fn open(&self) -> WebSocketStream<TcpStream> {
            let socket = TcpSocket::new_v4().unwrap();
            SockRef::from(&socket).set_recv_buffer_size(4096).unwrap();
            let stream = socket.connect(self.address).await.unwrap();
            let url = format!("ws://{}/v1/live", self.address);
            let mut request = url.into_client_request().unwrap();
            let key = "Bearer hobby-key".parse().unwrap();
            request.headers_mut().insert("authorization", key);
            tokio_tungstenite::client_async(request, stream).await.unwrap().0
        }

        /// Sends prompts, whose answers are not read, until the server reads no more.
        async fn fill(&self, socket: &mut WebSocketStream<TcpStream>) {
            let prompt = "x".repeat(1_500_000);
            for _ in 0..20 {
                let sent = socket.send(Message::text(prompt.clone()));
                if timeout(Duration::from_secs(1), sent).await.is_err() {
                    return;
                }
                // The next prompt would interrupt an answer that has not begun.
                sleep(Duration::from_millis(500)).await;
            }
            panic!("the server reads on");
        }

        async fn in_use(&self) -> u64 {
            let sockets = self.semaphore.inspect(Name::new("sockets").part("hobby")).await.unwrap();
            let quota = self.semaphore.inspect(llm::NAME).await.unwrap();
            sockets.in_use + quota.in_use
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_socket_that_is_not_read_is_closed() {
        let running = Running::start().await;
        let mut socket = running.open().await;
        running.fill(&mut socket).await;
        assert!(running.in_use().await > 0);
        let end = Instant::now() + super::WRITE_TIMEOUT + Duration::from_secs(10);
        while running.in_use().await > 0 {
            assert!(Instant::now() < end, "it holds permits without end");
            sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_socket_that_is_not_read_does_not_hold_up_a_shutdown() {
        let running = Running::start().await;
        let mut socket = running.open().await;
        running.fill(&mut socket).await;
        let began = Instant::now();
        running.stop.send_replace(true);
        // `main` waits for the same.
        let ended = timeout(Duration::from_secs(20), async {
            while running.in_use().await > 0 {
                sleep(Duration::from_millis(20)).await;
            }
        });
        ended.await.expect("it ends");
        assert!(began.elapsed() < super::WRITE_TIMEOUT / 2, "{:?}", began.elapsed());
    }
}
