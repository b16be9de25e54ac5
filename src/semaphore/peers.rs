//! What processes say to each other: for how long they have had their permits, and what they are
//! called. Nobody else knows, so they are asked.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::lock;
use super::node::Node;
use crate::backend::PeerMessage;
use crate::protocol::id::NodeId;
use crate::sync::Mutex;

/// How long the answers are waited for.
const PATIENCE: Duration = Duration::from_millis(200);
/// How many processes are asked at a time.
const ASKED_MAX: usize = 64;
/// The longest name of a process.
const PROCESS_MAX: usize = 64;

/// What is asked at present.
#[derive(Default)]
pub(super) struct Questions {
    open: Mutex<Vec<Arc<Question>>>,
}

struct Question {
    name: Arc<str>,
    told: Mutex<HashMap<NodeId, Told>>,
    missing: Mutex<HashSet<NodeId>>,
    answered: Notify,
}

/// What a process told of itself.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) process: Arc<str>,
    /// Its places, by number, and for how long they have had their permits.
    pub(super) held: HashMap<u64, Duration>,
}

impl Node {
    /// Asks other processes for how long they have had their permits of a name; gives what they told
    /// in time.
    pub(super) async fn ask_others(
        &self,
        name: &str,
        others: BTreeSet<NodeId>,
    ) -> HashMap<NodeId, Told> {
        if others.is_empty() {
            return HashMap::new();
        }
        let asked: BTreeSet<NodeId> = others.into_iter().take(ASKED_MAX).collect();
        let question = Arc::new(Question {
            name: name.into(),
            told: Mutex::default(),
            missing: Mutex::new(asked.iter().copied().collect()),
            answered: Notify::new(),
        });
        lock(&self.questions.open).push(Arc::clone(&question));
        let _closed = Closes(self, &question);
        for to in asked {
            self.send(name, to, PeerMessage::AskHeld { by: self.id() });
        }
        let _ = timeout(PATIENCE, question.answered.notified()).await;
        std::mem::take(&mut *lock(&question.told))
    }

    /// A message of another process.
    pub(super) fn receive(&self, name: &str, message: PeerMessage) {
        match message {
            PeerMessage::AskHeld { by } => {
                let now = self.now();
                let held =
                    self.look_at(name, |session| session.held_since(now, PeerMessage::HELD_MAX));
                let (held, process) = (held.unwrap_or_default(), Arc::clone(process()));
                self.send(name, by, PeerMessage::Held { by: self.id(), process, held });
            }
            PeerMessage::Held { by, process, held } => {
                let held = held.into_iter().map(|(n, ms)| (n, Duration::from_millis(ms)));
                let told = Told { process, held: held.collect() };
                for question in &*lock(&self.questions.open) {
                    if *question.name == *name {
                        question.answered_by(by, told.clone());
                    }
                }
            }
        }
    }

    fn send(&self, name: &str, to: NodeId, message: PeerMessage) {
        let key = self.backend().key(name);
        if let Some(embedded) = self.embedded() {
            let _ = embedded.send_message(&key, to, &message).now_or_never();
        } else {
            let server = self.servers.attach(&self.backend().shard(&key), 0);
            server.send_message((key, to, message));
        }
    }
}

impl Question {
    fn answered_by(&self, by: NodeId, told: Told) {
        let mut missing = lock(&self.missing);
        if missing.remove(&by) {
            lock(&self.told).insert(by, told);
            if missing.is_empty() {
                self.answered.notify_one();
            }
        }
    }
}

/// Takes a question back.
struct Closes<'a>(&'a Node, &'a Arc<Question>);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        lock(&self.0.questions.open).retain(|open| !Arc::ptr_eq(open, self.1));
    }
}

/// What this process is called: its host, as far as that is known, and its id.
pub(super) fn process() -> &'static Arc<str> {
    static PROCESS: OnceLock<Arc<str>> = OnceLock::new();
    PROCESS.get_or_init(|| {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
        let host = host.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_default();
        named(host.trim(), std::process::id())
    })
}

fn named(host: &str, id: u32) -> Arc<str> {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let host: String = host.chars().map(plain).take(PROCESS_MAX).collect();
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
