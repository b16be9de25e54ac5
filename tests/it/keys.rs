//! The permits that a request takes: extractors, and the names that they make.

use std::collections::{HashMap, HashSet};
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::MockConnectInfo;
use axum::routing::get;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, HeaderValue, Request, Response, StatusCode};
use http_body_util::Full;
use proptest::collection::vec;
use proptest::prelude::*;
use tower::{Layer, ServiceExt, service_fn};
use tower_semaphore::backend::RedisBackend;
use tower_semaphore::limit::{
    ConcurrencyLimitBuilder, ExtensionKey, GlobalKey, HeaderKey, KeyExtractor, MatchedPathKey,
    MissingKey, PathKey, PeerIpKey, Refusal,
};
use tower_semaphore::{ConcurrencyLimitLayer, Name, Permit, Policy, Semaphore};
use tracing::Level;

use crate::support::eventually;
use crate::support::http::{Server, curl, text};
use crate::support::redis::TestRedis;
use crate::support::told::Told;

const TENANT: HeaderKey = HeaderKey::from_static("x-tenant");

/// Returns what an extractor makes of a request.
#[allow(clippy::needless_pass_by_value, reason = "so that closures can be written in place")]
fn key(extractor: impl KeyExtractor, request: Request<()>) -> Option<String> {
    let (parts, ()) = request.into_parts();
    extractor.extract(&parts).map(|name| name.as_str().to_owned())
}

fn found(extractor: impl KeyExtractor, request: Request<()>) -> String {
    key(extractor, request).expect("a key")
}

fn tenant(value: &[u8]) -> Request<()> {
    let value = HeaderValue::from_bytes(value).unwrap();
    Request::get("/a/b?c=d").header("x-tenant", value).body(()).unwrap()
}

fn extended<T: Clone + Send + Sync + 'static>(value: T) -> Request<()> {
    Request::builder().extension(value).body(()).unwrap()
}

fn bare() -> Request<()> {
    Request::get("/a/b?c=d").body(()).unwrap()
}

// ===== extractors =====

#[test]
fn a_global_key_adds_nothing() {
    assert_eq!(found(GlobalKey, bare()), "");
    assert_eq!(found((GlobalKey, TENANT, GlobalKey), tenant(b"acme")), "acme");
    // Nor if a closure continues it.
    let tenant_of =
        |parts: &Parts| Some(GlobalKey.extract(parts)?.part(TENANT.extract(parts)?.as_str()));
    assert_eq!(found(tenant_of, tenant(b"acme")), "acme");
    // An empty value is a value.
    assert_eq!(found(TENANT, tenant(b"")), "%");
}

#[test]
fn a_header_is_taken_byte_for_byte() {
    assert_eq!(found(TENANT, tenant(b"acme")), "acme");
    assert_eq!(found(HeaderKey::new(HeaderName::from_static("x-tenant")), tenant(b"a")), "a");
    assert_eq!(key(TENANT, bare()), None);
    assert_eq!(found(TENANT, tenant(b"\xff\xc3\x28")), "%FF%C3%28");
    assert_eq!(found(TENANT, tenant(b"{a}:b%3A*#!")), "%7Ba%7D%3Ab%253A%2A%23%21");
    assert_ne!(found(TENANT, tenant(b"Acme")), found(TENANT, tenant(b"acme")));
    assert_eq!(found(TENANT, tenant(&[b'x'; 64])), "x".repeat(64));
    let long = found(TENANT, tenant(&[b'x'; 8192]));
    assert!(long.len() == 65 && long.starts_with('#'), "{long}");
    assert_ne!(long, found(TENANT, tenant(&[b'x'; 8191])));
}

#[test]
fn of_several_headers_the_first_counts() {
    let request = Request::get("/").header("x-tenant", "one").header("x-tenant", "two");
    assert_eq!(found(TENANT, request.body(()).unwrap()), "one");
}

#[test]
#[should_panic(expected = "invalid")]
fn a_header_that_cannot_be_one_is_found_out_at_once() {
    let _ = HeaderKey::from_static("not a header");
}

#[test]
fn a_path_is_taken_without_its_query() {
    assert_eq!(found(PathKey, bare()), "%2Fa%2Fb");
    let encoded = Request::get("/a%2fb").body(()).unwrap();
    assert_eq!(found(PathKey, encoded), "%2Fa%252fb");
}

#[test]
fn an_extension_is_taken_by_its_type() {
    #[derive(Clone)]
    struct Account(String);
    impl AsRef<[u8]> for Account {
        fn as_ref(&self) -> &[u8] {
            self.0.as_bytes()
        }
    }
    assert_eq!(found(ExtensionKey::<Account>::new(), extended(Account("a/1".into()))), "a%2F1");
    assert_eq!(key(ExtensionKey::<Account>::new(), extended("a/1".to_owned())), None);
    assert_eq!(found(ExtensionKey::<String>::default(), extended("a".to_owned())), "a");
    assert_eq!(found(ExtensionKey::<&'static str>::new(), extended("a")), "a");
    assert_eq!(found(ExtensionKey::<Vec<u8>>::new(), extended(vec![0_u8, 255])), "%00%FF");
    assert_eq!(key(ExtensionKey::<String>::new(), bare()), None);
}

#[test]
fn an_extension_that_is_shared_or_optional_is_found() {
    let account = || "acme".to_owned();
    let extractor = ExtensionKey::<String>::new();
    assert_eq!(found(extractor, extended(Arc::new(account()))), "acme");
    assert_eq!(found(extractor, extended(Some(account()))), "acme");
    assert_eq!(found(extractor, extended(Some(Arc::new(account())))), "acme");
    assert_eq!(key(extractor, extended(None::<String>)), None);
    assert_eq!(key(extractor, extended(None::<Arc<String>>)), None);
    assert_eq!(found(ExtensionKey::<str>::new(), extended(Arc::<str>::from("acme"))), "acme");
    assert_eq!(found(ExtensionKey::<str>::new(), extended(Some(Arc::<str>::from("acme")))), "acme");
    assert_eq!(key(ExtensionKey::<str>::new(), extended(None::<Arc<str>>)), None);
}

#[test]
fn a_closure_takes_the_key_of_an_extension() {
    #[derive(Clone)]
    struct Account {
        id: u64,
        team: Option<&'static str>,
    }
    let account = |team| Account { id: 42, team };
    let id = ExtensionKey::by(|account: &Account| Some(account.id.to_string()));
    assert_eq!(found(id, extended(account(None))), "42");
    assert_eq!(found(id, extended(Arc::new(account(None)))), "42");
    assert_eq!(key(id, bare()), None);
    let team = ExtensionKey::by(|account: &Account| account.team);
    assert_eq!(found(team, extended(account(Some("a")))), "a");
    assert_eq!(key(team, extended(account(None))), None);
}

#[test]
fn an_extractor_can_be_shared_or_left_out() {
    static SHARED: HeaderKey = TENANT;
    let shared = Arc::new(TENANT);
    let dynamic: Arc<dyn KeyExtractor> = shared.clone();
    let boxed: Box<dyn KeyExtractor> = Box::new(PathKey);
    assert_eq!(found(shared, tenant(b"acme")), "acme");
    assert_eq!(found(dynamic, tenant(b"acme")), "acme");
    assert_eq!(found(&SHARED, tenant(b"acme")), "acme");
    assert_eq!(found(boxed, bare()), "%2Fa%2Fb");
    assert_eq!(found(Some(TENANT), tenant(b"acme")), "acme");
    assert_eq!(key(Some(TENANT), bare()), None);
    assert_eq!(key(None::<HeaderKey>, bare()), key(GlobalKey, bare()));
    // They are what is inside, without a key as well.
    let (parts, ()) = bare().into_parts();
    assert_eq!(Arc::new(TENANT).missing_header(&parts), TENANT.missing_header(&parts));
    assert_eq!(Some(MatchedPathKey).missing_key(&parts), MissingKey::Bypass);
}

#[test]
fn closures_are_extractors_whatever_they_make_names_of() {
    assert_eq!(found(|parts: &Parts| Some(parts.method.to_string()), bare()), "GET");
    assert_eq!(found(|_: &Parts| Some("a b"), bare()), "a%20b");
    assert_eq!(found(|_: &Parts| Some(vec![0x80_u8]), bare()), "%80");
    assert_eq!(found(|_: &Parts| Some(Name::new("a").part("b")), bare()), "a:b");
    assert_eq!(key(|_: &Parts| None::<String>, bare()), None);
}

#[test]
fn the_keys_of_a_tuple_are_one_key_together() {
    let text = |text: &'static str| move |_: &Parts| Some(text);
    let none = |_: &Parts| None::<&str>;
    assert_eq!(found((text("a"), text("b")), bare()), "a:b");
    assert_eq!(found((text("a"), text("b"), text("c")), bare()), "a:b:c");
    assert_eq!(found((text("a"), text("b"), text("c"), text("d")), bare()), "a:b:c:d");
    assert_eq!(found((text("a"), (text("b"), text("c"))), bare()), "a:b:c");
    assert_eq!(found((PathKey, TENANT), tenant(b"acme")), "%2Fa%2Fb:acme");
    // Without one of them there is no key.
    assert_eq!(key((text("a"), none), bare()), None);
    assert_eq!(key((none, text("a"), text("b")), bare()), None);
    // The boundary between two values cannot be shifted.
    let all = [
        found((text("a"), text("bc")), bare()),
        found((text("ab"), text("c")), bare()),
        found((text("a:b"), text("c")), bare()),
        found((text("a"), text("b:c")), bare()),
        found((text("abc"), text("")), bare()),
        found((text(""), text("abc")), bare()),
        found((text(""), text("a"), text("bc")), bare()),
        found((text("a"), text(""), text("bc")), bare()),
    ];
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len(), "{all:?}");
}

// ===== peers =====

fn peer(address: &str) -> Option<String> {
    let address: IpAddr = address.parse().unwrap();
    let key_of_ip = key(PeerIpKey::from_extension(), extended(address));
    let with_port = SocketAddr::new(address, 4711);
    assert_eq!(key_of_ip, key(PeerIpKey::from_extension(), extended(with_port)));
    assert_eq!(key_of_ip, key(PeerIpKey::from_axum(), extended(ConnectInfo(with_port))));
    assert_eq!(key_of_ip, key(PeerIpKey::from_axum(), extended(MockConnectInfo(with_port))));
    key_of_ip
}

#[test]
fn a_peer_is_its_ipv4_address_or_its_ipv6_network() {
    assert_eq!(peer("192.0.2.7"), Some("192.0.2.7".to_owned()));
    assert_eq!(peer("::ffff:192.0.2.7"), peer("192.0.2.7"));
    assert_ne!(peer("192.0.2.7"), peer("192.0.2.8"));

    assert_eq!(peer("2001:db8:1:2:3:4:5:6"), Some("2001%3Adb8%3A1%3A2%3A%3A%2F64".to_owned()));
    assert_eq!(peer("2001:db8:1:2:ffff::1"), peer("2001:db8:1:2:3:4:5:6"));
    assert_ne!(peer("2001:db8:1:3::1"), peer("2001:db8:1:2::1"));
    assert_eq!(peer("::1"), Some("%3A%3A%2F64".to_owned()));
    assert_eq!(key(PeerIpKey::from_extension(), bare()), None);
    assert_eq!(key(PeerIpKey::from_axum(), bare()), None);
}

#[test]
fn the_network_of_a_peer_can_be_of_any_size() {
    let peer = |bits, address: &str| {
        let key = PeerIpKey::from_extension().ipv6_prefix(bits).unwrap();
        found(key, extended(address.parse::<IpAddr>().unwrap()))
    };
    assert_eq!(peer(48, "2001:db8:1:2::1"), peer(48, "2001:db8:1:ffff::1"));
    assert_ne!(peer(48, "2001:db8:1::"), peer(48, "2001:db8:2::"));
    assert_ne!(peer(128, "2001:db8::1"), peer(128, "2001:db8::2"));
    assert_eq!(peer(1, "7fff::1"), peer(1, "::2"));
    assert_ne!(peer(1, "8000::"), peer(1, "::"));
    assert_ne!(peer(48, "2001:db8:1::"), peer(64, "2001:db8:1::"));
    // It says nothing about IPv4.
    assert_ne!(peer(1, "192.0.2.7"), peer(1, "192.0.2.8"));
}

/// Whatever else is in the extensions, and whatever other crates turn on.
#[test]
fn a_peer_is_read_from_where_its_key_says() {
    let connection: SocketAddr = "192.0.2.1:1".parse().unwrap();
    let other: SocketAddr = "192.0.2.2:2".parse().unwrap();
    let request = || Request::builder().extension(other).extension(ConnectInfo(connection));
    assert_eq!(found(PeerIpKey::from_axum(), request().body(()).unwrap()), "192.0.2.1");
    assert_eq!(found(PeerIpKey::from_extension(), request().body(()).unwrap()), "192.0.2.2");
    assert_eq!(key(PeerIpKey::from_extension(), extended(ConnectInfo(connection))), None);
    assert_eq!(key(PeerIpKey::from_axum(), extended(other)), None);
}

/// Returns the name of a request's permit, as the handler sees it.
fn named() -> axum::routing::MethodRouter {
    get(async |permit: Option<Permit>| permit.map_or_else(|| "-".into(), |p| p.name().to_owned()))
}

fn layer(semaphore: &Semaphore, key: impl KeyExtractor) -> ConcurrencyLimitLayer {
    ConcurrencyLimitLayer::builder(semaphore, "api").key(key).limit(1).build().unwrap()
}

#[tokio::test]
async fn axum_says_who_the_peer_is_if_it_is_served_so() {
    let semaphore = Semaphore::in_memory();
    let router = Router::new().route("/", named()).layer(layer(&semaphore, PeerIpKey::from_axum()));
    let server = Server::start(router.clone()).await;
    assert_eq!(text(server.get("/").await).await, "api:127.0.0.1");

    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    let plain = tokio::spawn(async move { axum::serve(listener, router).await });
    assert_eq!(curl(&url, &[]).await.status, 500);
    plain.abort();
}

// ===== matched routes =====

#[tokio::test]
async fn a_matched_route_is_the_one_written_in_the_router() {
    let semaphore = Semaphore::in_memory();
    let layer = layer(&semaphore, MatchedPathKey);
    let inner = || Router::new().route("/users/{id}", named());
    let all = Router::new()
        .route("/users/{id}", named())
        .nest("/v1/{region}", inner())
        .merge(Router::new().route("/merged", named()))
        .layer(layer.clone());
    let route = |path: &str| format!("api:{}", Name::new(path));

    let server = Server::start(all).await;
    for path in ["/users/7", "/users/8"] {
        assert_eq!(text(server.get(path).await).await, route("/users/{id}"));
    }
    assert_eq!(text(server.get("/v1/eu/users/7").await).await, route("/v1/{region}/users/{id}"));
    assert_eq!(text(server.get("/merged").await).await, route("/merged"));
    // There is none in the fallback: the router answers itself.
    assert_eq!(server.get("/nowhere").await.status(), StatusCode::NOT_FOUND);

    let of_routes =
        Router::new().nest("/v1", inner().route_layer(layer.clone())).route("/free", named());
    let server = Server::start(of_routes).await;
    assert_eq!(text(server.get("/v1/users/7").await).await, route("/v1/users/{id}"));
    assert_eq!(text(server.get("/free").await).await, "-");
    // A route layer does not see requests that no route matched.
    assert_eq!(server.get("/v1/nowhere").await.status(), StatusCode::NOT_FOUND);

    let of_method = Router::new().route("/users/{id}", named().layer(layer));
    let server = Server::start(of_method).await;
    assert_eq!(text(server.get("/users/7").await).await, route("/users/{id}"));
}

#[tokio::test]
async fn what_no_route_matched_can_pass_or_share_one_key() {
    let semaphore = Semaphore::in_memory();
    let builder = || ConcurrencyLimitLayer::builder(&semaphore, "api").key(MatchedPathKey).limit(1);
    let bypass = builder().on_missing_key(MissingKey::Bypass).build().unwrap();
    let server = Server::start(Router::new().fallback(named()).layer(bypass)).await;
    assert_eq!(text(server.get("/nowhere").await).await, "-");
    let shared = builder().on_missing_key(MissingKey::Shared).build().unwrap();
    let server = Server::start(Router::new().fallback(named()).layer(shared)).await;
    assert_eq!(text(server.get("/nowhere").await).await, "api:!");
    assert_eq!(text(server.get("/elsewhere").await).await, "api:!");
    let status = StatusCode::NOT_FOUND;
    let refused = builder().on_missing_key(MissingKey::Reject(status)).build().unwrap();
    let server = Server::start(Router::new().fallback(named()).layer(refused)).await;
    assert_eq!(server.get("/nowhere").await.status(), StatusCode::NOT_FOUND);
}

#[test]
fn a_header_in_upper_case_is_refused_with_what_is_allowed() {
    let said = |name: &'static str| {
        let panicked = std::panic::catch_unwind(|| HeaderKey::from_static(name)).unwrap_err();
        let text = panicked.downcast_ref::<&str>().map(|text| (*text).to_owned());
        text.or_else(|| panicked.downcast_ref::<String>().cloned()).unwrap()
    };
    let text = said("X-Tenant");
    assert!(text.contains("HeaderKey") && text.contains("lower case"), "{text}");
    let text = said("x tenant");
    assert!(!text.contains("lower case"), "{text}");
}

/// Finds no key, and allows that.
struct Odd;

impl KeyExtractor for Odd {
    fn extract(&self, _: &Parts) -> Option<Name> {
        None
    }

    fn missing_key(&self, _: &Parts) -> MissingKey {
        MissingKey::Reject(StatusCode::OK)
    }
}

#[tokio::test]
async fn no_extractor_rejects_a_request_with_a_status_of_success() {
    let semaphore = Semaphore::in_memory();
    let layer =
        ConcurrencyLimitLayer::builder(&semaphore, "api").key(Odd).limit(1).build().unwrap();
    let server = Server::start(Router::new().fallback(named()).layer(layer)).await;
    assert_eq!(server.get("/").await.status(), StatusCode::BAD_REQUEST);
}

#[tokio::test]
async fn the_first_request_without_a_key_is_told_of_if_none_had_one() {
    let told = Told::new();
    let semaphore = Semaphore::in_memory();
    let ask = async |service: &Router, key: Option<&str>| {
        let mut request = Request::get("/");
        if let Some(key) = key {
            request = request.header("x-tenant", key);
        }
        let request = request.body(axum::body::Body::empty()).unwrap();
        service.clone().oneshot(request).await.unwrap().status()
    };
    let router = || Router::new().route("/", get(async || "served"));
    // The address is not in the extensions.
    let by_peer = router().layer(layer(&semaphore, PeerIpKey::from_axum()));
    assert_eq!(ask(&by_peer, None).await, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(ask(&by_peer, None).await, StatusCode::INTERNAL_SERVER_ERROR);
    let [error] = &told.aloud()[..] else { panic!("once: {:?}", told.aloud()) };
    assert_eq!(error.level, Level::ERROR);
    assert!(error.fields["extractor"].contains("PeerIpKey"), "{error:?}");
    assert!(error.name.contains("`limit::serve`"), "{error:?}");

    let by_tenant = router().layer(layer(&semaphore, HeaderKey::from_static("x-tenant")));
    assert_eq!(ask(&by_tenant, Some("a")).await, StatusCode::OK);
    assert_eq!(ask(&by_tenant, None).await, StatusCode::BAD_REQUEST);
    assert_eq!(told.aloud().len(), 1, "others have one");

    // The client is at fault, and then the server.
    let both = (HeaderKey::from_static("x-tenant"), PeerIpKey::from_axum());
    let by_both = router().layer(layer(&semaphore, both));
    for (key, status) in [(None, 400), (Some("a"), 500), (Some("a"), 500), (None, 400)] {
        assert_eq!(ask(&by_both, key).await, status);
    }
    let levels: Vec<_> = told.aloud()[1..].iter().map(|event| event.level).collect();
    assert_eq!(levels, [Level::WARN, Level::ERROR]);
}

#[tokio::test]
async fn where_an_address_is_the_tenant_a_server_without_addresses_is_at_fault() {
    let told = Told::new();
    let tenants = |builder: ConcurrencyLimitBuilder| {
        let layer = builder.limit(1).fair_by(PeerIpKey::from_axum()).build().unwrap();
        Router::new().route("/", get(async || "served")).layer(layer)
    };
    let semaphore = Semaphore::in_memory();
    let builder = || ConcurrencyLimitLayer::builder(&semaphore, "api");
    let ask = async |service: Router| {
        let request = Request::get("/").body(axum::body::Body::empty()).unwrap();
        service.oneshot(request).await.unwrap().status()
    };
    let service = tenants(builder());
    assert_eq!(ask(service.clone()).await, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(ask(service).await, StatusCode::INTERNAL_SERVER_ERROR);
    let [error] = &told.aloud()[..] else { panic!("once: {:?}", told.aloud()) };
    assert_eq!(error.level, Level::ERROR);
    // What the layer sets is intended.
    let shared = tenants(builder().on_missing_tenant(MissingKey::Shared));
    assert_eq!(ask(shared).await, StatusCode::OK);
    assert_eq!(told.aloud().len(), 1);
}

#[tokio::test]
async fn a_layer_that_never_sees_a_matched_route_says_so_once() {
    let told = Told::new();
    let warnings = || told.events().iter().filter(|event| event.level == Level::WARN).count();
    let semaphore = Semaphore::in_memory();
    let router = Router::new().route("/users/{id}", get(async || "served"));
    let ask = async |service: &Router, path: &str| {
        let request = Request::get(path).body(axum::body::Body::empty()).unwrap();
        service.clone().oneshot(request).await.unwrap().status()
    };
    // On the routes. Requests for missing ones come before and after.
    let on_routes = router.clone().layer(layer(&semaphore, MatchedPathKey));
    for _ in 0..99 {
        assert_eq!(ask(&on_routes, "/nowhere").await, StatusCode::NOT_FOUND);
    }
    assert_eq!(ask(&on_routes, "/users/7").await, StatusCode::OK);
    for _ in 0..200 {
        assert_eq!(ask(&on_routes, "/nowhere").await, StatusCode::NOT_FOUND);
    }
    assert_eq!(warnings(), 0);

    // Around the router.
    let around = layer(&semaphore, MatchedPathKey).layer(router.clone());
    let around = Router::new().fallback_service(around);
    for _ in 0..99 {
        assert_eq!(ask(&around, "/users/7").await, StatusCode::OK);
    }
    assert_eq!(warnings(), 0);
    for _ in 0..200 {
        assert_eq!(ask(&around, "/users/7").await, StatusCode::OK);
    }
    assert_eq!(warnings(), 1);
    let warning = told.events().into_iter().find(|event| event.level == Level::WARN).unwrap();
    assert_eq!(warning.fields["layer"], "api");
    assert!(warning.name.contains("limits nothing"), "{}", warning.name);

    // As intended.
    let bypass = ConcurrencyLimitLayer::builder(&semaphore, "api").key(MatchedPathKey).limit(1);
    let bypass = bypass.on_missing_key(MissingKey::Bypass).build().unwrap().layer(router);
    let bypass = Router::new().fallback_service(bypass);
    for _ in 0..200 {
        assert_eq!(ask(&bypass, "/users/7").await, StatusCode::OK);
    }
    assert_eq!(warnings(), 1);
}

#[test]
fn the_first_extractor_that_finds_no_key_says_what_becomes_of_the_request() {
    let key = (MatchedPathKey, HeaderKey::from_static("x-tenant"));
    let (parts, ()) = Request::new(()).into_parts();
    assert_eq!(key.missing_key(&parts), MissingKey::Bypass);
    let key = (HeaderKey::from_static("x-tenant"), MatchedPathKey);
    assert_eq!(key.missing_key(&parts), MissingKey::Reject(StatusCode::BAD_REQUEST));
    let key: Arc<dyn KeyExtractor> = Arc::new(MatchedPathKey);
    assert_eq!(key.missing_key(&parts), MissingKey::Bypass);
    let key: Box<dyn KeyExtractor> = Box::new((GlobalKey, key));
    assert_eq!(key.missing_key(&parts), MissingKey::Bypass);
    assert_eq!(key.extract(&parts), None);
}

#[test]
fn the_first_extractor_that_finds_no_key_says_which_header_is_missing() {
    let (parts, ()) = Request::builder().header("x-tenant", "acme").body(()).unwrap().into_parts();
    let user = HeaderKey::from_static("x-user");
    let missing = |key: &dyn KeyExtractor| key.missing_header(&parts).map(|name| name.to_string());
    assert_eq!(missing(&(GlobalKey, TENANT, user.clone())), Some("x-user".to_owned()));
    assert_eq!(missing(&(MatchedPathKey, user.clone())), None);
    let boxed: Box<dyn KeyExtractor> = Box::new(user);
    assert_eq!(missing(&boxed), Some("x-user".to_owned()));
}

#[cfg(feature = "tonic")]
#[test]
fn tonic_says_where_a_connection_comes_from() {
    use tonic::transport::server::TcpConnectInfo;

    let (mut parts, ()) = Request::new(()).into_parts();
    let remote_addr = Some("198.51.100.7:4711".parse().unwrap());
    parts.extensions.insert(TcpConnectInfo { local_addr: None, remote_addr });
    assert_eq!(PeerIpKey::from_tonic().extract(&parts), Some(Name::new("198.51.100.7")));
    assert_eq!(PeerIpKey::from_extension().extract(&parts), None);
}

// ===== names =====

/// A part, often made of the syntax of names.
fn part() -> impl Strategy<Value = Vec<u8>> {
    let nasty = prop::sample::select(vec![
        &b":"[..],
        b"%",
        b"#",
        b"!",
        b"{",
        b"}",
        b"%3A",
        b"%25",
        b"a",
        b"A",
        b"-",
        b"\0",
        b"\xff",
        b"\xc3\xa4",
        b"*",
        b"@",
        b"api",
    ]);
    prop_oneof![
        6 => vec(nasty, 0..6).prop_map(|pieces| pieces.concat()),
        2 => vec(any::<u8>(), 0..40),
        1 => vec(any::<u8>(), 40..200),
        // Around the longest part that is stored unhashed.
        1 => (60_usize..70).prop_map(|length| vec![b'a'; length]),
        1 => (20_usize..24).prop_map(|length| vec![b'/'; length]),
    ]
}

fn parts() -> impl Strategy<Value = Vec<Vec<u8>>> {
    vec(part(), 1..6)
}

fn name(parts: &[Vec<u8>]) -> Name {
    let (first, rest) = parts.split_first().unwrap();
    rest.iter().fold(Name::new(first), Name::part)
}

fn assert_plain(name: &Name) {
    let text = name.as_str();
    assert!(!text.is_empty() && text.len() <= 128, "{text:?}");
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-%:#!".contains(&byte);
    assert!(text.bytes().all(allowed), "{text:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_name_is_short_and_plain_whatever_it_is_made_of(parts in parts()) {
        assert_plain(&name(&parts));
        assert_eq!(name(&parts), name(&parts));
        assert_eq!(name(&parts).to_string(), name(&parts).as_str());
    }

    #[test]
    fn names_are_equal_only_if_their_parts_are(one in parts(), two in parts()) {
        assert_eq!(name(&one) == name(&two), one == two, "{:?} {:?}", name(&one), name(&two));
    }

    #[test]
    fn moving_a_byte_over_a_boundary_makes_another_name(parts in vec(part(), 2..5), at in any::<prop::sample::Index>()) {
        let at = at.index(parts.len() - 1);
        let mut moved = parts.clone();
        if let Some(byte) = moved[at].pop() {
            moved[at + 1].insert(0, byte);
            assert_ne!(name(&parts), name(&moved));
        }
        let mut merged = parts.clone();
        let next = merged.remove(at + 1);
        merged[at].extend(next);
        assert_ne!(name(&parts), name(&merged));
        let mut colon = parts.clone();
        let next = colon.remove(at + 1);
        colon[at].push(b':');
        colon[at].extend(next);
        assert_ne!(name(&parts), name(&colon));
    }

    #[test]
    fn the_text_of_a_name_as_one_part_is_another_name(parts in vec(part(), 2..6)) {
        // What a client would send to take another's permits.
        let name = name(&parts);
        assert_ne!(Name::new(name.as_str()), name);
        let spelled: Vec<_> = parts.iter().map(|part| Name::new(part).to_string()).collect();
        assert_ne!(Name::new(spelled.join(":")), name);
    }

    #[test]
    fn a_name_is_the_same_however_it_is_put_together(parts in parts(), cut in any::<prop::sample::Index>()) {
        let cut = cut.index(parts.len());
        if cut > 0 {
            let joined = name(&parts[..cut]).join(&name(&parts[cut..]));
            assert_plain(&joined);
            assert_eq!(joined, name(&parts), "cut at {cut}");
        }
    }
}

#[test]
fn two_long_parts_and_their_text_as_one_part_are_two_names() {
    let parts = ["a".repeat(60), "b".repeat(60), "c".repeat(60)];
    let honest = Name::new(&parts[0]).part(&parts[1]).part(&parts[2]);
    let forged = Name::new(parts.join(":"));
    let forged_first = Name::new(parts[..2].join(":")).part(&parts[2]);
    assert_ne!(honest, forged);
    assert_ne!(honest, forged_first);
}

#[test]
fn long_names_are_the_same_however_they_are_put_together() {
    // A layer joins its name and the key; a caller may also append one part after the other.
    let (a, b) = ("a".repeat(64), "b".repeat(64));
    let by_hand = Name::new("api").part(&a).part(&b);
    let by_layer = Name::new("api").join(&Name::new(&a).part(&b));
    assert_eq!(by_hand, by_layer);
}

// ===== tenants in Redis =====

/// Values that a header can have, and that have done harm somewhere.
fn tenants() -> Vec<Vec<u8>> {
    let mut tenants: Vec<Vec<u8>> = [
        "a",
        "A",
        "b",
        "",
        " ",
        "a b",
        "a:b",
        "a%3Ab",
        "a%253Ab",
        "%",
        "%25",
        "#",
        "!",
        "*",
        "?",
        "{",
        "}",
        "{}",
        "{a}",
        "{a}{b}",
        "}{",
        "a}:{b",
        "semaphore:{api:a}",
        "api:a",
        "@",
        ".",
        "..",
        "../a",
        "/",
        "a/",
        "\\",
        "\"",
        "'",
        "null",
        "0",
        "-1",
        "a\tb",
        "ä",
        "a\u{308}",
        "\u{202e}a",
        "日本",
        "$(id)",
        "; DROP",
        "q",
        "qa",
        "~",
        "~a",
    ]
    .iter()
    .map(|text| text.as_bytes().to_vec())
    .collect();
    tenants.extend([b"\xff".to_vec(), b"\x80".to_vec(), b"\xc3\x28".to_vec(), b"a\xffb".to_vec()]);
    for length in [63, 64, 65, 128, 129, 200, 8191, 8192] {
        tenants.push(vec![b'x'; length]);
        tenants.push(vec![0xe4; length]);
    }
    // The stored form of long ones.
    for length in [65, 8192] {
        let text = Name::new(vec![b'x'; length]).as_str().to_owned();
        tenants.push(text.clone().into_bytes());
        tenants.push(text.as_bytes()[1..].to_vec());
    }
    tenants
}

#[tokio::test]
async fn no_two_tenants_share_a_permit_and_no_key_is_long() {
    let redis = TestRedis::start();
    let backend = RedisBackend::builder(redis.url()).prefix("p".repeat(40)).build().unwrap();
    let semaphore = Semaphore::new(backend);
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "n".repeat(40))
        .key((PathKey, TENANT))
        .limit(1)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let service = layer.layer(service_fn(async |request: Request<()>| {
        let permit = request.extensions().get::<Permit>().expect("a permit");
        let name = permit.name().to_owned();
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from(name)))
    }));

    let tenants = tenants();
    let mut held = HashMap::new();
    for tenant_name in &tenants {
        let response = service.clone().oneshot(tenant(tenant_name)).await.unwrap();
        let shown = String::from_utf8_lossy(tenant_name);
        assert_eq!(response.status(), StatusCode::OK, "{shown:?} shares a permit");
        assert!(held.insert(tenant_name.clone(), response).is_none(), "{shown:?} is there twice");
    }
    assert_eq!(redis.keys(), tenants.len() as u64);
    for key in redis.command::<Vec<String>>(&["KEYS", "*"]) {
        assert!(key.len() <= 200, "{key}");
        assert!(key.starts_with(&"p".repeat(40)) && key.ends_with('}'), "{key}");
        // One hash tag, and nothing that a cluster would take for another.
        assert_eq!((key.matches('{').count(), key.matches('}').count()), (1, 1), "{key}");
    }
    for tenant_name in &tenants {
        let response = service.clone().oneshot(tenant(tenant_name)).await.unwrap();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS, "{tenant_name:?}");
        let refusal = response.extensions().get::<Refusal>().unwrap();
        assert_eq!(refusal.rejected.as_ref().map(|it| (it.limit, it.in_use)), Some((1, Some(1))));
    }
    held.clear();
    eventually("nothing is stored", async || redis.keys() == 0).await;
}

#[tokio::test]
async fn two_spellings_of_one_value_share_a_permit() {
    let redis = TestRedis::start();
    let (semaphore, elsewhere) = (redis.semaphore(), redis.semaphore());
    let policy = Policy::new(1);
    let layer = ConcurrencyLimitLayer::builder(&semaphore, "api")
        .key((TENANT, PeerIpKey::from_extension()))
        .limit(1)
        .wait_timeout(Duration::ZERO)
        .build()
        .unwrap();
    let service = layer.layer(service_fn(async |_: Request<()>| {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("x")))
    }));
    let request = |header: &str, address: &str| {
        let request = Request::get("/").header(header, "münchen");
        request.extension(address.parse::<IpAddr>().unwrap()).body(()).unwrap()
    };
    let first = service.clone().oneshot(request("x-tenant", "192.0.2.7")).await.unwrap();
    assert_eq!(first.status(), StatusCode::OK);
    let second = service.oneshot(request("X-Tenant", "::ffff:192.0.2.7")).await.unwrap();
    assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
    // By hand, in another process.
    let name = Name::new("api").part("münchen".as_bytes()).part(String::from("192.0.2.7"));
    assert!(elsewhere.try_acquire(name.clone(), &policy).await.is_err());
    drop(first);
    eventually("it is free", async || redis.keys() == 0).await;
    assert!(elsewhere.try_acquire(name, &policy).await.is_ok());
}

#[cfg(all(feature = "tonic", feature = "tls"))]
#[tokio::test]
async fn tonic_says_where_a_connection_over_tls_of_ones_own_comes_from() {
    use rcgen::{CertifiedKey, generate_simple_self_signed};
    use tokio::net::{TcpListener, TcpStream};
    use tokio_rustls::{TlsAcceptor, TlsConnector};
    use tonic::transport::server::Connected;
    use tower_semaphore::backend::rustls::crypto::ring;
    use tower_semaphore::backend::rustls::pki_types::PrivateKeyDer;
    use tower_semaphore::backend::rustls::{ClientConfig, RootCertStore, ServerConfig};

    let CertifiedKey { cert, signing_key } =
        generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let provider = Arc::new(ring::default_provider());
    let key = PrivateKeyDer::Pkcs8(signing_key.serialize_der().into());
    let server = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![cert.der().clone()], key)
        .unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let client = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();

    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
    let (accepted, _) = listener.accept().await.unwrap();
    let connector = TlsConnector::from(Arc::new(client));
    let (client, server) = tokio::join!(
        connector.connect("localhost".try_into().unwrap(), socket),
        TlsAcceptor::from(Arc::new(server)).accept(accepted),
    );
    let (_client, server) = (client.unwrap(), server.unwrap());

    // What tonic does with a stream of `serve_with_incoming`.
    let (mut parts, ()) = Request::new(()).into_parts();
    parts.extensions.insert(server.connect_info());
    assert_eq!(PeerIpKey::from_tonic().extract(&parts), Some(Name::new("127.0.0.1")));
}
