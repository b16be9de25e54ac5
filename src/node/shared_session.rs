//! A session behind its lock, with the wakers of the tasks that wait for its events.

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
use crate::further::LimitNames;
use crate::metrics::requests::Meter;
use crate::protocol::session::{Event, Session, Urgency};
use crate::protocol::{Adaptive, SentUnder, Time};
use crate::sync::{Mutex, MutexGuard, lock};
use crate::tenants::TenantNames;

/// The session of one semaphore in this process.
pub(crate) struct SharedSession {
    name: Arc<str>,
    /// See [`Backend::key`](crate::backend::Backend::key).
    key: Arc<str>,
    /// The ledger, if the backend is embedded.
    counter: Option<Arc<dyn Counter>>,
    state: Mutex<SessionState>,
}

pub(crate) struct SessionState {
    pub(crate) session: Session,
    /// The record of each place, by index.
    records: Vec<PlaceRecord>,
    /// The server that counts it, and how often it has moved. A reply from an earlier stay is ignored, because
    /// everything has been requested again since.
    pub(crate) server: Arc<Server<Arc<SharedSession>>>,
    pub(crate) stay: u64,
    pub(crate) moved_at: Option<Time>,
    /// Nothing is sent before this time.
    pub(crate) held_until: Option<Time>,
    /// The classes of its server's outbox that it is in.
    pub(crate) queued: Queued,
    /// A thread is carrying out its calls. Only used with the embedded backend.
    pub(crate) is_busy: bool,
    /// The timer at which the watchdog handles it, and when that goes off.
    timer: Option<(Timer, Time)>,
    /// It was removed from the registry; get another one.
    pub(crate) is_retired: bool,
    /// It moved to its server while that had no connection, so the server's earlier data does not include it.
    pub(crate) is_new_here: bool,
    pub(crate) tenants: TenantNames,
    pub(crate) limits: LimitNames,
    /// The number of tenants that waited, as the metrics show it.
    lines: usize,
    /// The meter that shows the limit, if that finds itself.
    pub(crate) adaptive_meter: Option<Meter>,
}

/// The classes of an outbox that a session is in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Queued {
    /// `Now` if a request waits for a call, `Later` if none does.
    serve: Option<Urgency>,
    keep_alive: bool,
}

impl Queued {
    /// Notes that the session was taken out for this purpose. Returns whether it was in.
    pub(crate) fn take(&mut self, purpose: Purpose) -> bool {
        match purpose {
            Purpose::KeepAlive => std::mem::take(&mut self.keep_alive),
            Purpose::Serve => self.serve.take().is_some(),
        }
    }

    /// Returns whether it is in any class.
    #[cfg(all(test, shuttle))]
    pub(crate) const fn is_any(self) -> bool {
        self.keep_alive || self.serve.is_some()
    }
}

/// The handles on a place, and the tasks that wait for it.
#[derive(Default)]
struct PlaceRecord {
    /// The number of handles: the request, or the clones of its permit.
    handles: usize,
    waker: Option<Waker>,
    /// The wakers to call when the permit is lost, and the number of the last listener.
    lost_wakers: LostWakers,
    listeners: u32,
    /// Why the backend did not answer.
    error: Option<BackendError>,
    /// The meter that counts a loss of the permit.
    meter: Option<Meter>,
    /// The range of the limit, and what its request was sent under, of the last request whose limit finds itself.
    sent: Option<Box<(Adaptive, SentUnder)>>,
}

/// The number of spare records that are kept for later requests.
const RECORDS_SPARE: usize = 16;

/// Wakers by listener, which is the number of a handle or a future. Rarely more than one.
type LostWakers = SmallVec<[(u32, Waker); 1]>;

/// Tasks to wake once the lock is released.
#[derive(Default)]
pub(crate) struct Woken(SmallVec<[Waker; 2]>);

/// Wakers that are not needed any more. They must not be dropped under a lock: dropping a waker can drop a task, which
/// may own a permit of the same session.
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
            limits: LimitNames::default(),
            lines: 0,
            adaptive_meter: None,
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
    /// Puts the session into each class of its server's outbox for which it has something to send.
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

    /// From now on requests come whose limit finds itself within this range, or does not. Returns the limit, and this
    /// meter, which is to show it once the lock is released; `None`: it is shown already, or there is none.
    #[cold]
    pub(crate) fn adapt_within(
        &mut self,
        range: Option<Adaptive>,
        meter: Option<Meter>,
        now: Time,
    ) -> Option<(Meter, u32)> {
        if self.session.adaptive() == range && self.adaptive_meter.is_some() == range.is_some() {
            return None;
        }
        self.session.handle_adaptive(range, now);
        self.adaptive_meter = meter.filter(|_| range.is_some());
        self.adaptive_meter.clone().zip(self.session.adapted_limit())
    }

    /// Returns a meter of the requests that there are, or of the last one whose limit found itself.
    pub(crate) fn any_meter(&self) -> Option<Meter> {
        let of_requests = || self.records.iter().find_map(|record| record.meter.clone());
        self.adaptive_meter.clone().or_else(of_requests)
    }

    /// The request of a place goes on, and its limit finds itself.
    pub(crate) fn note_sent(&mut self, index: usize) {
        let (range, sent) = (self.session.adaptive(), self.session.sent_under());
        if let Some(record) = self.records.get_mut(index) {
            record.sent = range.map(|range| Box::new((range, sent)));
        }
    }

    /// Returns the range of the limit of a request that goes on, and what it was sent under.
    pub(crate) fn sent(&self, index: usize) -> Option<(Adaptive, SentUnder)> {
        self.records.get(index)?.sent.as_deref().copied()
    }

    /// Begins the record of the place at `index`, for its first handle.
    pub(crate) fn begin(&mut self, index: usize, meter: Meter) {
        if self.records.len() <= index {
            self.records.resize_with(index + 1, PlaceRecord::default);
        }
        // Not the whole record: a request that was answered at once has its error in it already.
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
        // Field by field: most are empty already, and the whole record is large to move.
        (record.listeners, record.error) = (0, None);
        record.meter = None;
        let mut abandoned = Abandoned { _waker: record.waker.take(), ..Abandoned::default() };
        if !record.lost_wakers.is_empty() {
            abandoned._lost = Some(std::mem::take(&mut record.lost_wakers));
        }
        (true, abandoned)
    }

    /// Adds a listener for the loss of the permit. Returns its number.
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

    /// Returns when the watchdog has to handle the session, if its timer would go off later.
    pub(crate) fn due_before_timer(&self) -> Option<Time> {
        let due = self.session.poll_timeout()?;
        self.timer.is_none_or(|(_, at)| due < at).then_some(due)
    }

    /// Sets its timer. Returns the previous one.
    pub(crate) fn set_timer(&mut self, timer: Timer, at: Time) -> Option<Timer> {
        self.timer.replace((timer, at)).map(|(before, _)| before)
    }

    pub(crate) fn take_timer(&mut self) -> Option<Timer> {
        self.timer.take().map(|(timer, _)| timer)
    }

    /// Forgets the timer that has gone off, unless a later one was set.
    pub(crate) fn on_timer(&mut self, timer: Timer) {
        self.timer = self.timer.filter(|(last, _)| *last != timer);
    }

    /// Frees the memory of records that a burst of requests left.
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

    /// Has `waker` woken at the next event of the place. Returns the previous waker.
    pub(crate) fn wait(&mut self, index: usize, waker: &Waker) -> Abandoned {
        let mut abandoned = Abandoned::default();
        if let Some(record) = self.records.get_mut(index)
            && !record.waker.as_ref().is_some_and(|known| known.will_wake(waker))
        {
            abandoned._waker = record.waker.replace(waker.clone());
        }
        abandoned
    }

    /// Has `waker` woken when the permit is lost. Returns the listener's previous waker.
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

    /// Takes the events of the session. Failed requests get `error` or, without one, the reason for the outage.
    pub(crate) fn take_events(
        &mut self,
        name: &str,
        error: Option<&BackendError>,
        counts: &Counts,
    ) -> Woken {
        let mut woken = Woken::default();
        let lines = self.session.lines();
        if lines != self.lines {
            counts.meter.on_lines_changed(self.lines, lines);
            self.lines = lines;
        }
        let passed_on = self.session.take_passed_on();
        if passed_on > 0 {
            counts.meter.on_passed_on(passed_on);
        }
        if !self.session.has_events() {
            return woken;
        }
        let events = self.session.take_events();
        let down = if error.is_none() { self.server.down() } else { None };
        let error = error.or(down.as_ref());
        let overtakes = self.session.take_overtakes();
        if overtakes > 0 {
            counts.meter.on_overtaking(overtakes);
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
                Event::Admitted(_) => counts.on_admitted(),
                Event::Failed(_) | Event::Refused(_) => counts.on_refused(),
                Event::Lost(_) => {
                    counts.on_lost(record.meter.take());
                    counts.tallies.on_lost(name);
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
