//! Streams of watches, as a member serves them.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::{Instant, sleep_until};
use tonic::{Status, Streaming};
use tower_semaphore::backend::etcd_wire::messages::{
    ResponseHeader, WatchCreateRequest, WatchRequest, WatchRequestUnion, WatchResponse,
};

use crate::cluster::{News, no_leader};
use crate::server::Server;

/// A stream of watches of one process.
struct Stream {
    server: Server,
    ranges: BTreeMap<i64, Range>,
    responses: UnboundedSender<Result<WatchResponse, Status>>,
}

struct Range {
    key: Bytes,
    end: Bytes,
    /// The revision from which events are to be delivered.
    next: i64,
}

/// The stream is over.
struct Over;

/// Serves a stream of watches until it ends.
pub async fn watch(
    server: Server,
    mut requests: Streaming<WatchRequest>,
    responses: UnboundedSender<Result<WatchResponse, Status>>,
) {
    let mut stream = Stream { server, ranges: BTreeMap::new(), responses };
    _ = stream.run(&mut requests).await;
}

impl Stream {
    async fn run(&mut self, requests: &mut Streaming<WatchRequest>) -> Result<(), Over> {
        let cluster = self.server.cluster.clone();
        let mut seen = cluster.state().news();
        let leaderless = seen.leaderless;
        // The revision that is delivered next, and when.
        let mut due: Option<(News, Instant)> = None;
        loop {
            let at = due.map(|(_, at)| at);
            tokio::select! {
                biased;
                () = self.responses.closed() => return Err(Over),
                request = requests.message() => {
                    let Ok(Some(request)) = request else { return Err(Over) };
                    self.handle_request(request)?;
                }
                () = sleep_until(at.unwrap_or_else(Instant::now)), if at.is_some() => {
                    if let Some((news, _)) = due.take() {
                        self.deliver(news)?;
                    }
                }
                news = cluster.news_after(seen), if at.is_none() => {
                    seen = news;
                    if news.leaderless != leaderless {
                        _ = self.responses.send(Err(no_leader()));
                        return Err(Over);
                    }
                    let lag = cluster.state().watch_lag(self.server.member);
                    due = Some((news, Instant::now() + Duration::from_millis(lag)));
                }
            }
        }
    }

    fn handle_request(&mut self, request: WatchRequest) -> Result<(), Over> {
        self.server.cluster.state().count(self.server.process);
        match request.request {
            Some(WatchRequestUnion::Create(create)) => self.create(create),
            Some(WatchRequestUnion::Progress(_)) => {
                if self.server.cluster.state().is_stale(self.server.member) {
                    return Ok(());
                }
                let revision = self.ranges.values().map(|range| range.next - 1).min();
                let header = self.header();
                // Only what all ranges have delivered is told.
                let revision = revision.unwrap_or(header.revision);
                let header = Some(ResponseHeader { revision, ..header });
                self.send(WatchResponse { header, watch_id: -1, ..WatchResponse::default() })
            }
            Some(WatchRequestUnion::Cancel(_)) | None => Ok(()),
        }
    }

    fn create(&mut self, create: WatchCreateRequest) -> Result<(), Over> {
        let WatchCreateRequest { key, range_end: end, start_revision, watch_id, .. } = create;
        let header = self.header();
        let next = if start_revision == 0 { header.revision + 1 } else { start_revision };
        self.ranges.insert(watch_id, Range { key, end, next });
        let header = Some(header);
        self.send(WatchResponse { header, watch_id, created: true, ..WatchResponse::default() })?;
        let (revision, compacted) = {
            let state = self.server.cluster.state();
            (state.store.revision(), state.store.compacted())
        };
        self.deliver(News { revision, compacted, leaderless: 0 })
    }

    /// Delivers everything up to a revision.
    fn deliver(&mut self, news: News) -> Result<(), Over> {
        let (loses, ends) = {
            let mut state = self.server.cluster.state();
            (state.happens(|of| of.watches_lose), state.happens(|of| of.watches_end))
        };
        if ends {
            _ = self.responses.send(Err(Status::unavailable("etcdserver: server stopped")));
            return Err(Over);
        }
        let header = self.header();
        let mut responses = Vec::new();
        let mut canceled = Vec::new();
        for (id, range) in &mut self.ranges {
            let response =
                WatchResponse { header: Some(header), watch_id: *id, ..WatchResponse::default() };
            if range.next < news.compacted {
                let compact_revision = news.compacted;
                responses.push(WatchResponse { canceled: true, compact_revision, ..response });
                canceled.push(*id);
                continue;
            }
            if range.next > news.revision {
                continue;
            }
            let state = self.server.cluster.state();
            let events = state.store.changes(&range.key, &range.end, range.next, news.revision);
            range.next = news.revision + 1;
            if !events.is_empty() && !loses {
                responses.push(WatchResponse { events, ..response });
            }
        }
        canceled.iter().for_each(|id| _ = self.ranges.remove(id));
        responses.into_iter().try_for_each(|response| self.send(response))
    }

    fn header(&self) -> ResponseHeader {
        self.server.cluster.state().header(self.server.member)
    }

    fn send(&self, response: WatchResponse) -> Result<(), Over> {
        self.responses.send(Ok(response)).map_err(|_| Over)
    }
}
