//! Calls to one member, over one connection.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::Uri;
use http::uri::PathAndQuery;
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use prost::Message;
use tokio::time::timeout;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::AsciiMetadataValue;
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use super::auth::{Token, Tokens};
use super::dial::dial;
use super::driver::Driver;
use super::error::{self, Reason, WireError};
use super::exchange::Exchange;
use super::keep_alive::KeepAlive;
use super::messages::{
    AuthenticateRequest, AuthenticateResponse, LeaseGrantRequest, LeaseGrantResponse,
    LeaseRevokeRequest, LeaseRevokeResponse, RangeRequest, RangeResponse, StatusRequest,
    StatusResponse, TxnRequest, TxnResponse,
};
use super::settings::Settings;
use super::url::{Credentials, Endpoint};
use super::watch::{KeyRange, Watch};
use crate::error::BackendError;

/// The largest message that is read, in bytes. etcd accepts requests of 1.5 MiB, so a value, a response to a
/// transaction and a fragment of a watch are smaller by far; ranges are read in pages.
const MESSAGE_MAX: usize = 16 * 1024 * 1024;

/// How long the check of a password may take: etcd checks one after the other.
const PASSWORD_TIMEOUT: Duration = Duration::from_secs(30);

/// A connection to a member of a cluster. Clones share it; it closes, and its streams end, when the last of them is
/// dropped.
///
/// A call makes progress while the [`Driver`] of the connection is polled. Nothing bounds the time that a call takes: a
/// frozen member never answers. Dropping the future of a call abandons it; it may or may not be carried out.
#[derive(Clone)]
pub struct Client {
    grpc: Grpc<Http>,
    tokens: Arc<Tokens>,
    credentials: Option<Arc<Credentials>>,
}

impl Client {
    /// Opens a connection to a member, with a token for user and password if there is none yet. Whether the server is etcd
    /// shows with the first call.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future abandons the attempt.
    ///
    /// # Errors
    ///
    /// If the member cannot be reached within the connect timeout, or does not let the user in.
    pub async fn open(
        endpoint: &Endpoint,
        settings: &Settings,
    ) -> Result<(Self, Driver), BackendError> {
        let whom = format!("etcd at {endpoint}");
        let in_time = |elapsed| error::not_in_time(&whom, elapsed);
        let dialed = timeout(settings.connect_timeout, Self::dial(endpoint, settings));
        let (client, mut driver) = dialed.await.map_err(in_time)??;
        if client.credentials.is_some() {
            let unusable = |error: WireError| {
                let text = format!("{whom} could not be used: {error}");
                Err(BackendError::connection(text).with_source(error))
            };
            // Many may wait for the checks of their passwords, so a member that serves nobody is found out before.
            let status = timeout(settings.connect_timeout, driver.until(client.status()));
            match status.await.map_err(in_time)? {
                Err(error) if error.reason() == Reason::Disconnected => return unusable(error),
                _ => {}
            }
            let let_in = timeout(PASSWORD_TIMEOUT, driver.until(client.range(anything())));
            match let_in.await.map_err(in_time)? {
                Err(error) if error.reason() != Reason::PermissionDenied => return unusable(error),
                _ => {}
            }
        }
        Ok((client, driver))
    }

    async fn dial(
        endpoint: &Endpoint,
        settings: &Settings,
    ) -> Result<(Self, Driver), BackendError> {
        let (sender, driver) = dial(endpoint, settings).await?;
        let scheme = if settings.tls.is_some() { "https" } else { "http" };
        let origin = Uri::builder().scheme(scheme).authority(endpoint.to_string());
        let origin = origin
            .path_and_query("/")
            .build()
            .map_err(|error| BackendError::connection(format!("address is {endpoint}: {error}")))?;
        let grpc = Grpc::with_origin(Http(sender), origin).max_decoding_message_size(MESSAGE_MAX);
        let credentials = settings.credentials.clone().map(Arc::new);
        Ok((Self { grpc, tokens: Arc::clone(&settings.tokens), credentials }, driver))
    }

    /// Reads keys.
    ///
    /// # Errors
    ///
    /// If etcd refuses, or the connection is lost.
    pub async fn range(&self, request: RangeRequest) -> Result<RangeResponse, WireError> {
        self.call("/etcdserverpb.KV/Range", request).await
    }

    /// Carries out a transaction.
    ///
    /// # Errors
    ///
    /// If etcd refuses, or the connection is lost; see [`WireError::did_nothing`].
    pub async fn txn(&self, request: TxnRequest) -> Result<TxnResponse, WireError> {
        self.call("/etcdserverpb.KV/Txn", request).await
    }

    /// Grants a lease.
    ///
    /// # Errors
    ///
    /// If etcd refuses, or the connection is lost. The lease may have been granted.
    pub async fn lease_grant(
        &self,
        request: LeaseGrantRequest,
    ) -> Result<LeaseGrantResponse, WireError> {
        self.call("/etcdserverpb.Lease/LeaseGrant", request).await
    }

    /// Ends a lease, and deletes its keys.
    ///
    /// # Errors
    ///
    /// If there is no such lease, etcd refuses, or the connection is lost.
    pub async fn lease_revoke(
        &self,
        request: LeaseRevokeRequest,
    ) -> Result<LeaseRevokeResponse, WireError> {
        self.call("/etcdserverpb.Lease/LeaseRevoke", request).await
    }

    /// Returns the state of the member.
    ///
    /// # Errors
    ///
    /// If etcd refuses, or the connection is lost.
    pub async fn status(&self) -> Result<StatusResponse, WireError> {
        self.call("/etcdserverpb.Maintenance/Status", StatusRequest {}).await
    }

    /// Watches ranges of keys, each from a revision on. Nothing is sent before [`Watch::next`] is polled.
    #[must_use]
    pub fn watch(&self, ranges: Vec<KeyRange>) -> Watch {
        Watch::new(ranges, |capacity| self.exchange("/etcdserverpb.Watch/Watch", capacity))
    }

    /// Keeps leases alive. Nothing is sent before [`KeepAlive::next`] is polled.
    #[must_use]
    pub fn keep_alive(&self) -> KeepAlive {
        KeepAlive::new(|capacity| self.exchange("/etcdserverpb.Lease/LeaseKeepAlive", capacity))
    }

    /// Makes a call; once more with a new token if etcd did nothing because the token has ended.
    async fn call<Q, R>(&self, path: &'static str, request: Q) -> Result<R, WireError>
    where
        Q: Message + Clone + 'static,
        R: Message + Default + 'static,
    {
        let token = self.tokens.newest();
        let result = self.send(path, request.clone(), token.clone()).await;
        match result {
            Err(error) if self.credentials.is_some() && wants_token(&error, token.as_ref()) => {
                let token = self.authenticate(token.as_ref()).await?;
                self.send(path, request, token).await
            }
            result => result,
        }
    }

    async fn send<Q, R>(
        &self,
        path: &'static str,
        request: Q,
        token: Option<Token>,
    ) -> Result<R, WireError>
    where
        Q: Message + 'static,
        R: Message + Default + 'static,
    {
        let mut grpc = self.grpc.clone();
        let codec = ProstCodec::<Q, R>::default();
        let response = grpc.unary(with(request, token), PathAndQuery::from_static(path), codec);
        response.await.map(tonic::Response::into_inner).map_err(WireError::of_status)
    }

    /// Opens a stream in both directions.
    fn exchange<Q, R>(&self, path: &'static str, capacity: usize) -> Exchange<Q, R>
    where
        Q: Message + 'static,
        R: Message + Default + 'static,
    {
        let (mut grpc, token) = (self.grpc.clone(), self.tokens.newest());
        Exchange::new(capacity, |requests| {
            async move {
                let codec = ProstCodec::<Q, R>::default();
                let path = PathAndQuery::from_static(path);
                let response = grpc.streaming(with(requests, token), path, codec).await;
                response.map(tonic::Response::into_inner).map_err(WireError::of_status)
            }
            .boxed()
        })
    }

    /// Returns a token that is newer than `ended`. `None`: there is no user, or the cluster has none.
    async fn authenticate(&self, ended: Option<&Token>) -> Result<Option<Token>, WireError> {
        let Some(credentials) = &self.credentials else { return Ok(None) };
        let request = || {
            let (client, credentials) = (self.grpc.clone(), Arc::clone(credentials));
            request_token(client, credentials).boxed()
        };
        self.tokens.renew(ended, request).await
    }
}

/// A read that the member answers by itself, to anybody who is let in.
fn anything() -> RangeRequest {
    let (key, limit) = (Bytes::from_static(b"\0"), 1);
    RangeRequest { key, limit, serializable: true, keys_only: true, ..Default::default() }
}

/// Returns whether a call may succeed with a newer token.
fn wants_token(error: &WireError, sent: Option<&Token>) -> bool {
    match error.reason() {
        Reason::InvalidToken => true,
        // Users were enabled since the connection was opened.
        Reason::NotAuthenticated => sent.is_none(),
        _ => false,
    }
}

async fn request_token(
    mut grpc: Grpc<Http>,
    credentials: Arc<Credentials>,
) -> Result<Option<Token>, WireError> {
    let Credentials { user: name, password } = (*credentials).clone();
    let request = with(AuthenticateRequest { name, password }, None);
    let path = PathAndQuery::from_static("/etcdserverpb.Auth/Authenticate");
    let codec = ProstCodec::<AuthenticateRequest, AuthenticateResponse>::default();
    match grpc.unary(request, path, codec).await.map_err(WireError::of_status) {
        Ok(response) => {
            let token = response.into_inner().token.parse().map_err(|_| {
                WireError::of_status(Status::unknown("the token has other than ASCII characters"))
            });
            token.map(Some)
        }
        // As etcd's own clients do.
        Err(error) if error.reason() == Reason::AuthenticationDisabled => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns a request that a member without a leader refuses, and whose stream it ends.
fn with<T>(message: T, token: Option<Token>) -> Request<T> {
    let mut request = Request::new(message);
    let metadata = request.metadata_mut();
    metadata.insert("hasleader", AsciiMetadataValue::from_static("true"));
    if let Some(token) = token {
        metadata.insert("token", token);
    }
    request
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").finish_non_exhaustive()
    }
}

/// The connection, as tonic uses it.
#[derive(Clone)]
struct Http(SendRequest<Body>);

impl tower_service::Service<http::Request<Body>> for Http {
    type Response = http::Response<Incoming>;
    type Error = hyper::Error;
    type Future = futures_util::future::BoxFuture<'static, hyper::Result<Self::Response>>;

    fn poll_ready(
        &mut self,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Result<(), hyper::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        self.0.send_request(request).boxed()
    }
}
