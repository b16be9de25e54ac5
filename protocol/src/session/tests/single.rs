//! Calls for one place without a message leave what messages leave, whatever came before.

use std::collections::BTreeMap;

use fastrand::Rng;

use super::*;
use crate::call::Single;
use crate::claim::Tenant;
use crate::overrides::Mode;

const NODES: [NodeId; 2] = [NODE, OTHER];
const RUNS: u64 = 400;
const STEPS: usize = 120;

/// Two processes on one ledger in the same process, as the embedded backend has them.
#[derive(Clone)]
struct World {
    sessions: [Session; 2],
    ledger: Ledger,
    /// The indexes of the requests that are there.
    requests: [Vec<usize>; 2],
    now_ms: u64,
    /// Whether calls for one place are made without a message, and how many were.
    is_single: bool,
    singles: [usize; 2],
    /// What requests and tasks were told, since the last look.
    told: BTreeMap<usize, Vec<Event>>,
}

impl World {
    fn new(is_single: bool) -> Self {
        let sessions = NODES.map(|node| Session::new(node, 1, Connected::default(), false));
        Self {
            sessions,
            ledger: Ledger::with_work_max(6),
            requests: Default::default(),
            now_ms: 0,
            is_single,
            singles: [0; 2],
            told: BTreeMap::new(),
        }
    }

    fn now(&self) -> Time {
        Time::ZERO + ms(self.now_ms)
    }

    fn server_now(&self) -> u64 {
        (EPOCH_MS + self.now_ms) * 1000
    }

    /// As the node does after each operation on a session.
    fn finish(&mut self, of: usize) {
        let now = self.now();
        if self.is_single
            && let Some(single) = self.sessions[of].poll_single(now)
        {
            let at = self.server_now();
            if let Some(done) = self.ledger.try_single(single, at) {
                let granted = self.sessions[of].handle_single(&single, done, now);
                self.singles[usize::from(matches!(single, Single::Release { .. }))] += 1;
                self.told.entry(of).or_default().extend(granted.map(Event::Progress));
                assert_eq!(self.sessions[of].poll_call(now), None, "there is more to send");
                assert!(self.sessions[of].take_events().is_empty(), "there is more to tell");
            }
        }
        for _ in 0..1000 {
            let Some(call) = self.sessions[of].poll_call(now) else { break };
            self.call(of, &call);
        }
        assert_eq!(self.sessions[of].poll_call(now), None, "it sends and sends");
        let events = self.sessions[of].take_events();
        self.told.entry(of).or_default().extend(events);
    }

    fn call(&mut self, of: usize, call: &Call) {
        let Call { limit, headroom, for_all, max_waiting, recalls, op } = call;
        let caller = Caller {
            now: self.server_now(),
            limit: *limit,
            headroom: *headroom,
            for_all: *for_all,
            max_waiting: *max_waiting,
            node: NODES[of],
            recalls: *recalls,
        };
        let mut hints = Vec::new();
        let post: super::super::super::ledger::Post<'_> = &mut |node, grants| {
            hints.push((node, grants.to_vec()));
            true
        };
        let ledger = &mut self.ledger;
        let reply = match op {
            Op::Acquire { leaving, lease_ms, max_queue, ids } => {
                ledger.acquire(caller, *lease_ms, *max_queue, leaving, ids, post)
            }
            Op::Release { ids } => ledger.release(caller, ids, post),
            Op::Renew { lease_ms, ids } => ledger.renew(caller, *lease_ms, ids, post),
            Op::Reassert { lease_ms, proofs } => ledger.reassert(caller, *lease_ms, proofs, post),
            Op::Audit { .. } => Reply::default(),
        };
        let now = self.now();
        self.sessions[of].handle_reply(op, &reply, false, now, now);
        if let Some(question) = self.sessions[of].poll_revocation_check() {
            self.sessions[of].handle_revocations_known(question, now);
        }
        for (node, grants) in hints {
            let to = usize::from(node == OTHER);
            if grants.is_empty() {
                self.sessions[to].handle_recall(now);
            }
            grants.iter().for_each(|grant| self.sessions[to].handle_hint((*grant).into(), now));
            self.finish(to);
        }
    }

    fn step(&mut self, random: &mut Rng, reuse: bool, claims: bool) {
        let (of, now) = (random.usize(..2), self.now());
        let request = random.choice(&self.requests[of]).copied();
        let session = &mut self.sessions[of];
        match (random.u8(..24), request) {
            (0..8, _) => {
                let options = AcquireOptions {
                    lease: ms(random.choice([500, 3000]).unwrap_or(500)),
                    max_queue: random.choice([None, Some(0), Some(2), Some(8)]).flatten(),
                    max_waiting: 100,
                    headroom: random.choice([0, 0, 0, 1]).unwrap_or(0),
                    claim: (claims && random.u8(..3) == 0)
                        .then(|| Claim::new(Tenant::of_hash(random.u64(1..3)))),
                    linger_ms: random.choice([0, 0, 100]).unwrap_or(0),
                    reuse_ms: if reuse && random.bool() { 50 } else { 0 },
                    ..OPTIONS
                };
                let limit = random.choice([1, 2, 4, 4]).unwrap_or(1);
                let index = session.handle_request(limit, options, now).expect("room");
                self.requests[of].push(index);
            }
            (8..11, Some(index)) => {
                let _ = session.handle_poll(index, now);
            }
            (11..17, Some(index)) => {
                session.handle_leave(index, now);
                self.requests[of].retain(|other| *other != index);
            }
            (17, Some(index)) => session.handle_break_off(index),
            (18, Some(index)) => drop(session.handle_release(index, now)),
            (19, Some(index)) => session.handle_wait_timeout(index, now),
            (20, _) => {
                let mut set = Override {
                    limit: random.choice([None, Some(0), Some(3)]).flatten(),
                    ..Override::default()
                };
                set.mode = random
                    .choice([Mode::Open, Mode::Open, Mode::Paused, Mode::Draining])
                    .unwrap_or_default();
                for session in &mut self.sessions {
                    session.handle_override(set, now);
                }
                self.finish(1 - of);
            }
            (21, Some(index)) => {
                if let Some(id) = session.place(index) {
                    let at = self.server_now();
                    self.ledger.revoke(id, true, at);
                    self.sessions.iter_mut().for_each(|session| session.handle_revoked(id, now));
                    self.finish(1 - of);
                }
            }
            (22, _) if random.u8(..8) == 0 => self.ledger = Ledger::with_work_max(6),
            (23, _) if random.u8(..8) == 0 => session.handle_stop_waiting(now),
            _ => {
                self.now_ms += random.choice([1, 10, 200, 1500, 4000]).unwrap_or(1);
                let now = self.now();
                for of in 0..2 {
                    if self.sessions[of].poll_timeout().is_some_and(|at| at <= now) {
                        self.sessions[of].handle_timeout(now);
                        self.finish(of);
                    }
                }
            }
        }
        self.finish(of);
    }

    fn places(&self) -> Vec<(PlaceId, u64, Option<u64>)> {
        let mut places: Vec<_> = self.ledger.places().collect();
        places.sort_unstable_by_key(|(id, ..)| *id);
        places
    }
}

#[test]
fn a_single_call_leaves_what_a_message_leaves() {
    let mut singles = [0; 2];
    for seed in 0..RUNS {
        let mut random = Rng::with_seed(seed);
        let (reuse, claims) = (random.u8(..4) == 0, random.u8(..3) == 0);
        let (mut one, mut other) = (World::new(true), World::new(false));
        for step in 0..STEPS {
            let mut same = random.clone();
            one.step(&mut random, reuse, claims);
            other.step(&mut same, reuse, claims);
            let at = format!("seed {seed}, step {step}");
            assert_eq!(one.told, other.told, "{at}");
            assert_eq!(one.sessions, other.sessions, "{at}");
            assert_eq!(one.places(), other.places(), "{at}");
            assert_eq!(
                (one.ledger.in_use(), one.ledger.waiting()),
                (other.ledger.in_use(), other.ledger.waiting()),
                "{at}"
            );
            (one.told, other.told) = Default::default();
        }
        singles = [singles[0] + one.singles[0], singles[1] + one.singles[1]];
    }
    assert!(singles.iter().all(|count| *count > 1000), "hardly anything was tried: {singles:?}");
}
