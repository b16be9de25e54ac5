//! Calls the gateway as tenants and operators do, and checks the responses.

use std::time::Instant;

use futures_util::{SinkExt, StreamExt};
use http::StatusCode;
use reqwest::{Client, Response};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::{self, Message};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};
use tower_semaphore::limit::BoxError;

use crate::llm::QUOTA;
use crate::provider::Provider;

const PROMPT: &str = "one two three four five six";

/// Runs the whole demo, and tells the gateway to stop.
pub(crate) async fn run(
    url: &str,
    password: &str,
    provider: &Provider,
    stop: &watch::Sender<bool>,
) -> Result<(), BoxError> {
    let client = Client::new();
    keys(&client, url).await?;
    shares(&client, url, provider).await?;
    conversation(url).await?;
    operators(&client, url, password).await?;
    shutdown(&client, url, stop).await
}

async fn keys(client: &Client, url: &str) -> Result<(), BoxError> {
    let response = chat(client, url, "wrong").await?;
    println!("a wrong key: {}", response.status());
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);

    let response = chat(client, url, "acme").await?;
    assert_eq!(response.status(), StatusCode::OK);
    let tokens = response.text().await?;
    println!("acme's answer: {} events", tokens.matches("data: ").count());
    assert!(tokens.ends_with("data: [DONE]\n\n"));
    Ok(())
}

async fn shares(client: &Client, url: &str, provider: &Provider) -> Result<(), BoxError> {
    let begin = Instant::now();
    let mut requests = JoinSet::new();
    for tenant in ["hobby", "acme"].repeat(8) {
        let (client, url) = (client.clone(), url.to_owned());
        requests.spawn(async move {
            let response = chat(&client, &url, tenant).await?;
            let status = response.status();
            response.bytes().await?;
            Ok::<_, BoxError>(status)
        });
    }
    while let Some(status) = requests.join_next().await {
        assert_eq!(status??, StatusCode::OK);
    }
    let seen = provider.seen();
    println!(
        "8 requests each at once: the provider had {} at a time, {} of hobby, {} of acme; {} ms",
        seen.peak,
        seen.peaks["hobby"],
        seen.peaks["acme"],
        begin.elapsed().as_millis()
    );
    assert!(seen.peak <= QUOTA as usize);
    assert_eq!((seen.peaks["hobby"], seen.peaks["acme"]), (2, 4));
    Ok(())
}

async fn conversation(url: &str) -> Result<(), BoxError> {
    let mut socket = open(url).await?;
    socket.send(Message::text(PROMPT)).await?;
    let mut tokens = 0;
    while let Some(message) = socket.next().await {
        tokens += 1;
        if message?.into_text()?.as_str() == "[DONE]" {
            break;
        }
    }
    println!("hobby's socket: {tokens} tokens");
    assert_eq!(tokens, 7);

    let Err(error) = open(url).await else { return Err("hobby has two sockets".into()) };
    let Some(tungstenite::Error::Http(response)) = error.downcast_ref() else { return Err(error) };
    println!("hobby's second socket: {}", response.status());
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    socket.close(None).await?;
    Ok(())
}

async fn operators(client: &Client, url: &str, password: &str) -> Result<(), BoxError> {
    let response = client.get(format!("{url}/admin")).send().await?;
    println!("the operator's page without a password: {}", response.status());
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);

    let page = client.get(format!("{url}/admin")).basic_auth("operator", Some(password));
    assert_eq!(page.send().await?.status(), StatusCode::OK);

    let metrics = client.get(format!("{url}/metrics")).basic_auth("operator", Some(password));
    let metrics = metrics.send().await?.error_for_status()?.text().await?;
    let mut waited = metrics.lines().filter(|line| line.contains("acquired_after_wait"));
    assert!(waited.clone().any(|line| line.contains(r#"tenant="hobby""#)));
    waited.by_ref().for_each(|line| println!("{line}"));
    Ok(())
}

async fn shutdown(client: &Client, url: &str, stop: &watch::Sender<bool>) -> Result<(), BoxError> {
    let mut socket = open(url).await?;
    let mut answer = chat(client, url, "acme").await?;
    answer.chunk().await?;
    stop.send_replace(true);

    let mut tokens = Vec::new();
    while let Some(chunk) = answer.chunk().await? {
        tokens.extend_from_slice(&chunk);
    }
    println!("a stream that was open at shutdown ended with {:?}", last_line(&tokens));
    assert_eq!(last_line(&tokens), "data: [DONE]");

    let farewell = socket.next().await.ok_or("the socket was cut off")??;
    println!("a socket that was open at shutdown: {farewell:?}");
    assert!(farewell.is_close());
    Ok(())
}

async fn chat(client: &Client, url: &str, tenant: &str) -> reqwest::Result<Response> {
    let request = client.post(format!("{url}/v1/chat")).bearer_auth(format!("{tenant}-key"));
    request.body(PROMPT).send().await
}

/// Opens a socket of the tenant `hobby`, which may have one.
async fn open(url: &str) -> Result<WebSocketStream<MaybeTlsStream<TcpStream>>, BoxError> {
    let mut request =
        format!("ws{}/v1/live", url.trim_start_matches("http")).into_client_request()?;
    request.headers_mut().insert("authorization", "Bearer hobby-key".parse()?);
    Ok(connect_async(request).await?.0)
}

fn last_line(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap_or_default().trim_end().lines().last().unwrap_or_default()
}
