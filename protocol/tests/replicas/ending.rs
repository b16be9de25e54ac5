//! The end of a history: faults cease, and everybody is served.

use tower_semaphore_protocol::replica::{Ended, Row};

use super::{Fault, Fleet, LEASES_S};

/// How many rounds a history may need to end.
const ROUNDS: usize = 400;

impl Fleet {
    /// Faults cease: all living processes are connected, the dead are known to be, and holders leave. Nothing is renewed
    /// but once, so what is granted is heard of by values alone.
    pub(super) fn settle(&mut self) -> Result<(), String> {
        self.connect()?;
        self.exchange_all(false)?;
        for at in self.living() {
            self.processes[at].renew();
        }
        self.exchange_all(false)?;
        self.bury();
        self.exchange_all(true)?;
        // Those that were made when the key was absent are carried out again now.
        while !self.late.is_empty() {
            self.carry_out_late(0);
            self.exchange_all(true)?;
        }
        self.check_end()
    }

    fn connect(&mut self) -> Result<(), String> {
        for at in self.living() {
            self.return_to_life(at);
            let process = &mut self.processes[at];
            process.limit = process.limit.max(1);
            process.take_life(true);
            self.read(at)?;
        }
        Ok(())
    }

    /// The dead are known to be.
    fn bury(&mut self) {
        for at in 0..self.processes.len() {
            if !self.processes[at].is_alive {
                LEASES_S.into_iter().for_each(|seconds| self.lapse(at, seconds));
            }
        }
        for at in self.living() {
            if self.fault == Fault::ForgetsLiving {
                let other = self.processes[(at + 1) % self.processes.len()].node;
                let row = Row { node: other, seconds: LEASES_S[1] };
                self.processes[at].life.push_back((Ended::Row(row), false));
            }
            self.processes[at].take_life(true);
        }
    }

    /// Delivers everything until nothing is under way. `releases`: what holds leaves at once.
    fn exchange_all(&mut self, releases: bool) -> Result<(), String> {
        for _ in 0..ROUNDS {
            self.step += 1;
            self.now += 10_000;
            let mut is_idle = true;
            for at in self.living() {
                while self.watch(at)? {}
                self.processes[at].release_due(releases);
                while self.exchange(at)? {
                    is_idle = false;
                }
            }
            if is_idle {
                return Ok(());
            }
        }
        Err("it does not end".to_owned())
    }

    fn check_end(&self) -> Result<(), String> {
        for process in self.processes.iter().filter(|process| process.is_alive) {
            if let Some(mine) = process.mine.first() {
                return Err(format!("{} is {:?} in the end", mine.id, mine.state));
            }
            if !process.replica.is_idle() {
                return Err(format!("the replica of {} is not idle", process.node));
            }
        }
        match &self.store.newest().bytes {
            None => Ok(()),
            Some(_) => Err(format!("left: {:?}", self.store.newest().places())),
        }
    }

    fn living(&self) -> Vec<usize> {
        (0..self.processes.len()).filter(|at| self.processes[*at].is_alive).collect()
    }
}
