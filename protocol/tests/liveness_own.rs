//! The signs of life of one process: requests, answers and what may be relied on.

use std::collections::BTreeSet;
use std::time::Duration;

use tower_semaphore_protocol::Time;
use tower_semaphore_protocol::liveness::{
    Action, LENGTHS_MAX, OwnRows, Request, RequestId, Sign, deadline,
};

fn at(ms: u64) -> Time {
    Time::since_epoch(Duration::from_millis(ms))
}

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Rows that are connected, at a store in term 1 that answers at once.
struct Rig {
    own: OwnRows,
    revision: i64,
    lease: i64,
    /// The sign that was put last.
    sign: Option<Sign>,
}

impl Rig {
    fn new(lengths: &[u64]) -> Self {
        let mut own = OwnRows::new(seconds(lengths[0]));
        lengths.iter().for_each(|length| own.add(seconds(*length)));
        own.handle_connected(at(0));
        Self { own, revision: 10, lease: 100, sign: None }
    }

    /// Rows of which all are registered at 0.
    fn registered(lengths: &[u64]) -> Self {
        let mut rig = Self::new(lengths);
        rig.answer_all(0);
        rig
    }

    fn poll(&mut self, ms: u64) -> Option<Request> {
        self.own.poll_request(at(ms))
    }

    fn expect(&mut self, ms: u64) -> (RequestId, Action) {
        let Request { id, action } = self.poll(ms).expect("a request");
        (id, action)
    }

    fn put(&mut self, lease: i64) -> Sign {
        self.revision += 1;
        let sign = Sign { lease, created: self.revision, modified: self.revision };
        self.sign = Some(sign);
        sign
    }

    fn answer_all(&mut self, ms: u64) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Some(Request { id, action }) = self.poll(ms) {
            actions.push(action);
            self.answer(id, action, ms);
        }
        actions
    }

    fn answer(&mut self, id: RequestId, action: Action, ms: u64) {
        let now = at(ms);
        match action {
            Action::Grant { seconds } => {
                self.lease += 1;
                self.own.handle_granted(id, self.lease, seconds.max(2), now);
            }
            Action::PutSign { lease, .. } => {
                let sign = self.put(lease);
                self.own.handle_sign(id, Some(sign), 1, now);
            }
            Action::KeepAlive { .. } => self.own.handle_kept_alive(id, 9_999, 1, now),
            Action::ReadSign { .. } => self.own.handle_sign(id, self.sign, 1, now),
            Action::Revoke { .. } => self.own.handle_revoked(id),
        }
    }
}

#[test]
fn the_store_tells_how_short_a_lease_can_be() {
    let mut rig = Rig::new(&[1, 2, 5]);
    rig.own.add(Duration::from_millis(4001));
    assert_eq!((rig.own.shortest(), rig.own.row_for(seconds(5))), (None, None));
    let (id, action) = rig.expect(0);
    assert_eq!(action, Action::Grant { seconds: 1 });
    assert_eq!(rig.poll(0), None, "only the shortest, until it is known");
    rig.answer(id, action, 0);
    assert_eq!(rig.own.shortest(), Some(2));
    let rows = [1, 2, 3, 5].map(|lease| rig.own.row_for(seconds(lease)));
    assert_eq!(rows, [Some(2), Some(2), Some(5), Some(5)]);
    assert_eq!(rig.own.row_for(seconds(6)), None);
}

#[test]
fn a_lease_counts_from_the_sending_of_what_was_proved() {
    let mut rig = Rig::new(&[6]);
    let (grant, _) = rig.expect(1000);
    rig.own.handle_granted(grant, 7, 6, at(1300));
    let (put, action) = rig.expect(1300);
    assert_eq!(action, Action::PutSign { seconds: 6, lease: 7, over: 0 });
    assert_eq!(rig.own.leases_from(6), None);
    assert!(!rig.own.is_registered(6));
    let sign = rig.put(7);
    rig.own.handle_sign(put, Some(sign), 1, at(1600));
    assert_eq!(rig.own.leases_from(6), Some(at(1000)));
    assert_eq!(rig.own.registered_at(6), Some(sign.created));
    assert_eq!(rig.own.poll_timeout(), Some(at(3000)));

    assert_eq!(rig.poll(2999), None);
    let (keepalive, action) = rig.expect(3000);
    assert_eq!(action, Action::KeepAlive { lease: 7 });
    rig.own.handle_kept_alive(keepalive, 6, 1, at(3200));
    assert_eq!(rig.own.leases_from(6), Some(at(1000)), "it is not proved");
    let (read, action) = rig.expect(3200);
    assert_eq!(action, Action::ReadSign { seconds: 6 });
    rig.own.handle_sign(read, Some(sign), 1, at(3400));
    assert_eq!(rig.own.leases_from(6), Some(at(3000)));
    assert_eq!(deadline(at(3000), 6), at(3000 + 6000 - 60 - 10));
    assert_eq!(rig.own.poll_timeout(), Some(at(5000)));
}

#[test]
fn a_lease_that_has_run_out_is_relied_on_after_a_keepalive_alone() {
    let mut rig = Rig::registered(&[6]);
    assert!(rig.own.is_alive(6, at(5929)));
    assert!(!rig.own.is_alive(6, at(5930)) && rig.own.is_registered(6), "nothing shows its end");
    // The process goes on after it did not run for a while.
    rig.answer_all(9000);
    assert!(rig.own.is_alive(6, at(9000)));
    rig.own.handle_sign_gone(6, 99, at(9001));
    assert!(!rig.own.is_alive(6, at(9001)));
    assert!(!rig.own.is_alive(7, at(9001)), "there is no such row");
}

#[test]
fn a_keepalive_of_another_term_than_the_reading_does_not_count() {
    let mut rig = Rig::registered(&[6]);
    let (keepalive, _) = rig.expect(2000);
    rig.own.handle_kept_alive(keepalive, 6, 1, at(2001));
    let (read, _) = rig.expect(2001);
    rig.own.handle_sign(read, rig.sign, 2, at(2002));
    assert_eq!(rig.own.leases_from(6), Some(at(0)));
    assert!(rig.own.is_registered(6));
    assert_eq!(rig.poll(2051), None);
    assert_eq!(rig.answer_all(2052).len(), 2, "it is asked again soon");
    assert_eq!(rig.own.leases_from(6), Some(at(2052)));
}

#[test]
fn what_is_not_answered_in_700_ms_is_repeated() {
    let mut rig = Rig::registered(&[6]);
    let (lost, action) = rig.expect(2000);
    assert_eq!(rig.own.poll_timeout(), Some(at(2700)));
    assert!(!rig.own.handle_timeout(at(2699)));
    assert!(rig.own.handle_timeout(at(2700)), "the member is silent");
    let (again, same) = rig.expect(2700);
    assert_eq!(action, same);
    rig.own.handle_kept_alive(lost, 6, 1, at(2800));
    assert_eq!(rig.poll(2800), None, "the late answer is ignored");
    rig.answer(again, same, 2900);
    rig.answer_all(2900);
    assert_eq!(rig.own.leases_from(6), Some(at(2700)));
}

#[test]
fn a_proof_that_was_not_answered_begins_with_a_keepalive() {
    let mut rig = Rig::registered(&[6]);
    let (id, action) = rig.expect(2000);
    rig.answer(id, action, 2001);
    rig.expect(2001);
    rig.own.handle_disconnected(at(2002));
    assert_eq!((rig.poll(2002), rig.own.poll_timeout()), (None, None));
    rig.own.handle_connected(at(2010));
    assert!(matches!(
        rig.answer_all(2010)[..],
        [Action::KeepAlive { .. }, Action::ReadSign { .. }]
    ));
    assert_eq!(rig.own.leases_from(6), Some(at(2010)));
}

#[test]
fn a_lease_that_nobody_waits_for_any_more_is_revoked() {
    let mut rig = Rig::new(&[2]);
    let (lost, _) = rig.expect(0);
    assert!(rig.own.handle_timeout(at(700)));
    assert_eq!(rig.poll(700), None, "grants are not repeated at once");
    rig.own.handle_granted(lost, 55, 2, at(710));
    let (id, action) = rig.expect(710);
    assert_eq!(action, Action::Revoke { lease: 55 });
    rig.answer(id, action, 711);
    assert_eq!(rig.answer_all(750).len(), 2);
    assert!(rig.own.is_registered(2));
}

#[test]
fn a_sign_that_is_gone_is_put_again_with_a_new_lease() {
    let mut rig = Rig::registered(&[6]);
    let before = rig.sign.expect("it was put");
    rig.own.handle_sign_gone(6, before.modified - 1, at(400));
    assert!(rig.own.is_registered(6), "an event from before");
    rig.own.handle_sign_gone(6, before.modified + 1, at(500));
    assert!(!rig.own.is_registered(6));
    assert_eq!(rig.own.leases_from(6), Some(at(0)), "what was promised was promised");
    rig.revision += 1;
    let actions = rig.answer_all(510);
    let lease = rig.lease;
    let put = Action::PutSign { seconds: 6, lease, over: 0 };
    assert_eq!(actions, [Action::Grant { seconds: 6 }, put]);
    assert_eq!(rig.own.leases_from(6), Some(at(510)));
    assert!(rig.own.registered_at(6) > Some(before.created));
}

#[test]
fn an_event_that_comes_before_the_answer_counts() {
    let mut rig = Rig::new(&[6]);
    let (id, action) = rig.expect(0);
    rig.answer(id, action, 0);
    let (put, _) = rig.expect(0);
    let sign = rig.put(rig.lease);
    rig.own.handle_sign_gone(6, sign.modified + 1, at(1));
    rig.own.handle_sign(put, Some(sign), 1, at(2));
    assert!(!rig.own.is_registered(6));
    assert_eq!(rig.expect(2).1, Action::Grant { seconds: 6 });
}

#[test]
fn a_lease_that_the_store_does_not_know_is_granted_again() {
    for is_acknowledged in [false, true] {
        let mut rig = Rig::registered(&[6]);
        let (keepalive, _) = rig.expect(2000);
        if is_acknowledged {
            rig.own.handle_kept_alive(keepalive, 6, 1, at(2001));
            let (read, _) = rig.expect(2001);
            rig.own.handle_sign(read, None, 1, at(2001));
        } else {
            rig.own.handle_no_lease(keepalive, at(2001));
        }
        assert!(!rig.own.is_registered(6));
        assert_eq!(rig.expect(2001).1, Action::Grant { seconds: 6 });
    }
}

#[test]
fn a_sign_of_another_lease_is_put_over() {
    let mut rig = Rig::new(&[6]);
    let (id, action) = rig.expect(0);
    rig.answer(id, action, 0);
    let (put, _) = rig.expect(0);
    let late = Sign { lease: 1, created: 5, modified: 8 };
    rig.own.handle_sign(put, Some(late), 1, at(1));
    assert!(!rig.own.is_registered(6));
    let (put, action) = rig.expect(1);
    assert_eq!(action, Action::PutSign { seconds: 6, lease: rig.lease, over: 8 });
    rig.own.handle_sign(put, Some(Sign { lease: rig.lease, modified: 12, ..late }), 1, at(2));
    assert_eq!(rig.own.registered_at(6), Some(5), "it was there all the time");
}

#[test]
fn a_store_that_refuses_is_asked_after_pauses() {
    let mut rig = Rig::registered(&[60]);
    let mut now = 20_000;
    let mut pauses = Vec::new();
    for _ in 0..9 {
        let (id, _) = rig.expect(now);
        rig.own.handle_refused(id, at(now));
        let next = rig.own.poll_timeout().expect("it is tried again");
        pauses.push(next.since(at(now)).as_millis());
        now = u64::try_from(next.elapsed_since_epoch().as_millis()).unwrap();
    }
    assert_eq!(pauses, [50, 100, 200, 400, 800, 1600, 3200, 4000, 4000]);
    rig.answer_all(now);
    assert_eq!(rig.own.leases_from(60), Some(at(now)));
}

#[test]
fn many_lengths_make_no_burst() {
    let lengths: Vec<u64> = (2..40).collect();
    let mut rig = Rig::new(&lengths);
    let (id, action) = rig.expect(0);
    rig.answer(id, action, 0);
    let mut sent = BTreeSet::new();
    while let Some(request) = rig.poll(1) {
        sent.insert(request.id);
    }
    assert_eq!(sent.len(), 4);
    assert!(rig.own.poll_timeout() > Some(at(1)), "until one is answered");
    // Those that were not answered are given up together.
    assert!(rig.own.handle_timeout(at(701)));
    rig.own.handle_disconnected(at(701));
    rig.own.handle_connected(at(702));
    rig.answer_all(900);
    let registered = (0..99).filter(|seconds| rig.own.is_registered(*seconds)).count();
    assert_eq!(registered, LENGTHS_MAX);
    assert_eq!(rig.own.row_for(seconds(17)), Some(17));
    assert_eq!(rig.own.row_for(seconds(18)), None);
    // A new connection alone sends nothing.
    rig.own.handle_disconnected(at(950));
    rig.own.handle_connected(at(960));
    assert_eq!(rig.poll(960), None);
}

#[test]
fn the_lease_with_the_least_left_goes_first() {
    let mut rig = Rig::registered(&[3, 60, 6]);
    rig.own.handle_disconnected(at(100));
    rig.own.handle_connected(at(30_000));
    let leases = rig.answer_all(30_000);
    let kept: Vec<_> = leases
        .iter()
        .filter_map(|action| match action {
            Action::ReadSign { seconds } => Some(*seconds),
            _ => None,
        })
        .collect();
    assert_eq!(kept, [3, 6, 60]);
}

#[test]
fn closing_revokes_all_leases() {
    let mut rig = Rig::registered(&[2, 6, 9]);
    rig.own.remove(6);
    rig.own.remove(2);
    assert_eq!(rig.answer_all(10).len(), 1, "the shortest stays");
    assert_eq!((rig.own.leases_from(6), rig.own.row_for(seconds(6))), (None, Some(9)));
    rig.expect(700);
    rig.own.close();
    assert!(!rig.own.is_closed() && !rig.own.is_registered(9));
    let (first, action) = rig.expect(700);
    assert!(matches!(action, Action::Revoke { .. }));
    rig.own.handle_refused(first, at(701));
    assert_eq!(rig.answer_all(702).len(), 2);
    assert!(rig.own.is_closed());
    assert_eq!((rig.poll(99_000), rig.own.poll_timeout()), (None, None));
}
