//! A stream of requests, and one of responses.

use futures_util::future::BoxFuture;
use futures_util::stream::{Stream, poll_fn};
use tokio::sync::mpsc;
use tonic::Streaming;

use super::error::WireError;

/// The requests of a stream, as they are sent.
pub(super) type Requests<Q> = futures_util::stream::BoxStream<'static, Q>;

/// A stream in both directions. Dropping it ends both.
pub(super) struct Exchange<Q, R> {
    requests: mpsc::Sender<Q>,
    responses: Responses<R>,
}

enum Responses<R> {
    /// etcd answers the opening with the first response only.
    Opening(BoxFuture<'static, Result<Streaming<R>, WireError>>),
    Open(Box<Streaming<R>>),
    Ended(WireError),
}

impl<Q: Send + 'static, R> Exchange<Q, R> {
    /// `capacity` is the number of requests that may wait to be sent.
    pub(super) fn new(
        capacity: usize,
        open: impl FnOnce(Requests<Q>) -> BoxFuture<'static, Result<Streaming<R>, WireError>>,
    ) -> Self {
        let (requests, queue) = mpsc::channel(capacity);
        let opening = open(Box::pin(stream(queue)));
        Self { requests, responses: Responses::Opening(opening) }
    }

    /// Queues a request. Returns whether there was room.
    pub(super) fn send(&self, request: Q) -> bool {
        self.requests.try_send(request).is_ok()
    }

    /// Returns the next response. After an error, returns the same error.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future loses no response.
    pub(super) async fn next(&mut self) -> Result<R, WireError> {
        loop {
            let error = match &mut self.responses {
                Responses::Opening(opening) => match opening.await {
                    Ok(streaming) => {
                        self.responses = Responses::Open(Box::new(streaming));
                        continue;
                    }
                    Err(error) => error,
                },
                Responses::Open(streaming) => match streaming.message().await {
                    Ok(Some(response)) => return Ok(response),
                    Ok(None) => WireError::ended(),
                    Err(status) => WireError::of_status(status),
                },
                Responses::Ended(error) => return Err(error.clone()),
            };
            self.responses = Responses::Ended(error);
        }
    }
}

fn stream<Q>(mut queue: mpsc::Receiver<Q>) -> impl Stream<Item = Q> {
    poll_fn(move |cx| queue.poll_recv(cx))
}
