//! Certificates of a test's own, for servers with TLS.

use std::process::{Command, Stdio};

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tempfile::TempDir;

use super::redis::{TestRedis, free_port, server_binary};

/// An authority, and a certificate of it for a server.
pub(crate) struct Tls {
    dir: TempDir,
    authority: Issuer<'static, KeyPair>,
    asks_clients: bool,
}

impl Tls {
    /// For servers on this machine. Returns `None`, and prints why, if the server was built without TLS.
    pub(crate) fn new() -> Option<Self> {
        Self::for_names(&["127.0.0.1", "localhost"])
    }

    /// For servers with only these names and addresses.
    pub(crate) fn for_names(names: &[&str]) -> Option<Self> {
        let dir = TempDir::new().unwrap();
        if !speaks_tls(&dir) {
            eprintln!("skipped: a server without TLS");
            return None;
        }
        Some(Self::in_dir(dir, names))
    }

    /// For servers that always support TLS, with these names and addresses.
    #[cfg(feature = "etcd")]
    pub(crate) fn for_etcd(names: &[&str]) -> Self {
        Self::in_dir(TempDir::new().unwrap(), names)
    }

    fn in_dir(dir: TempDir, names: &[&str]) -> Self {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        // An issuer is looked up by its name.
        let name = format!("authority {}", dir.path().display());
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let own = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.pem"), own.pem()).unwrap();
        let tls = Self { dir, authority: Issuer::new(params, key), asks_clients: false };
        let (certificate, key) = tls.signed("a server", names);
        std::fs::write(tls.file("cert.pem"), certificate).unwrap();
        std::fs::write(tls.file("key.pem"), key).unwrap();
        tls
    }

    /// The same for servers that require a certificate of this authority.
    pub(crate) fn asking_clients(mut self) -> Self {
        self.asks_clients = true;
        self
    }

    /// Has the servers trust another authority, too.
    pub(crate) fn trusting(self, other: &Self) -> Self {
        let both = [self.authority_pem(), other.authority_pem()].concat();
        std::fs::write(self.file("ca.pem"), both).unwrap();
        self
    }

    /// Returns a certificate of the authority, and its key, in PEM.
    fn signed(&self, who: &str, names: &[&str]) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name.push(DnType::CommonName, who);
        (params.signed_by(&key, &self.authority).unwrap().pem(), key.serialize_pem())
    }

    /// Returns a client's certificate and key, in PEM.
    pub(crate) fn client(&self) -> (String, String) {
        self.signed("a client", &[])
    }

    /// Returns the certificate of the authority, in PEM.
    pub(crate) fn authority_pem(&self) -> String {
        std::fs::read_to_string(self.authority()).unwrap()
    }

    fn file(&self, name: &str) -> String {
        self.dir.path().join(name).to_str().unwrap().to_owned()
    }

    /// Returns a file of trusted authorities, for `SSL_CERT_FILE`.
    pub(crate) fn authority(&self) -> String {
        self.file("ca.pem")
    }

    /// Returns a server's settings, to be reached over TLS at a free port as well; replicas and the nodes of a cluster
    /// use TLS between each other.
    pub(crate) fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("tls-port", free_port().to_string()),
            ("tls-cert-file", self.file("cert.pem")),
            ("tls-key-file", self.file("key.pem")),
            ("tls-ca-cert-file", self.authority()),
            ("tls-auth-clients", if self.asks_clients { "yes" } else { "no" }.to_owned()),
            ("tls-replication", "yes".to_owned()),
        ]
    }

    /// Returns the arguments of an etcd that clients reach over TLS only.
    #[cfg(feature = "etcd")]
    pub(crate) fn etcd_args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--cert-file={}", self.file("cert.pem")),
            format!("--key-file={}", self.file("key.pem")),
        ];
        if self.asks_clients {
            args.push("--client-cert-auth".to_owned());
            args.push(format!("--trusted-ca-file={}", self.authority()));
        }
        args
    }

    /// Returns the settings as arguments.
    pub(crate) fn args(&self) -> Vec<String> {
        let settings = self.settings().into_iter();
        settings.flat_map(|(name, value)| [format!("--{name}"), value]).collect()
    }
}

/// Without a certificate, a server that supports TLS asks for one, and ends; any other ends, too.
fn speaks_tls(dir: &TempDir) -> bool {
    let asked = Command::new(server_binary())
        .args(["--port", "0", "--tls-port", &free_port().to_string()])
        .current_dir(dir.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8_lossy(&asked.stdout).contains("tls-cert-file")
}

/// Returns the port at which a server uses TLS.
pub(crate) fn port(server: &TestRedis) -> u16 {
    let (_, port): (String, u16) = server.command(&["CONFIG", "GET", "tls-port"]);
    port
}
