//! What etcd stored: every version of every semaphore and of every sign of life, in the order of revisions.

use std::collections::BTreeMap;

use tower_semaphore::backend::etcd_wire::messages::{Event, EventType};
use tower_semaphore::protocol::NodeId;
use tower_semaphore::protocol::liveness::Row;
use tower_semaphore::protocol::replica::Value;

/// The folders of semaphores and of signs of life.
pub(super) const SEMAPHORES: &str = "semaphore/s/";
pub(super) const SIGNS: &str = "semaphore/n/";

/// A change of one key.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) revision: i64,
    /// How often the key was written since it was created; 0 after it was deleted.
    pub(super) version: i64,
    pub(super) change: Change,
}

#[derive(Clone, Debug)]
pub(super) enum Change {
    /// `None`: the key was deleted.
    Semaphore { name: String, value: Option<Snapshot> },
    /// A sign of life is there from now on, or is gone.
    Sign { row: Row, is_there: bool },
}

/// A semaphore, as one value has it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Snapshot {
    /// The process that wrote it.
    pub(super) writer: Option<NodeId>,
    /// When it was written, µs by the writer's clock.
    pub(super) time: u64,
    /// Whether the writer granted what was free.
    pub(super) is_promoted: bool,
    pub(super) places: BTreeMap<Id, Place>,
}

/// A process, and the number of a place in it.
pub(super) type Id = (NodeId, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// The length of its lease.
    pub(super) seconds: u32,
    pub(super) cost: u32,
    /// Its ticket while it waits.
    pub(super) ticket: Option<u64>,
}

impl Snapshot {
    /// The permits in use.
    pub(super) fn held(&self) -> u64 {
        let held = self.places.values().filter(|place| place.ticket.is_none());
        held.map(|place| u64::from(place.cost)).sum()
    }

    /// The permits that one process has.
    pub(super) fn held_by(&self, node: NodeId) -> u64 {
        let held = self.places.iter().filter(|(id, place)| id.0 == node && place.ticket.is_none());
        held.map(|(_, place)| u64::from(place.cost)).sum()
    }

    /// The places that wait, and their tickets.
    pub(super) fn waiting(&self) -> impl Iterator<Item = (&Id, u64)> {
        self.places.iter().filter_map(|(id, place)| Some((id, place.ticket?)))
    }

    pub(super) fn ticket(&self, id: &Id) -> Option<u64> {
        self.places.get(id)?.ticket
    }
}

impl From<&Value> for Snapshot {
    fn from(value: &Value) -> Self {
        let place = |(id, lease_end, ticket)| {
            let tower_semaphore::protocol::PlaceId { node, n, .. } = id;
            let seconds = Row::with_lease_end(node, lease_end).seconds;
            ((node, n), Place { seconds, cost: id.cost(), ticket })
        };
        Self {
            writer: Some(value.writer),
            time: value.time,
            is_promoted: value.is_promoted,
            places: value.ledger.places().map(place).collect(),
        }
    }
}

impl Entry {
    /// Reads an event of a watch. `None` if its key is neither of a semaphore nor of a sign of life.
    pub(super) fn read(event: &Event) -> Option<Self> {
        let kv = event.kv.as_ref()?;
        let is_put = event.r#type() == EventType::Put;
        let key = std::str::from_utf8(&kv.key).ok()?;
        let change = if let Some(path) = key.strip_prefix(SEMAPHORES) {
            let name = path.strip_suffix("/L")?.to_owned();
            let value = is_put.then(|| match Value::decode(&kv.value) {
                Ok(value) => Snapshot::from(&value),
                Err(error) => panic!("{name} at revision {} is not read: {error}", kv.mod_revision),
            });
            Change::Semaphore { name, value }
        } else {
            let (node, seconds) = key.strip_prefix(SIGNS)?.split_once('/')?;
            let row = Row { node: NodeId::parse(node.as_bytes())?, seconds: seconds.parse().ok()? };
            Change::Sign { row, is_there: is_put }
        };
        Some(Self { revision: kv.mod_revision, version: kv.version, change })
    }
}
