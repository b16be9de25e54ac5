//! A WebSocket that holds its permit as long as it is open.
//!
//! The response to an upgrade ends at once, and would release the permit. The handler moves the permit into the task of
//! the socket instead. With a linger, it stays taken for a while after a client has vanished, for an upstream that
//! notices later; it is released at once after a client has closed its socket.
//!
//! ```sh
//! cargo run -p example-websocket              # then: websocat ws://127.0.0.1:3000/
//! cargo run -p example-websocket -- --demo    # connects to itself and ends
//! ```

#![allow(clippy::print_stdout, reason = "says what it saw")]

#[path = "../shared/signals.rs"]
mod signals;

use std::time::Duration;

use axum::Router;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use axum::routing::get;
use http::StatusCode;
use tokio::net::TcpListener;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite;
use tower_semaphore::limit::BoxError;
use tower_semaphore::{ConcurrencyLimitLayer, Permit, Semaphore};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let semaphore = Semaphore::in_memory();
    let one_socket = ConcurrencyLimitLayer::builder(&semaphore, "socket")
        .limit(1)
        .wait_timeout(Duration::from_millis(500))
        .linger(Duration::from_millis(200))
        .build()?;
    let app = Router::new().route("/", get(open)).layer(one_socket);

    if std::env::args().any(|arg| arg == "--demo") {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("ws://{}/", listener.local_addr()?);
        tokio::spawn(async { axum::serve(listener, app).await });
        demo(&url).await?;
    } else {
        let listener = TcpListener::bind("127.0.0.1:3000").await?;
        println!("try `websocat ws://127.0.0.1:3000/` twice: the second one gets a 429");
        axum::serve(listener, app).with_graceful_shutdown(signals::stopped()).await?;
    }
    semaphore.shutdown().await;
    Ok(())
}

/// Runs only for requests with a permit, which the extractor takes from the request.
async fn open(upgrade: WebSocketUpgrade, permit: Permit) -> Response {
    upgrade.on_upgrade(|socket| echo(socket, permit))
}

/// Echoes messages until the client leaves or the permit is lost.
///
/// The permit lingers when it is dropped: the layer cannot know how a socket ended. This task can.
async fn echo(mut socket: WebSocket, permit: Permit) {
    loop {
        let message = tokio::select! {
            message = socket.recv() => message,
            () = permit.lost() => return,
        };
        match message {
            Some(Ok(message @ (Message::Text(_) | Message::Binary(_)))) => {
                if socket.send(message).await.is_err() {
                    return;
                }
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(_))) => {
                // An error says that the backend did not answer; the permit ends with its lease then.
                let _ = permit.release().await;
                return;
            }
            Some(Err(_)) | None => return,
        }
    }
}

async fn demo(url: &str) -> Result<(), BoxError> {
    let (mut first, response) = connect_async(url).await?;
    println!("first socket:  {}", response.status());
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);

    let Err(tungstenite::Error::Http(response)) = connect_async(url).await else {
        return Err("the second socket was not rejected".into());
    };
    println!("second socket: {}", response.status());
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);

    first.close(None).await?;
    // The third socket waits until the task of the first has ended and released its permit.
    let (mut third, response) = connect_async(url).await?;
    println!("third socket:  {}, because the first one is closed", response.status());
    assert_eq!(response.status(), StatusCode::SWITCHING_PROTOCOLS);
    third.close(None).await?;
    Ok(())
}
