//! etcd's own lock, `concurrency.Mutex` of its Go client, call by call: the reference.

use bytes::Bytes;
use tower_semaphore::backend::etcd_wire::messages::{
    Compare, CompareResult, DeleteRangeRequest, EventType, LeaseGrantRequest, OpResponse,
    PutRequest, RangeRequest, RequestOp, TxnRequest,
};
use tower_semaphore::backend::etcd_wire::{Client, KeyRange, WatchMessage};

use super::read;

/// A lock, and a session of its own.
pub(crate) struct Mutex {
    client: Client,
    prefix: String,
    key: Bytes,
    lease: i64,
}

impl Mutex {
    pub(crate) async fn new(client: Client, name: &str) -> Self {
        let lease = client.lease_grant(LeaseGrantRequest { ttl: 60, id: 0 }).await.unwrap().id;
        let prefix = format!("{name}/");
        let key = format!("{prefix}{lease:x}").into();
        Self { client, prefix, key, lease }
    }

    /// `tryAcquire`, then `waitDeletes`.
    pub(crate) async fn lock(&self) {
        let compare = vec![Compare::version(self.key.clone(), CompareResult::Equal, 0)];
        let put = PutRequest { key: self.key.clone(), value: Bytes::new(), lease: self.lease };
        let get = || RequestOp::from(read(self.key.clone()));
        let success = vec![RequestOp::from(put), self.first().into()];
        let request = TxnRequest { compare, success, failure: vec![get(), self.first().into()] };
        let response = self.client.txn(request).await.unwrap();
        let revision = response.header.unwrap().revision;
        let Some(OpResponse::Range(owner)) = &response.responses[1].response else {
            panic!("no owner")
        };
        if owner.kvs.first().is_none_or(|owner| owner.create_revision == revision) {
            return;
        }
        self.wait_deletes(revision).await;
        // `Lock` makes sure that the session is not expired.
        let own = self.client.range(read(self.key.clone())).await.unwrap();
        assert_eq!(own.kvs.len(), 1);
    }

    pub(crate) async fn unlock(&self) {
        let delete = DeleteRangeRequest { key: self.key.clone(), ..Default::default() };
        let request = TxnRequest { success: vec![delete.into()], ..Default::default() };
        self.client.txn(request).await.unwrap();
    }

    /// The oldest key.
    fn first(&self) -> RangeRequest {
        RangeRequest { limit: 1, sort_order: 1, sort_target: 2, ..self.all() }
    }

    fn all(&self) -> RangeRequest {
        let mut end = self.prefix.clone().into_bytes();
        *end.last_mut().unwrap() += 1;
        RangeRequest {
            key: self.prefix.clone().into(),
            range_end: end.into(),
            ..Default::default()
        }
    }

    /// Waits until each key that is older is deleted, the newest of them first.
    async fn wait_deletes(&self, own: i64) {
        loop {
            let last = RangeRequest {
                limit: 1,
                sort_order: 2,
                sort_target: 2,
                max_create_revision: own - 1,
                ..self.all()
            };
            let response = self.client.range(last).await.unwrap();
            let Some(last) = response.kvs.into_iter().next() else { return };
            let revision = response.header.unwrap().revision;
            let range =
                KeyRange { key: last.key, range_end: Bytes::new(), start_revision: revision };
            let mut watch = self.client.watch(vec![range]);
            loop {
                if let WatchMessage::Events { events, .. } = watch.next().await.unwrap()
                    && events.iter().any(|event| event.r#type == EventType::Delete as i32)
                {
                    break;
                }
            }
        }
    }
}
