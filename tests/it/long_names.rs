//! Names that are too long to be stored in full come back as they are stored, and are the same names.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use http::request::Parts;
use http::{Request, Response};
use http_body_util::Full;
use proptest::collection::vec;
use proptest::prelude::*;
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::CachedLimit;
use tower_semaphore::operate::{Cursor, Mode, TenantChange};
use tower_semaphore::{Ask, ConcurrencyLimitLayer, Name, Policy, Semaphore};

/// A name that is replaced by its hash as a whole.
fn long(first: &str) -> Name {
    let name = Name::new(first).part("b".repeat(64)).part("c".repeat(64));
    assert!(name.as_str().starts_with("##"), "{name}");
    name
}

/// The text that an operator has.
fn read(stored: &str) -> Name {
    Name::from_stored(stored).unwrap()
}

fn policy(limit: u32) -> Policy {
    Policy::builder(limit).wait_timeout(Duration::ZERO).build().unwrap()
}

/// Parts around the bounds, with all that has to be encoded.
fn part() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        vec(any::<u8>(), 0..8),
        "[a-c:%#!.]{0,5}".prop_map(String::into_bytes),
        "[ab]{60,68}".prop_map(String::into_bytes),
        "(%|:){19,24}".prop_map(String::into_bytes),
    ]
}

proptest! {
    #[test]
    fn what_is_stored_is_read_as_the_name(parts in vec(part(), 1..6)) {
        let name = parts[1..].iter().fold(Name::new(&parts[0]), Name::part);
        prop_assert_eq!(Name::from_stored(name.as_str()), Some(name));
    }

    #[test]
    fn what_is_read_is_stored_so(text in "([a-c.%#!:]|%2F|%2f|%41|##?[0-9a-f]{62,66}){0,8}") {
        if let Some(name) = Name::from_stored(&text) {
            prop_assert_eq!(name.as_str(), &text);
        }
    }
}

#[test]
fn what_no_name_is_stored_as_is_not_read() {
    let hash = "0123456789abcdef".repeat(4);
    let joined = format!("a:##{hash}");
    for text in ["a", "a:b", "%", "%:%", "!", "a:!", "%2F", "a%2Fb", &format!("#{hash}"), &joined] {
        assert!(Name::from_stored(text).is_some(), "{text}");
    }
    let too_long = [&"a".repeat(65), &format!("###{hash}"), &format!("#{}", &hash[1..])];
    let wrong = ["", ":", "a:", "a b", "a/b", "é", "%2", "%2f", "%41", "a%", "!x", "#", "##", "*"];
    for text in wrong.into_iter().chain(too_long.map(|text| &**text)) {
        assert_eq!(Name::from_stored(text), None, "{text}");
    }
}

/// Every call that shows an operator a name, or takes one.
async fn operated(operator: &Semaphore, other: &Semaphore) {
    let name = long("a");
    let permit = other.acquire(name.clone(), &policy(2)).await.unwrap();

    let page = operator.list(Cursor::default(), 10).await.unwrap();
    assert_eq!(page.semaphores.iter().map(|one| &one.name).collect::<Vec<_>>(), [&name]);
    let listed = read(page.semaphores[0].name.as_str());

    let seen = operator.inspect(listed.clone()).await.unwrap();
    assert_eq!((seen.in_use, seen.holders.len()), (1, 1));
    assert_eq!(operator.inspect_fleet(listed.clone()).await.unwrap().in_use, 1);

    operator.set_limit(listed.clone(), 1).await.unwrap();
    other.acquire(name.clone(), &policy(2)).await.unwrap_err();
    let set = other.overrides().await.unwrap();
    assert_eq!(
        set.iter().map(|(name, set)| (name, set.limit)).collect::<Vec<_>>(),
        [(&name, Some(1))]
    );
    assert_eq!(other.limit_of(name.clone()).await.unwrap().limit, Some(1));

    operator.pause(listed.clone()).await.unwrap();
    assert_eq!(other.limit_of(name.clone()).await.unwrap().mode, Mode::Paused);
    operator.resume(listed.clone()).await.unwrap();
    operator.clear_limit(listed.clone()).await.unwrap();
    assert_eq!(other.overrides().await.unwrap(), []);
    drop(other.acquire(name.clone(), &policy(2)).await.unwrap());

    assert!(operator.revoke(listed, seen.holders[0].id).await.unwrap());
    permit.lost().await;
    assert_eq!(operator.inspect(name).await.unwrap().in_use, 0);
}

/// The same for tenants.
async fn tenants_operated(operator: &Semaphore, other: &Semaphore) {
    let (name, tenant) = (long("a"), long("t"));
    let ask = || Ask::of(name.clone()).by(tenant.clone());
    let _permit = other.acquire(ask(), &policy(5)).await.unwrap();
    let seen = operator.inspect_fleet(name.clone()).await.unwrap();
    assert_eq!(seen.tenants[0].name.as_ref(), Some(&tenant));

    let (name_read, tenant_read) = (read(name.as_str()), read(tenant.as_str()));
    let cap = |permits| TenantChange::new().limit(permits);
    operator.set_tenant(name_read.clone(), tenant_read.clone(), cap(Some(1))).await.unwrap();
    other.acquire(ask(), &policy(5)).await.unwrap_err();
    let set = other.tenant_overrides().await.unwrap();
    assert_eq!(
        set.iter().map(|(of, whose, _)| (of, whose)).collect::<Vec<_>>(),
        [(&name, &tenant)]
    );
    let seen = operator.inspect_fleet(name_read.clone()).await.unwrap();
    assert_eq!(seen.tenants[0].set.limit, Some(1));
    operator.set_tenant(name_read, tenant_read, cap(None)).await.unwrap();
    assert!(other.tenant_overrides().await.unwrap().is_empty());
    drop(other.acquire(ask(), &policy(5)).await.unwrap());
}

/// The same for further limits.
async fn limits_operated(operator: &Semaphore, other: &Semaphore) {
    let (name, limit, value) = (long("a"), long("l"), long("v"));
    let ask = || Ask::of(name.clone()).also(limit.clone(), value.clone(), 5);
    let _permit = other.acquire(ask(), &policy(5)).await.unwrap();
    let set = async |cap: Option<u32>| {
        let [name, limit, value] = [&name, &limit, &value].map(|name| read(name.as_str()));
        operator.set_further_limit(name, limit, value, cap).await.unwrap();
        other.further_limit_overrides().await.unwrap()
    };
    let all = set(Some(1)).await;
    assert_eq!(
        all.iter().map(|set| (&set.semaphore, &set.limit, &set.value)).collect::<Vec<_>>(),
        [(&name, &limit, &value)]
    );
    other.acquire(ask(), &policy(5)).await.unwrap_err();
    assert!(set(None).await.is_empty());
    drop(other.acquire(ask(), &policy(5)).await.unwrap());
}

#[tokio::test]
async fn an_operator_acts_on_a_name_that_is_listed() {
    use tower_semaphore::backend::MemoryBackend;
    let backend = MemoryBackend::new();
    operated(&Semaphore::new(backend.clone()), &Semaphore::new(backend)).await;
    let backend = MemoryBackend::new();
    tenants_operated(&Semaphore::new(backend.clone()), &Semaphore::new(backend)).await;
    let backend = MemoryBackend::new();
    limits_operated(&Semaphore::new(backend.clone()), &Semaphore::new(backend)).await;
}

#[cfg(feature = "redis")]
#[tokio::test]
async fn an_operator_acts_on_a_name_that_redis_lists() {
    let redis = crate::support::redis::TestRedis::start();
    operated(&redis.semaphore(), &redis.semaphore()).await;
    let redis = crate::support::redis::TestRedis::start();
    tenants_operated(&redis.semaphore(), &redis.semaphore()).await;
    let redis = crate::support::redis::TestRedis::start();
    limits_operated(&redis.semaphore(), &redis.semaphore()).await;
}

fn layer(semaphore: &Semaphore) -> tower_semaphore::limit::ConcurrencyLimitBuilder {
    ConcurrencyLimitLayer::builder(semaphore, "api").key(|_: &Parts| Some(long("a")))
}

async fn ask(layer: &ConcurrencyLimitLayer) -> Response<()> {
    let handler = service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::<bytes::Bytes>::default()))
    });
    layer.layer(handler).oneshot(Request::new(())).await.unwrap().map(drop)
}

#[tokio::test]
async fn a_remembered_limit_is_forgotten_by_what_the_key_is_stored_as() {
    let plan = Arc::new(AtomicU32::new(0));
    let limits = CachedLimit::builder({
        let plan = Arc::clone(&plan);
        move |_, _| std::future::ready(Ok::<_, Infallible>(plan.load(Ordering::Relaxed)))
    });
    let limits = limits.build().unwrap();
    let layer = layer(&Semaphore::in_memory()).limit_cached(&limits).build().unwrap();
    assert_eq!(ask(&layer).await.status(), 429);
    plan.store(1, Ordering::Relaxed);
    assert_eq!(ask(&layer).await.status(), 429);
    limits.forget(&read(long("a").as_str()));
    assert!(limits.is_empty());
    assert_eq!(ask(&layer).await.status(), 200);
}

#[cfg(feature = "metrics")]
#[tokio::test]
async fn a_key_is_told_apart_by_what_it_is_stored_as() {
    use tower_semaphore::limit::KeyLabels;

    let recorded = crate::support::recorded::Recorded::new();
    let key = long("a");
    let labels = KeyLabels::listed([read(key.as_str())]);
    let layer = layer(&Semaphore::in_memory()).limit(1).key_labels(labels).build().unwrap();
    ask(&layer).await;
    let all = recorded.all();
    assert!(all.keys().any(|series| series.contains(&format!("key={key}"))), "{all:#?}");
}
