//! The overrides, as this process knows them.
//!
//! One server keeps them, the pauses until a time, and the adaptive limits. A process reads them when a connection to that server opens,
//! when a message announces a change, and, in case a message is lost, each second in which it uses any semaphore. A
//! reading has all of them, and upstreams can change them at any rate, so messages are answered by one reading at once,
//! and by at most one each [`ANNOUNCED_INTERVAL`] where they come thick.

pub(crate) mod adapting;
mod adaptive;
pub(crate) mod pauses;
mod recording;
pub(crate) mod refresh;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use self::adaptive::Adaptations;
use self::pauses::{Pauses, Reading};
use crate::backend::Overrides;
use crate::error::BackendError;
use crate::further::{FurtherLimitOverride, cap_field, limit_of_field};
use crate::name::Name;
use crate::node::server::servers::{REDIRECT_LOOP, REDIRECT_PAUSE};
use crate::node::shared_session::SharedSession;
use crate::protocol::session::Session;
use crate::protocol::{Override, PlaceId, Time};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Mutex, lock};
use crate::tenants::{TenantOverride, limit_field, tenant_of_field, weight_field};

/// The shortest time between two questions that messages ask for.
const ANNOUNCED_INTERVAL: Duration = Duration::from_millis(100);

/// The known overrides, and the state of the questions for newer ones.
pub(crate) struct OverrideCache {
    /// The key under which the server keeps them.
    key: Arc<str>,
    state: Mutex<Known>,
    /// Whether any tenant or further limit has an override. Usually none has, and their requests then need no lock.
    has_parts: AtomicBool,
    /// Whether a record is to be sent: of a pause, or of an adaptive limit.
    has_unsent: AtomicBool,
    answered: Notify,
}

#[derive(Default)]
struct Known {
    overrides: Overrides,
    pauses: Pauses,
    adaptations: Adaptations,
    /// A question is to be asked at once.
    wanted: bool,
    /// A question is to be asked because a message announced a change, but not earlier than this.
    announced: bool,
    announced_not_before: Option<Instant>,
    /// A question is unanswered. The next one waits for it.
    asking: bool,
    /// The number of the last question, and of the last one that was answered.
    asked: u64,
    answered: u64,
    /// The number of the last question whose answer the sessions have applied, and its error.
    applied: u64,
    error: Option<BackendError>,
    /// When a server last answered that another one keeps the overrides.
    moved_at: Option<Instant>,
    /// The next question is not asked earlier than this.
    not_before: Option<Instant>,
    /// The last question failed. Only the first of several failures is logged.
    failed: bool,
    /// A question was answered with the overrides, which stay in force while later ones fail.
    has_read: bool,
    /// Sessions that wait for the answer to the next question: places of theirs are gone, and may have been revoked.
    /// Only a question that is asked after a place was found gone cannot miss the record of its revocation.
    checking: Vec<Check>,
}

/// A session that waits for an answer, and its own number of the check.
pub(crate) type Check = (Arc<SharedSession>, u64);

/// The changes in an answer.
#[derive(Default)]
pub(crate) struct News {
    /// The names whose overrides or pauses changed.
    pub(crate) names: BTreeSet<Arc<str>>,
    /// The places that were revoked, and the names of their semaphores.
    pub(crate) revoked: Vec<(PlaceId, Arc<str>)>,
}

impl OverrideCache {
    pub(crate) fn new(key: Arc<str>) -> Self {
        Self {
            key,
            state: Mutex::default(),
            has_parts: AtomicBool::new(false),
            has_unsent: AtomicBool::new(false),
            answered: Notify::new(),
        }
    }

    pub(crate) const fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// Returns the known override of a name.
    pub(crate) fn of(&self, name: &str) -> Override {
        lock(&self.state).overrides.of(name)
    }

    /// Tells a session what is known.
    pub(crate) fn apply(&self, name: &str, session: &mut Session, now: Time) {
        let (set, paused_until, adapted) = {
            let state = lock(&self.state);
            let adapted = state.adaptations.of(name, now);
            (state.overrides.of(name), state.pauses.end_of(name), adapted)
        };
        session.handle_override(set, now);
        session.handle_pause(paused_until, now);
        session.handle_adapted(adapted, now);
    }

    /// Returns the known override of a tenant.
    pub(crate) fn of_tenant(&self, name: &Name, tenant: &Name) -> TenantOverride {
        if !self.has_parts.load(Ordering::Acquire) {
            return TenantOverride::default();
        }
        let state = lock(&self.state);
        let value = |field: String| state.overrides.of(&field).limit;
        TenantOverride {
            limit: value(limit_field(name, tenant)),
            weight: value(weight_field(name, tenant)),
        }
    }

    /// Returns the known overrides of all tenants, by semaphore and tenant.
    pub(crate) fn of_tenants(&self) -> Vec<(Name, Name, TenantOverride)> {
        let fields: Vec<_> = lock(&self.state).overrides.names.keys().cloned().collect();
        let mut tenants: Vec<_> =
            fields.iter().filter_map(|field| tenant_of_field(field)).collect();
        tenants.sort_by(|a, b| (a.0.as_str(), a.1.as_str()).cmp(&(b.0.as_str(), b.1.as_str())));
        // A limit and a weight are two fields of one tenant.
        tenants.dedup();
        let with_override = |(name, tenant): (Name, Name)| {
            let of_tenant = self.of_tenant(&name, &tenant);
            (name, tenant, of_tenant)
        };
        tenants.into_iter().map(with_override).collect()
    }

    /// Returns the known cap of a further limit in place of what requests ask for.
    pub(crate) fn cap_of(&self, name: &Name, limit: &Name, value: &Name) -> Option<u32> {
        if !self.has_parts.load(Ordering::Acquire) {
            return None;
        }
        lock(&self.state).overrides.of(&cap_field(name, limit, value)).limit
    }

    /// Returns the known overrides of all further limits, by semaphore, limit and value.
    pub(crate) fn of_further_limits(&self) -> Vec<FurtherLimitOverride> {
        let state = lock(&self.state);
        let limits = state.overrides.names.iter().filter_map(|(field, set)| {
            let ([semaphore, limit, value], cap) = (limit_of_field(field)?, set.limit?);
            Some(FurtherLimitOverride { semaphore, limit, value, cap })
        });
        let mut limits: Vec<_> = limits.collect();
        let key = |of: &FurtherLimitOverride| {
            [&of.semaphore, &of.limit, &of.value].map(|name| name.as_str().to_owned())
        };
        limits.sort_by_cached_key(key);
        limits
    }

    /// Returns all known overrides of names.
    pub(crate) fn all(&self) -> Vec<(Arc<str>, Override)> {
        let state = lock(&self.state);
        let overrides = &state.overrides;
        let of_rates = overrides.rates.keys().filter(|name| !overrides.names.contains_key(*name));
        let all = overrides.names.keys().chain(of_rates);
        all.map(|name| (Arc::clone(name), overrides.of(name))).collect()
    }

    /// Returns the places of a name that are known to be revoked.
    pub(crate) fn revoked_of(&self, name: &str) -> Vec<PlaceId> {
        let state = lock(&self.state);
        let revoked = state.overrides.revoked.keys().filter(|(_, of)| **of == *name);
        revoked.map(|(id, _)| *id).collect()
    }

    /// Returns the version that is known as a whole. None is while a message has brought something that no reading has.
    pub(crate) fn version(&self) -> u64 {
        let state = lock(&self.state);
        if state.adaptations.is_unread() { u64::MAX } else { state.overrides.version }
    }

    pub(crate) fn want(&self) {
        lock(&self.state).wanted = true;
    }

    /// Notes that a message announced a change.
    pub(crate) fn on_announced(&self) {
        lock(&self.state).announced = true;
    }

    /// Requests an answer for a caller that waits. Returns the number of its question.
    pub(crate) fn want_answer(&self) -> u64 {
        let mut state = lock(&self.state);
        state.wanted = true;
        state.asked + 1
    }

    /// Returns the outcome of a question, or of a later one.
    pub(crate) fn outcome(&self, question: u64) -> Option<Result<(), BackendError>> {
        let state = lock(&self.state);
        (state.applied >= question).then(|| state.error.clone().map_or(Ok(()), Err))
    }

    /// Waits until the next answer has been applied.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.answered.notified()
    }

    /// Requests an answer for a session that found places gone.
    pub(crate) fn check_revocations(&self, shared: &Arc<SharedSession>, question: u64) {
        let mut state = lock(&self.state);
        state.wanted = true;
        state.checking.push((Arc::clone(shared), question));
    }

    /// Returns when to ask the next question, if one is wanted and none is unanswered.
    pub(crate) fn due(&self, now: Instant) -> Option<Instant> {
        let state = lock(&self.state);
        if state.asking || !(state.wanted || state.announced) {
            return None;
        }
        let paced = state.announced_not_before.filter(|_| !state.wanted);
        [Some(now), state.not_before, paced].into_iter().flatten().max()
    }

    /// Begins a question. Returns its number, and the sessions that wait for its answer.
    pub(crate) fn begin(&self, now: Instant) -> (u64, Vec<Check>) {
        let mut state = lock(&self.state);
        state.wanted = false;
        if std::mem::take(&mut state.announced) {
            state.announced_not_before = Some(now + ANNOUNCED_INTERVAL);
        }
        state.not_before = None;
        state.asking = true;
        state.asked += 1;
        (state.asked, std::mem::take(&mut state.checking))
    }

    /// Ends a question without an answer. The next one is asked at once, and answers everything that waits for this one.
    pub(crate) fn abandon(&self, question: u64, checking: Vec<Check>) {
        let mut state = lock(&self.state);
        state.asking &= question < state.asked;
        state.wanted = true;
        state.checking.extend(checking);
    }

    /// Ends a question because another server keeps the overrides. That server is asked at once or, if servers redirect
    /// to each other, after a pause.
    pub(crate) fn redirect(&self, question: u64, checking: Vec<Check>, now: Instant) {
        let mut state = lock(&self.state);
        let before = state.moved_at.replace(now);
        state.asking &= question < state.asked;
        state.wanted = true;
        state.not_before =
            before.filter(|at| now <= *at + REDIRECT_LOOP).map(|_| now + REDIRECT_PAUSE);
        state.checking.extend(checking);
    }

    /// Takes the sessions that wait for an answer. In an outage of the server that keeps the overrides they go on with
    /// what is known.
    pub(crate) fn take_checking(&self) -> Vec<Check> {
        std::mem::take(&mut lock(&self.state).checking)
    }

    /// Takes in the answer to a question, unless a later question was answered before. Returns the changes, which the
    /// sessions apply before [`set_applied`](Self::set_applied) is called.
    pub(crate) fn take_in(
        &self,
        question: u64,
        answer: Result<Option<Overrides>, BackendError>,
        spread: u16,
        now: Time,
    ) -> News {
        let mut state = lock(&self.state);
        // While the overrides move to another server, two questions can be unanswered.
        if question <= state.answered {
            return News::default();
        }
        state.asking &= question < state.asked;
        state.answered = question;
        state.error = answer.as_ref().err().cloned();
        let (mut news, mut failed) = (News::default(), None);
        match answer {
            Ok(None) => (state.failed, state.has_read) = (false, true),
            Ok(Some(new)) => {
                let has_parts = new.names.keys().any(|name| name.contains('@'));
                self.has_parts.store(has_parts, Ordering::Release);
                let old = std::mem::replace(&mut state.overrides, new);
                let Known { overrides: new, pauses, adaptations, .. } = &mut *state;
                let names = old.names.keys().chain(new.names.keys());
                let names = names.chain(old.rates.keys()).chain(new.rates.keys());
                news.names.extend(names.filter(|name| old.of(name) != new.of(name)).cloned());
                let reading = Reading { old: &old, new, question, now };
                pauses.take_in(&reading, &mut news.names);
                adaptations.take_in(&reading, spread, &mut news.names);
                let revoked =
                    new.revoked.iter().filter(|(place, end)| old.revoked.get(place) != Some(end));
                news.revoked.extend(revoked.map(|(place, _)| place.clone()));
                news.revoked.sort_unstable();
                (state.failed, state.has_read) = (false, true);
            }
            Err(error) => {
                failed = Some(error).filter(|_| !std::mem::replace(&mut state.failed, true))
            }
        }
        let has_read = state.has_read;
        state.pauses.forget_ended(now);
        state.adaptations.forget_ended(now);
        self.note_unsent(&state);
        drop(state);
        match failed {
            Some(error) if has_read => {
                tracing::warn!(target: "tower_semaphore", %error, "the overrides cannot be read; those that were read before stay in force");
            }
            Some(error) => {
                tracing::warn!(target: "tower_semaphore", %error, "the overrides cannot be read; only policies apply");
            }
            None => {}
        }
        news
    }

    /// Call it under the lock of the state, after each change of what is to be sent.
    fn note_unsent(&self, state: &Known) {
        let has_unsent = state.pauses.has_unsent() || state.adaptations.has_unsent();
        self.has_unsent.store(has_unsent, Ordering::Release);
    }

    /// Notes that the sessions have applied the answer to this question, and wakes its callers.
    pub(crate) fn set_applied(&self, question: u64) {
        let mut state = lock(&self.state);
        state.applied = state.applied.max(question);
        drop(state);
        self.answered.notify_waiters();
    }
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    fn at(cache: &OverrideCache, now: Instant) -> Option<Duration> {
        cache.due(now).map(|due| due - now)
    }

    /// Asks and answers a question.
    fn ask(cache: &OverrideCache, now: Instant) {
        let (question, _) = cache.begin(now);
        assert_eq!(at(cache, now), None);
        cache.take_in(question, Ok(None), 0, Time::ZERO);
        cache.set_applied(question);
    }

    #[tokio::test]
    async fn messages_that_come_thick_are_answered_together() {
        let (cache, start) = (OverrideCache::new("!overrides".into()), Instant::now());
        assert_eq!(at(&cache, start), None);
        cache.on_announced();
        assert_eq!(at(&cache, start), Some(Duration::ZERO), "the first, at once");
        ask(&cache, start);
        assert_eq!(at(&cache, start), None);

        let soon = start + ANNOUNCED_INTERVAL / 4;
        cache.on_announced();
        cache.on_announced();
        assert_eq!(at(&cache, soon), Some(ANNOUNCED_INTERVAL * 3 / 4));
        let later = start + ANNOUNCED_INTERVAL;
        assert_eq!(at(&cache, later), Some(Duration::ZERO));
        // One that comes while a question is unanswered has another one.
        let (question, _) = cache.begin(later);
        cache.on_announced();
        cache.take_in(question, Ok(None), 0, Time::ZERO);
        assert_eq!(at(&cache, later), Some(ANNOUNCED_INTERVAL));
        ask(&cache, later + ANNOUNCED_INTERVAL);
        cache.on_announced();
        assert_eq!(at(&cache, start + 3 * ANNOUNCED_INTERVAL), Some(Duration::ZERO));
    }

    #[tokio::test]
    async fn messages_delay_nobody_who_waits_for_an_answer() {
        let (cache, start) = (OverrideCache::new("!overrides".into()), Instant::now());
        cache.on_announced();
        ask(&cache, start);
        cache.on_announced();
        let question = cache.want_answer();
        assert_eq!(at(&cache, start), Some(Duration::ZERO));
        ask(&cache, start);
        assert!(cache.outcome(question).is_some());
        assert_eq!(at(&cache, start), None, "the answer has what was announced");
        // The timer's question is no reason to let the next message wait.
        let later = start + 2 * ANNOUNCED_INTERVAL;
        cache.want();
        ask(&cache, later);
        cache.on_announced();
        assert_eq!(at(&cache, later), Some(Duration::ZERO));
    }
}
