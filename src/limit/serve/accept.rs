//! What happens to a connection that is accepted.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::extract::ConnectInfo;
use axum::extract::connect_info::Connected;
use axum::serve::{IncomingStream, Listener};
use tokio::net::TcpStream;
use tower_layer::Layer;
use tower_service::Service;

use super::connect_info::{IncomingConnection, Insert, WithConnectInfo};
use crate::limit::connection::{ConnectionIo, OnConnection};

/// Wraps each connection of a listener in a [`ConnectionIo`].
pub(super) struct ConnectionListener<L: Listener> {
    listener: L,
    /// The socket under a connection that is none itself.
    socket: Option<fn(&L::Io) -> &TcpStream>,
}

impl<L: Listener> ConnectionListener<L> {
    pub(super) const fn new(listener: L) -> Self {
        Self { listener, socket: None }
    }

    pub(super) fn over_tcp(&mut self, socket: fn(&L::Io) -> &TcpStream) {
        self.socket = Some(socket);
    }
}

impl<L: Listener> Listener for ConnectionListener<L> {
    type Io = ConnectionIo<L::Io>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        let (io, address) = self.listener.accept().await;
        let io = match self.socket {
            None => ConnectionIo::new(io),
            Some(socket) => ConnectionIo::over_tcp(io, socket),
        };
        (io, address)
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}

type ReadConnection<L> = dyn Fn(IncomingConnection<'_, L>) -> Insert + Send + Sync;

/// Makes the service of each connection.
pub(super) struct MakeConnectionService<L: Listener, S> {
    service: S,
    /// What each connection tells its requests.
    infos: Vec<Arc<ReadConnection<L>>>,
}

impl<L, S> MakeConnectionService<L, S>
where
    L: Listener,
    L::Addr: Clone + Sync + 'static,
{
    pub(super) fn new(service: S) -> Self {
        let address: Arc<ReadConnection<L>> =
            Arc::new(|connection| insert(connection.remote_addr().clone()));
        Self { service, infos: vec![address] }
    }
}

impl<L: Listener, S> MakeConnectionService<L, S> {
    /// Has each request get a `ConnectInfo<C>`, too.
    pub(super) fn insert<C>(&mut self)
    where
        C: for<'a> Connected<IncomingConnection<'a, L>>,
    {
        self.infos.push(Arc::new(|connection| insert(C::connect_info(connection))));
    }
}

fn insert<C: Clone + Send + Sync + 'static>(info: C) -> Insert {
    Arc::new(move |extensions| {
        extensions.insert(ConnectInfo(info.clone()));
    })
}

impl<L, S> Service<IncomingStream<'_, ConnectionListener<L>>> for MakeConnectionService<L, S>
where
    L: Listener,
    S: Clone,
{
    type Response = OnConnection<WithConnectInfo<S>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, stream: IncomingStream<'_, ConnectionListener<L>>) -> Self::Future {
        // Locked once for all readers: a second lock inside one of them would deadlock the accept loop.
        let io = stream.io().get_ref();
        let connection = IncomingConnection::new(&*io, stream.remote_addr());
        let infos = self.infos.iter().map(|read| read(connection)).collect();
        drop(io);
        let service = WithConnectInfo::new(self.service.clone(), infos);
        ready(Ok(stream.io().connection().layer(service)))
    }
}
