//! Certificates of a test's own, for servers that speak TLS.

use std::process::{Command, Stdio};

use tempfile::TempDir;

use super::redis::{TestRedis, free_port, server_binary};

/// An authority, and a certificate of it for this machine.
pub(crate) struct Tls {
    dir: TempDir,
}

impl Tls {
    /// `None`: there is no openssl here, or the server was built without TLS. Says so.
    pub(crate) fn new() -> Option<Self> {
        // Without a certificate a server that can speak TLS asks for one, and ends; another ends too.
        let port = free_port().to_string();
        let dir = TempDir::new().unwrap();
        let asked = Command::new(server_binary())
            .args(["--port", "0", "--tls-port", &port])
            .current_dir(dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let speaks_tls = String::from_utf8_lossy(&asked.stdout).contains("tls-cert-file");
        let tls = Self { dir };
        if speaks_tls && tls.is_made() {
            return Some(tls);
        }
        eprintln!("skipped: no openssl here, or a server without TLS");
        None
    }

    fn is_made(&self) -> bool {
        let names = "subjectAltName=IP:127.0.0.1,DNS:localhost\n";
        std::fs::write(self.dir.path().join("names"), names).unwrap();
        let steps = [
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=authority -keyout ca.key -out ca.pem",
            "req -newkey rsa:2048 -nodes -subj /CN=localhost -keyout key.pem -out request.pem",
            "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names \
             -out cert.pem",
        ];
        steps.iter().all(|step| {
            let made = Command::new("openssl")
                .args(step.split_whitespace())
                .current_dir(self.dir.path())
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .status();
            made.is_ok_and(|status| status.success())
        })
    }

    fn file(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Whom to trust: for `SSL_CERT_FILE`.
    pub(crate) fn authority(&self) -> String {
        self.file("ca.pem")
    }

    /// A server's settings, to be reached over TLS at a free port too; replicas and the nodes of a
    /// cluster speak TLS to each other.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("tls-port", free_port().to_string()),
            ("tls-cert-file", self.file("cert.pem")),
            ("tls-key-file", self.file("key.pem")),
            ("tls-ca-cert-file", self.authority()),
            ("tls-auth-clients", "no".to_owned()),
            ("tls-replication", "yes".to_owned()),
        ]
    }

    /// The same as arguments.
    pub(crate) fn args(&self) -> Vec<String> {
        let settings = self.settings().into_iter();
        settings.flat_map(|(name, value)| [format!("--{name}"), value]).collect()
    }
}

/// The port at which a server speaks TLS.
pub(crate) fn port(server: &TestRedis) -> u16 {
    let (_, port): (String, u16) = server.command(&["CONFIG", "GET", "tls-port"]);
    port
}
