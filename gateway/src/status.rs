//! Probes and metrics: `/-/healthy`, `/-/ready` and `/-/metrics`.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::get;
use tower_semaphore::ConnectionState;

use super::app::Current;
#[cfg(feature = "metrics")]
use super::prometheus;

/// How long Redis or etcd may take to reply before `/-/ready` fails.
const ASKED: Duration = Duration::from_secs(1);

/// The state behind the probes.
#[derive(Clone)]
pub(crate) struct Status {
    current: Arc<Current>,
    is_draining: Arc<AtomicBool>,
    #[cfg(feature = "metrics")]
    prometheus: metrics_exporter_prometheus::PrometheusHandle,
}

impl Status {
    /// Installs the metrics recorder: what happens before is not counted.
    pub(crate) fn new(current: &Arc<Current>) -> io::Result<Self> {
        #[cfg(feature = "metrics")]
        let prometheus = prometheus::install().map_err(io::Error::other)?;
        #[cfg(feature = "metrics")]
        super::counts::describe();
        Ok(Self {
            current: Arc::clone(current),
            is_draining: Arc::default(),
            #[cfg(feature = "metrics")]
            prometheus,
        })
    }

    /// Makes `/-/ready` fail.
    pub(crate) fn drain(&self) {
        self.is_draining.store(true, Ordering::Relaxed);
    }

    pub(crate) fn router(&self) -> Router {
        let (ready, metrics) = (self.clone(), self.clone());
        Router::new()
            .route("/-/healthy", get(async || "healthy\n"))
            .route("/-/ready", get(move || async move { ready.ready().await }))
            .route("/-/metrics", get(move || async move { metrics.metrics() }))
    }

    async fn ready(&self) -> (StatusCode, String) {
        if self.is_draining.load(Ordering::Relaxed) {
            return (StatusCode::SERVICE_UNAVAILABLE, "draining\n".to_owned());
        }
        if self.current.needs_backend() && !self.backend_answers().await {
            let server = self.current.site().server().unwrap_or_default();
            return (StatusCode::SERVICE_UNAVAILABLE, format!("no reply from {server}\n"));
        }
        (StatusCode::OK, "ready\n".to_owned())
    }

    async fn backend_answers(&self) -> bool {
        let semaphore = self.current.semaphore();
        if matches!(semaphore.health().connection, ConnectionState::Embedded) {
            return true;
        }
        // Sends a query, because a gateway without requests so far has no connection.
        let asked = semaphore.inspect("gateway-ready");
        matches!(tokio::time::timeout(ASKED, asked).await, Ok(Ok(_)))
    }

    #[cfg(feature = "metrics")]
    fn metrics(&self) -> (StatusCode, String) {
        (StatusCode::OK, self.prometheus.render())
    }

    #[cfg(not(feature = "metrics"))]
    #[allow(clippy::unused_self, reason = "with the feature it is used")]
    const fn metrics(&self) -> (StatusCode, &'static str) {
        (StatusCode::NOT_FOUND, "built without the feature metrics\n")
    }
}
