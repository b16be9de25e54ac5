//! Which semaphores have requests on a connection, and whether one of them visits it.

use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

use smallvec::SmallVec;

use crate::semaphore::{Visited, Visitor};

/// What is inside a layer on a connection: requests that wait or hold a permit, and permits that the connection holds.
#[derive(Default)]
pub(super) struct Guests {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    by_semaphore: SmallVec<[Group; 1]>,
    /// One of the semaphores visits the connection, for all of them.
    is_visited: bool,
}

/// The guests of one semaphore.
struct Group {
    visitor: Visitor,
    count: usize,
    /// The semaphore visits no more.
    is_over: bool,
}

impl Guests {
    /// One guest more. Returns whether a [visitor](Self::seek_visitor) is needed.
    pub(super) fn enter(&self, visitor: &Visitor) -> bool {
        let mut state = self.lock();
        match state.group(visitor) {
            Some(group) => group.count += 1,
            None => state.by_semaphore.push(Group {
                visitor: visitor.clone(),
                count: 1,
                is_over: false,
            }),
        }
        !state.is_visited
    }

    pub(super) fn leave(&self, visitor: &Visitor) {
        let mut state = self.lock();
        if let Some(group) = state.group(visitor) {
            group.count -= 1;
        }
        state.by_semaphore.retain(|group| group.count > 0);
    }

    /// Returns whether the visits are to go on.
    pub(super) fn are_there(&self) -> bool {
        let mut state = self.lock();
        state.is_visited = !state.by_semaphore.is_empty();
        state.is_visited
    }

    /// Has one of the semaphores visit the connection, if any still visits.
    pub(super) fn seek_visitor(&self, connection: &Weak<dyn Visited>) {
        loop {
            let mut state = self.lock();
            let next = state.by_semaphore.iter().find(|group| !group.is_over);
            let next = next.map(|group| group.visitor.clone());
            state.is_visited = next.is_some();
            drop(state);
            let Some(next) = next else { return };
            // Not under the lock: what the semaphore leaves out asks here.
            if next.visit(Weak::clone(connection)) {
                return;
            }
            if let Some(group) = self.lock().group(&next) {
                group.is_over = true;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn group(&mut self, visitor: &Visitor) -> Option<&mut Group> {
        self.by_semaphore.iter_mut().find(|group| group.visitor == *visitor)
    }
}
