//! A limit on requests in flight, shared by all replicas of a service.
//!
//! A concurrency limit in each process multiplies the cap by the number of replicas, and releases its permit with
//! the response head, while a stream still runs. This middleware takes a permit of a
//! [`Semaphore`](crate::Semaphore) for each request, so that all processes count together, and holds it until
//! the response body ends.
//!
//! For each request, in this order:
//!
//! 1. [`skip`](ConcurrencyLimitBuilder::skip) lets it pass without a permit.
//! 2. A [`KeyExtractor`] extracts the key: a tenant, a route, or one key for all. A request without a key is
//!    rejected with `400 Bad Request`, unless the extractor or [`MissingKey`] says otherwise; so is one without a
//!    tenant, where the layer has [tenants](ConcurrencyLimitBuilder::fair_by).
//! 3. The limit of that key is looked up: a number, a closure, or a [`CachedLimit`].
//! 4. It takes a permit, or waits for one behind the requests that came before it, on whichever replica. With
//!    [`fair_by`](ConcurrencyLimitBuilder::fair_by) the tenant with the fewest permits in use is next.
//! 5. The inner service is called, with the [`Permit`](crate::Permit) in the request's extensions.
//! 6. The permit is released when the response body ends or is dropped, at whatever point; or with the response
//!    head, if [`HoldUntil::ResponseHead`] is set. A connection that is upgraded needs [`ConnectionIo`], or a
//!    handler that keeps the permit. [`ConnectionIo`] also notices clients that leave while bytes of theirs lie unread.
//!
//! A request that gets no permit in time is rejected with `429 Too Many Requests`; with `503 Service Unavailable`
//! while the backend is unavailable, or if it would have to wait during a
//! [shutdown](crate::Semaphore::stop_waiting). The originating [`Refusal`] is in the response's extensions. Use
//! [`refusal`](ConcurrencyLimitBuilder::refusal) to build the response, or
//! [`into_error`](ConcurrencyLimitLayer::into_error) for a client that wants an error. gRPC calls end with a gRPC
//! status.
//!
//! # Deployment caveat
//!
//! The limit is only as good as the key. A client that can choose its key has a queue of its own with each
//! request, or joins that of another tenant: take the key from authentication ([`ExtensionKey`]), or from a
//! header that your proxy replaces, and put the layer inside authentication.
//!
//! A permit has a lease. A process that is suspended for longer, or cannot reach Redis for that long, loses its
//! permits, and their requests are aborted, unless [`OnLost::Continue`] is set.
//!
//! # Example
//!
//! ```
//! use std::convert::Infallible;
//! use std::time::Duration;
//!
//! use http::{Request, Response, StatusCode};
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_semaphore::limit::HeaderKey;
//! use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
//!
//! async fn handle(_: Request<String>) -> Result<Response<String>, Infallible> {
//!     Ok(Response::new("hello".to_owned()))
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // In production: Semaphore::redis("redis://redis.internal/")?
//! let semaphore = Semaphore::in_memory();
//! let layer = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
//!     .key(HeaderKey::from_static("x-tenant"))
//!     .limit(1)
//!     .wait_timeout(Duration::ZERO)
//!     .build()?;
//!
//! let mut service = ServiceBuilder::new().layer(layer).service_fn(handle);
//! let request = |tenant| Request::builder().header("x-tenant", tenant).body(String::new());
//!
//! // Takes the tenant's only permit. The response's body holds it.
//! let first = service.ready().await?.call(request("acme")?).await?;
//! assert_eq!(first.status(), StatusCode::OK);
//!
//! // The same tenant is rejected, another one is not.
//! let second = service.ready().await?.call(request("acme")?).await?;
//! assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
//! let other = service.ready().await?.call(request("globex")?).await?;
//! assert_eq!(other.status(), StatusCode::OK);
//!
//! // Dropping the body releases the permit.
//! drop(first);
//! let third = service.ready().await?.call(request("acme")?).await?;
//! assert_eq!(third.status(), StatusCode::OK);
//! # Ok(()) }
//! ```

mod admission;
#[cfg(feature = "axum")]
mod axum;
mod body;
mod budget;
mod builder;
mod cached;
mod client_timeout;
mod connection;
mod entry;
mod estimates;
mod exact_status;
mod fair;
mod further;
mod future;
mod grpc;
mod held;
mod into_error;
mod key;
#[cfg_attr(not(feature = "metrics"), path = "labels_disabled.rs")]
mod labels;
mod layer;
mod plan;
mod problem;
mod refusal;
mod refusal_response;
mod required;
#[cfg(feature = "axum")]
mod serve;
mod service;
mod settings;
mod shadow;
mod versions;

#[cfg(feature = "axum")]
pub use self::axum::{MatchedPathKey, PermitMissing};
pub use self::body::ResponseBody;
pub use self::budget::WaitBudget;
pub use self::builder::ConcurrencyLimitBuilder;
pub use self::cached::{Cached, CachedBuilder, CachedLimit, CachedPlan, OnUnknown};
pub use self::client_timeout::ClientTimeout;
pub use self::connection::{Connection, ConnectionIo, OnConnection, OnConnectionFuture};
pub use self::exact_status::ExactStatus;
pub use self::future::ResponseFuture;
pub use self::into_error::{IntoError, IntoErrorFuture, IntoErrorLayer};
pub use self::key::{
    ExtensionKey, GlobalKey, HeaderKey, KeyExtractor, MissingKey, PathKey, PeerIpKey,
};
#[cfg(feature = "metrics")]
pub use self::labels::KeyLabels;
pub use self::layer::ConcurrencyLimitLayer;
pub use self::plan::Plan;
pub use self::refusal::{Refusal, RefusalReason};
pub use self::refusal_response::{IntoRefusalResponse, RefusalBody, RefusalResponse};
#[cfg(feature = "axum")]
pub use self::serve::{IncomingConnection, Serve, ServeFuture, WithGracefulShutdown, serve};
pub use self::service::ConcurrencyLimit;
pub use self::settings::{HoldUntil, OnLost};
pub use self::shadow::{ShadowCounts, WouldRefuse};

pub use crate::service::BoxError;
