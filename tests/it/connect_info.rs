//! What `limit::serve` tells requests of their connection.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::Connected;
use axum::routing::get;
use tokio::net::TcpListener;
use tower_semaphore::limit::{IncomingConnection, serve};

#[derive(Clone)]
struct Ends {
    local: SocketAddr,
    peer: SocketAddr,
}

impl Connected<IncomingConnection<'_, TcpListener>> for Ends {
    fn connect_info(connection: IncomingConnection<'_, TcpListener>) -> Self {
        // As one writes it over axum's `IncomingStream`, whose `io()` is a plain reference.
        Self {
            local: connection.io().local_addr().unwrap(),
            peer: connection.io().peer_addr().unwrap(),
        }
    }
}

/// A runtime of its own, which is left behind: one with a blocked worker cannot be dropped.
#[test]
fn what_a_connection_tells_may_be_read_twice() {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let address = runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let told =
            async |ConnectInfo(ends): ConnectInfo<Ends>| format!("{} {}", ends.local, ends.peer);
        let app = Router::new().route("/", get(told));
        tokio::spawn(serve(listener, app).connect_info::<Ends>().into_future());
        address
    });
    let answer = || {
        let mut socket = TcpStream::connect(address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(3))).unwrap();
        socket.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        socket.read_to_string(&mut answer).map(|_| answer)
    };
    let first = answer();
    let second = answer();
    runtime.shutdown_background();
    assert!(first.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")), "the first connection");
    assert!(second.is_ok_and(|answer| answer.starts_with("HTTP/1.1 200")), "and those after it");
}
