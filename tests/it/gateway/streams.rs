//! Upstreams over HTTP/2, and the number of streams that they allow.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use http_body_util::Empty;
use hyper::server::conn::http2;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio::sync::{Barrier, Semaphore};

use crate::support::gateway::{Client, Gateway};
use crate::support::redis::free_port;
use crate::support::wire::{Wire, WireServer};

/// An upstream that answers once this number of requests is there, and allows this number on one connection. Returns
/// its URL, and the number of connections there were.
async fn start(at_once: usize, streams: u32) -> (String, Arc<AtomicUsize>) {
    start_at("127.0.0.1:0", at_once, streams).await
}

async fn start_at(address: &str, at_once: usize, streams: u32) -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind(address).await.unwrap();
    let url = format!("h2c://{}", listener.local_addr().unwrap());
    let connections = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&connections);
    let all = Arc::new(Barrier::new(at_once));
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            counted.fetch_add(1, Ordering::SeqCst);
            let all = Arc::clone(&all);
            let serve = service_fn(move |_| {
                let all = Arc::clone(&all);
                async move {
                    all.wait().await;
                    Ok::<_, Infallible>(http::Response::new(Empty::<bytes::Bytes>::new()))
                }
            });
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder.max_concurrent_streams(streams);
            tokio::spawn(builder.serve_connection(TokioIo::new(socket), serve));
        }
    });
    (url, connections)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_that_allows_few_streams_gets_all_requests_at_once() {
    for (streams, expected) in [(1, 8), (3, 3), (100, 1)] {
        let (url, connections) = start(8, streams).await;
        let gateway =
            Gateway::start(&url, &["--limit", "8", "--wait", "0s", "--upstream-timeout", "5s"]);
        let client = Client::new();
        for _ in 0..2 {
            let all = (0..8).map(|_| client.get(gateway.url()));
            for status in futures_util::future::join_all(all).await {
                assert_eq!(status, 200, "{streams} streams");
            }
            // As many connections as needed, which are used again.
            assert_eq!(connections.load(Ordering::SeqCst), expected, "{streams} streams");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_requests_that_wait_for_a_connection_learn_that_there_is_none() {
    let port = free_port();
    let url = format!("h2c://127.0.0.1:{port}");
    let gateway =
        Gateway::start(&url, &["--limit", "20", "--wait", "0s", "--upstream-timeout", "5s"]);
    let client = Client::new();
    let all = futures_util::future::join_all((0..20).map(|_| client.get(gateway.url()))).await;
    assert!(all.iter().all(|status| *status == 502), "{all:?}");
    let (_, connections) = start_at(&format!("127.0.0.1:{port}"), 20, 3).await;
    let all = futures_util::future::join_all((0..20).map(|_| client.get(gateway.url()))).await;
    assert!(all.iter().all(|status| *status == 200), "{all:?}");
    assert_eq!(connections.load(Ordering::SeqCst), 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_opens_a_connection_and_leaves_stops_no_other() {
    let upstream = WireServer::start().await;
    let url = upstream.url().replace("http://", "h2c://");
    let gateway = Gateway::start(&url, &["--limit", "2", "--wait", "0s"]);
    let request = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";
    let mut first = Wire::connect(gateway.url()).await;
    first.send(request).await;
    // It accepts the connection, and sends nothing.
    let _silent = upstream.accept().await;
    let mut second = Wire::connect(gateway.url()).await;
    second.send(request).await;
    assert!(upstream.is_left_alone().await, "one connection is enough for both");
    drop(first);
    let waits = tokio::time::timeout(Duration::from_secs(3), upstream.accept());
    assert!(waits.await.is_ok(), "the second request opens one itself");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_wait_for_the_connection_that_there_is_if_no_other_can_be_opened() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("h2c://{}", listener.local_addr().unwrap());
    let (arrived, may_answer) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let (arrives, answers) = (Arc::clone(&arrived), Arc::clone(&may_answer));
    tokio::spawn(async move {
        let (socket, _) = listener.accept().await.unwrap();
        drop(listener);
        let serve = service_fn(move |_| {
            let (arrives, answers) = (Arc::clone(&arrives), Arc::clone(&answers));
            async move {
                arrives.add_permits(1);
                answers.acquire().await.unwrap().forget();
                Ok::<_, Infallible>(http::Response::new(Empty::<bytes::Bytes>::new()))
            }
        });
        let mut builder = http2::Builder::new(TokioExecutor::new());
        builder.max_concurrent_streams(1);
        builder.serve_connection(TokioIo::new(socket), serve).await
    });
    let gateway = Gateway::start(&url, &["--limit", "3", "--wait", "0s"]);
    let get = || {
        let (client, url) = (Client::new(), gateway.url().to_owned());
        tokio::spawn(async move { client.get(&url).await })
    };
    let first = get();
    arrived.acquire().await.unwrap().forget();
    let others = [get(), get()];
    // Neither is answered before the first one is.
    let both = tokio::time::timeout(Duration::from_millis(500), arrived.acquire()).await;
    assert!(both.is_err() && others.iter().all(|other| !other.is_finished()));
    may_answer.add_permits(3);
    assert_eq!(first.await.unwrap(), 200);
    for other in others {
        assert_eq!(other.await.unwrap(), 200);
    }
}
