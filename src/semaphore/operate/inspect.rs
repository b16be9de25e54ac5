//! Reads the state of semaphores: which there are, and which requests hold their permits or wait for them.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use futures_util::future::join_all;

use super::Semaphore;
use super::inspection::{AdaptedLimit, INSPECTED_MAX, Inspection};
use crate::backend::{ALL_NAMES, Listing, Names, PeerMessage};
use crate::error::{BackendError, ConfigError};
use crate::name::Name;
use crate::node::Node;
use crate::node::peers::PeerAnswer;
use crate::node::tallies::Tally;
use crate::protocol::session::Session;
use crate::protocol::{Override, Rate};
use crate::tenants::TenantOverride;

/// The most semaphores that a page lists.
const LISTED_MAX: u32 = 1000;
/// The most pieces of the backend's keys that one call reads without finding a semaphore.
const PIECES_MAX: u32 = 100;

impl Node {
    /// Returns the override of a semaphore's limit; without one, the number that the limit has found, or the limit of its
    /// policy in this process.
    pub(super) fn limit_in_force(&self, name: &str) -> Option<u32> {
        let set = self.overrides.of(name).in_place();
        let of_session =
            |session: &Session| session.adapted_limit().or_else(|| session.policy_limit());
        let limit = set.or_else(|| match self.read_session(name, of_session) {
            Some(limit) => limit,
            None => Some(self.adapted(name)?.limit),
        });
        // Where only a rate counts.
        limit.filter(|limit| *limit < u32::MAX)
    }

    /// Returns the number that the limit has found, unless this process uses the semaphore with a limit of its own.
    pub(super) fn adapted(&self, name: &str) -> Option<AdaptedLimit> {
        let now = self.now();
        let (adapted, since) = self.overrides.adapted_of(name, now)?;
        let of_session = |session: &Session| (session.policy_limit(), session.adapted_limit());
        let limit = match self.read_session(name, of_session) {
            Some((Some(_), limit)) => limit?,
            _ => adapted.limit,
        };
        Some(AdaptedLimit { limit, unchanged_for: now.since(since) })
    }

    /// Returns whether this process uses the semaphore, with a policy without a rate.
    pub(super) fn has_no_rate(&self, name: &str) -> bool {
        let has_none = |session: &Session| {
            session.policy_limit().is_some() && session.rate_in_force().is_none()
        };
        self.read_session(name, has_none).unwrap_or_default()
    }

    /// Returns the rate in force for the policy that this process uses.
    fn rate_in_force(&self, name: &str) -> Option<Rate> {
        self.read_session(name, Session::rate_in_force).flatten()
    }

    /// Returns the rate in force for the policy that this process used last, if it uses none now. One that an operator
    /// set may replace that of a policy that is not known here.
    fn last_rate(&self, name: &str) -> Option<Rate> {
        let Tally { limit, rate, .. } = self.counts.tallies.of(name);
        let set = self.overrides.of(name).rate;
        let Some(set) = set.filter(|_| limit.is_none() || rate.is_some()) else {
            return rate;
        };
        let is_smooth = rate.is_some_and(Rate::is_smooth) || set.of_cost(1).is_none();
        Some(if is_smooth { set.spread() } else { set })
    }

    /// Returns the rate in force, as far as this process can tell.
    fn assumed_rate(&self, name: &str) -> Option<Rate> {
        if self.has_no_rate(name) {
            return None;
        }
        self.rate_in_force(name).or_else(|| self.last_rate(name))
    }

    /// Returns the holders and waiters of a semaphore.
    pub(super) async fn inspect(&self, name: &str, most: u32) -> Result<Listing, BackendError> {
        self.inspect_rate(name, most, None).await
    }

    /// The same with how much of this rate is used; without one, of that of a listed place.
    async fn inspect_rate(
        &self,
        name: &str,
        most: u32,
        rate: Option<Rate>,
    ) -> Result<Listing, BackendError> {
        let (key, rate) = (self.backend().key(name), rate.and_then(|rate| rate.of_cost(1)));
        self.query(None, &key, |server| server.inspect(&key, most, rate)).await
    }
}

/// Returns the highest rate of these answers.
fn highest<'a>(answers: impl Iterator<Item = &'a PeerAnswer>) -> Option<Rate> {
    // Complete, so that it does not depend on the order of the answers.
    let step = |rate: &Rate| (rate.window() / rate.starts(), rate.starts(), rate.is_smooth());
    answers.filter_map(|answer| answer.rate).min_by_key(step)
}

impl Semaphore {
    /// Returns the holders and waiters of `name`, up to a thousand in all.
    ///
    /// # Errors
    ///
    /// If the backend gave no answer within a second.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    ///
    /// let seen = semaphore.inspect("openai").await?;
    /// assert_eq!((seen.in_use, seen.waiting, seen.limit), (1, 0, Some(10)));
    /// for holder in seen.holders {
    ///     println!("{} of {:?} for {:?}", holder.id, holder.process, holder.held);
    /// }
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub async fn inspect(&self, name: impl Into<Name>) -> Result<Inspection, BackendError> {
        let (name, node) = (name.into(), self.running_node()?);
        let name = name.as_str();
        let rate = node.assumed_rate(name);
        let listing = node.inspect_rate(name, INSPECTED_MAX, rate).await?;
        Ok(Inspection::new(name, listing, rate, node, &self.tenants, &HashMap::new()))
    }

    /// Like [`inspect`](Self::inspect), and asks the other processes for what only they know: their names, how long
    /// they have held their permits, and the limits and rates of their policies.
    ///
    /// Asks up to 64 processes and waits up to 200 ms for their answers. For a process that is gone, that is stopped,
    /// or that may not subscribe in Redis, the result has no more than that of `inspect`.
    ///
    /// # Errors
    ///
    /// If the backend gave no answer within a second.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    ///
    /// for process in semaphore.inspect_fleet("openai").await?.processes {
    ///     println!("{:?}: {} in use, limit {:?}", process.process, process.in_use, process.limit);
    /// }
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub async fn inspect_fleet(&self, name: impl Into<Name>) -> Result<Inspection, BackendError> {
        let (name, node) = (name.into(), self.running_node()?);
        let name = name.as_str();
        let assumed = node.assumed_rate(name);
        let mut listing = node.inspect_rate(name, INSPECTED_MAX, assumed).await?;
        let others = listing.places.iter().map(|(place, ..)| place);
        let others = others.filter(|place| place.node != node.id() && !place.poll_only);
        let others = others.map(|place| place.node).collect();
        let ask = |to| node.send_message(name, to, PeerMessage::AskHeld { by: node.id() });
        let answers = node.questions.ask(name, others, ask).await;
        // Without one of its own, this process can tell less than one that uses the semaphore.
        let is_reported = answers.values().any(|answer| answer.limit.is_some());
        let is_own = node.rate_in_force(name).is_some() || !is_reported;
        let rate = if is_own { assumed } else { highest(answers.values()) };
        if rate != assumed {
            listing = node.inspect_rate(name, INSPECTED_MAX, rate).await?;
        }
        Ok(Inspection::new(name, listing, rate, node, &self.tenants, &answers))
    }

    /// Lists about `most` semaphores whose permits are held or waited for. [`Cursor::default`] is the beginning, and
    /// [`Page::next`] the start of the next page.
    ///
    /// A semaphore that exists from the first page to the last is listed at least once, and perhaps twice; one that
    /// comes or goes meanwhile may be missing. Redis iterates over all of its keys for this, a piece at a time: if it
    /// has many other keys, a page can be empty without being the last. The masters of a cluster are read one after the
    /// other. A master that cannot be asked is skipped and reported in [`Page::away`]; while slots move or masters
    /// change, names can be missed.
    ///
    /// # Errors
    ///
    /// If `most` is not from 1 to 1000, or the backend cannot be asked or does not allow it.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::operate::Cursor;
    /// use tower_semaphore::{Policy, Semaphore};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// let permit = semaphore.acquire("openai", &Policy::new(10)).await?;
    ///
    /// let mut from = Some(Cursor::default());
    /// while let Some(cursor) = from {
    ///     let page = semaphore.list(cursor, 100).await?;
    ///     for listed in page.semaphores {
    ///         println!("{}: {} in use, {} waiting", listed.name, listed.in_use, listed.waiting);
    ///     }
    ///     from = page.next;
    /// }
    /// # drop(permit);
    /// # Ok(()) }
    /// ```
    pub async fn list(&self, from: Cursor, most: u32) -> Result<Page, BackendError> {
        if !(1..=LISTED_MAX).contains(&most) {
            return Err(BackendError::call(format!("most is {most}; expected 1 to {LISTED_MAX}")));
        }
        let node = self.running_node()?;
        if from == Cursor::default() {
            // The result contains overrides. This also reads the map of a cluster.
            node.catch_up().await?;
        }
        let servers = node.backend().shards();
        let key = node.backend().key(ALL_NAMES);
        let (mut found, mut away, mut next) = (Vec::new(), Vec::new(), from);
        for _ in 0..PIECES_MAX {
            let Some(server) = servers.get(next.server) else { break };
            let at = next.at.as_deref();
            let names = node.query(Some(server), &key, |server| server.list(&key, at, most));
            let then = match names.await {
                Ok(Names { names, next }) => {
                    found.extend(names.iter().filter_map(|name| Name::from_stored(name)));
                    next
                }
                Err(error) if servers.len() == 1 => return Err(error),
                Err(error) => {
                    away.push(error);
                    None
                }
            };
            let server = if then.is_none() { next.server + 1 } else { next.server };
            next = Cursor { server, at: then };
            if !found.is_empty() {
                break;
            }
        }
        // Concurrently, so that one write carries all queries.
        let seen = join_all(found.iter().map(|name| node.inspect(name.as_str(), 1))).await;
        let mut semaphores = Vec::with_capacity(found.len());
        for (name, seen) in found.into_iter().zip(seen) {
            let Listing { in_use, waiting, .. } = seen?;
            let set = node.overrides.of(name.as_str());
            // It may have ended since it was listed.
            if in_use > 0 || waiting > 0 {
                let limit = node.limit_in_force(name.as_str());
                semaphores.push(Listed { name, in_use, waiting, limit, set });
            }
        }
        let next = (next.server < servers.len()).then_some(next);
        Ok(Page { semaphores, away, next })
    }

    /// Returns the overrides of all tenants, by semaphore and name; at most 1000.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    /// use tower_semaphore::operate::TenantChange;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_tenant("openai", "acme", TenantChange::new().limit(5)).await?;
    /// for (name, tenant, set) in semaphore.tenant_overrides().await? {
    ///     println!("{name} of {tenant}: cap {:?}, weight {:?}", set.limit, set.weight);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn tenant_overrides(
        &self,
    ) -> Result<Vec<(Name, Name, TenantOverride)>, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        Ok(node.overrides.of_tenants())
    }

    /// Returns the overrides of all semaphores by name, in use or not; at most 1000.
    ///
    /// # Errors
    ///
    /// If the backend cannot be asked.
    ///
    /// # Cancel safety
    ///
    /// Reads only.
    ///
    /// # Examples
    ///
    /// ```
    /// use tower_semaphore::Semaphore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let semaphore = Semaphore::in_memory();
    /// semaphore.set_limit("openai", 2).await?;
    /// let set = semaphore.overrides().await?;
    /// assert_eq!((set[0].0.as_str(), set[0].1.limit), ("openai", Some(2)));
    /// # Ok(()) }
    /// ```
    pub async fn overrides(&self) -> Result<Vec<(Name, Override)>, BackendError> {
        let node = self.running_node()?;
        node.catch_up().await?;
        let mut all = node.overrides.all();
        all.sort_unstable_by(|a, b| a.0.cmp(&b.0));
        Ok(all
            .into_iter()
            .filter_map(|(name, set)| Some((Name::from_stored(&name)?, set)))
            .collect())
    }
}

/// The start of a page of [`Semaphore::list`]. Its text, a number and a position with a dash, can stand in a URL.
///
/// # Examples
///
/// ```
/// use tower_semaphore::operate::Cursor;
///
/// let cursor: Cursor = "0-17".parse()?;
/// assert_eq!(cursor.to_string(), "0-17");
/// # Ok::<_, tower_semaphore::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Cursor {
    /// The index of the server.
    server: usize,
    /// The position there, as the backend writes it; `None`: the beginning.
    at: Option<Arc<str>>,
}

/// The longest position, in bytes: a name of 128 bytes, of which each may need two.
const POSITION_MAX: usize = 260;

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.server, self.at.as_deref().unwrap_or("0"))
    }
}

impl FromStr for Cursor {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let read = || {
            let (server, at) = text.split_once('-')?;
            let is_position = !at.is_empty()
                && at.len() <= POSITION_MAX
                && at.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte));
            let at = is_position.then_some(at)?;
            Some(Self { server: server.parse().ok()?, at: (at != "0").then(|| at.into()) })
        };
        read().ok_or_else(|| {
            ConfigError::new(format!(
                "cursor: {text:?}; expected the `next` of a page, such as \"0-17\""
            ))
        })
    }
}

/// A page of semaphores, as [`Semaphore::list`] returns it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Page {
    /// The semaphores, in no order.
    pub semaphores: Vec<Listed>,
    /// The errors of cluster nodes that could not be asked. Their semaphores are missing here.
    pub away: Vec<BackendError>,
    /// The start of the next page; `None` on the last one.
    pub next: Option<Cursor>,
}

/// A semaphore in a [`Page`], whose permits are held or waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Its name.
    pub name: Name,
    /// The number of permits in use. Those of dead processes count until they are swept.
    pub in_use: u64,
    /// The number of waiting requests. Those of dead processes count until they are swept.
    pub waiting: u64,
    /// The limit that an operator set, or that of the policy in this process. `None` if nothing is set and this
    /// process has not used the semaphore for some seconds; [`Semaphore::inspect_fleet`] asks the others.
    pub limit: Option<u32>,
    /// The override, as this process knows it: at most a second old.
    pub set: Override,
}
