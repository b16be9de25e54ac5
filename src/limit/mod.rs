//! All that speaks HTTP; nothing below knows of requests.

#[cfg(feature = "axum")]
mod axum;
mod body;
mod future;
mod key;
mod layer;
mod refusal;
mod service;

#[cfg(feature = "axum")]
pub use self::axum::{MatchedPathKey, PermitMissing};
pub use self::body::ResponseBody;
pub use self::future::ResponseFuture;
pub use self::key::{
    ExtensionKey, GlobalKey, HeaderKey, KeyExtractor, MissingKey, PathKey, PeerIpKey,
};
pub use self::layer::{ConcurrencyLimitBuilder, ConcurrencyLimitLayer, HoldUntil, OnLost};
pub use self::refusal::{Refusal, RefusalBody, RefusalReason, RefusalResponse};
pub use self::service::ConcurrencyLimit;

/// What a body of ours can end with: an error of the body inside, or [`LeaseLost`](crate::LeaseLost).
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
