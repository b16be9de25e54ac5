//! A limit on calls in flight for any Tower service: jobs, commands, the requests of an API client.
//!
//! [`ConcurrencyLimitLayer`](crate::ConcurrencyLimitLayer) speaks HTTP. It answers a rejected request with a response,
//! and holds the permit as long as the response's body. A service whose requests are of another type has neither.
//! [`PermitLayer`] limits it all the same: it takes a permit for each call, holds it until the inner service has
//! responded, and fails with an error if there is no permit. Both run the same machine, and share the permits of a
//! name with each other and with [`Semaphore::acquire`](crate::Semaphore::acquire).
//!
//! For each request, in this order:
//!
//! 1. A closure names the semaphore, or returns an [`Ask`](crate::Ask) with a tenant and a cost. The request joins the
//!    queue in `call`, not when the future is first polled.
//! 2. It takes a permit, or waits for one as its [`Policy`](crate::Policy) says.
//! 3. A clone of the inner service becomes ready and is called. [`attach`](PermitLayer::attach) hands the permit to
//!    the request.
//! 4. The permit is released when the inner service has responded or failed, or when the future is dropped.
//!    [`keep`](PermitLayer::keep) holds it longer.
//!
//! # Errors
//!
//! The error is a [`BoxError`], as that of Tower's own layers, so that the service fits into a stack with
//! [`tower::timeout`], [`tower::retry`] or a `HandleErrorLayer`. It is
//!
//! * an [`AcquireError`](crate::AcquireError) if the request got no permit: the inner service has not seen it, and it
//!   can be retried;
//! * [`LeaseLost`](crate::LeaseLost) if its permit was lost before there was a response: the call was dropped, and the
//!   inner service may have begun with it;
//! * the error of the inner service otherwise.
//!
//! However many layers lie around it, `error.downcast_ref::<AcquireError>()` finds it.
//!
//! # Examples
//!
//! A worker of a job queue. No tenant has more than two jobs in flight, in all workers together:
//!
//! ```
//! use std::time::Duration;
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_semaphore::service::BoxError;
//! use tower_semaphore::{AcquireError, Name, PermitLayer, Policy, Semaphore};
//!
//! struct Job {
//!     tenant: String,
//!     pages: u32,
//! }
//!
//! async fn render(job: Job) -> Result<u32, std::io::Error> {
//!     Ok(job.pages)
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! // In production: Semaphore::redis("redis://redis.internal/")?
//! let semaphore = Semaphore::in_memory();
//! let policy = Policy::builder(2).wait_timeout(Duration::from_secs(60)).build()?;
//! let limit = PermitLayer::new(&semaphore, policy, |job: &Job| Name::new("render").part(&job.tenant));
//!
//! let mut worker = ServiceBuilder::new().layer(limit).service_fn(render);
//! match worker.ready().await?.call(Job { tenant: "acme".to_owned(), pages: 3 }).await {
//!     Ok(pages) => assert_eq!(pages, 3),
//!     Err(error) if error.is::<AcquireError>() => println!("back into the queue: {error}"),
//!     Err(error) => println!("the job failed: {error}"),
//! }
//! # Ok(()) }
//! ```
//!
//! A client whose requests are a type of its own, as reqwest's are. The response is a stream, so it keeps the permit:
//!
//! ```
//! use tower::{Service, ServiceBuilder, ServiceExt};
//! use tower_semaphore::service::BoxError;
//! use tower_semaphore::{Permit, PermitLayer, Policy, Semaphore};
//!
//! # struct Prompt(&'static str);
//! # struct Answer(&'static str);
//! # async fn send(_: Prompt) -> Result<Answer, std::io::Error> { Ok(Answer("42")) }
//! /// An answer that counts as in flight until it is dropped.
//! struct Counted {
//!     answer: Answer,
//!     _permit: Permit,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), BoxError> {
//! let semaphore = Semaphore::in_memory();
//! let limit = PermitLayer::new(&semaphore, Policy::new(10), |_: &Prompt| "llm")
//!     .keep(|answer, permit| Counted { answer, _permit: permit });
//!
//! let mut client = ServiceBuilder::new().layer(limit).service_fn(send);
//! let counted = client.ready().await?.call(Prompt("the question")).await?;
//! assert_eq!(semaphore.inspect("llm").await?.in_use, 1);
//! # assert_eq!(counted.answer.0, "42");
//! drop(counted);
//! assert_eq!(semaphore.inspect("llm").await?.in_use, 0);
//! # Ok(()) }
//! ```
//!
//! [`tower::timeout`]: https://docs.rs/tower/latest/tower/timeout
//! [`tower::retry`]: https://docs.rs/tower/latest/tower/retry

mod entry;
mod future;
mod keep;
mod layer;
pub(crate) mod passage;
mod permitted;

pub use self::future::PermitFuture;
pub use self::keep::{KeepPermit, Release};
pub use self::layer::PermitLayer;
pub use self::permitted::Permitted;

/// The error of a [`Permitted`] (see [Errors](self#errors)), and of a [`ResponseBody`](crate::limit::ResponseBody): that
/// of the inner body, or [`LeaseLost`](crate::LeaseLost).
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
