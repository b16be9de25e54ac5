//! Upgraded connections: WebSockets and other protocols.

use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio::time::Instant;
use tower_semaphore::limit::Connection;

use super::access_log::Entry;
use super::connect::reset;
use super::connection::Activity;
use super::progress::until;

/// Both ends of an upgrade in progress.
pub(crate) struct Tunnel {
    pub(crate) client: OnUpgrade,
    pub(crate) upstream: OnUpgrade,
}

impl Tunnel {
    /// Copies in both directions until both ends are done, one fails, or the idle timeout passes. The
    /// client's end holds the permits: without them, or without the client, it ends though it is stuck.
    pub(crate) async fn carry(self, activity: &Arc<Activity>, connection: &Connection) {
        let Ok((client, upstream)) = tokio::try_join!(self.client, self.upstream) else { return };
        let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
        let _logged = Logged::new(activity);
        let is_cut = tokio::select! {
            end = copy_bidirectional(&mut client, &mut upstream) => {
                if let Err(error) = end {
                    tracing::debug!(%error, "an upgraded connection broke");
                }
                false
            }
            () = connection.ended() => {
                let error = "its permit is lost, or its client is gone";
                tracing::debug!(error, "an upgraded connection broke");
                true
            }
            () = stands_still(activity) => {
                tracing::info!("an upgraded connection was idle for too long");
                false
            }
        };
        if is_cut {
            // An end behind what the upstream has not read would tell it too late.
            reset(upstream.into_inner());
        }
    }
}

/// The line of a tunnel in the access log; written when this is dropped.
struct Logged<'a> {
    activity: &'a Activity,
    entry: Option<Entry>,
    /// Bytes of the head, and of responses before it.
    before: u64,
}

impl<'a> Logged<'a> {
    fn new(activity: &'a Activity) -> Self {
        Self { activity, entry: activity.take_entry(), before: activity.bytes_written() }
    }
}

impl Drop for Logged<'_> {
    fn drop(&mut self) {
        if let Some(entry) = &mut self.entry {
            entry.passed(self.activity.bytes_written() - self.before);
        }
    }
}

async fn stands_still(activity: &Activity) {
    let Some(bound) = activity.bounds().idle else { return std::future::pending().await };
    loop {
        let deadline = activity.last() + bound;
        if deadline <= Instant::now() {
            return;
        }
        until(Some(deadline)).await;
    }
}
