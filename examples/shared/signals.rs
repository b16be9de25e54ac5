//! What ends an example.

#[cfg(unix)]
use tokio::signal::unix::{SignalKind, signal};

/// Ctrl-C, or the SIGTERM of whatever runs this.
pub(crate) async fn stopped() {
    #[cfg(unix)]
    if let Ok(mut terminate) = signal(SignalKind::terminate()) {
        tokio::select! {
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
        }
        return;
    }
    let _ = tokio::signal::ctrl_c().await;
}
