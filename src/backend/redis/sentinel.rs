//! The sentinels, and the master that they name.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use redis::cmd;
use tokio::time::{sleep, timeout};

use super::dial::{Timeouts, dial};
use super::endpoint::Endpoint;
use super::error;
use super::multiplexed::Multiplexed;
use crate::error::BackendError;

/// How often a sentinel is asked for the master while there is a connection to that.
const ASK_INTERVAL: Duration = Duration::from_millis(250);

/// The sentinels, and their name for the master.
pub(super) struct Sentinel {
    sentinels: Vec<Endpoint>,
    master: String,
    /// The settings for connections to the master, without its address.
    server: Endpoint,
    /// The index of the sentinel to ask first.
    first: AtomicUsize,
}

impl Sentinel {
    pub(super) const fn new(sentinels: Vec<Endpoint>, master: String, server: Endpoint) -> Self {
        Self { sentinels, master, server, first: AtomicUsize::new(0) }
    }

    /// Asks the sentinels in turn for the master, and returns the first answer.
    pub(super) async fn master(&self, timeouts: Timeouts) -> Result<Endpoint, BackendError> {
        let first = self.first.load(Ordering::Relaxed);
        let mut why = String::new();
        for i in first..first + self.sentinels.len() {
            let i = i % self.sentinels.len();
            let sentinel = &self.sentinels[i];
            match self.ask(sentinel, timeouts).await {
                Ok(Some((host, port))) => {
                    self.first.store(i, Ordering::Relaxed);
                    return Ok(self.server.at(host, port));
                }
                Ok(None) => {
                    why +=
                        &format!("; {}: no master is named {:?}", sentinel.address(), self.master);
                }
                Err(error) => why += &format!("; {}: {error}", sentinel.address()),
            }
        }
        Err(BackendError::connection(format!("no sentinel named the master{why}")))
    }

    /// Has another sentinel asked first next time, because the server that this one named cannot be used.
    pub(super) fn distrust(&self) {
        let next = (self.first.load(Ordering::Relaxed) + 1) % self.sentinels.len();
        self.first.store(next, Ordering::Relaxed);
    }

    /// Waits until the sentinel that named this master names another one. Sentinels demote an old master that is still
    /// running only about ten seconds later, and it grants permits until then. `+switch-master` is not used: it can be
    /// missed, and a sentinel that did not run the failover publishes it later.
    pub(super) async fn replaced(&self, master: &Endpoint, timeouts: Timeouts) {
        let mut kept: Option<(usize, Multiplexed)> = None;
        loop {
            sleep(ASK_INTERVAL).await;
            let first = self.first.load(Ordering::Relaxed) % self.sentinels.len();
            let asked = async {
                let mut connection = match kept.take().filter(|(of, _)| *of == first) {
                    Some((_, connection)) => connection,
                    None => dial(&self.sentinels[first], timeouts).await?,
                };
                let named = self.named_by(&mut connection, timeouts).await?;
                Ok::<_, BackendError>((named, connection))
            };
            match asked.await {
                Ok((Some((host, port)), _))
                    if master.at(host.clone(), port).address() != master.address() =>
                {
                    tracing::debug!(target: "tower_semaphore", host, port, "another master is named");
                    return;
                }
                Ok((Some(_), connection)) => kept = Some((first, connection)),
                Ok((None, _)) | Err(_) => self.distrust(),
            }
        }
    }

    async fn ask(
        &self,
        sentinel: &Endpoint,
        timeouts: Timeouts,
    ) -> Result<Option<(String, u16)>, BackendError> {
        let mut connection = dial(sentinel, timeouts).await?;
        self.named_by(&mut connection, timeouts).await
    }

    async fn named_by(
        &self,
        connection: &mut Multiplexed,
        timeouts: Timeouts,
    ) -> Result<Option<(String, u16)>, BackendError> {
        let mut question = cmd("SENTINEL");
        question.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.master);
        match timeout(timeouts.answer, question.query_async(&mut **connection)).await {
            Ok(answer) => answer.map_err(error::broken),
            Err(_) => Err(BackendError::connection("no answer in time")),
        }
    }
}
