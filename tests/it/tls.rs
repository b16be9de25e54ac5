//! TLS with a user's own settings, for one server, Sentinel and a cluster.
//!
//! For the system's certificates, and for failovers over TLS, see `fleet_tls.rs`.

use std::sync::Arc;
use std::time::Duration;

use tower_semaphore::backend::rustls::crypto::{CryptoProvider, ring};
use tower_semaphore::backend::rustls::{self, ClientConfig, RootCertStore};
use tower_semaphore::backend::{RedisBackend, RedisBackendBuilder, TlsSettings};
use tower_semaphore::{AcquireError, Policy, Semaphore};

use crate::support::cluster::{MASTERS, TestCluster};
use crate::support::eventually;
use crate::support::redis::TestRedis;
use crate::support::sentinel::TestSentinel;
use crate::support::tls::{self, Tls};

fn policy() -> Policy {
    Policy::builder(1).wait_timeout(Duration::from_secs(5)).build().unwrap()
}

fn start(tls: &Tls) -> TestRedis {
    let args = tls.args();
    TestRedis::start_with(&args.iter().map(|arg| &**arg).collect::<Vec<_>>())
}

fn backend(server: &TestRedis) -> RedisBackendBuilder {
    RedisBackend::builder(format!("rediss://127.0.0.1:{}/", tls::port(server)))
        .connect_timeout(Duration::from_secs(5))
}

fn trusting(tls: &Tls) -> TlsSettings {
    TlsSettings::new().root_certificates(tls.authority_pem())
}

/// With the certificate of a client from the same authority.
fn presenting(tls: &Tls) -> TlsSettings {
    let (certificate, key) = tls.client();
    trusting(tls).client_certificate(certificate, key)
}

/// Permits of several names are granted, and one is handed over.
async fn serves(backend: RedisBackendBuilder) {
    let semaphore = Semaphore::new(backend.build().unwrap());
    for name in ["a", "b", "c", "d", "e", "f"] {
        let held = semaphore.acquire(name, &policy()).await.unwrap();
        let next = tokio::spawn(semaphore.acquire(name, &policy()));
        eventually("the next one waits", async || {
            semaphore.inspect(name).await.is_ok_and(|seen| seen.waiting == 1)
        })
        .await;
        drop(held);
        drop(next.await.unwrap().unwrap());
    }
    semaphore.shutdown().await;
}

/// Returns the error of a request.
async fn refused(backend: RedisBackendBuilder) -> String {
    let semaphore = Semaphore::new(backend.build().unwrap());
    match semaphore.acquire("a", &policy()).await {
        Err(AcquireError::Unavailable(error)) => error.to_string(),
        other => panic!("expected that Redis cannot be asked, but: {other:?}"),
    }
}

#[tokio::test]
async fn a_private_authority_is_trusted() {
    let (Some(tls), Some(another)) = (Tls::new(), Tls::new()) else { return };
    let redis = start(&tls);
    let text = refused(backend(&redis)).await;
    assert!(text.contains("UnknownIssuer") && text.contains("root_certificates"), "{text}");
    let text = refused(backend(&redis).tls(trusting(&another))).await;
    assert!(text.contains("UnknownIssuer"), "{text}");
    serves(backend(&redis).tls(trusting(&tls))).await;
    serves(backend(&redis).tls(trusting(&another).root_certificates(tls.authority_pem()))).await;
}

#[tokio::test]
async fn a_client_certificate_is_presented() {
    let Some(tls) = Tls::new().map(Tls::asking_clients) else { return };
    let redis = start(&tls);
    let text = refused(backend(&redis).tls(trusting(&tls))).await;
    assert!(text.contains("TlsSettings::client_certificate"), "{text}");
    serves(backend(&redis).tls(presenting(&tls))).await;
}

#[tokio::test]
async fn a_certificate_without_the_address_is_checked_against_a_name() {
    let Some(tls) = Tls::for_names(&["redis.test"]) else { return };
    let redis = start(&tls);
    let text = refused(backend(&redis).tls(trusting(&tls))).await;
    assert!(text.contains("TlsSettings::server_name"), "{text}");
    let text = refused(backend(&redis).tls(trusting(&tls).server_name("another.test"))).await;
    assert!(text.contains("TlsSettings::server_name"), "{text}");
    serves(backend(&redis).tls(trusting(&tls).server_name("redis.test"))).await;
}

#[tokio::test]
async fn a_rustls_configuration_of_the_users_is_gone_by() {
    let Some(tls) = Tls::new() else { return };
    let redis = start(&tls);
    redis.command::<()>(&["CONFIG", "SET", "tls-protocols", "TLSv1.2"]);
    let mut roots = RootCertStore::empty();
    let pem = tls.authority_pem();
    roots.add(rustls::pki_types::pem::PemObject::from_pem_slice(pem.as_bytes()).unwrap()).unwrap();
    let config = |version| {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_protocol_versions(&[version]).unwrap();
        builder.with_root_certificates(roots.clone()).with_no_client_auth()
    };
    serves(backend(&redis).tls(config(&rustls::version::TLS12))).await;
    let text = refused(backend(&redis).tls(Arc::new(config(&rustls::version::TLS13)))).await;
    assert!(text.contains("ProtocolVersion"), "{text}");
}

#[tokio::test]
async fn a_crypto_provider_of_the_users_is_gone_by_and_none_is_installed() {
    let Some(tls) = Tls::new() else { return };
    let redis = start(&tls);
    let ciphers = "TLS_CHACHA20_POLY1305_SHA256";
    redis.command::<()>(&["CONFIG", "SET", "tls-ciphersuites", ciphers]);
    redis.command::<()>(&["CONFIG", "SET", "tls-protocols", "TLSv1.3"]);
    let only = |suite| CryptoProvider { cipher_suites: vec![suite], ..ring::default_provider() };
    let with = |provider| backend(&redis).tls(trusting(&tls).crypto_provider(provider));
    serves(with(only(ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256))).await;
    let text = refused(with(only(ring::cipher_suite::TLS13_AES_128_GCM_SHA256))).await;
    assert!(text.contains("HandshakeFailure"), "{text}");
    serves(backend(&redis).tls(trusting(&tls))).await;
    for url in ["redis://h", "rediss://h", "rediss-sentinel://h/m", "rediss-cluster://h"] {
        RedisBackend::builder(url).build().unwrap();
    }
    assert!(CryptoProvider::get_default().is_none());
}

#[tokio::test]
async fn a_connection_that_is_not_needed_any_more_is_closed_though_an_answer_is_missing() {
    let Some(tls) = Tls::new() else { return };
    let redis = start(&tls);
    let semaphore = Semaphore::new(backend(&redis).tls(trusting(&tls)).build().unwrap());
    let port = format!("laddr=127.0.0.1:{} ", tls::port(&redis));
    drop(semaphore.acquire("a", &policy()).await.unwrap());
    let clients = || redis.command::<String>(&["CLIENT", "LIST"]);
    assert!(clients().contains(&port));
    // Commands are received, and answered a minute later.
    redis.command::<()>(&["CLIENT", "PAUSE", "60000", "WRITE"]);
    let unanswered = semaphore.acquire("a", &policy());
    tokio::time::timeout(Duration::from_millis(50), unanswered).await.unwrap_err();
    drop(semaphore);
    eventually("it is closed", async || !clients().contains(&port)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_and_servers_have_authorities_of_their_own() {
    let (Some(tls), Some(of_sentinels)) = (Tls::new(), Tls::new()) else { return };
    let (tls, of_sentinels) = (tls.asking_clients(), of_sentinels.asking_clients());
    let (client, client_of_sentinels) = (presenting(&tls), presenting(&of_sentinels));
    // Sentinels reach the servers with certificates of their own.
    let tls = tls.trusting(&of_sentinels);
    let of_sentinels = of_sentinels.trusting(&tls);
    let redis = TestSentinel::start_each(|| tls.args(), tls::port, || of_sentinels.settings());
    let backend = || {
        let url = redis.url_of_least_rights().replace("redis-sentinel", "rediss-sentinel");
        RedisBackend::builder(url).connect_timeout(Duration::from_secs(5))
    };
    serves(backend().tls(client.clone()).sentinel_tls(client_of_sentinels.clone())).await;

    let text = refused(backend().tls(client.clone())).await;
    assert!(text.contains("no sentinel") && text.contains("UnknownIssuer"), "{text}");
    let text = refused(backend().tls(client_of_sentinels.clone())).await;
    assert!(!text.contains("no sentinel") && text.contains("UnknownIssuer"), "{text}");
    let text = refused(backend().sentinel_tls(client_of_sentinels)).await;
    assert!(!text.contains("no sentinel") && text.contains("UnknownIssuer"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_without_tls_name_a_master_with_it_and_the_other_way_round() {
    let Some(tls) = Tls::new() else { return };
    // Sentinels know the servers by their TLS ports, and do not use TLS themselves.
    let to_servers = || {
        let settings = tls.settings().into_iter();
        settings.filter(|(name, _)| *name != "tls-port").collect()
    };
    let redis = TestSentinel::start_each(|| tls.args(), tls::port, to_servers);
    let url = redis.url().replace("redis-sentinel", "rediss-sentinel");
    let url = format!("{url}?sentinel_tls=false");
    serves(RedisBackend::builder(url).tls(trusting(&tls))).await;
    drop(redis);

    let args = || tls.args();
    let settings = || {
        let settings = tls.settings().into_iter();
        settings.filter(|(name, _)| *name != "tls-replication").collect()
    };
    let args = || {
        let args = args();
        let at = args.iter().position(|arg| arg == "--tls-replication").unwrap();
        [&args[..at], &args[at + 2..]].concat()
    };
    let redis = TestSentinel::start_each(args, TestRedis::port, settings);
    let url = format!("{}?sentinel_tls=true", redis.url());
    serves(RedisBackend::builder(url).sentinel_tls(trusting(&tls))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_trusts_a_client_certificate_on_every_node() {
    let Some(tls) = Tls::new().map(Tls::asking_clients) else { return };
    let cluster = TestCluster::start_each(|| {
        let mut args = tls.args();
        args.extend(["--tls-cluster".to_owned(), "yes".to_owned()]);
        args
    });
    let ports = [1, MASTERS + 2].map(|node| tls::port(&cluster.nodes[node]));
    let hosts = ports.map(|port| format!("127.0.0.1:{port}")).join(",");
    let backend = || {
        RedisBackend::builder(format!("rediss-cluster://{hosts}"))
            .connect_timeout(Duration::from_secs(5))
    };
    serves(backend().tls(presenting(&tls))).await;
    let text = refused(backend().tls(trusting(&tls))).await;
    assert!(text.contains("TlsSettings::client_certificate"), "{text}");
    let text = refused(backend()).await;
    assert!(text.contains("TlsSettings::root_certificates"), "{text}");
}

#[test]
fn settings_that_cannot_be_used_are_named_and_no_key_is_shown() {
    let Some(tls) = Tls::new() else { return };
    let ((certificate, key), (_, another)) = (tls.client(), tls.client());
    let good = || TlsSettings::new().root_certificates(tls.authority_pem());
    let of_config = || {
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
        let builder = builder.with_safe_default_protocol_versions().unwrap();
        let roots = RootCertStore::empty();
        TlsSettings::from(builder.with_root_certificates(roots).with_no_client_auth())
    };
    let url = "rediss-sentinel://h/m";
    for (settings, named) in [
        (TlsSettings::new().root_certificates(""), "root certificates: no certificate was found"),
        (
            TlsSettings::new().root_certificates(&*key),
            "root certificates: no certificate was found",
        ),
        (good().client_certificate("x", &*key), "client certificate: no certificate was found"),
        (good().client_certificate(&*certificate, "x"), "client key: no private key was found"),
        (good().client_certificate(&*certificate, &*another), "client certificate and key: "),
        (good().client_certificate(&*key, &*certificate), "client certificate: no certificate"),
        (good().server_name("a b"), "server name \"a b\""),
        (of_config().root_certificates(tls.authority_pem()), "configuration of your own"),
        (of_config().client_certificate(&*certificate, &*key), "configuration of your own"),
        (of_config().crypto_provider(ring::default_provider()), "configuration of your own"),
    ] {
        let debug = format!("{settings:?}");
        let of_servers = RedisBackend::builder(url).tls(settings.clone()).build();
        let of_sentinels = RedisBackend::builder(url).tls(good()).sentinel_tls(settings).build();
        let (of_servers, of_sentinels) = (of_servers.unwrap_err(), of_sentinels.unwrap_err());
        let text = of_servers.to_string();
        assert!(text.starts_with("TLS settings: ") && text.contains(named), "{text}");
        let text = of_sentinels.to_string();
        assert!(text.starts_with("TLS settings of sentinels: ") && text.contains(named), "{text}");
        let shown = format!("{debug} {of_servers:?} {of_sentinels:?}");
        for line in key.lines().chain(another.lines()) {
            assert!(!shown.contains(line), "{shown}");
        }
    }
}

#[test]
fn settings_that_nothing_goes_by_are_refused() {
    let told = |backend: RedisBackendBuilder| backend.build().unwrap_err().to_string();
    for url in ["redis://h", "redis+unix:///h", "redis-sentinel://h/m", "redis-cluster://h"] {
        let text = told(RedisBackend::builder(url).tls(TlsSettings::new()));
        assert!(text.contains("TLS settings: ") && text.contains("rediss"), "{text}");
    }
    for url in ["rediss://h", "rediss-cluster://h", "rediss-sentinel://h/m?sentinel_tls=false"] {
        let text = told(RedisBackend::builder(url).sentinel_tls(TlsSettings::new()));
        assert!(text.contains("TLS settings of sentinels: "), "{text}");
    }
    let pool = deadpool_redis::Config::from_url("redis://h").builder().unwrap().build().unwrap();
    let text = told(RedisBackend::from_pool(pool).tls(TlsSettings::new()));
    assert!(text.contains("TLS settings: "), "{text}");
}
