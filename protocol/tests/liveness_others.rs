//! The signs of life of others: what is to be forgotten, when, and by which process.

use std::time::Duration;

use tower_semaphore_protocol::liveness::{Cleanup, Grace, OtherRows, ROWS_MAX, Row, Seen};
use tower_semaphore_protocol::{NodeId, Time};

fn at(ms: u64) -> Time {
    Time::since_epoch(Duration::from_millis(ms))
}

const fn row(node: u64, seconds: u32) -> Row {
    Row { node: NodeId::new(node), seconds }
}

/// Process 5, with a watch since 0, and others that lived then.
fn view(signs: &[Row], grace: Grace) -> OtherRows {
    let mut others = OtherRows::new(NodeId::new(5), grace);
    others.handle_opened(signs.iter().copied(), 10, at(0));
    others
}

/// Looks as often as is due up to a time. Returns what is to be cleaned up, and when in ms.
fn cleanups(others: &mut OtherRows, until: u64) -> Vec<(u64, Cleanup)> {
    let mut all = Vec::new();
    while let Some(next) = others.poll_timeout().filter(|next| *next <= at(until)) {
        let ms = u64::try_from(next.elapsed_since_epoch().as_millis()).unwrap();
        let before = all.len();
        while let Some(cleanup) = others.poll_cleanup(next) {
            all.push((ms, cleanup));
        }
        assert!(others.poll_timeout() > Some(next), "nothing is left to be done");
        assert!(all.len() > before, "there was a reason to look");
    }
    all.retain(|(_, cleanup)| *cleanup != Cleanup::List);
    all
}

#[test]
fn a_row_is_forgotten_after_its_grace() {
    for (grace, seconds, ends) in
        [(Grace::Half, 2, 2000), (Grace::Half, 9, 4500), (Grace::Whole, 9, 9000)]
    {
        let dead = row(7, seconds);
        let mut others = view(&[dead], grace);
        others.handle_sign(dead, Seen::Gone, 11, at(100));
        let all = cleanups(&mut others, 600);
        assert_eq!(all, [(100, Cleanup::ForgetWaiting(dead))]);
        others.handle_waiting_forgotten(dead);
        assert_eq!(cleanups(&mut others, 100 + ends), [(100 + ends, Cleanup::Forget(dead))]);
        others.handle_forgotten(dead);
        assert_eq!(others.tracked(), 0);
        assert_eq!(cleanups(&mut others, 60_000), []);
    }
}

#[test]
fn a_row_that_comes_back_is_kept() {
    let back = row(7, 2);
    let mut others = view(&[back], Grace::Half);
    others.handle_sign(back, Seen::Gone, 20, at(100));
    others.handle_waiting_forgotten(back);
    others.handle_sign(back, Seen::Alive, 19, at(200));
    assert!(!others.is_alive(back), "what is older is ignored");
    others.handle_sign(back, Seen::Alive, 21, at(300));
    others.handle_sign(back, Seen::Gone, 20, at(400));
    assert!(others.is_alive(back));
    assert_eq!(cleanups(&mut others, 10_000), []);
}

#[test]
fn waiting_places_belong_to_the_shortest_row() {
    let rows = [row(7, 2), row(7, 30)];
    let mut others = view(&rows, Grace::Half);
    others.handle_sign(rows[1], Seen::Gone, 11, at(100));
    assert_eq!(cleanups(&mut others, 1000), []);
    others.handle_sign(rows[0], Seen::Gone, 12, at(1000));
    assert_eq!(cleanups(&mut others, 1000), [(1000, Cleanup::ForgetWaiting(rows[0]))]);
}

#[test]
fn the_first_of_the_living_is_the_first_to_forget() {
    let dead = row(7, 2);
    let alive = [row(1, 2), row(1, 9), row(2, 9), row(3, 2), row(6, 2)];
    let mut others = view(&[&alive[..], &[dead]].concat(), Grace::Half);
    others.handle_sign(dead, Seen::Gone, 11, at(100));
    let delayed = [(250, Cleanup::ForgetWaiting(dead))];
    assert_eq!(cleanups(&mut others, 1000), delayed, "three come before it");
    others.handle_waiting_forgotten(dead);
    // One of them dies meanwhile.
    others.handle_sign(alive[3], Seen::Gone, 12, at(1000));
    others.handle_waiting_forgotten(alive[3]);
    assert_eq!(cleanups(&mut others, 2300), [(2200, Cleanup::Forget(dead))]);

    let many: Vec<_> = (100..200).map(|node| row(node, 2)).collect();
    let mut others = OtherRows::new(NodeId::new(500), Grace::Half);
    others.handle_opened(many.iter().copied(), 10, at(0));
    others.handle_sign(many[99], Seen::Gone, 11, at(0));
    assert_eq!(cleanups(&mut others, 5000)[0].0, 1000, "the delay is bounded");
}

#[test]
fn what_another_process_did_is_not_repeated() {
    let dead = row(7, 2);
    let mut others = view(&[row(1, 2), dead], Grace::Half);
    others.handle_sign(dead, Seen::Gone, 11, at(0));
    others.handle_waiting_forgotten(dead);
    others.handle_forgotten(dead);
    assert_eq!(cleanups(&mut others, 60_000), []);
}

#[test]
fn what_is_not_answered_is_repeated_more_and_more_seldom() {
    let dead = row(7, 2);
    let mut others = view(&[dead], Grace::Half);
    others.handle_sign(dead, Seen::Gone, 11, at(0));
    others.handle_waiting_forgotten(dead);
    let times: Vec<_> = cleanups(&mut others, 40_000).iter().map(|(ms, _)| *ms).collect();
    assert_eq!(times, [2000, 3000, 5000, 9000, 17_000, 25_000, 33_000]);
}

#[test]
fn a_row_that_was_never_seen_alive_is_gone_since_it_was_seen() {
    let (unknown, own) = (row(7, 9), row(5, 9));
    let mut others = view(&[], Grace::Half);
    others.handle_place(own, at(900));
    others.handle_place(unknown, at(1000));
    others.handle_place(unknown, at(2000));
    assert_eq!(others.tracked(), 1);
    let expected =
        [(1500, Cleanup::ForgetWaiting(unknown)), (2500, Cleanup::ForgetWaiting(unknown))];
    assert_eq!(cleanups(&mut others, 3000), expected);
    others.handle_waiting_forgotten(unknown);
    assert_eq!(cleanups(&mut others, 5500), [(5500, Cleanup::Forget(unknown))]);
    // The guard showed that it lives.
    others.handle_sign(unknown, Seen::Alive, 50, at(5501));
    assert_eq!(cleanups(&mut others, 60_000), []);
}

#[test]
fn a_listing_finds_what_the_watch_lost() {
    let rows = [row(7, 2), row(8, 2), row(9, 2)];
    let mut others = view(&rows[..2], Grace::Half);
    others.handle_sign(rows[1], Seen::Alive, 40, at(500));
    // Of before the last event.
    others.handle_listed([rows[2]], 30, at(1000));
    assert_eq!(rows.map(|row| others.is_alive(row)), [false, true, true]);
    assert_eq!(cleanups(&mut others, 1100), [(1000, Cleanup::ForgetWaiting(rows[0]))]);
}

#[test]
fn listings_are_paced_by_how_many_processes_come_first() {
    for (before, every) in [(0, 2000), (1, 4000), (3, 8000), (50, 18_000)] {
        let mut others = OtherRows::new(NodeId::new(500), Grace::Half);
        others.handle_opened((0..before).map(|node| row(node + 1, 2)), 10, at(0));
        assert_eq!(others.poll_timeout(), Some(at(every)));
        assert_eq!(others.poll_cleanup(at(every)), Some(Cleanup::List));
        assert_eq!(others.poll_cleanup(at(every)), None);
        assert_eq!(others.poll_timeout(), Some(at(2 * every)));
    }
}

#[test]
fn a_process_that_wakes_up_waits_for_a_whole_grace() {
    let dead = row(7, 2);
    let mut others = view(&[dead], Grace::Half);
    others.handle_sign(dead, Seen::Gone, 11, at(0));
    others.handle_waiting_forgotten(dead);
    assert_eq!(others.poll_cleanup(at(0)), None);
    assert_eq!(others.poll_cleanup(at(2000 + 300)), Some(Cleanup::List));
    assert_eq!(others.poll_cleanup(at(2300)), None, "it was expected at 2000");
    assert_eq!(cleanups(&mut others, 4300), [(4300, Cleanup::Forget(dead))]);
}

#[test]
fn an_interrupted_watch_begins_graces_anew() {
    let dead = row(7, 2);
    let mut others = view(&[dead], Grace::Half);
    others.handle_sign(dead, Seen::Gone, 11, at(0));
    others.handle_waiting_forgotten(dead);
    others.handle_disconnected();
    assert_eq!((others.poll_timeout(), others.poll_cleanup(at(2000))), (None, None));
    others.handle_resumed(at(2000));
    assert_eq!(cleanups(&mut others, 3900), []);
    others.handle_disconnected();
    others.handle_opened([], 11, at(3900));
    assert_eq!(cleanups(&mut others, 5900), [(5900, Cleanup::Forget(dead))]);
}

#[test]
fn cleanups_under_way_and_rows_are_bounded() {
    let mut others = view(&[], Grace::Half);
    for node in 10..=ROWS_MAX as u64 + 20 {
        others.handle_place(row(node, 2), at(0));
    }
    assert_eq!(others.tracked(), ROWS_MAX);
    others.handle_sign(row(1, 2), Seen::Alive, 11, at(0));
    assert!(!others.is_alive(row(1, 2)), "there is no room");
    assert_eq!(others.poll_cleanup(at(0)), None);
    let polled: Vec<_> = std::iter::from_fn(|| others.poll_cleanup(at(550))).collect();
    assert_eq!(polled.len(), 16);
    assert_eq!(others.poll_timeout(), Some(at(1550)));
    let Cleanup::ForgetWaiting(first) = polled[0] else { panic!("{polled:?}") };
    others.handle_waiting_forgotten(first);
    assert!(others.poll_cleanup(at(560)).is_some());
    for node in 10..=ROWS_MAX as u64 + 20 {
        others.handle_forgotten(row(node, 2));
    }
    assert_eq!(others.tracked(), 0);
}
