//! The client of a request, and the fields that tell the upstream about it.

use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;

use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use ipnet::IpNet;

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const X_FORWARDED_HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const X_FORWARDED_PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");

/// The networks of trusted proxies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TrustedProxies(Vec<IpNet>);

impl FromStr for TrustedProxies {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let network = |part: &str| {
            let part = part.trim();
            let address = part.parse().map(|address: IpAddr| IpNet::from(address));
            address.or_else(|_| part.parse()).map_err(|_| {
                "expected networks and addresses, such as 10.0.0.0/8,192.0.2.7,fd00::/8".to_owned()
            })
        };
        text.split(',').map(network).collect::<Result<_, _>>().map(Self)
    }
}

impl TrustedProxies {
    fn contain(&self, address: IpAddr) -> bool {
        self.0.iter().any(|network| network.contains(&address))
    }

    /// The client's address: the peer's, or if that is a trusted proxy, the last one in
    /// `X-Forwarded-For` that is not.
    ///
    /// An entry that is not an address ends the search: entries before it cannot be trusted.
    pub(crate) fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        let mut client = peer.to_canonical();
        if !self.contain(client) {
            return client;
        }
        let lines: Vec<_> = headers.get_all(X_FORWARDED_FOR).iter().collect();
        for line in lines.into_iter().rev() {
            for entry in line.as_bytes().rsplit(|byte| *byte == b',') {
                let Some(address) = address(entry) else { return client };
                client = address;
                if !self.contain(client) {
                    return client;
                }
            }
        }
        client
    }
}

/// An address, with or without a port.
fn address(entry: &[u8]) -> Option<IpAddr> {
    let entry = std::str::from_utf8(entry.trim_ascii()).ok()?;
    let plain = entry.trim_start_matches('[').trim_end_matches(']');
    let address = plain.parse().or_else(|_| entry.parse().map(|socket: SocketAddr| socket.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// The origin of a request, as reported to the upstream.
#[derive(Clone, Debug)]
pub(crate) struct Origin {
    pub(crate) peer: IpAddr,
    /// Whether the peer is a trusted proxy.
    pub(crate) is_trusted: bool,
}

impl Origin {
    pub(crate) fn new(peer: IpAddr, trusted: &TrustedProxies) -> Self {
        let peer = peer.to_canonical();
        Self { peer, is_trusted: trusted.contain(peer) }
    }

    /// Adds this hop to `X-Forwarded-For` and `Forwarded`. `X-Forwarded-Proto` and
    /// `X-Forwarded-Host` have one value: that of a trusted proxy, otherwise the one seen here.
    pub(crate) fn add_to(&self, headers: &mut HeaderMap, host: Option<&str>, hides_host: bool) {
        append(headers, X_FORWARDED_FOR, &self.peer.to_string());

        let mut hop = match self.peer {
            IpAddr::V4(address) => format!("for={address}"),
            IpAddr::V6(address) => format!("for=\"[{address}]\""),
        };
        if let Some(host) = host {
            // A checked authority has no quotes in it.
            let _ = write!(hop, ";host=\"{host}\"");
        }
        hop.push_str(";proto=http");
        append(headers, header::FORWARDED, &hop);

        let keeps = |name| self.is_trusted && headers.contains_key(name);
        let (keeps_proto, keeps_host) = (keeps(X_FORWARDED_PROTO), keeps(X_FORWARDED_HOST));
        if !keeps_proto {
            headers.insert(X_FORWARDED_PROTO, HeaderValue::from_static("http"));
        }
        if !keeps_host {
            headers.remove(X_FORWARDED_HOST);
            let host = host.filter(|_| hides_host).and_then(|host| host.parse().ok());
            if let Some(host) = host {
                headers.insert(X_FORWARDED_HOST, host);
            }
        }
    }
}

/// Appends an entry, and joins all into one line.
fn append(headers: &mut HeaderMap, name: HeaderName, entry: &str) {
    let mut list = Vec::new();
    for value in headers.get_all(&name) {
        list.extend_from_slice(value.as_bytes());
        list.extend_from_slice(b", ");
    }
    list.extend_from_slice(entry.as_bytes());
    if let Ok(value) = HeaderValue::from_bytes(&list) {
        headers.insert(name, value);
    }
}

/// Whether a line of `Forwarded` has a quote that is not one of the two around a whole value (RFC 7239, 4).
///
/// A quote of the client's would swallow what proxies append, up to the next quote. That one then stands at the wrong
/// place, whatever they append.
pub(crate) fn has_stray_quote(line: &[u8]) -> bool {
    let mut rest = line;
    while let Some(open) = rest.iter().position(|byte| *byte == b'"') {
        let (before, value) = (&rest[..open], &rest[open + 1..]);
        let Some(close) = closing_quote(value).filter(|_| before.ends_with(b"=")) else {
            return true;
        };
        rest = value[close + 1..].trim_ascii_start();
        if !matches!(rest.first(), None | Some(b';' | b',')) {
            return true;
        }
    }
    false
}

/// Where a quoted string ends (RFC 9110, 5.6.4).
fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut is_escaped = false;
    text.iter().position(|byte| {
        let ends = *byte == b'"' && !is_escaped;
        is_escaped = *byte == b'\\' && !is_escaped;
        ends
    })
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use axum::http::{HeaderMap, HeaderValue};

    use super::{TrustedProxies, X_FORWARDED_FOR};

    fn client(trusted: &str, peer: &str, lines: &[&str]) -> String {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(X_FORWARDED_FOR, HeaderValue::from_bytes(line.as_bytes()).unwrap());
        }
        let peer: IpAddr = peer.parse().unwrap();
        trusted.parse::<TrustedProxies>().unwrap().client(peer, &headers).to_string()
    }

    #[test]
    fn the_client_is_the_last_address_that_is_not_trusted() {
        let trusted = "10.0.0.0/8, fd00::/8,192.0.2.7";
        for (peer, lines, expected) in [
            ("203.0.113.1", &["198.51.100.1"] as &[_], "203.0.113.1"),
            ("10.0.0.1", &[], "10.0.0.1"),
            ("10.0.0.1", &["198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["1.1.1.1, 198.51.100.1, 10.2.3.4"], "198.51.100.1"),
            ("10.0.0.1", &["1.1.1.1", "198.51.100.1", "192.0.2.7"], "198.51.100.1"),
            ("10.0.0.1", &["10.9.9.9, 10.8.8.8"], "10.9.9.9"),
            ("10.0.0.1", &["1.1.1.1, unknown, 10.2.3.4"], "10.2.3.4"),
            ("10.0.0.1", &["\", 198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["ä, 198.51.100.1"], "198.51.100.1"),
            ("10.0.0.1", &["1.1.1.1, ä, 10.2.3.4"], "10.2.3.4"),
            ("10.0.0.1", &["198.51.100.1:4711"], "198.51.100.1"),
            ("::ffff:10.0.0.1", &["[2001:db8::1]:443"], "2001:db8::1"),
            ("fd00::1", &["::ffff:198.51.100.1"], "198.51.100.1"),
        ] {
            assert_eq!(client(trusted, peer, lines), expected, "{peer} {lines:?}");
        }
        assert!("10.0.0.0/33".parse::<TrustedProxies>().is_err());
        assert!("".parse::<TrustedProxies>().is_err());
    }
}
