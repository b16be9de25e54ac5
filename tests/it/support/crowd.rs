//! Load on many names from the semaphores of several processes, and the outcome of each request.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio::task::JoinHandle;
use tower_semaphore::{Policy, Semaphore};

/// The end of one request.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    pub(crate) name: String,
    pub(crate) asked: Instant,
    pub(crate) took: Duration,
    /// Why there was no permit.
    pub(crate) error: Option<String>,
    /// More requests than allowed held one at that moment.
    pub(crate) over: bool,
}

/// Makes requests until it is stopped.
pub(crate) struct Crowd {
    stop: Arc<AtomicBool>,
    outcomes: Arc<Mutex<Vec<Outcome>>>,
    tasks: Vec<JoinHandle<()>>,
}

/// The requests for each name at a time, in each process: more than may hold.
const LIMIT: u32 = 2;
const ASKERS: usize = 2;

impl Crowd {
    pub(crate) fn start(nodes: &[Semaphore], names: &[String]) -> Self {
        let (stop, outcomes) = (Arc::<AtomicBool>::default(), Arc::<Mutex<Vec<_>>>::default());
        let policy = Policy::builder(LIMIT)
            .wait_timeout(Duration::from_secs(10))
            .lease(Duration::from_secs(5))
            .build()
            .unwrap();
        let mut tasks = Vec::new();
        for name in names {
            let holders = Arc::<AtomicU32>::default();
            for node in nodes.iter().flat_map(|node| [node; ASKERS]) {
                let (node, name, holders) = (node.clone(), name.clone(), Arc::clone(&holders));
                let (stop, outcomes) = (Arc::clone(&stop), Arc::clone(&outcomes));
                let policy = policy.clone();
                tasks.push(tokio::spawn(async move {
                    while !stop.load(Ordering::SeqCst) {
                        let asked = Instant::now();
                        let result = node.acquire(&*name, &policy).await;
                        let took = asked.elapsed();
                        let mut outcome =
                            Outcome { name: name.clone(), asked, took, error: None, over: false };
                        let pause = Duration::from_millis(
                            5 + u64::from(asked.elapsed().subsec_nanos()) % 11,
                        );
                        match result {
                            Ok(permit) => {
                                let others = holders.fetch_add(1, Ordering::SeqCst);
                                outcome.over = others >= LIMIT;
                                tokio::time::sleep(pause).await;
                                holders.fetch_sub(1, Ordering::SeqCst);
                                drop(permit);
                            }
                            Err(error) => {
                                outcome.error = Some(error.to_string());
                                tokio::time::sleep(pause).await;
                            }
                        }
                        outcomes.lock().unwrap().push(outcome);
                    }
                }));
            }
        }
        Self { stop, outcomes, tasks }
    }

    /// Waits until each of these names was served after `since`.
    pub(crate) async fn all_served(&self, names: &[String], since: Instant) {
        super::eventually("each name was served", async || {
            let outcomes = self.outcomes.lock().unwrap();
            names.iter().all(|name| {
                outcomes.iter().any(|o| o.name == *name && o.error.is_none() && o.asked > since)
            })
        })
        .await;
    }

    pub(crate) async fn stop(self) -> Vec<Outcome> {
        self.stop.store(true, Ordering::SeqCst);
        for task in self.tasks {
            task.await.unwrap();
        }
        std::mem::take(&mut *self.outcomes.lock().unwrap())
    }
}
