//! The records of pauses: many of them, refused and lost ones, and what a resume ends.

use std::time::Duration;

use tokio::time::{Instant, timeout};
use tower_semaphore::{AcquireError, Feedback, Permit, Policy, RejectReason, Semaphore};

use crate::support::told::Told;
use crate::support::{eventually, on_each};

/// What counts as "at once": half of the second after which every process reads by itself.
const AT_ONCE: Duration = Duration::from_millis(500);
const BRIEF: Duration = Duration::from_millis(50);
/// A pause whose end no test awaits.
const LONG: Duration = Duration::from_secs(30);

on_each! {
    pauses_of_the_upstream_never_stop_an_operator
    operators_resume_more_names_than_are_remembered
}

fn policy() -> Policy {
    Policy::builder(5).wait_timeout(Duration::from_secs(20)).build().unwrap()
}

async fn take(semaphore: &Semaphore, name: &str) -> Permit {
    semaphore.acquire(name.to_owned(), &policy()).await.unwrap()
}

/// Returns why the semaphore grants nothing of a name now; `None`: it grants.
async fn refuses(semaphore: &Semaphore, name: &str) -> Option<RejectReason> {
    match semaphore.try_acquire(name.to_owned(), &policy()).await {
        Ok(_) => None,
        Err(AcquireError::Rejected(rejected)) => Some(rejected.reason),
        Err(other) => panic!("{other:?}"),
    }
}

async fn is_paused(semaphore: &Semaphore, name: &str) {
    eventually("it is paused", async || {
        refuses(semaphore, name).await == Some(RejectReason::UpstreamPause)
    })
    .await;
}

async fn is_granted(semaphore: &Semaphore, name: &str) {
    let granted = timeout(AT_ONCE, take(semaphore, name)).await;
    drop(granted.expect("it is granted"));
}

async fn pauses_of_the_upstream_never_stop_an_operator(node: &dyn Fn() -> Semaphore) {
    const NAMES: usize = 1100;
    let (own, operator, other) = (node(), node(), node());
    let mut permits = Vec::new();
    for i in 0..NAMES {
        permits.push(take(&own, &i.to_string()).await);
    }
    let held = take(&other, "held").await;
    permits.iter().for_each(|permit| permit.feedback(Feedback::Backoff(LONG)));
    eventually("as many are recorded as may", async || {
        drop(take(&other, "used").await);
        other.health().paused >= 500
    })
    .await;
    // Those that have no record hold in their own process.
    assert_eq!(own.health().paused, NAMES);
    for name in ["0", "1099"] {
        assert_eq!(refuses(&own, name).await, Some(RejectReason::UpstreamPause), "{name}");
    }
    operator.set_limit("a", 3).await.unwrap();
    operator.pause("b").await.unwrap();
    operator.drain("c", Duration::ZERO).await.unwrap();
    operator.pause_for("d", LONG).await.unwrap();
    let id = operator.inspect("held").await.unwrap().holders[0].id;
    assert!(operator.revoke("held", id).await.unwrap());
    operator.resume("b").await.unwrap();
    operator.resume("e").await.unwrap();
    is_paused(&other, "d").await;
    drop(held);
}

/// Nobody is refused because too much was resumed, and the last resume counts.
async fn operators_resume_more_names_than_are_remembered(node: &dyn Fn() -> Semaphore) {
    let (operator, other) = (node(), node());
    for i in 0..1100 {
        operator.resume(i.to_string()).await.unwrap();
    }
    let permit = take(&other, "x").await;
    permit.feedback(Feedback::Backoff(LONG));
    is_paused(&operator, "x").await;
    operator.resume("x").await.unwrap();
    is_granted(&operator, "x").await;
    is_granted(&other, "x").await;
}

#[tokio::test]
async fn pauses_of_many_names_are_few_lines_in_the_log() {
    const NAMES: usize = 100;
    let semaphore = Semaphore::in_memory();
    let mut permits = Vec::new();
    for i in 0..NAMES {
        permits.push(take(&semaphore, &i.to_string()).await);
    }
    let (told, began) = (Told::new(), Instant::now());
    let with = |begin: &str, only_info: bool| {
        let events = if only_info { told.aloud() } else { told.events() };
        events.iter().filter(|event| event.name.starts_with(begin)).count()
    };
    permits.iter().for_each(|permit| permit.feedback(Feedback::Backoff(BRIEF)));
    assert_eq!(with("grants are paused until", false), NAMES);
    assert!(with("grants are paused until", true) > 0, "some, at least");
    eventually("all ends are logged", async || with("grants are no longer", false) == NAMES).await;
    let seconds = usize::try_from(began.elapsed().as_secs()).unwrap() + 1;
    let lines = with("grants are", true);
    assert!(lines <= 10 * seconds, "{lines} lines in {seconds} s");
}

/// Where Redis keeps them, and what refuses and loses them.
#[cfg(feature = "redis")]
mod in_redis {
    use std::collections::HashMap;
    use std::sync::Arc;

    use deadpool_redis::redis::Value;
    use tower_semaphore::backend::RedisBackend;
    use tower_semaphore::backend::seam::{Backend, Change, OVERRIDES};
    use tower_semaphore::operate::PauseCause;

    use super::*;
    use crate::redis_errors::LEAST;
    use crate::support::proxy::{Proxy, REPLIES};
    use crate::support::redis::TestRedis;
    use crate::support::semaphore::warm;

    const SET: &str = "semaphore:{!overrides}";
    const PAUSES: &str = "semaphore:{!overrides}:pauses";

    fn connect(url: String) -> Semaphore {
        Semaphore::new(RedisBackend::builder(url).build().unwrap())
    }

    /// A process of the user `app`, who may do everything but record a pause.
    fn without_rights(server: &TestRedis) -> Semaphore {
        server.let_in(LEAST);
        connect(format!("redis://app:secret@127.0.0.1:{}/", server.port()))
    }

    fn give_rights(server: &TestRedis) {
        server.let_in(&format!("{LEAST} hset hdel hlen"));
    }

    /// Returns how often a record was refused, for want of a right.
    fn refused(server: &TestRedis) -> usize {
        let log: Vec<HashMap<String, Value>> = server.command(&["ACL", "LOG"]);
        let of_scripts =
            log.iter().filter(|entry| entry["context"] == Value::BulkString(b"lua".to_vec()));
        let counts = of_scripts.map(|entry| match entry["count"] {
            Value::Int(count) => usize::try_from(count).unwrap(),
            _ => panic!("{entry:?}"),
        });
        counts.sum()
    }

    fn is_recorded(server: &TestRedis, name: &str) -> bool {
        let record: Option<String> = server.command(&["HGET", PAUSES, name]);
        record.is_some_and(|record| !record.starts_with("0 "))
    }

    /// Sends changes, one after the other, over a connection of their own.
    async fn change_all(server: &TestRedis, changes: impl IntoIterator<Item = (String, Change)>) {
        let backend = RedisBackend::builder(server.url()).build().unwrap();
        let key = backend.key(OVERRIDES);
        let connection = backend.connect(&backend.shard(&key)).await.unwrap().unwrap();
        let driven = connection.drive();
        let changed = async {
            for (name, change) in changes {
                connection.set_override(&key, &name.as_str().into(), change).await.unwrap();
            }
        };
        tokio::select! {
            () = changed => {}
            () = driven => panic!("the connection was closed"),
        }
    }

    async fn change(server: &TestRedis, name: &str, change: Change) {
        change_all(server, [(name.to_owned(), change)]).await;
    }

    fn pause_of(duration: Duration) -> Change {
        Change::Pause {
            pause_ms: u64::try_from(duration.as_millis()).unwrap(),
            slack_ms: 0,
            seen: 0,
            by: "test:1".into(),
            cause: PauseCause::Upstream,
        }
    }

    #[tokio::test]
    async fn a_pause_is_recorded_without_a_look_at_the_others() {
        let server = TestRedis::start();
        for i in 0..300 {
            change(&server, &i.to_string(), pause_of(LONG)).await;
        }
        let _: String = server.command(&["CONFIG", "RESETSTAT"]);
        change(&server, "x", pause_of(LONG)).await;
        assert!(is_recorded(&server, "x"));
        change(&server, "x", pause_of(LONG / 2)).await;
        assert_eq!(server.calls("hset"), 1);
        assert_eq!(server.calls("hgetall"), 0);
    }

    #[tokio::test]
    async fn a_process_reads_changes_that_come_thick_together() {
        const PROCESSES: usize = 4;
        let server = TestRedis::start();
        let nodes: Vec<_> = (0..PROCESSES).map(|_| server.semaphore()).collect();
        for node in &nodes {
            drop(take(node, "399").await);
        }
        let _: String = server.command(&["CONFIG", "RESETSTAT"]);
        let began = Instant::now();
        change_all(&server, (0..400).map(|i| (i.to_string(), pause_of(LONG)))).await;
        for node in &nodes {
            is_paused(node, "399").await;
        }
        // Each reading is an HGETALL of two hashes, the first of which is empty here.
        let readings = usize::try_from(server.calls("hgetall") / 2).unwrap();
        let tenths = began.elapsed().as_millis() / 100;
        // One at once, one each 100 ms, and one each second by itself.
        let most = PROCESSES * (2 + usize::try_from(tenths + tenths / 10).unwrap());
        assert!((PROCESSES..=most).contains(&readings), "{readings} readings, at most {most}");
    }

    #[tokio::test]
    async fn a_process_sends_one_record_at_a_time() {
        let server = TestRedis::start();
        let proxy = Proxy::start(server.port()).await;
        let own = connect(proxy.url());
        let mut permits = Vec::new();
        for i in 0..50 {
            permits.push(take(&own, &i.to_string()).await);
        }
        let _: String = server.command(&["CONFIG", "RESETSTAT"]);
        proxy.hold(REPLIES);
        permits.iter().for_each(|permit| permit.feedback(Feedback::Backoff(LONG)));
        eventually("one is recorded", async || server.calls("hset") > 0).await;
        // Whatever was sent before this acquire has arrived with it.
        let later = tokio::spawn({
            let own = own.clone();
            async move { own.acquire("later", &policy()).await }
        });
        eventually("it has arrived", async || {
            server.command::<u64>(&["EXISTS", "semaphore:{later}"]) == 1
        })
        .await;
        assert_eq!(server.calls("hset"), 1);
        proxy.flow();
        drop(later.await.unwrap().unwrap());
        eventually("all are recorded", async || server.calls("hset") == 50).await;
    }

    /// The process keeps what it asked for, and asks again, but not all the time.
    #[tokio::test]
    async fn a_pause_that_the_server_refuses_holds_in_its_own_process() {
        let server = TestRedis::start();
        let (own, other) = (without_rights(&server), server.semaphore());
        let permit = take(&own, "x").await;
        drop(take(&other, "x").await);
        let began = Instant::now();
        permit.feedback(Feedback::Backoff(LONG));
        eventually("it is refused twice", async || {
            assert_eq!(refuses(&own, "x").await, Some(RejectReason::UpstreamPause));
            refused(&server) >= 2
        })
        .await;
        let seconds = usize::try_from(began.elapsed().as_secs()).unwrap();
        assert!(
            (2..=seconds + 1).contains(&refused(&server)),
            "{} in {seconds} s",
            refused(&server)
        );
        assert_eq!(refuses(&own, "x").await, Some(RejectReason::UpstreamPause));
        give_rights(&server);
        is_paused(&other, "x").await;
    }

    /// Waits until everything that a process may still want to send has been sent.
    async fn brings_nothing_back(server: &TestRedis, own: &Semaphore, other: &Semaphore) {
        // A record of another name goes through the same queue, behind the first.
        let permit = take(own, "another").await;
        permit.feedback(Feedback::Backoff(LONG));
        eventually("it is recorded", async || is_recorded(server, "another")).await;
        assert!(!is_recorded(server, "x"));
        for node in [own, other] {
            is_granted(node, "x").await;
        }
    }

    #[tokio::test]
    async fn a_resume_ends_what_was_never_recorded() {
        let server = TestRedis::start();
        let (own, operator) = (without_rights(&server), server.semaphore());
        let permit = take(&own, "x").await;
        permit.feedback(Feedback::Backoff(LONG));
        eventually("it is refused", async || refused(&server) > 0).await;
        operator.resume("x").await.unwrap();
        is_granted(&own, "x").await;
        give_rights(&server);
        brings_nothing_back(&server, &own, &operator).await;
        // What the upstream says after that counts.
        permit.feedback(Feedback::Backoff(LONG));
        is_paused(&operator, "x").await;
    }

    #[tokio::test]
    async fn a_repeat_after_a_lost_answer_brings_nothing_back() {
        let server = TestRedis::start();
        let proxy = Proxy::start(server.port()).await;
        let (own, operator) = (connect(proxy.url()), server.semaphore());
        warm(&own).await;
        let permit = take(&own, "x").await;
        proxy.hold(REPLIES);
        permit.feedback(Feedback::Backoff(LONG));
        eventually("it is recorded", async || {
            server.command::<u64>(&["HEXISTS", PAUSES, "x"]) == 1
        })
        .await;
        operator.resume("x").await.unwrap();
        proxy.cut();
        eventually("it has connected again", async || proxy.connections() > 1).await;
        brings_nothing_back(&server, &own, &operator).await;
    }

    #[tokio::test]
    async fn what_operators_set_is_kept_apart_from_pauses() {
        let server = TestRedis::start();
        let operator = server.semaphore();
        take(&operator, "x").await.feedback(Feedback::Backoff(LONG));
        eventually("it is recorded", async || is_recorded(&server, "x")).await;
        operator.set_limit("y", 3).await.unwrap();
        let mut fields: Vec<String> = server.command(&["HKEYS", SET]);
        fields.sort();
        assert_eq!(fields, ["@", "y"]);
        let left: u64 = server.command(&["PTTL", PAUSES]);
        assert!((1..=32_000).contains(&left), "{left}");
        operator.clear_limit("y").await.unwrap();
        assert_eq!(server.command::<u64>(&["EXISTS", SET]), 0);
        is_paused(&server.semaphore(), "x").await;
    }

    async fn outlives(mut server: TestRedis, lose: impl FnOnce(&mut TestRedis)) {
        let (own, other) = (server.semaphore(), server.semaphore());
        drop(take(&other, "x").await);
        let began = Instant::now();
        take(&own, "x").await.feedback(Feedback::Backoff(LONG));
        is_paused(&other, "x").await;
        lose(&mut server);
        eventually("it is recorded again", async || {
            // A process that uses a semaphore notices.
            let _ = other.try_acquire("y", &policy()).await;
            server.try_command::<u64>(&["HEXISTS", PAUSES, "x"]).is_ok_and(|there| there == 1)
        })
        .await;
        let late = server.semaphore();
        is_paused(&late, "x").await;
        let left = late.inspect("x").await.unwrap().paused.unwrap().left;
        assert!(left <= (LONG + AT_ONCE).saturating_sub(began.elapsed()) + AT_ONCE, "{left:?}");
        late.resume("x").await.unwrap();
        for node in [&own, &other, &late] {
            is_granted(node, "x").await;
        }
        assert!(!is_recorded(&server, "x"));
    }

    #[tokio::test]
    async fn a_pause_outlives_a_flush() {
        outlives(TestRedis::start(), |server| {
            server.command::<()>(&["FLUSHALL"]);
        })
        .await;
    }

    #[tokio::test]
    async fn a_pause_outlives_a_restart_without_data() {
        outlives(TestRedis::start(), |server| {
            server.kill();
            server.restart();
        })
        .await;
    }

    /// As after a failover to a server without the data, whose clock is behind.
    #[tokio::test]
    async fn a_resume_right_after_a_loss_ends_a_pause_though_the_clock_is_behind() {
        let server = TestRedis::start();
        let [seconds, _] = server.command::<[u64; 2]>(&["TIME"]);
        let version = ((seconds + 3600) * 1_000_000).to_string();
        let _: u64 = server.command(&["HSET", PAUSES, "@", &version]);
        let (own, operator) = (server.semaphore(), server.semaphore());
        drop(take(&operator, "x").await);
        take(&own, "x").await.feedback(Feedback::Backoff(LONG));
        is_paused(&operator, "x").await;
        eventually("its own process has read the record", async || {
            let is_there = is_recorded(&server, "x");
            own.overrides().await.unwrap();
            is_there
        })
        .await;
        // Nobody reads while nothing is there.
        let _: u64 = server.command(&["DEL", PAUSES]);
        operator.resume("x").await.unwrap();
        for node in [&operator, &own] {
            is_granted(node, "x").await;
        }
        brings_nothing_back(&server, &own, &operator).await;
    }

    /// As after the server's clock stepped back.
    #[tokio::test]
    async fn no_record_pauses_for_longer_than_a_pause_may_last() {
        let server = TestRedis::start();
        let now: Vec<u64> = server.command(&["TIME"]);
        let end = ((now[0] + 48 * 3600) * 1000).to_string();
        let of = |cause: &str| format!("{end} 0 host:1 {cause}");
        let (upstream, operator) = (of("429"), of("operator"));
        server.command::<()>(&["HSET", PAUSES, "@", "5", "x", &upstream, "y", &operator]);
        let node = server.semaphore();
        for (name, hours) in [("x", 1), ("y", 24)] {
            is_paused(&node, name).await;
            let left = node.inspect(name).await.unwrap().paused.unwrap().left;
            let most = Duration::from_secs(hours * 3600) + AT_ONCE;
            assert!(left <= most && left > most - Duration::from_secs(20), "{name}: {left:?}");
        }
    }

    /// As when the server's clock steps back by ten minutes while a name is paused.
    #[tokio::test]
    async fn a_pause_reaches_the_fleet_after_the_clock_stepped_back() {
        let server = TestRedis::start();
        let (own, other) = (server.semaphore(), server.semaphore());
        // The last change was made before the step.
        let now: [u64; 2] = server.command(&["TIME"]);
        let ahead = (now[0] + 600) * 1_000_000;
        server.command::<()>(&["HSET", PAUSES, "@", &ahead.to_string()]);
        let permit = take(&own, "x").await;
        drop(take(&other, "x").await);
        permit.feedback(Feedback::Backoff(Duration::from_secs(1)));
        is_paused(&other, "x").await;
        let record: String = server.command(&["HGET", PAUSES, "x"]);
        let (end, rest) = record.split_once(' ').unwrap();
        let end = end.parse::<u64>().unwrap() + 600_000;
        server.command::<()>(&["HSET", PAUSES, "x", &format!("{end} {rest}")]);
        server.command::<()>(&["PEXPIRE", PAUSES, "610000"]);
        // By the clocks of both processes it is over.
        drop(take(&own, "x").await);
        drop(take(&other, "x").await);
        permit.feedback(Feedback::Backoff(LONG));
        is_paused(&own, "x").await;
        is_paused(&other, "x").await;
    }

    #[tokio::test]
    async fn a_process_that_is_idle_asks_with_one_call_a_second() {
        let server = TestRedis::start();
        let node = Arc::new(server.semaphore());
        let permit = take(&node, "x").await;
        let _: String = server.command(&["CONFIG", "RESETSTAT"]);
        eventually("it has read twice", async || server.calls("hget") >= 6).await;
        assert_eq!(server.calls("hget"), 3 * server.calls("evalsha"));
        assert_eq!(server.calls("hgetall"), 0);
        drop(permit);
    }
}
