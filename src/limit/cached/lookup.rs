//! An answer that is looked up, by one call for each key.
//!
//! Every request that waits for a call polls it, and each has a timer of its own. So a request that is not polled
//! delays no other.

use std::convert::Infallible;
use std::panic::resume_unwind;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::request::Parts;
use tokio::time::{Instant, Timeout, timeout_at};

use super::Cached;
use super::call::{Answer, Call};
use super::entry::{Entry, Known};
use crate::error::{BackendError, Seconds};
use crate::name::Name;

/// An answer, if it is known.
pub(in crate::limit) enum Found<V> {
    Known(Result<V, BackendError>),
    Later(Lookup<V>),
}

/// An answer that is being looked up.
pub(in crate::limit) struct Lookup<V> {
    cache: Cached<V>,
    entry: Arc<Entry<V>>,
    call: Arc<Call<V>>,
    answer: Pin<Box<Timeout<Answer<V>>>>,
}

impl<V: Copy + Send + Sync + 'static> Cached<V> {
    /// The answer, or a lookup of it.
    pub(in crate::limit) fn find(&self, key: &Name, parts: &Parts) -> Found<V> {
        let made = || Ok::<_, Infallible>(Arc::<Entry<V>>::default());
        let Ok(entry) = self.inner.entries.get_or_insert_with(key, made);
        let (now, options) = (Instant::now(), &self.inner.options);
        let known = entry.seen().known(options, now);
        let known = known.unwrap_or_else(|| {
            // Not under the lock: it is the user's code.
            let call = Arc::new(Call::new((self.inner.source)(key, parts)));
            entry.seen().begin(&call, options, now)
        });
        match known {
            Known::Answer(answer) => Found::Known(answer),
            Known::Running(call, until) => {
                let answer = Box::pin(timeout_at(until, call.answer.clone()));
                Found::Later(Lookup { cache: self.clone(), entry, call, answer })
            }
        }
    }
}

impl<V: Copy + Send + Sync + 'static> Lookup<V> {
    pub(in crate::limit) fn poll(
        &mut self,
        key: &Name,
        parts: &Parts,
        cx: &mut Context<'_>,
    ) -> Poll<Result<V, BackendError>> {
        loop {
            let options = &self.cache.inner.options;
            match ready!(self.answer.as_mut().poll(cx)) {
                Ok(Ok(answer)) => return Poll::Ready(self.entry.end(&self.call, answer, options)),
                Err(_) => {
                    let error = BackendError::call(format!(
                        "the look-up had no answer within {}",
                        Seconds(options.timeout)
                    ));
                    return Poll::Ready(self.entry.end(&self.call, Err(error), options));
                }
                Ok(Err(panic)) => {
                    self.entry.seen().end(&self.call);
                    if let Some(panic) = panic.take() {
                        resume_unwind(panic);
                    }
                    // Another request has panicked with it.
                    match self.cache.find(key, parts) {
                        Found::Known(answer) => return Poll::Ready(answer),
                        Found::Later(lookup) => *self = lookup,
                    }
                }
            }
        }
    }
}
