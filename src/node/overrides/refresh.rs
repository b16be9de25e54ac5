//! How a process learns of the overrides that operators set.
//!
//! ```text
//!   a message ───────────────────── on_announced ────┐
//!   a timer, a new connection ────────────── want ───┤
//!   a session that finds places gone ────── check ───┤       the driver of the server that keeps them
//!   an operator's call ───────────────── catch_up ───┼──► wanted ── begin ──► question over its connection
//!            ▲                                       │                              │          │
//!            │                                       └──────────── abandon ◄── no answer     answer
//!            └── set_applied ◄──────────────────────────────────────────── take_in ◄───────────┘
//!                                       sessions apply it, and know what was revoked
//! ```
//!
//! `want` says that this process may not know everything; `on_announced` that it does not, but may wait a moment: one
//! answer has all overrides, and changes can come thick. `begin` asks, one question at a time; `take_in` applies an
//! answer to the sessions, and only then wakes the callers in `catch_up`; `abandon` has the question asked again.
//!
//! One server keeps the overrides. An error of the call counts as an answer: a process that may not read them applies
//! its policies alone. The embedded backend answers at once: [`learn_now`](Node::learn_now) begins and takes in.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::Check;
use super::adapting::LimitBefore;
use crate::backend::{Connection, Overrides, QueryError};
use crate::error::BackendError;
use crate::node::server::Reach;
use crate::node::shared_session::{SharedSession, no_answer};
use crate::node::{Node, Server};
use crate::policy::ANSWER_TIMEOUT;
use crate::protocol::Time;
use crate::protocol::session::Session;
use crate::tenants::tenant_of_field;

/// A question, with the sessions that wait for its answer.
pub(crate) struct Refresh {
    pub(crate) answer: BoxFuture<'static, TimedAnswer>,
    question: u64,
    checking: Vec<Check>,
}

/// The answer to a question within the response timeout.
pub(crate) type TimedAnswer = Result<Result<Option<Overrides>, QueryError>, Elapsed>;

impl Refresh {
    pub(crate) fn begin(node: &Node, connection: &Arc<dyn Connection>) -> Self {
        let (question, checking) = node.overrides.begin(Instant::now());
        let answer = connection.overrides(node.overrides.key(), node.overrides.version());
        let answer = Box::pin(timeout(node.backend().response_timeout(), answer));
        Self { answer, question, checking }
    }

    pub(crate) fn end(self, node: &Node, answer: TimedAnswer) {
        let Self { question, checking, .. } = self;
        match answer {
            Ok(Ok(news)) => {
                node.take_in(question, checking, Ok(news));
            }
            Ok(Err(QueryError::Failed(error))) if !error.is_connection() => {
                node.take_in(question, checking, Err(error));
            }
            Ok(Err(QueryError::Moved)) => {
                node.overrides.redirect(question, checking, Instant::now());
                node.ask_keeper();
            }
            // If nothing else is answered either, the connection is given up, and the next one begins with this
            // question.
            Ok(Err(QueryError::Failed(_))) | Err(_) => node.overrides.abandon(question, checking),
        }
    }

    /// Ends the question because the connection broke.
    pub(crate) fn abandon(self, node: &Node) {
        node.overrides.abandon(self.question, self.checking);
    }
}

impl Node {
    /// Returns whether this server keeps the overrides.
    pub(crate) fn keeps_overrides(&self, server: &Server) -> bool {
        self.backend().shard(self.overrides.key()) == *server.shard()
    }

    /// Returns the server that keeps the overrides.
    pub(crate) fn keeper(&self) -> Arc<Server> {
        self.servers.attach(&self.backend().shard(self.overrides.key()), 0)
    }

    /// Wakes the driver of that server, so that it asks the wanted question.
    pub(crate) fn ask_keeper(&self) {
        self.keeper().outbox.wake();
    }

    /// Asks again, if any semaphore was used since the last call.
    pub(crate) fn want_overrides(&self) {
        if self.sessions.were_used() {
            self.overrides.want();
            self.ask_keeper();
        }
    }

    /// Waits until everything that operators set before this call is applied.
    ///
    /// # Errors
    ///
    /// If the server that keeps the overrides cannot be asked.
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

    /// Reads and applies the overrides of the embedded backend.
    pub(crate) fn learn_now(&self) {
        let Some(embedded) = self.embedded() else { return };
        loop {
            let (question, checking) = self.overrides.begin(Instant::now());
            let query = embedded.overrides(self.overrides.key(), self.overrides.version());
            let Some(Ok(answer)) = query.now_or_never() else { return };
            if !self.take_in(question, checking, Ok(answer)) {
                break;
            }
        }
        self.record_now();
    }

    /// Applies an answer to the sessions, then wakes its callers. Returns whether anything changed.
    fn take_in(
        &self,
        question: u64,
        checking: Vec<Check>,
        answer: Result<Option<Overrides>, BackendError>,
    ) -> bool {
        let now = self.now();
        let news = self.overrides.take_in(question, answer, self.spread(), now);
        for name in &news.names {
            if let Some(shared) = self.sessions.get(name) {
                self.apply_overrides(&shared, now);
            }
            let of_tenant =
                tenant_of_field(name).and_then(|(of, _)| self.sessions.get(of.as_str()));
            if let Some(shared) = of_tenant {
                self.act(&shared, now, Session::handle_tenant_override);
            }
        }
        for (id, name) in &news.revoked {
            if let Some(shared) = self.sessions.get(name) {
                self.act(&shared, now, |session, time| session.handle_revoked(*id, time));
            }
        }
        self.settle(checking);
        self.overrides.set_applied(question);
        !news.names.is_empty() || !news.revoked.is_empty()
    }

    /// Applies what is known to the session of a name.
    pub(super) fn apply_overrides(&self, shared: &Arc<SharedSession>, now: Time) {
        let mut state = shared.lock();
        let (paused, limit) = (state.session.paused_until(), LimitBefore::of(&state));
        // Read under the lock: another thread may have learned something newer.
        self.overrides.apply(shared.name(), &mut state.session, now);
        let (paused_after, limit) = (state.session.paused_until(), limit.changed(&state));
        self.finish(shared, state, now, None);
        self.log_pause(shared.name(), paused, paused_after);
        self.tell_limit(shared, limit);
    }

    /// Ends the revocation checks of all sessions without an answer, so that an outage of the server that keeps the
    /// overrides does not stop them.
    pub(crate) fn settle_checks(&self) {
        self.settle(self.overrides.take_checking());
    }

    fn settle(&self, checking: Vec<Check>) {
        for (shared, question) in checking {
            self.act(&shared, self.now(), |session, now| {
                session.handle_revocations_known(question, now);
            });
        }
    }
}
