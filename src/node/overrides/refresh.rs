//! Questions for the overrides, and their answers.
//!
//! One server keeps them. An error of the call counts as an answer: without the right to read them, a process goes by
//! its policies. If the connection breaks or there is no answer, the question is asked again.

use std::sync::Arc;

use futures_util::future::BoxFuture;
use tokio::time::error::Elapsed;
use tokio::time::{Instant, timeout};

use super::Check;
use crate::backend::{Connection, Overrides, QueryError};
use crate::node::Node;

/// A question, with the sessions that wait for its answer.
pub(crate) struct Refresh {
    pub(crate) answer: BoxFuture<'static, Answer>,
    question: u64,
    checking: Vec<Check>,
}

/// The outcome of a question within the response timeout.
pub(crate) type Answer = Result<Result<Option<Overrides>, QueryError>, Elapsed>;

impl Refresh {
    pub(crate) fn begin(node: &Node, connection: &Arc<dyn Connection>) -> Self {
        let (question, checking) = node.overrides.begin();
        let answer = connection.overrides(node.overrides.key(), node.overrides.version());
        let answer = Box::pin(timeout(node.backend().response_timeout(), answer));
        Self { answer, question, checking }
    }

    pub(crate) fn end(self, node: &Node, answer: Answer) {
        let Self { question, checking, .. } = self;
        let answer = match answer {
            Ok(Ok(news)) => Ok(news),
            Ok(Err(QueryError::Failed(error))) if !error.is_connection() => Err(error),
            Ok(Err(QueryError::Moved)) => {
                node.overrides.moved(question, checking, Instant::now());
                return node.ask_keeper();
            }
            // If nothing else is answered either, the connection is given up, and the next one begins with the
            // question.
            Ok(Err(QueryError::Failed(_))) | Err(_) => {
                return node.overrides.ended(question, checking);
            }
        };
        let news = node.overrides.answered(question, answer);
        node.learn(&news, node.now());
        settle(node, checking);
        node.overrides.told(question);
    }

    /// Ends the question because the connection broke.
    pub(crate) fn abandon(self, node: &Node) {
        node.overrides.ended(self.question, self.checking);
    }
}

/// Tells these sessions that all revocations are known to them.
pub(crate) fn settle(node: &Node, checking: Vec<Check>) {
    for (shared, question) in checking {
        node.act(&shared, node.now(), |session, now| {
            session.handle_revocations_known(question, now);
        });
    }
}

/// Asks again, if any semaphore was used.
pub(crate) fn want(node: &Node) {
    if node.sessions.were_used() {
        node.overrides.want();
        node.ask_keeper();
    }
}
