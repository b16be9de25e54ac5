//! How many requests the gateway has at a time: what they take of its memory is bounded by their number.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How often it is said at most that there is none.
const WARN: Duration = Duration::from_secs(60);

/// Room for requests, those that wait for a permit and those at the upstream.
pub(crate) struct Room {
    bounded: Option<Bounded>,
}

struct Bounded {
    most: usize,
    free: Arc<Semaphore>,
    warned: Mutex<Option<Instant>>,
}

/// The room of one request, until this is dropped.
pub(crate) struct Place {
    _permit: Option<OwnedSemaphorePermit>,
}

impl Room {
    /// `None`: for any number.
    pub(crate) fn new(most: Option<usize>) -> Self {
        let bounded = most.map(|most| Bounded {
            most,
            free: Arc::new(Semaphore::new(most)),
            warned: Mutex::default(),
        });
        Self { bounded }
    }

    /// Takes the room of one request, whatever its response will be; `None` if there is none.
    pub(crate) fn take(&self) -> Option<Place> {
        let Some(bounded) = &self.bounded else { return Some(Place { _permit: None }) };
        let permit = Arc::clone(&bounded.free).try_acquire_owned().ok();
        if permit.is_none() {
            bounded.warn();
        }
        permit.map(|permit| Place { _permit: Some(permit) })
    }
}

/// The response to a request for which there is no room. It has no body: over HTTP/2 a client could refuse to take that,
/// and nothing would bound the number of such responses.
pub(crate) fn full() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, [(header::RETRY_AFTER, "1")]).into_response()
}

impl Bounded {
    fn warn(&self) {
        let mut warned = self.warned.lock().unwrap_or_else(PoisonError::into_inner);
        if warned.is_none_or(|warned| warned.elapsed() > WARN) {
            *warned = Some(Instant::now());
            tracing::warn!(
                "the maximum of {} requests is reached; further ones are rejected",
                self.most
            );
        }
    }
}
