//! Reaching a server over TCP.

use std::io;

use futures_util::future::select_ok;
use tokio::net::{TcpStream, lookup_host};

/// Opens a socket to a host. The caller applies the timeout.
pub(super) async fn reach(host: &str, port: u16) -> io::Result<TcpStream> {
    let addresses: Vec<_> = lookup_host((host, port)).await?.collect();
    if addresses.is_empty() {
        return Err(io::Error::other("the host has no address"));
    }
    // Concurrently, so that an address that does not respond does not use up the timeout.
    let dials = addresses.into_iter().map(|address| Box::pin(TcpStream::connect(address)));
    let (stream, _) = select_ok(dials).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Returns what to do about an error of a handshake, from its text.
pub(super) fn tls_advice(text: &str) -> Option<&'static str> {
    if text.contains("UnknownIssuer") || text.contains("BadSignature") {
        Some("; add the authority that signed its certificate with TlsSettings::root_certificates")
    } else if text.contains("not valid for name") {
        Some("; its certificate is for another name; see TlsSettings::server_name")
    } else if text.contains("CertificateRequired") {
        Some("; it requires a client certificate; see TlsSettings::client_certificate")
    } else {
        None
    }
}
