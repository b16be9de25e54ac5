//! One simulated process: a semaphore over etcd in a runtime of its own, so that the process can die and stand still as a
//! whole.

use std::io;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::runtime::Runtime;
use tokio::time::{Instant, advance, sleep_until};
use tower_semaphore::backend::EtcdBackend;
use tower_semaphore::backend::etcd_wire::{Environment, Stream};
use tower_semaphore::backend::seam::{Backend, Connection, Mailbox, Shard};
use tower_semaphore::protocol::NodeId;
use tower_semaphore::{BackendError, Semaphore};

use crate::network::Network;
use crate::plan::{MEMBERS, Plan};

/// How long after a suspension a process may take to notice it, in ms: no timer tells it.
const RESUMES: u64 = 600;

/// The time at which a run begins, in µs since 1970.
pub const EPOCH: u64 = 1_700_000_000_000_000;

/// What a client of a process saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Seen {
    Begins,
    /// It has so many permits of a name; and its tenant and further limit, as the index of what they are held under.
    Granted(Holding),
    Rejected,
    Unavailable,
    Leaves,
    GivesBack,
    Lost,
    /// A rule is broken.
    Breaks(&'static str, String),
    ShutDown,
}

/// The permits of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    pub name: usize,
    pub cost: u32,
    /// What else bounds it: a text that names it, and how many there may be.
    pub also: Vec<(String, u32)>,
}

/// An entry of a process's journal.
#[derive(Clone, Debug)]
pub struct Entry {
    /// When, in ms.
    pub at: u64,
    /// The request.
    pub number: u64,
    pub seen: Seen,
}

/// The clocks and the network of a process.
pub struct Surroundings {
    network: Network,
    slot: usize,
    /// When it was started, in ms.
    born: u64,
    epoch: OnceLock<Instant>,
    /// The time by the cluster's clock, in ms.
    now: AtomicU64,
    /// How far its wall clock is off, in µs, and how much faster its clocks run, in millionths.
    skew: AtomicI64,
    drift: i64,
    /// For how long it was suspended, and for how long it did not run, in ms.
    suspended: AtomicU64,
    frozen: AtomicU64,
    entries: Mutex<Vec<Entry>>,
}

impl Surroundings {
    /// Returns the time by the cluster's clock, in ms.
    pub fn now(&self) -> u64 {
        self.now.load(Ordering::Relaxed)
    }

    /// Returns for how long it has existed by its own clock, which counts suspensions.
    fn passed(&self) -> Duration {
        let passed = self.epoch.get().map_or(Duration::ZERO, Instant::elapsed);
        passed + Duration::from_millis(self.suspended.load(Ordering::Relaxed))
    }

    /// Returns for how long it has not run, in ms.
    pub fn frozen(&self) -> u64 {
        self.frozen.load(Ordering::Relaxed)
    }

    pub fn saw(&self, number: u64, seen: Seen) {
        let entry = Entry { at: self.now(), number, seen };
        self.entries.lock().unwrap_or_else(PoisonError::into_inner).push(entry);
    }

    fn instant(&self, at: u64) -> Instant {
        let passed = at.saturating_sub(self.born + self.suspended.load(Ordering::Relaxed));
        let drift = i64::try_from(passed).unwrap_or(0) * self.drift / 1_000_000;
        let passed = passed.saturating_add_signed(drift);
        *self.epoch.get_or_init(Instant::now) + Duration::from_millis(passed)
    }
}

impl Environment for Surroundings {
    fn reach<'a>(&'a self, host: &'a str, _: u16) -> BoxFuture<'a, io::Result<Box<dyn Stream>>> {
        let member = host.strip_prefix('m').and_then(|number| number.parse().ok()).unwrap_or(0);
        async move { Ok(Box::new(self.network.dial(self.slot, member).await?) as _) }.boxed()
    }

    fn wall(&self) -> u64 {
        let passed = u64::try_from(self.passed().as_micros()).unwrap_or(u64::MAX);
        let wall = EPOCH + self.born * 1000 + passed;
        wall.saturating_add_signed(self.skew.load(Ordering::Relaxed))
    }

    fn suspended(&self, _: Instant) -> Duration {
        Duration::from_millis(self.suspended.load(Ordering::Relaxed))
    }
}

/// The shipped backend, with a seed and the clocks of the simulation.
struct Simulated {
    backend: EtcdBackend,
    surroundings: Arc<Surroundings>,
    seed: u64,
}

impl Backend for Simulated {
    fn attach(&self, node: NodeId, mailbox: Weak<dyn Mailbox>) {
        self.backend.attach(node, mailbox);
    }

    fn key(&self, name: &str) -> Arc<str> {
        self.backend.key(name)
    }

    fn routing(&self) -> Option<u64> {
        self.backend.routing()
    }

    fn connect<'a>(
        &'a self,
        shard: &'a Shard,
    ) -> BoxFuture<'a, Result<Option<Arc<dyn Connection>>, BackendError>> {
        self.backend.connect(shard)
    }

    fn response_timeout(&self) -> Duration {
        self.backend.response_timeout()
    }

    fn suspended(&self) -> Option<Duration> {
        Some(self.surroundings.suspended(Instant::now()))
    }

    fn seed(&self) -> u64 {
        self.seed
    }
}

/// A process.
pub struct Process {
    pub slot: usize,
    /// The number of the process in the run.
    pub serial: u64,
    /// It does not run before this, in ms.
    pub frozen_until: u64,
    /// It stood still: until then, in ms, clients need not have been told what they lost meanwhile.
    pub tells_at: u64,
    /// Its clock stands still as well.
    pub is_suspended: bool,
    /// It is being shut down.
    pub is_closing: bool,
    pub is_shut_down: bool,
    pub surroundings: Arc<Surroundings>,
    pub semaphore: Semaphore,
    ran_until: u64,
    // Last, so that tasks end before what they use.
    runtime: Runtime,
}

impl Process {
    /// Starts a process at this time, in ms.
    ///
    /// # Panics
    ///
    /// If no runtime can be created, or the backend cannot be built.
    #[must_use]
    pub fn start(
        plan: &Plan,
        network: &Network,
        (slot, serial): (usize, u64),
        seed: u64,
        now: u64,
    ) -> Self {
        let builder = &mut tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().start_paused(true).build().expect("a runtime");
        let surroundings = Arc::new(Surroundings {
            network: network.clone(),
            slot,
            born: now,
            epoch: OnceLock::new(),
            now: AtomicU64::new(now),
            skew: AtomicI64::new(plan.skews[slot]),
            drift: plan.drifts[slot],
            suspended: AtomicU64::new(0),
            frozen: AtomicU64::new(0),
            entries: Mutex::default(),
        });
        runtime.block_on(async { surroundings.instant(now) });
        let members: Vec<_> = (0..MEMBERS).map(|member| format!("m{member}")).collect();
        let backend = EtcdBackend::builder(format!("etcd://{}", members.join(",")))
            .whole_grace(plan.whole_grace)
            .environment(Arc::clone(&surroundings) as _)
            .build()
            .expect("a backend");
        let backend = Simulated { backend, surroundings: Arc::clone(&surroundings), seed };
        Self {
            slot,
            serial,
            frozen_until: 0,
            tells_at: now,
            is_suspended: false,
            is_closing: false,
            is_shut_down: false,
            surroundings,
            semaphore: Semaphore::new(backend),
            ran_until: now,
            runtime,
        }
    }

    /// Starts a task of it.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// Steps its wall clock, in µs.
    pub fn step_clock(&self, by: i64) {
        self.surroundings.skew.fetch_add(by, Ordering::Relaxed);
    }

    /// Shuts it down.
    pub fn shut_down(&mut self) {
        self.is_closing = true;
        let (semaphore, surroundings) = (self.semaphore.clone(), Arc::clone(&self.surroundings));
        self.runtime.spawn(async move {
            semaphore.shutdown().await;
            surroundings.saw(0, Seen::ShutDown);
        });
    }

    /// Runs it up to this time, in ms, unless it stands still. Returns what was seen.
    pub fn run(&mut self, from: u64, to: u64) -> Vec<Entry> {
        if self.frozen_until >= to {
            self.tells_at = u64::MAX;
            return Vec::new();
        }
        let stood = from.saturating_sub(self.ran_until);
        self.surroundings.frozen.fetch_add(stood, Ordering::Relaxed);
        let is_suspended = std::mem::take(&mut self.is_suspended);
        if is_suspended {
            self.surroundings.suspended.fetch_add(stood, Ordering::Relaxed);
        }
        if stood > 0 {
            self.tells_at = to + if is_suspended { RESUMES } else { 1 };
        }
        let surroundings = &self.surroundings;
        surroundings.now.store(to, Ordering::Relaxed);
        self.runtime.block_on(async {
            if stood > 0 && !is_suspended {
                // All timers that passed meanwhile are due at once.
                let passed = surroundings.instant(from).saturating_duration_since(Instant::now());
                advance(passed).await;
            }
            sleep_until(surroundings.instant(to)).await;
        });
        self.ran_until = to;
        let entries = &mut *surroundings.entries.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(entries)
    }
}
