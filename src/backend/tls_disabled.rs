//! Replaces `tls.rs` without the feature `tls`: URLs that need TLS are rejected.

use std::io;

#[derive(Clone)]
pub(super) enum Tls {}

impl Tls {
    pub(super) async fn secure<S>(&self, _: &str, _: S) -> io::Result<S> {
        match *self {}
    }
}
