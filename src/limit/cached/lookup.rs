//! An answer that is looked up, by one request for each key.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures_util::future::BoxFuture;
use http::request::Parts;
use tokio::sync::OwnedMutexGuard;
use tokio::time::Instant;

use super::Cached;
use super::entry::Entry;
use crate::error::BackendError;
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
    step: Step<V>,
}

type Turn = OwnedMutexGuard<()>;

enum Step<V> {
    /// Another request asks.
    Queueing(BoxFuture<'static, Turn>),
    Asking(BoxFuture<'static, Result<V, BackendError>>),
}

impl<V: Copy + Send + Sync + 'static> Cached<V> {
    /// The answer, or a lookup of it.
    pub(in crate::limit) fn find(&self, key: &Name, parts: &Parts) -> Found<V> {
        let made = || Ok::<_, Infallible>(Arc::<Entry<V>>::default());
        let Ok(entry) = self.inner.entries.get_or_insert_with(key, made);
        let (now, options) = (Instant::now(), &self.inner.options);
        if let Some(answer) = entry.seen().answer(options, now) {
            return Found::Known(answer);
        }
        let asking = Arc::clone(&entry.asking);
        let Ok(turn) = Arc::clone(&asking).try_lock_owned() else {
            // Only the request that asks waits, if there is a stale answer for the others.
            if let Some(answer) = entry.seen().usable(options, now) {
                return Found::Known(Ok(answer));
            }
            let step = Step::Queueing(Box::pin(asking.lock_owned()));
            return Found::Later(Lookup { cache: self.clone(), entry, step });
        };
        // Another request may have asked between the two.
        if let Some(answer) = entry.seen().answer(options, now) {
            return Found::Known(answer);
        }
        let step = self.ask(&entry, turn, key, parts);
        Found::Later(Lookup { cache: self.clone(), entry, step })
    }

    fn ask(&self, entry: &Arc<Entry<V>>, turn: Turn, key: &Name, parts: &Parts) -> Step<V> {
        let source = (self.inner.source)(key, parts);
        let (entry, options) = (Arc::clone(entry), self.inner.options);
        Step::Asking(Box::pin(async move {
            let _turn = turn;
            entry.ask(source, &options).await
        }))
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
            match &mut self.step {
                Step::Queueing(turn) => {
                    let turn = ready!(turn.as_mut().poll(cx));
                    let options = &self.cache.inner.options;
                    if let Some(answer) = self.entry.seen().answer(options, Instant::now()) {
                        return Poll::Ready(answer);
                    }
                    // The request that asked was dropped before it had an answer.
                    self.step = self.cache.ask(&self.entry, turn, key, parts);
                }
                Step::Asking(answer) => return answer.as_mut().poll(cx),
            }
        }
    }
}
