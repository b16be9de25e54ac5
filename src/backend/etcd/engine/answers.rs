//! What leaves the engine for this process: answers to its calls, and messages to its mailbox.

use std::sync::Arc;

use tokio::sync::mpsc::UnboundedSender;

use crate::backend::{Answer, Mailbox, PeerMessage};
use crate::error::BackendError;
use crate::protocol::Hint;

/// Answers to some calls of one batch.
pub(in crate::backend::etcd) type Part = Result<Vec<(usize, Answer)>, BackendError>;

/// Who waits for the answer to a call: its batch, and the index of the call in that.
#[derive(Clone)]
pub(super) struct Asker {
    pub(super) batch: UnboundedSender<Part>,
    pub(super) index: usize,
}

/// What is delivered once the engine is not locked any more.
#[derive(Default)]
pub(in crate::backend::etcd) struct Deliveries {
    answers: Vec<(Asker, Answer)>,
    messages: Vec<Message>,
}

enum Message {
    Hint(Arc<str>, Hint),
    Recall(Arc<str>),
    Freed(Arc<str>),
    Overridden,
    Peer(Arc<str>, PeerMessage),
}

impl Deliveries {
    pub(in crate::backend::etcd) fn is_empty(&self) -> bool {
        self.answers.is_empty() && self.messages.is_empty()
    }

    pub(super) fn answer(&mut self, asker: Asker, answer: Answer) {
        self.answers.push((asker, answer));
    }

    pub(super) fn hint(&mut self, name: &Arc<str>, hint: Hint) {
        self.messages.push(Message::Hint(Arc::clone(name), hint));
    }

    pub(super) fn recall(&mut self, name: &Arc<str>) {
        self.messages.push(Message::Recall(Arc::clone(name)));
    }

    pub(super) fn freed(&mut self, name: &Arc<str>) {
        self.messages.push(Message::Freed(Arc::clone(name)));
    }

    pub(in crate::backend::etcd) fn overridden(&mut self) {
        self.messages.push(Message::Overridden);
    }

    pub(in crate::backend::etcd) fn peer(&mut self, name: Arc<str>, message: PeerMessage) {
        self.messages.push(Message::Peer(name, message));
    }

    /// Delivers everything. The receivers may call the backend again.
    pub(in crate::backend::etcd) fn deliver(self, mailbox: Option<&dyn Mailbox>) {
        let mut answers = self.answers.into_iter().peekable();
        while let Some((asker, answer)) = answers.next() {
            let mut part = vec![(asker.index, answer)];
            while let Some((next, answer)) =
                answers.next_if(|(next, _)| next.batch.same_channel(&asker.batch))
            {
                part.push((next.index, answer));
            }
            // The connection may be closed, and with it nobody waits.
            _ = asker.batch.send(Ok(part));
        }
        let Some(mailbox) = mailbox else { return };
        for message in self.messages {
            match message {
                Message::Hint(name, hint) => mailbox.hint(&name, hint),
                Message::Recall(name) => mailbox.recall(&name),
                Message::Freed(name) => mailbox.freed(&name),
                Message::Overridden => mailbox.overridden(),
                Message::Peer(name, message) => mailbox.message(&name, message),
            }
        }
    }
}
