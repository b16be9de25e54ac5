//! The access log: one line of JSON for each request, written when it is over.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::net::IpAddr;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use axum::http::request::Parts;
use axum::http::{Extensions, StatusCode, Version};
use serde::Serialize;
use tower_semaphore::Name;
use tower_semaphore::limit::{Refusal, WouldRefuse};

/// Lines queued for the writer. More are dropped and counted: a slow disk must not slow requests down.
const WAITING: usize = 8192;

/// Writes lines on a dedicated thread.
pub(crate) struct AccessLog {
    lines: SyncSender<Line>,
    dropped: AtomicU64,
    with_keys: bool,
    writer: Mutex<Option<JoinHandle<()>>>,
}

enum Line {
    Text(Vec<u8>),
    End,
}

/// What the rules learn about a request, shared with them through its extensions.
#[derive(Debug, Default)]
pub(crate) struct Journey {
    key: OnceLock<Name>,
    forwarded: OnceLock<Instant>,
}

/// The line of one request; written when this is dropped.
pub(crate) struct Entry {
    log: Arc<AccessLog>,
    journey: Arc<Journey>,
    began: Instant,
    record: Record,
}

#[derive(Serialize)]
struct Record {
    /// Seconds since 1970.
    time: f64,
    client: IpAddr,
    method: String,
    path: String,
    version: &'static str,
    /// `null` if the client left before the response.
    status: Option<u16>,
    /// The rule that refused the request, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    refused: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    would_refuse: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    /// Until the request was forwarded or rejected.
    waited_ms: f64,
    /// From there to the end of the response; `null` if the request was not forwarded.
    held_ms: Option<f64>,
    bytes: u64,
}

impl AccessLog {
    /// Appends to a file; `-` is stdout.
    pub(crate) fn open(path: &Path, with_keys: bool) -> io::Result<Self> {
        let mut to: Box<dyn Write + Send> = if path == Path::new("-") {
            Box::new(io::stdout())
        } else {
            Box::new(OpenOptions::new().create(true).append(true).open(path)?)
        };
        let (lines, waiting) = sync_channel(WAITING);
        let writer = std::thread::Builder::new().name("access-log".to_owned());
        let writer = writer.spawn(move || {
            if let Err(error) = write(&waiting, &mut to) {
                tracing::error!(%error, "the access log cannot be written");
            }
        })?;
        let writer = Mutex::new(Some(writer));
        Ok(Self { lines, dropped: AtomicU64::new(0), with_keys, writer })
    }

    pub(crate) fn entry(self: &Arc<Self>, request: &Parts, client: IpAddr) -> Entry {
        let time = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let record = Record {
            time: time.as_secs_f64(),
            client,
            method: request.method.to_string(),
            path: request.uri.path().to_owned(),
            version: version(request.version),
            status: None,
            rule: None,
            refused: None,
            would_refuse: None,
            key: None,
            waited_ms: 0.0,
            held_ms: None,
            bytes: 0,
        };
        Entry { log: Arc::clone(self), journey: Arc::default(), began: Instant::now(), record }
    }

    /// Returns once all lines are written.
    pub(crate) fn finish(&self) {
        let _ = self.lines.send(Line::End);
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(writer) = writer {
            let _ = writer.join();
        }
        let dropped = self.dropped.load(Ordering::Relaxed);
        if dropped > 0 {
            tracing::warn!(dropped, "lines of the access log were dropped");
        }
    }
}

fn write(waiting: &Receiver<Line>, to: &mut dyn Write) -> io::Result<()> {
    let mut to = io::BufWriter::new(to);
    while let Ok(line) = waiting.recv() {
        let mut next = Some(line);
        while let Some(line) = next {
            match line {
                Line::Text(text) => to.write_all(&text)?,
                Line::End => return to.flush(),
            }
            next = waiting.try_recv().ok();
        }
        to.flush()?;
    }
    to.flush()
}

impl Journey {
    /// Notes the key by which a rule counts the request.
    pub(crate) fn note_key(extensions: &Extensions, key: &Name) {
        if let Some(journey) = extensions.get::<Arc<Self>>() {
            // That of the outermost rule.
            let _ = journey.key.set(key.clone());
        }
    }

    /// Notes that the request is forwarded now.
    pub(crate) fn note_forwarded(extensions: &Extensions) {
        if let Some(journey) = extensions.get::<Arc<Self>>() {
            let _ = journey.forwarded.set(Instant::now());
        }
    }
}

impl Entry {
    pub(crate) const fn journey(&self) -> &Arc<Journey> {
        &self.journey
    }

    pub(crate) fn answered(&mut self, status: StatusCode, extensions: &Extensions) {
        self.record.status = Some(status.as_u16());
        self.record.waited_ms = ms(self.began.elapsed());
        if let Some(refusal) = extensions.get::<Refusal>() {
            self.record.rule = Some(refusal.policy.to_string());
            self.record.refused = Some(refusal.reason.as_str());
        }
        let would = extensions.get::<WouldRefuse>();
        self.record.would_refuse = would.map(|would| would.refusal().reason.as_str());
    }

    /// Adds bytes of the response.
    pub(crate) fn passed(&mut self, bytes: usize) {
        self.record.bytes += bytes as u64;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(forwarded) = self.journey.forwarded.get() {
            self.record.waited_ms = ms(forwarded.duration_since(self.began));
            self.record.held_ms = Some(ms(forwarded.elapsed()));
        } else if self.record.status.is_none() {
            self.record.waited_ms = ms(self.began.elapsed());
        }
        if self.log.with_keys {
            self.record.key = self.journey.key.get().map(|key| key.as_str().to_owned());
        }
        let Ok(mut line) = serde_json::to_vec(&self.record) else { return };
        line.push(b'\n');
        if self.log.lines.try_send(Line::Text(line)).is_err() {
            self.log.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Milliseconds, to the microsecond.
fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

const fn version(version: Version) -> &'static str {
    match version {
        Version::HTTP_09 => "0.9",
        Version::HTTP_10 => "1.0",
        Version::HTTP_2 => "2.0",
        Version::HTTP_3 => "3.0",
        _ => "1.1",
    }
}
