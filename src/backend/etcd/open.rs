//! Opening a connection to one of the members.

use std::sync::atomic::Ordering;

use tokio::time::{Instant, timeout_at};

use super::EtcdBackend;
use super::connection::EtcdConnection;
use super::link::{Link, signs};
use super::status::{check, warning};
use super::wire::messages::StatusResponse;
use super::wire::{Client, Endpoint};
use crate::backend::ServerInfo;
use crate::error::BackendError;
use crate::sync::lock;

/// Which data the last connection found.
#[derive(Debug, Default)]
pub(super) struct Data {
    cluster: u64,
    /// How often its data was found to be older than before, as after a restore.
    restored: u64,
}

impl EtcdBackend {
    /// Opens a connection to the first member that serves.
    ///
    /// # Errors
    ///
    /// That of the last member, if none does.
    pub(super) async fn open(&self) -> Result<EtcdConnection, BackendError> {
        let random = self.shared.get().map_or(0, |shared| shared.seed as usize);
        // Each process begins with another one.
        let first = self.next.load(Ordering::Relaxed).wrapping_add(random);
        let count = self.endpoints.len();
        let mut last = None;
        for at in (0..count).map(|i| first.wrapping_add(i)) {
            match self.open_to(&self.endpoints[at % count]).await {
                Ok(opened) => {
                    // When this connection is lost, the next member is the first to be tried.
                    self.next.fetch_add(at.wrapping_sub(first) + 1, Ordering::Relaxed);
                    return Ok(opened);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or_else(|| BackendError::connection("etcd has no members")))
    }

    async fn open_to(&self, endpoint: &Endpoint) -> Result<EtcdConnection, BackendError> {
        let Some(shared) = self.shared.get() else {
            return Err(BackendError::connection("no process uses this backend"));
        };
        let whom = format!("etcd at {endpoint}");
        let late = || BackendError::connection(format!("{whom} did not answer in time"));
        let (client, mut driver) = Client::open(endpoint, &self.settings).await?;
        let by = Instant::now() + self.connect_timeout;
        let reading = async {
            let status = client.status().await?;
            Ok::<_, BackendError>((status, signs(&client, &self.keys).await?))
        };
        let read = timeout_at(by, driver.until(reading)).await;
        let (status, signs) = read.unwrap_or_else(|_| Err(late()))?;
        check(&whom, &status)?;
        let data = self.data_of(&status, signs.1);
        let server =
            ServerInfo { data: Some(data), warning: warning(&status), ..Default::default() };
        let number = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        let mut link = Link::new(shared, number, (client.clone(), driver), signs);
        match timeout_at(by, link.register()).await {
            Ok(registered) => registered?,
            Err(_) => return Err(link.refusal().unwrap_or_else(late)),
        }
        Ok(EtcdConnection::new(shared, client, number, server, link))
    }

    /// Names the data of a cluster at this revision, and forgets what is known of other data.
    fn data_of(&self, status: &StatusResponse, revision: u64) -> String {
        let cluster = status.header.map_or(0, |header| header.cluster_id);
        let mut data = lock(&self.data);
        if let Some(shared) = self.shared.get() {
            shared.with(|engine, _| {
                let is_older = engine.is_older(revision);
                if data.cluster != cluster || is_older {
                    data.restored += u64::from(data.cluster == cluster && is_older);
                    data.cluster = cluster;
                    engine.forget_all();
                }
            });
        }
        format!("{cluster:x} {}", data.restored)
    }
}
