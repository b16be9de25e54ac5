//! An upstream takes 40 requests at a time, then 10, then 40 again, and limits of one, three and twenty processes find
//! that out by its refusals.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::runtime::Runtime;
use tower_semaphore::{Adaptive, Policy, Semaphore};

use super::Figures;
use super::server::TestRedis;
use super::upstream::{self, Phases, Use};

const PHASES: Phases = &[
    (40, Duration::from_secs(120)),
    (10, Duration::from_secs(80)),
    (40, Duration::from_secs(100)),
];
/// What comes before is not counted.
const SINCE: Duration = Duration::from_secs(60);
const PROCESSES: [usize; 3] = [1, 3, 20];

pub(crate) fn adaptive(figures: &mut Figures) -> Result<(), String> {
    let runtime = Runtime::new().map_err(|error| error.to_string())?;
    let uses = runtime.block_on(join_all(PROCESSES.map(fleet)));
    for (processes, (Use { used, refused }, writes)) in PROCESSES.into_iter().zip(&uses) {
        figures.least(
            &format!("{processes} processes: use of the capacity, %"),
            used * 100.0,
            88.0,
        );
        figures.most(&format!("{processes} processes: refused, %"), refused * 100.0, 3.0);
        figures.most(&format!("{processes} processes: writes in 100 s"), writes * 100.0, 130.0);
    }
    let used = || uses.iter().map(|(of, _)| of.used * 100.0);
    let (most, least) = (used().fold(0.0, f64::max), used().fold(100.0, f64::min));
    figures.most("difference of their uses, percentage points", most - least, 6.0);
    Ok(())
}

/// Returns the use of an upstream by so many processes, and how often their limit was written in a second.
async fn fleet(processes: usize) -> (Use, f64) {
    // A server of its own, whose commands are counted.
    let redis = TestRedis::start();
    let nodes: Vec<_> =
        (0..processes).map(|_| Semaphore::redis(&redis.url()).expect("a URL")).collect();
    let policy = Policy::builder(100)
        .adaptive(Adaptive::between(1, 100))
        .wait_timeout(Policy::MAX_WAIT_TIMEOUT)
        .build()
        .expect("a policy");
    let of = upstream::ask(&nodes, "x", &policy, PHASES, SINCE).await;
    let writes: String = redis.command(&["INFO", "commandstats"]);
    let count = writes.lines().find_map(|line| {
        let (_, after) = line.split_once("cmdstat_hset:calls=")?;
        after.split(',').next()?.parse::<f64>().ok()
    });
    let seconds: Duration = PHASES.iter().map(|(_, lasts)| *lasts).sum();
    (of, count.unwrap_or(f64::NAN) / seconds.as_secs_f64())
}
