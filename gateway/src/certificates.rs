//! The certificates for TLS to Redis or etcd.

use std::path::{Path, PathBuf};

use tower_semaphore::ConfigError;
use tower_semaphore::backend::TlsSettings;

/// Files in PEM, read at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, clap::Args)]
pub(crate) struct Certificates {
    /// A file in PEM with the authorities that the certificate of Redis or etcd is verified against, in place of the
    /// system's; for a URL that begins with rediss or etcds
    #[arg(id = "backend_ca", long = "backend-ca", value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,

    /// A file in PEM with the certificate that this gateway presents to Redis or etcd, and its intermediates
    #[arg(id = "backend_cert", long = "backend-cert", value_name = "FILE")]
    pub(crate) cert: Option<PathBuf>,

    /// A file in PEM with the key of --backend-cert: PKCS #8, PKCS #1 or SEC 1, not encrypted
    #[arg(id = "backend_key", long = "backend-key", value_name = "FILE")]
    pub(crate) key: Option<PathBuf>,
}

impl Certificates {
    /// Takes from `other` what is not set here.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            ca: self.ca.or(other.ca),
            cert: self.cert.or(other.cert),
            key: self.key.or(other.key),
        }
    }

    /// Reads the files; `None` if none is set. An error names the field, and why.
    pub(crate) fn settings(&self) -> Result<Option<TlsSettings>, (&'static str, String)> {
        if self.field().is_none() {
            return Ok(None);
        }
        let mut settings = TlsSettings::new();
        if let Some(path) = &self.ca {
            settings = settings.root_certificates(read("backend-ca", path)?);
        }
        match (&self.cert, &self.key) {
            (None, None) => {}
            (Some(cert), Some(key)) => {
                let cert = read("backend-cert", cert)?;
                settings = settings.client_certificate(cert, read("backend-key", key)?);
            }
            (Some(_), None) => {
                let what = "is set without backend-key; expected both or neither";
                return Err(("backend-cert", what.to_owned()));
            }
            (None, Some(_)) => {
                let what = "is set without backend-cert; expected both or neither";
                return Err(("backend-key", what.to_owned()));
            }
        }
        Ok(Some(settings))
    }

    /// The first field that is set.
    pub(crate) fn field(&self) -> Option<&'static str> {
        let set =
            [("backend-ca", &self.ca), ("backend-cert", &self.cert), ("backend-key", &self.key)];
        set.into_iter().find(|(_, path)| path.is_some()).map(|(field, _)| field)
    }

    /// The field and the file that an error of the crate is about; `None` if it is about none of these.
    pub(crate) fn refused(&self, error: &ConfigError) -> Option<(&'static str, String)> {
        let text = error.to_string();
        let what = text.strip_prefix("TLS settings: ")?;
        let of_files = [
            ("root certificates: ", "backend-ca", &self.ca),
            ("client certificate: ", "backend-cert", &self.cert),
            ("client certificate and key: ", "backend-cert", &self.cert),
            ("client key: ", "backend-key", &self.key),
        ];
        for (word, field, path) in of_files {
            if let (Some(what), Some(path)) = (what.strip_prefix(word), path) {
                return Some((field, format!("{}: {what}", shown(path))));
            }
        }
        // The URL uses no TLS.
        self.field()
            .filter(|_| what.contains("is reached over TLS"))
            .map(|field| (field, what.to_owned()))
    }
}

fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, (&'static str, String)> {
    std::fs::read(path).map_err(|error| {
        (
            field,
            format!("{}: the file cannot be read: {error}; expected a file in PEM", shown(path)),
        )
    })
}

/// The path, unless it is the key itself by mistake.
fn shown(path: &Path) -> String {
    let text = path.display().to_string();
    if text.contains("-----") || text.contains('\n') { "(not shown)".to_owned() } else { text }
}
