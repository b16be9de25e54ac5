//! The flags of the command line.

use std::collections::HashSet;
use std::fmt::Display;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use axum::http::{HeaderMap, HeaderName, Request, StatusCode, header};
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, ValueEnum};
use percent_encoding::percent_decode_str;
use serde::Deserialize;
use tower_semaphore::feedback::{self, Feedback, Head};
use tower_semaphore::limit::{
    ConcurrencyLimitBuilder, HeaderKey, HoldUntil, MissingKey, OnLost, PathKey, PeerIpKey,
};
use tower_semaphore::{Adaptive, Ask, Budget, Limit, Name, OnUnavailable, Policy, PolicyBuilder};

use super::also::{self, Also};
use super::budgets::{self, Budgets, EstimateSource, For};
use super::headers::is_lookalike;
use super::site::Site;
use super::upstream::Upstream;
use super::{file, headers, host, path};

/// Stands below the list of flags.
const EXAMPLE: &str = "\
TIME is a whole number with ms, s, m or h behind it, such as 250ms.

Five requests of each tenant in flight, counted in Redis:

  semaphore-gateway --upstream http://127.0.0.1:9000 --redis redis://127.0.0.1/ \\
      --key header:x-tenant --limit 5";

/// A reverse proxy that limits the concurrent requests to an upstream. All gateways that share a
/// Redis or an etcd count together.
#[derive(Clone, Debug, Parser)]
#[command(name = "semaphore-gateway", version, after_help = EXAMPLE)]
pub(crate) struct Args {
    /// A TOML file with any of these options and several limits, reloaded at SIGHUP. The command line
    /// takes precedence
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) site: Site,

    #[command(flatten)]
    pub(crate) rule: Rule,
}

/// One limit, and the requests that it applies to.
#[derive(Clone, Debug, clap::Args, Deserialize)]
#[command(next_help_heading = "For each limit (a [[rule]] of the file)")]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub(crate) struct Rule {
    /// Limit requests to this path and to paths below it; others pass. Paths are matched, and forwarded,
    /// in their normal form: /%63hat, //chat and /x/../chat are /chat. Upper and lower case, %2F and
    /// `;parameters` are kept
    #[arg(long, value_name = "PATH", default_value = "/", value_parser = prefix)]
    #[serde(deserialize_with = "file::prefix")]
    prefix: String,

    /// What requests are counted by: global, path, peer-ip or header:NAME
    #[arg(long, default_value = "global", value_parser = key)]
    #[serde(deserialize_with = "file::key")]
    key: Key,

    /// Permits of each key: a number (0 rejects all requests) or `unlimited`
    #[arg(long, value_name = "N", value_parser = limit, allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::limit")]
    limit: Option<Limit>,

    /// Let the limit of each key find itself between two numbers, such as 5..100, by the refusals of the upstream:
    /// the statuses of --pause-on, or 429 and 503. It grows by one each second, or as in 5..100/2s, while
    /// requests wait. --limit need not be set
    #[arg(long, value_name = "MIN..MAX", value_parser = adaptive)]
    #[serde(deserialize_with = "file::adaptive")]
    adaptive: Option<Adaptive>,

    /// Permits of one key, such as acme=20, instead of --limit; can be repeated
    #[arg(long, value_name = "KEY=N", value_parser = limit_for)]
    #[serde(deserialize_with = "file::limit_for")]
    limit_for: Vec<(Name, Limit)>,

    /// How many requests of one key may start within a time, such as 600/60s, beside --limit
    #[arg(long, value_name = "N/TIME", value_parser = rate, allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::rate")]
    rate: Option<Starts>,

    /// Spread --rate evenly over its time, for an upstream that looks at shorter times
    #[arg(long)]
    smooth: bool,

    /// The tenant of a request: path, peer-ip or header:NAME. A freed permit goes to the tenant with the
    /// fewest in use
    #[arg(long, value_name = "SPEC", value_parser = tenant)]
    #[serde(deserialize_with = "file::tenant")]
    fair_by: Option<Key>,

    /// Permits of each key that one tenant may have in use: a number or `unlimited`
    #[arg(long, value_name = "N", value_parser = limit, allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::limit")]
    each: Option<Limit>,

    /// The same for one tenant, such as acme=4 (0 rejects its requests); can be repeated
    #[arg(long, value_name = "KEY=N", value_parser = limit_for)]
    #[serde(deserialize_with = "file::each_for")]
    each_for: Vec<(Name, Limit)>,

    /// The weight of a tenant, from 1 to 64, such as acme=3: a share three times that of a tenant with
    /// weight 1, the default; can be repeated
    #[arg(long, value_name = "KEY=N", value_parser = weight_for)]
    #[serde(deserialize_with = "file::weight_for")]
    weight_for: Vec<(Name, u32)>,

    /// The class of a tenant, from 0 to 7, such as batch=1: it is served only while no lower class
    /// waits. The default is 0; can be repeated
    #[arg(long, value_name = "KEY=N", value_parser = class_for)]
    #[serde(deserialize_with = "file::class_for")]
    class_for: Vec<(Name, u8)>,

    /// A further limit of the requests of a key that have one path, address or header value in common, such as
    /// route:path=20 or model:header:x-model=10; up to three. A request gets a permit of each of its limits or
    /// waits. Without the header it does not count under that limit
    #[arg(long, value_name = "NAME:SPEC=N", value_parser = also::also)]
    #[serde(deserialize_with = "also::from_file")]
    also: Vec<Also>,

    /// A budget of each key, such as tokens=80000/60s, or with the most that may be used at once
    /// tokens=80000/60s,burst=20000, or of each tenant tokens=8000/60s,each; up to two. It refills evenly, so a minute can
    /// have the burst and the amount. Each request takes its --estimate, and waits for that: see --wait
    #[arg(long, value_name = "NAME=N/TIME[,burst=N][,each]", value_parser = budgets::budget)]
    #[serde(deserialize_with = "budgets::budgets_of_file")]
    budget: Vec<Budget>,

    /// What a request is estimated to use of the --budget: header:NAME, a whole number (a request without it is rejected
    /// with 400), header:NAME,N with a number for those without it, or N for all. With two budgets NAME=SPEC, such as
    /// tokens=header:x-tokens
    #[arg(long, value_name = "SPEC", value_parser = budgets::estimate, allow_hyphen_values = true)]
    #[serde(deserialize_with = "budgets::estimates_of_file")]
    estimate: Vec<For<EstimateSource>>,

    /// The header of responses that says what was truly used of the --budget, with two budgets NAME=header:NAME. It replaces
    /// the estimate once the permit is given back. Without it 429 and 503 of the upstream used nothing
    #[arg(long, value_name = "header:NAME", value_parser = budgets::field)]
    #[serde(deserialize_with = "budgets::settle_of_file")]
    settle: Vec<For<HeaderName>>,

    /// The header of responses that says what is left of the --budget, such as header:x-ratelimit-remaining-tokens: others
    /// may use the same account. It can only lower what is left
    #[arg(long, value_name = "header:NAME", value_parser = budgets::field)]
    #[serde(deserialize_with = "budgets::left_of_file")]
    left: Vec<For<HeaderName>>,

    /// Permits of each key that only class 0 may take
    #[arg(long, value_name = "N", default_value_t = 0)]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::count")]
    headroom: u32,

    /// The header that says how many permits a request takes, from 1 to 64, all or none. A request
    /// without it takes 1; any other value is rejected with 400
    #[arg(long, value_name = "header:NAME", value_parser = cost)]
    #[serde(deserialize_with = "file::cost")]
    cost: Option<HeaderName>,

    /// How long a request may wait for a permit; with 0s it is rejected at once
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    #[arg(allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::duration")]
    pub(crate) wait: Duration,

    /// How long the permits of a gateway that died stay taken; with --etcd about half as long again
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    #[arg(allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::duration")]
    lease: Duration,

    /// How long a permit stays taken after its request was broken off (the client left, or a body
    /// failed), for an upstream that counts requests itself and notices later; at most half of --lease
    #[arg(long, value_name = "TIME", default_value = "0s", value_parser = duration)]
    #[arg(allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::duration")]
    linger: Duration,

    /// Statuses of the upstream, such as 429,503, whose Retry-After pauses the limit of the request's key in all
    /// gateways: nothing is granted until then
    #[arg(long, value_name = "STATUS,...", value_parser = pause_on)]
    #[serde(deserialize_with = "file::pause_on")]
    pause_on: Option<Statuses>,

    /// The longest pause, whatever the upstream says, for --pause-on
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = duration)]
    #[arg(allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::duration")]
    max_pause: Duration,

    /// Pass a permit that is given back straight to the next request of this gateway, as long as it
    /// knows that no other gateway waits
    #[arg(long)]
    reuse: bool,

    /// How many requests may wait for one key, in the whole fleet; with --fair-by, for each tenant
    #[arg(long, value_name = "N", default_value_t = Policy::DEFAULT_MAX_QUEUE)]
    #[arg(value_parser = count, allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::count")]
    max_queue: u32,

    /// How many requests of all tenants together may wait for one key, in the whole fleet; with
    /// --fair-by [default: 20000, or twice --max-queue if that is more]
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::some_count")]
    max_waiting: Option<u32>,

    /// Hold a permit until the end of the response's body, or of its head
    #[arg(long, value_enum, default_value = "body")]
    hold: Hold,

    /// A request without a key: reject it with 400, let it pass, or count all such requests as one key
    #[arg(long, value_enum, value_name = "WHAT", default_value = "reject")]
    missing_key: Missing,

    /// A request without a tenant, with --fair-by: reject it with 400, let it pass, or count all such requests as
    /// one tenant
    #[arg(long, value_enum, value_name = "WHAT", default_value = "reject")]
    missing_tenant: Missing,

    /// A request whose permit is lost: abort it, or let it continue
    #[arg(long, value_enum, value_name = "WHAT", default_value = "abort")]
    on_lost: Lost,

    /// Requests while Redis or etcd is unavailable: reject them with 503, admit all, or admit
    /// --local-limit in each gateway
    #[arg(long, value_enum, value_name = "WHAT", default_value = "reject")]
    on_unavailable: Unavailable,

    /// Permits of each key in this gateway, for --on-unavailable local
    #[arg(long, value_name = "N", value_parser = count, allow_hyphen_values = true)]
    #[serde(deserialize_with = "file::some_count")]
    local_limit: Option<u32>,

    /// Let every request pass, and only count those that would wait or be rejected
    #[arg(long)]
    shadow: bool,

    /// The name of the limit; gateways with the same name share its permits
    #[arg(long, default_value = "gateway")]
    pub(crate) name: String,
}

/// How many requests may start within a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Starts(u32, Duration);

/// Statuses of responses.
#[derive(Clone, Debug)]
pub(crate) struct Statuses(Vec<StatusCode>);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Key {
    Global,
    Path,
    PeerIp,
    Header(HeaderName),
}

#[derive(Clone, Copy, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Hold {
    Body,
    Head,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Missing {
    Reject,
    Bypass,
    Shared,
}

#[derive(Clone, Copy, Debug, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Lost {
    Abort,
    Continue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Unavailable {
    Reject,
    Admit,
    Local,
}

impl Args {
    /// Parses the command line of this process; exits with 2 if it is invalid.
    pub(crate) fn read() -> Self {
        let matches =
            Self::command().try_get_matches().unwrap_or_else(|error| hidden(error).exit());
        let args = Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
        if args.config.is_some() {
            for arg in RuleFlags::command().get_arguments() {
                let id = arg.get_id().as_str();
                if matches.value_source(id) == Some(ValueSource::CommandLine) {
                    let flag = id.replace('_', "-");
                    refuse(format!("--{flag} cannot be given beside --config; set it in the file"));
                }
            }
        } else if let Err((field, what)) = args.rule.check() {
            refuse(format!("--{field}: {what}"));
        }
        args
    }
}

/// The error without what may contain a password or an API key: values of some flags, and all that is not expected.
fn hidden(mut error: clap::Error) -> clap::Error {
    let context = |kind| error.get(kind).map_or_else(String::new, ToString::to_string);
    let (flag, value) = (context(ContextKind::InvalidArg), context(ContextKind::InvalidValue));
    if error.kind() == ErrorKind::UnknownArgument {
        // A value without its flag, or one that begins with `-`. What is similar to it is shown.
        let mut args = std::env::args_os().skip(1);
        let is_short = flag.len() == 2 && flag.starts_with('-');
        let at = args.position(|arg| {
            let arg = arg.to_string_lossy();
            let name = arg.split_once('=').map_or(&*arg, |(name, _)| name);
            *arg == flag || name == flag || is_short && arg.starts_with(&flag)
        });
        let what = at.map_or_else(|| "not shown".to_owned(), |at| format!("number {}", at + 1));
        error.insert(ContextKind::InvalidArg, ContextValue::String(what));
        error.remove(ContextKind::Suggested);
        return error;
    }
    let may_be_secret = match flag.split(' ').next() {
        _ if error.kind() == ErrorKind::TooManyValues => true,
        Some("--upstream") => Upstream::may_be_secret(&value),
        Some("--limit-for" | "--each-for" | "--weight-for" | "--class-for") => true,
        _ => false,
    };
    if may_be_secret && !value.is_empty() {
        let value = ContextValue::String("(not shown)".to_owned());
        error.insert(ContextKind::InvalidValue, value);
    }
    error
}

/// The flags of a rule alone: the source of the defaults for a rule in a file.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct RuleFlags {
    #[command(flatten)]
    rule: Rule,
}

impl Default for Rule {
    fn default() -> Self {
        RuleFlags::parse_from(None::<&str>).rule
    }
}

impl Rule {
    /// Checks fields against each other; an error names the field, and why.
    pub(crate) fn check(&self) -> Result<(), (&'static str, String)> {
        if self.limit.is_none() && self.adaptive.is_none() {
            return Err(("limit", "not set; expected a number, or unlimited".to_owned()));
        }
        if matches!(self.key, Key::Global) && !self.limit_for.is_empty() {
            let what = "the key global has one value; expected another key";
            return Err(("limit-for", what.to_owned()));
        }
        once("limit-for", &self.limit_for)?;
        hosts("limit-for", Some(&self.key), &self.limit_for)?;
        self.check_spellings(&[])?;
        self.check_rate()?;
        self.check_adaptive()?;
        self.check_pauses()?;
        self.check_budgets()?;
        self.check_tenants()?;
        let local = self.on_unavailable == Unavailable::Local;
        if local != self.local_limit.is_some() {
            let what =
                "is set without on-unavailable local, or that without it; expected both or neither";
            return Err(("local-limit", what.to_owned()));
        }
        self.check_below_limit("local-limit", self.local_limit)
    }

    /// Checks that a number of permits is not more than the limit, where that is the same for all keys.
    fn check_below_limit(
        &self,
        field: &'static str,
        permits: Option<u32>,
    ) -> Result<(), (&'static str, String)> {
        match (permits, self.limit) {
            (Some(permits), Some(Limit::Permits(limit @ 1..)))
                if permits > limit && self.limit_for.is_empty() =>
            {
                let what = format!("{permits} is more than the limit; expected up to {limit}");
                Err((field, what))
            }
            _ => Ok(()),
        }
    }

    /// Checks the range in which the limit finds itself.
    fn check_adaptive(&self) -> Result<(), (&'static str, String)> {
        let Some(range) = self.adaptive else { return Ok(()) };
        let limit = self.limit.unwrap_or_else(|| Limit::Permits(range.max()));
        let policy = Policy::builder(limit).adaptive(range).headroom(self.headroom);
        policy.build().map(drop).map_err(|error| ("adaptive", error.to_string()))
    }

    fn check_rate(&self) -> Result<(), (&'static str, String)> {
        if self.smooth && self.rate.is_none() {
            return Err(("smooth", "there is no rate to spread; set rate, too".to_owned()));
        }
        let policy = self.with_rate(Policy::builder(1).reuse(self.reuse)).build();
        policy.map(drop).map_err(|error| ("rate", error.to_string()))
    }

    fn check_pauses(&self) -> Result<(), (&'static str, String)> {
        if self.pause_on.is_none() {
            return match self.max_pause {
                Policy::DEFAULT_MAX_PAUSE => Ok(()),
                _ => Err(("max-pause", "no status pauses anything; set pause-on, too".to_owned())),
            };
        }
        let mut limits = self.limit.iter().chain(self.limit_for.iter().map(|(_, limit)| limit));
        let is_unlimited = self.rate.is_none() && self.adaptive.is_none() && self.budget.is_empty();
        if is_unlimited && limits.all(|limit| *limit == Limit::Unlimited) {
            let what = "without a limit there is nothing to pause; set a limit of permits, a rate or a budget";
            return Err(("pause-on", what.to_owned()));
        }
        Ok(())
    }

    fn check_budgets(&self) -> Result<(), (&'static str, String)> {
        if self.reuse && !self.budget.is_empty() {
            let what = "a request that takes over a permit would take nothing of a budget; expected no reuse beside one";
            return Err(("reuse", what.to_owned()));
        }
        let same = |budget: &&Budget| self.also.iter().any(|one| one.name == budget.name());
        if let Some(budget) = self.budget.iter().find(same) {
            let what = format!(
                "a further limit is called {:?}, too; expected a name for each",
                budget.name()
            );
            return Err(("budget", what));
        }
        self.budgets().check(self.fair_by.is_some())
    }

    fn budgets(&self) -> Budgets<'_> {
        let Self { budget: budgets, estimate: estimates, settle, left, .. } = self;
        Budgets { budgets, estimates, settle, left }
    }

    fn with_rate(&self, mut policy: PolicyBuilder) -> PolicyBuilder {
        if let Some(Starts(starts, window)) = self.rate {
            policy = policy.rate(starts, window);
        }
        if self.smooth { policy.smooth() } else { policy }
    }

    fn check_tenants(&self) -> Result<(), (&'static str, String)> {
        let err = |field, what: &str| Err((field, what.to_owned()));
        if self.fair_by.is_none() {
            let set = [
                ("each", self.each.is_some()),
                ("each-for", !self.each_for.is_empty()),
                ("weight-for", !self.weight_for.is_empty()),
                ("class-for", !self.class_for.is_empty()),
                ("max-waiting", self.max_waiting.is_some()),
                ("missing-tenant", self.missing_tenant != Missing::Reject),
            ];
            if let Some((field, _)) = set.into_iter().find(|(_, is_set)| *is_set) {
                return err(field, "there are no tenants; set fair-by, too");
            }
        } else if self.limit == Some(Limit::Unlimited)
            && self.rate.is_none()
            && self.also.is_empty()
            && self.budget.is_empty()
        {
            return err("fair-by", "without a limit no request waits; set a limit of permits");
        }
        if self.each == Some(Limit::Permits(0)) {
            return err("each", "0 rejects all requests; expected 1 or more, or unlimited");
        }
        if let Some(Limit::Permits(each)) = self.each {
            self.check_below_limit("each", Some(each))?;
        }
        for Also { permits, .. } in &self.also {
            self.check_below_limit("also", Some(*permits))?;
        }
        also::check(&self.also).map_err(|what| ("also", what))?;
        once("each-for", &self.each_for)?;
        once("weight-for", &self.weight_for)?;
        once("class-for", &self.class_for)?;
        let tenant = self.fair_by.as_ref();
        hosts("each-for", tenant, &self.each_for)?;
        hosts("weight-for", tenant, &self.weight_for)?;
        hosts("class-for", tenant, &self.class_for)?;
        if self.headroom == 0 {
            return Ok(());
        }
        if self.class_for.iter().all(|(_, class)| *class == 0) {
            return err("headroom", "all tenants have class 0; set another class in class-for");
        }
        let limits = self.limit.iter().chain(self.limit_for.iter().map(|(_, limit)| limit));
        let least = limits.filter_map(|limit| match limit {
            Limit::Permits(permits @ 1..) => Some(*permits),
            _ => None,
        });
        if let Some(least) = least.min().filter(|least| self.headroom >= *least) {
            let what = format!(
                "{} leaves nothing of {least} permits to the other classes; expected 0 to {}",
                self.headroom,
                least - 1
            );
            return Err(("headroom", what));
        }
        Ok(())
    }

    /// Permits of this key.
    pub(crate) fn limit_of(&self, key: &Name) -> Limit {
        let maximum = self.adaptive.map(|range| Limit::Permits(range.max()));
        of(&self.limit_for, key).or(self.limit).or(maximum).unwrap_or(Limit::Unlimited)
    }

    /// The name that counts the requests of this key, and what they are judged by.
    pub(crate) fn now(&self, key: &Name) -> (Name, Policy) {
        let permits =
            if let Limit::Permits(permits) = self.limit_of(key) { permits } else { u32::MAX };
        // A limit of 0 has no room for a headroom.
        let of_limit = || self.with_rate(Policy::builder(permits));
        let policy = || of_limit().headroom(self.headroom);
        let range = self.adaptive.filter(|range| range.max() == permits);
        let adaptive = range.and_then(|range| policy().adaptive(range).build().ok());
        let policy = adaptive.map_or_else(|| policy().build().or_else(|_| of_limit().build()), Ok);
        (Name::new(&self.name).join(key), policy.unwrap_or_else(|_| Policy::new(permits)))
    }

    /// Why a field that decides about a request cannot be used, if so.
    pub(crate) fn bad_field<B>(&self, request: &Request<B>) -> Option<String> {
        if self.shadow || !self.is_for(request.uri().path()) {
            return None;
        }
        // The upstream may read another one than is counted.
        let mut read = self.fields_read();
        if let Some((_, name)) =
            read.find(|(_, name)| headers::has_several(request.headers(), name))
        {
            return Some(format!("{name}: more than one value; expected one"));
        }
        if let Some(bad) = self.budgets().bad_estimate(request.headers()) {
            return Some(bad);
        }
        let header = self.cost.as_ref()?;
        let said = cost_of(request.headers(), header).err()?;
        Some(format!(
            "{header}: {said} cannot be used; expected a number from 1 to {}",
            Ask::MAX_COST
        ))
    }

    /// The header fields that decide the key, the tenant, the further limits, the cost and the estimates of a request, and
    /// where they are set.
    pub(crate) fn fields_read(&self) -> impl Iterator<Item = (&'static str, &HeaderName)> {
        let key = [("key", Some(&self.key)), ("fair-by", self.fair_by.as_ref())].into_iter();
        let key = key.chain(self.also.iter().map(|one| ("also", Some(&one.by))));
        let named = key.filter_map(|(field, key)| match key {
            Some(Key::Header(name)) => Some((field, name)),
            Some(Key::Global | Key::Path | Key::PeerIp) | None => None,
        });
        let estimates = self.estimate.iter().filter_map(For::field).map(|name| ("estimate", name));
        named.chain(self.cost.iter().map(|name| ("cost", name))).chain(estimates)
    }

    /// Checks that no field that is read is a spelling of another one, here or in the rules before: of each, all other
    /// spellings are removed.
    pub(crate) fn check_spellings(&self, before: &[Self]) -> Result<(), (&'static str, String)> {
        let mut seen: Vec<_> = before.iter().flat_map(Self::fields_read).collect();
        for (field, name) in self.fields_read() {
            if let Some((_, other)) = seen.iter().find(|(_, other)| is_lookalike(name, other)) {
                let what =
                    format!("the header {name} is {other} to many servers; expected one spelling");
                return Err((field, what));
            }
            seen.push((field, name));
        }
        Ok(())
    }

    /// Whether requests are rejected while the backend is unavailable.
    pub(crate) fn needs_backend(&self) -> bool {
        self.on_unavailable == Unavailable::Reject && !self.shadow
    }

    /// Whether the rule is for requests to this path.
    pub(crate) fn is_for(&self, path: &str) -> bool {
        let rest = path.strip_prefix(self.prefix.trim_end_matches('/'));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    }

    /// Configures the layer, except for its limit.
    pub(crate) fn apply(&self, builder: ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder {
        let mut builder = match &self.key {
            Key::Global => builder,
            Key::Path => builder.key(PathKey),
            Key::PeerIp => builder.key(PeerIpKey::from_extension()),
            Key::Header(name) => builder.key(HeaderKey::new(name.clone())),
        };
        if !matches!(self.key, Key::Global) {
            builder = builder.on_missing_key(self.missing_key.into());
        }
        if let Some(Starts(starts, window)) = self.rate {
            builder = builder.rate(starts, window);
        }
        if self.smooth {
            builder = builder.smooth();
        }
        builder = self.budgets().apply(self.apply_responses(builder));
        self.apply_tenants(builder)
            .max_pause(self.max_pause)
            .wait_timeout(self.wait)
            .lease(self.lease)
            .linger(self.linger)
            .reuse(self.reuse)
            .max_queue(self.max_queue)
            .shadow(self.shadow)
            .hold_until(match self.hold {
                Hold::Body => HoldUntil::BodyEnd,
                Hold::Head => HoldUntil::ResponseHead,
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

impl From<Missing> for MissingKey {
    fn from(missing: Missing) -> Self {
        match missing {
            Missing::Reject => Self::Reject(StatusCode::BAD_REQUEST),
            Missing::Bypass => Self::Bypass,
            Missing::Shared => Self::Shared,
        }
    }
}

impl Rule {
    /// Configures what responses of the upstream pause and lower.
    fn apply_responses(&self, mut builder: ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder {
        if let Some(range) = self.adaptive {
            builder = builder.adaptive(range);
        }
        match &self.pause_on {
            Some(Statuses(statuses)) => {
                builder.on_response(feedback::retry_after_on(statuses.iter().copied()))
            }
            None if self.adaptive.is_some() => {
                builder.on_response(|head: Head<'_>| match head.status.as_u16() {
                    429 | 503 => Feedback::TooMany,
                    _ => Feedback::None,
                })
            }
            None => builder,
        }
    }

    fn apply_tenants(&self, mut builder: ConcurrencyLimitBuilder) -> ConcurrencyLimitBuilder {
        builder = match &self.fair_by {
            None | Some(Key::Global) => builder,
            Some(Key::Path) => builder.fair_by(PathKey),
            Some(Key::PeerIp) => builder.fair_by(PeerIpKey::from_extension()),
            Some(Key::Header(name)) => builder.fair_by(HeaderKey::new(name.clone())),
        };
        if self.fair_by.is_some() {
            builder = builder.on_missing_tenant(self.missing_tenant.into());
        }
        if let Some(most) = self.max_waiting {
            builder = builder.max_waiting(most);
        }
        if let (Some(each), true) = (self.each, self.each_for.is_empty()) {
            builder = builder.each(each);
        } else if !self.each_for.is_empty() {
            let (caps, each) = (self.each_for.clone(), self.each.unwrap_or(Limit::Unlimited));
            builder = builder.each_by(move |tenant, _| of(&caps, tenant).unwrap_or(each));
        }
        builder = self.also.iter().fold(builder, |builder, one| one.apply(builder));
        if !self.weight_for.is_empty() {
            let weights = self.weight_for.clone();
            builder = builder.weight_by(move |tenant, _| of(&weights, tenant).unwrap_or(1));
        }
        if !self.class_for.is_empty() {
            let classes = self.class_for.clone();
            builder = builder
                .class_by(move |tenant, _| of(&classes, tenant).unwrap_or(0))
                .headroom(self.headroom);
        }
        if let Some(header) = self.cost.clone() {
            // An invalid cost gets here only in shadow, and counts as too high.
            builder =
                builder.cost_by(move |parts| cost_of(&parts.headers, &header).unwrap_or(u32::MAX));
        }
        builder
    }
}

/// The value given for this name.
fn of<T: Copy>(said: &[(Name, T)], name: &Name) -> Option<T> {
    said.iter().find(|(key, _)| key == name).map(|(_, value)| *value)
}

/// Checks that each key is given once.
fn once<T>(field: &'static str, said: &[(Name, T)]) -> Result<(), (&'static str, String)> {
    let mut seen = HashSet::new();
    if said.iter().all(|(key, _)| seen.insert(key)) {
        return Ok(());
    }
    // Keys may be secrets.
    Err((field, "a key is given twice; expected each key once".to_owned()))
}

/// Checks that keys are hosts as requests have them, where hosts are the keys.
fn hosts<T>(
    field: &'static str,
    key: Option<&Key>,
    said: &[(Name, T)],
) -> Result<(), (&'static str, String)> {
    if !matches!(key, Some(Key::Header(name)) if *name == header::HOST) {
        return Ok(());
    }
    let is_host = |name: &Name| {
        // A hash stands for a long name.
        name.as_str().starts_with('#')
            || percent_decode_str(name.as_str())
                .decode_utf8()
                .is_ok_and(|text| host::is_name(&text))
    };
    if said.iter().all(|(key, _)| is_host(key)) {
        return Ok(());
    }
    let what = "a key is not a host as it is counted; expected a name in lower case, without a port and \
                a dot at its end, or an address";
    Err((field, what.to_owned()))
}

/// The cost in a request's header; an error is the text that is there.
fn cost_of(headers: &HeaderMap, name: &HeaderName) -> Result<u32, String> {
    let Some(value) = headers.get(name) else { return Ok(1) };
    let text = value.to_str().map_err(|_| format!("{value:?}"))?;
    in_range(text, 1, Ask::MAX_COST).map_err(|_| format!("{text:?}"))
}

/// Prints what is wrong with the command line, and exits with 2.
pub(crate) fn refuse(what: impl Display) -> ! {
    Args::command().error(ErrorKind::ValueValidation, what).exit()
}

pub(crate) fn key(text: &str) -> Result<Key, &'static str> {
    const ALLOWED: &str = "expected global, path, peer-ip, header:NAME";
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

/// The tenant's key. With `global` there would be one tenant.
pub(crate) fn tenant(text: &str) -> Result<Key, &'static str> {
    const ALLOWED: &str = "expected path, peer-ip, header:NAME";
    key(text).ok().filter(|key| !matches!(key, Key::Global)).ok_or(ALLOWED)
}

pub(crate) fn cost(text: &str) -> Result<HeaderName, &'static str> {
    match key(text) {
        Ok(Key::Header(name)) => Ok(name),
        _ => Err("expected header:NAME"),
    }
}

pub(crate) fn pause_on(text: &str) -> Result<Statuses, &'static str> {
    let statuses = text.split(',').map(|status| {
        let status = StatusCode::from_bytes(status.trim().as_bytes()).ok()?;
        (status.is_client_error() || status.is_server_error()).then_some(status)
    });
    let statuses = statuses.collect::<Option<_>>();
    statuses.map(Statuses).ok_or("expected statuses from 400 to 599, such as 429,503")
}

pub(crate) fn rate(text: &str) -> Result<Starts, &'static str> {
    const ALLOWED: &str = "expected a number of requests and a time, such as 600/60s";
    let (starts, window) = text.split_once('/').ok_or(ALLOWED)?;
    Ok(Starts(starts.parse().map_err(|_| ALLOWED)?, duration(window).map_err(|_| ALLOWED)?))
}

pub(crate) fn adaptive(text: &str) -> Result<Adaptive, &'static str> {
    const ALLOWED: &str = "expected two numbers, such as 5..100, or with a time, such as 5..100/2s";
    let (range, interval) = match text.split_once('/') {
        Some((range, interval)) => (range, Some(duration(interval).map_err(|_| ALLOWED)?)),
        None => (text, None),
    };
    let (min, max) = range.split_once("..").ok_or(ALLOWED)?;
    let number = |text: &str| text.parse().map_err(|_| ALLOWED);
    let range = Adaptive::between(number(min)?, number(max)?);
    Ok(interval.map_or(range, |interval| range.grow_every(interval)))
}

pub(crate) fn weight(text: &str) -> Result<u32, String> {
    in_range(text, 1, Ask::MAX_WEIGHT)
}

pub(crate) fn class(text: &str) -> Result<u8, String> {
    in_range(text, 0, Ask::MAX_CLASS)
}

pub(crate) fn in_range<T: Copy + FromStr + PartialOrd + Display>(
    text: &str,
    first: T,
    last: T,
) -> Result<T, String> {
    let number = text.parse().ok().filter(|number| (&first..=&last).contains(&number));
    number.ok_or_else(|| format!("expected a number from {first} to {last}"))
}

pub(crate) fn limit(text: &str) -> Result<Limit, String> {
    match text {
        "unlimited" => Ok(Limit::Unlimited),
        _ => count(text).map(Limit::Permits).map_err(|allowed| format!("{allowed}, or unlimited")),
    }
}

pub(crate) fn prefix(text: &str) -> Result<String, &'static str> {
    if text != "/" && (!text.starts_with('/') || text.ends_with('/')) {
        return Err("expected a path, such as /v1/chat, without a / at its end");
    }
    let normal = path::normalize(text).map_err(|_| "expected % with two hex digits behind it")?;
    Ok(normal.into_owned())
}

fn limit_for(text: &str) -> Result<(Name, Limit), String> {
    for_key(text, limit)
}

fn weight_for(text: &str) -> Result<(Name, u32), String> {
    for_key(text, weight)
}

fn class_for(text: &str) -> Result<(Name, u8), String> {
    for_key(text, class)
}

fn for_key<T>(
    text: &str,
    parse: impl FnOnce(&str) -> Result<T, String>,
) -> Result<(Name, T), String> {
    // The last `=`: a key may contain `=`.
    let (key, value) = text.rsplit_once('=').ok_or("expected KEY=N, such as acme=20")?;
    Ok((Name::new(key), parse(value)?))
}

pub(crate) fn count(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| format!("expected a number from 0 to {}", u32::MAX))
}

/// A whole number and its unit. A number without a unit is ambiguous, and an error.
pub(crate) fn duration(text: &str) -> Result<Duration, &'static str> {
    const ALLOWED: &str = "expected a whole number with ms, s, m or h behind it, such as 250ms";
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
