//! Watches everything that is stored, whatever happens to the members.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tower_semaphore::backend::etcd_wire::{Client, KeyRange, Settings, Url, WatchMessage};

use super::history::{Entry, SEMAPHORES, SIGNS};
use crate::support::etcd::TestEtcd;

/// How long a member may be silent. It answers a request for its progress in less.
const SILENCE: Duration = Duration::from_millis(500);

/// The key in both folders whose change is the last of a history.
const END: &str = "end";

pub(super) struct Observer {
    /// All changes of semaphores up to this revision have been seen.
    seen: Arc<AtomicI64>,
    task: JoinHandle<Vec<Entry>>,
}

impl Observer {
    /// Watches the cluster of this URL from its first revision on.
    pub(super) fn start(url: &str) -> Self {
        let seen = Arc::<AtomicI64>::default();
        let (url, watching) = (url.to_owned(), Arc::clone(&seen));
        let task = tokio::spawn(async move {
            let mut recording = Recording { seen: watching, ..Recording::default() };
            recording.run(&Url::parse(&url).unwrap()).await;
            recording.into_history()
        });
        Self { seen, task }
    }

    /// Returns the revision up to which all changes of semaphores have been seen.
    pub(super) fn seen(&self) -> i64 {
        self.seen.load(Ordering::SeqCst)
    }

    /// Returns all that happened until now.
    pub(super) async fn finish(self, member: &TestEtcd) -> Vec<Entry> {
        tokio::task::block_in_place(|| {
            for folder in [SEMAPHORES, SIGNS] {
                member.ctl(&["put", &format!("{folder}{END}"), ""]);
            }
        });
        timeout(Duration::from_secs(10), self.task).await.expect("the observer keeps up").unwrap()
    }
}

/// What was seen, by revision and key: after a lost connection, some of it can be delivered again.
#[derive(Default)]
struct Recording {
    seen: Arc<AtomicI64>,
    entries: BTreeMap<(i64, Bytes), Entry>,
    delivered: [i64; 2],
    is_over: [bool; 2],
}

impl Recording {
    async fn run(&mut self, url: &Url) {
        let settings = Settings::new(url, Duration::from_secs(1)).unwrap();
        for endpoint in url.endpoints.iter().cycle() {
            if self.is_over == [true; 2] {
                return;
            }
            if let Ok((client, mut driver)) = Client::open(endpoint, &settings).await {
                // The outer error is an end of the connection.
                let Err(_lost) = driver.until(self.watch(&client)).await;
            }
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// Watches through one member, until it is lost or all was seen.
    async fn watch(&mut self, client: &Client) -> Result<Infallible, Lost> {
        let range = |of: usize, folder: &str| KeyRange {
            key: Bytes::copy_from_slice(folder.as_bytes()),
            // The character behind the slash ends the range.
            range_end: format!("{}0", folder.trim_end_matches('/')).into(),
            start_revision: self.delivered[of] + 1,
        };
        let mut watch = client.watch(vec![range(0, SEMAPHORES), range(1, SIGNS)]);
        let mut is_asked = false;
        while self.is_over != [true; 2] {
            let Ok(message) = timeout(SILENCE, watch.next()).await else {
                if std::mem::replace(&mut is_asked, true) {
                    return Err(Lost);
                }
                watch.progress();
                continue;
            };
            is_asked = false;
            match message.map_err(|_| Lost)? {
                WatchMessage::Created { .. } | WatchMessage::Progress { .. } => {}
                WatchMessage::Canceled { error, compact_revision, .. } => {
                    assert_eq!(compact_revision, 0, "a part of the history is gone: {error}");
                    return Err(Lost);
                }
                WatchMessage::Events { range, events, delivered } => {
                    for event in &events {
                        let Some(kv) = &event.kv else { continue };
                        self.is_over[range] |= kv.key.ends_with(END.as_bytes());
                        if let Some(entry) = Entry::read(event) {
                            self.entries.insert((kv.mod_revision, kv.key.clone()), entry);
                        }
                    }
                    self.delivered[range] = self.delivered[range].max(delivered);
                    self.seen.store(self.delivered[0], Ordering::SeqCst);
                }
            }
        }
        Err(Lost)
    }

    fn into_history(self) -> Vec<Entry> {
        self.entries.into_values().collect()
    }
}

/// Another connection is to be opened.
struct Lost;
