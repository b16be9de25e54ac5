//! Passes a request on, and the response back: frame by frame, trailers too.

use std::str::FromStr;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::uri::{Authority, PathAndQuery, Scheme, Uri};
use axum::http::{Method, StatusCode, Version};
use axum::response::{IntoResponse, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::json;

/// After this, an upstream that does not take the connection counts as unreachable.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Headers that are for one hop only, beside those that `Connection` names (RFC 9110, 7.6.1).
///
/// `Trailer` is not one of them: without it no trailers may be sent on.
const HOP_BY_HOP: [HeaderName; 6] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Where requests go: `http://host:port` and what all paths begin with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Upstream {
    authority: Authority,
    base: String,
}

/// The upstream's client.
pub(crate) struct Proxy {
    client: Client<HttpConnector, Body>,
    upstream: Upstream,
    name: Box<str>,
}

impl Proxy {
    /// `name` is what it calls itself in `Via`.
    pub(crate) fn new(upstream: Upstream, name: &str) -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let client =
            Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).build(connector);
        Self { client, upstream, name: name.into() }
    }

    pub(crate) async fn forward(&self, request: Request) -> Response {
        if request.method() == Method::CONNECT {
            return problem(StatusCode::NOT_IMPLEMENTED, "this is not a tunnel");
        }
        let Some(uri) = self.upstream.uri(request.uri()) else {
            return problem(StatusCode::BAD_REQUEST, "the path cannot be passed on");
        };
        // A request of its own, without the extensions of the one that came: the permit among them
        // must not live on in a pooled connection.
        let (parts, body) = request.into_parts();
        let mut onward = Request::new(body);
        *onward.method_mut() = parts.method;
        *onward.uri_mut() = uri;
        *onward.headers_mut() = self.request_headers(parts.headers, parts.version);

        match self.client.request(onward).await {
            Ok(response) => {
                let (parts, body) = response.into_parts();
                let mut back = Response::new(Body::new(body));
                *back.status_mut() = parts.status;
                *back.headers_mut() = end_to_end(parts.headers);
                back
            }
            Err(error) => {
                tracing::warn!(error = &error as &dyn std::error::Error, "no response");
                let what = if error.is_connect() {
                    "the upstream cannot be reached"
                } else {
                    "the upstream gave no valid response"
                };
                problem(StatusCode::BAD_GATEWAY, what)
            }
        }
    }

    fn request_headers(&self, headers: HeaderMap, version: Version) -> HeaderMap {
        let wants_trailers = tokens(&headers, header::TE).any(|te| te == "trailers");
        let mut headers = end_to_end(headers);
        if wants_trailers {
            // Said anew for the next hop: this one can pass trailers on.
            headers.insert(header::TE, HeaderValue::from_static("trailers"));
            headers.insert(header::CONNECTION, HeaderValue::from_static("te"));
        }
        let version = if version == Version::HTTP_10 { "1.0" } else { "1.1" };
        if let Ok(via) = HeaderValue::try_from(format!("{version} {}", self.name)) {
            headers.append(header::VIA, via);
        }
        headers
    }
}

impl Upstream {
    fn uri(&self, uri: &Uri) -> Option<Uri> {
        let path = uri.path_and_query().map_or("/", PathAndQuery::as_str);
        Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(self.authority.clone())
            .path_and_query(format!("{}{path}", self.base))
            .build()
            .ok()
    }
}

impl FromStr for Upstream {
    type Err = &'static str;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        const ALLOWED: &str = "allowed: http://host[:port][/base]";
        let uri: Uri = url.parse().map_err(|_| ALLOWED)?;
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'));
        match authority {
            Some(authority) if uri.scheme() == Some(&Scheme::HTTP) && uri.query().is_none() => {
                let base = uri.path().trim_end_matches('/').to_owned();
                Ok(Self { authority: authority.clone(), base })
            }
            _ => Err(ALLOWED),
        }
    }
}

/// The headers without those that are for one hop only.
fn end_to_end(mut headers: HeaderMap) -> HeaderMap {
    let named: Vec<_> = tokens(&headers, header::CONNECTION).map(str::to_owned).collect();
    for name in &named {
        headers.remove(name.as_str());
    }
    for name in &HOP_BY_HOP {
        headers.remove(name);
    }
    headers
}

/// The parts of a header that is a list.
fn tokens(headers: &HeaderMap, name: HeaderName) -> impl Iterator<Item = &str> {
    let values = headers.get_all(name).into_iter();
    values.filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(',')).map(str::trim)
}

pub(crate) fn problem(status: StatusCode, detail: &str) -> Response {
    let problem = json!({
        "type": "about:blank",
        "title": status.canonical_reason(),
        "status": status.as_u16(),
        "detail": detail,
    });
    let kind = [(header::CONTENT_TYPE, "application/problem+json")];
    (status, kind, problem.to_string()).into_response()
}
