//! Requests from several processes for a few names, and what they experience.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tower_semaphore::{AcquireError, Permit, Policy, Semaphore};

/// The names of the load, their limits, and the tasks of each process that ask for them.
pub(super) const NAMES: [(&str, u32, usize); 2] = [("one", 1, 2), ("eight", 8, 3)];

/// The names of single tests.
pub(super) const CUT: &str = "cut";
pub(super) const KEPT: &str = "kept";
pub(super) const MOVED: &str = "moved";

/// Longer than any fault, so nobody is rejected.
pub(super) const WAIT: Duration = Duration::from_secs(20);
/// How much later an answer may come on a busy machine.
const MARGIN: Duration = Duration::from_secs(1);
/// How long a permit is used.
const WORK: Duration = Duration::from_millis(1);
/// The pause after a request that failed.
const PAUSE: Duration = Duration::from_millis(5);

/// Returns the limit of a name.
pub(super) fn limit(name: &str) -> u32 {
    match name {
        CUT | MOVED => 2,
        KEPT => 6,
        _ => NAMES.iter().find(|(of, ..)| *of == name).expect("a known name").1,
    }
}

fn policy(name: &str) -> Policy {
    // What is kept over the end of a lease is renewed in time on a busy machine, too.
    let lease = Duration::from_secs(if matches!(name, KEPT | MOVED) { 3 } else { 1 });
    Policy::builder(limit(name)).wait_timeout(WAIT).lease(lease).build().unwrap()
}

/// What all requests have experienced.
#[derive(Default)]
pub(super) struct Experience {
    pub(super) names: BTreeMap<&'static str, Use>,
    /// How often each process was granted each name.
    pub(super) granted: BTreeMap<(usize, &'static str), usize>,
    pub(super) longest_wait: Duration,
    /// Permits that were lost while they were used.
    pub(super) lost: usize,
    /// How often requests failed, because the cluster was not available and otherwise.
    pub(super) unavailable: usize,
    pub(super) rejected: Vec<String>,
}

/// The use of one name.
#[derive(Debug, Default)]
pub(super) struct Use {
    /// Permits in use, as an upstream counts them: now, and the most at a time.
    pub(super) now: u32,
    pub(super) most: u32,
    last_grant: Option<Instant>,
    /// The longest time without a grant.
    pub(super) longest_gap: Duration,
}

impl Use {
    fn handle_grant(&mut self) {
        self.now += 1;
        self.most = self.most.max(self.now);
        let now = Instant::now();
        let before = self.last_grant.replace(now).unwrap_or(now);
        self.longest_gap = self.longest_gap.max(now - before);
    }
}

/// Requests go on until this is stopped.
pub(super) struct Load {
    nodes: Vec<Semaphore>,
    experience: Arc<Mutex<Experience>>,
    stop: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl Load {
    pub(super) fn start(nodes: &[Semaphore]) -> Self {
        let (stop, mut tasks) = (watch::Sender::new(false), JoinSet::new());
        let experience = Arc::<Mutex<Experience>>::default();
        for (number, node) in nodes.iter().enumerate() {
            for (name, _, count) in NAMES {
                for _ in 0..count {
                    let (node, stop) = (node.clone(), stop.subscribe());
                    let experience = Arc::clone(&experience);
                    tasks.spawn(async move {
                        let policy = policy(name);
                        while !*stop.borrow() {
                            let asker = (number, &node, name);
                            let Some(permit) = ask(&experience, asker, &policy).await else {
                                sleep(PAUSE).await;
                                continue;
                            };
                            let used = timeout(WORK, permit.lost()).await;
                            leave(&experience, name, used.is_ok());
                        }
                    });
                }
            }
        }
        Self { nodes: nodes.to_vec(), experience, stop, tasks }
    }

    pub(super) fn experience(&self) -> MutexGuard<'_, Experience> {
        lock(&self.experience)
    }

    /// Counts the most permits in use at a time from now on.
    pub(super) fn forget_most(&self) {
        self.experience().names.values_mut().for_each(|of| of.most = of.now);
    }

    /// Has a process ask for one more permit, and hold it until it is lost or this is told to release it. Returns when it
    /// was granted, and whether it was lost.
    pub(super) fn hold(
        &self,
        number: usize,
        name: &'static str,
        mut release: watch::Receiver<bool>,
    ) -> JoinHandle<(Instant, bool)> {
        let (node, experience) = (self.nodes[number].clone(), Arc::clone(&self.experience));
        tokio::spawn(async move {
            let permit = ask(&experience, (number, &node, name), &policy(name)).await;
            let (permit, granted) = (permit.expect("a permit"), Instant::now());
            let is_lost = tokio::select! {
                () = permit.lost() => true,
                _ = release.wait_for(|release| *release) => false,
            };
            leave(&experience, name, is_lost);
            (granted, is_lost)
        })
    }

    /// Ends all requests.
    pub(super) async fn stop(mut self) -> Experience {
        self.stop.send_replace(true);
        while let Some(task) = self.tasks.join_next().await {
            task.unwrap();
        }
        std::mem::take(&mut *lock(&self.experience))
    }
}

fn lock(experience: &Mutex<Experience>) -> MutexGuard<'_, Experience> {
    experience.lock().unwrap()
}

/// Asks for a permit, which is in use from now on.
async fn ask(
    experience: &Mutex<Experience>,
    (number, node, name): (usize, &Semaphore, &'static str),
    policy: &Policy,
) -> Option<Permit> {
    let asked = Instant::now();
    let answer = timeout(WAIT + MARGIN, node.acquire(name, policy)).await;
    let answer = answer.expect("an answer within the wait timeout");
    let mut experience = lock(experience);
    experience.longest_wait = experience.longest_wait.max(asked.elapsed());
    match answer {
        Ok(permit) => {
            experience.names.entry(name).or_default().handle_grant();
            *experience.granted.entry((number, name)).or_default() += 1;
            Some(permit)
        }
        Err(AcquireError::Unavailable(_)) => {
            experience.unavailable += 1;
            None
        }
        Err(other) => {
            experience.rejected.push(format!("{name}: {other}"));
            None
        }
    }
}

/// A permit is not in use any more. Its owner drops it after this.
fn leave(experience: &Mutex<Experience>, name: &'static str, is_lost: bool) {
    let mut experience = lock(experience);
    experience.names.get_mut(name).expect("it was granted").now -= 1;
    experience.lost += usize::from(is_lost);
}
