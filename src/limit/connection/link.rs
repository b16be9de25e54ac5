//! What a connection carries, and the permits that it holds, whatever its socket.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use super::alarm::Alarm;
use super::guests::Guests;
use crate::error::LeaseLost;
use crate::semaphore::{Permit, Visited, Visitor};

/// What does not depend on the kind of the connection.
pub(super) struct Core {
    pub(super) held: Mutex<Held>,
    pub(super) alarm: Arc<Alarm>,
    pub(super) guests: Guests,
    pub(super) has_peer_left: AtomicBool,
    pub(super) half_close: AtomicBool,
    pub(super) has_socket: bool,
}

/// The permits that a connection holds: one of each layer around the handler.
#[derive(Default)]
pub(super) struct Held {
    permits: Vec<KeptPermit>,
    pub(super) phase: Phase,
}

/// What a connection carries.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Phase {
    /// No request, or none that is known of.
    #[default]
    Idle,
    /// A request without a response, which may become an upgrade.
    Request,
    Upgraded,
}

/// A connection of any kind.
pub(super) trait Link: Visited {
    fn core(&self) -> &Core;
}

struct KeptPermit {
    permit: Permit,
    /// Reads and writes fail without it.
    abort: bool,
    /// The connection is looked at as long as this is here.
    _inside: Inside,
}

/// A request that waits in a layer or holds a permit on a connection, or a permit that the connection holds.
#[derive(Debug)]
pub(in crate::limit) struct Inside {
    link: Weak<dyn Link>,
    visitor: Visitor,
}

/// A closed connection cannot be told from a broken one: its permits linger if their layers are configured so.
impl Drop for KeptPermit {
    fn drop(&mut self) {
        self.permit.break_off();
    }
}

impl Inside {
    pub(super) fn new(link: &Weak<dyn Link>, visitor: Visitor) -> Self {
        if let Some(open) = link.upgrade()
            && open.core().guests.enter(&visitor)
            && open.core().has_socket
        {
            let connection: Weak<dyn Visited> = Weak::clone(link) as _;
            open.core().guests.seek_visitor(&connection);
        }
        Self { link: Weak::clone(link), visitor }
    }

    /// The connection holds the permit until it is dropped, if the request that it carries becomes its upgrade. `abort`:
    /// it fails when the permit is lost. Returns whether it holds the permit.
    pub(in crate::limit) fn keep(&self, permit: &Permit, abort: bool) -> bool {
        let Some(link) = self.link.upgrade() else { return false };
        let core = link.core();
        let permit = permit.clone();
        let alarm = Waker::from(Arc::clone(&core.alarm));
        let is_lost = abort && !permit.on_lost(&alarm);
        let inside = Self::new(&self.link, self.visitor.clone());
        let mut held = core.held();
        if held.phase != Phase::Request {
            return false;
        }
        held.permits.push(KeptPermit { permit, abort, _inside: inside });
        drop(held);
        if is_lost {
            alarm.wake();
        }
        true
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        if let Some(link) = self.link.upgrade() {
            link.core().guests.leave(&self.visitor);
        }
    }
}

impl Core {
    pub(super) fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection carries something else from now on. What is no upgrade gives back what was held for it.
    pub(super) fn go_on(&self, phase: Phase) {
        let mut held = self.held();
        held.phase = phase;
        let permits = (phase != Phase::Upgraded).then(|| std::mem::take(&mut held.permits));
        drop(held);
        drop(permits);
        // A permit may be lost already.
        if phase == Phase::Upgraded {
            self.alarm.ring();
        }
    }

    /// Fails once the peer has left, or a permit is lost that the connection cannot be without.
    pub(super) fn check(&self) -> io::Result<()> {
        if self.has_peer_left.load(Ordering::Acquire) {
            let what = "the peer has closed the connection";
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, what));
        }
        let lost = self.held().lost().map(LeaseLost::of);
        lost.map_or(Ok(()), |lost| Err(io::Error::other(lost)))
    }

    pub(super) fn end_by_peer(&self) {
        self.has_peer_left.store(true, Ordering::Release);
        // The task that read the head serves the connection. It flushes whenever it is woken.
        self.alarm.ring();
        let mut held = self.held();
        let permits = (held.phase == Phase::Upgraded).then(|| std::mem::take(&mut held.permits));
        drop(held);
        // Nothing passes any more, whatever the handler still does.
        drop(permits);
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.alarm.ended.notify_waiters();
    }
}

impl Held {
    /// Returns a permit that is lost and that the connection cannot be without.
    pub(super) fn lost(&self) -> Option<&Permit> {
        let is_needed = self.phase == Phase::Upgraded;
        let mut needed = self.permits.iter().filter(|kept| is_needed && kept.abort);
        needed.find(|kept| kept.permit.is_lost()).map(|kept| &kept.permit)
    }
}
