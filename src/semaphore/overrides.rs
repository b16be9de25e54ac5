//! What operators set in place of policies, as this process knows it.
//!
//! One server keeps it. It is read when a connection to that server opens, when a message says that
//! something was set, and each second while this process uses any semaphore.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use super::servers::{REDIRECT_LOOP, REDIRECT_PAUSE};
use super::shared_session::SharedSession;
use super::tenants::{TenantOverride, limit_field, tenant_of_field, weight_field};
use crate::backend::Overrides;
use crate::error::BackendError;
use crate::name::Name;
use crate::protocol::id::PlaceId;
use crate::protocol::overrides::Override;
use crate::sync::{Mutex, lock};

/// What is known, and whether to ask again.
pub(super) struct OverrideCache {
    /// Where it is kept.
    key: Arc<str>,
    state: Mutex<State>,
    answered: Notify,
}

#[derive(Default)]
struct State {
    overrides: Overrides,
    /// Something is set for a tenant.
    has_tenants: bool,
    /// It was asked for, and there was an answer.
    was_read: bool,
    /// To be asked for.
    wanted: bool,
    /// A question is on its way. What is wanted meanwhile is asked for after it.
    asking: bool,
    /// How many questions were asked, and the last of them that was answered, with its error if it had
    /// one.
    asked: u64,
    answered: u64,
    /// The last of them whose answer the sessions go by.
    told: u64,
    error: Option<BackendError>,
    /// When another server was named as the one that keeps it.
    moved_at: Option<Instant>,
    /// Not to be asked for earlier than this.
    not_before: Option<Instant>,
    /// The last question failed: said once.
    failed: bool,
    /// Sessions that wait for an answer to a question asked from here on: places of theirs are gone,
    /// and may have been revoked.
    checking: Vec<Check>,
}

/// A session that waits for an answer, and the number of its question.
pub(super) type Check = (Arc<SharedSession>, u64);

/// What an answer brought.
#[derive(Default)]
pub(super) struct News {
    /// The names for which something else is set.
    pub(super) names: BTreeSet<Arc<str>>,
    /// Places that were revoked, and the names of their semaphores.
    pub(super) revoked: Vec<(PlaceId, Arc<str>)>,
}

impl OverrideCache {
    pub(super) fn new(key: Arc<str>) -> Self {
        Self { key, state: Mutex::default(), answered: Notify::new() }
    }

    pub(super) const fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// What operators set for a name, as far as that is known here.
    pub(super) fn of(&self, name: &str) -> Override {
        lock(&self.state).overrides.of(name)
    }

    /// What operators set for a tenant of a semaphore, as far as that is known here.
    pub(super) fn of_tenant(&self, name: &Name, tenant: &Name) -> TenantOverride {
        let state = lock(&self.state);
        if !state.has_tenants {
            return TenantOverride::default();
        }
        let set = |field: String| state.overrides.of(&field).limit;
        TenantOverride {
            limit: set(limit_field(name, tenant)),
            weight: set(weight_field(name, tenant)),
        }
    }

    /// All of it, by semaphore and tenant.
    pub(super) fn of_tenants(&self) -> Vec<(Name, Name, TenantOverride)> {
        let fields: Vec<_> = lock(&self.state).overrides.names.keys().cloned().collect();
        let mut of: Vec<_> = fields.iter().filter_map(|field| tenant_of_field(field)).collect();
        of.sort_by(|a, b| (a.0.as_str(), a.1.as_str()).cmp(&(b.0.as_str(), b.1.as_str())));
        of.dedup();
        let set = |(name, tenant): (Name, Name)| {
            let set = self.of_tenant(&name, &tenant);
            (name, tenant, set)
        };
        of.into_iter().map(set).collect()
    }

    /// All names for which operators set something, as far as that is known here.
    pub(super) fn all(&self) -> Vec<(Arc<str>, Override)> {
        let state = lock(&self.state);
        let all = state.overrides.names.iter();
        all.map(|(name, set)| (Arc::clone(name), *set)).collect()
    }

    /// The places of a name that operators revoked, as far as that is known here.
    pub(super) fn revoked_of(&self, name: &str) -> Vec<PlaceId> {
        let state = lock(&self.state);
        let revoked = state.overrides.revoked.keys().filter(|(_, of)| **of == *name);
        revoked.map(|(id, _)| *id).collect()
    }

    pub(super) fn version(&self) -> u64 {
        lock(&self.state).overrides.version
    }

    pub(super) fn was_read(&self) -> bool {
        lock(&self.state).was_read
    }

    pub(super) fn want(&self) {
        lock(&self.state).wanted = true;
    }

    /// The same, for a caller that waits: its question is the one of this number.
    pub(super) fn want_answer(&self) -> u64 {
        let mut state = lock(&self.state);
        state.wanted = true;
        state.asked + 1
    }

    /// What came of a question, or of a later one.
    pub(super) fn outcome(&self, question: u64) -> Option<Result<(), BackendError>> {
        let state = lock(&self.state);
        (state.told >= question).then(|| state.error.clone().map_or(Ok(()), Err))
    }

    /// Ready when a question is answered from here on.
    pub(super) fn changed(&self) -> Notified<'_> {
        self.answered.notified()
    }

    /// The same, for a session that found places gone.
    pub(super) fn check_revocations(&self, shared: &Arc<SharedSession>, question: u64) {
        let mut state = lock(&self.state);
        state.wanted = true;
        state.checking.push((Arc::clone(shared), question));
    }

    /// When to ask, if that is wanted and was not done.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let state = lock(&self.state);
        (state.wanted && !state.asking).then(|| state.not_before.map_or(now, |at| at.max(now)))
    }

    /// A question goes out now. Gives its number, and the sessions that wait for its answer.
    pub(super) fn begin(&self) -> (u64, Vec<Check>) {
        let mut state = lock(&self.state);
        state.wanted = false;
        state.not_before = None;
        state.asking = true;
        state.asked += 1;
        (state.asked, std::mem::take(&mut state.checking))
    }

    /// A question is over, without an answer: its sessions wait for the next one.
    pub(super) fn ended(&self, question: u64, checking: Vec<Check>) {
        let mut state = lock(&self.state);
        state.asking &= question < state.asked;
        state.wanted |= !checking.is_empty();
        state.checking.extend(checking);
    }

    /// The same, because another server keeps it: that one is to be asked, at once or, if servers name
    /// each other, after a moment.
    pub(super) fn moved(&self, question: u64, checking: Vec<Check>, now: Instant) {
        let mut state = lock(&self.state);
        let before = state.moved_at.replace(now);
        state.asking &= question < state.asked;
        state.wanted = true;
        state.not_before =
            before.filter(|at| now <= *at + REDIRECT_LOOP).map(|_| now + REDIRECT_PAUSE);
        state.checking.extend(checking);
    }

    /// The server that keeps it is away: sessions that wait go by what is known.
    pub(super) fn take_checking(&self) -> Vec<Check> {
        std::mem::take(&mut lock(&self.state).checking)
    }

    /// Takes in the answer to a question, unless a later question was answered before. What it brings is for
    /// the sessions; then comes [`told`](Self::told).
    pub(super) fn answered(
        &self,
        question: u64,
        answer: Result<Option<Overrides>, BackendError>,
    ) -> News {
        let mut state = lock(&self.state);
        // Where another server comes to keep it, two questions can be on their way.
        if question <= state.answered {
            return News::default();
        }
        state.asking &= question < state.asked;
        state.was_read = true;
        state.answered = question;
        state.error = answer.as_ref().err().cloned();
        let (mut news, mut failed) = (News::default(), None);
        match answer {
            Ok(None) => state.failed = false,
            Ok(Some(new)) => {
                state.has_tenants = new.names.keys().any(|name| name.contains('@'));
                let old = std::mem::replace(&mut state.overrides, new);
                let new = &state.overrides;
                let names = old.names.keys().chain(new.names.keys());
                news.names.extend(names.filter(|name| old.of(name) != new.of(name)).cloned());
                let revoked =
                    new.revoked.iter().filter(|(place, end)| old.revoked.get(place) != Some(end));
                news.revoked.extend(revoked.map(|(place, _)| place.clone()));
                news.revoked.sort_unstable();
                state.failed = false;
            }
            Err(error) => {
                failed = Some(error).filter(|_| !std::mem::replace(&mut state.failed, true))
            }
        }
        drop(state);
        if let Some(error) = failed {
            tracing::warn!(target: "tower_semaphore", %error, "what operators set cannot be read, so policies alone count");
        }
        news
    }

    /// The sessions go by the answer to this question: its callers may go on.
    pub(super) fn told(&self, question: u64) {
        let mut state = lock(&self.state);
        state.told = state.told.max(question);
        drop(state);
        self.answered.notify_waiters();
    }
}
