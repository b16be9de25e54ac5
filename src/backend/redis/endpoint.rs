//! A server and its connection settings.

use redis::{ConnectionAddr, ConnectionInfo, RedisConnectionInfo};

use crate::backend::tls::Tls;

/// Does not implement `Debug`, because it contains a password.
#[derive(Clone)]
pub(super) struct Endpoint {
    info: ConnectionInfo,
    tls: Option<Tls>,
}

impl Endpoint {
    pub(super) const fn new(info: ConnectionInfo, tls: Option<Tls>) -> Self {
        Self { info, tls }
    }

    /// Returns another server with the same settings.
    pub(super) fn at(&self, host: String, port: u16) -> Self {
        let info = self.info.clone().set_addr(ConnectionAddr::Tcp(host, port));
        Self { info, tls: self.tls.clone() }
    }

    pub(super) const fn info(&self) -> &ConnectionInfo {
        &self.info
    }

    pub(super) fn address(&self) -> &ConnectionAddr {
        self.info.addr()
    }

    pub(super) const fn tls(&self) -> Option<&Tls> {
        self.tls.as_ref()
    }

    /// Returns what no error may show: the password or, without one, the user, which is then a token.
    pub(super) fn secret(&self) -> Option<&str> {
        let settings: &RedisConnectionInfo = self.info.redis_settings();
        settings.password().or_else(|| settings.username()).filter(|secret| !secret.is_empty())
    }
}
