//! The parts that the URLs of all backends have.
//!
//! Each error is a clause that says what is wrong. It shows no part of a URL, except a short number where a number is
//! expected, and words that are known here: in an invalid URL the password can be anywhere. After an unencoded `/` it
//! continues as the path, and without a host it is the port.

use std::fmt;
use std::net::Ipv6Addr;

/// A longer number may be a password, and is not shown.
const SHOWN_MAX: usize = 5;
/// Schemes that are often used by mistake. Only these are shown.
const OTHER_SCHEMES: [&str; 6] = ["http", "https", "tcp", "tcps", "tls", "ssl"];

/// Splits a URL into its scheme and the rest.
pub(super) fn split(url: &str) -> Result<(&str, &str), String> {
    // Removes the newline of a file that the URL was read from.
    let Some((scheme, rest)) = url.trim().split_once("://") else {
        return Err("`://` is missing".to_owned());
    };
    if rest.contains(|c: char| c.is_control()) {
        return Err("it has a control character, which must be percent-encoded".to_owned());
    }
    Ok((scheme, rest))
}

/// Says that a scheme is not known.
pub(super) fn unknown_scheme(scheme: &str) -> String {
    if OTHER_SCHEMES.contains(&scheme) {
        format!("the scheme {scheme:?} is not known")
    } else {
        "its scheme is not known".to_owned()
    }
}

/// `[user[:password]@]host[:port][,host[:port]...][/path][?query]`
pub(super) struct Parts<'a> {
    /// With the `@`.
    pub(super) user: &'a str,
    pub(super) hosts: Vec<Host>,
    pub(super) path: &'a str,
    pub(super) query: &'a str,
}

/// Splits the rest of a URL. `cut` are the separators of hosts that no user or password may contain.
pub(super) fn parts<'a>(rest: &'a str, port: u16, cut: &str) -> Result<Parts<'a>, String> {
    check_fragment(rest)?;
    let (user, rest) = rest.split_at(rest.rfind('@').map_or(0, |at| at + 1));
    // Otherwise part of a password would be taken for the host.
    let name = user.strip_suffix('@').unwrap_or(user);
    if name.contains(|c| matches!(c, '/' | '?') || cut.contains(c)) {
        return Err("/ ? # , @ must be percent-encoded in user and password".to_owned());
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts = hosts
        .split(',')
        .enumerate()
        .map(|(i, host)| Host::parse(host, port).map_err(|why| format!("host {}: {why}", i + 1)));
    let hosts = hosts.collect::<Result<_, _>>()?;
    Ok(Parts { user, hosts, path: path.trim_end_matches('/'), query })
}

/// A host with its port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Host {
    /// An IPv6 address is in brackets.
    name: String,
    pub(super) port: u16,
}

impl Host {
    /// Parses `name`, `name:1`, `1.2.3.4:1` or `[::1]:1`.
    fn parse(host: &str, port: u16) -> Result<Self, String> {
        let (name, port) = match host.rsplit_once(':') {
            Some((name, digits)) if !digits.ends_with(']') => {
                let number = digits.parse().ok().filter(|number| *number > 0);
                let Some(number) = number else {
                    return Err(format!(
                        "its port{} is not a number from 1 to 65535",
                        shown(digits)
                    ));
                };
                (name, number)
            }
            _ => (host, port),
        };
        let plain =
            |name: &str| name.bytes().all(|c| c.is_ascii_alphanumeric() || b".-_".contains(&c));
        if name.is_empty() {
            return Err("its name is missing".to_owned());
        }
        let six = without_brackets(name);
        if !six.map_or_else(|| plain(name), |six| six.parse::<Ipv6Addr>().is_ok()) {
            return Err("it is neither a name nor an address; expected A-Z a-z 0-9 . - _; an \
                        IPv6 address stands in [ ]"
                .to_owned());
        }
        Ok(Self { name: name.to_owned(), port })
    }

    /// The name without brackets, as it is looked up.
    #[cfg(feature = "etcd")]
    pub(super) fn address(&self) -> &str {
        without_brackets(&self.name).unwrap_or(&self.name)
    }

    /// Returns whether both are the same, however they are written.
    #[cfg(feature = "etcd")]
    pub(super) fn is_same(&self, other: &Self) -> bool {
        let six = |host: &Self| host.address().parse::<Ipv6Addr>().ok();
        let names = match (six(self), six(other)) {
            (Some(one), Some(other)) => one == other,
            _ => self.name.eq_ignore_ascii_case(&other.name),
        };
        names && self.port == other.port
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.port)
    }
}

/// Returns an IPv6 address without its brackets.
fn without_brackets(name: &str) -> Option<&str> {
    name.strip_prefix('[')?.strip_suffix(']')
}

/// Rejects a `#`. URL parsers silently drop what follows one, which may be half of a password.
pub(super) fn check_fragment(rest: &str) -> Result<(), String> {
    if rest.contains('#') {
        return Err("a # must be percent-encoded".to_owned());
    }
    Ok(())
}

/// Returns the value with a leading space, if it is a number that cannot be a password.
pub(super) fn shown(value: &str) -> String {
    let digits = value.strip_prefix('-').unwrap_or(value);
    let is_number = !digits.is_empty() && digits.bytes().all(|c| c.is_ascii_digit());
    if is_number && value.len() <= SHOWN_MAX { format!(" {value}") } else { String::new() }
}
