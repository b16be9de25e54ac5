//! Which servers a URL names, in every shape that Redis is run in.

use deadpool_redis::redis::io::tcp::TcpSettings;
use deadpool_redis::redis::{ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::error::ConfigError;

const ALLOWED: &str = "redis://[user:password@]host[:port][/db], rediss://... with the feature `tls`, \
                       redis+unix:///path[?db=...&user=...&pass=...], \
                       redis-sentinel://[user:password@]host[:port][,...]/master[/db], \
                       redis-cluster://[user:password@]host[:port][,...]";
const SENTINEL_PORT: u16 = 26379;
const REDIS_PORT: u16 = 6379;

/// The servers, and how each is spoken to.
#[derive(Clone)]
pub(super) enum Servers {
    One(ConnectionInfo),
    Sentinel {
        sentinels: Vec<ConnectionInfo>,
        /// What the sentinels call the master.
        master: String,
        /// For the servers that they name: all but the address.
        server: ConnectionInfo,
    },
    /// Some nodes, of which any tells of all.
    Cluster(Vec<ConnectionInfo>),
}

impl Servers {
    // No error shows what may be a piece of a password.
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        // rustls must be told once in a process who does the cryptography; what the user chose counts.
        #[cfg(feature = "tls")]
        let _ = rustls::crypto::ring::default_provider().install_default();
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(bad("it has no `://`"));
        };
        match scheme {
            "redis" | "rediss" | "valkey" | "valkeys" | "redis+unix" | "valkey+unix" | "unix" => {
                one(url).map(Self::One)
            }
            // `+` is how it is written for Python's clients.
            "redis-sentinel" | "redis+sentinel" => sentinel("redis", rest),
            "rediss-sentinel" | "rediss+sentinel" => sentinel("rediss", rest),
            "redis-cluster" | "redis+cluster" => cluster("redis", rest),
            "rediss-cluster" | "rediss+cluster" => cluster("rediss", rest),
            // What has a password in it is no scheme that someone meant.
            scheme if scheme.len() <= 20 && scheme.bytes().all(is_of_scheme) => {
                Err(bad(format!("the scheme {scheme:?} is not known")))
            }
            _ => Err(bad("its scheme is not known")),
        }
    }
}

fn sentinel(scheme: &str, rest: &str) -> Result<Servers, ConfigError> {
    let Parts { user, hosts, path, query } = parts(rest, SENTINEL_PORT)?;
    let mut path = path.split('/');
    let master = path.next().unwrap_or_default();
    if master.is_empty()
        || !master.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c))
    {
        return Err(bad(format!(
            "{master:?} cannot be the name of a master, which stands after the sentinels; allowed \
             in it: A-Z a-z 0-9 . _ -"
        )));
    }
    let db = path.next().unwrap_or_default();
    if db.parse::<u32>().is_err() && !db.is_empty() {
        return Err(bad(format!("the database {db:?} is not a number")));
    }
    if let Some(more) = path.find(|more| !more.is_empty()) {
        return Err(bad(format!("nothing is known of {more:?} after the database")));
    }
    let (mut sentinel_user, mut sentinel_password) = ("", "");
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        if value.contains(['@', '/', ':', '#', '?']) {
            return Err(bad(format!("the value of {name:?} must be percent-encoded")));
        }
        match name {
            "sentinel_username" => sentinel_user = value,
            "sentinel_password" => sentinel_password = value,
            _ => {
                return Err(bad(format!(
                    "the option {name:?} is not known; there are sentinel_username and \
                     sentinel_password"
                )));
            }
        }
    }
    let to_sentinel = match (sentinel_user, sentinel_password) {
        ("", "") => String::new(),
        (user, password) => format!("{user}:{password}@"),
    };
    let sentinels = hosts.iter().map(|host| one(&format!("{scheme}://{to_sentinel}{host}/")));
    let sentinels = sentinels
        .map(|info| {
            let info = info?;
            // Sentinels are only asked; RESP2 is enough, and needs no HELLO.
            let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP2);
            Ok(info.set_redis_settings(settings))
        })
        .collect::<Result<_, _>>()?;
    let server = one(&format!("{scheme}://{user}{}/{db}", hosts[0]))?;
    Ok(Servers::Sentinel { sentinels, master: master.to_owned(), server })
}

fn cluster(scheme: &str, rest: &str) -> Result<Servers, ConfigError> {
    let Parts { user, hosts, path, query } = parts(rest, REDIS_PORT)?;
    if !matches!(path, "" | "0") {
        return Err(bad(format!("a cluster has no database {path:?}; only 0 can be named")));
    }
    if !query.is_empty() {
        return Err(bad("a cluster has no options"));
    }
    let nodes = hosts.iter().map(|host| one(&format!("{scheme}://{user}{host}/")));
    nodes.collect::<Result<_, _>>().map(Servers::Cluster)
}

/// `[user[:password]@]host[:port][,host[:port]...][/path][?query]`
struct Parts<'a> {
    /// With the `@`.
    user: &'a str,
    /// Each with its port.
    hosts: Vec<String>,
    path: &'a str,
    query: &'a str,
}

fn parts(rest: &str, port: u16) -> Result<Parts<'_>, ConfigError> {
    let (user, rest) = rest.split_at(rest.rfind('@').map_or(0, |at| at + 1));
    // Else what is taken for a host could be a piece of a password, and be shown.
    if user.trim_end_matches('@').contains(['/', '?', '#', ',', '@']) {
        return Err(bad(
            "user and password must be percent-encoded where they have one of / ? # , @",
        ));
    }
    if rest.contains('#') {
        return Err(bad("nothing is known of what stands behind `#`"));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts = hosts.split(',').map(|host| with_port(host, port)).collect::<Result<_, _>>()?;
    Ok(Parts { user, hosts, path: path.trim_end_matches('/'), query })
}

/// The host with its port: `name`, `name:1`, `1.2.3.4:1`, `[::1]:1`.
fn with_port(host: &str, port: u16) -> Result<String, ConfigError> {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, digits)) if !digits.ends_with(']') => {
            let number = digits.parse().ok().filter(|number| *number > 0);
            let Some(number) = number else {
                return Err(bad(format!(
                    "the port {digits:?} of {host:?} is not one; allowed: 1 to 65535"
                )));
            };
            (name, number)
        }
        _ => (host, port),
    };
    let plain = |name: &str| name.bytes().all(|c| c.is_ascii_alphanumeric() || b".-_".contains(&c));
    let six = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    let good = match six {
        Some(six) => six.parse::<std::net::Ipv6Addr>().is_ok(),
        None => !name.is_empty() && plain(name),
    };
    if !good {
        return Err(bad(format!("{name:?} is not a host")));
    }
    Ok(format!("{name}:{port}"))
}

/// Of one server.
fn one(url: &str) -> Result<ConnectionInfo, ConfigError> {
    // The category is one of redis' own words, and has nothing of the URL in it.
    let info = url.into_connection_info().map_err(|error| bad(error.category().to_owned()))?;
    let settings = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        // A call that an ACL need not allow for, and nobody here asks for what it tells.
        .set_skip_set_lib_name();
    let tcp = TcpSettings::default().set_nodelay(true);
    Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
}

fn is_of_scheme(c: u8) -> bool {
    c.is_ascii_lowercase() || b"+-.".contains(&c)
}

fn bad(why: impl Into<String>) -> ConfigError {
    let why = why.into();
    ConfigError::new(format!("Redis URL: cannot be used ({why}); allowed: {ALLOWED}"))
}

#[cfg(test)]
mod tests {
    use super::Servers;

    fn error(url: &str) -> String {
        Servers::parse(url).err().unwrap_or_else(|| panic!("{url} was taken")).to_string()
    }

    #[test]
    fn sentinels_are_read() {
        for plus in ["redis-sentinel", "redis+sentinel"] {
            let url = format!(
                "{plus}://app:p%40w@h1,h2:1,[::1]:2/my-master/3?sentinel_username=s&sentinel_password=x%2F"
            );
            let Ok(Servers::Sentinel { sentinels, master, server }) = Servers::parse(&url) else {
                panic!("{url}")
            };
            assert_eq!(master, "my-master");
            let addresses: Vec<_> = sentinels.iter().map(|one| one.addr().to_string()).collect();
            assert_eq!(addresses, ["h1:26379", "h2:1", "::1:2"]);
            let (of_one, of_all) = (sentinels[2].redis_settings(), server.redis_settings());
            assert_eq!((of_one.username(), of_one.password()), (Some("s"), Some("x/")));
            assert_eq!((of_all.username(), of_all.password()), (Some("app"), Some("p@w")));
            assert_eq!((of_one.db(), of_all.db()), (0, 3));
        }
    }

    #[test]
    fn nodes_of_a_cluster_are_read() {
        let Ok(Servers::Cluster(nodes)) = Servers::parse("redis-cluster://:pw@h1:7000,h2/0") else {
            panic!("not read")
        };
        let addresses: Vec<_> = nodes.iter().map(|one| one.addr().to_string()).collect();
        assert_eq!(addresses, ["h1:7000", "h2:6379"]);
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("pw")));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (url, named) in [
            ("localhost:6379", "`://`"),
            ("http://h/", "\"http\""),
            ("redis-sentinel://h1:26379", "name of a master"),
            ("redis-sentinel://h1/a b", "\"a b\""),
            ("redis-sentinel://h1:x/m", "\"x\""),
            ("redis-sentinel://h1:0/m", "\"0\""),
            ("redis-sentinel://h1:70000/m", "\"70000\""),
            ("redis-sentinel://h1,,h2/m", "\"\" is not a host"),
            ("redis-sentinel://h1,h_2,h!3/m", "\"h!3\""),
            ("redis-sentinel://[::g]:1/m", "\"[::g]\""),
            ("redis-sentinel://h1/m/x", "\"x\""),
            ("redis-sentinel://h1/m/0/y", "\"y\""),
            ("redis-sentinel://h1/m?timeout=3", "\"timeout\""),
            ("redis-sentinel://h1/m#x", "`#`"),
            ("redis-cluster://", "\"\" is not a host"),
            ("redis-cluster://h1:7000/3", "\"3\""),
            ("redis-cluster://h1:7000?x=1", "options"),
        ] {
            let error = error(url);
            assert!(error.contains(named), "{url}: {error}");
        }
    }

    #[test]
    fn no_piece_of_a_password_is_shown() {
        for url in [
            "redis-cluster://u:hunt/er2@h1",
            "redis-cluster://u:hunt,er2@h1:x",
            "redis-cluster://u:hunt@er2@h1",
            "redis-cluster://u:hunter2@h1:x",
            "redis-cluster://u:hunter2@h!",
            "redis-sentinel://u:hunt?er2@h1/m",
            "redis-sentinel://u:hunt#er2@h1/m",
            "redis-sentinel://h1/m?sentinel_password=hunt@er2",
            "redis-sentinel://h1/m?sentinel_password=hunt/er2",
            "redis-sentinel://u:hunter2@h1/m/9999999999",
            "hunter2://h1",
        ] {
            let error = error(url);
            assert!(!error.contains("hunt") && !error.contains("er2"), "{url}: {error}");
        }
    }
}
