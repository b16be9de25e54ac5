//! What a layer goes by, once it is built.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use http::StatusCode;
use http::request::Parts;

use super::budget::ClientTimeout;
use super::cached::CachedLimit;
use super::fair::Fair;
use super::key::{KeyExtractor, MissingKey};
use super::labels::LayerMeter;
use super::refusal::RefusalResponse;
use super::shadow::Shadow;
use crate::name::Name;
use crate::semaphore::{Limit, Policy, Semaphore};

/// How long a permit is held.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum HoldUntil {
    /// Until the response body ends, fails or is dropped: a stream counts as long as it flows.
    #[default]
    BodyEnd,
    /// Until the head of the response is there: what streams after it does not count.
    ResponseHead,
}

/// What becomes of a request whose permit was lost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnLost {
    /// It is cut off: before the head of the response with a refusal, after it with an error of the
    /// body. So the cap holds even then.
    #[default]
    Abort,
    /// It goes on, though another may have its permit by now.
    Continue,
}

/// What a built layer goes by.
pub(super) struct Settings {
    pub(super) semaphore: Semaphore,
    pub(super) name: Arc<str>,
    pub(super) full_name: Name,
    pub(super) policy: Policy,
    pub(super) key: KeySource,
    /// `None`: as the extractor says.
    pub(super) missing_key: Option<MissingKey>,
    pub(super) limit: LimitSource,
    /// In place of the policy's.
    pub(super) wait_timeout: Option<Arc<WaitTimeoutOf>>,
    pub(super) client_timeout: Option<ClientTimeout>,
    /// By what requests of one key are compared, if they are.
    pub(super) fair: Option<Fair>,
    pub(super) skip: Option<Skip>,
    pub(super) hold_until: HoldUntil,
    pub(super) on_lost: OnLost,
    pub(super) full_status: StatusCode,
    pub(super) retry_after: Duration,
    pub(super) response: Arc<dyn RefusalResponse>,
    pub(super) meter: LayerMeter,
    /// Its labels tell tenants apart, not keys.
    pub(super) is_metered_by_tenant: bool,
    /// Whether gRPC is answered in its own words.
    pub(super) grpc_status: bool,
    /// The layer only counts.
    pub(super) shadow: Option<Shadow>,
}

pub(super) enum KeySource {
    Sync(Arc<dyn KeyExtractor>),
    Async(Arc<KeyLookup>),
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
pub(super) type Skip = Arc<dyn Fn(&Parts) -> bool + Send + Sync>;

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Settings")
            .field("name", &self.name)
            .field("policy", &self.policy)
            .field("missing_key", &self.missing_key)
            .field("hold_until", &self.hold_until)
            .field("on_lost", &self.on_lost)
            .field("shadow", &self.shadow)
            .finish_non_exhaustive()
    }
}
