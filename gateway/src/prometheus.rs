//! A Prometheus recorder for everything that this process counts.

use std::time::Duration;

use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::time::interval;

/// Installs the recorder, with buckets that suit streams.
pub(crate) fn install() -> Result<PrometheusHandle, BuildError> {
    let mut exporter = PrometheusBuilder::new().with_recommended_naming(true);
    for (name, buckets) in tower_semaphore::metrics::BUCKETS {
        exporter = exporter.set_buckets_for_metric(Matcher::Full(name.to_owned()), buckets)?;
    }
    let prometheus = exporter.install_recorder()?;
    // Puts what was recorded into its buckets, even if nobody asks for them.
    let upkeep = prometheus.clone();
    tokio::spawn(async move {
        let mut ticks = interval(Duration::from_secs(5));
        loop {
            ticks.tick().await;
            upkeep.run_upkeep();
        }
    });
    Ok(prometheus)
}
