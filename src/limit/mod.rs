//! All that speaks HTTP; nothing below knows of requests.

#[cfg(feature = "axum")]
mod axum;
mod body;
mod budget;
mod cached;
mod connection;
mod fair;
mod fair_builder;
mod future;
mod grpc;
mod held;
mod into_error;
mod key;
#[cfg_attr(not(feature = "metrics"), path = "labels_disabled.rs")]
mod labels;
mod layer;
mod refusal;
#[cfg(feature = "axum")]
mod serve;
mod service;
mod settings;
mod shadow;

#[cfg(feature = "axum")]
pub use self::axum::{MatchedPathKey, PermitMissing};
pub use self::body::ResponseBody;
pub use self::budget::{ClientTimeout, WaitBudget};
pub use self::cached::{CachedLimit, CachedLimitBuilder, OnUnknownLimit};
pub use self::connection::{Connection, ConnectionIo};
pub use self::future::ResponseFuture;
pub use self::into_error::{IntoError, IntoErrorFuture, IntoErrorLayer};
pub use self::key::{
    ExtensionKey, GlobalKey, HeaderKey, KeyExtractor, MissingKey, PathKey, PeerIpKey,
};
#[cfg(feature = "metrics")]
pub use self::labels::KeyLabels;
pub use self::layer::{ConcurrencyLimitBuilder, ConcurrencyLimitLayer};
pub use self::refusal::{
    IntoRefusalResponse, Refusal, RefusalBody, RefusalReason, RefusalResponse,
};
#[cfg(feature = "axum")]
pub use self::serve::{ConnectionListener, MakeConnectionService, serve};
pub use self::service::ConcurrencyLimit;
pub use self::settings::{HoldUntil, OnLost};
pub use self::shadow::{ShadowCounts, WouldRefuse};

/// What a body of ours can end with: an error of the body inside, or [`LeaseLost`](crate::LeaseLost).
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
