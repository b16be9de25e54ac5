//! What a process receives without a request: hints, news of overrides, and messages from other processes.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Node;
use super::peers::{PeerAnswer, process};
use super::tallies::Tally;
use crate::backend::{Mailbox, PeerMessage};
use crate::further::LimitNames;
use crate::protocol::session::Session;
use crate::protocol::{Adapted, Hint, Tenant, Time};

impl Mailbox for Node {
    fn hint(&self, name: &str, hint: Hint) {
        // A hint for a name that is not in use here needs a session that releases the place. Any client that may
        // publish can send one, so the number of sessions that hints create is limited.
        if self.sessions.get(name).is_some() || self.sessions.may_be_made_by_hint(Instant::now()) {
            self.with_session(name, self.now(), |state, time| {
                state.session.handle_hint(hint, time)
            });
        }
    }

    fn recall(&self, name: &str) {
        if let Some(shared) = self.sessions.get(name) {
            self.act(&shared, self.now(), Session::handle_recall);
        }
    }

    fn freed(&self, name: &str) {
        if let Some(shared) = self.sessions.get(name) {
            self.act(&shared, self.now(), |session, _| session.handle_freed());
        }
    }

    fn overridden(&self) {
        if self.embedded().is_some() {
            self.learn_now();
        } else {
            self.overrides.on_announced();
            self.ask_keeper();
        }
    }

    fn adapted(&self, name: &str, adapted: Adapted) {
        self.on_adapted(name, adapted);
    }

    fn warned(&self, warning: Option<&str>) {
        self.servers.all().iter().for_each(|server| server.set_warning(warning));
    }

    fn message(&self, name: &str, message: PeerMessage) {
        match message {
            PeerMessage::AskHeld { by } => {
                let now = self.now();
                let held = self
                    .read_session(name, |session| session.held_since(now, PeerMessage::HELD_MAX));
                if let Some((names, waiting)) = self.tenants_of(name, now) {
                    let tenants = PeerMessage::Tenants { by: self.id(), names, waiting };
                    self.send_message(name, by, tenants);
                }
                let limit = self.read_session(name, Session::policy_limit).flatten();
                let rate = self.read_session(name, Session::rate_in_force).flatten();
                let kept = self.read_session(name, Session::kept).unwrap_or_default() as u64;
                let Tally { refused, lost, .. } = self.counts.tallies.of(name);
                let by_this = self.id();
                let counted =
                    PeerMessage::Counted { by: by_this, limit, refused, lost, kept, rate };
                self.send_message(name, by, counted);
                let (held, process) = (held.unwrap_or_default(), Arc::clone(process()));
                self.send_message(name, by, PeerMessage::Held { by: self.id(), process, held });
            }
            PeerMessage::Held { by, process, held } => {
                let held = held.into_iter().map(|(n, ms)| (n, Duration::from_millis(ms)));
                let answer = PeerAnswer { process, held: held.collect(), ..PeerAnswer::default() };
                self.questions.on_answer(name, by, &answer);
            }
            PeerMessage::Tenants { by, names, waiting } => {
                let waiting = waiting.into_iter().map(|(n, ms)| (n, Duration::from_millis(ms)));
                self.questions.on_tenants(name, by, &names, &waiting.collect());
            }
            PeerMessage::Counted { by, limit, refused, lost, kept, rate } => {
                let tally = Some(Tally { refused, lost, ..Tally::default() });
                let counts = PeerAnswer { limit, rate, tally, kept, ..PeerAnswer::default() };
                self.questions.on_counts(name, by, &counts);
            }
        }
    }
}

impl Node {
    /// Reads what this process knows of the further limits and the budgets of a semaphore.
    pub(crate) fn read_limits(&self, name: &str, read: impl FnOnce(&LimitNames)) {
        if let Some(shared) = self.sessions.get(name) {
            read(&shared.lock().limits);
        }
    }

    /// Returns what this process knows of the tenants of a semaphore: their names, and how long each of its places has
    /// waited. `None` if it knows nothing.
    #[expect(clippy::type_complexity, reason = "as they stand in a message")]
    pub(crate) fn tenants_of(
        &self,
        name: &str,
        now: Time,
    ) -> Option<(Vec<(Tenant, Arc<str>)>, Vec<(u64, u64)>)> {
        const MOST: usize = PeerMessage::TENANTS_MAX;
        let shared = self.sessions.get(name)?;
        let state = shared.lock();
        let names = state.tenants.all().take(MOST);
        let names: Vec<_> = names.map(|(tenant, name)| (tenant, Arc::clone(name))).collect();
        let waiting = state.session.waiting_since(now, MOST);
        (!names.is_empty() || !waiting.is_empty()).then_some((names, waiting))
    }
}
