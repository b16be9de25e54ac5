//! A session behind its lock, with the tasks that wait for its events.

use std::fmt;
use std::sync::Arc;
use std::task::Waker;

use smallvec::SmallVec;

use super::health::Counts;
use super::server::Server;
use super::server::outbox::Purpose;
use super::timers::Timer;
use crate::backend::Counter;
use crate::error::BackendError;
use crate::metrics::requests::Meter;
use crate::protocol::Time;
use crate::protocol::session::{Event, Session, Urgency};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::tenants::TenantNames;

/// One process's record of one semaphore.
pub(crate) struct SharedSession {
    name: Arc<str>,
    /// See [`Backend::key`](crate::backend::Backend::key).
    key: Arc<str>,
    /// Counts it, where the backend is in this process.
    counter: Option<Arc<dyn Counter>>,
    state: Mutex<SessionState>,
}

pub(crate) struct SessionState {
    pub(crate) session: Session,
    /// The record of each place, by index.
    records: Vec<PlaceRecord>,
    /// The server that counts it, and how often it has moved. A reply from an earlier stay is ignored: everything
    /// has been asked for again since.
    pub(crate) server: Arc<Server<Arc<SharedSession>>>,
    pub(crate) stay: u64,
    pub(crate) moved_at: Option<Time>,
    /// Nothing is to be sent until then.
    pub(crate) held_until: Option<Time>,
    /// For what it is in the outbox of its server.
    pub(crate) queued: Queued,
    /// A thread carries out its calls, where the backend is embedded.
    pub(crate) is_busy: bool,
    /// When the watchdog handles it, and that moment as the session counts it.
    timer: Option<(Timer, Time)>,
    /// It was removed from the registry; get another one.
    pub(crate) is_retired: bool,
    /// It moved to its server while that had no connection: the data of the server before that means nothing to it.
    pub(crate) is_new_here: bool,
    pub(crate) tenants: TenantNames,
    /// How many tenants waited at the last count.
    lines: usize,
}

/// For what a session is in an outbox.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Queued {
    /// For what a request waits for, or for what has time.
    serve: Option<Urgency>,
    keep_alive: bool,
}

impl Queued {
    /// Notes that it was taken out for this purpose. Returns whether it was in.
    pub(crate) fn take(&mut self, purpose: Purpose) -> bool {
        match purpose {
            Purpose::KeepAlive => std::mem::take(&mut self.keep_alive),
            Purpose::Serve => self.serve.take().is_some(),
        }
    }

    /// Whether it is in for some purpose.
    #[cfg(all(test, shuttle))]
    pub(crate) const fn is_any(self) -> bool {
        self.keep_alive || self.serve.is_some()
    }
}

/// The handles on a place, and the tasks that wait for it.
#[derive(Default)]
struct PlaceRecord {
    /// The request, then the clones of its permit.
    handles: usize,
    waker: Option<Waker>,
    /// The wakers of those that wait for a loss, rarely more than one, and the number of the last listener.
    lost_wakers: LostWakers,
    listeners: u32,
    /// Why the backend did not answer.
    error: Option<BackendError>,
    /// What counts it, should its permit be lost.
    meter: Option<Meter>,
}

/// How many spare records are kept for the next requests.
const RECORDS_SPARE: usize = 16;

/// Wakers by listener: the number of a handle or a future.
type LostWakers = SmallVec<[(u32, Waker); 1]>;

/// Tasks to wake once the lock is released; rarely more than one.
#[derive(Default)]
pub(crate) struct Woken(SmallVec<[Waker; 2]>);

/// Wakers that are not needed any more. They are dropped under no lock: a waker can drop a task, and that another
/// permit.
#[derive(Default)]
#[must_use = "dropped where the lock is held, it may wait for that lock"]
pub(crate) struct Abandoned {
    _waker: Option<Waker>,
    _lost: Option<LostWakers>,
}

impl SharedSession {
    pub(crate) fn new(
        name: Arc<str>,
        key: Arc<str>,
        counter: Option<Arc<dyn Counter>>,
        session: Session,
        server: Arc<Server<Arc<Self>>>,
    ) -> Self {
        let state = SessionState {
            session,
            records: Vec::new(),
            server,
            stay: 0,
            moved_at: None,
            held_until: None,
            queued: Queued::default(),
            is_busy: false,
            timer: None,
            is_retired: false,
            is_new_here: false,
            tenants: TenantNames::default(),
            lines: 0,
        };
        Self { name, key, counter, state: Mutex::new(state) }
    }

    pub(crate) const fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) const fn key(&self) -> &Arc<str> {
        &self.key
    }

    pub(crate) fn counter(&self) -> Option<&dyn Counter> {
        self.counter.as_deref()
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, SessionState> {
        lock(&self.state)
    }
}

impl SessionState {
    /// Puts it into the outbox of its server for what it has to send, unless it is there for that.
    pub(crate) fn enqueue(&mut self, shared: &Arc<SharedSession>) {
        let Self { session, queued, server, .. } = self;
        if queued.serve != Some(Urgency::Now) {
            let urgency = if session.is_awaited() {
                Some(Urgency::Now)
            } else {
                (queued.serve.is_none() && session.may_audit()).then_some(Urgency::Later)
            };
            if let Some(urgency) = urgency {
                queued.serve = Some(urgency);
                server.outbox.push(Arc::clone(shared), urgency);
            }
        }
        if !queued.keep_alive
            && let Some(at) = session.keeps_alive()
        {
            queued.keep_alive = true;
            server.outbox.push(Arc::clone(shared), Urgency::Before(at));
        }
    }

    /// Notes that a request took the place at `index`.
    pub(crate) fn begin(&mut self, index: usize, meter: Meter) {
        if self.records.len() <= index {
            self.records.resize_with(index + 1, PlaceRecord::default);
        }
        // A request that was answered at once has its outcome already.
        let record = &mut self.records[index];
        (record.handles, record.meter) = (1, Some(meter));
    }

    /// Adds a handle to a place. Returns its listener number; that of the first handle is 0.
    pub(crate) fn share(&mut self, index: usize) -> u32 {
        if let Some(record) = self.records.get_mut(index) {
            record.handles += 1;
        }
        self.add_listener(index)
    }

    /// Returns whether there are several handles on a place.
    pub(crate) fn is_shared(&self, index: usize) -> bool {
        self.records.get(index).is_some_and(|record| record.handles > 1)
    }

    /// Removes a handle. Returns whether it was the last one.
    pub(crate) fn end(&mut self, index: usize, listener: u32) -> (bool, Abandoned) {
        let Some(record) = self.records.get_mut(index) else { return Default::default() };
        record.handles = record.handles.saturating_sub(1);
        if record.handles > 0 {
            return (false, self.remove_listener(index, listener));
        }
        // Piece by piece: most have nothing of it, and the whole is large.
        (record.listeners, record.error) = (0, None);
        record.meter = None;
        let mut abandoned = Abandoned { _waker: record.waker.take(), ..Abandoned::default() };
        if !record.lost_wakers.is_empty() {
            abandoned._lost = Some(std::mem::take(&mut record.lost_wakers));
        }
        (true, abandoned)
    }

    /// Returns a number for one more listener for the loss of a permit.
    pub(crate) fn add_listener(&mut self, index: usize) -> u32 {
        let Some(record) = self.records.get_mut(index) else { return 0 };
        record.listeners = record.listeners.wrapping_add(1);
        record.listeners
    }

    /// Removes a listener.
    pub(crate) fn remove_listener(&mut self, index: usize, listener: u32) -> Abandoned {
        let mut abandoned = Abandoned::default();
        if let Some(record) = self.records.get_mut(index)
            && let Some(at) = record.lost_wakers.iter().position(|(of, _)| *of == listener)
        {
            abandoned._waker = Some(record.lost_wakers.swap_remove(at).1);
        }
        abandoned
    }

    /// Returns when the watchdog has to handle it, if its timer is not early enough for that.
    pub(crate) fn due_before_timer(&self) -> Option<Time> {
        let due = self.session.poll_timeout()?;
        self.timer.is_none_or(|(_, at)| due < at).then_some(due)
    }

    /// Sets its timer. Returns the one before.
    pub(crate) fn set_timer(&mut self, timer: Timer, at: Time) -> Option<Timer> {
        self.timer.replace((timer, at)).map(|(before, _)| before)
    }

    pub(crate) fn take_timer(&mut self) -> Option<Timer> {
        self.timer.take().map(|(timer, _)| timer)
    }

    /// Its timer has gone off, if this is it.
    pub(crate) fn timer_went_off(&mut self, timer: Timer) {
        self.timer = self.timer.filter(|(last, _)| *last != timer);
    }

    /// Frees the memory of requests that are gone, after a burst.
    pub(crate) fn trim(&mut self) {
        let bound = self.session.index_bound();
        if self.records.len() <= bound + RECORDS_SPARE {
            return;
        }
        self.records.truncate(bound);
        if self.records.capacity() > 4 * self.records.len() + 64 {
            self.records.shrink_to(2 * self.records.len());
        }
    }

    /// Wakes `waker` at the next event of the place. Returns the waker before, to be dropped under no lock.
    pub(crate) fn wait(&mut self, index: usize, waker: &Waker) -> Abandoned {
        let mut abandoned = Abandoned::default();
        if let Some(record) = self.records.get_mut(index)
            && !record.waker.as_ref().is_some_and(|known| known.will_wake(waker))
        {
            abandoned._waker = record.waker.replace(waker.clone());
        }
        abandoned
    }

    /// Wakes `waker` when the permit is lost. Returns the waker before, as [`wait`](Self::wait).
    pub(crate) fn wait_for_loss(
        &mut self,
        index: usize,
        listener: u32,
        waker: &Waker,
    ) -> Abandoned {
        let mut abandoned = Abandoned::default();
        if let Some(record) = self.records.get_mut(index) {
            match record.lost_wakers.iter_mut().find(|(of, _)| *of == listener) {
                Some((_, known)) if known.will_wake(waker) => {}
                Some((_, known)) => {
                    abandoned._waker = Some(std::mem::replace(known, waker.clone()));
                }
                None => record.lost_wakers.push((listener, waker.clone())),
            }
        }
        abandoned
    }

    /// Returns why the backend did not answer.
    pub(crate) fn error(&self, index: usize) -> BackendError {
        let error = self.records.get(index).and_then(|record| record.error.clone());
        error.unwrap_or_else(no_answer)
    }

    /// Takes the events of the session. Failures get `error`, or else the reason why the server is down.
    pub(crate) fn take_events(
        &mut self,
        name: &str,
        error: Option<&BackendError>,
        counts: &Counts,
    ) -> Woken {
        let mut woken = Woken::default();
        let lines = self.session.lines();
        if lines != self.lines {
            counts.meter.lines(self.lines, lines);
            self.lines = lines;
        }
        let passed_on = self.session.take_passed_on();
        if passed_on > 0 {
            counts.meter.passed_on(passed_on);
        }
        if !self.session.has_events() {
            return woken;
        }
        let events = self.session.take_events();
        let down = if error.is_none() { self.server.down() } else { None };
        let error = error.or(down.as_ref());
        let overtakes = self.session.take_overtakes();
        if overtakes > 0 {
            counts.meter.overtook(overtakes);
        }
        for event in events {
            let (Event::Progress(index)
            | Event::Admitted(index)
            | Event::Failed(index)
            | Event::Refused(index)
            | Event::Lost(index)
            | Event::Released(index)) = event;
            if self.records.len() <= index {
                self.records.resize_with(index + 1, PlaceRecord::default);
            }
            let record = &mut self.records[index];
            match event {
                Event::Admitted(_) => counts.admitted(),
                Event::Failed(_) | Event::Refused(_) => counts.refused(),
                Event::Lost(_) => {
                    counts.lost(record.meter.take());
                    counts.tallies.lost(name);
                    woken.0.extend(record.lost_wakers.drain(..).map(|(_, waker)| waker));
                }
                Event::Progress(_) | Event::Released(_) => {}
            }
            if matches!(event, Event::Failed(_) | Event::Released(_)) {
                record.error = error.cloned();
            }
            woken.0.extend(record.waker.take());
        }
        woken
    }
}

impl Woken {
    /// Wakes them. Must not be called under a lock.
    pub(crate) fn wake(self) {
        if !self.0.is_empty() {
            self.0.into_iter().for_each(Waker::wake);
        }
    }
}

pub(crate) fn no_answer() -> BackendError {
    BackendError::call("the backend did not answer in time")
}

impl fmt::Debug for SharedSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSession").field("name", &self.name).finish_non_exhaustive()
    }
}
