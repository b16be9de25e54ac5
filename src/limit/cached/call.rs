//! One call of the source.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::FutureExt;
use futures_util::future::{BoxFuture, Shared};

use crate::error::BackendError;
use crate::limit::BoxError;

/// A call of the source. It lives as long as a request waits for it.
pub(super) struct Call<V> {
    pub(super) answer: Answer<V>,
}

/// What each request polls that waits for a call. All of them are woken with it, so it goes on if some are not polled.
pub(super) type Answer<V> = Shared<BoxFuture<'static, Result<Result<V, BackendError>, Panic>>>;

/// A panic of the source, which ends one of the requests that wait for it.
#[derive(Clone)]
pub(super) struct Panic(Arc<Mutex<Option<Payload>>>);

type Payload = Box<dyn Any + Send>;

impl<V: Copy + Send + Sync + 'static> Call<V> {
    pub(super) fn new(source: BoxFuture<'static, Result<V, BoxError>>) -> Self {
        let answer = async {
            // Nothing of it is used after a panic.
            let answer = AssertUnwindSafe(source).catch_unwind().await.map_err(Panic::new)?;
            Ok(answer.map_err(|error| {
                BackendError::call(format!("the look-up failed: {error}")).with_source(error)
            }))
        };
        Self { answer: answer.boxed().shared() }
    }
}

impl Panic {
    fn new(payload: Payload) -> Self {
        Self(Arc::new(Mutex::new(Some(payload))))
    }

    /// What to resume; `None` if another request has.
    pub(super) fn take(&self) -> Option<Payload> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}
