//! The wakers of a connection.

use std::sync::Arc;
use std::task::Wake;

use futures_util::task::AtomicWaker;
use tokio::sync::Notify;

/// Wakes the tasks that wait for the connection. Does not hold the permits, because their records hold it.
#[derive(Default)]
pub(super) struct Alarm {
    pub(super) reader: AtomicWaker,
    pub(super) writer: AtomicWaker,
    pub(super) ended: Notify,
}

impl Alarm {
    pub(super) fn ring(&self) {
        self.reader.wake();
        self.writer.wake();
        self.ended.notify_waiters();
    }
}

impl Wake for Alarm {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}
