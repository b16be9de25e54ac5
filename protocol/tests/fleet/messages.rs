//! Messages between processes and the store.

use super::*;

impl World {
    fn delay(&mut self) -> Micros {
        self.rng.u64(1..=self.plan.delay_ms * MS)
    }

    /// Whether a message to or from a process is lost.
    fn is_lost(&mut self, n: usize) -> bool {
        let process = &self.processes[n];
        self.now < process.cut_until || (self.now < process.lossy_until && self.rng.u8(..10) < 3)
    }

    pub(super) fn send(&mut self, n: usize, message: Message) {
        if !self.is_lost(n) {
            let connection = self.processes[n].connection;
            let after = self.delay();
            self.push(after, Happening::AtStore { process: n, connection, message });
        }
    }

    fn answer(&mut self, n: usize, connection: u64, answer: Answer) {
        if !self.is_lost(n) {
            let after = self.delay();
            self.push(after, Happening::AtProcess { process: n, connection, answer });
        }
    }

    pub(super) fn at_store(&mut self, n: usize, connection: u64, message: Message) {
        if let Some(answer) = self.answer_of_deposed(n, &message) {
            self.answer(n, connection, answer);
            return;
        }
        if self.now < self.store.leaderless_until {
            return;
        }
        let answer = match message {
            Message::Own(request) => self.carry_out_own(n, request),
            Message::Open => self.open(n, connection),
            Message::List => Answer::Listed(self.signs(), self.store.revision),
            Message::Forget(row) => self.forget(row),
            Message::ForgetWaiting(row) => match self.store.signs.contains_key(&row) {
                true => Answer::IsAlive(row, self.store.revision),
                false => Answer::WaitingForgotten(row),
            },
            Message::Acquire(seconds, id) => {
                let before = self.store.places.len();
                let found = self.store.acquire(self.processes[n].row(seconds), id);
                self.report.places_made += self.store.places.len() - before;
                Answer::Place(seconds, found, self.store.revision)
            }
            Message::Read(seconds) => {
                let row = self.processes[n].row(seconds);
                Answer::Place(seconds, self.store.places.get(&row).copied(), self.store.revision)
            }
        };
        self.answer(n, connection, answer);
    }

    /// A leader that was deposed answers keepalives by what it knows. All else needs the log.
    fn answer_of_deposed(&mut self, n: usize, message: &Message) -> Option<Answer> {
        let Message::Own(Request { id, action: Action::KeepAlive { lease } }) = *message else {
            return None;
        };
        if !self.processes[n].is_at_deposed || self.now >= self.deposed_until {
            return None;
        }
        let ends_at = self.deposed.get_mut(&lease).filter(|ends_at| **ends_at > self.now)?;
        let seconds = self.store.leases.get(&lease)?.seconds;
        *ends_at = self.now + u64::from(seconds) * 1000 * MS;
        Some(Answer::KeptAlive(id, seconds, 0))
    }

    fn carry_out_own(&mut self, n: usize, Request { id, action }: Request) -> Answer {
        let (row, now) = (|seconds| self.processes[n].row(seconds), self.now);
        let term = self.store.term;
        match action {
            Action::Grant { seconds } => {
                let (lease, ttl) = self.store.grant(seconds, now);
                Answer::Granted(id, lease, ttl)
            }
            Action::KeepAlive { lease } => match self.store.keep_alive(lease, now) {
                Some(ttl) => Answer::KeptAlive(id, ttl, term),
                None => Answer::NoLease(id),
            },
            Action::PutSign { seconds, lease, over } => {
                match self.store.put_sign(row(seconds), lease, over) {
                    Some(sign) => Answer::Sign(id, sign, term),
                    None => Answer::NoLease(id),
                }
            }
            Action::ReadSign { seconds } => {
                Answer::Sign(id, self.store.signs.get(&row(seconds)).copied(), term)
            }
            Action::Revoke { lease } => {
                self.store.revoke(lease);
                Answer::Revoked(id)
            }
        }
    }

    fn signs(&self) -> Vec<Row> {
        self.store.signs.keys().copied().collect()
    }

    fn open(&mut self, n: usize, connection: u64) -> Answer {
        // From here on, events are of this connection.
        self.processes[n].watching = connection;
        let places = self.store.places.keys().copied().collect();
        Answer::Opened { signs: self.signs(), places, revision: self.store.revision }
    }

    fn forget(&mut self, row: Row) -> Answer {
        *self.report.attempts.entry(row).or_default() += 1;
        let is_guarded = self.plan.removed != Some(Removed::Guard);
        if is_guarded && self.store.signs.contains_key(&row) {
            return Answer::IsAlive(row, self.store.revision);
        }
        if self.store.forget(row) {
            self.report.forgotten.push((row, self.now / MS));
        }
        Answer::Forgotten(row)
    }

    /// Sends what changed to the processes that watch.
    pub(super) fn deliver_changes(&mut self) {
        for (change, revision) in std::mem::take(&mut self.store.changes) {
            match change {
                Change::Sign(row, Seen::Gone) => drop(self.removed_at.insert(row, self.now)),
                Change::Sign(row, Seen::Alive) => {
                    self.put_at.insert((row, revision), self.now);
                }
                Change::Place(..) => {}
            }
            for n in 0..self.processes.len() {
                if self.now < self.processes[n].deaf_until {
                    continue;
                }
                let connection = self.processes[n].watching;
                // What a cut holds up comes after it, if the connection outlives it.
                let sent = self.now.max(self.processes[n].cut_until);
                let at = (sent + self.delay()).max(self.processes[n].watch_at);
                self.processes[n].watch_at = at;
                let answer = Answer::Changed(change, revision);
                self.push_at(at, Happening::AtProcess { process: n, connection, answer });
            }
        }
    }

    pub(super) fn at_process(&mut self, n: usize, connection: u64, answer: Answer) {
        let process = &mut self.processes[n];
        if process.is_dead || connection != process.connection {
            return;
        }
        let (now, removed) = (process.clock(self.now), self.plan.removed);
        let term_of = |term| if removed == Some(Removed::Term) { 0 } else { term };
        match answer {
            Answer::Granted(id, lease, ttl) => process.own.handle_granted(id, lease, ttl, now),
            Answer::KeptAlive(id, ttl, term) => {
                let is_unread = removed == Some(Removed::Reading);
                let term = if is_unread && process.is_at_deposed { 0 } else { term };
                process.own.handle_kept_alive(id, ttl, term_of(term), now);
                if let Some(sent) = process.kept_alive_sent.remove(&id) {
                    process.answered.insert(sent, now);
                }
            }
            Answer::Sign(id, sign, term) => process.own.handle_sign(id, sign, term_of(term), now),
            Answer::NoLease(id) => process.own.handle_no_lease(id, now),
            Answer::Revoked(id) => process.own.handle_revoked(id),
            Answer::Opened { signs, places, revision } => {
                process.is_connected = true;
                process.others.handle_opened(signs, revision, now);
                places.into_iter().for_each(|row| process.others.handle_place(row, now));
                process.own.handle_connected(now);
            }
            Answer::Listed(signs, revision) => process.others.handle_listed(signs, revision, now),
            Answer::Forgotten(row) => process.others.handle_forgotten(row),
            Answer::WaitingForgotten(row) => process.others.handle_waiting_forgotten(row),
            Answer::IsAlive(row, revision) => {
                process.others.handle_sign(row, Seen::Alive, revision, now);
            }
            Answer::Place(seconds, found, revision) => {
                process.handle_value(seconds, found, revision);
            }
            Answer::Changed(change, revision) => self.handle_change(n, change, revision, now),
        }
    }

    fn handle_change(&mut self, n: usize, change: Change, revision: Revision, now: Time) {
        let process = &mut self.processes[n];
        match change {
            Change::Sign(row, Seen::Gone) if row.node == process.node => {
                process.own.handle_sign_gone(row.seconds, revision, now);
            }
            Change::Sign(row, seen) => {
                process.others.handle_sign(row, seen, revision, now);
                if seen == Seen::Gone && self.plan.removed == Some(Removed::Grace) {
                    self.send(n, Message::Forget(row));
                }
            }
            Change::Place(row, true) => process.others.handle_place(row, now),
            Change::Place(row, false) => process.others.handle_forgotten(row),
        }
    }
}
