//! The access log: one line of JSON for each request, written when it is over. That of an upgraded connection is over
//! when the connection ends.

use std::fs::OpenOptions;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use axum::http::request::Parts;
use axum::http::{Extensions, StatusCode, Version};
use serde::Serialize;
use tower_semaphore::Name;
use tower_semaphore::limit::{Refusal, WouldRefuse};

use super::counts::Log;
use super::lines::Lines;

/// Where the lines go.
pub(crate) struct AccessLog {
    lines: Lines,
    with_keys: bool,
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
        let path = path.to_owned();
        let lines = Lines::start(Log::Access, move || {
            Ok(if path == Path::new("-") {
                Box::new(io::stdout())
            } else {
                let mut options = OpenOptions::new();
                // A new file is for its owner: it shows who asked for what, and keys, if they are included.
                #[cfg(unix)]
                std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
                Box::new(options.create(true).append(true).open(&path)?)
            })
        })?;
        Ok(Self { lines, with_keys })
    }

    pub(crate) const fn lines(&self) -> &Lines {
        &self.lines
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
    pub(crate) fn passed(&mut self, bytes: u64) {
        self.record.bytes += bytes;
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
        self.log.lines.push(line);
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
