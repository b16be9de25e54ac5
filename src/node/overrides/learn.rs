//! How a process learns what operators set.

use std::sync::Arc;

use futures_util::FutureExt;
use tokio::time::timeout;

use super::News;
use crate::error::BackendError;
use crate::node::server::Reach;
use crate::node::shared_session::no_answer;
use crate::node::{Node, Server};
use crate::policy::ANSWER_TIMEOUT;
use crate::protocol::Time;

impl Node {
    /// Returns whether this server keeps the overrides.
    pub(crate) fn keeps_overrides(&self, server: &Server) -> bool {
        self.backend().shard(self.overrides.key()) == *server.shard()
    }

    /// Returns the server that keeps the overrides.
    pub(crate) fn keeper(&self) -> Arc<Server> {
        self.servers.attach(&self.backend().shard(self.overrides.key()), 0)
    }

    /// Wakes the driver of that server, to ask for what is wanted.
    pub(crate) fn ask_keeper(&self) {
        self.keeper().outbox.wake();
    }

    /// Applies everything that operators set before this call.
    ///
    /// # Errors
    ///
    /// If the server that keeps it cannot be asked.
    pub(crate) async fn catch_up(&self) -> Result<(), BackendError> {
        if self.embedded().is_some() {
            self.learn_now();
            return Ok(());
        }
        let caught_up = async {
            let question = self.overrides.want_answer();
            loop {
                let changed = self.overrides.changed();
                if let Some(outcome) = self.overrides.outcome(question) {
                    return outcome;
                }
                let keeper = self.keeper();
                keeper.outbox.wake();
                match keeper.reach().await {
                    Reach::Up(_) => changed.await,
                    Reach::Down(error) => return Err(error),
                    Reach::Ended => {}
                }
            }
        };
        timeout(ANSWER_TIMEOUT, caught_up).await.unwrap_or_else(|_| Err(no_answer()))
    }

    /// Applies new overrides to the sessions. Returns whether there were any.
    pub(crate) fn learn(&self, news: &News, now: Time) -> bool {
        for name in &news.names {
            if let Some(shared) = self.sessions.get(name) {
                // Read under the lock: another thread may have learned something newer.
                self.act(&shared, now, |session, time| {
                    session.handle_override(self.overrides.of(name), time);
                });
            }
        }
        for (id, name) in &news.revoked {
            if let Some(shared) = self.sessions.get(name) {
                self.act(&shared, now, |session, time| session.handle_revoked(*id, time));
            }
        }
        !news.names.is_empty() || !news.revoked.is_empty()
    }

    /// Reads and applies the overrides, where the backend answers at once.
    pub(crate) fn learn_now(&self) {
        let Some(embedded) = self.embedded() else { return };
        loop {
            let (question, _) = self.overrides.begin();
            let query = embedded.overrides(self.overrides.key(), self.overrides.version());
            let Some(Ok(answer)) = query.now_or_never() else { return };
            let news = self.overrides.answered(question, Ok(answer));
            let is_news = self.learn(&news, self.now());
            self.overrides.told(question);
            if !is_news {
                return;
            }
        }
    }
}
