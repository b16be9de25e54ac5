//! The auto traits of public types: promises that a private field can break.
//!
//! Nothing runs here: the test is that it compiles.

use std::error::Error;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body::Body;
use http_body_util::Full;
use http_body_util::combinators::UnsyncBoxBody;
use tower::util::BoxCloneService;
use tower_semaphore::backend::{MemoryBackend, MemoryServer};
use tower_semaphore::limit::{
    BoxError, CachedLimit, CachedPlan, ConcurrencyLimitBuilder, Connection, ConnectionIo,
    ExtensionKey, GlobalKey, HeaderKey, HoldUntil, IntoError, IntoErrorFuture, IntoErrorLayer,
    MissingKey, OnConnection, OnConnectionFuture, OnLost, PathKey, PeerIpKey, Plan, Refusal,
    RefusalBody, RefusalReason, ResponseBody, ResponseFuture, ShadowCounts, WouldRefuse,
};
use tower_semaphore::operate::{Cursor, Holder, Inspection, Listed, Mode, Override, Page, Waiter};
use tower_semaphore::{
    Acquire, AcquireError, BackendError, ConcurrencyLimit, ConcurrencyLimitLayer, ConfigError,
    LeaseLost, Limit, Name, Permit, Policy, PolicyBuilder, RejectReason, Rejected, Semaphore,
};

fn is_send<T: Send>() {}
fn is_sync<T: Sync>() {}
fn is_unpin<T: Unpin>() {}
fn is_static<T: 'static>() {}
fn is_clone<T: Clone>() {}
fn is_copy<T: Copy>() {}
fn is_error<T: Error + Send + Sync + Unpin + 'static>() {}

/// `Send`, `Sync` and `'static`.
fn is_free<T: Send + Sync + Unpin + 'static>() {}

/// A service that is `Send` and `Clone`, but not `Sync`.
type Boxed = BoxCloneService<Request<()>, http::Response<UnsyncBoxBody<Bytes, BoxError>>, BoxError>;

#[test]
fn handles_can_be_sent_shared_and_cloned() {
    is_free::<Semaphore>();
    is_clone::<Semaphore>();
    is_free::<Permit>();
    is_clone::<Permit>();
    is_free::<MemoryBackend>();
    is_free::<MemoryServer>();
    is_clone::<MemoryBackend>();
    is_clone::<MemoryServer>();
    is_free::<ConcurrencyLimitLayer>();
    is_clone::<ConcurrencyLimitLayer>();
    is_send::<ConcurrencyLimitBuilder>();
    is_static::<ConcurrencyLimitBuilder>();
}

#[test]
fn values_can_be_copied_or_cloned() {
    is_free::<Policy>();
    is_clone::<Policy>();
    is_clone::<PolicyBuilder>();
    is_copy::<Limit>();
    is_copy::<Mode>();
    is_copy::<Override>();
    is_copy::<RejectReason>();
    is_copy::<RefusalReason>();
    is_copy::<HoldUntil>();
    is_copy::<OnLost>();
    is_copy::<MissingKey>();
    is_copy::<GlobalKey>();
    is_copy::<PathKey>();
    is_copy::<PeerIpKey>();
    is_clone::<HeaderKey>();
    is_free::<HeaderKey>();
    is_free::<Name>();
    is_clone::<Name>();
    is_free::<Inspection>();
    is_clone::<Inspection>();
    is_clone::<Holder>();
    is_clone::<Waiter>();
    is_free::<Page>();
    is_clone::<Cursor>();
    is_clone::<Listed>();
    // It is put into extensions, which need all of these.
    is_free::<Refusal>();
    is_clone::<Refusal>();
    is_free::<WouldRefuse>();
    is_free::<CachedLimit>();
    is_clone::<CachedLimit>();
    is_free::<CachedPlan>();
    is_clone::<CachedPlan>();
    is_copy::<Plan>();
    is_clone::<WouldRefuse>();
    is_copy::<ShadowCounts>();
}

#[test]
fn an_extension_key_is_free_whatever_it_names() {
    is_free::<ExtensionKey<std::rc::Rc<str>>>();
    is_copy::<ExtensionKey<String>>();
}

#[test]
fn a_service_is_as_free_as_the_one_inside() {
    is_free::<ConcurrencyLimit<tower::util::BoxService<(), (), ()>>>();
    is_free::<ConcurrencyLimit<()>>();
    is_clone::<ConcurrencyLimit<()>>();
    is_send::<ConcurrencyLimit<Boxed>>();
    is_clone::<ConcurrencyLimit<Boxed>>();
    is_static::<ConcurrencyLimit<Boxed>>();
}

#[test]
fn a_response_future_can_be_sent_if_the_service_can() {
    is_send::<ResponseFuture<Boxed, ()>>();
    is_static::<ResponseFuture<Boxed, ()>>();
    is_unpin::<ResponseFuture<Boxed, ()>>();
}

#[test]
fn refusing_with_errors_changes_none_of_that() {
    is_free::<IntoErrorLayer>();
    is_clone::<IntoErrorLayer>();
    is_free::<IntoError<ConcurrencyLimit<()>>>();
    is_send::<IntoError<ConcurrencyLimit<Boxed>>>();
    is_clone::<IntoError<ConcurrencyLimit<Boxed>>>();
    is_send::<IntoErrorFuture<ResponseFuture<Boxed, ()>>>();
    is_unpin::<IntoErrorFuture<ResponseFuture<Boxed, ()>>>();
    is_error::<Refusal>();
}

#[test]
fn a_connection_is_as_free_as_the_one_inside() {
    is_free::<ConnectionIo<tokio::net::TcpStream>>();
    is_send::<ConnectionIo<std::cell::Cell<u8>>>();
    // It is put into extensions, which need all of these.
    is_free::<Connection>();
    is_clone::<Connection>();
    is_free::<OnConnection<String>>();
    is_clone::<OnConnection<String>>();
    is_send::<OnConnection<Boxed>>();
    is_free::<OnConnectionFuture<std::future::Ready<()>>>();
    is_send::<OnConnectionFuture<tower::util::Oneshot<Boxed, Request<()>>>>();
}

#[test]
fn a_body_is_as_free_as_the_one_inside() {
    is_free::<ResponseBody<Full<Bytes>>>();
    is_send::<ResponseBody<UnsyncBoxBody<Bytes, BoxError>>>();
    is_unpin::<ResponseBody<UnsyncBoxBody<Bytes, BoxError>>>();
    is_free::<RefusalBody>();
    // A custom response may have a body that is not `Sync`.
    let _: RefusalBody = RefusalBody::new(UnsyncBoxBody::new(Full::new(Bytes::new())));
}

#[test]
fn waiting_can_be_polled_without_pinning() {
    is_send::<Acquire>();
    is_sync::<Acquire>();
    is_unpin::<Acquire>();
    is_static::<Acquire>();
}

#[test]
fn errors_are_errors_that_can_be_boxed() {
    is_error::<AcquireError>();
    is_clone::<AcquireError>();
    is_error::<BackendError>();
    is_clone::<BackendError>();
    is_error::<ConfigError>();
    is_clone::<ConfigError>();
    is_error::<LeaseLost>();
    is_clone::<LeaseLost>();
    is_clone::<Rejected>();
    let _: fn(AcquireError) -> BoxError = Into::into;
}

#[cfg(feature = "redis")]
#[test]
fn a_redis_backend_can_be_sent_and_shared() {
    use tower_semaphore::backend::{RedisBackend, RedisBackendBuilder};

    is_free::<RedisBackend>();
    is_free::<RedisBackendBuilder>();
    is_clone::<RedisBackendBuilder>();
    #[cfg(feature = "tls")]
    {
        use tower_semaphore::backend::TlsSettings;
        is_free::<TlsSettings>();
        is_clone::<TlsSettings>();
    }
}

#[cfg(feature = "axum")]
#[test]
fn what_axum_needs_is_there() {
    use axum::body::Body as AxumBody;
    use axum::response::IntoResponse;
    use axum::routing::Route;
    use tower_semaphore::limit::{
        IncomingConnection, MatchedPathKey, PermitMissing, Serve, ServeFuture, WithGracefulShutdown,
    };

    fn is_response<T: IntoResponse>() {}
    is_response::<http::Response<ResponseBody<AxumBody>>>();
    is_response::<PermitMissing>();
    is_error::<PermitMissing>();
    is_copy::<MatchedPathKey>();
    is_free::<ConcurrencyLimit<Route>>();
    is_free::<Serve<tokio::net::TcpListener, axum::Router>>();
    is_free::<WithGracefulShutdown<tokio::net::TcpListener, axum::Router, ()>>();
    is_send::<ServeFuture>();
    is_unpin::<ServeFuture>();
    is_copy::<IncomingConnection<'static, tokio::net::TcpListener>>();
    is_send::<ResponseFuture<Route, AxumBody>>();
}

#[test]
fn the_futures_of_all_methods_can_be_sent() {
    fn future<F: Future + Send>(_: impl FnOnce() -> F) {}
    let _ = || {
        let semaphore = Semaphore::in_memory();
        let policy = Policy::new(1);
        future(|| semaphore.acquire("x", &policy));
        future(|| semaphore.try_acquire("x", &policy));
        future(|| semaphore.inspect("x"));
        future(|| semaphore.inspect_fleet("x"));
        future(|| semaphore.list(Cursor::default(), 10));
        future(|| semaphore.revoke("x", "00000000001:1".parse().unwrap()));
        future(|| semaphore.drain("x", Duration::ZERO));
        future(|| semaphore.shutdown());
    };
    let _ = |permit: Permit| {
        future(|| permit.lost());
        future(|| permit.clone().release());
    };
}

#[test]
fn bodies_can_be_boxed() {
    type Boxed = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send + Sync>>;
    fn boxed<B: Body<Data = Bytes, Error = BoxError> + Send + Sync + 'static>() {
        let _: fn(Pin<Box<B>>) -> Boxed = |body| body;
    }
    boxed::<ResponseBody<Full<Bytes>>>();
    boxed::<RefusalBody>();
}
