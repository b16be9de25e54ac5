//! Upgraded connections: WebSockets and other protocols.

use std::sync::Arc;

use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::io::copy_bidirectional;
use tokio::time::Instant;

use super::connection::Activity;
use super::progress::until;

/// Both ends of an upgrade in progress.
pub(crate) struct Tunnel {
    pub(crate) client: OnUpgrade,
    pub(crate) upstream: OnUpgrade,
}

impl Tunnel {
    /// Copies in both directions until both ends are done, one fails, or the idle timeout passes. The
    /// client's end holds the permits.
    pub(crate) async fn carry(self, activity: &Arc<Activity>) {
        let Ok((client, upstream)) = tokio::try_join!(self.client, self.upstream) else { return };
        let (mut client, mut upstream) = (TokioIo::new(client), TokioIo::new(upstream));
        tokio::select! {
            end = copy_bidirectional(&mut client, &mut upstream) => {
                if let Err(error) = end {
                    tracing::debug!(%error, "an upgraded connection broke");
                }
            }
            () = stands_still(activity) => tracing::info!("an upgraded connection was idle for too long"),
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
