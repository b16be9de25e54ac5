//! The token that stands for user and password.

use std::sync::Arc;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use tonic::metadata::AsciiMetadataValue;

use super::error::WireError;
use crate::sync::{Mutex, lock};

/// A token, as it is sent with each request.
pub(super) type Token = AsciiMetadataValue;

type Renewal = Shared<BoxFuture<'static, Result<Option<Token>, WireError>>>;

/// The newest token of a connection. Renewed once where several calls learn at the same time that it has ended: etcd
/// takes a tenth of a second to check a password.
#[derive(Default)]
pub(super) struct Tokens(Mutex<State>);

#[derive(Default)]
struct State {
    token: Option<Token>,
    renewal: Option<Renewal>,
}

impl Tokens {
    /// Returns the newest token. `None`: the cluster has no users, or none was requested yet.
    pub(super) fn newest(&self) -> Option<Token> {
        lock(&self.0).token.clone()
    }

    /// Returns a token that is newer than `ended`, and requests one if there is none.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future abandons the request, unless other calls wait for it.
    pub(super) async fn renew(
        self: &Arc<Self>,
        ended: Option<&Token>,
        request: impl FnOnce() -> BoxFuture<'static, Result<Option<Token>, WireError>>,
    ) -> Result<Option<Token>, WireError> {
        let renewal = {
            let mut state = lock(&self.0);
            if state.token.as_ref() != ended {
                return Ok(state.token.clone());
            }
            state.renewal.get_or_insert_with(|| request().shared()).clone()
        };
        let renewed = renewal.clone().await;
        let mut state = lock(&self.0);
        if state.renewal.as_ref().is_some_and(|current| current.ptr_eq(&renewal)) {
            state.renewal = None;
            if let Ok(token) = &renewed {
                state.token.clone_from(token);
            }
        }
        renewed
    }
}
