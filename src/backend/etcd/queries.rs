//! Queries and messages, which belong to no call.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::Mutex;

use super::keys::{Folder, Keys};
use super::link::behind;
use super::overrides;
use super::requests::{self, Stored};
use super::wire::messages::{PutRequest, RangeRequest, TxnRequest};
use super::wire::{Client, Environment, WireError};
use crate::backend::{Listing, Names, Overrides, PeerMessage, QueryError, listing};
use crate::error::BackendError;
use crate::protocol::liveness::LeaseId;
use crate::protocol::replica::{Row, Value};
use crate::protocol::{BoundRate, NodeId, PlaceId};

/// How often a change of a key is tried: each time, another process can be first.
pub(super) const TRIES_MAX: u32 = 64;

impl From<WireError> for QueryError {
    fn from(error: WireError) -> Self {
        Self::Failed(error.into())
    }
}

/// Asks over one connection.
#[derive(Clone)]
pub(super) struct Questions {
    pub(super) client: Client,
    pub(super) keys: Keys,
    pub(super) environment: Arc<dyn Environment>,
    /// Of several messages, the first is sent first.
    pub(super) order: Arc<Mutex<()>>,
}

impl Questions {
    pub(super) async fn inspect(
        self,
        key: Arc<str>,
        most: u32,
        rate: Option<BoundRate>,
    ) -> Result<Listing, QueryError> {
        let Read { value, .. } = self.read(&key).await?;
        let now = value.next_time(self.environment.wall());
        let mut listing = listing::of(&value.ledger, now, most, rate);
        for (_, lease_end, _) in &mut listing.places {
            *lease_end = now / 1000 + length_of(*lease_end);
        }
        Ok(listing)
    }

    pub(super) async fn list(self, from: Option<Arc<str>>, most: u32) -> Result<Names, QueryError> {
        let Folder { mut key, range_end } = self.keys.semaphores();
        if let Some(from) = from {
            let name = name_at(&from).ok_or_else(|| QueryError::of_position(Some(&from)))?;
            key = behind(self.keys.semaphore(&name).as_bytes()).into();
        }
        let limit = most.into();
        let request = RangeRequest { key, range_end, limit, keys_only: true, ..Default::default() };
        let page = self.client.range(request).await?;
        let name = |key: &Bytes| Some(self.keys.name(std::str::from_utf8(key).ok()?)?.into());
        let names: Vec<Arc<str>> = page.kvs.iter().filter_map(|kv| name(&kv.key)).collect();
        let next = names.last().filter(|_| page.more).map(|last| position_of(last));
        Ok(Names { names, next })
    }

    pub(super) async fn overrides(self, known: u64) -> Result<Option<Overrides>, QueryError> {
        let (set, _) = self.read_overrides().await?;
        let now = self.environment.wall() / 1000;
        Ok((set.version != known).then_some(Overrides { now, ..set }))
    }

    pub(super) async fn revoke(
        self,
        key: Arc<str>,
        id: PlaceId,
        take: bool,
        by: NodeId,
    ) -> Result<Option<u64>, QueryError> {
        for _ in 0..TRIES_MAX {
            let Read { mut value, changed } = self.read(&key).await?;
            let time = value.next_time(self.environment.wall());
            let Some(lease_end) = value.ledger.revoke(id, take, time) else { return Ok(None) };
            let left = Some(length_of(lease_end));
            if !take {
                return Ok(left);
            }
            // This process may not know the limit.
            (value.time, value.writer, value.is_promoted) = (time, by, false);
            let bytes = (!value.ledger.is_empty()).then(|| value.encode().into());
            if self.swap(Bytes::copy_from_slice(key.as_bytes()), changed, bytes).await? {
                return Ok(left);
            }
        }
        Err(contended())
    }

    /// `lease`: the message goes with it.
    pub(super) async fn send_message(
        self,
        key: Arc<str>,
        to: NodeId,
        message: PeerMessage,
        lease: Option<LeaseId>,
    ) -> Result<(), QueryError> {
        let (Some(name), Some(lease)) = (self.keys.name(&key), lease) else { return Ok(()) };
        let value = format!("{name}\n{message}").into();
        let put = PutRequest { key: self.keys.messages(to), value, lease };
        let request = TxnRequest { success: vec![put.into()], ..Default::default() };
        let _turn = self.order.lock().await;
        self.client.txn(request).await?;
        Ok(())
    }

    async fn read(&self, key: &str) -> Result<Read, QueryError> {
        let response =
            self.client.range(requests::read(Bytes::copy_from_slice(key.as_bytes()))).await?;
        let Stored { revision, value } = requests::stored(&response);
        let Some(bytes) = value else { return Ok(Read { value: Value::default(), changed: 0 }) };
        let value = Value::decode(&bytes).map_err(|error| {
            let name = self.keys.name(key).unwrap_or_default();
            QueryError::Failed(requests::unreadable(name, &error))
        })?;
        Ok(Read { value, changed: revision })
    }

    pub(super) async fn read_overrides(&self) -> Result<(Overrides, u64), QueryError> {
        let response = self.client.range(requests::read(self.keys.overrides())).await?;
        match requests::stored(&response) {
            Stored { revision, value: Some(value) } => {
                Ok((overrides::decode(&value).map_err(QueryError::Failed)?, revision))
            }
            Stored { value: None, .. } => Ok((Overrides::default(), 0)),
        }
    }

    /// Sets or removes a key whose last change was at this revision; 0: it is absent. Returns whether it was.
    pub(super) async fn swap(
        &self,
        key: Bytes,
        changed: u64,
        value: Option<Bytes>,
    ) -> Result<bool, QueryError> {
        let compare = vec![requests::is_unchanged(key.clone(), changed)];
        let success = vec![requests::write(key, value)];
        let request = TxnRequest { compare, success, failure: Vec::new() };
        Ok(self.client.txn(request).await?.succeeded)
    }
}

/// A semaphore, and the revision of its last change; 0: it is absent.
struct Read {
    value: Value,
    changed: u64,
}

/// The length of the lease of a place, ms. How much of it is left, only etcd knows.
fn length_of(lease_end: u64) -> u64 {
    u64::from(Row::with_lease_end(NodeId::new(0), lease_end).seconds) * 1000
}

/// Writes a name as a position: `~` and a letter stand for what a position may not have.
fn position_of(name: &str) -> Arc<str> {
    format!("n{}", name.replace('%', "~p").replace(':', "~c").replace('#', "~h")).into()
}

fn name_at(position: &str) -> Option<String> {
    let name = position.strip_prefix('n')?.replace("~p", "%").replace("~c", ":").replace("~h", "#");
    crate::Name::from_stored(&name).map(|name| name.as_str().to_owned())
}

pub(super) fn contended() -> QueryError {
    QueryError::Failed(BackendError::call(
        "other processes changed the same key all the time; try again",
    ))
}

#[cfg(test)]
mod tests {
    use super::{name_at, position_of};
    use crate::Name;

    #[test]
    fn a_position_is_read_as_the_name_before_it() {
        for name in [Name::new("a/b").part("c"), Name::new(""), Name::new("x".repeat(200))] {
            let position = position_of(name.as_str());
            let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._~".contains(c);
            assert!(position.chars().all(is_allowed) && &*position != "0", "{position}");
            assert_eq!(name_at(&position).as_deref(), Some(name.as_str()));
        }
        for other in ["", "0", "a", "n/", "n~", "n\n"] {
            assert_eq!(name_at(other), None, "{other:?}");
        }
    }
}
