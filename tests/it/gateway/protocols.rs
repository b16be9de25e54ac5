//! HTTP/1.1 and HTTP/2 in, HTTP/1.1, HTTP/2 and TLS out.

use futures_util::stream;
use tokio::sync::mpsc;
use tonic::Code;
use tonic::transport::Endpoint;
use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};

use crate::support::eventually;
use crate::support::gateway::Gateway;
use crate::support::grpc::{Client, GrpcServer};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_passes_with_its_trailers() {
    let semaphore = Semaphore::in_memory();
    let unlimited =
        ConcurrencyLimitLayer::builder(&semaphore, "unlimited").limit(99).build().unwrap();
    let server = GrpcServer::start(unlimited).await;
    let url = format!("h2c://{}", server.address);
    let gateway = Gateway::start(&url, &["--limit", "1", "--wait", "0s"]);
    let client = async || {
        let endpoint = Endpoint::try_from(gateway.url().to_owned()).unwrap();
        Client::new(endpoint.connect().await.unwrap())
    };
    let (mut first, mut second) = (client().await, client().await);
    assert_eq!(first.unary("hello").await.unwrap(), "hello");
    assert_eq!(second.unary("hello").await.unwrap(), "hello");

    // In both directions at once, with the permit held for as long.
    let (said, says) = mpsc::channel::<String>(1);
    said.send("one".to_owned()).await.unwrap();
    let says = stream::unfold(says, async |mut says| says.recv().await.map(|text| (text, says)));
    let mut echo = first.bidi(says).await.unwrap();
    for text in ["two", "three"] {
        assert!(echo.message().await.unwrap().is_some());
        assert_eq!(second.unary("x").await.unwrap_err().code(), Code::ResourceExhausted);
        said.send(text.to_owned()).await.unwrap();
    }
    assert_eq!(echo.message().await.unwrap().as_deref(), Some("three"));
    drop(said);
    // The end, which the trailers report.
    assert_eq!(echo.message().await.unwrap(), None);
    eventually("the permit is free", async || second.clone().unary("x").await.is_ok()).await;
}

#[cfg(feature = "tls")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn https_upstreams_are_asked_and_checked() {
    use std::process::{Command, Stdio};

    use super::seen;
    use crate::support::redis::free_port;
    use crate::support::tls::Tls;
    use crate::support::until;

    let Some(tls) = Tls::new() else { return };
    let port = free_port();
    let setting = |name| tls.settings().into_iter().find(|(one, _)| *one == name).unwrap().1;
    let mut server = Command::new("openssl")
        .args(["s_server", "-www", "-quiet", "-accept", &format!("127.0.0.1:{port}")])
        .args(["-cert", &setting("tls-cert-file"), "-key", &setting("tls-key-file")])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until("it listens", || std::net::TcpStream::connect(("127.0.0.1", port)).is_ok());
    let upstream = format!("https://localhost:{port}");
    let start = |trusts: bool| {
        let mut command = Gateway::command();
        command.args(["--listen", "127.0.0.1:0", "--upstream", &upstream, "--limit", "9"]);
        if trusts {
            command.env("SSL_CERT_FILE", tls.authority());
        }
        Gateway::running(command.spawn().unwrap())
    };
    let request = "GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n";
    let (trusting, distrusting) = (start(true), start(false));
    let (status, _) = seen(&trusting, request).await;
    let (untrusted, problem) = seen(&distrusting, request).await;
    server.kill().unwrap();
    server.wait().unwrap();
    assert_eq!(status, 200);
    assert_eq!(untrusted, 502);
    assert!(problem.contains("the upstream cannot be reached"), "{problem}");
}
