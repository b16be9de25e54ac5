//! Checks each request before the rules: its host, its path, and its client. The rules see it as the upstream gets it.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::request::Parts;
use axum::http::uri::Authority;
use axum::http::{HeaderValue, Method, Response, StatusCode, header};
use hyper::body::Incoming;

use super::access_log::AccessLog;
use super::app::Current;
use super::body::ResponseBody;
use super::counts::OpenConnection;
use super::forward::Arrival;
use super::peer::{Origin, TrustedProxies};
use super::problem::problem;
use super::room::Room;
use super::server::{Peer, Serve};
use super::upload::RequestBody;
use super::{headers, host, path, peer, room};

/// Handles a request up to the rules.
pub(crate) struct Intake {
    pub(crate) current: Arc<Current>,
    pub(crate) trusted: TrustedProxies,
    pub(crate) log: Option<Arc<AccessLog>>,
    pub(crate) room: Room,
}

/// Why a request is rejected.
type Refused = (StatusCode, &'static str);

impl Serve for Intake {
    async fn serve(
        self: Arc<Self>,
        request: Request<Incoming>,
        from: Peer,
    ) -> Response<ResponseBody> {
        let (mut parts, incoming) = request.into_parts();
        let target = Target::of(&mut parts);
        let client = self.trusted.client(from.address.ip(), &parts.headers);
        let entry = self.log.as_ref().map(|log| log.entry(&parts, client));

        let mut exchange = from.activity.begin(parts.version, entry);
        let body = RequestBody::new(&parts, incoming, &exchange, from.rests);
        let upload = Arc::clone(body.upload());
        let body = Body::new(body);
        let place = self.room.take();
        let response = match target {
            _ if place.is_none() => room::full(),
            Err((status, what)) => problem(status, what),
            Ok(target) => {
                // `PeerIpKey` reads it.
                parts.extensions.insert(SocketAddr::new(client, from.address.port()));
                if let Some(entry) = exchange.entry() {
                    parts.extensions.insert(Arc::clone(entry.journey()));
                }
                parts.extensions.insert(Arrival {
                    activity: from.activity,
                    upload,
                    origin: Origin::new(from.address.ip(), &self.trusted),
                    authority: target.authority,
                    is_asterisk: target.is_asterisk,
                    read: self.current.fields_read(),
                });
                self.current.serve(Request::from_parts(parts, body)).await
            }
        };
        exchange.answered(response.status(), response.extensions());
        response.map(|body| ResponseBody::new(body, exchange, place))
    }

    fn connected(&self) -> Option<OpenConnection> {
        Some(OpenConnection::of_client())
    }
}

/// The target of a request.
struct Target {
    authority: Option<Authority>,
    is_asterisk: bool,
}

impl Target {
    /// Checks a request, and gives it the form that rules see: one host, in `Host` and without its port, a normal path,
    /// and one field of cookies.
    fn of(parts: &mut Parts) -> Result<Self, Refused> {
        const BAD: StatusCode = StatusCode::BAD_REQUEST;
        if parts.method == Method::CONNECT {
            return Err((StatusCode::NOT_IMPLEMENTED, "CONNECT is not supported"));
        }
        if let Some(refused) = headers::ambiguous(&parts.headers) {
            return Err(refused);
        }
        let mut forwarded = parts.headers.get_all(header::FORWARDED).iter();
        if forwarded.any(|line| peer::has_stray_quote(line.as_bytes())) {
            return Err((BAD, "Forwarded: a quote that is not around a whole value"));
        }
        let uri = &parts.uri;
        match uri.scheme_str() {
            Some("http" | "https") => {}
            Some(_) => return Err((BAD, "the target's scheme is neither http nor https")),
            None if uri.authority().is_some() => return Err((BAD, "the target is not a path")),
            None => {}
        }
        let authority = host::authority(uri, &parts.headers, parts.version);
        let authority = authority.map_err(|what| (BAD, what))?;
        // It addresses the whole server; rules treat it as the root.
        let is_asterisk = uri.path() == "*";
        if is_asterisk && parts.method != Method::OPTIONS {
            return Err((BAD, "the target * is allowed with OPTIONS only"));
        }
        let from = if is_asterisk { "/" } else { uri.path() };
        let normal = path::normalize(from);
        let normal =
            normal.map_err(|_| (BAD, "a % in the path is not followed by two hex digits"))?;
        if normal != uri.path() {
            let uri = path::with_path(uri, &normal);
            parts.uri = uri.ok_or((BAD, "the path cannot be forwarded"))?;
        }
        if let Some(authority) = &authority {
            let host = HeaderValue::from_str(authority.host());
            parts
                .headers
                .insert(header::HOST, host.map_err(|_| (BAD, "the host cannot be forwarded"))?);
        }
        headers::join_cookies(&mut parts.headers);
        Ok(Self { authority, is_asterisk })
    }
}
