//! The store of a simulated cluster: keys with versions, revisions and leases, as etcd keeps them.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Bound;

use bytes::Bytes;
use tower_semaphore::backend::etcd_wire::messages::{
    Compare, CompareResult, DeleteRangeRequest, DeleteRangeResponse, Event, EventType, KeyValue,
    Op, OpResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, RequestOp, ResponseOp,
    TargetUnion, TxnRequest,
};

use tower_semaphore::protocol::replica::Value;

use crate::plan::Planted;

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    LeaseNotFound,
    Compacted,
    FutureRevision,
    NoSpace,
}

/// A change of a key.
#[derive(Clone, Debug)]
pub struct Change {
    /// When it was committed, in ms.
    pub at: u64,
    pub event: Event,
}

impl Change {
    fn kv(&self) -> &KeyValue {
        static NONE: KeyValue = KeyValue {
            key: Bytes::new(),
            create_revision: 0,
            mod_revision: 0,
            version: 0,
            value: Bytes::new(),
            lease: 0,
        };
        self.event.kv.as_ref().unwrap_or(&NONE)
    }

    #[must_use]
    pub fn revision(&self) -> i64 {
        self.kv().mod_revision
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KeyValue { key, mod_revision, value, .. } = self.kv();
        write!(f, "revision {mod_revision}: {}", String::from_utf8_lossy(key))?;
        if self.event.r#type() == EventType::Delete {
            return f.write_str(" is deleted");
        }
        let Ok(value) = Value::decode(value) else { return Ok(()) };
        write!(f, " by {:?}, time {}", value.writer, value.time)?;
        for (id, _, ticket) in value.ledger.places() {
            match ticket {
                Some(ticket) => write!(f, "; {:?} {} waits with {ticket}", id.node, id.n)?,
                None => write!(f, "; {:?} {} holds", id.node, id.n)?,
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug)]
struct Lease {
    /// In seconds.
    ttl: i64,
    /// In ms.
    ends_at: u64,
    keys: BTreeSet<Bytes>,
}

/// What a transaction came to.
#[derive(Clone, Debug)]
pub struct Done {
    pub succeeded: bool,
    pub responses: Vec<ResponseOp>,
}

#[derive(Clone, Debug)]
pub struct Store {
    now: u64,
    revision: i64,
    /// Revisions below this are gone.
    compacted: i64,
    keys: BTreeMap<Bytes, KeyValue>,
    /// Every change, in the order of revisions, also where the cluster has compacted it.
    log: Vec<Change>,
    leases: BTreeMap<i64, Lease>,
    next_lease: i64,
    /// The shortest lease that is granted, in seconds.
    min_ttl: i64,
    pub has_space: bool,
    planted: Option<Planted>,
    transactions: u64,
}

impl Store {
    #[must_use]
    pub const fn new(min_ttl: i64, planted: Option<Planted>) -> Self {
        Self {
            now: 0,
            revision: 1,
            compacted: 0,
            keys: BTreeMap::new(),
            log: Vec::new(),
            leases: BTreeMap::new(),
            next_lease: 7_587_000_000_000_000_001,
            min_ttl,
            has_space: true,
            planted,
            transactions: 0,
        }
    }
}

impl Store {
    pub const fn set_now(&mut self, now: u64) {
        self.now = now;
    }

    #[must_use]
    pub const fn revision(&self) -> i64 {
        self.revision
    }

    #[must_use]
    pub const fn compacted(&self) -> i64 {
        self.compacted
    }

    #[must_use]
    pub fn log(&self) -> &[Change] {
        &self.log
    }

    #[must_use]
    pub const fn keys(&self) -> &BTreeMap<Bytes, KeyValue> {
        &self.keys
    }

    /// Returns the changes of a range from one revision up to another one, inclusive.
    #[must_use]
    pub fn changes(&self, key: &Bytes, range_end: &Bytes, from: i64, to: i64) -> Vec<Event> {
        let first = self.log.partition_point(|change| change.revision() < from);
        let changes = self.log[first..].iter().take_while(|change| change.revision() <= to);
        let meant = changes.filter(|change| is_in(&change.kv().key, key, range_end));
        meant.map(|change| change.event.clone()).collect()
    }

    /// Forgets the revisions before this one.
    pub fn compact(&mut self, revision: i64) {
        self.compacted = self.compacted.max(revision);
    }

    // ===== keys =====

    /// # Errors
    ///
    /// If the revision is not there.
    pub fn range(&self, request: &RangeRequest) -> Result<RangeResponse, Refusal> {
        let then;
        let keys = match request.revision {
            0 => &self.keys,
            revision if revision > self.revision => return Err(Refusal::FutureRevision),
            revision if revision < self.compacted => return Err(Refusal::Compacted),
            revision => {
                then = self.as_of(revision);
                &then
            }
        };
        let found: Vec<_> = in_range(keys, &request.key, &request.range_end).collect();
        let count = i64::try_from(found.len()).unwrap_or(i64::MAX);
        let limit = usize::try_from(request.limit).ok().filter(|limit| *limit > 0);
        let limit = limit.unwrap_or(usize::MAX);
        let read = |kv: &KeyValue| {
            let value = if request.keys_only { Bytes::new() } else { kv.value.clone() };
            KeyValue { value, ..kv.clone() }
        };
        let kvs = found.iter().take(limit).map(|kv| read(kv)).collect();
        Ok(RangeResponse { header: None, kvs, more: found.len() > limit, count })
    }

    fn as_of(&self, revision: i64) -> BTreeMap<Bytes, KeyValue> {
        let mut keys = BTreeMap::new();
        for change in self.log.iter().take_while(|change| change.revision() <= revision) {
            let kv = change.kv();
            if change.event.r#type() == EventType::Put {
                keys.insert(kv.key.clone(), kv.clone());
            } else {
                keys.remove(&kv.key);
            }
        }
        keys
    }

    /// # Errors
    ///
    /// If the transaction is refused. Then nothing of it is done.
    pub fn txn(&mut self, request: &TxnRequest) -> Result<Done, Refusal> {
        let all = || request.success.iter().chain(&request.failure);
        let puts = || all().filter_map(put_of);
        if !self.has_space && puts().next().is_some() {
            return Err(Refusal::NoSpace);
        }
        self.transactions += 1;
        let succeeded = request.compare.iter().all(|compare| self.holds(compare));
        let ops = if succeeded { &request.success } else { &request.failure };
        let has_lease = |put: &PutRequest| put.lease == 0 || self.leases.contains_key(&put.lease);
        if !ops.iter().filter_map(put_of).all(has_lease) {
            return Err(Refusal::LeaseNotFound);
        }
        if self.planted == Some(Planted::ForgetsWrite) && self.transactions.is_multiple_of(20) {
            let response = |_: &RequestOp| ResponseOp { response: None };
            return Ok(Done { succeeded, responses: ops.iter().map(response).collect() });
        }
        let revision = self.revision + 1;
        let mut responses = Vec::new();
        for op in ops {
            let response = match &op.request {
                Some(Op::Range(range)) => Some(OpResponse::Range(self.range(range)?)),
                Some(Op::Put(put)) => {
                    self.put(put, revision);
                    Some(OpResponse::Put(PutResponse::default()))
                }
                Some(Op::DeleteRange(delete)) => {
                    let deleted = self.delete(delete, revision);
                    Some(OpResponse::DeleteRange(DeleteRangeResponse { header: None, deleted }))
                }
                None => None,
            };
            responses.push(ResponseOp { response });
        }
        Ok(Done { succeeded, responses })
    }

    fn holds(&self, compare: &Compare) -> bool {
        let absent = KeyValue::default();
        let target = |kv: &KeyValue| match compare.target_union {
            Some(TargetUnion::Version(to)) => (kv.version, to),
            Some(TargetUnion::CreateRevision(to)) => (kv.create_revision, to),
            Some(TargetUnion::ModRevision(to)) => (kv.mod_revision, to),
            Some(TargetUnion::Lease(to)) => (kv.lease, to),
            None => (0, 0),
        };
        let holds = |kv: &KeyValue| {
            let (is, to) = target(kv);
            match compare.result() {
                CompareResult::Equal => is == to,
                CompareResult::Greater => is > to,
                CompareResult::Less => is < to,
                CompareResult::NotEqual => is != to,
            }
        };
        let is_mod = matches!(compare.target_union, Some(TargetUnion::ModRevision(_)));
        match self.planted {
            Some(Planted::ComparesWrongly) if is_mod && self.transactions.is_multiple_of(5) => {
                return true;
            }
            Some(Planted::IgnoresPresence) if !is_mod => return true,
            _ => {}
        }
        if compare.range_end.is_empty() {
            return holds(self.keys.get(&compare.key).unwrap_or(&absent));
        }
        in_range(&self.keys, &compare.key, &compare.range_end).all(holds)
    }

    fn put(&mut self, put: &PutRequest, revision: i64) {
        let before = self.keys.get(&put.key);
        let (create_revision, version) =
            before.map_or((revision, 1), |kv| (kv.create_revision, kv.version + 1));
        if let Some(lease) = before.and_then(|kv| self.leases.get_mut(&kv.lease)) {
            lease.keys.remove(&put.key);
        }
        if let Some(lease) = self.leases.get_mut(&put.lease) {
            lease.keys.insert(put.key.clone());
        }
        let kv = KeyValue {
            key: put.key.clone(),
            create_revision,
            mod_revision: revision,
            version,
            value: put.value.clone(),
            lease: put.lease,
        };
        self.keys.insert(put.key.clone(), kv.clone());
        self.record(EventType::Put, kv);
    }

    fn delete(&mut self, delete: &DeleteRangeRequest, revision: i64) -> i64 {
        let found = in_range(&self.keys, &delete.key, &delete.range_end);
        let keys: Vec<_> = found.map(|kv| kv.key.clone()).collect();
        for key in &keys {
            self.remove(key, revision);
        }
        i64::try_from(keys.len()).unwrap_or(i64::MAX)
    }

    fn remove(&mut self, key: &Bytes, revision: i64) {
        let Some(kv) = self.keys.remove(key) else { return };
        if let Some(lease) = self.leases.get_mut(&kv.lease) {
            lease.keys.remove(key);
        }
        let key = key.clone();
        self.record(
            EventType::Delete,
            KeyValue { key, mod_revision: revision, ..KeyValue::default() },
        );
    }

    fn record(&mut self, r#type: EventType, kv: KeyValue) {
        self.revision = kv.mod_revision;
        let event = Event { r#type: r#type.into(), kv: Some(kv) };
        self.log.push(Change { at: self.now, event });
    }

    // ===== leases =====

    /// # Errors
    ///
    /// If there is no space.
    pub fn grant(&mut self, ttl: i64) -> Result<(i64, i64), Refusal> {
        if !self.has_space {
            return Err(Refusal::NoSpace);
        }
        let (id, ttl) = (self.next_lease, ttl.max(self.min_ttl));
        self.next_lease += 1;
        let ends_at = self.now + ms(ttl);
        self.leases.insert(id, Lease { ttl, ends_at, keys: BTreeSet::new() });
        Ok((id, ttl))
    }

    /// Ends a lease, and deletes its keys.
    ///
    /// # Errors
    ///
    /// If there is no such lease.
    pub fn revoke(&mut self, id: i64) -> Result<(), Refusal> {
        let keys = &self.leases.get(&id).ok_or(Refusal::LeaseNotFound)?.keys;
        let revision = self.revision + 1;
        for key in keys.clone() {
            self.remove(&key, revision);
        }
        self.leases.remove(&id);
        Ok(())
    }

    /// Keeps a lease alive. Returns its length; 0: there is no such lease.
    pub fn keep_alive(&mut self, id: i64) -> i64 {
        let now = self.now;
        let Some(lease) = self.leases.get_mut(&id) else { return 0 };
        lease.ends_at = now + ms(lease.ttl);
        lease.ttl
    }

    /// Returns the length of a lease; 0: there is no such lease.
    #[must_use]
    pub fn ttl(&self, id: i64) -> i64 {
        self.leases.get(&id).map_or(0, |lease| lease.ttl)
    }

    /// A leader took over: all leases run from their beginning, and so much longer, in ms.
    pub fn extend_leases(&mut self, by: u64) {
        let now = self.now;
        for lease in self.leases.values_mut() {
            lease.ends_at = now + ms(lease.ttl) + by;
        }
    }

    /// Ends the leases that are due. Returns how many there were.
    pub fn end_leases(&mut self) -> usize {
        let due = self.leases.iter().filter(|(_, lease)| lease.ends_at <= self.now);
        let due: Vec<_> = due.map(|(id, _)| *id).collect();
        due.iter().for_each(|id| _ = self.revoke(*id));
        due.len()
    }

    #[must_use]
    pub fn leases(&self) -> Vec<i64> {
        self.leases.keys().copied().collect()
    }
}

fn ms(seconds: i64) -> u64 {
    u64::try_from(seconds).unwrap_or(0) * 1000
}

fn put_of(op: &RequestOp) -> Option<&PutRequest> {
    match &op.request {
        Some(Op::Put(put)) => Some(put),
        _ => None,
    }
}

fn is_in(key: &Bytes, from: &Bytes, range_end: &Bytes) -> bool {
    if range_end.is_empty() { key == from } else { key >= from && key < range_end }
}

fn in_range<'a>(
    keys: &'a BTreeMap<Bytes, KeyValue>,
    from: &Bytes,
    range_end: &Bytes,
) -> impl Iterator<Item = &'a KeyValue> {
    let one = range_end.is_empty().then(|| keys.get(from)).flatten();
    let range = (Bound::Included(from), Bound::Excluded(range_end));
    let many = (range_end > from).then(|| keys.range::<Bytes, _>(range));
    one.into_iter().chain(many.into_iter().flatten().map(|(_, kv)| kv))
}
