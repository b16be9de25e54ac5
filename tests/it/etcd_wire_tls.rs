//! The wire to etcd over TLS.

use tower_semaphore::BackendError;
use tower_semaphore::backend::TlsSettings;
use tower_semaphore::backend::etcd_wire::{Client, Driver, Settings, Url};

use crate::etcd_wire::{Connection, SOON, soon};
use crate::support::etcd::TestEtcd;
use crate::support::tls::Tls;

const NAMES: &[&str] = &["127.0.0.1", "localhost"];

fn start(tls: &Tls) -> TestEtcd {
    let args = tls.etcd_args();
    TestEtcd::start_with(&args.iter().map(|arg| &**arg).collect::<Vec<_>>())
}

fn trusting(tls: &Tls) -> TlsSettings {
    TlsSettings::new().root_certificates(tls.authority_pem())
}

async fn open(etcd: &TestEtcd, settings: TlsSettings) -> Result<(Client, Driver), BackendError> {
    let url = Url::parse(&etcd.url().replace("etcd://", "etcds://")).unwrap();
    let settings = Settings::with_tls(&url, SOON, settings).unwrap();
    Client::open(&url.endpoints[0], &settings).await
}

/// Opens a connection and makes a call: with TLS 1.3, a server looks at the client's certificate after the handshake.
async fn serves(etcd: &TestEtcd, settings: TlsSettings) -> Result<(), BackendError> {
    let client: Connection = open(etcd, settings).await?.into();
    soon(client.status()).await?;
    Ok(())
}

#[tokio::test]
async fn a_member_with_a_certificate_of_a_trusted_authority_serves() {
    let tls = Tls::for_etcd(NAMES);
    let etcd = start(&tls);
    serves(&etcd, trusting(&tls)).await.unwrap();
}

#[tokio::test]
async fn a_certificate_that_is_not_trusted_or_for_another_name_is_told() {
    let tls = Tls::for_etcd(&["elsewhere.internal"]);
    let etcd = start(&tls);
    let other = Tls::for_etcd(NAMES);
    let error = serves(&etcd, trusting(&other)).await.unwrap_err().to_string();
    assert!(error.contains("TlsSettings::root_certificates"), "{error}");
    let error = serves(&etcd, trusting(&tls)).await.unwrap_err().to_string();
    assert!(error.contains("TlsSettings::server_name"), "{error}");
    let named = trusting(&tls).server_name("elsewhere.internal");
    serves(&etcd, named).await.unwrap();
}

#[tokio::test]
async fn a_member_that_asks_for_a_certificate_gets_it() {
    let tls = Tls::for_etcd(NAMES).asking_clients();
    let etcd = start(&tls);
    let (certificate, key) = tls.client();
    serves(&etcd, trusting(&tls).client_certificate(certificate, key)).await.unwrap();
    let error = serves(&etcd, trusting(&tls)).await.unwrap_err();
    assert!(error.is_connection(), "{error}");
}

#[tokio::test]
async fn tls_to_a_port_without_it_is_told_and_vice_versa() {
    let (tls, plain) = (Tls::for_etcd(NAMES), TestEtcd::start());
    let error = serves(&plain, trusting(&tls)).await.unwrap_err();
    assert!(error.to_string().contains("etcds if and only if"), "{error}");
    let etcd = start(&tls);
    let url = Url::parse(&etcd.url()).unwrap();
    let settings = Settings::new(&url, SOON).unwrap();
    let opened = Client::open(&url.endpoints[0], &settings).await;
    let client: Connection = opened.unwrap().into();
    let error = soon(client.status()).await.unwrap_err();
    assert!(error.is_connection(), "{error}");
}
