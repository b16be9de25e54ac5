//! A simulated cluster: members in front of one store, their leader, and what goes wrong there.
//!
//! A request is carried out by a task of the cluster's own, so it is carried out even if nobody waits for it any more.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::time::sleep;
use tonic::{Code, Status};
use tower_semaphore::backend::etcd_wire::messages::{ResponseHeader, StatusResponse};

use crate::chance::Rng;
use crate::plan::MEMBERS;
use crate::store::{Refusal, Store};

/// How long a new leader adds to each lease, in ms.
const EXTENSION: u64 = 1000;
/// How often the leader looks for leases that have ended, in ms.
const LEASES: u64 = 500;
/// The first id of a member.
const MEMBER_ID: u64 = 0x00c0_ffee_0000_0001;
const CLUSTER_ID: u64 = 0x00c1_0000_0000_0001;

/// What is wrong with a member for a while. Times are in ms.
#[derive(Clone, Copy, Debug, Default)]
pub struct Member {
    /// It applies what is committed later, by so much.
    pub lags_until: u64,
    pub lags_by: u64,
    /// Its watches are later than that.
    pub watch_lags_until: u64,
    pub watch_lags_by: u64,
    /// It was the leader, and does not know that it is not: it answers keepalives on its own.
    pub is_stale_until: u64,
    stale_term: u64,
}

/// What goes wrong with requests for a while: until when, in ms, and for how many of a hundred.
#[derive(Clone, Copy, Debug, Default)]
pub struct Trouble {
    pub until: u64,
    pub percent: u64,
}

/// Everything that goes wrong with requests.
#[derive(Clone, Copy, Debug, Default)]
pub struct Troubles {
    /// They are carried out seconds later.
    pub late: Trouble,
    /// They are carried out, and never answered.
    pub unanswered: Trouble,
    /// They are answered with an error, and may have been carried out.
    pub refused: Trouble,
    /// Their watches lose events.
    pub watches_lose: Trouble,
    /// Their watches end.
    pub watches_end: Trouble,
}

/// What streams are to look at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct News {
    pub revision: i64,
    pub compacted: i64,
    /// Counts the times at which members noticed that there is no leader.
    pub leaderless: u64,
}

pub struct State {
    pub now: u64,
    pub store: Store,
    pub members: [Member; MEMBERS],
    pub troubles: Troubles,
    term: u64,
    leader: usize,
    /// The leader is gone, and nobody knows; then nobody leads; then there is another one.
    stalls_until: u64,
    leaderless_until: u64,
    leaderless: u64,
    is_electing: bool,
    is_known: bool,
    rng: Rng,
    news: News,
    /// Wakes in the order in which streams wait; a channel of Tokio's would wake in an order that no seed decides.
    has_news: Arc<Notify>,
    /// Requests by process and second.
    requests: BTreeMap<(usize, u64), u64>,
    /// Leases that ended by time.
    pub ended: usize,
}

/// The cluster. Clones share it.
#[derive(Clone)]
pub struct Cluster(Arc<Mutex<State>>);

/// What becomes of a request.
struct Fate {
    before: u64,
    after: u64,
    answer: Answer,
    /// It is lost if there is no leader.
    survives: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Answer {
    Result,
    Never,
    /// An error, after the request was carried out or not.
    Error {
        is_done: bool,
        which: usize,
    },
}

const ERRORS: [(Code, &str); 4] = [
    (Code::Unavailable, "etcdserver: leader changed"),
    (Code::Unavailable, "etcdserver: request timed out"),
    (Code::Unavailable, "etcdserver: request timed out, possibly due to previous leader failure"),
    // With this one, nothing was done.
    (Code::ResourceExhausted, "etcdserver: too many requests"),
];

impl Cluster {
    #[must_use]
    pub fn new(seed: u64, store: Store) -> Self {
        Self(Arc::new(Mutex::new(State {
            now: 0,
            store,
            members: [Member::default(); MEMBERS],
            troubles: Troubles::default(),
            term: 2,
            leader: 0,
            stalls_until: 0,
            leaderless_until: 0,
            leaderless: 0,
            is_electing: false,
            is_known: false,
            rng: Rng::new(seed),
            news: News::default(),
            has_news: Arc::default(),
            requests: BTreeMap::new(),
            ended: 0,
        })))
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the next news after these.
    pub async fn news_after(&self, seen: News) -> News {
        loop {
            let has_news = Arc::clone(&self.state().has_news);
            let mut notified = std::pin::pin!(has_news.notified());
            notified.as_mut().enable();
            let news = self.state().news;
            if news != seen {
                return news;
            }
            notified.await;
        }
    }

    /// Returns once members notice that there is no leader.
    pub async fn leaderless(&self) {
        let mut news = self.state().news;
        let before = news.leaderless;
        while news.leaderless == before {
            news = self.news_after(news).await;
        }
    }

    /// Carries out a request at a member.
    ///
    /// # Errors
    ///
    /// If it is refused, or goes wrong.
    pub async fn carry_out<T: Send + 'static>(
        &self,
        member: usize,
        operation: impl FnOnce(&mut State) -> Result<T, Refusal> + Send + 'static,
    ) -> Result<(T, ResponseHeader), Status> {
        let fate = self.state().fate(member)?;
        let (answer, answered) = oneshot::channel();
        let cluster = self.clone();
        tokio::spawn(async move {
            let result = cluster.finish(member, fate, operation).await;
            _ = answer.send(result);
        });
        answered.await.unwrap_or_else(|_| Err(Status::unavailable("etcdserver: server stopped")))
    }

    async fn finish<T>(
        self,
        member: usize,
        fate: Fate,
        operation: impl FnOnce(&mut State) -> Result<T, Refusal>,
    ) -> Result<(T, ResponseHeader), Status> {
        pass(fate.before).await;
        let mut has_waited = false;
        while self.state().is_stalled(member) {
            has_waited = true;
            pass(5).await;
        }
        if has_waited && !fate.survives {
            return Err(error(0));
        }
        if let Answer::Error { is_done: false, which } = fate.answer {
            return Err(error(which));
        }
        let done = {
            let mut state = self.state();
            let done = operation(&mut state);
            state.announce();
            done.map(|done| (done, state.header(member))).map_err(status)
        };
        pass(fate.after).await;
        match fate.answer {
            Answer::Result => done,
            Answer::Error { which, .. } => Err(error(which)),
            Answer::Never => std::future::pending().await,
        }
    }
}

async fn pass(ms: u64) {
    if ms > 0 {
        sleep(Duration::from_millis(ms)).await;
    }
}

fn error(which: usize) -> Status {
    let (code, text) = ERRORS[which];
    Status::new(code, text)
}

fn status(refusal: Refusal) -> Status {
    match refusal {
        Refusal::LeaseNotFound => Status::not_found("etcdserver: requested lease not found"),
        Refusal::Compacted => {
            Status::out_of_range("etcdserver: mvcc: required revision has been compacted")
        }
        Refusal::FutureRevision => {
            Status::out_of_range("etcdserver: mvcc: required revision is a future revision")
        }
        Refusal::NoSpace => Status::resource_exhausted("etcdserver: mvcc: database space exceeded"),
    }
}

/// What a member answers that knows of no leader.
#[must_use]
pub fn no_leader() -> Status {
    Status::unavailable("etcdserver: no leader")
}

impl State {
    /// Time passes.
    pub fn tick(&mut self, now: u64) {
        self.now = now;
        self.store.set_now(now);
        if self.is_electing && !self.is_known && now >= self.stalls_until {
            self.is_known = true;
            self.leaderless += 1;
        }
        if self.is_electing && now >= self.leaderless_until {
            self.is_electing = false;
            let leader = self.rng.index(MEMBERS);
            self.lead(leader);
        }
        if !self.is_electing && now.is_multiple_of(LEASES) {
            self.ended += self.store.end_leases();
        }
        self.announce();
    }

    /// What streams are to look at.
    #[must_use]
    pub const fn news(&self) -> News {
        self.news
    }

    fn announce(&mut self) {
        let (revision, compacted) = (self.store.revision(), self.store.compacted());
        let news = News { revision, compacted, leaderless: self.leaderless };
        if std::mem::replace(&mut self.news, news) != news {
            self.has_news.notify_waiters();
        }
    }

    /// A member begins to lead.
    pub fn lead(&mut self, member: usize) {
        self.term += 1;
        self.leader = member;
        self.members[member].is_stale_until = 0;
        self.store.extend_leases(EXTENSION);
    }

    /// The leader is gone. Nobody knows that for a time, and nobody leads for another time after it; in ms.
    pub const fn lose_leader(&mut self, unnoticed: u64, leaderless: u64) {
        self.is_known = false;
        self.stalls_until = self.now + unnoticed;
        self.leaderless_until = self.stalls_until + leaderless;
        self.is_electing = true;
    }

    /// Another member leads, and the one before does not know that for a time, in ms.
    pub fn depose(&mut self, unnoticed: u64) {
        let (before, stale_term) = (self.leader, self.term);
        self.lead((before + 1) % MEMBERS);
        let is_stale_until = self.now + unnoticed;
        self.members[before] = Member { is_stale_until, stale_term, ..self.members[before] };
    }

    /// A request of a process came.
    pub fn count(&mut self, process: usize) {
        *self.requests.entry((process, self.now / 1000)).or_default() += 1;
    }

    #[must_use]
    pub const fn requests(&self) -> &BTreeMap<(usize, u64), u64> {
        &self.requests
    }

    fn is_stalled(&self, member: usize) -> bool {
        self.is_electing || self.is_stale(member)
    }

    #[must_use]
    pub const fn is_stale(&self, member: usize) -> bool {
        self.members[member].is_stale_until > self.now
    }

    /// Whether the members know that nobody leads.
    #[must_use]
    pub const fn is_leaderless(&self) -> bool {
        self.is_electing && self.now >= self.stalls_until
    }

    #[must_use]
    pub fn happens(&mut self, which: impl FnOnce(&Troubles) -> Trouble) -> bool {
        let Trouble { until, percent } = which(&self.troubles);
        until > self.now && self.rng.percent(percent)
    }

    fn fate(&mut self, member: usize) -> Result<Fate, Status> {
        if self.is_leaderless() {
            return Err(no_leader());
        }
        let is_late = self.happens(|troubles| troubles.late);
        let is_unanswered = self.happens(|troubles| troubles.unanswered);
        let is_refused = self.happens(|troubles| troubles.refused);
        let answer = if is_unanswered {
            Answer::Never
        } else if is_refused {
            let which = self.rng.index(ERRORS.len());
            let is_done = which < 3 && self.rng.percent(50);
            Answer::Error { is_done, which }
        } else {
            Answer::Result
        };
        let late = if is_late { self.rng.between(200, 4000) } else { 0 };
        let before = late + self.rng.below(3);
        let after = self.rng.below(2) + self.lag(member);
        Ok(Fate { before, after, answer, survives: self.rng.percent(50) })
    }

    fn lag(&mut self, member: usize) -> u64 {
        let Member { lags_until, lags_by, .. } = self.members[member];
        if lags_until > self.now { lags_by } else { 0 }
    }

    /// How much later than the store a watch of this member is, in ms.
    pub fn watch_lag(&mut self, member: usize) -> u64 {
        let Member { watch_lags_until, watch_lags_by, is_stale_until, .. } = self.members[member];
        let lags = if watch_lags_until > self.now { self.rng.below(watch_lags_by + 1) } else { 0 };
        is_stale_until.saturating_sub(self.now) + self.lag(member) + lags + self.rng.below(2)
    }

    #[must_use]
    pub fn header(&self, member: usize) -> ResponseHeader {
        let raft_term = match self.is_stale(member) {
            true => self.members[member].stale_term,
            false => self.term,
        };
        ResponseHeader {
            cluster_id: CLUSTER_ID,
            member_id: MEMBER_ID + member as u64,
            revision: self.store.revision(),
            raft_term,
        }
    }

    #[must_use]
    pub fn status(&self, member: usize) -> StatusResponse {
        let header = self.header(member);
        let leader = if self.is_stale(member) { member } else { self.leader };
        StatusResponse {
            header: Some(header),
            version: "3.5.16".to_owned(),
            db_size: 1 << 20,
            leader: if self.is_leaderless() { 0 } else { MEMBER_ID + leader as u64 },
            raft_index: self.store.revision().unsigned_abs(),
            raft_term: header.raft_term,
            errors: match self.store.has_space {
                true => Vec::new(),
                false => vec![format!("memberID:{} alarm:NOSPACE ", header.member_id)],
            },
            db_size_in_use: 1 << 19,
            db_size_quota: 1 << 31,
            ..StatusResponse::default()
        }
    }
}
