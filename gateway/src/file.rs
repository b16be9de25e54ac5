//! The configuration file: TOML, with the names and values of the command line.

use std::collections::HashMap;
use std::fmt::{self, Display};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::HeaderName;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use toml::de::{DeTable, DeValue};
use tower_semaphore::{Adaptive, ConfigError, Limit, Name};

use super::args::{self, Key, Rule, Starts, Statuses};
use super::peer::TrustedProxies;
use super::secret::Secret;
use super::site::{self, Bound, HostSent, Loss, Site};
use super::upstream::Upstream;

/// The settings of the site, and a `[[rule]]` for each limit, outermost first.
#[derive(Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
struct Contents {
    #[serde(default, deserialize_with = "address")]
    listen: Option<SocketAddr>,
    #[serde(default, deserialize_with = "upstream")]
    upstream: Option<Upstream>,
    #[serde(default, deserialize_with = "redis")]
    redis: Option<Secret>,
    #[cfg(feature = "etcd")]
    #[serde(default, deserialize_with = "etcd")]
    etcd: Option<Secret>,
    #[cfg(feature = "etcd")]
    #[serde(default)]
    etcd_whole_grace: bool,
    #[cfg(feature = "tls")]
    backend_ca: Option<PathBuf>,
    #[cfg(feature = "tls")]
    backend_cert: Option<PathBuf>,
    #[cfg(feature = "tls")]
    backend_key: Option<PathBuf>,
    after_loss: Option<Loss>,
    tenant_salt_file: Option<PathBuf>,
    host: Option<HostSent>,
    #[serde(default, deserialize_with = "trusted_proxies")]
    trusted_proxies: Option<TrustedProxies>,
    #[serde(default, deserialize_with = "bound")]
    header_timeout: Option<Bound>,
    #[serde(default, deserialize_with = "bound")]
    upstream_timeout: Option<Bound>,
    #[serde(default, deserialize_with = "bound")]
    idle_timeout: Option<Bound>,
    #[serde(default, deserialize_with = "bound")]
    upstream_idle_timeout: Option<Bound>,
    #[serde(default, deserialize_with = "keepalive")]
    keepalive: Option<Bound>,
    #[serde(default, deserialize_with = "some_duration")]
    drain: Option<Duration>,
    #[serde(default, deserialize_with = "max_connections")]
    max_connections: Option<usize>,
    #[serde(default, deserialize_with = "max_requests")]
    max_requests: Option<usize>,
    #[serde(default, deserialize_with = "own_address")]
    status: Option<SocketAddr>,
    access_log: Option<PathBuf>,
    #[serde(default)]
    access_log_keys: bool,
    #[cfg(feature = "admin")]
    #[serde(default, deserialize_with = "own_address")]
    admin: Option<SocketAddr>,
    #[cfg(feature = "admin")]
    #[serde(default, deserialize_with = "admin_token")]
    admin_token: Option<Secret>,
    #[cfg(feature = "admin")]
    #[serde(default)]
    admin_host: Vec<String>,
    #[serde(default, rename = "rule")]
    rules: Vec<Rule>,
}

/// A parsed file.
pub(crate) struct File {
    name: String,
    text: String,
    pub(crate) site: Site,
    pub(crate) rules: Vec<Rule>,
}

/// An error in a file, with its line, or on the command line.
#[derive(Debug)]
pub(crate) struct FileError {
    place: String,
    what: String,
}

impl FileError {
    pub(crate) fn on_the_command_line(what: impl Display) -> Self {
        Self { place: String::new(), what: what.to_string() }
    }
}

impl Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.place {
            "" => f.write_str(&self.what),
            place => write!(f, "{place}: {}", self.what),
        }
    }
}

impl File {
    pub(crate) fn read(path: &Path) -> Result<Self, FileError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|error| FileError { place: name.clone(), what: error.to_string() })?;
        let contents: Contents = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| line(&text, span.start));
            FileError { place: format!("{name}:{line}"), what: without_value(error.message()) }
        })?;
        let site = Site {
            listen: contents.listen,
            upstream: contents.upstream,
            redis: contents.redis,
            #[cfg(feature = "etcd")]
            etcd: contents.etcd,
            #[cfg(feature = "etcd")]
            etcd_whole_grace: contents.etcd_whole_grace,
            #[cfg(feature = "tls")]
            certificates: super::certificates::Certificates {
                ca: contents.backend_ca,
                cert: contents.backend_cert,
                key: contents.backend_key,
            },
            after_loss: contents.after_loss,
            tenant_salt_file: contents.tenant_salt_file,
            host: contents.host,
            trusted_proxies: contents.trusted_proxies,
            header_timeout: contents.header_timeout,
            upstream_timeout: contents.upstream_timeout,
            idle_timeout: contents.idle_timeout,
            upstream_idle_timeout: contents.upstream_idle_timeout,
            keepalive: contents.keepalive,
            drain: contents.drain,
            max_connections: contents.max_connections,
            max_requests: contents.max_requests,
            status: contents.status,
            access_log: contents.access_log,
            access_log_keys: contents.access_log_keys,
            #[cfg(feature = "admin")]
            admin: super::admin::AdminArgs {
                address: contents.admin,
                token: contents.admin_token,
                hosts: contents.admin_host,
            },
        };
        let file = Self { name, text, site, rules: contents.rules };
        file.check()?;
        Ok(file)
    }

    fn check(&self) -> Result<(), FileError> {
        if self.rules.is_empty() {
            return Err(self.error("no [[rule]]; expected one or more".to_owned()));
        }
        let mut names = HashMap::new();
        for (i, rule) in self.rules.iter().enumerate() {
            rule.check().map_err(|(field, what)| self.rule_error(i, field, &what))?;
            let spelled = rule.check_spellings(&self.rules[..i]);
            spelled.map_err(|(field, what)| self.rule_error(i, field, &what))?;
            // A request that takes two permits of one semaphore can wait for itself.
            if let Some(first) = names.insert(&rule.name, i) {
                let line = self.rule_line(first, "name");
                let what = format!(
                    "{:?} is the name of the rule in line {line}; expected each name once",
                    rule.name
                );
                return Err(self.rule_error(i, "name", &what));
            }
        }
        Ok(())
    }

    /// An error of the crate in a rule.
    pub(crate) fn refused(&self, rule: usize, error: &ConfigError) -> FileError {
        let what = error.to_string();
        let words = [("lease", "lease"), ("wait timeout", "wait"), ("layer name", "name")];
        let field = words.iter().find(|(word, _)| what.starts_with(word)).map_or("", |word| word.1);
        let place = format!("{}:{}", self.name, self.rule_line(rule, field));
        FileError { place, what }
    }

    /// An error in a field outside all rules.
    pub(crate) fn site_error(&self, field: &str, what: impl Display) -> FileError {
        let line = self.line_of(|table| key_line(&self.text, table, field)).unwrap_or(1);
        FileError { place: format!("{}:{line}", self.name), what: format!("{field}: {what}") }
    }

    fn error(&self, what: String) -> FileError {
        FileError { place: self.name.clone(), what }
    }

    fn rule_error(&self, rule: usize, field: &str, what: &str) -> FileError {
        let place = format!("{}:{}", self.name, self.rule_line(rule, field));
        FileError { place, what: format!("{field}: {what}") }
    }

    /// The line of a rule's field, or of the rule if the field is not set.
    fn rule_line(&self, rule: usize, field: &str) -> usize {
        let line = |table: &DeTable<'_>| {
            let DeValue::Array(rules) = table.get("rule")?.get_ref() else { return None };
            let rule = rules.get(rule)?;
            let DeValue::Table(table) = rule.get_ref() else { return None };
            key_line(&self.text, table, field).or_else(|| Some(line(&self.text, rule.span().start)))
        };
        self.line_of(line).unwrap_or(1)
    }

    fn line_of(&self, find: impl FnOnce(&DeTable<'_>) -> Option<usize>) -> Option<usize> {
        let table = DeTable::parse(&self.text).ok()?;
        find(table.get_ref())
    }
}

fn key_line(text: &str, table: &DeTable<'_>, field: &str) -> Option<usize> {
    let mut keys = table.iter().map(|(key, _)| key);
    let key = keys.find(|key| key.get_ref().as_ref() == field)?;
    Some(line(text, key.span().start))
}

fn line(text: &str, at: usize) -> usize {
    1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count()
}

/// What serde says of a value of another type, without the value: it may be a secret that lacks its quotes. The same
/// for an unknown field: it may be a key that belongs into a table such as `limit-for`.
fn without_value(message: &str) -> String {
    for (begin, what) in [
        ("invalid type: ", "invalid value"),
        ("invalid value: ", "invalid value"),
        ("unknown field ", "unknown field"),
    ] {
        if let Some(rest) = message.strip_prefix(begin) {
            return match rest.rsplit_once(", expected ") {
                Some((_, expected)) => format!("{what}; expected {expected}"),
                None => what.to_owned(),
            };
        }
    }
    message.to_owned()
}

// ===== values, as on the command line =====

fn parsed<'de, D, T, E>(
    deserializer: D,
    parse: impl Fn(&str) -> Result<T, E>,
) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    E: Display,
{
    let text = words(&toml::Value::deserialize(deserializer)?);
    parse(&text).map_err(|allowed| D::Error::custom(format!("{text:?} cannot be used; {allowed}")))
}

fn words(value: &toml::Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned)
}

fn address<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
    parsed(d, site::address).map(Some)
}

fn own_address<'de, D: Deserializer<'de>>(d: D) -> Result<Option<SocketAddr>, D::Error> {
    parsed(d, site::own_address).map(Some)
}

fn trusted_proxies<'de, D: Deserializer<'de>>(d: D) -> Result<Option<TrustedProxies>, D::Error> {
    parsed(d, str::parse).map(Some)
}

fn bound<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Bound>, D::Error> {
    parsed(d, site::bound).map(Some)
}

fn keepalive<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Bound>, D::Error> {
    parsed(d, site::keepalive).map(Some)
}

fn some_duration<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Duration>, D::Error> {
    parsed(d, args::duration).map(Some)
}

fn max_connections<'de, D: Deserializer<'de>>(d: D) -> Result<Option<usize>, D::Error> {
    parsed(d, site::max_connections).map(Some)
}

fn max_requests<'de, D: Deserializer<'de>>(d: D) -> Result<Option<usize>, D::Error> {
    parsed(d, site::max_requests).map(Some)
}

fn upstream<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Upstream>, D::Error> {
    let text = secret(d, "upstream")?;
    text.parse().map(Some).map_err(|allowed| {
        D::Error::custom(if Upstream::may_be_secret(&text) {
            format!("upstream: cannot be used; {allowed}")
        } else {
            format!("{text:?} cannot be used; {allowed}")
        })
    })
}

fn redis<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Secret>, D::Error> {
    secret(d, "redis").map(|url| Some(url.into()))
}

#[cfg(feature = "etcd")]
fn etcd<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Secret>, D::Error> {
    secret(d, "etcd").map(|url| Some(url.into()))
}

#[cfg(feature = "admin")]
fn admin_token<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Secret>, D::Error> {
    secret(d, "admin-token").map(|token| Some(token.into()))
}

/// A string that no error shows.
fn secret<'de, D: Deserializer<'de>>(d: D, field: &str) -> Result<String, D::Error> {
    match toml::Value::deserialize(d) {
        Ok(toml::Value::String(text)) => Ok(text),
        _ => Err(D::Error::custom(format!("{field}: not a string; expected text in quotes"))),
    }
}

pub(crate) fn prefix<'de, D: Deserializer<'de>>(d: D) -> Result<String, D::Error> {
    parsed(d, args::prefix)
}

pub(crate) fn key<'de, D: Deserializer<'de>>(d: D) -> Result<Key, D::Error> {
    parsed(d, args::key)
}

pub(crate) fn limit<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Limit>, D::Error> {
    parsed(d, args::limit).map(Some)
}

pub(crate) fn limit_for<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<(Name, Limit)>, D::Error> {
    for_keys(d, "limit-for", args::limit)
}

pub(crate) fn each_for<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<(Name, Limit)>, D::Error> {
    for_keys(d, "each-for", args::limit)
}

pub(crate) fn weight_for<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<(Name, u32)>, D::Error> {
    for_keys(d, "weight-for", args::weight)
}

pub(crate) fn class_for<'de, D: Deserializer<'de>>(d: D) -> Result<Vec<(Name, u8)>, D::Error> {
    for_keys(d, "class-for", args::class)
}

/// Keys may be secrets, so that no error shows one.
fn for_keys<'de, D: Deserializer<'de>, T>(
    d: D,
    field: &str,
    parse: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<(Name, T)>, D::Error> {
    let Ok(toml::Value::Table(table)) = toml::Value::deserialize(d) else {
        let what = "not a table; expected keys with numbers, such as { acme = 20 }";
        return Err(D::Error::custom(format!("{field}: {what}")));
    };
    let said = table.into_iter().map(|(key, value)| {
        let text = words(&value);
        let value = parse(&text).map_err(|allowed| {
            D::Error::custom(format!("{field}: {text:?} cannot be used; {allowed}"))
        })?;
        Ok((Name::new(key), value))
    });
    said.collect()
}

/// As on the command line, in a list.
pub(crate) fn list<'de, D: Deserializer<'de>, T>(
    d: D,
    field: &str,
    example: &str,
    read: impl Fn(&str) -> Result<T, String>,
) -> Result<Vec<T>, D::Error> {
    let Ok(texts) = Vec::<String>::deserialize(d) else {
        let what = format!("{field}: not a list; expected texts, such as [\"{example}\"]");
        return Err(D::Error::custom(what));
    };
    let read = |text: &String| {
        read(text).map_err(|allowed| {
            D::Error::custom(format!("{field}: {text:?} cannot be used; {allowed}"))
        })
    };
    texts.iter().map(read).collect()
}

pub(crate) fn tenant<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Key>, D::Error> {
    parsed(d, args::tenant).map(Some)
}

pub(crate) fn cost<'de, D: Deserializer<'de>>(d: D) -> Result<Option<HeaderName>, D::Error> {
    parsed(d, args::cost).map(Some)
}

pub(crate) fn rate<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Starts>, D::Error> {
    parsed(d, args::rate).map(Some)
}

pub(crate) fn adaptive<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Adaptive>, D::Error> {
    parsed(d, args::adaptive).map(Some)
}

pub(crate) fn pause_on<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Statuses>, D::Error> {
    parsed(d, args::pause_on).map(Some)
}

pub(crate) fn duration<'de, D: Deserializer<'de>>(d: D) -> Result<Duration, D::Error> {
    parsed(d, args::duration)
}

pub(crate) fn count<'de, D: Deserializer<'de>>(d: D) -> Result<u32, D::Error> {
    parsed(d, args::count)
}

pub(crate) fn some_count<'de, D: Deserializer<'de>>(d: D) -> Result<Option<u32>, D::Error> {
    parsed(d, args::count).map(Some)
}
