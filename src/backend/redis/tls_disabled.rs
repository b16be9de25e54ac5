//! Stands in for `tls.rs` without the feature `tls`: no URL that needs it is taken.

use deadpool_redis::redis::{AsyncConnectionConfig, ConnectionInfo, RedisError};

use super::multiplexed::Multiplexed;

#[derive(Clone)]
pub(super) enum Tls {}

impl Tls {
    pub(super) async fn open(
        &self,
        _: &ConnectionInfo,
        _: AsyncConnectionConfig,
    ) -> Result<Multiplexed, RedisError> {
        match *self {}
    }
}
