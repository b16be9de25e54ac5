//! The upstream and its clients, which make requests and record what becomes of them.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::any;
use fastrand::Rng;
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Deserialize;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep, timeout_at};

use super::history::{End, Kind, MODELS, Recorder, Request, Stay, us};
use super::plan::SLOTS;

/// The key of requests that show the order: one permit, short work.
pub(crate) const ONE: usize = 0;
/// The key of short work, uploads, and clients that leave.
pub(crate) const FEW: usize = 1;
/// The key of streams, most of them longer than the lease.
pub(crate) const LONG: usize = 2;
/// The key with a rate, of which clients want more.
pub(crate) const RATED: usize = 3;
/// The key whose upstream now and then asks for a pause.
pub(crate) const PAUSED: usize = 4;
/// The key with a budget, of which clients want more.
pub(crate) const SPENT: usize = 5;
pub(crate) const KEYS: [&str; 6] = ["one", "few", "long", "rated", "paused", "spent"];
pub(crate) const LIMITS: [usize; 6] = [1, 3, 3, 5, 3, 4];
/// The highest estimate.
pub(crate) const ESTIMATE: u64 = 10;

/// Returns the rule of the gateways for a key, which is the first part of its requests' paths, too.
pub(crate) fn rule(key: usize) -> &'static str {
    if let RATED | PAUSED | SPENT = key { KEYS[key] } else { "gateway" }
}

/// Returns the name of a key's semaphore.
pub(crate) fn name(key: usize) -> String {
    let is_own = matches!(key, RATED | PAUSED | SPENT);
    if is_own { KEYS[key].to_owned() } else { format!("gateway:{}", KEYS[key]) }
}

/// How often a stream sends a frame.
const FRAME: Duration = Duration::from_millis(20);
const TEXT: &[u8] = b"chunk\n";
/// More than all buffers on the way can hold.
pub(crate) const MUCH: usize = 24 << 20;
const POSTED: usize = 64 << 10;

/// The gateways by slot, each with its number and address.
pub(crate) type Addresses = Arc<Mutex<[Option<(usize, SocketAddr)>; SLOTS]>>;

// ===== upstream =====

pub(crate) async fn upstream(recorder: Arc<Recorder>) -> String {
    let app = Router::new().fallback(any(work)).with_state(recorder);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    url
}

#[derive(Deserialize)]
struct Work {
    #[serde(default)]
    ms: u64,
    #[serde(default)]
    frames: u64,
    #[serde(default)]
    bytes: usize,
    #[serde(default)]
    later: bool,
    /// What it says that it used.
    #[serde(default)]
    used: u64,
}

/// A request at the upstream. It counts as cut off unless it reports that it is done.
struct InFlight {
    recorder: Arc<Recorder>,
    number: usize,
    stay: usize,
    whole: bool,
}

impl InFlight {
    fn new(recorder: Arc<Recorder>, number: usize) -> Self {
        let mut stay = 0;
        recorder.update(number, |request, now| {
            stay = request.stays.len();
            request.stays.push(Stay { from: now, to: None, whole: false });
        });
        Self { recorder, number, stay, whole: false }
    }

    /// Before the last bytes are sent: a request that comes because of them is not in flight together with this one.
    fn done(mut self) {
        self.whole = true;
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let (stay, whole) = (self.stay, self.whole);
        self.recorder.update(self.number, |request, now| {
            request.stays[stay].to = Some(now);
            request.stays[stay].whole = whole;
        });
    }
}

async fn work(
    State(recorder): State<Arc<Recorder>>,
    Query(work): Query<Work>,
    headers: HeaderMap,
    posted: Body,
) -> Response {
    let number = headers["x-number"].to_str().unwrap().parse().unwrap();
    let in_flight = InFlight::new(recorder, number);
    if posted.collect().await.is_err() {
        return Body::empty().into_response();
    }
    sleep(Duration::from_millis(work.ms)).await;
    if work.later {
        in_flight.done();
        return (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "1")], TEXT).into_response();
    }
    let frames = if work.bytes > 0 {
        work.bytes / (64 << 10)
    } else {
        usize::try_from(work.frames).unwrap()
    };
    if frames == 0 {
        in_flight.done();
        return ([("x-used", work.used.to_string())], TEXT).into_response();
    }
    let much = work.bytes > 0;
    let state = (Some(in_flight), 0);
    let body = futures_util::stream::unfold(state, move |(mut in_flight, sent)| async move {
        if sent == frames {
            return None;
        }
        let frame = if much {
            Bytes::from_static(&[b'x'; 64 << 10])
        } else {
            sleep(FRAME).await;
            Bytes::from_static(TEXT)
        };
        if sent + 1 == frames
            && let Some(in_flight) = in_flight.take()
        {
            in_flight.done();
        }
        Some((Ok::<_, std::convert::Infallible>(frame), (in_flight, sent + 1)))
    });
    Body::from_stream(body).into_response()
}

// ===== clients =====

/// What clients share.
pub(crate) struct Load {
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) addresses: Addresses,
    pub(crate) stop: AtomicBool,
    /// The number of tenants that share the permits of a key.
    pub(crate) tenants: usize,
    /// Whether most requests name a model.
    pub(crate) models: bool,
    /// Whether clients send several requests to one gateway, without a pause, so that permits are passed on there.
    pub(crate) bursts: bool,
    /// When the upstream asks for the next pause.
    pub(crate) next_pause: AtomicU64,
}

/// A connection that is closed when this is dropped.
struct Closing(AbortHandle);

impl Drop for Closing {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Load {
    /// Clients that make requests until they are stopped, about 160 requests a second together.
    pub(crate) fn start(self: &Arc<Self>, seed: u64) -> Vec<tokio::task::JoinHandle<()>> {
        let clients = [
            (ONE, 7, 40..160),
            (FEW, 10, 20..240),
            (LONG, 7, 50..400),
            (RATED, 9, 40..240),
            (PAUSED, 6, 60..300),
            (SPENT, 8, 40..240),
        ];
        self.ask_for_pause();
        let mut rng = Rng::with_seed(!seed);
        let mut tasks = Vec::new();
        for (key, count, think) in clients {
            for _ in 0..count {
                let (load, think) = (Arc::clone(self), think.clone());
                let mut rng = rng.fork();
                tasks.push(tokio::spawn(async move {
                    while !load.stop.load(Ordering::Relaxed) {
                        sleep(Duration::from_millis(rng.u64(think.clone()))).await;
                        let kind = kind(&mut rng, key);
                        if load.bursts && kind == Kind::Short {
                            let slot = rng.usize(..SLOTS);
                            for _ in 0..rng.u64(1..12) {
                                load.request_to(slot, key, KEYS[key], kind, &mut rng).await;
                            }
                        } else {
                            load.request(key, kind, &mut rng).await;
                        }
                    }
                }));
            }
        }
        tasks
    }

    /// Lets the upstream ask for the next pause when what a fault held back has come.
    pub(crate) fn ask_for_pause(&self) {
        self.next_pause.store(self.recorder.now() + 1_500_000, Ordering::Relaxed);
    }

    /// Returns whether a request is to be answered with a pause: one every few seconds, so that a request can wait
    /// between two for as long as shows that it waits in vain.
    fn is_pause_due(&self, key: usize, kind: Kind, rng: &mut Rng) -> bool {
        let (now, due) = (self.recorder.now(), self.next_pause.load(Ordering::Relaxed));
        let next = now + 1000 * rng.u64(4000..7000);
        let take =
            || self.next_pause.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed);
        key == PAUSED && kind == Kind::Short && now >= due && take().is_ok()
    }

    /// One request to any gateway, from beginning to end.
    pub(crate) async fn request(&self, key: usize, kind: Kind, rng: &mut Rng) {
        self.request_of(key, KEYS[key], kind, rng).await;
    }

    /// The same, for any tenant.
    pub(crate) async fn request_of(&self, key: usize, name: &str, kind: Kind, rng: &mut Rng) {
        self.request_to(rng.usize(..SLOTS), key, name, kind, rng).await;
    }

    async fn request_to(&self, slot: usize, key: usize, name: &str, kind: Kind, rng: &mut Rng) {
        let Some((gateway, address)) = self.addresses.lock().unwrap()[slot] else { return };
        let ms = match key {
            ONE => rng.u64(1..8),
            _ => rng.u64(5..40),
        };
        let frames = match kind {
            Kind::Stream | Kind::Leaving => rng.u64(10..120),
            _ => 0,
        };
        let stream = FRAME * u32::try_from(frames).unwrap();
        let later = self.is_pause_due(key, kind, rng);
        let estimate = if key == SPENT { rng.u64(1..=ESTIMATE) } else { 0 };
        let used = rng.u64(..=estimate);
        let tenant = if self.tenants > 1 { rng.usize(..self.tenants) } else { 0 };
        let model = Some(rng.usize(..=MODELS)).filter(|model| self.models && *model < MODELS);
        let number = self.recorder.sent(Request {
            key,
            tenant,
            model,
            gateway,
            kind,
            work: ms * 1000,
            stream: us(stream),
            later,
            estimate,
            used,
            sent: 0,
            stays: Vec::new(),
            head: None,
            last_frame: None,
            end: None,
        });
        let bytes = if kind == Kind::Slow { MUCH } else { 0 };
        let body = Full::from(if kind == Kind::Post { vec![b'x'; POSTED] } else { Vec::new() });
        let mut request = hyper::Request::builder()
            .method(if kind == Kind::Post { "POST" } else { "GET" })
            .uri(format!(
                "/{}?ms={ms}&frames={frames}&bytes={bytes}&later={later}&used={used}",
                rule(key)
            ))
            .header("host", "upstream")
            .header("x-key", name)
            .header("x-tenant", tenant)
            .header("x-number", number)
            .header("x-estimate", estimate)
            .body(body)
            .unwrap();
        if let Some(model) = model {
            request.headers_mut().insert("x-model", model.into());
        }
        let patience = match kind {
            Kind::Impatient => Duration::from_millis(rng.u64(1..200)),
            // Far past every bound, including those of a gateway that sleeps for a while.
            _ => Duration::from_secs(12),
        };
        let (closing, end) = self.ask(number, address, request, kind, patience, rng).await;
        // The note comes before the deed.
        self.recorder.update(number, |request, now| {
            request.end.get_or_insert((now, end));
        });
        drop(closing);
    }

    async fn ask(
        &self,
        number: usize,
        address: SocketAddr,
        request: hyper::Request<Full<Bytes>>,
        kind: Kind,
        patience: Duration,
        rng: &mut Rng,
    ) -> (Option<Closing>, End) {
        let until = Instant::now() + patience;
        let gave_up = if kind == Kind::Impatient { End::Left } else { End::Unanswered };
        let socket = TcpSocket::new_v4().unwrap();
        if kind == Kind::Slow {
            socket.set_recv_buffer_size(4096).unwrap();
        }
        let mut stream = match timeout_at(until, socket.connect(address)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(_)) => return (None, End::Broken),
            Err(_) => return (None, gave_up),
        };
        let _ = stream.set_nodelay(true);
        if kind == Kind::Slow {
            let end = match timeout_at(until, self.slow(number, &mut stream, &request, rng)).await {
                Ok(Some(end)) => end,
                Ok(None) => End::Broken,
                Err(_) => End::Unanswered,
            };
            // Closed at once: here, too, the note comes first.
            self.recorder.update(number, |request, now| request.end = Some((now, end.clone())));
            return (None, end);
        }
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
        let closing = Closing(tokio::spawn(connection).abort_handle());
        let response = match timeout_at(until, sender.send_request(request)).await {
            Ok(Ok(response)) => response,
            Ok(Err(_)) => return (Some(closing), End::Broken),
            Err(_) => return (Some(closing), gave_up),
        };
        let status = response.status().as_u16();
        self.recorder.update(number, |request, now| request.head = Some((now, status)));
        let mut body = response.into_body();
        let leave = match kind {
            Kind::Leaving => Instant::now() + Duration::from_millis(rng.u64(..1500)),
            Kind::Impatient => until,
            _ => Instant::now() + Duration::from_secs(12),
        };
        let mut length = 0;
        loop {
            match timeout_at(leave, body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    length += frame.data_ref().map_or(0, Bytes::len);
                    self.recorder.update(number, |request, now| request.last_frame = Some(now));
                }
                Ok(Some(Err(_))) => return (Some(closing), End::Cut),
                Ok(None) => break,
                Err(_) if matches!(kind, Kind::Leaving | Kind::Impatient) => {
                    return (Some(closing), End::Left);
                }
                Err(_) => return (Some(closing), End::Unanswered),
            }
        }
        let frames = self.recorder.lock().requests[number].stream / us(FRAME);
        let expected = TEXT.len() * usize::try_from(frames).unwrap().max(1);
        let whole = status != 200 || length == expected;
        (Some(closing), if whole { End::Whole } else { End::Short })
    }
}

impl Load {
    /// Reads the head, and then one byte a second. Returns `None` if the connection broke before the head.
    async fn slow(
        &self,
        number: usize,
        stream: &mut TcpStream,
        request: &hyper::Request<Full<Bytes>>,
        rng: &mut Rng,
    ) -> Option<End> {
        let mut text = format!("GET {} HTTP/1.1\r\n", request.uri());
        for (name, value) in request.headers() {
            text += &format!("{name}: {}\r\n", value.to_str().unwrap());
        }
        stream.write_all(format!("{text}\r\n").as_bytes()).await.ok()?;
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.ok()?);
        }
        let status = std::str::from_utf8(&head[9..12]).unwrap().parse().unwrap();
        self.recorder.update(number, |request, now| request.head = Some((now, status)));
        if status != 200 {
            return Some(End::Whole);
        }
        for _ in 0..rng.u64(1..4) {
            if stream.read_u8().await.is_err() {
                return Some(End::Cut);
            }
            sleep(Duration::from_secs(1)).await;
        }
        Some(End::Left)
    }
}

pub(crate) fn kind(rng: &mut Rng, key: usize) -> Kind {
    let dice = rng.u8(..100);
    match key {
        ONE => Kind::Short,
        FEW => match dice {
            0..15 => Kind::Impatient,
            15..40 => Kind::Post,
            _ => Kind::Short,
        },
        RATED | PAUSED | SPENT => match dice {
            0..10 => Kind::Impatient,
            _ => Kind::Short,
        },
        _ => match dice {
            0..4 => Kind::Slow,
            4..25 => Kind::Leaving,
            25..35 => Kind::Impatient,
            _ => Kind::Stream,
        },
    }
}
