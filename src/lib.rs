//! One fair semaphore for a whole fleet, worn as a Tower layer.
//!
//! [`ConcurrencyLimitLayer`] takes a permit for each request, keyed by route, tenant or anything
//! else. The permits of a key are shared by every replica through Redis; first come is first served
//! across all replicas; a request that cannot wait is rejected with 429; the permit lives exactly as
//! long as the response, its stream included.
//!
//! Tenants that share one quota can be served by fair shares instead of in the order of arrival: a permit that
//! comes free goes to the tenant with the fewest in use. See
//! [`fair_by`](limit::ConcurrencyLimitBuilder::fair_by) and [`Ask`].
//!
//! It is for services that run in several replicas and must not have more than N requests in flight
//! with an API that has a concurrency quota (an LLM provider, a payment gateway), or must not let
//! one tenant take more than its share. A limiter in each process multiplies the cap by the number
//! of replicas; a counter in Redis leaks at every crash; a lock service polls.
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//! use http::{Request, Response, StatusCode};
//! use tower_layer::Layer;
//! use tower_semaphore::limit::HeaderKey;
//! use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
//! use tower_service::Service;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // In production: Semaphore::redis("redis://redis.internal/")?
//! let semaphore = Semaphore::in_memory();
//!
//! let layer = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
//!     .key(HeaderKey::from_static("x-tenant"))
//!     .limit(1)
//!     .wait_timeout(Duration::from_millis(100))
//!     .build()?;
//!
//! // With Axum: Router::new().route("/chat", post(chat)).layer(layer)
//! # #[derive(Clone)]
//! # struct Handler;
//! # impl Service<Request<String>> for Handler {
//! #     type Response = Response<String>;
//! #     type Error = std::convert::Infallible;
//! #     type Future = std::future::Ready<Result<Response<String>, Self::Error>>;
//! #     fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), Self::Error>> {
//! #         std::task::Poll::Ready(Ok(()))
//! #     }
//! #     fn call(&mut self, _: Request<String>) -> Self::Future {
//! #         std::future::ready(Ok(Response::new("hello".to_owned())))
//! #     }
//! # }
//! let mut service = layer.layer(Handler);
//! let request = |tenant| Request::builder().header("x-tenant", tenant).body(String::new());
//!
//! let first = service.call(request("acme")?).await?;
//! assert_eq!(first.status(), StatusCode::OK);
//!
//! // The body of the first response is still there, and so is its permit.
//! let second = service.call(request("acme")?).await?;
//! assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
//!
//! // Another tenant has permits of its own; and when the response ends, its permit is free.
//! assert_eq!(service.call(request("globex")?).await?.status(), StatusCode::OK);
//! drop(first);
//! assert_eq!(service.call(request("acme")?).await?.status(), StatusCode::OK);
//! # Ok(()) }
//! ```
//!
//! # What is promised
//!
//! * **The cap holds.** At no instant does the backend count more than `limit` unexpired permits for
//!   a key. A process knows by its own clock from when on it may no longer rely on a permit
//!   ([`Permit::lost`]), and the layer then cuts the request off.
//! * **First come, first served**, over all processes. While anyone waits, nobody passes. Between tenants by
//!   fair shares, where that is set.
//! * **A freed permit goes to the head of the queue**, or to the tenant whose turn it is, in the very step that frees it. A lost message
//!   costs at most a second, a dead process its lease, a dead waiter nothing.
//! * **Nothing leaks.** Dropping any future or body, at any await point, gives back what it had. When
//!   the last request is gone, nothing is stored.
//! * **Every request is answered in bounded time**, whatever the backend does: if it cannot be asked,
//!   with 503.
//! * **Nothing else changes**: the error type of the service inside, extensions, trailers, sizes, HEAD,
//!   upgrades. Under the cap the layer costs one round trip before the handler and none after.
//!
//! Exceptions, each bounded: a Redis that loses its data (until the next renewals, well under a
//! lease, newcomers can be let in beside those that hold), and a process that stands still past its
//! lease (until it wakes).
//!
//! # A permit and its response
//!
//! The permit is taken before the handler is called, moves into the response body, and is given back
//! at the last frame, at an error, or when the body is dropped; or at the head, with
//! [`HoldUntil::ResponseHead`](limit::HoldUntil::ResponseHead). It also stands in the request's
//! extensions: a handler that keeps a clone keeps the permit. A WebSocket or a background task needs
//! just that, because its response ends (with 101 or 202) before its work does:
//!
//! ```
//! # use tower_semaphore::Permit;
//! # fn handler(request: http::Request<()>) {
//! let permit = request.extensions().get::<Permit>().cloned();
//! tokio::spawn(async move {
//!     let _permit = permit;
//!     // ... the permit is held until this task ends ...
//! });
//! # }
//! ```
//!
//! A WebSocket's connection can keep it too, without a line in the handler: see
//! [`ConnectionIo`](limit::ConnectionIo).
//!
//! # Where the layer goes
//!
//! On an Axum router, a single route, a tonic server or channel, a client of `hyper-util` or reqwest:
//! wherever a `Service<http::Request<_>>` answers with `http::Response<impl Body<Data = Bytes>>`
//! (`docs/stacks.md` has a snippet for each). gRPC requests are refused with a gRPC status; a client
//! can have errors for refusals ([`ConcurrencyLimitLayer::into_error`]). Put the layer inside of what
//! limits a request's size or time, and inside of authentication; outside of what works hard. In Axum, `Router::layer` also runs for what no route matches; `route_layer` does not.
//!
//! # Several layers on one request
//!
//! Each takes a permit of its own, the outermost first, and holds it as long as the response. Put the
//! narrowest outermost: the tenant's, then the route's, then the one for all.
//!
//! ```
//! # use tower_layer::Layer;
//! # use tower_semaphore::limit::{HeaderKey, PathKey};
//! # use tower_semaphore::{ConcurrencyLimitLayer, Semaphore};
//! # fn service<S>(handler: S) -> Result<(), tower_semaphore::ConfigError> {
//! # let semaphore = Semaphore::in_memory();
//! let tenant = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
//!     .key(HeaderKey::from_static("x-tenant"))
//!     .limit(5)
//!     .build()?;
//! let route = ConcurrencyLimitLayer::builder(&semaphore, "route").key(PathKey).limit(20).build()?;
//! let all = ConcurrencyLimitLayer::builder(&semaphore, "all").limit(50).build()?;
//! // With Axum, where what is put on last is outermost: .layer(all).layer(route).layer(tenant)
//! let service = tenant.layer(route.layer(all.layer(handler)));
//! # let _ = service; Ok(()) }
//! ```
//!
//! * *Why so*: a request that waits in an inner layer holds the permits of the outer ones. A tenant's crowd then
//!   waits in that tenant's own queue and has no more than its five permits of anything; the other way
//!   round it would stand in the queue with the permits of all, and others would find none.
//! * *Why there is no deadlock*: a request that holds a permit of one layer waits only for layers
//!   further in, and one that has the innermost waits for none. That holds as long as all requests meet the layers
//!   in one order, in all services that share their names. It does not for two routes with opposite
//!   orders, for one layer twice around a handler, or for a handler that calls, through these layers,
//!   its own service again. Such a circle ends when the first wait timeout in it does, with a refusal.
//! * *A refusal further in* gives back at once what the outer layers gave, and names the layer that
//!   refused.
//! * *What it costs*: a round trip for each layer, one after the other, and a place each in Redis. The
//!   waits do not add up: three layers with two seconds each let a request wait for two in all, see
//!   [`WaitBudget`](limit::WaitBudget).
//!
//! Tower has a layer of the same name, for one process: if you need both, import one of them `as`
//! something else.
//!
//! # What can be seen
//!
//! With the feature `metrics` there are counters, gauges and histograms, by layer. Spans and events of
//! `tracing` have the target `tower_semaphore`: at `INFO` and above a change of state is told once,
//! and nothing while all is well; at `DEBUG` there is a span `acquire` for each request, with the
//! fields `semaphore`, `limit`, `outcome` and `waited_ms`. [`Semaphore::health`] says the same to
//! the program itself. The page `docs/observability.md` lists all names.
//!
//! # Features
//!
//! | name    | what                                                        | default |
//! |---------|-------------------------------------------------------------|---------|
//! | `redis` | permits shared through Redis, over `deadpool-redis` 0.23     | yes     |
//! | `tls`   | `rediss://` URLs, with rustls 0.23                           | no      |
//! | `axum`  | `MatchedPathKey`, `ConnectInfo` for `PeerIpKey`, `Permit` as an extractor, `limit::serve` | no |
//! | `tonic` | `PeerIpKey` knows the connections of tonic's server                | no |
//! | `metrics` | what semaphores and layers count, for the facade of that name: `tower_semaphore::metrics` | no |
//! | `admin` | the operator's page and its JSON, as an Axum router                    | no |
//!
//! Without `redis` there is the embedded backend alone.

#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "admin")]
pub mod admin;
pub mod backend;
mod error;
pub mod limit;
#[cfg(not(feature = "metrics"))]
mod metrics;
#[cfg(feature = "metrics")]
pub mod metrics;
mod name;
pub mod protocol;
mod semaphore;
mod sync;

pub use self::error::{AcquireError, BackendError, ConfigError, LeaseLost, RejectReason, Rejected};
pub use self::limit::{ConcurrencyLimit, ConcurrencyLimitLayer};
pub use self::name::Name;
pub use self::protocol::PlaceId;
pub use self::protocol::overrides::{Mode, Override};
pub use self::semaphore::{
    Acquire, Ask, ConnectionState, Cursor, Health, Holder, Inspection, Limit, Listed,
    OnUnavailable, Page, Permit, Policy, PolicyBuilder, ProcessUse, Semaphore, TenantOverride,
    TenantUse, Waiter,
};

/// For `fuzz/`. No part of the API; not there otherwise.
#[cfg(all(fuzzing, feature = "redis"))]
#[doc(hidden)]
pub mod __fuzz {
    pub use crate::backend::fuzz::{hints, reply};
}

/// The examples of the README run as well.
#[cfg(all(doctest, feature = "redis"))]
#[doc = include_str!("../README.md")]
struct Readme;

/// And those of the page on stacks.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../docs/stacks.md")]
struct Stacks;

/// And those of the page on moving here from something else.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../docs/comparison.md")]
struct Comparison;

/// And those of the page on security.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../docs/security.md")]
struct Security;

/// And those of the recipes.
#[cfg(all(doctest, feature = "axum"))]
#[doc = include_str!("../docs/recipes.md")]
struct Recipes;

/// And the proof of the page on locks.
#[cfg(doctest)]
#[doc = include_str!("../docs/locks.md")]
struct Locks;
