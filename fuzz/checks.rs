//! What holds for any bytes: checked by the fuzz targets, and by the property tests of the normal
//! run (`tests/it/properties.rs`), which also go through the corpus.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::limit::{MissingKey, Refusal};
use tower_semaphore::protocol::{
    Bound, BoundRate, Caller, Charge, Claim, FurtherLimit, Ledger, NodeId, Numbered, PlaceId,
    Tenant,
};
use tower_semaphore::{ConcurrencyLimitLayer, Limit, Name, Policy, Semaphore};

/// Two names: parts are separated by `|`, the two by `\n`.
pub(crate) fn names(data: &[u8]) {
    let (one, two) = match data.iter().position(|byte| *byte == b'\n') {
        Some(at) => (parts(&data[..at]), parts(&data[at + 1..])),
        None => (parts(data), parts(b"")),
    };
    let (a, b) = (name(&one), name(&two));
    assert_eq!(a == b, one == two, "{one:?} {two:?} -> {a} {b}");
    assert_eq!(a.as_str() == b.as_str(), a == b);
    // Nor do they meet behind another part, or before it.
    let (behind, ahead) = (Name::new("x").join(&a), Name::new("x").join(&b));
    assert_eq!(behind == ahead, one == two, "{one:?} {two:?} -> {behind} {ahead}");
    assert_eq!(a.clone().part("x") == b.clone().part("x"), one == two, "{one:?} {two:?}");
    // However it is put together.
    let mut behind = vec![&b"x"[..]];
    behind.extend(&one);
    assert_eq!(Name::new("x").join(&a), name(&behind), "{one:?}");
    [a, b].iter().for_each(plain);
}

fn parts(list: &[u8]) -> Vec<&[u8]> {
    list.split(|byte| *byte == b'|').collect()
}

fn name(parts: &[&[u8]]) -> Name {
    let (first, rest) = parts.split_first().expect("a part");
    rest.iter().fold(Name::new(first), |name, part| name.part(part))
}

fn plain(name: &Name) {
    let text = name.as_str();
    assert!(!text.is_empty() && text.len() <= 128, "{text:?}");
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-%:#!".contains(&byte);
    assert!(text.bytes().all(allowed), "{text:?}");
    assert_eq!(text, name.to_string());
}

/// Numbers of places and nodes from the first bytes, and the text of an id from all.
pub(crate) fn place_ids(data: &[u8]) {
    // Whatever is read is written as it was.
    if let Some(id) = PlaceId::parse(data) {
        let text = id.to_string();
        assert_eq!(text.as_bytes(), data);
        assert!(id.n < PlaceId::N_MAX);
        assert_eq!(text.parse(), Ok(id));
    }
    if let Some(node) = NodeId::parse(data) {
        assert_eq!(node.to_string().as_bytes(), data);
    }
    if let Some(Numbered { n, .. }) = PlaceId::parse_number(data) {
        assert!(n < PlaceId::N_MAX, "{n}");
    }
    // And the other way; and the texts are ordered as the ids are.
    let mut ids = data.chunks_exact(25).take(2).map(|bytes| {
        let number = |at: usize| {
            let eight: [u8; 8] = bytes[at..at + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(eight)
        };
        let node = NodeId::new(number(0));
        assert_eq!(NodeId::parse(node.to_string().as_bytes()), Some(node));
        let n = number(8) % PlaceId::N_MAX;
        let claim = (bytes[16] & 2 == 2).then(|| {
            let terms = number(17);
            let charge = Charge::of_hash(terms, number(9), number(1) >> 28);
            let charges = charge.into_iter().filter(|_| bytes[16] & 8 == 8);
            let claim = Claim::new(Tenant::of_hash(terms))
                .with_weight((terms >> 32) as u32 & 63)
                .with_cost((terms >> 38) as u32 & 63)
                .with_class((terms >> 44).to_le_bytes()[0] & 7)
                .with_each(Some((terms >> 40) as u32).filter(|each| *each > 0));
            charges.fold(claim, Claim::charged)
        });
        let bound = (bytes[16] & 4 == 4).then(|| Bound {
            limit: (number(17) >> 32) as u32,
            headroom: if claim.is_some() { (number(9) >> 32) as u32 } else { 0 },
            rate: claim.and_then(|_| {
                BoundRate::new((number(9) >> 52) as u32, Duration::from_micros(number(17)))
            }),
        });
        let id = PlaceId { node, poll_only: bytes[16] & 1 == 1, n, bound, claim };
        let text = id.to_string();
        assert!(text.len() <= 89, "{text}");
        assert_eq!(PlaceId::parse(text.as_bytes()), Some(id), "{text}");
        id
    });
    if let (Some(one), Some(two)) = (ids.next(), ids.next()) {
        assert_eq!(one.cmp(&two), one.to_string().cmp(&two.to_string()));
        assert_eq!(one == two, one.to_string() == two.to_string());
    }
}

/// A stored ledger: whatever is read has no other form, and every operation on it ends.
pub(crate) fn ledgers(data: &[u8]) {
    let Ok(mut ledger) = Ledger::decode(data) else { return };
    let written = |ledger: &Ledger| {
        let mut bytes = Vec::new();
        ledger.encode(&mut bytes);
        bytes
    };
    assert_eq!(written(&ledger), data);
    let (node, now) = (NodeId::new(1), 1_795_169_853_126_543);
    let caller = |now, limit| Caller {
        now,
        limit,
        headroom: 1,
        for_all: false,
        max_waiting: 100,
        node,
        recalls: true,
    };
    let tenants = Claim::new(Tenant::of_hash(1));
    let claims = [None, Some(tenants), Some(tenants.also(FurtherLimit::of_hash(1, 1)))];
    let newcomers =
        claims.map(|claim| PlaceId { node, poll_only: false, n: 1, bound: None, claim });
    let mut places: Vec<_> = ledger.places().collect();
    places.sort_unstable_by_key(|(id, ..)| *id);
    let ids: Vec<_> = places.iter().map(|(id, ..)| *id).collect();
    let post = &mut |to: NodeId, _: &[_]| to != NodeId::new(7);
    ledger.renew(caller(now, 3), 10_000, &ids, post);
    ledger.acquire(caller(now + 1, 9), 10_000, Some(10), &[], &newcomers, post);
    ledger.acquire(caller(now + 90_000_000, 9), 10_000, None, &[], &newcomers, post);
    if let Some((id, lease_end, _)) = places.first() {
        let _ = ledger.forget_waiting(id.node, now);
        let _ = ledger.forget(id.node, *lease_end, now);
    }
    let again = Ledger::decode(&written(&ledger)).expect("as it was written");
    assert_eq!(again, ledger);
    ledger.release(caller(now, 100), &ids, post);
    ledger.release(caller(now, 100), &newcomers, post);
    assert_eq!((ledger.in_use(), ledger.waiting()), (0, 0));
}

/// A layer's settings from the first bytes, and its name from the rest: whatever `build` accepts
/// gives a response that is well formed.
pub(crate) fn headers(data: &[u8]) {
    let Some((settings, name)) = data.split_first_chunk::<13>() else { return };
    let number = |at: usize| u16::from_le_bytes([settings[at], settings[at + 1]]);
    let status = |at: usize| StatusCode::from_u16(number(at)).unwrap_or(StatusCode::CONFLICT);
    let (full_status, missing) = (status(0), status(2));
    let pause = Duration::from_millis(u64::from(number(4)) * u64::from(number(6)));
    let limit = u32::from(number(8)) << (number(10) % 17);
    let [.., how] = settings;
    // Full because nothing is allowed, because all permits are out, or shut down.
    let (closed, held) = (how & 2 != 0, if how & 8 == 0 { 0 } else { 1 + limit % 5 });
    let limit = if closed { Limit::Permits(limit) } else { Limit::Permits(held) };

    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    let runtime = runtime.expect("a runtime");
    let _inside = runtime.enter();
    let semaphore = Semaphore::in_memory();
    let name = String::from_utf8_lossy(name);
    let keyed = how & 1 == 0;
    let layer = ConcurrencyLimitLayer::builder(&semaphore, &*name)
        .key(move |_: &http::request::Parts| keyed.then_some("key"))
        .on_missing_key(MissingKey::Reject(missing))
        .limit(limit)
        .wait_timeout(Duration::ZERO)
        .full_status(full_status)
        .retry_after(pause)
        .rate_limit_fields(how & 4 == 0)
        .build();
    let Ok(layer) = layer else { return };
    let held: Vec<_> = (0..held)
        .map(|_| semaphore.acquire(Name::new(&*name).part("key"), &Policy::new(held)))
        .map(|acquire| acquire.now_or_never().expect("at once").expect("a permit"))
        .collect();
    if closed {
        let _ = semaphore.shutdown().now_or_never();
    }
    let handler =
        service_fn(|_| async { Ok::<_, Infallible>(Response::new(Full::<Bytes>::default())) });
    let response = layer.layer(handler).oneshot(Request::new(())).now_or_never();
    let response = response.expect("answered at once").unwrap_or_else(|never| match never {});
    let refusal = response.extensions().get::<Refusal>().expect("refused").clone();
    assert_eq!(response.status(), refusal.status);
    assert!(response.status().is_client_error() || response.status().is_server_error());
    let headers = response.headers().clone();
    let text =
        |name: &str| headers.get(name).map(|value| value.to_str().expect("ASCII").to_owned());
    assert_eq!(text("content-type").as_deref(), Some("application/problem+json"));
    assert_eq!(text("cache-control").as_deref(), Some("no-store"));
    let after = text("retry-after").map(|after| after.parse::<u64>().expect("whole seconds"));
    assert_eq!(after.is_some(), refusal.retry_after.is_some());
    if let Some(after) = after {
        // A second at the least, and up to twice what was asked for, rounded.
        assert!((1..=2 * pause.as_secs() + 2).contains(&after), "{after} for {pause:?}");
    }
    let fields = refusal.reason.is_full() && how & 4 == 0;
    let limit = refusal.rejected.map_or(0, |rejected| rejected.limit);
    let policy = format!("\"{name}\";q={limit};qu=\"concurrent-requests\"");
    assert_eq!(text("ratelimit-policy"), fields.then_some(policy));
    assert_eq!(text("ratelimit"), fields.then(|| format!("\"{name}\";r=0")));
    drop(held);
    // A string of a structured field: nothing in it needs to be escaped.
    assert!(name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte)));

    let body = response.into_body().collect().now_or_never().expect("there at once");
    let body = body.expect("a body").to_bytes();
    let problem: serde_json::Value = serde_json::from_slice(&body).expect("a JSON document");
    assert_eq!(problem["status"], refusal.status.as_u16());
    assert_eq!(problem["reason"], refusal.reason.as_str());
    assert!(problem["title"].is_string() && problem["type"].is_string());
    let violated = refusal.reason.is_full().then(|| serde_json::json!([name]));
    assert_eq!(problem.get("violated-policies").cloned(), violated);
}

/// The values that a policy takes or refuses: never a panic, and what it takes is in its range.
pub(crate) fn policies(data: &[u8]) {
    let Some((bytes, _)) = data.split_first_chunk::<16>() else { return };
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let (lease, wait) = (Duration::from_millis(number(0)), Duration::from_millis(number(8)));
    let fits = (Policy::MIN_LEASE..=Policy::MAX_LEASE).contains(&lease)
        && wait <= Policy::MAX_WAIT_TIMEOUT;
    assert_eq!(Policy::builder(1).lease(lease).wait_timeout(wait).build().is_ok(), fits);
}
