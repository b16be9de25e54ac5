//! Gateways that reach Redis or etcd with a private authority and a client certificate.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use super::seen;
use crate::support::gateway::Gateway;
use crate::support::redis::TestRedis;
use crate::support::tls::{self, Tls};
use crate::support::wire::WireServer;

const GET: &str = "GET / HTTP/1.1\r\nhost: a\r\n\r\n";

/// The files of a client: its certificate and its key, beside others that cannot be used.
struct Files {
    dir: TempDir,
}

impl Files {
    fn new(tls: &Tls) -> Self {
        let (files, (certificate, key)) = (Self { dir: TempDir::new().unwrap() }, tls.client());
        std::fs::write(files.path("client.pem"), certificate).unwrap();
        std::fs::write(files.path("client.key"), key).unwrap();
        std::fs::write(files.path("other.key"), tls.client().1).unwrap();
        std::fs::write(files.path("empty.pem"), "").unwrap();
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

fn alone(upstream: &str) -> Command {
    let mut command = Gateway::command();
    command.args(["--listen", "127.0.0.1:0", "--limit", "1", "--upstream", upstream]);
    command
}

/// Adds a flag with the path of a file.
fn with<'a>(command: &'a mut Command, flag: &str, path: impl AsRef<Path>) -> &'a mut Command {
    command.arg(flag).arg(path.as_ref())
}

/// Runs it until it ends. Returns what it prints.
fn refused(command: &mut Command) -> String {
    let Output { status, stderr, .. } = command.stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(2), "{said}");
    assert!(!said.contains("PRIVATE KEY"), "{said}");
    said
}

/// One without a certificate is not served; with it, the flags and the file of `--config` serve alike.
async fn serves_with_a_certificate_alone(flag: &str, url: &str, tls: &Tls) {
    let (files, upstream) = (Files::new(tls), WireServer::start().await);
    let upstream_url = upstream.url();
    upstream.echo_heads();
    let mut command = alone(&upstream_url);
    with(command.args([flag, url]), "--backend-ca", tls.authority());
    let gateway = Gateway::running(command.spawn().unwrap());
    assert_eq!(seen(&gateway, GET).await.0, 503);

    with(&mut command, "--backend-cert", files.path("client.pem"));
    with(&mut command, "--backend-key", files.path("client.key"));
    let gateway = Gateway::running(command.spawn().unwrap());
    assert_eq!(seen(&gateway, GET).await.0, 200);

    let file = files.path("gateway.toml");
    let field = flag.trim_start_matches('-');
    let contents = format!(
        "listen = \"127.0.0.1:0\"\nupstream = \"{upstream_url}\"\n{field} = \"{url}\"\n\
         backend-ca = {:?}\nbackend-cert = {:?}\nbackend-key = {:?}\n[[rule]]\nlimit = 1\n",
        tls.authority(),
        files.path("client.pem"),
        files.path("client.key"),
    );
    std::fs::write(&file, contents).unwrap();
    let mut command = Gateway::command();
    let gateway = Gateway::running(with(&mut command, "--config", file).spawn().unwrap());
    assert_eq!(seen(&gateway, GET).await.0, 200);
}

#[cfg(feature = "etcd")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_asks_for_a_certificate_gets_it() {
    use crate::support::etcd::TestEtcd;

    let tls = Tls::for_etcd(&["127.0.0.1", "localhost"]).asking_clients();
    let args = tls.etcd_args();
    let etcd = TestEtcd::start_with(&args.iter().map(|arg| &**arg).collect::<Vec<_>>());
    let url = etcd.url().replace("etcd://", "etcds://");
    serves_with_a_certificate_alone("--etcd", &url, &tls).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_redis_that_asks_for_a_certificate_gets_it() {
    let Some(tls) = Tls::new().map(Tls::asking_clients) else { return };
    let args = tls.args();
    let redis = TestRedis::start_with(&args.iter().map(|arg| &**arg).collect::<Vec<_>>());
    let url = format!("rediss://127.0.0.1:{}/", tls::port(&redis));
    serves_with_a_certificate_alone("--redis", &url, &tls).await;
}

#[test]
fn a_file_that_cannot_be_used_is_named_at_the_start_and_a_key_is_not_shown() {
    let Some(tls) = Tls::new() else { return };
    let files = Files::new(&tls);
    let (cert, key) = (files.path("client.pem"), files.path("client.key"));
    let key_text = std::fs::read_to_string(&key).unwrap();
    let urls: &[[&str; 2]] = &[
        ["--redis", "rediss://127.0.0.1:1/"],
        #[cfg(feature = "etcd")]
        ["--etcd", "etcds://127.0.0.1:1"],
    ];
    for url in urls {
        let new = || {
            let mut command = alone("http://127.0.0.1:1");
            command.args(url);
            with(&mut command, "--backend-ca", tls.authority());
            command
        };
        let client = |cert: &Path, key: &Path| {
            let mut command = new();
            with(with(&mut command, "--backend-cert", cert), "--backend-key", key);
            refused(&mut command)
        };
        let said = client(&cert, &files.path("none"));
        assert!(
            said.contains("--backend-key: ") && said.contains("none: the file cannot"),
            "{said}"
        );
        assert!(said.contains("expected a file in PEM"), "{said}");
        let said = client(&files.path("empty.pem"), &key);
        assert!(said.contains("--backend-cert: ") && said.contains("empty.pem: no cert"), "{said}");
        let said = client(&key, &key);
        assert!(said.contains("--backend-cert: ") && said.contains("BEGIN CERTIFICATE"), "{said}");
        let said = client(&cert, &cert);
        assert!(said.contains("--backend-key: ") && said.contains("client.pem: no pri"), "{said}");
        let said = client(&cert, &files.path("other.key"));
        assert!(said.contains("--backend-cert: ") && said.contains("client.pem: "), "{said}");
        // The key itself, in place of its file.
        let mut command = new();
        let command = with(&mut command, "--backend-cert", &cert);
        let said = refused(command.arg(format!("--backend-key={key_text}")));
        assert!(said.contains("--backend-key: (not shown): the file cannot be read"), "{said}");
        assert!(!said.contains(key_text.lines().nth(1).unwrap()), "{said}");

        let said = refused(with(&mut new(), "--backend-cert", &cert));
        assert!(said.contains("--backend-cert: is set without backend-key"), "{said}");
        let said = refused(with(&mut new(), "--backend-key", &key));
        assert!(said.contains("--backend-key: is set without backend-cert"), "{said}");

        let plain = url[1].replace("s://", "://");
        let mut command = alone("http://127.0.0.1:1");
        let command = with(command.args([url[0], &plain]), "--backend-ca", tls.authority());
        let said = refused(command);
        assert!(said.contains("--backend-ca: ") && said.contains("begins with"), "{said}");
    }
    let mut command = alone("http://127.0.0.1:1");
    let said = refused(with(&mut command, "--backend-ca", tls.authority()));
    assert!(said.contains("--backend-ca: permits are counted in this process"), "{said}");

    let file = files.path("gateway.toml");
    let rule =
        "redis = \"rediss://127.0.0.1:1/\"\nbackend-ca = \"none.pem\"\n[[rule]]\nlimit = 1\n";
    std::fs::write(&file, format!("upstream = \"http://127.0.0.1:1\"\n{rule}")).unwrap();
    let said = refused(with(&mut Gateway::command(), "--config", &file));
    assert!(said.contains("gateway.toml:3: backend-ca: none.pem: the file cannot"), "{said}");
}
