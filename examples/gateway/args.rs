//! What the command line says.

use std::collections::HashMap;
use std::fmt::Display;
use std::net::SocketAddr;
use std::time::Duration;

use axum::http::{HeaderName, StatusCode};
use clap::builder::TypedValueParser;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, ValueEnum};
use tower_semaphore::limit::{
    ConcurrencyLimitBuilder, GlobalKey, HeaderKey, HoldUntil, MissingKey, OnLost, PathKey,
    PeerIpKey,
};
use tower_semaphore::{Limit, Name, Policy};

use super::proxy::Upstream;

/// A reverse proxy that lets no more than so many requests at a time through to an upstream,
/// counted together by all gateways that share a Redis.
#[derive(Debug, Parser)]
#[command(name = "gateway")]
pub(crate) struct Args {
    /// Where to listen; port 0 takes a free one
    #[arg(long, value_name = "ADDR", default_value = "127.0.0.1:8080")]
    #[arg(value_parser = says("an address and port, as 127.0.0.1:8080", parse::<SocketAddr>))]
    pub(crate) listen: SocketAddr,

    /// Where requests go: http://host[:port][/base]
    #[arg(long, value_name = "URL")]
    pub(crate) upstream: Upstream,

    /// Where permits are counted; in this process, unless given
    #[arg(long, value_name = "URL")]
    pub(crate) redis: Option<String>,

    /// Whose permits a request takes: global, path, peer-ip or header:NAME
    #[arg(long, default_value = "global", value_parser = key)]
    pub(crate) key: Key,

    /// Permits of each key: a number (0 refuses everything) or `unlimited`
    #[arg(long, value_name = "N", value_parser = limit)]
    limit: Limit,

    /// Permits of one key, such as `acme=20`; can be repeated
    #[arg(long, value_name = "KEY=N", value_parser = limit_for)]
    limit_for: Vec<(Name, Limit)>,

    /// How long a request may wait for a permit; 0s: it is refused at once
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub(crate) wait: Duration,

    /// How long a permit outlives a gateway that dies
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    pub(crate) lease: Duration,

    /// How many may wait for one key, in the whole fleet
    #[arg(long, value_name = "N", default_value_t = Policy::DEFAULT_MAX_QUEUE)]
    pub(crate) max_queue: u32,

    /// Until when a permit is held: the end of the response body, or its head
    #[arg(long, value_name = "UNTIL", default_value = "body")]
    pub(crate) hold: Hold,

    /// What becomes of a request without a key
    #[arg(long, value_name = "WHAT", default_value = "reject")]
    pub(crate) missing_key: Missing,

    /// What becomes of a request whose permit was lost
    #[arg(long, value_name = "WHAT", default_value = "abort")]
    pub(crate) on_lost: Lost,

    /// The name of the limit: gateways of one name share their permits
    #[arg(long, default_value = "gateway")]
    pub(crate) name: String,
}
