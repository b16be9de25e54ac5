//! A fake provider, which streams the words of a prompt back and counts its requests in flight.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::response::sse::{Event, Sse};
use axum::routing::post;
use futures_util::stream::{self, Stream};
use http::HeaderMap;
use tokio::net::TcpListener;
use tokio::time::sleep;

/// The time from one token to the next.
const TOKEN: Duration = Duration::from_millis(50);

/// The provider, with the load that it sees.
#[derive(Debug, Default)]
pub(crate) struct Provider {
    seen: Mutex<Seen>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    in_flight: BTreeMap<String, usize>,
    /// The maximum of concurrent requests, by user.
    pub(crate) peaks: BTreeMap<String, usize>,
    /// The maximum of concurrent requests of all users.
    pub(crate) peak: usize,
    pub(crate) requests: usize,
}

impl Provider {
    pub(crate) fn seen(&self) -> Seen {
        self.lock().clone()
    }

    fn begin(self: Arc<Self>, user: String) -> InFlight {
        {
            let mut seen = self.lock();
            let now = seen.in_flight.entry(user.clone()).or_default();
            *now += 1;
            let now = *now;
            let peak = seen.peaks.entry(user.clone()).or_default();
            *peak = now.max(*peak);
            seen.peak = seen.peak.max(seen.in_flight.values().sum());
            seen.requests += 1;
        }
        InFlight { provider: self, user }
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One request in flight.
struct InFlight {
    provider: Arc<Provider>,
    user: String,
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(now) = self.provider.lock().in_flight.get_mut(&self.user) {
            *now -= 1;
        }
    }
}

/// Starts the provider. Returns the URL that takes prompts.
pub(crate) async fn serve(provider: Arc<Provider>) -> io::Result<String> {
    let app = Router::new().route("/v1/completions", post(complete)).with_state(provider);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/v1/completions", listener.local_addr()?);
    tokio::spawn(async { axum::serve(listener, app).await });
    Ok(url)
}

async fn complete(
    State(provider): State<Arc<Provider>>,
    headers: HeaderMap,
    prompt: String,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let user = headers.get("x-user").and_then(|user| user.to_str().ok()).unwrap_or_default();
    let in_flight = provider.begin(user.to_owned());
    let words = prompt.split_whitespace().chain(["[DONE]"]).map(str::to_owned);
    let words: VecDeque<String> = words.collect();
    Sse::new(stream::unfold((words, in_flight), |(mut words, in_flight)| async move {
        let word = words.pop_front()?;
        sleep(TOKEN).await;
        Some((Ok(Event::default().data(word)), (words, in_flight)))
    }))
}
