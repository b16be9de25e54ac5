//! The engine of a process, behind its lock.

use std::sync::{Arc, Weak};

use tokio::sync::Notify;
use tokio::time::Instant;

use super::clock::{Clock, Now};
use super::engine::Engine;
use super::keys::Keys;
use super::wire::Environment;
use crate::backend::Mailbox;
use crate::protocol::NodeId;
use crate::protocol::liveness::Grace;
use crate::sync::{Mutex, lock};

/// What the backend, its connection and their operations share.
pub(super) struct Shared {
    pub(super) node: NodeId,
    /// A random number of this process.
    pub(super) seed: u32,
    pub(super) keys: Keys,
    pub(super) environment: Arc<dyn Environment>,
    clock: Clock,
    mailbox: Weak<dyn Mailbox>,
    engine: Mutex<Engine>,
    /// Calls came for the connection.
    pub(super) called: Notify,
    /// A lease was revoked, or that failed.
    pub(super) revoked: Notify,
    /// When a member last answered.
    heard_at: Mutex<Option<Instant>>,
}

impl Shared {
    pub(super) fn new(
        node: NodeId,
        mailbox: Weak<dyn Mailbox>,
        keys: Keys,
        grace: Grace,
        environment: Arc<dyn Environment>,
    ) -> Arc<Self> {
        let seed = fastrand::u32(..);
        let engine = Mutex::new(Engine::new(node, keys.clone(), grace, seed.into()));
        Arc::new(Self {
            node,
            seed,
            keys,
            clock: Clock::new(Arc::clone(&environment)),
            environment,
            mailbox,
            engine,
            called: Notify::new(),
            revoked: Notify::new(),
            heard_at: Mutex::default(),
        })
    }

    /// Acts on the engine, then delivers what that led to, without the lock.
    pub(super) fn with<T>(&self, act: impl FnOnce(&mut Engine, Now) -> T) -> T {
        let mut engine = lock(&self.engine);
        // Read under the lock, or time could go back.
        let now = self.clock.now();
        let done = act(&mut engine, now);
        let deliveries = std::mem::take(&mut engine.deliveries);
        drop(engine);
        if !deliveries.is_empty() {
            deliveries.deliver(self.mailbox.upgrade().as_deref());
        }
        done
    }

    /// The operator of the cluster should know this; `None`: nothing.
    pub(super) fn warn(&self, warning: Option<&str>) {
        if let Some(mailbox) = self.mailbox.upgrade() {
            mailbox.warned(warning);
        }
    }

    pub(super) fn heard(&self) {
        *lock(&self.heard_at) = Some(Instant::now());
    }

    pub(super) fn heard_at(&self) -> Option<Instant> {
        *lock(&self.heard_at)
    }
}
