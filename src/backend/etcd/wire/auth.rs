//! The token that stands for user and password.

use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};
use tokio::time::Instant;
use tonic::metadata::AsciiMetadataValue;

use super::error::{Reason, WireError};
use crate::sync::{Mutex, lock};

/// A token, as it is sent with each request.
pub(super) type Token = AsciiMetadataValue;

type Renewal = Shared<BoxFuture<'static, Result<Option<Token>, WireError>>>;

/// A password that was refused is not checked again before.
const REFUSED_PAUSE: Duration = Duration::from_secs(5);

/// The newest token of a process, for all of its connections: every member takes it. Renewed once where several calls learn
/// at the same time that it has ended.
///
/// etcd takes a tenth of a second of one core to check a password, one after the other, and goes on for those who gave up.
/// So a fleet that asked for a token with each connection would keep itself from connecting.
#[derive(Default)]
pub(super) struct Tokens(Mutex<State>);

#[derive(Default)]
struct State {
    token: Option<Token>,
    renewal: Option<Renewal>,
    refused: Option<(WireError, Instant)>,
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
            if let Some((error, at)) = &state.refused
                && at.elapsed() < REFUSED_PAUSE
            {
                return Err(error.clone());
            }
            state.renewal.get_or_insert_with(|| request().shared()).clone()
        };
        let renewed = renewal.clone().await;
        let mut state = lock(&self.0);
        if state.renewal.as_ref().is_some_and(|current| current.ptr_eq(&renewal)) {
            state.renewal = None;
            match &renewed {
                Ok(token) => (state.token, state.refused) = (token.clone(), None),
                Err(error) if error.reason() == Reason::NotAuthenticated => {
                    state.refused = Some((error.clone(), Instant::now()));
                }
                Err(_) => {}
            }
        }
        renewed
    }
}
