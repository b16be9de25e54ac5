//! What is sent without a place: operators' queries, and messages to other processes.

use std::sync::Arc;

use futures_util::FutureExt;
use tokio::time::timeout;

use super::server::Reach;
use super::shared_session::no_answer;
use super::{Node, Server};
use crate::backend::{PeerMessage, Queries, Query, QueryError, Shard};
use crate::error::BackendError;
use crate::policy::ANSWER_TIMEOUT;
use crate::protocol::NodeId;

/// The most servers that a query is sent to, as slots move.
const REDIRECTS_MAX: usize = 5;

impl Node {
    /// Sends a message to another process, through the server that counts the semaphore of `name`.
    pub(crate) fn send_message(&self, name: &str, to: NodeId, message: PeerMessage) {
        let key = self.backend.key(name);
        if let Some(embedded) = self.embedded() {
            let _ = embedded.send_message(&key, to, &message).now_or_never();
        } else {
            let server = self.servers.attach(&self.backend.shard(&key), 0);
            server.send_message((key, to, message));
        }
    }

    /// Sends a query to the server of `shard` or, without one, to the server that counts the semaphore of `key`.
    ///
    /// # Errors
    ///
    /// If there is no answer within [`ANSWER_TIMEOUT`], or the server refuses.
    pub(crate) async fn query<T>(
        &self,
        shard: Option<&Shard>,
        key: &str,
        query: impl Fn(&dyn Queries) -> Query<T>,
    ) -> Result<T, BackendError> {
        let mut asked: Option<Arc<Server>> = None;
        let answer = async {
            if let Some(embedded) = self.embedded() {
                return query(embedded).await;
            }
            for _ in 0..REDIRECTS_MAX {
                let shard = shard.cloned().unwrap_or_else(|| self.backend.shard(key));
                let server = asked.insert(self.servers.attach(&shard, 0));
                match server.reach().await {
                    Reach::Up(connection) => match query(&*connection).await {
                        Err(QueryError::Moved) => {}
                        answer => return answer,
                    },
                    Reach::Down(error) => return Err(QueryError::Failed(error)),
                    Reach::Ended => {}
                }
            }
            Err(QueryError::Failed(no_answer()))
        };
        let answer = timeout(ANSWER_TIMEOUT, answer).await;
        // Perhaps nothing else is sent over that connection that would show whether it still works.
        let is_answered = answer.as_ref().is_ok_and(|answer| {
            answer.as_ref().err().and_then(QueryError::of_connection).is_none()
        });
        if let Some(server) = asked.filter(|_| !is_answered) {
            server.doubt();
        }
        match answer {
            Ok(Ok(answer)) => Ok(answer),
            Ok(Err(QueryError::Failed(error))) => Err(error),
            Ok(Err(QueryError::Moved)) | Err(_) => Err(no_answer()),
        }
    }
}
