//! What the command line says.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::net::SocketAddr;
use std::time::Duration;

use axum::http::{HeaderName, StatusCode};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use tower_semaphore::backend::{AfterLoss, RedisBackend};
use tower_semaphore::limit::{
    ConcurrencyLimitBuilder, HeaderKey, HoldUntil, MissingKey, OnLost, PathKey, PeerIpKey,
};
use tower_semaphore::{ConfigError, Limit, Name, OnUnavailable, Policy, Semaphore};

use super::proxy::Upstream;

/// A reverse proxy that lets no more than so many requests at a time through to an upstream,
/// counted together by all gateways that share a Redis.
#[derive(Debug, Parser)]
#[command(name = "gateway")]
pub(crate) struct Args {
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080", value_parser = address)]
    pub(crate) listen: SocketAddr,

    /// Where requests go: http://host[:port][/base]
    #[arg(long, value_name = "URL")]
    pub(crate) upstream: Upstream,

    /// Where permits are counted; in this process, unless given
    #[arg(long, value_name = "URL")]
    pub(crate) redis: Option<String>,

    /// Whose permits a request takes: global, path, peer-ip or header:NAME
    #[arg(long, default_value = "global", value_parser = key)]
    key: Key,

    /// Permits of each key: a number (0 refuses everything) or `unlimited`
    #[arg(long, value_name = "N", value_parser = limit, allow_hyphen_values = true)]
    limit: Limit,

    /// Permits of one key, such as acme=20; can be repeated
    #[arg(long, value_name = "KEY=N", value_parser = limit_for)]
    limit_for: Vec<(Name, Limit)>,

    /// How long a request may wait for a permit; 0s: it is refused at once
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    #[arg(allow_hyphen_values = true)]
    wait: Duration,

    /// How long a permit outlives a gateway that dies
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    #[arg(allow_hyphen_values = true)]
    lease: Duration,

    /// How many may wait for one key, in the whole fleet
    #[arg(long, value_name = "N", default_value_t = Policy::DEFAULT_MAX_QUEUE)]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    max_queue: u32,

    /// Until which end a permit is held: that of the response's body, or of its head
    #[arg(long, value_enum, default_value = "body")]
    hold: Hold,

    /// What becomes of a request without a key
    #[arg(long, value_enum, value_name = "WHAT", default_value = "reject")]
    missing_key: Missing,

    /// What becomes of a request whose permit was lost
    #[arg(long, value_enum, value_name = "WHAT", default_value = "abort")]
    on_lost: Lost,

    /// What becomes of a request while Redis cannot be asked; local takes --local-limit
    #[arg(long, value_enum, value_name = "WHAT", default_value = "reject")]
    on_unavailable: Unavailable,

    /// Permits of each key in this gateway alone, for --on-unavailable local
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    local_limit: Option<u32>,

    /// What happens after Redis may have lost data: grants go on, or are held back for one lease
    #[arg(long, value_enum, value_name = "WHAT", default_value = "continue")]
    after_loss: Loss,

    /// The name of the limit: gateways with the same one share their permits
    #[arg(long, default_value = "gateway")]
    pub(crate) name: String,
}

#[derive(Clone, Debug)]
enum Key {
    Global,
    Path,
    PeerIp,
    Header(HeaderName),
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Hold {
    Body,
    Head,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Missing {
    Reject,
    Bypass,
    Shared,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Lost {
    Abort,
    Continue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Unavailable {
    Reject,
    Admit,
    Local,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Loss {
    Continue,
    Quarantine,
}

impl Args {
    /// The command line of this process. One that cannot be used ends it.
    pub(crate) fn read() -> Self {
        let args = Self::parse();
        if matches!(args.key, Key::Global) && !args.limit_for.is_empty() {
            refuse("--limit-for: --key global has but one key; allowed: with any other --key");
        }
        let mut seen = HashSet::new();
        if let Some((key, _)) = args.limit_for.iter().find(|(key, _)| !seen.insert(key)) {
            refuse(format!("--limit-for: {key} is given twice; allowed: once for each key"));
        }
        let local = args.on_unavailable == Unavailable::Local;
        if local != args.local_limit.is_some() {
            refuse("--local-limit: allowed with --on-unavailable local, and needed there");
        }
        args
    }

    /// Where permits are counted.
    pub(crate) fn semaphore(&self) -> Result<Semaphore, ConfigError> {
        let Some(url) = &self.redis else { return Ok(Semaphore::in_memory()) };
        let after_loss = match self.after_loss {
            Loss::Continue => AfterLoss::Continue,
            Loss::Quarantine => AfterLoss::Quarantine,
        };
        Ok(Semaphore::new(RedisBackend::builder(url).after_loss(after_loss).build()?))
    }

    /// Sets the layer up as was said.
    pub(crate) fn apply(&self, builder: ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder {
        let builder = match &self.key {
            Key::Global => builder,
            Key::Path => builder.key(PathKey),
            Key::PeerIp => builder.key(PeerIpKey::new()),
            Key::Header(name) => builder.key(HeaderKey::new(name.clone())),
        };
        let limit = self.limit;
        let limits: HashMap<_, _> = self.limit_for.iter().cloned().collect();
        builder
            .limit_by(move |key, _| limits.get(key).copied().unwrap_or(limit))
            .wait_timeout(self.wait)
            .lease(self.lease)
            .max_queue(self.max_queue)
            .hold_until(match self.hold {
                Hold::Body => HoldUntil::BodyEnd,
                Hold::Head => HoldUntil::ResponseHead,
            })
            .on_missing_key(match self.missing_key {
                Missing::Reject => MissingKey::Reject(StatusCode::BAD_REQUEST),
                Missing::Bypass => MissingKey::Bypass,
                Missing::Shared => MissingKey::Shared,
            })
            .on_unavailable(match (self.on_unavailable, self.local_limit) {
                (Unavailable::Admit, _) => OnUnavailable::Admit,
                (Unavailable::Local, Some(share)) => OnUnavailable::Local(share),
                (Unavailable::Reject | Unavailable::Local, _) => OnUnavailable::Refuse,
            })
            .on_lost(match self.on_lost {
                Lost::Abort => OnLost::Abort,
                Lost::Continue => OnLost::Continue,
            })
    }
}

/// Says what is wrong with the command line, and exits with 2.
pub(crate) fn refuse(what: impl Display) -> ! {
    Args::command().error(ErrorKind::ValueValidation, what).exit()
}

fn address(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "allowed: an IP address and a port, such as 127.0.0.1:8080")
}

fn key(text: &str) -> Result<Key, &'static str> {
    const ALLOWED: &str = "allowed: global, path, peer-ip, header:NAME";
    match text {
        "global" => Ok(Key::Global),
        "path" => Ok(Key::Path),
        "peer-ip" => Ok(Key::PeerIp),
        _ => {
            let name = text.strip_prefix("header:").ok_or(ALLOWED)?;
            name.parse().map(Key::Header).map_err(|_| ALLOWED)
        }
    }
}

fn limit(text: &str) -> Result<Limit, String> {
    match text {
        "unlimited" => Ok(Limit::Unlimited),
        _ => count(text).map(Limit::Permits).map_err(|allowed| format!("{allowed}, or unlimited")),
    }
}

fn limit_for(text: &str) -> Result<(Name, Limit), String> {
    // The last `=`: a header's value may have some of its own.
    let (key, permits) = text.rsplit_once('=').ok_or("allowed: KEY=N, such as acme=20")?;
    Ok((Name::new(key), limit(permits)?))
}

fn count(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("allowed: a number from 0 to {}", u32::MAX))
}

/// A whole number and its unit. A bare number is refused: is it seconds?
fn duration(text: &str) -> Result<Duration, &'static str> {
    const ALLOWED: &str = "allowed: a whole number with ms, s, m or h behind it, such as 250ms";
    let unit = text.trim_start_matches(|c: char| c.is_ascii_digit());
    let number: u64 = text[..text.len() - unit.len()].parse().map_err(|_| ALLOWED)?;
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60 * 1000,
        "h" => 60 * 60 * 1000,
        _ => return Err(ALLOWED),
    };
    number.checked_mul(unit_ms).map(Duration::from_millis).ok_or(ALLOWED)
}
