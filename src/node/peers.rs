//! Questions between processes: their names, and how long they have held their permits.
//!
//! The backend stores neither: a number per place for a page that is viewed now and then would cost every request.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::timeout;

use super::tallies::Tally;
use crate::protocol::{NodeId, Rate, Tenant};
use crate::sync::{Mutex, lock};

/// How long to wait for all answers. A process that does not answer is only missing on the page.
const ANSWERS_TIMEOUT: Duration = Duration::from_millis(200);
/// The most processes that one question is sent to.
const ASKED_MAX: usize = 64;
/// The most characters of its host name that a process sends.
const HOST_MAX: usize = 64;

/// The open questions.
#[derive(Default)]
pub(crate) struct Questions {
    open: Mutex<Vec<Arc<Question>>>,
}

struct Question {
    name: Arc<str>,
    answers: Mutex<HashMap<NodeId, PeerAnswer>>,
    missing: Mutex<HashSet<NodeId>>,
    answered: Notify,
}

/// The answer of one process.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerAnswer {
    pub(crate) process: Arc<str>,
    /// How long its places have held their permits, by number.
    pub(crate) held: HashMap<u64, Duration>,
    /// How long its waiting places have waited, by number.
    pub(crate) waiting: HashMap<u64, Duration>,
    /// The names of tenants that it knows.
    pub(crate) tenants: Vec<(Tenant, Arc<str>)>,
    /// The limit of its policy, the rate in force there, and its counts.
    pub(crate) limit: Option<u32>,
    pub(crate) rate: Option<Rate>,
    pub(crate) tally: Option<Tally>,
    /// The number of permits that it keeps for its next requests.
    pub(crate) kept: u64,
}

impl Questions {
    /// Asks processes about a name, with `send`. Returns the answers that arrive in time.
    pub(crate) async fn ask(
        &self,
        name: &str,
        processes: BTreeSet<NodeId>,
        send: impl Fn(NodeId),
    ) -> HashMap<NodeId, PeerAnswer> {
        if processes.is_empty() {
            return HashMap::new();
        }
        let asked: BTreeSet<NodeId> = processes.into_iter().take(ASKED_MAX).collect();
        let question = Arc::new(Question {
            name: name.into(),
            answers: Mutex::default(),
            missing: Mutex::new(asked.iter().copied().collect()),
            answered: Notify::new(),
        });
        lock(&self.open).push(Arc::clone(&question));
        let _close = CloseOnDrop(self, &question);
        asked.into_iter().for_each(send);
        let _ = timeout(ANSWERS_TIMEOUT, question.answered.notified()).await;
        std::mem::take(&mut *lock(&question.answers))
    }

    /// Takes in the answer of a process.
    pub(crate) fn on_answer(&self, name: &str, by: NodeId, answer: &PeerAnswer) {
        for question in &*lock(&self.open) {
            if *question.name == *name {
                question.on_answer(by, answer.clone());
            }
        }
    }

    /// Takes in the tenants that a process sends ahead of its answer.
    pub(crate) fn on_tenants(
        &self,
        name: &str,
        by: NodeId,
        tenants: &[(Tenant, Arc<str>)],
        waiting: &HashMap<u64, Duration>,
    ) {
        for question in &*lock(&self.open) {
            if *question.name == *name && lock(&question.missing).contains(&by) {
                let mut answers = lock(&question.answers);
                let answer = answers.entry(by).or_default();
                answer.tenants = tenants.to_vec();
                answer.waiting.clone_from(waiting);
            }
        }
    }

    /// Takes in the limit, the rate and the counts that a process sends ahead of its answer.
    pub(crate) fn on_counts(&self, name: &str, by: NodeId, counts: &PeerAnswer) {
        for question in &*lock(&self.open) {
            if *question.name == *name && lock(&question.missing).contains(&by) {
                let mut answers = lock(&question.answers);
                let answer = answers.entry(by).or_default();
                (answer.limit, answer.rate) = (counts.limit, counts.rate);
                (answer.tally, answer.kept) = (counts.tally, counts.kept);
            }
        }
    }
}

impl Question {
    fn on_answer(&self, by: NodeId, answer: PeerAnswer) {
        let mut missing = lock(&self.missing);
        if missing.remove(&by) {
            let mut answers = lock(&self.answers);
            let known = answers.entry(by).or_default();
            (known.process, known.held) = (answer.process, answer.held);
            drop(answers);
            if missing.is_empty() {
                self.answered.notify_one();
            }
        }
    }
}

/// Closes a question when it is dropped.
struct CloseOnDrop<'a>(&'a Questions, &'a Arc<Question>);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        lock(&self.0.open).retain(|open| !Arc::ptr_eq(open, self.1));
    }
}

/// Returns the name of this process: its host, if that is known, and its process id.
pub(crate) fn process() -> &'static Arc<str> {
    static PROCESS: OnceLock<Arc<str>> = OnceLock::new();
    PROCESS.get_or_init(|| {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let host = host.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
        named(host.trim(), std::process::id())
    })
}

fn named(host: &str, id: u32) -> Arc<str> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let host: String = host.chars().map(plain).take(HOST_MAX).collect();
    format!("{}:{id}", if host.is_empty() { "unknown" } else { &host }).into()
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn a_process_has_a_name_that_can_stand_in_a_message() {
        assert_eq!(&*named("api-7.example", 12), "api-7.example:12");
        assert_eq!(&*named("a b\n<é>", 1), "a_b____:1");
        assert_eq!(&*named("", 1), "unknown:1");
        assert_eq!(named(&"x".repeat(1000), 1).len(), 66);
    }
}
