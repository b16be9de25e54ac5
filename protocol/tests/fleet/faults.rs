//! Faults.

use tower_semaphore_protocol::liveness::Grace;

use super::*;

impl World {
    pub(super) fn begin_fault(&mut self, fault: Fault) {
        let now = self.now;
        match fault {
            Fault::Freeze { process, ms, timers_first } => {
                if let Some(process) = self.victim(process) {
                    process.frozen_until = now + ms * MS;
                    process.thaws_timers_first = timers_first;
                }
            }
            Fault::Cut { process, ms } => {
                if let Some(process) = self.victim(process) {
                    process.cut_until = now + ms * MS;
                }
            }
            Fault::Lossy { process, ms } => {
                if let Some(process) = self.victim(process) {
                    process.lossy_until = now + ms * MS;
                }
            }
            Fault::Deaf { process, ms } => {
                if let Some(process) = self.victim(process) {
                    process.deaf_until = now + ms * MS;
                }
            }
            Fault::Elect { gap_ms, deposed_ms, attached } => {
                self.elect(gap_ms, deposed_ms, attached);
            }
            Fault::Revoke { process, length } => self.revoke_early(process, length),
            Fault::Kill { process } => self.kill(process),
        }
    }

    fn victim(&mut self, n: usize) -> Option<&mut Process> {
        let now = self.now;
        let process = self.processes.get_mut(n)?;
        Some(process).filter(|process| now >= process.spared_until && now >= process.frozen_until)
    }

    fn elect(&mut self, gap_ms: u64, deposed_ms: u64, attached: usize) {
        let is_spared = |process: &Process| self.now < process.spared_until;
        if self.now < self.store.leaderless_until || self.processes.iter().any(is_spared) {
            return;
        }
        let leases = self.store.leases.iter();
        self.deposed = leases.map(|(lease, known)| (*lease, known.ends_at)).collect();
        let at = self.now + gap_ms * MS;
        self.deposed_until = at + deposed_ms * MS;
        self.store.elect(at);
        for (n, process) in self.processes.iter_mut().enumerate() {
            process.is_at_deposed = n == attached;
        }
    }

    fn kill(&mut self, n: usize) {
        if self.report.killed.is_empty() && n < self.processes.len() {
            self.processes[n].is_dead = true;
            self.report.killed.insert(n, self.now / MS);
        }
    }

    /// Ends a lease early, where the design bounds what follows.
    fn revoke_early(&mut self, n: usize, length: usize) {
        let Some(process) = self.processes.get(n) else { return };
        let Some(seconds) = process.rows().get(length).copied() else { return };
        let (row, lease_ms) = (process.row(seconds), u64::from(seconds) * 1000);
        let Some(sign) = self.store.signs.get(&row).copied() else { return };
        let pause_ms = if self.may_lose_events { 2 * lease_ms + 4000 } else { 600 };
        let is_soon = |at: &Micros| self.now < at + pause_ms * MS;
        if self.removed_at.get(&row).is_some_and(is_soon) || self.is_new(row, sign) {
            return;
        }
        if self.plan.grace == Grace::Half {
            if !self.is_calm(n) || !self.processes[n].own.is_registered(seconds) {
                return;
            }
            let grace = self.plan.grace.of(seconds).as_millis();
            let spared = u64::try_from(grace).unwrap() + lease_ms;
            self.processes[n].spared_until = self.now + spared * MS;
        }
        self.store.revoke(sign.lease);
        self.report.early_revocations += 1;
    }

    /// Whether others may not have seen yet that the sign is back.
    fn is_new(&self, row: Row, sign: Sign) -> bool {
        let came_back = self.removed_at.contains_key(&row);
        came_back
            && self.put_at.get(&(row, sign.created)).is_some_and(|at| self.now < at + 600 * MS)
    }

    fn is_calm(&self, n: usize) -> bool {
        let process = &self.processes[n];
        let faults = [process.frozen_until, process.cut_until, process.lossy_until];
        let is_over = faults.iter().all(|until| self.now >= *until);
        let is_settled = self.now >= self.store.leaderless_until + 1500 * MS;
        is_over && is_settled && process.is_connected && !process.is_at_deposed && !process.is_dead
    }
}
