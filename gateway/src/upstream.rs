//! The URL of the upstream.

use std::str::FromStr;

use axum::http::uri::{Authority, Scheme, Uri};

/// Scheme, authority and base path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Upstream {
    pub(crate) protocol: Protocol,
    pub(crate) authority: Authority,
    /// Without a `/` at its end.
    pub(crate) base: String,
}

/// How the upstream is spoken to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    /// HTTP/1.1.
    Http,
    /// HTTP/2 without TLS.
    H2c,
    /// HTTP/2 or HTTP/1.1 over TLS, as negotiated.
    Https,
}

impl Upstream {
    pub(crate) const ALLOWED: &str =
        "expected http://host[:port][/base], or h2c:// (HTTP/2) or https:// in place of http://";

    /// Whether a URL that cannot be used may contain a password or a token.
    pub(crate) fn may_be_secret(url: &str) -> bool {
        url.contains(['@', '?'])
    }

    /// The address to connect to.
    pub(crate) fn address(&self) -> Option<Uri> {
        let scheme = if self.protocol == Protocol::Https { Scheme::HTTPS } else { Scheme::HTTP };
        let uri = Uri::builder().scheme(scheme).authority(self.authority.clone());
        uri.path_and_query("/").build().ok()
    }
}

impl FromStr for Upstream {
    type Err = &'static str;

    fn from_str(url: &str) -> Result<Self, Self::Err> {
        let uri: Uri = url.parse().map_err(|_| Self::ALLOWED)?;
        let protocol = match uri.scheme_str() {
            Some("http") => Protocol::Http,
            Some("h2c") => Protocol::H2c,
            Some("https") if cfg!(feature = "tls") => Protocol::Https,
            Some("https") => return Err("https:// needs the feature tls"),
            _ => return Err(Self::ALLOWED),
        };
        let authority = uri.authority().filter(|authority| !authority.as_str().contains('@'));
        match authority {
            Some(authority) if uri.query().is_none() => {
                let base = uri.path().trim_end_matches('/').to_owned();
                Ok(Self { protocol, authority: authority.clone(), base })
            }
            _ => Err(Self::ALLOWED),
        }
    }
}
