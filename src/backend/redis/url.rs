//! Which servers a URL names, in every shape that Redis is run in.
//!
//! A URL that is wrong can have its password anywhere: a `/` that was not encoded ends the password and
//! begins a database, a forgotten host makes the password a port. So no error shows a piece of a URL,
//! other than a short number where a number belongs and words that are known here.

use deadpool_redis::redis::io::tcp::TcpSettings;
use deadpool_redis::redis::{ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::error::ConfigError;

const ALLOWED: &str = "redis://[user:password@]host[:port][/db], rediss://... with the feature `tls`, \
                       redis+unix:///path[?db=...&user=...&pass=...], \
                       redis-sentinel://[user:password@]host[:port][,...]/master[/db], \
                       redis-cluster://[user:password@]host[:port][,...]";
const SENTINEL_PORT: u16 = 26379;
const REDIS_PORT: u16 = 6379;
/// As many as the setting `databases` of Redis can be.
const DB_MAX: u32 = i32::MAX.unsigned_abs();
/// A number that is longer than this may be a password, and is not shown.
const SHOWN_MAX: usize = 5;
/// Schemes that are written here by mistake.
const OTHER_SCHEMES: [&str; 6] = ["http", "https", "tcp", "tcps", "tls", "ssl"];

/// What a URL says.
#[derive(Clone)]
pub(super) struct Url {
    pub(super) servers: Servers,
    /// Whether the servers are spoken to over TLS.
    pub(super) tls: bool,
    /// Whether the sentinels are.
    pub(super) sentinel_tls: bool,
}

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

impl Url {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        // The line end of a file that the URL was read from.
        let url = url.trim();
        let Some((scheme, rest)) = url.split_once("://") else {
            return Err(bad("it has no `://`"));
        };
        if rest.contains(|c: char| c.is_control()) {
            return Err(bad("it has a control character, which must be percent-encoded"));
        }
        let (read, tls): (fn(&str) -> _, bool) = match scheme {
            "redis" | "valkey" => (one, false),
            "rediss" | "valkeys" => (one, true),
            "redis+unix" | "valkey+unix" | "unix" => (unix, false),
            // `+` is how it is written for Python's clients.
            "redis-sentinel" | "redis+sentinel" => (sentinel, false),
            "rediss-sentinel" | "rediss+sentinel" => (sentinel, true),
            "redis-cluster" | "redis+cluster" => (cluster, false),
            "rediss-cluster" | "rediss+cluster" => (cluster, true),
            scheme if OTHER_SCHEMES.contains(&scheme) => {
                return Err(bad(format!("the scheme {scheme:?} is not known")));
            }
            _ => return Err(bad("its scheme is not known")),
        };
        if tls && cfg!(not(feature = "tls")) {
            return Err(bad(format!("{scheme}:// needs the feature `tls` of tower-semaphore")));
        }
        let (servers, sentinel_tls) = read(rest)?;
        let sentinel_tls =
            sentinel_tls.unwrap_or(tls) && matches!(servers, Servers::Sentinel { .. });
        if sentinel_tls && cfg!(not(feature = "tls")) {
            return Err(bad("sentinel_tls=true needs the feature `tls` of tower-semaphore"));
        }
        Ok(Self { servers, tls, sentinel_tls })
    }
}

/// What the rest of a URL names, and what it says of TLS to sentinels.
type Named = (Servers, Option<bool>);

fn one(rest: &str) -> Result<Named, ConfigError> {
    let Parts { user, hosts, path, query } = parts(rest, REDIS_PORT, "")?;
    let [host] = &*hosts else {
        return Err(bad(
            "it has several hosts; a cluster begins with redis-cluster://, and sentinels with \
             redis-sentinel://",
        ));
    };
    check_db(path)?;
    for (name, value) in options(query, &["protocol"])? {
        check_protocol(name, value)?;
    }
    Ok((Servers::One(info(&format!("redis://{user}{host}/{path}"))?), None))
}

fn unix(rest: &str) -> Result<Named, ConfigError> {
    check_fragment(rest)?;
    let (path, query) = rest.split_once('?').unwrap_or((rest, ""));
    if !path.starts_with('/') {
        return Err(bad(
            "the path of a socket is not absolute; the URL begins with redis+unix:///",
        ));
    }
    for (name, value) in options(query, &["db", "user", "pass", "protocol"])? {
        match name {
            "db" => check_db(value)?,
            "protocol" => check_protocol(name, value)?,
            _ => {}
        }
    }
    Ok((Servers::One(info(&format!("redis+unix://{rest}"))?), None))
}

fn sentinel(rest: &str) -> Result<Named, ConfigError> {
    let Parts { user, hosts, path, query } = parts(rest, SENTINEL_PORT, ",@")?;
    let mut path = path.split('/');
    let master = path.next().unwrap_or_default();
    if master.is_empty()
        || !master.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c))
    {
        return Err(bad(
            "what stands after the sentinels cannot be the name of a master; allowed in \
             it: A-Z a-z 0-9 . _ -",
        ));
    }
    let db = path.next().unwrap_or_default();
    check_db(db)?;
    if path.any(|more| !more.is_empty()) {
        return Err(bad("something stands after the database"));
    }
    let (mut sentinel_user, mut sentinel_password, mut sentinel_tls) = ("", "", None);
    for (name, value) in
        options(query, &["sentinel_username", "sentinel_password", "sentinel_tls"])?
    {
        if value.contains(['@', '/', ':', '?']) {
            return Err(bad(format!("the value of {name} must be percent-encoded")));
        }
        match (name, value) {
            ("sentinel_username", _) => sentinel_user = value,
            ("sentinel_password", _) => sentinel_password = value,
            (_, "true") => sentinel_tls = Some(true),
            (_, "false") => sentinel_tls = Some(false),
            _ => return Err(bad("sentinel_tls is neither `true` nor `false`")),
        }
    }
    let to_sentinel = match (sentinel_user, sentinel_password) {
        ("", "") => String::new(),
        (user, password) => format!("{user}:{password}@"),
    };
    let sentinels = hosts.iter().map(|host| info(&format!("redis://{to_sentinel}{host}/")));
    let sentinels = sentinels
        .map(|info| {
            let info = info?;
            // Sentinels are only asked; RESP2 is enough, and needs no HELLO.
            let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP2);
            Ok(info.set_redis_settings(settings))
        })
        .collect::<Result<_, _>>()?;
    let server = info(&format!("redis://{user}{}/{db}", hosts[0]))?;
    Ok((Servers::Sentinel { sentinels, master: master.to_owned(), server }, sentinel_tls))
}

fn cluster(rest: &str) -> Result<Named, ConfigError> {
    let Parts { user, hosts, path, query } = parts(rest, REDIS_PORT, ",@")?;
    if !matches!(path, "" | "0") {
        check_db(path)?;
        return Err(bad(format!("a cluster has no database but 0{}", said(path))));
    }
    if !query.is_empty() {
        return Err(bad("a cluster has no options"));
    }
    let nodes = hosts.iter().map(|host| info(&format!("redis://{user}{host}/")));
    Ok((Servers::Cluster(nodes.collect::<Result<_, _>>()?), None))
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

/// `cut` are the characters, of those that may stand between hosts, that no user or password may have.
fn parts<'a>(rest: &'a str, port: u16, cut: &str) -> Result<Parts<'a>, ConfigError> {
    check_fragment(rest)?;
    let (user, rest) = rest.split_at(rest.rfind('@').map_or(0, |at| at + 1));
    // Else a piece of a password would be the host that is connected to.
    let name = user.strip_suffix('@').unwrap_or(user);
    if name.contains(|c| matches!(c, '/' | '?') || cut.contains(c)) {
        return Err(bad(
            "user and password must be percent-encoded where they have one of / ? # , @",
        ));
    }
    let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
    let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
    let hosts = hosts.split(',').enumerate().map(|(i, host)| {
        with_port(host, port).map_err(|why| bad(format!("host {}: {why}", i + 1)))
    });
    let hosts = hosts.collect::<Result<_, _>>()?;
    Ok(Parts { user, hosts, path: path.trim_end_matches('/'), query })
}

/// The host with its port: `name`, `name:1`, `1.2.3.4:1`, `[::1]:1`. Else what is wrong with it.
fn with_port(host: &str, port: u16) -> Result<String, String> {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, digits)) if !digits.ends_with(']') => {
            let number = digits.parse().ok().filter(|number| *number > 0);
            let Some(number) = number else {
                return Err(format!("its port{} is not a number from 1 to 65535", shown(digits)));
            };
            (name, number)
        }
        _ => (host, port),
    };
    let plain = |name: &str| name.bytes().all(|c| c.is_ascii_alphanumeric() || b".-_".contains(&c));
    let six = name.strip_prefix('[').and_then(|name| name.strip_suffix(']'));
    if name.is_empty() {
        return Err("its name is missing".to_owned());
    }
    if !six.map_or_else(|| plain(name), |six| six.parse::<std::net::Ipv6Addr>().is_ok()) {
        return Err(
            "it is neither a name nor an address; allowed in a name: A-Z a-z 0-9 . - _; an \
                    IPv6 address stands in [ ]"
                .to_owned(),
        );
    }
    Ok(format!("{name}:{port}"))
}

/// The options of a query, all of them among those `known`.
fn options<'a>(
    query: &'a str,
    known: &[&'static str],
) -> Result<Vec<(&'static str, &'a str)>, ConfigError> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty()).enumerate();
    let option = |(i, pair): (usize, &'a str)| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        let name = known.iter().find(|known| **known == name);
        let Some(name) = name else {
            return Err(bad(format!(
                "option {} is not known; known here: {}; an & in a value is written %26",
                i + 1,
                known.join(", ")
            )));
        };
        Ok((*name, value))
    };
    pairs.map(option).collect()
}

/// What stands behind a `#` is dropped without a word by those who parse URLs, and may be half of a
/// password.
fn check_fragment(rest: &str) -> Result<(), ConfigError> {
    if rest.contains('#') {
        return Err(bad("nothing may stand behind a #, which must be percent-encoded elsewhere"));
    }
    Ok(())
}

fn check_db(db: &str) -> Result<(), ConfigError> {
    let is_number = !db.starts_with('+') && db.parse().is_ok_and(|db: u32| db <= DB_MAX);
    if db.is_empty() || is_number {
        return Ok(());
    }
    Err(bad(format!("the database{} is not a number from 0 to {DB_MAX}", shown(db))))
}

fn check_protocol(name: &str, value: &str) -> Result<(), ConfigError> {
    match value {
        "3" | "resp3" => Ok(()),
        _ => Err(bad(format!("{name} is not `resp3`, which is needed"))),
    }
}

/// For behind a word: what it was, if that is a number and no password.
fn shown(value: &str) -> String {
    let digits = value.strip_prefix('-').unwrap_or(value);
    let is_number = !digits.is_empty() && digits.bytes().all(|c| c.is_ascii_digit());
    if is_number && value.len() <= SHOWN_MAX { format!(" {value}") } else { String::new() }
}

/// For the end of a clause.
fn said(value: &str) -> String {
    match &*shown(value) {
        "" => String::new(),
        shown => format!(", and the URL says{shown}"),
    }
}

/// Of one server.
fn info(url: &str) -> Result<ConnectionInfo, ConfigError> {
    // The text is redis' own, and has nothing of the URL in it, if there is no detail.
    let info = url.into_connection_info().map_err(|error| {
        bad(if error.detail().is_none() { error.to_string() } else { error.category().to_owned() })
    })?;
    let settings = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        // A call that an ACL need not allow for, and nobody here asks for what it tells.
        .set_skip_set_lib_name();
    let tcp = TcpSettings::default().set_nodelay(true);
    Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
}

fn bad(why: impl Into<String>) -> ConfigError {
    let why = why.into();
    ConfigError::new(format!("Redis URL: cannot be used ({why}); allowed: {ALLOWED}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{Servers, Url};

    fn error(url: &str) -> String {
        Url::parse(url).err().unwrap_or_else(|| panic!("{url} was taken")).to_string()
    }

    #[test]
    fn sentinels_are_read() {
        for plus in ["redis-sentinel", "redis+sentinel"] {
            let url = format!(
                "{plus}://app:p%40w@h1,h2:1,[::1]:2/my-master/3?sentinel_username=s&sentinel_password=x%2F"
            );
            let Ok(Servers::Sentinel { sentinels, master, server }) =
                Url::parse(&url).map(|url| url.servers)
            else {
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
        let url = Url::parse("redis-cluster://:pw@h1:7000,h2/0");
        let Ok(Servers::Cluster(nodes)) = url.map(|url| url.servers) else { panic!("not read") };
        let addresses: Vec<_> = nodes.iter().map(|one| one.addr().to_string()).collect();
        assert_eq!(addresses, ["h1:7000", "h2:6379"]);
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("pw")));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (url, named) in [
            ("localhost:6379", "`://`"),
            ("http://h/", "\"http\""),
            ("redis://h:0", "host 1: its port 0 is not a number from 1 to 65535"),
            ("redis://u:p@h:70000/", "host 1: its port 70000 is not a number from 1 to 65535"),
            ("redis://h:port/", "host 1: its port is not a number from 1 to 65535"),
            ("redis://h/-1", "the database -1 is not a number from 0 to 2147483647"),
            ("redis://h/+1", "the database is not a number from 0 to 2147483647"),
            ("redis://h/jobs", "the database is not a number from 0 to 2147483647"),
            ("redis://h/0/1", "the database is not a number from 0 to 2147483647"),
            ("redis://h1,h2", "redis-cluster://"),
            ("redis://", "host 1: its name is missing"),
            ("redis://h?timeout=3", "option 1 is not known; known here: protocol;"),
            ("redis://h?protocol=resp2", "protocol is not `resp3`"),
            ("redis://h#insecure", "behind a #"),
            ("redis://:%ff@h", "not valid UTF-8"),
            ("redis://h\t/", "control character"),
            ("redis+unix://socket", "not absolute"),
            ("redis+unix:///socket?db=x", "the database is not"),
            ("redis+unix:///socket?pass=a&b", "option 2 is not known; known here: db, user, pass"),
            ("redis-cluster://u:a@h1,u:a@h2", "must be percent-encoded where"),
            ("redis-sentinel://h1:26379", "name of a master"),
            ("redis-sentinel://h1/a b", "name of a master"),
            ("redis-sentinel://h1:x/m", "host 1: its port is not"),
            ("redis-sentinel://h1:0/m", "host 1: its port 0 is not"),
            ("redis-sentinel://h1,h2:70000/m", "host 2: its port 70000 is not"),
            ("redis-sentinel://h1,,h2/m", "host 2: its name is missing"),
            ("redis-sentinel://h1,h_2,h!3/m", "host 3: it is neither a name nor an address"),
            ("redis-sentinel://[::g]:1/m", "host 1: it is neither a name nor an address"),
            ("redis-sentinel://h1/m/x", "the database is not"),
            ("redis-sentinel://h1/m/0/y", "after the database"),
            ("redis-sentinel://h1/m?timeout=3", "option 1 is not known"),
            ("redis-sentinel://h1/m?sentinel_tls=no", "neither `true` nor `false`"),
            ("redis-sentinel://h1/m#x", "behind a #"),
            ("redis-cluster://", "host 1: its name is missing"),
            ("redis-cluster://h1:7000/3", "no database but 0, and the URL says 3"),
            ("redis-cluster://h1:7000?x=1", "options"),
        ] {
            let error = error(url);
            assert!(error.contains(named), "{url}: {error}");
        }
    }

    #[test]
    fn what_can_be_used_is() {
        for url in [
            "redis://user:pa:ss@host",
            "redis://user:p@s,s@host",
            "redis://localhost/0?protocol=resp3\n",
            "redis://host:65535/2147483647",
            "valkey://[::1]",
            "redis+unix:///tmp/a.sock?db=1&user=u&pass=a%26b",
        ] {
            assert!(Url::parse(url).is_ok(), "{url}");
        }
    }

    #[cfg(not(feature = "tls"))]
    #[test]
    fn tls_names_its_feature() {
        for url in [
            "rediss://h",
            "valkeys://h",
            "rediss-sentinel://h/m",
            "rediss-cluster://h",
            "redis-sentinel://h/m?sentinel_tls=true",
        ] {
            let error = error(url);
            assert!(error.contains("needs the feature `tls` of tower-semaphore"), "{url}: {error}");
        }
    }

    #[cfg(feature = "tls")]
    #[test]
    fn sentinels_have_tls_as_the_servers_have_unless_told_otherwise() {
        let tls = |url: &str| Url::parse(url).map(|url| (url.tls, url.sentinel_tls)).unwrap();
        assert_eq!(tls("redis-sentinel://h/m"), (false, false));
        assert_eq!(tls("rediss-sentinel://h/m"), (true, true));
        assert_eq!(tls("redis-sentinel://h/m?sentinel_tls=true"), (false, true));
        assert_eq!(tls("rediss-sentinel://h/m?sentinel_tls=false"), (true, false));
        assert_eq!(tls("rediss-cluster://h"), (true, false));
        assert_eq!(tls("redis+unix:///h"), (false, false));
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
            "redis-sentinel://h1/m?sentinel_password=hunt&er2",
            "redis-sentinel://h1/m?hunter2",
            "redis-cluster://u:hunt%40er2",
            "redis://u:hunt%40er2",
            "redis://u:hunter2",
            "redis://user:hunt:er2",
            "redis://u:hunt/er2@h1",
            "redis://u:1?hunter2@h1",
            "redis://u:1#hunter2@h1",
            "redis+unix:///socket?pass=a&hunter2",
            "hunter2://h1",
        ] {
            let error = error(url);
            assert!(!error.contains("hunt") && !error.contains("er2"), "{url}: {error}");
        }
    }

    /// A piece of a URL: what belongs there, what does not, and what cuts a URL in two.
    fn piece() -> impl Strategy<Value = String> {
        const WORDS: &[&str] = &[
            "redis://",
            "rediss://",
            "redis-sentinel://",
            "redis-cluster://",
            "redis+unix://",
            "://",
            "/",
            ":",
            "@",
            ",",
            "?",
            "#",
            "&",
            "=",
            "%40",
            "%2F",
            "%zz",
            "%",
            "[",
            "]",
            " ",
            "\n",
            "h1",
            "user",
            "6379",
            "70000",
            "0",
            "/0",
            "/m",
            "?pass=",
            "?db=",
            "?protocol=",
            "?sentinel_password=",
            "&sentinel_username=",
            "&sentinel_tls=",
            "[::1]",
        ];
        prop_oneof![
            4 => prop::sample::select(WORDS).prop_map(str::to_owned),
            1 => "[a-z0-9.%é]{0,4}",
        ]
    }

    /// A URL with all that one can have, of which some pieces are then replaced or left out.
    fn url() -> impl Strategy<Value = Vec<String>> {
        let shapes = prop::sample::select(
            &[
                "redis:// user : pw @ h1 : 6379 / 0 ? protocol = resp3",
                "rediss:// user : pw @ h1",
                "redis+unix:// /socket ? db = 0 & user = user & pass = pw",
                "redis-sentinel:// user : pw @ h1 : 1 , h2 / master / 0 ? sentinel_username = u & \
             sentinel_password = pw & sentinel_tls = false",
                "redis-cluster:// user : pw @ h1 : 7000 , h2 / 0",
            ][..],
        );
        let change = (any::<prop::sample::Index>(), prop::option::of(piece()));
        let changes = prop::collection::vec(change, 0..4);
        let whole = (shapes, changes).prop_map(|(shape, changes)| {
            let mut pieces: Vec<_> = shape.split_whitespace().map(str::to_owned).collect();
            for (at, piece) in changes {
                let at = at.index(pieces.len());
                pieces[at] = piece.unwrap_or_default();
            }
            pieces
        });
        prop_oneof![2 => whole, 1 => prop::collection::vec(piece(), 1..12)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4096))]

        /// Wherever a secret stands, alone or between other pieces.
        #[test]
        fn a_secret_is_shown_in_no_place_of_a_url(
            mut pieces in url(),
            at in any::<prop::sample::Index>(),
            replaces in any::<bool>(),
            secret in prop::sample::select(&["hunter2", "HUNTER", "sk-x_y.z", "hunt%40er2", "31337001"][..]),
        ) {
            let at = at.index(pieces.len());
            if replaces {
                pieces[at] = secret.to_owned();
            } else {
                pieces.insert(at, secret.to_owned());
            }
            let url = pieces.concat();
            let builder = crate::backend::RedisBackend::builder(&*url);
            let mut shown = format!("{builder:?}");
            match builder.build() {
                Ok(backend) => shown += &format!("{backend:?}"),
                Err(error) => {
                    let mut error: Option<&dyn std::error::Error> = Some(&error);
                    while let Some(one) = error {
                        shown += &format!("{one} {one:?} {one:#?}");
                        error = one.source();
                    }
                }
            }
            for part in secret.split("%40") {
                prop_assert!(!shown.contains(part), "{}: {}", url, shown);
            }
        }
    }
}
