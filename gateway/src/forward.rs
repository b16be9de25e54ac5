//! Forwards a request, and returns the response: frame by frame, trailers included.

use std::error::Error;
use std::io;
use std::sync::Arc;

use axum::BoxError;
use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::request::Parts;
use axum::http::uri::{Authority, PathAndQuery, Scheme, Uri};
use axum::http::{Method, StatusCode, Version};
use axum::response::Response;
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::upgrade::OnUpgrade;
use tokio::time::Instant;
use tower_semaphore::Permit;

use super::access_log::Journey;
use super::connection::Activity;
use super::counts::UpstreamError;
use super::headers;
use super::outage::Outages;
use super::outgoing::{Expectation, OutgoingBody};
use super::peer::Origin;
use super::pool::{Lease, Pool, UpstreamBody};
use super::problem::problem;
use super::progress::{Bounds, Progress, Waits, until};
use super::upgrade::Tunnel;
use super::upload::Upload;
use super::upstream::{Protocol, Upstream};

const INVALID: &str = "the upstream sent no valid response";
const UNASKED: &str = "the upstream switched protocols without a request for it";

/// Forwards requests to the upstream.
pub(crate) struct Forward {
    pool: Arc<Pool>,
    upstream: Upstream,
    /// Its name in `Via`.
    name: Box<str>,
    /// Whether the upstream gets its own name as host, instead of the one that the client used.
    by_own_name: bool,
    bounds: Bounds,
    outages: Outages,
}

/// Context of a request, kept in its extensions.
#[derive(Clone)]
pub(crate) struct Arrival {
    pub(crate) activity: Arc<Activity>,
    pub(crate) upload: Arc<Upload>,
    pub(crate) origin: Origin,
    pub(crate) authority: Option<Authority>,
    /// `OPTIONS *`.
    pub(crate) is_asterisk: bool,
    /// Header fields that rules read.
    pub(crate) read: Arc<[HeaderName]>,
}

/// A request's head as it is forwarded; a retry sends it twice.
#[derive(Clone)]
struct Head {
    method: Method,
    path: String,
    headers: HeaderMap,
    authority: Option<Authority>,
    /// For a client that waits for 100 (Continue).
    expects: Option<Arc<Expectation>>,
}

/// Why there is no response.
enum Failure {
    Connect(BoxError),
    Send(hyper::Error),
    /// The response cannot be passed on: what the client is told, and why.
    Response(&'static str, BoxError),
    Late(&'static str, StatusCode),
    BadPath,
}

impl Failure {
    /// Whether the request had begun to be sent: the upstream may go on with it until it notices.
    const fn is_broken_off(&self) -> bool {
        match self {
            Self::Send(_) | Self::Response(..) | Self::Late(..) => true,
            Self::Connect(_) | Self::BadPath => false,
        }
    }
}

impl Forward {
    /// # Errors
    ///
    /// If TLS is required and cannot be set up.
    pub(crate) fn new(
        upstream: Upstream,
        name: &str,
        by_own_name: bool,
        bounds: Bounds,
    ) -> Result<Self, String> {
        let pool = Pool::new(&upstream, bounds)?;
        let outages = Outages::default();
        Ok(Self { pool, upstream, name: name.into(), by_own_name, bounds, outages })
    }

    pub(crate) async fn forward(&self, mut request: Request) -> Response {
        let Some(arrival) = request.extensions().get::<Arrival>().cloned() else {
            return problem(StatusCode::INTERNAL_SERVER_ERROR, "the request has no connection");
        };
        Journey::note_forwarded(request.extensions());
        let protocol = self.upgrade(&request);
        let client = protocol.as_ref().map(|_| hyper::upgrade::on(&mut request));
        let permit = request.extensions().get::<Permit>().cloned();
        // A new request without extensions: the permit among them must not outlive this request in a
        // pooled connection.
        let (parts, body) = request.into_parts();
        let is_http2 = parts.version == Version::HTTP_2;
        let head = self.head(parts, &arrival, protocol.as_ref());
        let expects = head.expects.clone();
        let body = if body.is_end_stream() {
            body
        } else {
            Body::new(OutgoingBody::new(body, Arc::clone(&arrival.read), expects.clone()))
        };

        let upload = &arrival.upload;
        let began = Instant::now();
        let response = tokio::select! {
            biased;
            response = self.send(head, body, upload, protocol.is_some()) => response,
            failure = late(upload.progress(), began, &self.bounds) => Err(failure),
        };
        match response.and_then(|response| checked(response, client.is_some())) {
            Ok(response) => {
                self.outages.answered();
                let response = response.map(|body| {
                    let Some(expects) = expects else { return Body::new(body) };
                    let responds = expects.responded();
                    Body::new(body.map_frame(move |frame| {
                        let _ = &responds;
                        frame
                    }))
                });
                back(response, client, protocol, &arrival, is_http2)
            }
            Err(failure) => {
                // The response says nothing of that to the layers of the rules.
                if let Some(permit) = permit {
                    if failure.is_broken_off() {
                        permit.break_off();
                    }
                    if matches!(failure, Failure::Connect(_) | Failure::BadPath) {
                        permit.unused();
                    }
                }
                self.failed(failure)
            }
        }
    }

    /// The protocol to upgrade to; only HTTP/1.1 on both sides can.
    fn upgrade(&self, request: &Request) -> Option<HeaderValue> {
        let can = request.version() == Version::HTTP_11 && self.upstream.protocol != Protocol::H2c;
        headers::upgrade(request.headers()).filter(|_| can)
    }

    fn head(&self, parts: Parts, arrival: &Arrival, upgrade: Option<&HeaderValue>) -> Head {
        let takes_trailers = headers::takes_trailers(&parts.headers);
        let expects = headers::expects_continue(&parts.headers).then(Arc::default);
        let mut headers = headers::end_to_end(parts.headers, &arrival.read);
        headers::strip_lookalikes(&mut headers, &arrival.read);
        if takes_trailers {
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
        }
        if let Some(protocol) = upgrade {
            headers.insert(header::UPGRADE, protocol.clone());
        }
        headers::add_via(&mut headers, parts.version, &self.name);
        let host = arrival.authority.as_ref().map(Authority::as_str);
        arrival.origin.add_to(&mut headers, host, self.by_own_name);
        let base = &self.upstream.base;
        // `path` is `/` where a target in absolute form has none; `path_and_query` has none then.
        let path = match (arrival.is_asterisk, parts.uri.path(), parts.uri.query()) {
            (true, ..) if base.is_empty() => "*".to_owned(),
            (true, ..) => base.clone(),
            (false, path, Some(query)) => format!("{base}{path}?{query}"),
            (false, path, None) => format!("{base}{path}"),
        };
        let authority = arrival.authority.clone().filter(|_| !self.by_own_name);
        Head { method: parts.method, path, headers, authority, expects }
    }

    async fn send(
        &self,
        head: Head,
        body: Body,
        upload: &Arc<Upload>,
        upgrade: bool,
    ) -> Result<Response<UpstreamBody>, Failure> {
        // A request without a body can be retried if a pooled connection turns out to be closed.
        let again = body.is_end_stream().then(|| head.clone());
        let lease = self.pool.lease(false, upgrade).await.map_err(Failure::Connect)?;
        let (is_reused, shared) = (lease.is_reused(), lease.shared());
        let request = self.request(head, body, &lease, upgrade)?;
        let mut failed = match lease.send(&self.pool, request, upload).await {
            Ok(response) => return Ok(response),
            Err(failed) => failed,
        };
        if !is_reused {
            return Err(Failure::Send(failed.into_error()));
        }
        let unsent = failed.take_message().map(|request| self.unbuilt(request));
        let (head, body) = match (unsent, again) {
            (Some((head, body)), _) => (head, body),
            (None, Some(head))
                if is_unprocessed(failed.error())
                    || head.method.is_idempotent() && is_closed(failed.error()) =>
            {
                (head, Body::empty())
            }
            (None, _) => return Err(Failure::Send(failed.into_error())),
        };
        tracing::debug!("a pooled connection was closed; the request is retried on a new one");
        if let Some(shared) = &shared {
            self.pool.retire(shared);
        }
        let lease = self.pool.lease(shared.is_none(), upgrade).await.map_err(Failure::Connect)?;
        let request = self.request(head, body, &lease, upgrade)?;
        let response = lease.send(&self.pool, request, upload).await;
        response.map_err(|failed| Failure::Send(failed.into_error()))
    }

    /// The request in the form that this connection's protocol requires.
    fn request(
        &self,
        head: Head,
        body: Body,
        lease: &Lease,
        upgrade: bool,
    ) -> Result<Request, Failure> {
        let Head { method, path, mut headers, authority, expects } = head;
        let authority = authority.unwrap_or_else(|| self.upstream.authority.clone());
        let uri = if lease.is_http2() {
            headers.remove(header::HOST);
            let is_tls = self.upstream.protocol == Protocol::Https;
            let scheme = if is_tls { Scheme::HTTPS } else { Scheme::HTTP };
            Uri::builder().scheme(scheme).authority(authority).path_and_query(path).build().ok()
        } else {
            if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
                headers.insert(header::HOST, host);
            }
            let options = match (upgrade, headers.contains_key(header::TE)) {
                (true, true) => Some("upgrade, te"),
                (true, false) => Some("upgrade"),
                (false, true) => Some("te"),
                (false, false) => None,
            };
            if let Some(options) = options {
                headers.insert(header::CONNECTION, HeaderValue::from_static(options));
            }
            // Without it, hyper assumes that a GET has no body.
            if !body.is_end_stream() && body.size_hint().exact().is_none() {
                headers.insert(header::TRANSFER_ENCODING, HeaderValue::from_static("chunked"));
            }
            path.parse().ok()
        };
        let mut request = Request::new(body);
        *request.method_mut() = method;
        *request.uri_mut() = uri.ok_or(Failure::BadPath)?;
        *request.headers_mut() = headers;
        if lease.is_http2() {
            *request.version_mut() = Version::HTTP_2;
        }
        if let Some(expects) = expects {
            if lease.is_http2() {
                // hyper shows no 100 of HTTP/2, where a response can end an upload at any time.
                expects.proceed();
            }
            request.extensions_mut().insert(Arc::clone(&expects));
            hyper::ext::on_informational(&mut request, move |response| {
                if response.status() == StatusCode::CONTINUE {
                    expects.proceed();
                }
            });
        }
        Ok(request)
    }

    /// The head of a request that was not sent.
    fn unbuilt(&self, request: Request) -> (Head, Body) {
        let (mut parts, body) = request.into_parts();
        let host = parts.headers.remove(header::HOST);
        let host = host.and_then(|host| Authority::try_from(host.as_bytes()).ok());
        let authority = host.or_else(|| parts.uri.authority().cloned());
        parts.headers.remove(header::CONNECTION);
        parts.headers.remove(header::TRANSFER_ENCODING);
        let path = parts.uri.path_and_query().map_or("/", PathAndQuery::as_str).to_owned();
        let expects = parts.extensions.remove();
        (Head { method: parts.method, path, headers: parts.headers, authority, expects }, body)
    }

    /// The response to a request that failed.
    fn failed(&self, failure: Failure) -> Response {
        match failure {
            Failure::Connect(error) => {
                self.outages.failed(UpstreamError::Connect, Some(&*error));
                problem(StatusCode::BAD_GATEWAY, "the upstream cannot be reached")
            }
            // Its body broke off, or is malformed.
            Failure::Send(error) if error.is_user() => {
                tracing::debug!(error = &error as &dyn Error, "a request's body failed");
                problem(StatusCode::BAD_REQUEST, "the request's body cannot be read")
            }
            Failure::Send(error) => {
                self.outages.failed(UpstreamError::Response, Some(&error));
                problem(StatusCode::BAD_GATEWAY, INVALID)
            }
            Failure::Response(what, error) => {
                self.outages.failed(UpstreamError::Response, Some(&*error));
                problem(StatusCode::BAD_GATEWAY, what)
            }
            Failure::Late(what, status) => {
                if status == StatusCode::GATEWAY_TIMEOUT {
                    self.outages.failed(UpstreamError::Timeout, None);
                }
                problem(status, what)
            }
            Failure::BadPath => problem(StatusCode::BAD_REQUEST, "the path cannot be forwarded"),
        }
    }
}

/// Refuses a response that cannot be passed on.
fn checked<B>(response: Response<B>, can_switch: bool) -> Result<Response<B>, Failure> {
    if !headers::is_chunked_alone(response.headers()) {
        let error = "Transfer-Encoding: not chunked alone";
        return Err(Failure::Response(INVALID, error.into()));
    }
    if response.status() == StatusCode::SWITCHING_PROTOCOLS && !can_switch {
        return Err(Failure::Response(UNASKED, UNASKED.into()));
    }
    Ok(response)
}

/// The response for the client.
fn back(
    mut response: Response,
    client: Option<OnUpgrade>,
    protocol: Option<HeaderValue>,
    arrival: &Arrival,
    is_http2: bool,
) -> Response {
    let is_upgrade = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    let upgraded = response.headers().get(header::UPGRADE).cloned();
    let upstream = is_upgrade.then(|| hyper::upgrade::on(&mut response));
    let (parts, body) = response.into_parts();
    let mut back = Response::new(body);
    *back.status_mut() = parts.status;
    *back.headers_mut() = headers::end_to_end(parts.headers, &[]);
    let Some((upstream, client)) = upstream.zip(client) else {
        // It says what the upstream requires (RFC 9110, 15.5.22). HTTP/2 has no such field.
        if back.status() == StatusCode::UPGRADE_REQUIRED
            && let Some(protocol) = upgraded.filter(|_| !is_http2)
        {
            set_upgrade(back.headers_mut(), protocol);
        }
        return back;
    };
    arrival.activity.set_tunnel(Tunnel { client, upstream });
    if let Some(protocol) = upgraded.or(protocol) {
        set_upgrade(back.headers_mut(), protocol);
    }
    back
}

fn set_upgrade(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Resolves when the request exceeds a timeout: the idle timeout while its body is sent, the upstream
/// timeout after that.
async fn late(progress: &Progress, began: Instant, bounds: &Bounds) -> Failure {
    const CLIENT: Failure = Failure::Late(
        "the request's body made no progress within the idle timeout",
        StatusCode::REQUEST_TIMEOUT,
    );
    const UPSTREAM: Failure =
        Failure::Late("the upstream did not answer in time", StatusCode::GATEWAY_TIMEOUT);
    loop {
        let waits = progress.waits();
        let bound = if waits == Waits::Nothing { bounds.upstream } else { bounds.idle };
        let last = progress.last().max(began);
        let deadline = bound.map(|bound| last + bound);
        if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
            return if waits == Waits::Client { CLIENT } else { UPSTREAM };
        }
        // The bound that applies can change without a wake-up.
        let look = bounds.upstream.into_iter().chain(bounds.idle).min();
        let look = look.map(|look| Instant::now() + look);
        until(deadline.into_iter().chain(look).min()).await;
    }
}

/// Whether the upstream says that it did not process the request (RFC 9113, 8.7): then any method may
/// be retried.
fn is_unprocessed(error: &hyper::Error) -> bool {
    let error = error.source().and_then(|error| error.downcast_ref::<h2::Error>());
    error.is_some_and(|error| {
        let refused = error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM);
        let closing = error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR);
        error.is_remote() && (refused || closing)
    })
}

/// Whether the connection was closed before a response arrived.
fn is_closed(error: &hyper::Error) -> bool {
    let broken = |error: &io::Error| {
        use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, NotConnected};
        matches!(error.kind(), BrokenPipe | ConnectionAborted | ConnectionReset | NotConnected)
    };
    error.is_incomplete_message()
        || error.is_canceled()
        || error.is_closed()
        || error.source().and_then(|error| error.downcast_ref()).is_some_and(broken)
}
