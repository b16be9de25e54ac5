//! Real gateway processes, and the upstream behind them.

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::any;
use futures_util::StreamExt;
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as HyperClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;

/// A gateway process, killed when this is dropped.
pub(crate) struct Gateway {
    process: Child,
    url: String,
}

impl Gateway {
    /// Starts it with `--upstream` and further arguments, on a free port.
    pub(crate) fn start(upstream: &str, args: &[&str]) -> Self {
        let mut command = Self::command();
        command.args(["--listen", "127.0.0.1:0", "--upstream", upstream]).args(args);
        Self::running(command.spawn().unwrap())
    }

    /// Returns the program without arguments; its stdout is read.
    pub(crate) fn command() -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_gateway"));
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        // The checks may set it for examples.
        command.env_remove("REDIS_URL").env_remove("ETCD_URL");
        command
    }

    /// Waits until a started process listens.
    pub(crate) fn running(process: Child) -> Self {
        Self::running_unread(process).0
    }

    /// The same, with the rest of its stdout.
    pub(crate) fn running_unread(mut process: Child) -> (Self, BufReader<ChildStdout>) {
        let mut line = String::new();
        let mut stdout = BufReader::new(process.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let url = line.trim().strip_prefix("listening on ").expect("the line it prints").to_owned();
        (Self { process, url }, stdout)
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Kills it with SIGKILL, so that nothing is released.
    pub(crate) fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args(["-s", name, &pid]).status().unwrap().success());
    }

    /// Waits for the process. Returns its exit code.
    pub(crate) async fn exit(mut self) -> Option<i32> {
        let end = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < end, "the gateway does not end");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A service with little capacity, which counts its requests in flight.
pub(crate) struct Upstream {
    address: SocketAddr,
    state: Arc<Mutex<UpstreamState>>,
}

#[derive(Default)]
struct UpstreamState {
    seen: Seen,
    /// The requests in flight by `x-tenant`.
    tenants: HashMap<String, usize>,
    /// The requests in flight since when; of all, and by `x-tenant`.
    changes: Vec<(Instant, usize)>,
    tenant_changes: HashMap<String, Vec<(Instant, usize)>>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) in_flight: usize,
    pub(crate) peak: usize,
    /// The `x-number` of requests, in the order of their arrival.
    pub(crate) arrivals: Vec<u64>,
    pub(crate) total: usize,
}

#[derive(Deserialize)]
struct Work {
    /// How long it works before it answers.
    #[serde(default)]
    ms: u64,
    /// How long the body lasts after the head, with a chunk every 20 ms.
    #[serde(default)]
    stream_ms: u64,
}

struct InFlight(Arc<Mutex<UpstreamState>>, String);

impl InFlight {
    fn new(upstream: &Arc<Mutex<UpstreamState>>, number: Option<u64>, tenant: &str) -> Self {
        let mut state = upstream.lock().unwrap();
        state.tenant_changed(tenant, |count| count + 1);
        let seen = &mut state.seen;
        seen.in_flight += 1;
        seen.total += 1;
        seen.peak = seen.peak.max(seen.in_flight);
        seen.arrivals.extend(number);
        state.changed();
        drop(state);
        Self(Arc::clone(upstream), tenant.to_owned())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.0.lock().unwrap();
        state.seen.in_flight -= 1;
        state.tenant_changed(&self.1, |count| count - 1);
        state.changed();
    }
}

impl UpstreamState {
    fn tenant_changed(&mut self, tenant: &str, change: impl FnOnce(usize) -> usize) {
        let count = self.tenants.entry(tenant.to_owned()).or_default();
        *count = change(*count);
        let changes = self.tenant_changes.entry(tenant.to_owned()).or_default();
        changes.push((Instant::now(), *count));
    }

    fn changed(&mut self) {
        self.changes.push((Instant::now(), self.seen.in_flight));
    }
}

impl Upstream {
    pub(crate) async fn start() -> Self {
        let state = Arc::<Mutex<UpstreamState>>::default();
        let app = Router::new().fallback(any(work)).with_state(Arc::clone(&state));
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { address, state }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn seen(&self) -> Seen {
        self.state.lock().unwrap().seen.clone()
    }

    /// Returns when each request came.
    pub(crate) fn starts(&self) -> Vec<Instant> {
        let changes = &self.state.lock().unwrap().changes;
        let before = std::iter::once(0).chain(changes.iter().map(|change| change.1));
        let starts = changes.iter().zip(before).filter(|(change, before)| change.1 > *before);
        starts.map(|(change, _)| change.0).collect()
    }

    /// Returns the requests in flight of an `x-tenant`.
    #[cfg(feature = "admin")]
    pub(crate) fn in_flight_of(&self, tenant: &str) -> usize {
        self.state.lock().unwrap().tenants.get(tenant).copied().unwrap_or(0)
    }

    /// Returns the most requests of an `x-tenant` in flight at a time.
    pub(crate) fn peak_of(&self, tenant: &str) -> usize {
        let state = self.state.lock().unwrap();
        let changes = state.tenant_changes.get(tenant).map(Vec::as_slice).unwrap_or_default();
        changes.iter().map(|change| change.1).max().unwrap_or(0)
    }

    /// Returns the average number of requests in flight of an `x-tenant`.
    pub(crate) fn average_of(&self, tenant: &str, from: Instant, to: Instant) -> f64 {
        let state = self.state.lock().unwrap();
        let mut changes = state.tenant_changes.get(tenant).cloned().unwrap_or_default();
        changes.push((to, 0));
        let spans = changes.windows(2).map(|change| {
            let span = change[1].0.min(to).saturating_duration_since(change[0].0.max(from));
            span.as_secs_f64() * change[0].1 as f64
        });
        spans.sum::<f64>() / (to - from).as_secs_f64()
    }

    /// Returns how long in total more than this number were in flight.
    pub(crate) fn over(&self, limit: usize) -> Duration {
        let mut changes = self.state.lock().unwrap().changes.clone();
        changes.push((Instant::now(), 0));
        let passed = changes.windows(2).filter(|change| change[0].1 > limit);
        passed.map(|change| change[1].0 - change[0].0).sum()
    }
}

async fn work(
    State(state): State<Arc<Mutex<UpstreamState>>>,
    Query(work): Query<Work>,
    headers: HeaderMap,
) -> Body {
    let number = headers.get("x-number").and_then(|n| n.to_str().ok()?.parse().ok());
    let tenant = headers.get("x-tenant").and_then(|tenant| tenant.to_str().ok());
    let in_flight = InFlight::new(&state, number, tenant.unwrap_or_default());
    tokio::time::sleep(Duration::from_millis(work.ms)).await;
    if work.stream_ms == 0 {
        // Done before the answer: what the client does next is not in flight together with it.
        drop(in_flight);
        return Body::from("done");
    }
    let chunks = futures_util::stream::iter(0..work.stream_ms / 20).then(move |_| {
        let _holds = &in_flight;
        async {
            tokio::time::sleep(Duration::from_millis(20)).await;
            Ok::<_, std::convert::Infallible>(Bytes::from_static(b"chunk\n"))
        }
    });
    Body::from_stream(chunks)
}

/// An HTTP client that reads whole answers.
#[derive(Clone)]
pub(crate) struct Client {
    inner: HyperClient<HttpConnector, Full<Bytes>>,
}

impl Client {
    pub(crate) fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self { inner: HyperClient::builder(TokioExecutor::new()).build(connector) }
    }

    pub(crate) async fn get(&self, url: &str) -> StatusCode {
        self.send(http::Request::get(url)).await.0
    }

    pub(crate) async fn send(
        &self,
        request: http::request::Builder,
    ) -> (StatusCode, Result<Bytes, hyper::Error>) {
        let response = self.inner.request(request.body(Full::default()).unwrap()).await.unwrap();
        let status = response.status();
        (status, response.into_body().collect().await.map(|body| body.to_bytes()))
    }

    /// Like [`get`](Self::get), but the server may die meanwhile.
    pub(crate) async fn try_get(&self, url: &str) -> Option<StatusCode> {
        let request = http::Request::get(url).body(Full::default()).unwrap();
        self.inner.request(request).await.ok().map(|response| response.status())
    }

    /// Returns the head only; the body is left to the caller.
    pub(crate) async fn open(&self, url: &str) -> http::Response<hyper::body::Incoming> {
        let request = http::Request::get(url).body(Full::default()).unwrap();
        self.inner.request(request).await.unwrap()
    }
}
