//! Each instrument moves when its event happens, and no label has more values than configured.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::ready;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use tokio_test::{assert_pending, task};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_semaphore::limit::{
    ConcurrencyLimitBuilder, HeaderKey, KeyLabels, MissingKey, RefusalReason, WaitBudget,
};
use tower_semaphore::metrics::{
    ACTIVE_PERMITS, BACKEND_CONNECTIONS, BACKEND_CONNECTS, BACKEND_DISCONNECTS,
    BACKEND_OPERATION_DURATION, BACKEND_QUARANTINED, BACKEND_UNAVAILABLE, BUCKETS, EXPECTED_WAIT,
    LEASE_RENEWALS, OVERTAKING_GRANTS, PAUSES, PERMIT_DURATION, PERMITS_LOST, PERMITS_PASSED_ON,
    QUEUED_REQUESTS, REQUESTS, TENANT_LINES, TIME_IN_QUEUE, WAIT_TIMEOUT,
};
use tower_semaphore::{Ask, ConcurrencyLimitLayer, Feedback, Limit, Policy, Semaphore};

use crate::support::eventually;
use crate::support::recorded::Recorded;

const ALL: [&str; 19] = [
    EXPECTED_WAIT,
    REQUESTS,
    ACTIVE_PERMITS,
    QUEUED_REQUESTS,
    TIME_IN_QUEUE,
    PERMIT_DURATION,
    WAIT_TIMEOUT,
    TENANT_LINES,
    OVERTAKING_GRANTS,
    PERMITS_LOST,
    PERMITS_PASSED_ON,
    PAUSES,
    LEASE_RENEWALS,
    BACKEND_OPERATION_DURATION,
    BACKEND_CONNECTIONS,
    BACKEND_UNAVAILABLE,
    BACKEND_QUARANTINED,
    BACKEND_CONNECTS,
    BACKEND_DISCONNECTS,
];

fn policy(limit: impl Into<Limit>, wait: Duration) -> Policy {
    Policy::builder(limit).wait_timeout(wait).max_queue(1).name("jobs").build().unwrap()
}

fn of(name: &str) -> String {
    format!("{name}{{policy=jobs}}")
}

/// A series without labels.
fn alone(recorded: &Recorded, name: &str) -> f64 {
    recorded.get(&format!("{name}{{}}"))
}

fn requests(policy: &str, result: &str) -> String {
    format!("{REQUESTS}{{policy={policy},result={result}}}")
}

#[tokio::test]
async fn a_pause_is_counted_once_with_its_cause() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let none = policy(2, Duration::ZERO);
    let count = |cause| recorded.get(&format!("{PAUSES}{{cause={cause}}}"));
    let permit = semaphore.acquire("x", &none).await.unwrap();
    let long = Duration::from_secs(30);
    permit.feedback(Feedback::Backoff(long));
    permit.feedback(Feedback::Backoff(long / 2));
    assert_eq!(count("upstream"), 1.0);
    semaphore.acquire("x", &none).await.unwrap_err();
    assert_eq!(recorded.get(&requests("jobs", "upstream_pause")), 1.0);
    semaphore.pause_for("x", 2 * long).await.unwrap();
    assert_eq!((count("operator"), count("upstream")), (1.0, 1.0));
}

#[tokio::test]
async fn the_wait_that_rejected_requests_would_have_had_is_recorded() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let (long, none) = (policy(1, Duration::from_secs(60)), policy(1, Duration::ZERO));
    let mut held = semaphore.acquire("x", &long).await.unwrap();
    semaphore.acquire("x", &none).await.unwrap_err();
    assert_eq!(recorded.get(&of(EXPECTED_WAIT)), 0.0, "nothing is known");
    for _ in 0..5 {
        let mut next = task::spawn(semaphore.acquire("x", &long));
        assert_pending!(next.poll());
        tokio::time::sleep(Duration::from_millis(5)).await;
        drop(held);
        held = next.await.unwrap();
    }
    semaphore.acquire("x", &none).await.unwrap_err();
    assert_eq!(recorded.get(&of(EXPECTED_WAIT)), 1.0);
    let brief = Policy::builder(1).wait_timeout(Duration::from_millis(1)).name("jobs");
    let brief = brief.refuse_hopeless(true).build().unwrap();
    semaphore.acquire("x", &brief).await.unwrap_err();
    assert_eq!(recorded.get(&requests("jobs", "hopeless")), 1.0);
    assert_eq!(recorded.get(&of(EXPECTED_WAIT)), 2.0);
}

#[tokio::test]
async fn each_outcome_of_a_request_is_counted_once() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let (long, none) = (policy(1, Duration::from_secs(60)), policy(1, Duration::ZERO));
    let count = |result| recorded.get(&requests("jobs", result));

    let held = semaphore.acquire("x", &long).await.unwrap();
    assert_eq!((count("acquired"), recorded.get(&of(ACTIVE_PERMITS))), (1.0, 1.0));

    semaphore.acquire("x", &none).await.unwrap_err();
    assert_eq!(count("limit"), 1.0);

    let mut waits = task::spawn(semaphore.acquire("x", &long));
    assert_pending!(waits.poll());
    assert_pending!(waits.poll());
    assert_eq!(recorded.get(&of(QUEUED_REQUESTS)), 1.0);
    semaphore.acquire("x", &long).await.unwrap_err();
    assert_eq!(count("queue_full"), 1.0);

    drop(waits);
    assert_eq!((count("request_canceled"), recorded.get(&of(QUEUED_REQUESTS))), (1.0, 0.0));

    semaphore.acquire("x", &policy(1, Duration::from_millis(5))).await.unwrap_err();
    assert_eq!((count("queue_timeout"), recorded.get(&of(QUEUED_REQUESTS))), (1.0, 0.0));

    let mut waits = task::spawn(semaphore.acquire("x", &long));
    assert_pending!(waits.poll());
    drop(held);
    let next = waits.await.unwrap();
    assert_eq!((count("acquired_after_wait"), recorded.get(&of(ACTIVE_PERMITS))), (1.0, 1.0));
    drop(next);

    drop(semaphore.acquire("x", &policy(Limit::Unlimited, Duration::ZERO)).await.unwrap());
    assert_eq!((count("unlimited"), recorded.get(&of(ACTIVE_PERMITS))), (1.0, 0.0));

    semaphore.shutdown().await;
    semaphore.acquire("x", &long).await.unwrap_err();
    assert_eq!(count("closed"), 1.0);

    // Two at once, one after a wait, one in vain.
    let all = recorded.all();
    assert_eq!((all[&of(TIME_IN_QUEUE)], all[&of(PERMIT_DURATION)]), (3.0, 2.0));
    let of_requests = all.iter().filter(|(name, _)| name.starts_with(REQUESTS));
    assert_eq!(of_requests.map(|(_, count)| count).sum::<f64>(), 8.0, "{all:#?}");
    assert_eq!(all[&of(WAIT_TIMEOUT)], 60.0);
}

#[tokio::test]
async fn the_series_of_what_is_built_are_there_before_its_first_request() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::new(tower_semaphore::backend::MemoryServer::new());
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "tenant")
        .key(HeaderKey::from_static("x-tenant"))
        .limit(1)
        .key_labels(KeyLabels::listed(["acme"]))
        .build()
        .unwrap();
    let policy = policy(1, Duration::from_secs(7));
    tower_semaphore::metrics::register(&policy);
    let mut all = recorded.all();
    assert_eq!(all.remove(&of(WAIT_TIMEOUT)), Some(7.0));
    assert_eq!(all.remove(&format!("{WAIT_TIMEOUT}{{policy=tenant}}")), Some(2.0));
    let names: BTreeSet<_> = all.keys().map(|series| series.split('{').next().unwrap()).collect();
    let missing: Vec<_> = ALL.iter().filter(|name| !names.contains(*name)).collect();
    assert_eq!(missing, [&WAIT_TIMEOUT], "{names:?}");
    for key in ["acme", "other"] {
        let series = format!("{REQUESTS}{{policy=tenant,key={key},result=queue_full}}");
        assert!(all.contains_key(&series), "no {series} in {:#?}", all.keys());
    }
    assert!(all.values().all(|value| *value == 0.0), "{all:?}");

    // Events are counted in the same series.
    drop(semaphore.acquire("x", &policy).await.unwrap());
    assert_eq!(recorded.get(&requests("jobs", "acquired")), 1.0);
    drop(layer);
}

#[tokio::test]
async fn a_permit_is_held_until_its_last_clone_is_gone_or_it_is_released() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let policy = policy(5, Duration::ZERO);
    let seen = || (recorded.get(&of(ACTIVE_PERMITS)), recorded.get(&of(PERMIT_DURATION)));

    let permit = semaphore.acquire("x", &policy).await.unwrap();
    let clone = permit.clone();
    drop(permit);
    assert_eq!(seen(), (1.0, 0.0));
    drop(clone);
    assert_eq!(seen(), (0.0, 1.0));

    let permit = semaphore.acquire("x", &policy).await.unwrap();
    let (left, again) = (permit.clone(), permit.clone());
    permit.release().await.unwrap();
    assert_eq!(seen(), (0.0, 2.0));
    again.release().await.unwrap();
    drop(left);
    assert_eq!(seen(), (0.0, 2.0));

    // Granted, but not taken.
    drop(semaphore.acquire("x", &policy));
    assert_eq!(seen(), (0.0, 2.0));
    assert_eq!(recorded.get(&requests("jobs", "request_canceled")), 1.0);
}

#[tokio::test]
async fn renewals_are_counted_and_so_are_leases_that_are_lost() {
    let recorded = Recorded::new();
    let backend = tower_semaphore::backend::MemoryBackend::new();
    let semaphore = Semaphore::new(backend);
    let policy = Policy::builder(5).lease(Policy::MIN_LEASE).build().unwrap();
    let permit = semaphore.acquire("x", &policy).await.unwrap();
    let renewed = format!("{LEASE_RENEWALS}{{result=renewed}}");
    eventually("renewed", async || recorded.get(&renewed) >= 2.0).await;
    assert_eq!(recorded.get(&format!("{PERMITS_LOST}{{policy=default}}")), 0.0);
    semaphore.shutdown().await;
    assert!(permit.is_lost());
    assert_eq!(recorded.get(&format!("{PERMITS_LOST}{{policy=default}}")), 1.0);
    assert_eq!(recorded.get(&format!("{ACTIVE_PERMITS}{{policy=default}}")), 1.0);
    // A lost permit is not released; its holder has let go of it when the last clone is gone.
    permit.clone().release().await.unwrap();
    assert_eq!(recorded.get(&format!("{ACTIVE_PERMITS}{{policy=default}}")), 1.0);
    drop(permit);
    assert_eq!(recorded.get(&format!("{ACTIVE_PERMITS}{{policy=default}}")), 0.0);
    let of_backend = recorded.all().into_keys().find(|name| name.contains("backend"));
    assert_eq!(of_backend, None, "the embedded backend has no connection");
}

type Answer = Result<Response<Full<Bytes>>, Infallible>;

/// Makes one request as this tenant. Returns the response, whose body still has its permit.
async fn ask(
    layer: &ConcurrencyLimitLayer,
    tenant: Option<&str>,
) -> Response<impl http_body::Body + use<>> {
    let answer = |_: Request<()>| ready(Answer::Ok(Response::new(Full::from("done"))));
    let mut service = layer.layer(service_fn(answer));
    let mut request = Request::builder();
    if let Some(tenant) = tenant {
        request = request.header("x-tenant", tenant);
    }
    service.ready().await.unwrap().call(request.body(()).unwrap()).await.unwrap()
}

fn builder(semaphore: &Semaphore) -> ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, "tenant")
        .key(HeaderKey::from_static("x-tenant"))
        .limit(1)
        .wait_timeout(Duration::ZERO)
}

#[tokio::test]
async fn a_layer_counts_under_its_name_and_never_by_key_unless_asked() {
    // The layer is built first: the order does not matter.
    let semaphore = Semaphore::in_memory();
    let layer = builder(&semaphore).skip(|parts| parts.uri.path() == "/health").build().unwrap();
    let recorded = Recorded::new();

    let first = ask(&layer, Some("acme")).await;
    assert_eq!(ask(&layer, Some("acme")).await.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(recorded.get(&format!("{ACTIVE_PERMITS}{{policy=tenant}}")), 1.0);
    drop(first);
    assert_eq!(recorded.get(&format!("{ACTIVE_PERMITS}{{policy=tenant}}")), 0.0);
    assert_eq!(ask(&layer, None).await.status(), StatusCode::BAD_REQUEST);
    let bypass = builder(&semaphore).on_missing_key(MissingKey::Bypass).build().unwrap();
    ask(&bypass, None).await;
    let health = service_fn(|_: Request<()>| ready(Answer::Ok(Response::default())));
    layer.layer(health).oneshot(Request::get("/health").body(()).unwrap()).await.unwrap();
    let count = |result| recorded.get(&requests("tenant", result));
    assert_eq!((count("acquired"), count("limit"), count("missing_key")), (1.0, 1.0, 1.0));
    assert_eq!(count("bypassed"), 2.0);

    let before = recorded.all().len();
    for tenant in 0..100 {
        ask(&layer, Some(&format!("tenant-{tenant}"))).await;
    }
    assert_eq!(recorded.all().len(), before);
    assert!(!recorded.all().keys().any(|name| name.contains("key=") || name.contains("acme")));
}

#[tokio::test]
async fn a_request_that_has_no_time_left_to_wait_has_timed_out() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let _held = semaphore.acquire("tenant", &Policy::new(1)).await.unwrap();
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "tenant").limit(1).build().unwrap();
    let answer = |_: Request<()>| ready(Answer::Ok(Response::default()));
    let mut request = Request::new(());
    request.extensions_mut().insert(WaitBudget::of(Duration::ZERO));
    let response = layer.layer(service_fn(answer)).oneshot(request).await.unwrap();
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    let count = |result| recorded.get(&requests("tenant", result));
    assert_eq!((count("queue_timeout"), count("limit")), (1.0, 0.0));
}

#[tokio::test]
async fn no_single_wait_timeout_is_shown_where_it_goes_by_the_request() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let series = format!("{WAIT_TIMEOUT}{{policy=tenant}}");
    for labels in [KeyLabels::none(), KeyLabels::first(5)] {
        let builder = builder(&semaphore).wait_timeout_by(|_, _| Duration::from_secs(9));
        ask(&builder.key_labels(labels).build().unwrap(), Some("acme")).await;
        assert!(!recorded.all().contains_key(&series));
    }
    ask(&builder(&semaphore).build().unwrap(), Some("acme")).await;
    assert_eq!(recorded.get(&series), 0.0);
}

#[tokio::test]
async fn lines_of_tenants_and_what_they_change_are_counted() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let policy = Policy::builder(3).wait_timeout(Duration::from_secs(60)).name("jobs").build();
    let policy = policy.unwrap();
    let ask = |tenant: &str, cost| semaphore.acquire(Ask::of("x").by(tenant).cost(cost), &policy);
    let held = ask("a", 3).await.unwrap();
    assert_eq!(recorded.get(&of(ACTIVE_PERMITS)), 3.0, "permits, and not requests");
    let (mut a, b) = (task::spawn(ask("a", 1)), task::spawn(ask("a", 2)));
    let mut c = task::spawn(ask("c", 1));
    assert_pending!(a.poll());
    assert_pending!(c.poll());
    assert_eq!(alone(&recorded, TENANT_LINES), 2.0);
    let first = semaphore.acquire(Ask::of("y").by("a").cost(3), &policy).await.unwrap();
    let mut late = [task::spawn(semaphore.acquire(Ask::of("y").by("a"), &policy))];
    let mut other = task::spawn(semaphore.acquire(Ask::of("y").by("b").cost(3), &policy));
    assert_pending!(late[0].poll());
    assert_pending!(other.poll());
    assert_eq!(alone(&recorded, TENANT_LINES), 4.0, "of all semaphores");
    drop(first);
    // With equal use, the tenant that has been there longer is first: the other one came to that level only now.
    assert!(other.is_woken() && !late[0].is_woken());
    drop((held, b));
    assert_eq!(alone(&recorded, TENANT_LINES), 1.0);
    drop((a, c, late, other));
    assert_eq!((alone(&recorded, TENANT_LINES), recorded.get(&of(ACTIVE_PERMITS))), (0.0, 0.0));
}

#[tokio::test]
async fn a_grant_before_an_older_request_of_another_tenant_is_counted() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let policy = policy(2, Duration::from_secs(60));
    let ask = |tenant: &str| semaphore.acquire(Ask::of("x").by(tenant), &policy);
    let held = [ask("a").await.unwrap(), ask("a").await.unwrap()];
    let (older, later) = (ask("a"), ask("b"));
    let [first, second] = held;
    drop(first);
    let later = later.await.unwrap();
    assert_eq!(alone(&recorded, OVERTAKING_GRANTS), 1.0);
    drop(second);
    let older = older.await.unwrap();
    assert_eq!(alone(&recorded, OVERTAKING_GRANTS), 1.0);
    drop((older, later));
}

#[test]
fn labels_of_tenants_need_tenants_and_stand_alone() {
    let semaphore = Semaphore::in_memory();
    let builder = || ConcurrencyLimitLayer::builder(&semaphore, "api").limit(5);
    let some = || KeyLabels::first(3);
    let alone = builder().tenant_labels(some()).build().unwrap_err().to_string();
    assert!(alone.contains("fair_by"), "{alone}");
    let both = builder().fair_by(HeaderKey::from_static("x-tenant")).key_labels(some());
    let both = both.tenant_labels(some()).build().unwrap_err().to_string();
    assert!(both.contains("one of them"), "{both}");
}

#[tokio::test]
async fn tenants_are_told_apart_only_where_that_was_asked_for() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let tenant = || HeaderKey::from_static("x-tenant");
    let fair = || ConcurrencyLimitLayer::builder(&semaphore, "api").limit(5).fair_by(tenant());
    let count = |name: &str| recorded.all().iter().filter(|(id, _)| id.contains(name)).count();
    ask(&fair().build().unwrap(), Some("acme")).await;
    assert_eq!((count("acme"), count("tenant=")), (0, 0));
    let layer = fair().tenant_labels(KeyLabels::listed(["acme"])).build().unwrap();
    for tenant in ["acme", "globex"] {
        ask(&layer, Some(tenant)).await;
    }
    assert!(count("tenant=acme") > 0 && count("tenant=other") > 0 && count("globex") == 0);
}

#[tokio::test]
async fn keys_are_told_apart_as_far_as_was_asked_for() {
    let recorded = Recorded::new();
    let semaphore = Semaphore::in_memory();
    let keys = |recorded: &Recorded| {
        let all = recorded.all();
        let acquired = all.iter().filter(|(name, _)| name.contains("result=acquired}"));
        let key = |name: &str| Some(name.split("key=").nth(1)?.split(',').next()?.to_owned());
        acquired.filter_map(|(name, n)| Some((key(name)?, *n))).collect::<Vec<_>>()
    };
    let of = |pairs: &[(&str, f64)]| {
        pairs.iter().map(|(key, n)| ((*key).to_owned(), *n)).collect::<Vec<_>>()
    };

    let listed = KeyLabels::listed(["acme", "a/b"]);
    let layer = builder(&semaphore).key_labels(listed).build().unwrap();
    for tenant in ["acme", "globex", "acme", "initech", "a/b"] {
        ask(&layer, Some(tenant)).await;
    }
    assert_eq!(keys(&recorded), of(&[("a%2Fb", 1.0), ("acme", 2.0), ("other", 2.0)]));

    drop(recorded);
    let recorded = Recorded::new();
    let layer = builder(&semaphore).key_labels(KeyLabels::first(2)).build().unwrap();
    for tenant in 0..100 {
        ask(&layer, Some(&format!("t{tenant}"))).await;
    }
    ask(&layer, Some("t1")).await;
    assert_eq!(keys(&recorded), of(&[("other", 98.0), ("t0", 1.0), ("t1", 2.0)]));
    let series = recorded.all().len();
    for tenant in 100..200 {
        ask(&layer, Some(&format!("t{tenant}"))).await;
    }
    assert_eq!(recorded.all().len(), series);

    let error = builder(&semaphore).key_labels(KeyLabels::first(10_001)).build().unwrap_err();
    assert_eq!(error.to_string(), "number of key labels is 10001; expected 0 to 10000");
}

#[test]
fn buckets_rise_and_suit_streams() {
    for (name, buckets) in BUCKETS {
        assert!(buckets.is_sorted_by(|a, b| a < b), "{name}");
    }
    let [.., (name, held), _] = BUCKETS;
    assert!(name == PERMIT_DURATION && held.last() >= Some(&3600.0));
}

#[test]
fn reasons_of_refusals_are_called_the_same_as_results() {
    let reasons = [
        RefusalReason::Limit,
        RefusalReason::QueueFull,
        RefusalReason::QueueTimeout,
        RefusalReason::MissingKey,
        RefusalReason::Unavailable,
        RefusalReason::Closed,
    ];
    let page = include_str!("../../docs/observability.md");
    for reason in reasons {
        assert!(page.contains(&format!("| `{}` |", reason.as_str())), "{reason:?}");
    }
}

#[cfg(feature = "redis")]
mod redis {
    use tower_semaphore::backend::{AfterLoss, RedisBackend};
    use tower_semaphore::{ConnectionState, OnUnavailable};

    use super::*;
    use crate::support::redis::TestRedis;
    use crate::support::semaphore::{down, up};

    fn short(on_unavailable: OnUnavailable, name: &'static str) -> Policy {
        let policy = Policy::builder(5).wait_timeout(Duration::ZERO).lease(Policy::MIN_LEASE);
        policy.on_unavailable(on_unavailable).name(name).build().unwrap()
    }

    fn calls(op: &str) -> String {
        format!("{BACKEND_OPERATION_DURATION}{{op={op}}}")
    }

    #[tokio::test]
    async fn a_quarantine_is_seen_to_begin_and_to_end() {
        let recorded = Recorded::new();
        // The server is young, so all of its data may be lost.
        let redis = TestRedis::start();
        let backend = RedisBackend::builder(redis.url()).after_loss(AfterLoss::Quarantine);
        let semaphore = Semaphore::new(backend.build().unwrap());
        let level = || alone(&recorded, BACKEND_QUARANTINED);
        let policy = Policy::builder(1).lease(Duration::from_secs(4)).name("jobs").build().unwrap();
        for name in ["x", "y"] {
            semaphore.try_acquire(name, &policy).await.unwrap_err();
        }
        assert_eq!(level(), 1.0, "the server, however many names");
        assert_eq!(recorded.get(&requests("jobs", "quarantine")), 2.0);
        eventually("it ends", async || level() == 0.0).await;
        drop(semaphore.try_acquire("x", &policy).await.unwrap());
    }

    #[tokio::test]
    async fn the_backend_is_seen_to_go_and_to_come_back() {
        let recorded = Recorded::new();
        let mut redis = TestRedis::start();
        let semaphore = redis.semaphore();
        let refuse = short(OnUnavailable::Refuse, "refuse");
        let level = |name: &str| recorded.get(&format!("{name}{{}}"));
        let connects = |result| recorded.get(&format!("{BACKEND_CONNECTS}{{result={result}}}"));

        let held = semaphore.acquire("x", &refuse).await.unwrap();
        drop(semaphore.acquire("x", &refuse).await.unwrap());
        semaphore.inspect("x").await.unwrap();
        eventually("released", async || recorded.get(&calls("release")) == 1.0).await;
        assert_eq!(recorded.get(&calls("acquire")), 2.0);
        eventually("renewed", async || recorded.get(&calls("renew")) >= 1.0).await;
        assert!(recorded.get(&format!("{LEASE_RENEWALS}{{result=renewed}}")) >= 1.0);
        assert_eq!((level(BACKEND_CONNECTIONS), level(BACKEND_UNAVAILABLE)), (1.0, 0.0));
        assert_eq!((connects("connected"), connects("failed")), (1.0, 0.0));
        assert_eq!(recorded.get(&requests("refuse", "acquired")), 2.0);

        redis.kill();
        down(&semaphore).await;
        assert_eq!((level(BACKEND_CONNECTIONS), level(BACKEND_UNAVAILABLE)), (0.0, 1.0));
        assert_eq!(level(BACKEND_DISCONNECTS), 1.0);
        assert!(connects("failed") >= 1.0);
        semaphore.acquire("x", &refuse).await.unwrap_err();
        assert_eq!(recorded.get(&requests("refuse", "unavailable")), 1.0);
        drop(semaphore.acquire("y", &short(OnUnavailable::Admit, "admit")).await.unwrap());
        assert_eq!(recorded.get(&requests("admit", "admitted")), 1.0);
        drop(semaphore.acquire("z", &short(OnUnavailable::Local(1), "local")).await.unwrap());
        assert_eq!(recorded.get(&requests("local", "local")), 1.0);
        held.lost().await;
        let lost = format!("{PERMITS_LOST}{{policy=refuse}}");
        eventually("counted as lost", async || recorded.get(&lost) == 1.0).await;
        drop(held);

        redis.restart();
        up(&semaphore).await;
        assert_eq!((level(BACKEND_CONNECTIONS), level(BACKEND_UNAVAILABLE)), (1.0, 0.0));
        assert_eq!(connects("connected"), 2.0);
        semaphore.shutdown().await;
        assert_eq!((level(BACKEND_CONNECTIONS), level(BACKEND_UNAVAILABLE)), (0.0, 0.0));
        for name in ["refuse", "admit", "local"] {
            assert_eq!(recorded.get(&format!("{ACTIVE_PERMITS}{{policy={name}}}")), 0.0, "{name}");
        }
        assert!(matches!(semaphore.health().connection, ConnectionState::Connecting));
    }

    #[tokio::test]
    async fn calls_that_fail_are_told_apart() {
        let recorded = Recorded::new();
        let redis = TestRedis::start();
        let semaphore = redis.semaphore();
        let policy = short(OnUnavailable::Refuse, "p");
        drop(semaphore.acquire("x", &policy).await.unwrap());
        let of = |error| format!("{BACKEND_OPERATION_DURATION}{{op=acquire,error.type={error}}}");

        let _: () = redis.command(&["SET", "semaphore:{taken}", "1"]);
        semaphore.acquire("taken", &policy).await.unwrap_err();
        assert_eq!(recorded.get(&of("refused")), 1.0);
        assert_eq!(recorded.get(&of("connection")), 0.0);

        redis.signal("STOP");
        semaphore.acquire("x", &policy).await.unwrap_err();
        assert_eq!(recorded.get(&of("connection")), 1.0);
        redis.signal("CONT");
    }

    #[tokio::test]
    async fn permits_that_are_passed_on_are_counted() {
        let recorded = Recorded::new();
        let redis = TestRedis::start();
        let semaphore = redis.semaphore();
        let plain = Policy::builder(1).name("p");
        let [plain, reuse] = [plain.clone(), plain.reuse(true)].map(|p| p.build().unwrap());
        for _ in 0..3 {
            drop(semaphore.acquire("plain", &plain).await.unwrap());
        }
        assert_eq!(alone(&recorded, PERMITS_PASSED_ON), 0.0);
        // What is known of other processes lasts 50 ms, during which a loaded machine may run only one of these.
        let (mut requests, before) = (0.0, recorded.get(&calls("acquire")));
        while alone(&recorded, PERMITS_PASSED_ON) < 3.0 && requests < 1000.0 {
            drop(semaphore.acquire("hot", &reuse).await.unwrap());
            requests += 1.0;
        }
        let asked = recorded.get(&calls("acquire")) - before;
        let passed_on = alone(&recorded, PERMITS_PASSED_ON);
        assert!(passed_on >= 3.0, "{passed_on} of {requests}");
        assert_eq!(passed_on, requests - asked);
    }

    #[tokio::test]
    async fn every_instrument_is_described_and_documented() {
        let recorded = Recorded::new();
        let redis = TestRedis::start();
        let semaphore = redis.semaphore();
        drop(semaphore.acquire("x", &Policy::new(1)).await.unwrap());
        let described = recorded.described();
        let mut names: Vec<&str> = described.keys().map(String::as_str).collect();
        let mut all = ALL;
        names.sort_unstable();
        all.sort_unstable();
        assert_eq!(names, all);
        let page = include_str!("../../docs/observability.md");
        for (name, description) in described {
            let (unit, _) = description.unwrap_or_else(|| panic!("{name} is not described"));
            let seconds = BUCKETS.iter().any(|(known, _)| *known == name) || name == WAIT_TIMEOUT;
            assert_eq!(unit, Some(if seconds { "seconds" } else { "count" }), "{name}");
            assert!(page.contains(&format!("`{name}`")), "{name} is not documented");
        }
        for series in recorded.all().into_keys() {
            if let Some(result) =
                series.strip_prefix(REQUESTS).and_then(|s| s.split("result=").nth(1))
            {
                let result = result.trim_end_matches('}');
                assert!(page.contains(&format!("| `{result}` |")), "{result} is not documented");
            }
        }
    }
}
