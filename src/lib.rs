//! One fair semaphore for a whole fleet, worn as a Tower layer.
//!
//! [`ConcurrencyLimitLayer`] takes a permit for each request, keyed by route, tenant or anything else. All replicas
//! share the permits of a key through Redis or etcd and are served first come, first served. A request that cannot
//! wait is rejected with 429. The permit is held exactly as long as the response, its stream included.
//!
//! Tenants that share one quota can be served by fair shares instead of in the order of arrival: a permit that
//! comes free goes to the tenant with the fewest in use. See
//! [`fair_by`](limit::ConcurrencyLimitBuilder::fair_by) and [`Ask`].
//!
//! Use it where several replicas together may have at most N requests in flight with an API that has a concurrency
//! quota (an LLM provider, a payment gateway), or where no tenant may take more than its share. A limiter in each
//! process multiplies the cap by the number of replicas; a counter in Redis leaks at every crash; a lock service
//! polls. It limits requests in flight (max concurrency, a bulkhead against noisy neighbours, with a queue or with
//! load shedding) and, with [`rate`](PolicyBuilder::rate), how many of them start within a time. A response of the
//! upstream that says "later" can pause all replicas until then: see [`feedback`].
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
//! // The first response still holds its permit: its body is not dropped.
//! let second = service.call(request("acme")?).await?;
//! assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
//!
//! // Another tenant has its own permits. When a response ends, its permit is free.
//! assert_eq!(service.call(request("globex")?).await?.status(), StatusCode::OK);
//! drop(first);
//! assert_eq!(service.call(request("acme")?).await?.status(), StatusCode::OK);
//! # Ok(()) }
//! ```
//!
//! # Guarantees
//!
//! * **The cap holds.** At no instant does the backend count more than `limit` unexpired permits for a key. A process
//!   knows by its own clock when it may no longer rely on a permit ([`Permit::lost`]), and the layer then cuts the
//!   request off.
//! * **The rate holds**, where there is one: in no window, by the backend's clock, do more requests start, whatever
//!   becomes of them. [`rate`](PolicyBuilder::rate) has the exceptions.
//! * **First come, first served**, over all processes: no request overtakes one that waits. Between tenants by fair
//!   shares, where that is configured. With [`reuse`](PolicyBuilder::reuse), another process's requests can go first for
//!   at most 50 ms; and a process whose connection to Redis breaks can be passed over once for each place that waited.
//! * **A freed permit goes to the head of the queue**, or to the tenant whose turn it is, in the step that frees it. A
//!   lost message costs at most a second, a dead process its lease, a dead waiter nothing.
//! * **Nothing leaks.** Dropping any future or body, at any await point, releases what it had. When the last request
//!   is gone, nothing is stored.
//! * **Every request is answered in bounded time**, whatever the backend does: with 503 if it cannot be asked.
//! * **Nothing else changes**: the error type of the inner service, extensions, trailers, sizes, HEAD, upgrades. Under
//!   the cap the layer costs one round trip before the handler and none after.
//!
//! The cap has exceptions, each bounded: if Redis loses its data, newcomers can be admitted beside current holders until
//! the next renewals, well within a lease; if its clock steps forward by more than a lease, until the holders learn that
//! theirs have ended; and a process that stands still past its lease goes on until it wakes. The policy
//! [`OnUnavailable::Admit`] gives the cap up while Redis is unavailable, and [`OnUnavailable::Local`] keeps it only as far
//! as no process held more than its share. `docs/what-happens-when.md` has all of them;
//! [the package](https://docs.rs/crate/tower-semaphore/latest/source/docs/) contains the folder `docs`.
//!
//! # A permit and its response
//!
//! The permit is taken before the handler is called, moves into the response body, and is released at the last frame,
//! at an error, or when the body is dropped; or at the head, with
//! [`HoldUntil::ResponseHead`](limit::HoldUntil::ResponseHead). It is in the extensions of the request as well: a
//! handler that keeps a clone keeps the permit. A WebSocket or a background task needs that, because its response
//! ends (with 101 or 202) before its work does:
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
//! The connection of a WebSocket can keep it too, without code in the handler: see
//! [`ConnectionIo`](limit::ConnectionIo). With a [linger](PolicyBuilder::linger), the permit of an upgraded connection
//! lingers after its end, whether the connection or the handler keeps it.
//!
//! A request whose client leaves is dropped by its server, and so its place is. Over HTTP/1.1 a server does not notice a
//! client that leaves bytes behind which nobody reads, such as an upload while it waits; a server on
//! [`ConnectionIo`](limit::ConnectionIo), which `limit::serve` uses, does.
//!
//! # Where the layer goes
//!
//! On an Axum router, a single route, a tonic server or channel, a client of `hyper-util` or reqwest:
//! wherever a `Service<http::Request<_>>` answers with `http::Response<impl Body<Data = Bytes>>`
//! (`docs/stacks.md` has a snippet for each). gRPC requests are refused with a gRPC status; a client can turn refusals
//! into errors ([`ConcurrencyLimitLayer::into_error`]). Put the layer inside authentication and the layers that limit
//! the size of a request, and outside those that do expensive work. A timeout around the layer counts the time in the
//! queue, one inside begins with the permit. In Axum, `Router::layer` also runs for requests that match no route;
//! `route_layer` does not.
//!
//! # Several layers on one request
//!
//! Each layer takes its own permit, the outermost first, and holds it as long as the response. Put the narrowest
//! limit outermost: that of the tenant, then that of the route, then that of all requests.
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
//! // With Axum, where the layer added last is outermost: .layer(all).layer(route).layer(tenant)
//! let service = tenant.layer(route.layer(all.layer(handler)));
//! # let _ = service; Ok(()) }
//! ```
//!
//! * **Order.** A request that waits in an inner layer holds the permits of the outer ones. With the tenant outermost,
//!   the surplus requests of a tenant wait in its own queue and hold at most five permits of anything. In the reverse
//!   order they would hold the permits of all while they wait, and other tenants would find none.
//! * **Deadlock.** A request that holds the permit of one layer waits only for layers further in, and one that holds
//!   the innermost waits for none. This requires that all requests meet the layers in the same order, in all services
//!   that share their names. Two routes with opposite orders, one layer twice around a handler, or a handler that
//!   calls its own service through these layers can form a cycle. It ends with a refusal, at the first wait timeout.
//!   `docs/locks.md` has the ways in which a request enters twice.
//! * **Refusals.** A refusal further in releases the permits of the outer layers at once, and names the layer that
//!   refused. With a [linger](PolicyBuilder::linger), it does so unless another attempt at the request was passed on.
//! * **Cost.** Each layer costs a round trip, one after the other, and a place in Redis. Waits do not add up: three
//!   layers with two seconds each let a request wait for two seconds in all, see [`WaitBudget`](limit::WaitBudget).
//!
//! Tower has a layer of the same name, for one process. If you need both, rename one on import.
//!
//! # Observability
//!
//! The feature `metrics` adds counters, gauges and histograms, by layer. Spans and events of `tracing` have the target
//! `tower_semaphore`. At `INFO` and above, each change of state is logged once, and nothing in normal operation; at
//! `DEBUG` each request has a span `acquire` with the fields `semaphore`, `limit`, `outcome` and `waited_ms`.
//! [`Semaphore::health`] returns the same state to the program. `docs/observability.md` lists all names.
//!
//! # Features
//!
//! | name    | what                                                        | default |
//! |---------|-------------------------------------------------------------|---------|
//! | `redis` | permits shared through Redis                                 | yes     |
//! | `deadpool-redis` | `RedisBackend::from_pool`, for pools of `deadpool-redis` 0.23 | yes |
//! | `etcd`  | permits shared through etcd: `Semaphore::etcd`, `EtcdBackend`. `docs/etcd.md` is for operators | no |
//! | `tls`   | `rediss://` and `etcds://` URLs, with rustls 0.23 and its provider `ring`     | no      |
//! | `tls-no-provider` | the same without `ring`: the process brings the crypto provider, see `TlsSettings` | no |
//! | `axum`  | `MatchedPathKey`, `PeerIpKey::from_axum`, `Permit` as an extractor, `limit::serve` for WebSockets and clients that leave | no |
//! | `tonic` | `PeerIpKey::from_tonic`             | no |
//! | `metrics` | metrics of semaphores and layers, through the crate `metrics`: `tower_semaphore::metrics` | no |
//! | `admin` | the operator's page and its JSON, as an Axum router                    | no |
//! | `unstable-backend` | the traits that a backend implements, and the protocol. Not covered by semver | no |
//!
//! Without `redis` and `etcd` there is only the embedded backend. `docs/stability.md` says which types follow the versions of other
//! crates.

#![cfg_attr(nightly_docs, feature(doc_cfg))]

#[cfg(feature = "admin")]
pub mod admin;
mod ask;
pub mod backend;
mod budget;
mod error;
pub mod feedback;
mod further;
pub mod limit;
#[cfg(not(feature = "metrics"))]
mod metrics;
#[cfg(feature = "metrics")]
pub mod metrics;
mod name;
mod node;
mod policy;
mod semaphore;
pub mod service;
mod sharded;
mod suspension;
mod sync;
mod tasks;
mod tenants;

pub use self::ask::Ask;
pub use self::budget::Budget;
pub use self::error::{AcquireError, BackendError, ConfigError, LeaseLost, RejectReason, Rejected};
pub use self::feedback::Feedback;
pub use self::limit::{ConcurrencyLimit, ConcurrencyLimitLayer};
pub use self::name::Name;
pub use self::policy::{Limit, OnUnavailable, Policy, PolicyBuilder};
#[doc(inline)]
pub use self::protocol::{Adaptive, Rate};
pub use self::semaphore::{Acquire, Permit, Semaphore};
pub use self::semaphore::{ConnectionState, Health};
pub use self::service::PermitLayer;
/// The protocol, for backends of your own and for tests: see [`backend::seam`].
#[cfg(feature = "unstable-backend")]
pub use tower_semaphore_protocol as protocol;
#[cfg(not(feature = "unstable-backend"))]
use tower_semaphore_protocol as protocol;

/// What an operator sees of a running fleet, and sets in it.
///
/// [`Semaphore::inspect`] returns an [`Inspection`] of a name, [`Semaphore::list`] a [`Page`] of names, and
/// [`Semaphore::overrides`] each [`Override`] that was set. See [`Semaphore`](Semaphore#operations) for the commands.
///
/// [`Inspection`]: operate::Inspection
/// [`Page`]: operate::Page
/// [`Override`]: operate::Override
pub mod operate {
    pub use crate::further::FurtherLimitOverride;
    #[doc(inline)]
    pub use crate::protocol::{Mode, Override, PauseCause};
    pub use crate::semaphore::{
        AdaptedLimit, BudgetUse, Cursor, FurtherLimitUse, Holder, Inspection, Listed, Page, Paused,
        PlaceId, ProcessUse, RateUse, TenantId, TenantUse, Waiter,
    };
    pub use crate::tenants::{TenantChange, TenantOverride};
}

/// For `fuzz/`. Not part of the API.
#[cfg(all(fuzzing, feature = "redis"))]
#[doc(hidden)]
pub mod __fuzz {
    pub use crate::backend::fuzz::{hints, reply};
}
