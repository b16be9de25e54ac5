//! The protocol as a pure state machine: no I/O, no clock, no randomness.
//!
//! A [`Ledger`] is one semaphore. Operations go in, with the time as an argument; a [`Reply`] comes
//! out, and hints for other nodes go through a closure. [`MemoryBackend`] is this ledger behind a
//! lock, and the scripts in `lua/` are this ledger in the words of Redis: generated histories hold
//! the two against each other, reply by reply.
//!
//! # The one idea
//!
//! *A place has one lease, from joining to leaving, whether it waits or holds.* A place that waits
//! has a ticket besides; taking the ticket away **is** the grant. Nothing else is stored: no
//! counter that could drift, nothing to initialise, nothing left when the last place is gone.
//!
//! Every operation that changes anything ends in the same way: sweep what has expired, then
//! promote, so that no permit is idle while anyone waits. While anyone waits nobody barges: a
//! newcomer joins the queue or is refused.
//!
//! [`MemoryBackend`]: crate::backend::MemoryBackend

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use foldhash::fast::RandomState;
use smallvec::SmallVec;

/// Scores from here on are tickets (µs since 1970, about 10¹⁵); those below are lease ends (ms,
/// about 10¹²).
pub const TICKET_MIN: u64 = 100_000_000_000_000;

/// How many dead places one operation takes out at the most.
pub const SWEEP_MAX: usize = 1000;

/// How many places one round of promotion grants at the most.
pub const GRANT_MAX: u64 = 1000;

/// One process's semaphore, named by 64 random bits.
///
/// Its text is eleven digits to the base 62.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(u64);

/// The name of a place: `<node>:<n>`, or `~<node>:<n>` for a node without a mailbox.
///
/// Made by the process before it sends anything, so that every operation can be repeated, and
/// never used for a second stay. Its text is at most 24 bytes long. Ids are ordered as their texts
/// are, because Redis orders members of equal score so.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlaceId {
    /// The process that the place belongs to.
    pub node: NodeId,
    /// Whether that process could not be reached by a hint when it made the place.
    pub deaf: bool,
    /// The place's number in that process, below [`PlaceId::N_MAX`].
    pub n: u64,
}

/// Places of one operation. Most are for one place; then nothing is allocated.
pub type Ids = SmallVec<[PlaceId; 1]>;

/// What the ledger says of one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Standing {
    /// It is not there, or not any more.
    Gone,
    /// It has a permit.
    Held,
    /// It waits, and this is its ticket.
    Waits(u64),
    /// It was refused: no permit is free, and it may not wait.
    NoPermit,
    /// It was refused: as many wait as may.
    QueueFull,
}

/// A place that was promoted, with the lease end that it keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The place.
    pub id: PlaceId,
    /// The end of its lease, ms by the ledger's clock.
    pub lease_end: u64,
}

/// What an operation answers; a release tells its grants alone. Redis leaves the counts out, too, where
/// permits are free and nobody needs them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Reply {
    /// The lease end that the operation gave, ms; 0 where it gives none.
    pub lease_end: u64,
    /// The earliest lease end among all places, ms, while anyone waits; else 0.
    /// Asking again just after it replaces a dead holder without delay.
    pub earliest: u64,
    /// How many places hold, after the operation.
    pub in_use: u64,
    /// How many places wait, after the operation.
    pub waiting: u64,
    /// One for each id of the operation, in its order; as they stood *before* the grants below,
    /// but for `acquire`.
    pub standings: SmallVec<[Standing; 1]>,
    /// Places of the calling node that this operation granted. Other nodes get a hint.
    pub granted: Vec<Grant>,
}

/// What every operation brings along: who asks, when, and under which limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Ask {
    /// µs since 1970 by the ledger's one clock.
    pub now: u64,
    /// Permits of this semaphore, as the caller knows it.
    pub limit: u32,
    /// The calling node.
    pub node: NodeId,
}

/// Delivers hints to a node; `false` says that nobody listens there, so that the node is gone.
pub type Post<'a> = &'a mut dyn FnMut(NodeId, &[Grant]) -> bool;

/// One semaphore: its places, held and waiting.
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    places: HashMap<PlaceId, Place, RandomState>,
    queue: BTreeSet<(u64, PlaceId)>,
    /// The places by lease end. Kept only from the first place that waits until the last is gone:
    /// a semaphore that is never full does not pay for it.
    by_end: Option<BTreeSet<(u64, PlaceId)>>,
    /// No lease ends before this, ms: until then there is nothing to sweep.
    quiet_until: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Place {
    lease_end: u64,
    ticket: Option<u64>,
}

impl Ledger {
    /// A semaphore that nobody has.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether no place is left: then there is no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// How many places hold, dead ones among them until they are swept.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        (self.places.len() - self.queue.len()) as u64
    }

    /// How many places wait, dead ones among them until they are swept.
    #[must_use]
    pub fn waiting(&self) -> u64 {
        self.queue.len() as u64
    }

    /// The places and what they have: id, lease end (ms), ticket while it waits. In no order.
    pub fn places(&self) -> impl Iterator<Item = (PlaceId, u64, Option<u64>)> + '_ {
        self.places.iter().map(|(id, place)| (*id, place.lease_end, place.ticket))
    }

    /// Takes out those that are leaving, as [`release`](Self::release) does; then grants each place a
    /// permit, lets it join the queue, or refuses it.
    ///
    /// `max_queue` says how many may wait; `None`: these ids may not. An id that is there keeps its
    /// place and gets its lease anew, so a repetition is safe.
    pub fn acquire(
        &mut self,
        ask: Ask,
        lease_ms: u64,
        max_queue: Option<u32>,
        leaving: &[PlaceId],
        ids: &[PlaceId],
        post: Post<'_>,
    ) -> Reply {
        for id in leaving {
            self.take(id);
        }
        let mut reply = Reply { lease_end: ask.now / 1000 + lease_ms, ..Reply::default() };
        if self.queue.is_empty() && self.in_use() + ids.len() as u64 <= u64::from(ask.limit) {
            for id in ids {
                self.put(*id, reply.lease_end, None);
                reply.standings.push(Standing::Held);
            }
        } else {
            // Full, or so it looks: whoever waits goes first, and only then the newcomers.
            self.sweep(ask.now);
            reply.granted = self.promote(ask, post);
            let mut last = self.queue.last().map_or(0, |(ticket, _)| *ticket);
            for id in ids {
                let standing = if let Some(place) = self.places.get(id) {
                    place.ticket.map_or(Standing::Held, Standing::Waits)
                } else if self.queue.is_empty() && self.in_use() < u64::from(ask.limit) {
                    Standing::Held
                } else {
                    match max_queue {
                        None => Standing::NoPermit,
                        Some(max) if self.waiting() >= u64::from(max) => Standing::QueueFull,
                        Some(_) => {
                            last = ask.now.max(last + 1);
                            Standing::Waits(last)
                        }
                    }
                };
                match standing {
                    Standing::Held => self.put(*id, reply.lease_end, None),
                    Standing::Waits(ticket) => self.put(*id, reply.lease_end, Some(ticket)),
                    _ => {}
                }
                reply.standings.push(standing);
            }
        }
        self.close(reply)
    }

    /// Takes places out, waiting or held, and hands what that frees to the head of the queue.
    ///
    /// An id that is not there is passed over, so a repetition is safe.
    pub fn release(&mut self, ask: Ask, ids: &[PlaceId], post: Post<'_>) -> Reply {
        for id in ids {
            self.take(id);
        }
        let mut granted = Vec::new();
        if !self.queue.is_empty() {
            self.sweep(ask.now);
            granted = self.promote(ask, post);
        }
        Reply { granted, ..Reply::default() }
    }

    /// Takes a place out, waiting or held, on an operator's word; or only looks. Says when its lease
    /// ends, or would have, ms. Who does that does not know the limit: what it frees is granted when
    /// someone asks who does.
    pub fn revoke(&mut self, id: PlaceId, take: bool) -> Option<u64> {
        let lease_end = self.places.get(&id)?.lease_end;
        if take {
            self.take(&id);
        }
        Some(lease_end)
    }

    /// Gives the leases of places anew, whether they wait or hold.
    pub fn renew(&mut self, ask: Ask, lease_ms: u64, ids: &[PlaceId], post: Post<'_>) -> Reply {
        let mut reply = Reply { lease_end: ask.now / 1000 + lease_ms, ..Reply::default() };
        // First the dead, then the leases: a place that ended is not brought back by asking late.
        self.sweep(ask.now);
        for id in ids {
            let standing = match self.places.get(id).copied() {
                None => Standing::Gone,
                Some(place) => {
                    self.put(*id, reply.lease_end, place.ticket);
                    place.ticket.map_or(Standing::Held, Standing::Waits)
                }
            };
            reply.standings.push(standing);
        }
        reply.granted = self.promote(ask, post);
        self.close(reply)
    }

    /// A renewal with proof, for places that a renewal found gone.
    ///
    /// The score that a place had last is the proof: a lease end that has not come yet shows that
    /// the ledger lost a permit which is in flight, so it is counted again, even past the limit; a
    /// ticket gives a place that waited its old turn, under a new id.
    pub fn reassert(
        &mut self,
        ask: Ask,
        lease_ms: u64,
        proofs: &[(PlaceId, u64)],
        post: Post<'_>,
    ) -> Reply {
        let now_ms = ask.now / 1000;
        let mut reply = Reply { lease_end: now_ms + lease_ms, ..Reply::default() };
        self.sweep(ask.now);
        // As the script does, look at all of them before any is written.
        let known: Vec<_> = proofs.iter().map(|(id, _)| self.places.get(id).copied()).collect();
        for ((id, proof), place) in proofs.iter().zip(known) {
            let standing = match place {
                Some(place) => place.ticket.map_or(Standing::Held, Standing::Waits),
                None if *proof >= TICKET_MIN => Standing::Waits(*proof),
                None if *proof > now_ms => Standing::Held,
                None => Standing::Gone,
            };
            match standing {
                Standing::Held => self.put(*id, reply.lease_end, None),
                Standing::Waits(ticket) => self.put(*id, reply.lease_end, Some(ticket)),
                _ => {}
            }
            reply.standings.push(standing);
        }
        reply.granted = self.promote(ask, post);
        self.close(reply)
    }

    /// Takes out places whose lease has ended, at most [`SWEEP_MAX`], the longest dead first.
    fn sweep(&mut self, now: u64) {
        let now_ms = now / 1000;
        if now_ms < self.quiet_until {
            return;
        }
        let index = self.by_end.get_or_insert_with(|| {
            self.places.iter().map(|(id, place)| (place.lease_end, *id)).collect()
        });
        let dead: Vec<_> =
            index.iter().take_while(|(end, _)| *end <= now_ms).take(SWEEP_MAX).copied().collect();
        for (_, id) in &dead {
            self.take(id);
        }
        self.quiet_until = self.earliest();
    }

    /// While permits are free, takes the ticket of the head of the queue away: that is the grant.
    fn promote(&mut self, ask: Ask, post: Post<'_>) -> Vec<Grant> {
        let mut own = Vec::new();
        while !self.queue.is_empty() && self.in_use() < u64::from(ask.limit) {
            let free = (u64::from(ask.limit) - self.in_use()).min(GRANT_MAX);
            let mut mail: Vec<(NodeId, Vec<Grant>)> = Vec::new();
            for _ in 0..free {
                let Some((_, id)) = self.queue.pop_first() else { break };
                let Some(place) = self.places.get_mut(&id) else { continue };
                place.ticket = None;
                let grant = Grant { id, lease_end: place.lease_end };
                if place.lease_end <= ask.now / 1000 {
                    self.take(&id);
                } else if id.node == ask.node {
                    own.push(grant);
                } else if !id.deaf {
                    match mail.iter_mut().find(|(node, _)| *node == id.node) {
                        Some((_, grants)) => grants.push(grant),
                        None => mail.push((id.node, vec![grant])),
                    }
                }
            }
            for (node, grants) in mail {
                if !post(node, &grants) {
                    for grant in grants {
                        self.take(&grant.id);
                    }
                }
            }
        }
        own
    }

    fn close(&mut self, mut reply: Reply) -> Reply {
        reply.in_use = self.in_use();
        reply.waiting = self.waiting();
        if reply.waiting > 0 {
            reply.earliest = self.earliest();
        }
        reply
    }

    fn earliest(&self) -> u64 {
        match &self.by_end {
            Some(index) => index.first().map_or(u64::MAX, |(end, _)| *end),
            None => self.places.values().map(|place| place.lease_end).min().unwrap_or(u64::MAX),
        }
    }

    fn put(&mut self, id: PlaceId, lease_end: u64, ticket: Option<u64>) {
        self.quiet_until = self.quiet_until.min(lease_end);
        let before = self.places.insert(id, Place { lease_end, ticket });
        if let Some(ticket) = ticket {
            self.queue.insert((ticket, id));
        }
        if let Some(index) = &mut self.by_end {
            if let Some(before) = before {
                index.remove(&(before.lease_end, id));
            }
            index.insert((lease_end, id));
        }
    }

    fn take(&mut self, id: &PlaceId) {
        let Some(place) = self.places.remove(id) else { return };
        if let Some(ticket) = place.ticket {
            self.queue.remove(&(ticket, *id));
        }
        if let Some(index) = &mut self.by_end {
            index.remove(&(place.lease_end, *id));
            if index.is_empty() {
                self.by_end = None;
            }
        }
    }
}

// A ledger is its places: what is derived from them takes no part in comparing two.

impl PartialEq for Ledger {
    fn eq(&self, other: &Self) -> bool {
        self.places == other.places
    }
}

impl Eq for Ledger {}

impl Hash for Ledger {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let mut places: Vec<_> = self.places.iter().collect();
        places.sort_unstable_by_key(|(id, _)| **id);
        places.hash(state);
    }
}

const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
const NODE_LEN: usize = 11;
const ID_LEN: usize = 1 + NODE_LEN + 1 + 11;

impl NodeId {
    /// A node with this number, which should be random.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    pub(crate) fn text(self) -> [u8; NODE_LEN] {
        let mut text = [0; NODE_LEN];
        let mut rest = self.0;
        for digit in text.iter_mut().rev() {
            *digit = DIGITS[(rest % 62) as usize];
            rest /= 62;
        }
        text
    }
}

/// A place's id as it stands in Redis.
pub(crate) struct IdText {
    text: [u8; ID_LEN],
    len: usize,
}

impl IdText {
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.text[..self.len]
    }
}

impl PlaceId {
    /// Numbers of places end before this: eleven digits to the base 36.
    pub const N_MAX: u64 = 36u64.pow(11);

    pub(crate) fn text(&self) -> IdText {
        self.text_of(&self.node.text())
    }

    /// As [`text`](Self::text), where the node's is known already.
    pub(crate) fn text_of(&self, node: &[u8; NODE_LEN]) -> IdText {
        let mut text = [0; ID_LEN];
        let mut len = 0;
        if self.deaf {
            text[0] = b'~';
            len = 1;
        }
        text[len..len + NODE_LEN].copy_from_slice(node);
        text[len + NODE_LEN] = b':';
        len += NODE_LEN + 1;
        let mut digits = [0; 11];
        let (mut rest, mut at) = (self.n % Self::N_MAX, 11);
        loop {
            at -= 1;
            digits[at] = b"0123456789abcdefghijklmnopqrstuvwxyz"[(rest % 36) as usize];
            rest /= 36;
            if rest == 0 {
                break;
            }
        }
        text[len..len + 11 - at].copy_from_slice(&digits[at..]);
        IdText { text, len: len + 11 - at }
    }

    /// Reads an id; `None` for anything that [`PlaceId`]'s `Display` does not write.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (deaf, rest) = match text.strip_prefix(b"~") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let (node, n) = (rest.get(..NODE_LEN)?, rest.get(NODE_LEN..)?.strip_prefix(b":")?);
        let id = Self { node: NodeId::parse(node)?, deaf, n: Self::parse_n(n)? };
        // One text for each id: no leading zeros, no capitals.
        (id.text().as_bytes() == text).then_some(id)
    }

    /// Reads the number of a place as it stands in a hint.
    #[must_use]
    pub fn parse_n(digits: &[u8]) -> Option<u64> {
        if digits.is_empty() || digits.len() > 11 {
            return None;
        }
        digits.iter().try_fold(0u64, |n, c| Some(n * 36 + u64::from((*c as char).to_digit(36)?)))
    }
}

impl NodeId {
    /// Reads a node's text.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        if text.len() != NODE_LEN {
            return None;
        }
        let number = text.iter().try_fold(0u64, |n, c| {
            let digit = DIGITS.binary_search(c).ok()? as u64;
            n.checked_mul(62)?.checked_add(digit)
        })?;
        Some(Self(number))
    }
}

impl PartialOrd for PlaceId {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for PlaceId {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.text().as_bytes().cmp(other.text().as_bytes())
    }
}

impl fmt::Display for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(&self.text()).unwrap_or_default())
    }
}

impl fmt::Debug for NodeId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for PlaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(std::str::from_utf8(self.text().as_bytes()).unwrap_or_default())
    }
}

impl fmt::Debug for PlaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PlaceId {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        Self::parse(text.as_bytes()).ok_or(())
    }
}
