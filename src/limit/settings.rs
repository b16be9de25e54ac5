//! The settings of a layer.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::StatusCode;
use http::request::Parts;

use super::cached::CachedLimit;
use super::client_timeout::ClientTimeout;
use super::fair::Fair;
use super::key::KeyExtractor;
use super::labels::LayerMeter;
use super::refusal_response::RefusalResponse;
use super::required::Required;
use super::shadow::Shadow;
use super::versions::Versions;
use crate::feedback::{Feedback, Head};
use crate::name::Name;
use crate::policy::{Limit, Policy};
use crate::semaphore::Remembered;
use crate::semaphore::Semaphore;

/// How long a request holds its permit.
///
/// See [`hold_until`](super::ConcurrencyLimitBuilder::hold_until).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldUntil {
    /// Until the response body ends, fails or is dropped, so that a stream counts until its end.
    #[default]
    BodyEnd,
    /// Until the inner service has responded. The response body does not count; a connection that is upgraded
    /// counts until it ends, where the server holds permits so (see [`Connection`](super::Connection)).
    ResponseHead,
}

/// What happens to a request whose permit is lost.
///
/// See [`on_lost`](super::ConcurrencyLimitBuilder::on_lost).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// It is aborted: rejected with 503 if the inner service has not responded yet; otherwise the response body
    /// ends with an error. The limit holds even then.
    #[default]
    Abort,
    /// It continues, though another request may have its permit by then.
    Continue,
}

/// What a builder sets and the built layer reads.
pub(super) struct Config {
    pub(super) semaphore: Semaphore,
    /// How tenants share the permits of a key.
    pub(super) fair: Fair,
    /// In place of the policy's.
    pub(super) wait_timeout: Option<Arc<WaitTimeoutOf>>,
    pub(super) client_timeout: Option<ClientTimeout>,
    pub(super) skip: Option<Skip>,
    /// Reads what a response says about the next requests.
    pub(super) on_response: Option<OnResponse>,
    pub(super) hold_until: HoldUntil,
    pub(super) on_lost: OnLost,
    pub(super) full_status: StatusCode,
    pub(super) retry_after: Duration,
    /// In place of the default response.
    pub(super) response: Option<Arc<dyn RefusalResponse>>,
    /// Whether the default response has the `RateLimit` headers.
    pub(super) rate_limit_fields: bool,
    /// Whether calls of gRPC are rejected with a gRPC status.
    pub(super) grpc_status: bool,
}

/// The settings of a built layer.
pub(super) struct Settings {
    pub(super) config: Config,
    pub(super) name: Arc<str>,
    pub(super) full_name: Name,
    /// Where requests without a key of their own find their semaphore.
    pub(super) remembered: Remembered,
    pub(super) policy: Policy,
    pub(super) key: KeySource,
    pub(super) key_required: Required,
    pub(super) limit: LimitSource,
    pub(super) meter: LayerMeter,
    /// The labels of its metrics are tenants, not keys.
    pub(super) is_metered_by_tenant: bool,
    /// The layer only counts.
    pub(super) shadow: Option<Shadow>,
    pub(super) versions: Versions,
}

impl Config {
    pub(super) fn new(semaphore: Semaphore) -> Self {
        Self {
            semaphore,
            fair: Fair::default(),
            wait_timeout: None,
            client_timeout: None,
            skip: None,
            on_response: None,
            hold_until: HoldUntil::default(),
            on_lost: OnLost::default(),
            full_status: StatusCode::TOO_MANY_REQUESTS,
            retry_after: Duration::from_secs(1),
            response: None,
            rate_limit_fields: true,
            grpc_status: true,
        }
    }
}

pub(super) enum KeySource {
    Sync(Arc<dyn KeyExtractor>),
    Async(Arc<KeyLookup>),
}

impl KeySource {
    pub(super) fn extractor(&self) -> Option<&dyn KeyExtractor> {
        match self {
            Self::Sync(extractor) => Some(&**extractor),
            Self::Async(_) => None,
        }
    }
}

pub(super) enum LimitSource {
    Fixed(Limit),
    Sync(Arc<LimitOf>),
    Async(Arc<LimitLookup>),
    Cached(CachedLimit),
}

type KeyLookup = dyn Fn(&Parts) -> BoxFuture<'static, Option<Name>> + Send + Sync;
type LimitOf = dyn Fn(&Name, &Parts) -> Limit + Send + Sync;
pub(super) type WaitTimeoutOf = dyn Fn(&Name, &Parts) -> Duration + Send + Sync;
type LimitLookup = dyn Fn(&Name, &Parts) -> BoxFuture<'static, Limit> + Send + Sync;
pub(super) type OnResponse = Arc<dyn Fn(Head<'_>) -> Feedback + Send + Sync>;
pub(super) type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("name", &self.name)
            .field("policy", &self.policy)
            .field("key_required", &self.key_required)
            .field("hold_until", &self.config.hold_until)
            .field("on_lost", &self.config.on_lost)
            .field("shadow", &self.shadow)
            .finish_non_exhaustive()
    }
}
