//! A gateway to an LLM whose provider allows six requests at a time and 6,000 tokens a minute, shared by tenants on two
//! plans.
//!
//! ```sh
//! cargo run -p example-llm-gateway             # prints what to try with curl
//! cargo run -p example-llm-gateway -- --demo   # calls itself and ends
//! ```
//!
//! The provider is a fake that this program starts itself: it streams the words of a prompt back. Set `REDIS_URL` to
//! share the quota between all processes that use the same Redis.

#![allow(clippy::print_stdout, reason = "prints what to try, and what it saw")]

#[path = "../shared/signals.rs"]
mod signals;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::env;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::extract::{Extension, Request, State};
use axum::middleware::{Next, from_fn};
use axum::response::sse::{Event, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Router, serve};
use bytes::Bytes;
use futures_util::stream::{self, Stream};
use http::header::{AUTHORIZATION, CONNECTION, TRANSFER_ENCODING, WWW_AUTHENTICATE};
use http::request::Parts;
use http::{HeaderMap, HeaderName, StatusCode};
use http_body_util::Full;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tower::{Layer, ServiceExt};
use tower_semaphore::limit::{BoxError, ExtensionKey};
use tower_semaphore::{
    Budget, ConcurrencyLimit, ConcurrencyLimitLayer, ConfigError, Name, OnUnavailable, Semaphore,
    feedback,
};

/// The concurrent requests that the provider allows, for all replicas together.
const QUOTA: u32 = 6;
/// The tokens a minute that it allows.
const TOKENS: u64 = 6_000;
/// The tokens that an answer may have.
const MAX_TOKENS: u64 = 50;
/// In this field the provider says what a request used. One that says so at the end of the answer is settled there, by
/// `Permit::settle`.
const USED: HeaderName = HeaderName::from_static("x-tokens-used");
/// Replicas of this gateway. Used only while Redis is unreachable.
const REPLICAS: u32 = 3;
/// How long a shutdown waits for open requests. Shorter than the time that the platform leaves between SIGTERM and
/// SIGKILL.
const DRAIN: Duration = Duration::from_secs(20);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    tracing_subscriber::fmt().init();
    let semaphore = match env::var("REDIS_URL") {
        Ok(url) => Semaphore::redis(&url)?,
        Err(_) => Semaphore::in_memory(),
    };
    let provider = Arc::new(Provider::default());
    let llm = Llm {
        client: quota(&semaphore)?.layer(Client::builder(TokioExecutor::new()).build_http()),
        url: start(Arc::clone(&provider)).await?,
    };
    let app = Router::new()
        .route("/v1/chat", post(chat))
        // Outside the quota: a request without a key takes no permit.
        .route_layer(from_fn(authenticate))
        .with_state(llm);

    let is_demo = env::args().any(|arg| arg == "--demo");
    let listener =
        TcpListener::bind(if is_demo { "127.0.0.1:0" } else { "127.0.0.1:3000" }).await?;
    let url = format!("http://{}/v1/chat", listener.local_addr()?);
    if is_demo {
        let (stop, stopped) = oneshot::channel::<()>();
        let stopped = async { _ = stopped.await };
        let server = tokio::spawn(run(listener, app, stopped, semaphore.clone()));
        demo(&url, &provider, stop).await?;
        server.await??;
        let quota = semaphore.inspect("llm").await?;
        println!("stopped: {} permits of the quota are in use", quota.in_use);
        assert_eq!(quota.in_use, 0);
        let tokens = quota.budgets.iter().find_map(|tokens| tokens.left()).unwrap_or(TOKENS);
        println!("of {TOKENS} tokens a minute, {tokens} are left");
        // 18 requests used 12 each, and were estimated at 56.
        assert!(tokens >= TOKENS - 18 * 12);
    } else {
        invite(&url);
        run(listener, app, signals::stopped(), semaphore.clone()).await?;
    }
    // Without this, permits that are still held would stay taken until their leases end.
    semaphore.shutdown().await;
    Ok(())
}

/// Serves until `stopped`. Then queued requests are rejected, and requests in flight finish unless that takes longer
/// than [`DRAIN`].
async fn run(
    listener: TcpListener,
    app: Router,
    stopped: impl Future<Output = ()> + Send + 'static,
    semaphore: Semaphore,
) -> io::Result<()> {
    let (begin, begun) = oneshot::channel();
    let stopped = async move {
        stopped.await;
        semaphore.stop_waiting();
        let _ = begin.send(());
    };
    let overdue = async {
        let _ = begun.await;
        sleep(DRAIN).await;
    };
    tokio::select! {
        served = serve(listener, app).with_graceful_shutdown(stopped) => served,
        () = overdue => {
            tracing::warn!("cutting off what is still open after {DRAIN:?}");
            Ok(())
        }
    }
}

// --- tenants --------------------------------------------------------------------------------------

/// The tenant of a request, in the request's extensions.
#[derive(Clone, Copy, Debug)]
struct Tenant {
    name: &'static str,
    /// The share of the quota while other tenants wait, relative to theirs.
    weight: u32,
    /// The most concurrent requests to the provider.
    requests: u32,
}

/// In a real program a table of the database, by the hash of each key, so that no comparison leaks a key by its time.
const TENANTS: [(&str, Tenant); 3] = [
    ("Bearer acme-key", Tenant { name: "acme", weight: 3, requests: 4 }),
    ("Bearer globex-key", Tenant { name: "globex", weight: 3, requests: 4 }),
    ("Bearer hobby-key", Tenant { name: "hobby", weight: 1, requests: 2 }),
];

/// Lets `ExtensionKey` use it as the key.
impl AsRef<[u8]> for Tenant {
    fn as_ref(&self) -> &[u8] {
        self.name.as_bytes()
    }
}

/// Puts the tenant of the API key into the request's extensions, or rejects the request with 401.
async fn authenticate(mut request: Request, next: Next) -> Response {
    let key = request.headers().get(AUTHORIZATION);
    let tenant = TENANTS.iter().find(|(known, _)| key.is_some_and(|key| key == known));
    let Some((_, tenant)) = tenant else {
        return (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")]).into_response();
    };
    request.extensions_mut().insert(*tenant);
    next.run(request).await
}

// --- the client of the provider, with the quota around it -----------------------------------------

/// The tokens of a prompt, in the request's extensions.
#[derive(Clone, Copy, Debug)]
struct Prompt(u64);

/// The quota, shared by the tenants according to their plans.
fn quota(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    let of = |parts: &Parts| parts.extensions.get::<Tenant>().copied();
    let tokens = Budget::new("tokens", TOKENS, Duration::from_secs(60))?;
    let estimate = |parts: &Parts| parts.extensions.get::<Prompt>().map_or(0, |prompt| prompt.0);
    ConcurrencyLimitLayer::builder(semaphore, "llm")
        .limit(QUOTA)
        .budget(tokens, move |parts: &Parts| estimate(parts) + MAX_TOKENS)
        .settle_by("tokens", feedback::header_number(USED))
        .fair_by(ExtensionKey::<Tenant>::new())
        .weight_by(move |_: &Name, parts: &Parts| of(parts).map_or(1, |tenant| tenant.weight))
        .each_by(move |_: &Name, parts: &Parts| of(parts).map_or(1, |tenant| tenant.requests))
        .wait_timeout(Duration::from_secs(10))
        .max_queue(20) // of each tenant
        .on_unavailable(OnUnavailable::Local(QUOTA / REPLICAS))
        .build()
}

#[derive(Clone)]
struct Llm {
    // Around the client and not on a route, so that no permit is held while a prompt is uploaded.
    client: ConcurrencyLimit<Client<HttpConnector, Full<Bytes>>>,
    url: String,
}

fn words(prompt: &[u8]) -> u64 {
    prompt.split(u8::is_ascii_whitespace).filter(|word| !word.is_empty()).count() as u64
}

/// Streams one answer. A refusal of the quota is a response like any other.
async fn chat(
    State(llm): State<Llm>,
    Extension(tenant): Extension<Tenant>,
    prompt: Bytes,
) -> Result<Response, StatusCode> {
    let request = http::Request::post(&llm.url)
        .header("x-user", tenant.name)
        .extension(tenant)
        .extension(Prompt(words(&prompt)))
        .body(Full::new(prompt))
        .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
    let answer = llm.client.oneshot(request).await.map_err(|_| StatusCode::BAD_GATEWAY)?;
    // The body is that of the provider's response, and holds the permit until its last token.
    let mut response = answer.map(Body::new);
    for of_one_hop in [CONNECTION, TRANSFER_ENCODING] {
        response.headers_mut().remove(of_one_hop);
    }
    Ok(response)
}

// --- the fake provider ----------------------------------------------------------------------------

/// The load that the provider sees: its requests in flight by user, and the most there have been.
#[derive(Debug, Default)]
struct Provider {
    now: Mutex<BTreeMap<String, usize>>,
    peaks: Mutex<BTreeMap<String, usize>>,
}

impl Provider {
    /// Counts a request of `user`. The entry `all` counts those of all users.
    fn begin(self: Arc<Self>, user: String) -> InFlight {
        let users = [user, "all".to_owned()];
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let mut peaks = self.peaks.lock().unwrap_or_else(PoisonError::into_inner);
        for user in &users {
            let now = now.entry(user.clone()).or_default();
            *now += 1;
            let peak = peaks.entry(user.clone()).or_default();
            *peak = (*now).max(*peak);
        }
        drop((now, peaks));
        InFlight { provider: self, users }
    }
}

struct InFlight {
    provider: Arc<Provider>,
    users: [String; 2],
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut now = self.provider.now.lock().unwrap_or_else(PoisonError::into_inner);
        self.users.iter().for_each(|user| *now.entry(user.clone()).or_default() -= 1);
    }
}

/// Starts the provider. Returns the URL that takes prompts.
async fn start(provider: Arc<Provider>) -> io::Result<String> {
    let app = Router::new().route("/v1/completions", post(complete)).with_state(provider);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/v1/completions", listener.local_addr()?);
    tokio::spawn(async { serve(listener, app).await });
    Ok(url)
}

async fn complete(
    State(provider): State<Arc<Provider>>,
    headers: HeaderMap,
    prompt: String,
) -> ([(HeaderName, String); 1], Sse<impl Stream<Item = Result<Event, Infallible>>>) {
    let user = headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or_default();
    let in_flight = provider.begin(user.to_owned());
    // The prompt, and as much again.
    let used = 2 * words(prompt.as_bytes());
    let words: Vec<_> = prompt.split_whitespace().chain(["[DONE]"]).map(str::to_owned).collect();
    let words = (words.into_iter(), in_flight);
    let answer = Sse::new(stream::unfold(words, |(mut words, in_flight)| async move {
        let word = words.next()?;
        sleep(Duration::from_millis(50)).await;
        Some((Ok(Event::default().data(word)), (words, in_flight)))
    }));
    ([(USED, used.to_string())], answer)
}

// --- what to try, and a run of it -----------------------------------------------------------------

fn invite(url: &str) {
    println!(
        r#"listening on {url}; try:

# A stream of tokens. Without a key, 401.
curl -N -H 'authorization: Bearer acme-key' {url} -d 'the quick brown fox jumps'

# Ten at once. `hobby` is on the free plan and has two at a time; `acme` pays, and has four.
for i in $(seq 10); do for t in hobby acme; do
  curl -s -o /dev/null -w "$t %{{http_code}} after %{{time_total}} s\n" -H "authorization: Bearer $t-key" \
    {url} -d 'one two three four five six seven eight' &
done; done; wait
"#
    );
}

/// Calls the gateway as tenants do, and checks the responses.
async fn demo(url: &str, provider: &Provider, stop: oneshot::Sender<()>) -> Result<(), BoxError> {
    let client = reqwest::Client::new();
    let ask = |tenant: &str| {
        let request = client.post(url).bearer_auth(format!("{tenant}-key"));
        request.body("one two three four five six").send()
    };
    let response = ask("wrong").await?;
    println!("a wrong key: {}", response.status());
    assert_eq!(response.status(), StatusCode::UNAUTHORIZED);

    let tokens = ask("acme").await?.error_for_status()?.text().await?;
    println!("acme's answer: {} events", tokens.matches("data: ").count());
    assert!(tokens.ends_with("data: [DONE]\n\n"));

    let begin = Instant::now();
    let mut requests = JoinSet::new();
    for tenant in ["hobby", "acme"].repeat(8) {
        let response = ask(tenant);
        requests.spawn(async { response.await?.error_for_status()?.bytes().await });
    }
    while let Some(answer) = requests.join_next().await {
        answer??;
    }
    let peaks = provider.peaks.lock().unwrap_or_else(PoisonError::into_inner).clone();
    println!("8 requests each at once: the provider had {peaks:?}; {:?}", begin.elapsed());
    assert_eq!((peaks["all"], peaks["hobby"], peaks["acme"]), (QUOTA as usize, 2, 4));

    let mut answer = ask("acme").await?;
    let mut tokens = answer.chunk().await?.unwrap_or_default().to_vec();
    let _ = stop.send(());
    while let Some(chunk) = timeout(DRAIN, answer.chunk()).await?? {
        tokens.extend_from_slice(&chunk);
    }
    println!("a stream that was open at shutdown ended with its last token");
    assert!(tokens.ends_with(b"data: [DONE]\n\n"));
    Ok(())
}
