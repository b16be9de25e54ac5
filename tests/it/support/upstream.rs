//! An upstream that takes a number of requests at a time and refuses the rest at once, and a crowd that always asks it.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tower_semaphore::{Feedback, Policy, Semaphore};

/// The way to the upstream and back.
const WAY: Duration = Duration::from_millis(2);
/// How long a request is served: from half of this to one and a half.
const SERVED: Duration = Duration::from_secs(1);
/// How many requests always want to run.
const CROWD: u64 = 120;

/// What the upstream takes, one after the other: a number of requests at a time, and for how long.
pub(crate) type Phases = &'static [(u32, Duration)];

/// How an upstream was used.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Use {
    /// The part of its capacity.
    pub(crate) used: f64,
    /// The part of the requests that it refused.
    pub(crate) refused: f64,
}

#[derive(Default)]
struct Upstream {
    in_service: u32,
    served: u32,
    refused: u32,
}

/// Has the crowd ask the upstream through these processes, for all phases. Returns its use from `since` on.
pub(crate) async fn ask(
    nodes: &[Semaphore],
    name: &str,
    policy: &Policy,
    phases: Phases,
    since: Duration,
) -> Use {
    let (upstream, began) = (Arc::<Mutex<Upstream>>::default(), Instant::now());
    let mut crowd = JoinSet::new();
    for (number, node) in (0..CROWD).zip(nodes.iter().cycle()) {
        let (node, policy, name) = (node.clone(), policy.clone(), name.to_owned());
        let upstream = Arc::clone(&upstream);
        let mut chance = fastrand::Rng::with_seed(number);
        crowd.spawn(async move {
            loop {
                let permit = node.acquire(name.clone(), &policy).await.expect("a permit");
                sleep(WAY / 2).await;
                let is_taken = take(&upstream, capacity(phases, began.elapsed()));
                if is_taken {
                    sleep(SERVED.mul_f64(0.5 + chance.f64())).await;
                    upstream.lock().expect("no panic").in_service -= 1;
                }
                sleep(WAY / 2).await;
                if !is_taken {
                    permit.feedback(Feedback::TooMany);
                }
            }
        });
    }
    sleep(since).await;
    {
        let mut upstream = upstream.lock().expect("no panic");
        (upstream.served, upstream.refused) = (0, 0);
    }
    let all: Duration = phases.iter().map(|(_, lasts)| *lasts).sum();
    sleep(all.saturating_sub(began.elapsed())).await;
    let Upstream { served, refused, .. } = *upstream.lock().expect("no panic");
    crowd.shutdown().await;
    let used = f64::from(served) / possible(phases, since);
    Use { used, refused: f64::from(refused) / f64::from(served + refused) }
}

/// Whether the upstream takes a request.
fn take(upstream: &Mutex<Upstream>, capacity: u32) -> bool {
    let mut upstream = upstream.lock().expect("no panic");
    let is_taken = upstream.in_service < capacity;
    let count = if is_taken { &mut upstream.served } else { &mut upstream.refused };
    *count += 1;
    upstream.in_service += u32::from(is_taken);
    is_taken
}

fn capacity(phases: Phases, at: Duration) -> u32 {
    let mut end = Duration::ZERO;
    let now = phases.iter().find(|(_, lasts)| {
        end += *lasts;
        at < end
    });
    now.or_else(|| phases.last()).map_or(0, |(capacity, _)| *capacity)
}

/// How many requests the upstream could serve from `since` on.
fn possible(phases: Phases, since: Duration) -> f64 {
    let (mut begins, mut sum) = (Duration::ZERO, 0.0);
    for (capacity, lasts) in phases {
        let ends = begins + *lasts;
        let counted = ends.saturating_sub(begins.max(since));
        sum += f64::from(*capacity) * counted.as_secs_f64() / SERVED.as_secs_f64();
        begins = ends;
    }
    sum
}
