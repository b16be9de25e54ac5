//! What is shown of a limit that finds itself: its metrics, log lines, and the operator's page.

use std::time::Duration;

use http::Method;
use serde_json::json;
use tower_semaphore::metrics::{ADAPTIVE_DECREASES, ADAPTIVE_LIMIT};
use tower_semaphore::{Adaptive, Feedback, Permit, Policy, Semaphore};
use tracing::Level;

use crate::support::admin::{ask, page, window};
use crate::support::recorded::Recorded;
use crate::support::semaphore::waiting;
use crate::support::told::Told;

fn policy(min: u32, max: u32) -> Policy {
    let builder = Policy::builder(max).wait_timeout(Duration::from_secs(20)).name("jobs");
    builder.adaptive(Adaptive::between(min, max)).build().unwrap()
}

fn fixed(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::from_secs(20)).name("jobs").build().unwrap()
}

async fn take_all(semaphore: &Semaphore, name: &str, policy: &Policy, count: usize) -> Vec<Permit> {
    let mut permits = Vec::new();
    for _ in 0..count {
        permits.push(semaphore.acquire(name.to_owned(), policy).await.unwrap());
    }
    permits
}

/// The upstream refuses the last of these.
fn refuse(permits: &[Permit]) {
    permits.last().unwrap().feedback(Feedback::TooMany);
}

fn of(name: &str) -> String {
    format!("{name}{{policy=jobs}}")
}

/// Returns the limit that was shown since the last call, 0 if none was, and the number of decreases.
fn shown(recorded: &Recorded, before: &mut f64) -> (f64, f64) {
    // A snapshot takes a gauge, and the recorder adds up what was taken.
    let limits = recorded.get(&of(ADAPTIVE_LIMIT));
    (limits - std::mem::replace(before, limits), recorded.get(&of(ADAPTIVE_DECREASES)))
}

#[tokio::test]
async fn the_limit_and_its_decreases_are_recorded() {
    let (recorded, mut before) = (Recorded::new(), 0.0);
    let semaphore = Semaphore::in_memory();
    drop(take_all(&semaphore, "fixed", &fixed(4), 1).await);
    assert!(!recorded.all().contains_key(&of(ADAPTIVE_LIMIT)), "of no other limit");
    let permits = take_all(&semaphore, "x", &policy(1, 4), 4).await;
    assert_eq!(shown(&recorded, &mut before), (4.0, 0.0));
    refuse(&permits);
    assert_eq!(shown(&recorded, &mut before), (3.0, 1.0));
    // Part of the same burst.
    permits[0].feedback(Feedback::TooMany);
    assert_eq!(shown(&recorded, &mut before), (0.0, 1.0));
    // The limit in force is another one, and this stays.
    semaphore.set_limit("x", 7).await.unwrap();
    refuse(&permits);
    assert_eq!(shown(&recorded, &mut before), (0.0, 1.0));
    semaphore.clear_limit("x").await.unwrap();
    drop(permits);
    // It grows when one waits.
    let permits = take_all(&semaphore, "x", &policy(1, 4), 4).await;
    assert_eq!(shown(&recorded, &mut before), (4.0, 1.0));
    drop(permits);
    let described = recorded.described();
    for name in [ADAPTIVE_LIMIT, ADAPTIVE_DECREASES] {
        let (unit, text) = described[name].clone().unwrap();
        assert_eq!(unit, Some("count"), "{name}");
        assert!(!text.is_empty(), "{name}");
    }
}

#[tokio::test]
async fn a_reload_shows_the_limit_at_once() {
    let (recorded, mut before) = (Recorded::new(), 0.0);
    let semaphore = Semaphore::in_memory();
    let held = take_all(&semaphore, "x", &fixed(2), 2).await;
    let one_waits = tokio::spawn(semaphore.acquire("x", &fixed(2)));
    waiting(&semaphore, "x", 1).await;
    semaphore.update_waiting("x", &policy(1, 2));
    assert_eq!(shown(&recorded, &mut before), (2.0, 0.0), "before any request comes with it");
    semaphore.update_waiting("x", &policy(1, 3));
    assert_eq!(shown(&recorded, &mut before), (3.0, 0.0), "another range");
    let third = one_waits.await.unwrap().unwrap();
    semaphore.update_waiting("x", &policy(1, 2));
    // A lower range is no refusal.
    assert_eq!(shown(&recorded, &mut before), (2.0, 0.0));
    drop((held, third));
}

#[tokio::test]
async fn a_limit_that_leaves_its_maximum_and_returns_is_logged() {
    let told = Told::new();
    let semaphore = Semaphore::in_memory();
    let permits = take_all(&semaphore, "x", &policy(1, 3), 3).await;
    assert!(told.events().iter().all(|event| !event.name.contains("limit")), "it is as it was");
    refuse(&permits);
    drop(permits);
    let permits = take_all(&semaphore, "x", &policy(1, 3), 2).await;
    refuse(&permits);
    drop(permits);
    let permits = take_all(&semaphore, "x", &policy(1, 3), 3).await;
    let lines: Vec<_> = told
        .events()
        .into_iter()
        .filter(|event| event.name.contains("limit"))
        .map(|event| {
            let field = |name: &str| event.fields.get(name).cloned().unwrap_or_default();
            assert_eq!((&*event.target, &*field("semaphore")), ("tower_semaphore", "x"));
            (event.level, event.name.clone(), field("limit"))
        })
        .collect();
    let debug = "the adaptive limit changed";
    let expected = [
        (Level::INFO, "the limit is lowered: the upstream refuses requests", "2"),
        (Level::DEBUG, debug, "1"),
        (Level::DEBUG, debug, "2"),
        (Level::INFO, "the limit is at its maximum again", "3"),
    ];
    let expected = expected.map(|(level, name, limit)| (level, name.to_owned(), limit.to_owned()));
    assert_eq!(lines, expected);
    drop(permits);
}

#[tokio::test]
async fn very_many_limits_are_logged_quietly() {
    let told = Told::new();
    let semaphore = Semaphore::in_memory();
    for i in 0..60 {
        refuse(&take_all(&semaphore, &i.to_string(), &policy(1, 3), 1).await);
    }
    let of_level = |level| told.events().iter().filter(|event| event.level == level).count();
    let aloud = of_level(Level::INFO);
    // Ten in a second, and this may have taken several.
    assert!((10..50).contains(&aloud), "{aloud}");
    let quiet =
        told.events().iter().filter(|event| event.name == "the adaptive limit changed").count();
    assert_eq!(aloud + quiet, 60);
}

#[tokio::test]
async fn an_operator_sees_the_limit_that_found_itself() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let see = async || ask(&server, Method::GET, "/semaphores/x", "").await.1;
    let permits = take_all(&semaphore, "x", &policy(1, 10), 10).await;
    let seen = see().await;
    assert_eq!((&seen["limit"], &seen["adapted"]), (&json!(10), &json!(null)));
    assert!(page(&server, "/page/x").await.contains("of the policy"));
    refuse(&permits);
    let seen = see().await;
    assert_eq!((&seen["limit"], &seen["adapted"]["limit"]), (&json!(9), &json!(9)), "{seen}");
    assert!(seen["adapted"]["unchanged_for_ms"].as_u64().unwrap() < 10_000, "{seen}");
    let html = page(&server, "/page/x").await;
    assert!(html.contains("<dd id=\"limit\">9</dd>"), "{html}");
    assert!(html.contains("found by the refusals of the upstream, changed "), "{html}");
    assert!(!html.contains("Processes use different limits"), "{html}");
    // An operator's is in force in its place.
    ask(&server, Method::PUT, "/semaphores/x/limit", r#"{"limit":7}"#).await;
    let seen = see().await;
    assert_eq!((&seen["limit"], &seen["adapted"]["limit"]), (&json!(7), &json!(9)), "{seen}");
    let html = page(&server, "/page/x").await;
    assert!(html.contains("set here, in place of policies"), "{html}");
    assert!(!html.contains("found by the refusals"), "{html}");
    ask(&server, Method::DELETE, "/semaphores/x/limit", "").await;
    assert_eq!(see().await["limit"], 9);
    // Another range shows what is in force there, and a limit of its own hides it.
    semaphore.update_waiting("x", &policy(1, 8));
    assert_eq!(see().await["adapted"]["limit"], 8);
    semaphore.update_waiting("x", &fixed(10));
    let seen = see().await;
    assert_eq!((&seen["limit"], &seen["adapted"]), (&json!(10), &json!(null)), "{seen}");
    let html = page(&server, "/page/x").await;
    assert!(html.contains("<dd id=\"limit\">10</dd>") && html.contains("of the policy"), "{html}");
    drop(permits);
}
