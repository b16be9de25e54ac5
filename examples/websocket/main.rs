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
use tokio::time::timeout;
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite;
use tower_semaphore::limit::BoxError;
use tower_semaphore::{ConcurrencyLimitLayer, ConfigError, Permit, Semaphore};

const NAME: &str = "socket";
/// How long a client may take to read a message.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let semaphore = Semaphore::in_memory();
    let app = app(&semaphore)?;

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

fn app(semaphore: &Semaphore) -> Result<Router, ConfigError> {
    let one_socket = ConcurrencyLimitLayer::builder(semaphore, NAME)
        .limit(1)
        .wait_timeout(Duration::from_millis(500))
        .linger(Duration::from_millis(200))
        .build()?;
    Ok(Router::new().route("/", get(open)).layer(one_socket))
}

/// Runs only for requests with a permit, which the extractor takes from the request.
async fn open(upgrade: WebSocketUpgrade, permit: Permit) -> Response {
    upgrade.on_upgrade(|socket| hold(socket, permit))
}

/// Holds the permit until the socket ends, or closes the socket if the permit is lost.
///
/// The permit lingers when it is dropped: the layer cannot know how a socket ended. This task can.
async fn hold(mut socket: WebSocket, permit: Permit) {
    tokio::select! {
        // Dropping it also ends a write that the client does not read.
        is_closed = echo(&mut socket) => if is_closed {
            // An error says that the backend did not answer; the permit ends with its lease then.
            let _ = permit.release().await;
        },
        () = permit.lost() => {}
    }
}

/// Echoes messages until the client leaves or reads no more. Returns whether it closed the socket.
async fn echo(socket: &mut WebSocket) -> bool {
    loop {
        match socket.recv().await {
            Some(Ok(message @ (Message::Text(_) | Message::Binary(_)))) => {
                // A client that does not read would hold its permit without end.
                if !matches!(timeout(WRITE_TIMEOUT, socket.send(message)).await, Ok(Ok(()))) {
                    return false;
                }
            }
            Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
            Some(Ok(Message::Close(_))) => return true,
            Some(Err(_)) | None => return false,
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::SinkExt;
    use socket2::SockRef;
    use tokio::net::{TcpListener, TcpSocket};
    use tokio::time::{sleep, timeout};
    use tokio_tungstenite::client_async;
    use tokio_tungstenite::tungstenite::Message;
    use tower_semaphore::Semaphore;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_socket_that_is_not_read_is_closed() {
        let semaphore = Semaphore::in_memory();
        let app = super::app(&semaphore).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async { axum::serve(listener, app).await });
        let in_use = async || semaphore.inspect(super::NAME).await.unwrap().in_use;

        let socket = TcpSocket::new_v4().unwrap();
        SockRef::from(&socket).set_recv_buffer_size(4096).unwrap();
        let stream = socket.connect(address).await.unwrap();
        let (mut socket, _) = client_async(format!("ws://{address}/"), stream).await.unwrap();
        let message = Message::text("x".repeat(1_000_000));
        let mut sent = 0;
        // Until the server, which writes, reads no more.
        while timeout(Duration::from_secs(1), socket.send(message.clone())).await.is_ok() {
            sent += 1;
            assert!(sent < 100, "the server reads on");
        }
        assert_eq!(in_use().await, 1);
        let freed = timeout(super::WRITE_TIMEOUT + Duration::from_secs(10), async {
            while in_use().await > 0 {
                sleep(Duration::from_millis(20)).await;
            }
        });
        freed.await.expect("it holds its permit without end");
    }
}
