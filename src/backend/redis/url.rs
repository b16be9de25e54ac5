//! Parses URLs of standalone servers, sentinels and clusters.
//!
//! Errors show no part of a URL, except a short number where a number is expected, and words that are known here;
//! `backend/url.rs` says why.

use redis::{ConnectionInfo, IntoConnectionInfo, ProtocolVersion};

use crate::backend::url::{Parts, check_fragment, parts, shown, split, unknown_scheme};
use crate::error::ConfigError;

const ALLOWED: &str = "redis://[user:password@]host[:port][/db], rediss://... with the feature `tls`, \
                       redis+unix:///path[?db=...&user=...&pass=...], \
                       redis-sentinel://[user:password@]host[:port][,...]/master[/db], \
                       redis-cluster://[user:password@]host[:port][,...]";
const SENTINEL_PORT: u16 = 26379;
const REDIS_PORT: u16 = 6379;
/// The largest value of the setting `databases` of Redis.
const DB_MAX: u32 = i32::MAX.unsigned_abs();

/// A parsed URL.
#[derive(Clone)]
pub(super) struct Url {
    pub(super) servers: Servers,
    /// Whether connections to the servers use TLS.
    pub(super) tls: bool,
    /// Whether connections to the sentinels use TLS.
    pub(super) sentinel_tls: bool,
}

/// The servers, and how to connect to each.
#[derive(Clone)]
pub(super) enum Servers {
    One(ConnectionInfo),
    Sentinel {
        sentinels: Vec<ConnectionInfo>,
        /// The sentinels' name for the master.
        master: String,
        /// The settings for the servers that they name, without an address.
        server: ConnectionInfo,
    },
    /// Some nodes. Each knows all others.
    Cluster(Vec<ConnectionInfo>),
}

impl Url {
    pub(super) fn parse(url: &str) -> Result<Self, ConfigError> {
        let (scheme, rest) = split(url).map_err(bad)?;
        let (read, tls): (fn(&str) -> _, bool) = match scheme {
            "redis" | "valkey" => (one, false),
            "rediss" | "valkeys" => (one, true),
            "redis+unix" | "valkey+unix" | "unix" => (unix, false),
            // Python clients write it with `+`.
            "redis-sentinel" | "redis+sentinel" => (sentinel, false),
            "rediss-sentinel" | "rediss+sentinel" => (sentinel, true),
            "redis-cluster" | "redis+cluster" => (cluster, false),
            "rediss-cluster" | "rediss+cluster" => (cluster, true),
            scheme => return Err(bad(unknown_scheme(scheme))),
        };
        if tls && cfg!(not(feature = "tls-no-provider")) {
            return Err(bad(format!("{scheme}:// needs the feature `tls` of tower-semaphore")));
        }
        let (servers, sentinel_tls) = read(rest)?;
        let sentinel_tls =
            sentinel_tls.unwrap_or(tls) && matches!(servers, Servers::Sentinel { .. });
        if sentinel_tls && cfg!(not(feature = "tls-no-provider")) {
            return Err(bad("sentinel_tls=true needs the feature `tls` of tower-semaphore"));
        }
        Ok(Self { servers, tls, sentinel_tls })
    }
}

/// Parses the servers in the rest of a URL, and its setting of TLS for sentinels.
type Named = (Servers, Option<bool>);

fn one(rest: &str) -> Result<Named, ConfigError> {
    let Parts { user, hosts, path, query } = parts(rest, REDIS_PORT, "").map_err(bad)?;
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
    check_fragment(rest).map_err(bad)?;
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
    let Parts { user, hosts, path, query } = parts(rest, SENTINEL_PORT, ",@").map_err(bad)?;
    let mut path = path.split('/');
    let master = path.next().unwrap_or_default();
    if master.is_empty()
        || !master.bytes().all(|c| c.is_ascii_alphanumeric() || b"._-".contains(&c))
    {
        return Err(bad(
            "the name of a master after the sentinels is missing or invalid; expected A-Z a-z 0-9 . _ -",
        ));
    }
    let db = path.next().unwrap_or_default();
    check_db(db)?;
    if path.any(|more| !more.is_empty()) {
        return Err(bad("unexpected text after the database"));
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
            // Sentinels only answer queries: RESP2 is enough, and needs no HELLO.
            let settings = info.redis_settings().clone().set_protocol(ProtocolVersion::RESP2);
            Ok(info.set_redis_settings(settings))
        })
        .collect::<Result<_, _>>()?;
    let server = info(&format!("redis://{user}{}/{db}", hosts[0]))?;
    Ok((Servers::Sentinel { sentinels, master: master.to_owned(), server }, sentinel_tls))
}

fn cluster(rest: &str) -> Result<Named, ConfigError> {
    let Parts { user, hosts, path, query } = parts(rest, REDIS_PORT, ",@").map_err(bad)?;
    if !matches!(path, "" | "0") {
        check_db(path)?;
        return Err(bad(format!("a cluster has only database 0{}", said(path))));
    }
    if !query.is_empty() {
        return Err(bad("a cluster has no options"));
    }
    let nodes = hosts.iter().map(|host| info(&format!("redis://{user}{host}/")));
    Ok((Servers::Cluster(nodes.collect::<Result<_, _>>()?), None))
}

/// Parses the options of a query. All must be among those `known`.
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

/// Returns a number that cannot be a password as a clause.
fn said(value: &str) -> String {
    match &*shown(value) {
        "" => String::new(),
        shown => format!(", but the URL has{shown}"),
    }
}

/// Parses the settings of one server.
fn info(url: &str) -> Result<ConnectionInfo, ConfigError> {
    // An error without a detail has a constant text of the redis crate, which shows nothing of the URL.
    let info = url.into_connection_info().map_err(|error| {
        bad(if error.detail().is_none() { error.to_string() } else { error.category().to_owned() })
    })?;
    let settings = info
        .redis_settings()
        .clone()
        .set_protocol(ProtocolVersion::RESP3)
        // Saves a command, which an ACL would have to permit.
        .set_skip_set_lib_name();
    Ok(info.set_redis_settings(settings))
}

fn bad(why: impl Into<String>) -> ConfigError {
    let why = why.into();
    ConfigError::new(format!("Redis URL cannot be used: {why}; expected {ALLOWED}"))
}

#[cfg(test)]
mod tests;
