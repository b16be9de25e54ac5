//! Serves etcd's API: HTTP/2 and gRPC, as a member does, over a connection of the simulated network.

use std::convert::Infallible;

use futures_util::future::BoxFuture;
use futures_util::stream::BoxStream;
use futures_util::{FutureExt, StreamExt, stream};
use http::{Request as HttpRequest, Response as HttpResponse};
use hyper::body::Incoming;
use hyper::server::conn::http2::Builder;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::server::{Grpc, StreamingService, UnaryService};
use tonic::{Request, Response, Status, Streaming};
use tonic_prost::ProstCodec;
use tower_semaphore::backend::etcd_wire::messages::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, LeaseKeepAliveResponse,
    LeaseRevokeRequest, LeaseRevokeResponse, RangeRequest, RangeResponse, StatusRequest,
    StatusResponse, TxnRequest, TxnResponse, WatchRequest, WatchResponse,
};

use crate::cluster::{Cluster, State, no_leader};
use crate::network::Accepted;
use crate::store::Done;
use crate::watching::watch;

/// A member, as one process reaches it.
#[derive(Clone)]
pub struct Server {
    pub cluster: Cluster,
    pub member: usize,
    pub process: usize,
}

/// Serves a connection until it ends.
pub async fn serve(cluster: Cluster, accepted: Accepted) {
    let Accepted { process, member, end } = accepted;
    let server = Server { cluster, member, process };
    let service = service_fn(move |request| {
        let server = server.clone();
        async move { Ok::<_, Infallible>(server.route(request).await) }
    });
    let mut builder = Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new());
    // Both ends of a connection may be cut at any time.
    _ = builder.serve_connection(TokioIo::new(end), service).await;
}

impl Server {
    async fn route(self, request: HttpRequest<Incoming>) -> HttpResponse<Body> {
        let path = request.uri().path().to_owned();
        match path.as_str() {
            "/etcdserverpb.KV/Range" => self.unary::<RangeRequest>(request).await,
            "/etcdserverpb.KV/Txn" => self.unary::<TxnRequest>(request).await,
            "/etcdserverpb.Lease/LeaseGrant" => self.unary::<LeaseGrantRequest>(request).await,
            "/etcdserverpb.Lease/LeaseRevoke" => self.unary::<LeaseRevokeRequest>(request).await,
            "/etcdserverpb.Maintenance/Status" => self.unary::<StatusRequest>(request).await,
            "/etcdserverpb.Lease/LeaseKeepAlive" => {
                let codec = ProstCodec::<LeaseKeepAliveResponse, LeaseKeepAliveRequest>::default();
                Grpc::new(codec).streaming(KeepAlives(self), request).await
            }
            "/etcdserverpb.Watch/Watch" => {
                let codec = ProstCodec::<WatchResponse, WatchRequest>::default();
                Grpc::new(codec).streaming(Watching(self), request).await
            }
            _ => Status::unimplemented("unknown service").into_http(),
        }
    }

    async fn unary<Q: Asked>(self, request: HttpRequest<Incoming>) -> HttpResponse<Body> {
        self.cluster.state().count(self.process);
        Grpc::new(ProstCodec::<Q::Answer, Q>::default()).unary(Unary(self), request).await
    }
}

/// A request that has one response.
trait Asked: prost::Message + Default + 'static {
    type Answer: prost::Message + Default + 'static;

    fn answer(self, server: Server) -> BoxFuture<'static, Result<Self::Answer, Status>>;
}

struct Unary(Server);

impl<Q: Asked> UnaryService<Q> for Unary {
    type Response = Q::Answer;
    type Future = BoxFuture<'static, Result<Response<Q::Answer>, Status>>;

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        request.into_inner().answer(self.0.clone()).map(|answer| answer.map(Response::new)).boxed()
    }
}

impl Asked for RangeRequest {
    type Answer = RangeResponse;

    fn answer(self, server: Server) -> BoxFuture<'static, Result<RangeResponse, Status>> {
        async move {
            let read = move |state: &mut State| state.store.range(&self);
            let (found, header) = server.cluster.carry_out(server.member, read).await?;
            Ok(RangeResponse { header: Some(header), ..found })
        }
        .boxed()
    }
}

impl Asked for TxnRequest {
    type Answer = TxnResponse;

    fn answer(self, server: Server) -> BoxFuture<'static, Result<TxnResponse, Status>> {
        async move {
            let act = move |state: &mut State| state.store.txn(&self);
            let (done, header) = server.cluster.carry_out(server.member, act).await?;
            let Done { succeeded, responses } = done;
            Ok(TxnResponse { header: Some(header), succeeded, responses })
        }
        .boxed()
    }
}

impl Asked for LeaseGrantRequest {
    type Answer = LeaseGrantResponse;

    fn answer(self, server: Server) -> BoxFuture<'static, Result<LeaseGrantResponse, Status>> {
        async move {
            let act = move |state: &mut State| state.store.grant(self.ttl);
            let ((id, ttl), header) = server.cluster.carry_out(server.member, act).await?;
            Ok(LeaseGrantResponse { header: Some(header), id, ttl })
        }
        .boxed()
    }
}

impl Asked for LeaseRevokeRequest {
    type Answer = LeaseRevokeResponse;

    fn answer(self, server: Server) -> BoxFuture<'static, Result<LeaseRevokeResponse, Status>> {
        async move {
            let act = move |state: &mut State| state.store.revoke(self.id);
            let ((), header) = server.cluster.carry_out(server.member, act).await?;
            Ok(LeaseRevokeResponse { header: Some(header) })
        }
        .boxed()
    }
}

impl Asked for StatusRequest {
    type Answer = StatusResponse;

    fn answer(self, server: Server) -> BoxFuture<'static, Result<StatusResponse, Status>> {
        async move { Ok(server.cluster.state().status(server.member)) }.boxed()
    }
}

// ===== streams =====

type Responses<R> = BoxStream<'static, Result<R, Status>>;

/// Sends the head of the response with the first message only, as etcd does.
async fn with_first<R: Send + 'static>(
    mut responses: mpsc::UnboundedReceiver<Result<R, Status>>,
) -> Result<Response<Responses<R>>, Status> {
    let first = match responses.recv().await {
        Some(first) => first?,
        None => return Err(Status::unavailable("etcdserver: server stopped")),
    };
    let rest = stream::poll_fn(move |cx| responses.poll_recv(cx));
    Ok(Response::new(stream::iter([Ok(first)]).chain(rest).boxed()))
}

struct KeepAlives(Server);

impl StreamingService<LeaseKeepAliveRequest> for KeepAlives {
    type Response = LeaseKeepAliveResponse;
    type ResponseStream = Responses<LeaseKeepAliveResponse>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<LeaseKeepAliveRequest>>) -> Self::Future {
        let (responses, receiver) = mpsc::unbounded_channel();
        tokio::spawn(keep_alive(self.0.clone(), request.into_inner(), responses));
        with_first(receiver).boxed()
    }
}

/// Keeps leases alive, one after the other.
async fn keep_alive(
    server: Server,
    mut requests: Streaming<LeaseKeepAliveRequest>,
    responses: mpsc::UnboundedSender<Result<LeaseKeepAliveResponse, Status>>,
) {
    let Server { cluster, member, process } = server;
    let mut leaderless = std::pin::pin!(cluster.leaderless());
    loop {
        let request = tokio::select! {
            biased;
            () = responses.closed() => return,
            request = requests.message() => request,
            () = &mut leaderless => {
                _ = responses.send(Err(no_leader()));
                return;
            }
        };
        let Ok(Some(LeaseKeepAliveRequest { id })) = request else { return };
        cluster.state().count(process);
        let stale = {
            let state = cluster.state();
            state.is_stale(member).then(|| state.header(member))
        };
        let answer = match stale {
            // The most that a lease may have; the one that asks knows which it has.
            Some(header) => {
                let ttl = cluster.state().store.ttl(id);
                Ok((ttl, header))
            }
            None => {
                let keep = move |state: &mut State| Ok(state.store.keep_alive(id));
                cluster.carry_out(member, keep).await
            }
        };
        let is_over = answer.is_err();
        let answer =
            answer.map(|(ttl, header)| LeaseKeepAliveResponse { header: Some(header), id, ttl });
        if responses.send(answer).is_err() || is_over {
            return;
        }
    }
}

struct Watching(Server);

impl StreamingService<WatchRequest> for Watching {
    type Response = WatchResponse;
    type ResponseStream = Responses<WatchResponse>;
    type Future = BoxFuture<'static, Result<Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: Request<Streaming<WatchRequest>>) -> Self::Future {
        let (responses, receiver) = mpsc::unbounded_channel();
        tokio::spawn(watch(self.0.clone(), request.into_inner(), responses));
        with_first(receiver).boxed()
    }
}
