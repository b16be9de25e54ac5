//! Three members, six processes, their load, and what is stored meanwhile.

use std::ops::{Range, RangeInclusive};

use tokio::task::block_in_place;
use tower_semaphore::Semaphore;

use super::history::{Entry, SEMAPHORES};
use super::judge::{Report, excuse, judge};
use super::load::{Experience, Load, NAMES, Use, limit};
use super::observer::Observer;
use crate::support::etcd::EtcdCluster;
use crate::support::{eventually, eventually_or};

pub(super) const PROCESSES: usize = 6;

/// So often each process is granted each name before and after a fault.
const SERVED: usize = 5;

pub(super) struct World {
    pub(super) cluster: EtcdCluster,
    pub(super) nodes: Vec<Semaphore>,
    pub(super) observer: Observer,
    pub(super) load: Load,
    /// The revisions of the values that are [excused](excuse).
    unsettled: Option<RangeInclusive<i64>>,
}

impl World {
    pub(super) async fn start() -> Self {
        let cluster = block_in_place(EtcdCluster::start);
        let urls = vec![cluster.url(); PROCESSES];
        Self::with(cluster, &urls).await
    }

    /// Starts a process for each URL; all are served when this returns.
    pub(super) async fn with(cluster: EtcdCluster, urls: &[String]) -> Self {
        let observer = Observer::start(&cluster.url());
        let nodes: Vec<_> = urls.iter().map(|url| Semaphore::etcd(url).unwrap()).collect();
        let load = Load::start(&nodes);
        let world = Self { cluster, nodes, observer, load, unsettled: None };
        world.serves_all().await;
        world
    }

    /// Waits until each process is granted each name some more times.
    pub(super) async fn serves_all(&self) {
        self.serves(0..PROCESSES).await;
    }

    pub(super) async fn serves(&self, processes: Range<usize>) {
        let before = self.load.experience().granted.clone();
        eventually_or("each process is served", async || {
            let experience = self.load.experience();
            let names = NAMES.iter().map(|(name, ..)| *name);
            let all = names.flat_map(|name| processes.clone().map(move |number| (number, name)));
            let is_behind = |of: &(usize, &'static str)| {
                let granted = |all: &std::collections::BTreeMap<_, usize>| {
                    all.get(of).copied().unwrap_or_default()
                };
                granted(&experience.granted) < granted(&before) + SERVED
            };
            let behind: Vec<_> = all.filter(is_behind).collect();
            if behind.is_empty() { Ok(()) } else { Err(behind) }
        })
        .await;
    }

    /// Runs a command of `etcdctl` at this member, while the load goes on.
    pub(super) fn ctl(&self, member: usize, words: &[&str]) -> String {
        block_in_place(|| self.cluster.members[member].ctl(words))
    }

    /// Waits until a member leads, without asking this one.
    pub(super) fn leader_beside(&self, other: impl Into<Option<usize>>) -> usize {
        block_in_place(|| self.cluster.leader_beside(other))
    }

    /// Returns a member that follows, and that processes use.
    pub(super) fn used_follower(&self) -> usize {
        let leader = self.leader_beside(None);
        let used = |at: usize| (self.cluster.members[at].watches(), at);
        let followers = (0..3).filter(|at| *at != leader).map(used);
        let most = block_in_place(|| followers.max_by(|(a, _), (b, _)| a.total_cmp(b)));
        let (watches, follower) = most.unwrap();
        assert!(watches > 0.0, "nobody uses a follower");
        follower
    }

    /// Returns all that happened until now. The next history begins with what is stored after that.
    pub(super) async fn another_history(&mut self) -> Vec<Entry> {
        let next = Observer::start(&self.cluster.url());
        std::mem::replace(&mut self.observer, next).finish(&self.cluster.members[0]).await
    }

    /// Values of these revisions are [excused](excuse), and more permits than the limit may have been in use until now.
    pub(super) fn settled(&mut self, unsettled: RangeInclusive<i64>) {
        self.unsettled = Some(unsettled);
        self.load.forget_most();
    }

    /// Ends the load, and checks what is true whatever happened.
    pub(super) async fn finish(self, fault: &str) -> (Experience, Report) {
        let Self { cluster, nodes, observer, load, unsettled } = self;
        let experience = load.stop().await;
        let stored = || {
            let words = ["get", "--prefix", "--keys-only", SEMAPHORES];
            block_in_place(|| cluster.members[0].ctl(&words))
        };
        eventually("no place is left", async || stored().trim().is_empty()).await;
        let history = observer.finish(&cluster.members[0]).await;
        drop(nodes);
        let report = judge(&history, |name| limit(name).into());
        println!(
            "{fault}: longest time without a grant {:?}, longest wait {:?}, most in use {:?}; {} grants ({} from the queue, \
             {} at once), {} unavailable, {} lost, {} returned, forgotten {:?}; {} versions",
            NAMES.map(|(name, ..)| (name, experience.names[name].longest_gap)),
            experience.longest_wait,
            NAMES.map(|(name, ..)| (name, experience.names[name].most)),
            experience.granted.values().sum::<usize>(),
            report.granted,
            report.at_once,
            experience.unavailable,
            experience.lost,
            report.returned,
            report.forgotten,
            report.versions,
        );
        println!("grants of each process: {:?}", experience.granted);
        let (excused, found) = excuse(&report.violations, unsettled.as_ref());
        excused.iter().for_each(|violation| println!("{fault}: excused: {violation}"));
        let count = found.len();
        let found: Vec<_> = found.iter().take(20).map(ToString::to_string).collect();
        assert!(found.is_empty(), "{count} violations, the first are {found:#?}");
        assert_eq!(experience.rejected, [""; 0], "nobody waits too long");
        for (name, Use { now, most, .. }) in &experience.names {
            assert_eq!(*now, 0, "{name}");
            assert!((1..=limit(name)).contains(most), "{name}: {most} permits in use at a time");
        }
        // There was something to judge.
        for (name, limit, _) in NAMES {
            assert_eq!(report.most_held[name], u64::from(limit), "{name}");
        }
        assert!(report.granted > 100 && report.at_once > 0, "{report:?}");
        (experience, report)
    }
}
