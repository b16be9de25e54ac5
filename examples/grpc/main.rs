//! A tonic server that answers two calls at a time, streams included, and its client.
//!
//! ```sh
//! cargo run -p example-grpc              # serves grpc.health.v1.Health on 127.0.0.1:3000
//! cargo run -p example-grpc -- --demo    # calls itself and ends
//! ```
//!
//! The service is that of `tonic-health`, whose code is generated already; replace it with yours. Permits are counted
//! in this process; with `Semaphore::redis(url)`, all replicas share them.

#![allow(clippy::print_stdout, reason = "says what it saw")]

#[path = "../shared/signals.rs"]
mod signals;

use std::time::Duration;

use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tower_semaphore::limit::BoxError;
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let semaphore = Semaphore::in_memory();
    let two_calls = ConcurrencyLimitLayer::builder(&semaphore, "calls")
        .limit(2)
        .wait_timeout(Duration::from_millis(200))
        .build()?;

    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(two_calls).add_service(health);

    if std::env::args().any(|arg| arg == "--demo") {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}", listener.local_addr()?);
        tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        demo(Endpoint::try_from(url)?.connect().await?).await?;
    } else {
        println!("watch the health of 127.0.0.1:3000 three times: the third watch is rejected");
        server.serve_with_shutdown("127.0.0.1:3000".parse()?, signals::stopped()).await?;
    }
    semaphore.shutdown().await;
    Ok(())
}

async fn demo(channel: Channel) -> Result<(), BoxError> {
    let mut client = HealthClient::new(channel);
    let request = HealthCheckRequest::default;

    // A watch is an endless stream: it holds its permit until it is dropped.
    let mut first = client.watch(request()).await?.into_inner();
    let second = client.watch(request()).await?.into_inner();
    println!("first watch:  {:?}", first.message().await?);

    let status = client.check(request()).await.expect_err("both permits are in use");
    println!("a check:      {:?}, {}", status.code(), status.message());
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);

    drop(second);
    let answer = client.check(request()).await?.into_inner();
    println!("after a drop: {answer:?}");
    Ok(())
}
