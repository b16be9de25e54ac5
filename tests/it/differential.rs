//! Generated histories hold the scripts of `lua/` against the ledger: the same operations at the
//! same times must give the same replies, the same messages and the same set.
//!
//! The scripts run on a real server. Only their clock is replaced, by two keys that the test sets,
//! so that time can stand still, jump and go back. What the server answers is decoded here anew, not
//! by the crate's own decoder.
//!
//! `TEST_HISTORIES` says how many histories to generate; 2000 unless set. A failure is printed as
//! the shortest history that still fails.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use deadpool_redis::redis::{Cmd, Script, cmd};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use tower_semaphore::protocol::{
    Caller, Grant, Ledger, NodeId, PlaceId, PlaceStatus, Reply, WORK_MAX,
};

use crate::support::redis::TestRedis;

const KEY: &str = "t:{x}";
const NODES: usize = 4;

// --- histories ----------------------------------------------------------------------------------

/// One semaphore's life.
#[derive(Clone, Debug)]
struct History {
    /// Whether PUBLISH is taken at its word.
    counted: bool,
    limit: u32,
    steps: Vec<Step>,
}

/// What numbers stand for is found when the step is taken, so that a history without some of its
/// steps is a history too: that is what shrinking needs.
#[derive(Clone, Debug)]
enum Step {
    Acquire { node: usize, leaving: Vec<Pick>, poll_only: bool, ids: usize, terms: Terms },
    AcquireAgain { node: usize, leaving: Vec<Pick>, picks: Vec<Pick>, terms: Terms },
    Release { node: usize, picks: Vec<Pick> },
    Renew { node: usize, picks: Vec<Pick>, lease_ms: u64 },
    Reassert { node: usize, proofs: Vec<(Pick, Proof)>, lease_ms: u64 },
    Inspect { most: usize },
    Revoke { pick: Pick },
    Limit(u32),
    Time(Time),
    Subscribe { node: usize, alive: bool },
    Wipe,
}

/// What those that come ask for.
#[derive(Clone, Copy, Debug)]
struct Terms {
    lease_ms: u64,
    max_queue: Option<u32>,
}

/// A place's id.
#[derive(Clone, Debug)]
enum Pick {
    /// One of those that are in the set.
    Present(usize),
    /// One of those that were ever made, there or not.
    Known(usize),
    /// One that was never sent before.
    New { node: usize, poll_only: bool },
}

/// What a place shows to be counted again.
#[derive(Clone, Debug)]
enum Proof {
    /// The lease end that it was told last.
    LeaseEnd,
    /// The ticket that it was told last, or else that of another place.
    Ticket(usize),
    /// A lease end at this distance from now, ms.
    Near(i64),
}

#[derive(Clone, Debug)]
enum Time {
    /// On, or back, by so many µs.
    By(i64),
    /// To the lease end of a place, and so many ms on.
    LeaseEnd(usize, i64),
}

fn lease() -> impl Strategy<Value = u64> {
    prop_oneof![8 => 1_000..30_000u64, 1 => 1..1_000u64, 1 => 30_000..86_400_000u64]
}

fn queue() -> impl Strategy<Value = Option<u32>> {
    prop_oneof![
        2 => Just(None),
        2 => Just(Some(0)),
        3 => (1..6u32).prop_map(Some),
        6 => (10..20_000u32).prop_map(Some),
        1 => Just(Some(u32::MAX)),
    ]
}

fn limit() -> impl Strategy<Value = u32> {
    prop_oneof![12 => 1..6u32, 2 => 6..40u32, 1 => 1..=u32::MAX]
}

fn pick() -> impl Strategy<Value = Pick> {
    let index = || any::<u16>().prop_map(usize::from);
    prop_oneof![
        7 => index().prop_map(Pick::Present),
        2 => index().prop_map(Pick::Known),
        1 => (0..NODES, any::<bool>()).prop_map(|(node, poll_only)| Pick::New { node, poll_only }),
    ]
}

fn proof() -> impl Strategy<Value = Proof> {
    prop_oneof![
        4 => Just(Proof::LeaseEnd),
        3 => any::<u16>().prop_map(|i| Proof::Ticket(i.into())),
        2 => (-2..=2i64).prop_map(Proof::Near),
        1 => (-20_000..20_000i64).prop_map(Proof::Near),
    ]
}

fn time() -> impl Strategy<Value = Time> {
    let second = 1_000_000i64;
    prop_oneof![
        3 => (1..5_000i64).prop_map(Time::By),
        4 => (0..3 * second).prop_map(Time::By),
        2 => (0..40 * second).prop_map(Time::By),
        2 => (-5 * second..0).prop_map(Time::By),
        4 => (any::<u16>(), -1..=1i64).prop_map(|(i, ms)| Time::LeaseEnd(i.into(), ms)),
    ]
}

fn step(batch: RangeInclusive<usize>) -> impl Strategy<Value = Step> {
    let most = *batch.end();
    let sizes = batch.clone();
    let picks = move || prop::collection::vec(pick(), sizes.clone());
    let few = move || prop::collection::vec(pick(), 0..=most);
    let leaving = move || prop_oneof![Just(Vec::new()), few()];
    let terms =
        || (lease(), queue()).prop_map(|(lease_ms, max_queue)| Terms { lease_ms, max_queue });
    let proofs = prop::collection::vec((pick(), proof()), batch.clone());
    let node = 0..NODES;
    prop_oneof![
        30 => (node.clone(), leaving(), prop::bool::weighted(0.15), batch, terms()).prop_map(
            |(node, leaving, poll_only, ids, terms)| Step::Acquire { node, leaving, poll_only, ids, terms }
        ),
        6 => (node.clone(), leaving(), picks(), terms()).prop_map(
            |(node, leaving, picks, terms)| Step::AcquireAgain { node, leaving, picks, terms }
        ),
        18 => (node.clone(), few()).prop_map(|(node, picks)| Step::Release { node, picks }),
        14 => (node.clone(), picks(), lease())
            .prop_map(|(node, picks, lease_ms)| Step::Renew { node, picks, lease_ms }),
        8 => (node.clone(), proofs, lease())
            .prop_map(|(node, proofs, lease_ms)| Step::Reassert { node, proofs, lease_ms }),
        4 => (1..=4 * most).prop_map(|most| Step::Inspect { most }),
        4 => pick().prop_map(|pick| Step::Revoke { pick }),
        4 => limit().prop_map(Step::Limit),
        16 => time().prop_map(Step::Time),
        4 => (node, any::<bool>()).prop_map(|(node, alive)| Step::Subscribe { node, alive }),
        1 => Just(Step::Wipe),
    ]
}

fn history(
    batch: RangeInclusive<usize>,
    steps: RangeInclusive<usize>,
) -> impl Strategy<Value = History> {
    (prop::bool::weighted(0.8), limit(), prop::collection::vec(step(batch), steps))
        .prop_map(|(counted, limit, steps)| History { counted, limit, steps })
}

// --- the ledger's side ----------------------------------------------------------------------------

/// A message as it must come: channel, text.
type Message = (String, String);

/// What the server has to show after one operation.
#[derive(Debug)]
struct Expected {
    /// Which step of the history this is, as it was carried out.
    what: String,
    /// Answers that come before and are of no operation.
    before: usize,
    reply: Item,
    messages: Vec<Message>,
    set: Vec<(String, u64)>,
    /// The longest of the leases in the set, ms, and the longest ever given.
    longest: (u64, u64),
    /// Whether the bound on work was reached.
    more: bool,
}

/// One history carried out by the ledger: the commands to send, and what must come back.
#[derive(Default)]
struct Plan {
    commands: Vec<u8>,
    expected: Vec<Expected>,
    /// Answers to come that are of no operation.
    asides: usize,
}

struct Model<'a> {
    lua: &'a Lua,
    out: Plan,
    ledger: Ledger,
    counted: bool,
    limit: u32,
    now: u64,
    alive: [bool; NODES],
    next: u64,
    known: Vec<PlaceId>,
    lease_ends: HashMap<PlaceId, u64>,
    tickets: HashMap<PlaceId, u64>,
    leases: HashMap<PlaceId, u64>,
    longest: u64,
}

fn node(i: usize) -> NodeId {
    // Far apart, so that their texts differ from the first digit on.
    NodeId::new(0x1357_9bdf_0246_8ace_u64.wrapping_mul(i as u64 * 2 + 1))
}

fn channel(node: NodeId) -> String {
    format!("t:@{node}")
}

impl<'a> Model<'a> {
    fn new(lua: &'a Lua, history: &History) -> Self {
        Self {
            lua,
            out: Plan::default(),
            ledger: Ledger::with_work_max(lua.work_max),
            counted: history.counted,
            limit: history.limit,
            now: 1_795_169_853_126_543,
            alive: [true; NODES],
            // So that numbers of one and of two digits meet: they are ordered as texts.
            next: 30,
            known: Vec::new(),
            lease_ends: HashMap::new(),
            tickets: HashMap::new(),
            leases: HashMap::new(),
            longest: 0,
        }
    }

    fn run(mut self, history: &History) -> Plan {
        self.wipe();
        self.send(&cmd("UNSUBSCRIBE"));
        for i in 0..NODES {
            self.send(cmd("SUBSCRIBE").arg(channel(node(i))));
        }
        for (i, step) in history.steps.iter().enumerate() {
            self.take(i, step);
        }
        self.out
    }

    fn send(&mut self, command: &Cmd) {
        self.out.commands.extend(command.get_packed_command());
    }

    fn take(&mut self, i: usize, step: &Step) {
        match step {
            Step::Acquire { node: at, leaving, poll_only, ids, terms } => {
                let leaving = self.pick_any(leaving);
                let ids: Vec<_> = (0..*ids).map(|_| self.new_id(*at, *poll_only)).collect();
                self.acquire(i, *at, &leaving, &ids, *terms);
            }
            Step::AcquireAgain { node, leaving, picks, terms } => {
                let leaving = self.pick_any(leaving);
                let ids = self.pick_once(picks);
                self.acquire(i, *node, &leaving, &ids, *terms);
            }
            Step::Release { node, picks } => {
                let ids = self.pick_any(picks);
                self.release(i, *node, &ids);
            }
            Step::Renew { node, picks, lease_ms } => {
                let ids = self.pick_once(picks);
                self.renew(i, *node, &ids, *lease_ms);
            }
            Step::Reassert { node, proofs, lease_ms } => {
                let picks: Vec<_> = proofs.iter().map(|(pick, _)| pick.clone()).collect();
                let ids = self.pick_once(&picks);
                let proofs: Vec<_> =
                    ids.iter().zip(proofs).map(|(id, (_, p))| (*id, self.prove(*id, p))).collect();
                self.reassert(i, *node, &proofs, *lease_ms);
            }
            Step::Inspect { most } => self.inspect(i, *most),
            Step::Revoke { pick } => {
                let present = self.present();
                let id = self.pick(pick, &present);
                self.revoke(i, id);
            }
            Step::Limit(limit) => self.limit = *limit,
            Step::Time(Time::By(us)) => self.now = self.now.saturating_add_signed(*us),
            Step::Time(Time::LeaseEnd(place, ms)) => {
                let places = self.present();
                if let Some((_, lease_end, _)) = places.get(place % places.len().max(1)) {
                    let ms = lease_end.saturating_add_signed(*ms);
                    self.now = ms * 1000 + self.now % 1000;
                }
            }
            Step::Subscribe { node: at, alive } => {
                self.alive[*at] = *alive;
                let command = if *alive { "SUBSCRIBE" } else { "UNSUBSCRIBE" };
                self.send(cmd(command).arg(channel(node(*at))));
            }
            Step::Wipe => self.wipe(),
        }
    }

    fn wipe(&mut self) {
        self.ledger = Ledger::with_work_max(self.lua.work_max);
        self.send(cmd("DEL").arg(KEY));
        self.out.asides += 1;
    }

    fn new_id(&mut self, at: usize, poll_only: bool) -> PlaceId {
        let id = PlaceId { node: node(at), poll_only, n: self.next, claim: None };
        self.next += 1;
        self.known.push(id);
        id
    }

    fn present(&self) -> Vec<(PlaceId, u64, Option<u64>)> {
        let mut places: Vec<_> = self.ledger.places().collect();
        places.sort_unstable_by_key(|(id, ..)| id.n);
        places
    }

    fn pick(&mut self, pick: &Pick, present: &[(PlaceId, u64, Option<u64>)]) -> PlaceId {
        match pick {
            Pick::Present(i) if !present.is_empty() => present[i % present.len()].0,
            Pick::Present(i) | Pick::Known(i) if !self.known.is_empty() => {
                self.known[i % self.known.len()]
            }
            Pick::Present(_) | Pick::Known(_) => self.new_id(0, false),
            Pick::New { node, poll_only } => self.new_id(*node, *poll_only),
        }
    }

    fn pick_any(&mut self, picks: &[Pick]) -> Vec<PlaceId> {
        let present = self.present();
        picks.iter().map(|pick| self.pick(pick, &present)).collect()
    }

    /// No process names a place twice in one call.
    fn pick_once(&mut self, picks: &[Pick]) -> Vec<PlaceId> {
        let mut seen = HashSet::new();
        let present = self.present();
        let mut ids = Vec::with_capacity(picks.len());
        for pick in picks {
            let mut id = self.pick(pick, &present);
            if !seen.insert(id) {
                id = self.new_id(0, false);
                seen.insert(id);
            }
            ids.push(id);
        }
        ids
    }

    fn prove(&self, id: PlaceId, proof: &Proof) -> u64 {
        let near = |ms: i64| (self.now / 1000).saturating_add_signed(ms);
        match proof {
            Proof::LeaseEnd => self.lease_ends.get(&id).copied().unwrap_or_else(|| near(0)),
            Proof::Ticket(i) => {
                let any = self.known.get(i % self.known.len().max(1));
                let other = any.and_then(|id| self.tickets.get(id)).copied().unwrap_or(self.now);
                self.tickets.get(&id).copied().unwrap_or(other)
            }
            Proof::Near(ms) => near(*ms),
        }
    }

    /// Has the ledger do it, and the server asked to do the same.
    fn operate(
        &mut self,
        what: String,
        at: usize,
        ids: &[PlaceId],
        (lease_ms, told): (u64, Told),
        command: &Cmd,
        run: impl FnOnce(&mut Ledger, Caller, &mut dyn FnMut(NodeId, &[Grant]) -> bool) -> Reply,
    ) {
        let caller = Caller { now: self.now, limit: self.limit, headroom: 0, node: node(at) };
        let mut messages = Vec::new();
        let (alive, counted) = (self.alive, self.counted);
        let reply = run(&mut self.ledger, caller, &mut |to, grants| {
            let listens = (0..NODES).any(|i| node(i) == to && alive[i]);
            if listens {
                let mut text = KEY.to_owned();
                for grant in grants {
                    let id = grant.id.to_string();
                    let (_, n) = id.split_once(':').unwrap();
                    text += &format!(" {n} {}", grant.lease_end);
                }
                messages.push((channel(to), text));
            }
            listens || !counted
        });

        for (id, status) in ids.iter().zip(&reply.statuses) {
            if let PlaceStatus::Waiting(ticket) = status {
                self.tickets.insert(*id, *ticket);
            }
            if matches!(status, PlaceStatus::Waiting(_) | PlaceStatus::Held) {
                self.lease_ends.insert(*id, reply.lease_end);
                self.leases.insert(*id, lease_ms);
                self.longest = self.longest.max(lease_ms);
            }
        }

        let held = reply.statuses.iter().all(|status| *status == PlaceStatus::Held);
        if told == Told::InShort && held {
            assert!(!reply.more, "{reply:?}");
            return self.expect(what, command, number(reply.lease_end), messages);
        }
        let mut items: Vec<Item> = Vec::new();
        if told != Told::Grants {
            assert!(!reply.more || reply.earliest == 0, "{reply:?}");
            let earliest = if reply.more { 1 } else { reply.earliest };
            items.extend([reply.lease_end, earliest, reply.in_use, reply.waiting].map(number));
        }
        items.extend(reply.statuses.iter().map(|status| match status {
            PlaceStatus::Gone => Item::Int(0),
            PlaceStatus::Held => Item::Int(1),
            PlaceStatus::NoPermit => Item::Int(-1),
            PlaceStatus::QueueFull => Item::Int(-2),
            PlaceStatus::TenantFull => Item::Int(-3),
            PlaceStatus::NeverFits => Item::Int(-4),
            PlaceStatus::Waiting(ticket) => number(*ticket),
        }));
        for grant in &reply.granted {
            items.push(Item::Text(grant.id.to_string()));
            // As it stands in the set: a score comes as text.
            items.push(Item::Text(grant.lease_end.to_string()));
        }
        if told == Told::Grants && reply.more {
            items.push(Item::Int(1));
        }
        self.expect(what, command, Item::List(items), messages);
        if let Some(expected) = self.out.expected.last_mut() {
            expected.more = reply.more;
        }
    }

    fn expect(&mut self, what: String, command: &Cmd, reply: Item, messages: Vec<Message>) {
        let (s, us) = (self.now / 1_000_000, self.now % 1_000_000);
        self.send(cmd("MSET").arg("now:s").arg(s).arg("now:us").arg(us));
        self.send(command);
        self.send(cmd("ZRANGE").arg(KEY).arg(0).arg(-1).arg("WITHSCORES"));
        self.send(cmd("PTTL").arg(KEY));

        let mut set = Vec::new();
        let mut longest = 0;
        for (id, lease_end, ticket) in self.ledger.places() {
            longest = longest.max(self.leases[&id]);
            set.push((id.to_string(), lease_end));
            if let Some(ticket) = ticket {
                set.push((format!("{QUEUED}{id}"), ticket));
            }
        }
        set.sort_unstable_by(|a, b| (a.1, &a.0).cmp(&(b.1, &b.0)));
        let longest = (longest, self.longest);
        let before = std::mem::take(&mut self.out.asides);
        let more = false;
        self.out.expected.push(Expected { what, before, reply, messages, set, longest, more });
    }

    fn what(&self, i: usize, op: &str, at: usize, ids: &[PlaceId], more: &str) -> String {
        let shown: Vec<_> = ids.iter().take(8).map(ToString::to_string).collect();
        format!(
            "step {i}: {op} by {} of {} ids {shown:?}, limit {}, now {}, {more}",
            node(at),
            ids.len(),
            self.limit,
            self.now
        )
    }

    fn acquire(&mut self, i: usize, at: usize, leaving: &[PlaceId], ids: &[PlaceId], terms: Terms) {
        let Terms { lease_ms, max_queue } = terms;
        let left = self.what(i, "leave", at, leaving, "");
        let what = self.what(i, "acquire", at, ids, &format!("{terms:?}, after {left}"));
        let mut command = self.lua.call("acquire", self.limit);
        command.arg(lease_ms).arg(max_queue.map_or(-1, i64::from));
        command.arg(u8::from(self.counted)).arg(node(at).to_string());
        command.arg(leaving.len()).arg(texts(leaving)).arg(texts(ids));
        let stay = self.ledger.places().filter(|(id, ..)| !leaving.contains(id));
        let (queue, held): (Vec<_>, Vec<_>) = stay.partition(|(.., ticket)| ticket.is_some());
        let at_once = queue.is_empty() && (held.len() + ids.len()) as u64 <= u64::from(self.limit);
        let told = if at_once { Told::InShort } else { Told::All };
        self.operate(what, at, ids, (lease_ms, told), &command, |ledger, caller, post| {
            ledger.acquire(caller, lease_ms, max_queue, leaving, ids, post)
        });
    }

    fn release(&mut self, i: usize, at: usize, ids: &[PlaceId]) {
        let what = self.what(i, "release", at, ids, "");
        let mut command = self.lua.call("release", self.limit);
        command.arg(u8::from(self.counted)).arg(node(at).to_string()).arg(texts(ids));
        self.operate(what, at, ids, (0, Told::Grants), &command, |ledger, caller, post| {
            ledger.release(caller, ids, post)
        });
    }

    fn renew(&mut self, i: usize, at: usize, ids: &[PlaceId], lease_ms: u64) {
        let what = self.what(i, "renew", at, ids, &format!("lease {lease_ms}"));
        let mut command = self.lua.call("renew", self.limit);
        command.arg(lease_ms).arg(u8::from(self.counted)).arg(node(at).to_string()).arg(texts(ids));
        let told = if self.would_wait() == 0 { Told::InShort } else { Told::All };
        self.operate(what, at, ids, (lease_ms, told), &command, |ledger, caller, post| {
            ledger.renew(caller, lease_ms, ids, post)
        });
    }

    /// How many wait, once the dead are swept.
    fn would_wait(&self) -> u64 {
        let mut dead: Vec<_> =
            self.ledger.places().filter(|(_, end, _)| *end <= self.now / 1000).collect();
        dead.sort_unstable_by_key(|(id, end, _)| (*end, *id));
        let swept = dead.iter().take(self.lua.work_max).filter(|(_, _, ticket)| ticket.is_some());
        self.ledger.waiting() - swept.count() as u64
    }

    fn reassert(&mut self, i: usize, at: usize, proofs: &[(PlaceId, u64)], lease_ms: u64) {
        let ids: Vec<_> = proofs.iter().map(|(id, _)| *id).collect();
        let shown: Vec<_> = proofs.iter().take(8).map(|(_, proof)| proof).collect();
        let what =
            self.what(i, "reassert", at, &ids, &format!("lease {lease_ms}, proofs {shown:?}"));
        let mut command = self.lua.call("reassert", self.limit);
        command.arg(lease_ms).arg(u8::from(self.counted)).arg(node(at).to_string());
        for (id, proof) in proofs {
            command.arg(id.to_string()).arg(*proof);
        }
        self.operate(what, at, &ids, (lease_ms, Told::All), &command, |ledger, caller, post| {
            ledger.reassert(caller, lease_ms, proofs, post)
        });
    }

    fn inspect(&mut self, i: usize, most: usize) {
        let what = self.what(i, "inspect", 0, &[], &format!("most {most}"));
        let command = self.lua.call("inspect", u32::try_from(most).unwrap());
        let (mut leases, mut tickets) = (Vec::new(), Vec::new());
        for (id, lease_end, ticket) in self.ledger.places() {
            if lease_end > self.now / 1000 {
                leases.push((lease_end, id.to_string()));
            }
            if let Some(ticket) = ticket {
                tickets.push((ticket, format!("{QUEUED}{id}")));
            }
        }
        leases.sort_unstable();
        leases.truncate(most);
        tickets.sort_unstable();
        tickets.truncate(most);
        let counts = [self.now, self.ledger.in_use(), self.ledger.waiting(), leases.len() as u64];
        let mut items: Vec<Item> = counts.map(number).into();
        for (score, member) in leases.into_iter().chain(tickets) {
            items.push(Item::Text(member));
            items.push(Item::Text(score.to_string()));
        }
        self.expect(what, &command, Item::List(items), Vec::new());
    }

    fn revoke(&mut self, i: usize, id: PlaceId) {
        let what = self.what(i, "revoke", 0, &[id], "");
        let mut command = cmd("EVALSHA");
        command.arg(&self.lua.hashes["revoke"]).arg(1).arg(KEY).arg(id.to_string()).arg(1);
        let left = self
            .ledger
            .revoke(id, true, self.now)
            .map(|end| number(end.saturating_sub(self.now / 1000)));
        self.expect(what, &command, left.unwrap_or(Item::Int(-1)), Vec::new());
    }
}

fn texts(ids: &[PlaceId]) -> Vec<String> {
    ids.iter().map(ToString::to_string).collect()
}

fn number(n: u64) -> Item {
    Item::Int(i64::try_from(n).unwrap())
}

// --- the scripts' side ----------------------------------------------------------------------------

const FILES: [(&str, &str); 6] = [
    ("acquire", include_str!("../../lua/acquire.lua")),
    ("release", include_str!("../../lua/release.lua")),
    ("renew", include_str!("../../lua/renew.lua")),
    ("reassert", include_str!("../../lua/reassert.lua")),
    ("inspect", include_str!("../../lua/inspect.lua")),
    ("revoke", include_str!("../../lua/revoke.lua")),
];
const PIECES: [(&str, &str); 6] = [
    ("clock", include_str!("../../lua/clock.lua")),
    ("queued", include_str!("../../lua/queued.lua")),
    ("sweep", include_str!("../../lua/sweep.lua")),
    ("promote", include_str!("../../lua/promote.lua")),
    ("write", include_str!("../../lua/write.lua")),
    ("answer", include_str!("../../lua/answer.lua")),
];

/// What a member begins with that is a ticket.
const QUEUED: &str = "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq";

/// What of a reply a script tells.
#[derive(Clone, Copy, PartialEq)]
enum Told {
    All,
    /// The lease end alone, if all ids hold.
    InShort,
    Grants,
}

/// The scripts, with the test's clock.
struct Lua {
    work_max: usize,
    texts: HashMap<&'static str, String>,
    hashes: HashMap<&'static str, String>,
}

impl Lua {
    /// `change` may alter a file's text; it gets the file's name. `work_max` takes the place of the
    /// bound on work.
    fn new(work_max: usize, change: impl Fn(&str, &str) -> String) -> Self {
        const CLOCK: &str = "redis.call('TIME')";
        let bound = format!("budget = false, {WORK_MAX}\n");
        let (mut texts, mut hashes) = (HashMap::new(), HashMap::new());
        for (name, body) in FILES {
            let mut text = change(name, body);
            for (piece, lines) in PIECES {
                text = text.replacen(&format!("--@{piece}"), &change(piece, lines), 1);
            }
            let text = text.replace(CLOCK, "redis.call('MGET', 'now:s', 'now:us')");
            assert!(!text.contains("'TIME'"), "{name} reads the time in another way");
            let swept = text.contains("local swept");
            assert_eq!(text.contains(&bound), swept, "{name} has another bound than the ledger");
            let text = text.replace(&bound, &format!("budget = false, {work_max}\n"));
            hashes.insert(name, Script::new(&text).get_hash().to_owned());
            texts.insert(name, text);
        }
        Self { work_max, texts, hashes }
    }

    fn as_it_is() -> Self {
        Self::new(WORK_MAX, |_, text| text.to_owned())
    }

    /// The beginning of every call: the first argument is a number.
    fn call(&self, name: &str, first: u32) -> Cmd {
        let mut command = cmd("EVALSHA");
        command.arg(&self.hashes[name]).arg(1).arg(KEY).arg(first);
        command
    }
}

/// What comes from a server, as far as these tests meet it.
#[derive(Clone, Debug, PartialEq)]
enum Item {
    Int(i64),
    Text(String),
    Double(f64),
    Null,
    Error(String),
    List(Vec<Self>),
    Push(Vec<Self>),
}

/// A connection that speaks RESP3: answers and messages in the order in which the server wrote them.
struct Wire {
    stream: BufReader<TcpStream>,
    pushed: Vec<Message>,
}

impl Wire {
    fn open(server: &TestRedis) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut wire = Self { stream: BufReader::new(stream), pushed: Vec::new() };
        wire.write(&cmd("HELLO").arg(3).get_packed_command());
        wire.reply();
        wire
    }

    fn load(&mut self, lua: &Lua) {
        for (name, text) in &lua.texts {
            self.write(&cmd("SCRIPT").arg("LOAD").arg(text).get_packed_command());
            assert_eq!(self.reply(), Item::Text(lua.hashes[name].clone()), "{name}");
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    /// The next answer; messages before it are kept.
    fn reply(&mut self) -> Item {
        loop {
            match self.item() {
                Item::Push(words) => match &*words {
                    [Item::Text(kind), Item::Text(channel), Item::Text(text)]
                        if kind == "message" =>
                    {
                        self.pushed.push((channel.clone(), text.clone()));
                    }
                    // That a channel is, or is not, subscribed now.
                    _ => {}
                },
                item => return item,
            }
        }
    }

    fn item(&mut self) -> Item {
        let mut line = String::new();
        assert_ne!(self.stream.read_line(&mut line).unwrap(), 0, "the server closed");
        let (kind, rest) = line.trim_end().split_at(1);
        let size = || rest.parse::<usize>().unwrap();
        match kind {
            ":" => Item::Int(rest.parse().unwrap()),
            "," => Item::Double(rest.parse().unwrap()),
            "+" => Item::Text(rest.to_owned()),
            "-" => Item::Error(rest.to_owned()),
            "_" => Item::Null,
            "$" => {
                let mut text = vec![0; size() + 2];
                self.stream.read_exact(&mut text).unwrap();
                text.truncate(size());
                Item::Text(String::from_utf8(text).unwrap())
            }
            "*" => Item::List((0..size()).map(|_| self.item()).collect()),
            ">" => Item::Push((0..size()).map(|_| self.item()).collect()),
            "%" => Item::List((0..2 * size()).map(|_| self.item()).collect()),
            _ => panic!("not expected from the server: {line:?}"),
        }
    }

    /// Carries a history out and compares; the number of operations and of those that reached the bound on
    /// work, or the first difference.
    fn check(&mut self, lua: &Lua, history: &History) -> Result<[usize; 2], String> {
        let plan = Model::new(lua, history).run(history);
        // The key's expiry counts in real time, and is one second at the least: a run that stood
        // still for that long proves nothing.
        for _ in 0..10 {
            let began = Instant::now();
            let differs = self.compare(&plan, began);
            if began.elapsed() < Duration::from_millis(900) {
                let early = plan.expected.iter().filter(|expected| expected.more).count();
                return differs.map(|()| [plan.expected.len(), early]);
            }
        }
        panic!("this machine is too slow to compare anything");
    }

    fn compare(&mut self, plan: &Plan, began: Instant) -> Result<(), String> {
        self.write(&plan.commands);
        // Everything is read, whatever comes out, so that the next history finds the wire empty.
        let mut shown = Vec::with_capacity(plan.expected.len());
        for expected in &plan.expected {
            for _ in 0..expected.before {
                self.reply();
            }
            let took = [self.reply(), self.reply(), self.reply(), self.reply()];
            shown.push((took, std::mem::take(&mut self.pushed)));
        }
        for _ in 0..plan.asides {
            self.reply();
        }
        let slack = u64::try_from(began.elapsed().as_millis()).unwrap() + 2;
        for (expected, ([_, reply, set, ttl], messages)) in plan.expected.iter().zip(shown) {
            expected
                .holds(&reply, &messages, &set, &ttl, slack)
                .map_err(|difference| format!("{}\n{difference}", expected.what))?;
        }
        Ok(())
    }
}

impl Expected {
    /// `slack`: how much of a lease can have gone by in real time, ms.
    fn holds(
        &self,
        reply: &Item,
        messages: &[Message],
        set: &Item,
        ttl: &Item,
        slack: u64,
    ) -> Result<(), String> {
        same("reply", &self.reply, reply)?;
        same("messages", &*self.messages, messages)?;
        same("set", &self.set, &members(set))?;
        let Item::Int(ttl) = *ttl else { return Err(format!("PTTL: {ttl:?}")) };
        let (longest, ever) = self.longest;
        let good = if self.set.is_empty() {
            ttl == -2
        } else {
            u64::try_from(ttl).is_ok_and(|ttl| ttl + slack >= longest && ttl <= 3 * ever + 1000)
        };
        if good { Ok(()) } else { Err(format!("expiry: {ttl} ms, leases {longest}, {ever} ms")) }
    }
}

fn same<T: std::fmt::Debug + PartialEq + ?Sized>(
    what: &str,
    ledger: &T,
    lua: &T,
) -> Result<(), String> {
    if ledger == lua {
        return Ok(());
    }
    Err(format!("{what}\n  of the ledger: {ledger:?}\n  of the script: {lua:?}"))
}

/// RESP3 gives members and scores in pairs.
fn members(set: &Item) -> Vec<(String, u64)> {
    let Item::List(pairs) = set else { panic!("not a set: {set:?}") };
    let pair = |item: &Item| match item {
        Item::List(pair) => match &**pair {
            [Item::Text(member), Item::Double(score)] => {
                assert!(score.fract() == 0.0 && *score > 0.0, "{member}: {score}");
                #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
                let score = *score as u64;
                (member.clone(), score)
            }
            other => panic!("not a member and a score: {other:?}"),
        },
        other => panic!("not a pair: {other:?}"),
    };
    pairs.iter().map(pair).collect()
}

// --- the tests ------------------------------------------------------------------------------------

fn histories() -> u32 {
    std::env::var("TEST_HISTORIES").map_or(2000, |n| n.parse().expect("TEST_HISTORIES: a number"))
}

/// Generates histories until one differs, which is then made as short as can be.
fn run(
    lua: &Lua,
    cases: u32,
    shrink: u32,
    histories: &impl Strategy<Value = History>,
) -> Result<[usize; 2], String> {
    let server = TestRedis::start();
    let wire = RefCell::new(Wire::open(&server));
    wire.borrow_mut().load(lua);
    let counts = Cell::new([0; 2]);
    let config =
        Config { cases, max_shrink_iters: shrink, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(histories, |history| {
        let [count, early] = wire.borrow_mut().check(lua, &history).map_err(TestCaseError::fail)?;
        let [counts_before, early_before] = counts.get();
        counts.set([counts_before + count, early_before + early]);
        Ok(())
    });
    match outcome {
        Ok(()) => Ok(counts.get()),
        Err(TestError::Fail(why, history)) => Err(format!("{why}\n{history:#?}")),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}

#[test]
fn the_scripts_do_what_the_ledger_does() {
    let cases = histories();
    let [operations, _] = run(&Lua::as_it_is(), cases, 4000, &history(1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(operations >= 50 * cases as usize, "only {operations} operations were compared");
}

/// A bound on work that small histories reach.
const SMALL_WORK: usize = 8;

#[test]
fn they_stop_at_the_same_bound_on_work() {
    let lua = Lua::new(SMALL_WORK, |_, text| text.to_owned());
    let [operations, early] = run(&lua, histories(), 4000, &history(1..=4, 50..=90))
        .unwrap_or_else(|difference| panic!("{difference}"));
    assert!(early > operations / 200, "only {early} of {operations} reached the bound");
}

#[test]
fn they_do_so_with_hundreds_of_places_too() {
    let cases = histories().div_ceil(50);
    run(&Lua::as_it_is(), cases, 200, &history(1..=512, 10..=20))
        .unwrap_or_else(|difference| panic!("{difference}"));
}

fn acquire(node: usize, lease_ms: u64) -> Step {
    let terms = Terms { lease_ms, max_queue: Some(20_000) };
    Step::Acquire { node, leaving: Vec::new(), poll_only: false, ids: 512, terms }
}

/// One history, told here.
fn told(limit: u32, steps: Vec<Step>) -> Vec<Expected> {
    let server = TestRedis::start();
    let lua = Lua::as_it_is();
    let mut wire = Wire::open(&server);
    wire.load(&lua);
    let history = History { counted: true, limit, steps };
    wire.check(&lua, &history).unwrap_or_else(|difference| panic!("{difference}"));
    Model::new(&lua, &history).run(&history).expected
}

fn number_of(expected: &Expected, at: usize) -> i64 {
    match &expected.reply {
        Item::List(items) => match items[at] {
            Item::Int(number) => number,
            _ => panic!("{items:?}"),
        },
        reply => panic!("{reply:?}"),
    }
}

/// How many hold and how many wait, by what is in the set.
fn counts(expected: &Expected) -> (usize, usize) {
    let waiting = expected.set.iter().filter(|(member, _)| member.starts_with(QUEUED)).count();
    (expected.set.len() - 2 * waiting, waiting)
}

#[test]
fn a_sweep_of_more_dead_than_one_call_takes_out_goes_on_with_the_next() {
    let mut steps: Vec<_> = (0..NODES).map(|node| acquire(node, 5_000)).collect();
    steps.extend([acquire(0, 60_000), Step::Time(Time::By(6_000_000))]);
    // 1536 hold and 512 wait, all of them dead by now; another 512 wait and live.
    for _ in 0..7 {
        steps.push(Step::Renew {
            node: 1,
            picks: vec![Pick::New { node: 1, poll_only: false }],
            lease_ms: 5_000,
        });
    }
    let expected = told(1536, steps);
    assert_eq!((number_of(&expected[4], 2), number_of(&expected[4], 3)), (1536, 1024));
    let swept: Vec<_> = expected[5..].iter().map(|e| e.set.len()).collect();
    // Three thousand and more members, then five hundred places fewer each time, then only those that live.
    assert!(swept[0] > 2000 && swept[6] == 512, "{swept:?}");
    assert!(swept.windows(2).all(|two| two[0] - two[1] <= 2 * WORK_MAX), "{swept:?}");
    assert!(expected[5..].iter().any(|e| e.more) && !expected.last().unwrap().more);
}

#[test]
fn hundreds_are_granted_at_once_across_nodes() {
    let mut steps: Vec<_> = (0..NODES).map(|node| acquire(node, 60_000)).collect();
    steps.extend([
        Step::Subscribe { node: 2, alive: false },
        Step::Limit(1_900),
        Step::Release { node: 3, picks: vec![Pick::Known(0)] },
    ]);
    steps.extend((0..4).map(|_| Step::Release { node: 3, picks: Vec::new() }));
    let expected = told(1, steps);
    let last = expected.last().unwrap();
    let early: Vec<_> = expected.iter().map(|e| e.more).collect();
    assert_eq!(early, [false, false, false, false, true, true, true, true, false]);
    // Nobody listens for node 2 any more: its 512 are taken out, and everyone else is in.
    assert_eq!(counts(last), (3 * 512 - 1, 0));
    // One message a node and call; the bound cuts both nodes' grants into two calls.
    let messages: Vec<_> = expected.iter().flat_map(|e| &e.messages).collect();
    let told: usize = messages.iter().map(|(_, text)| text.split(' ').count() / 2).sum();
    assert_eq!((messages.len(), told), (4, 511 + 512));
}

#[test]
fn more_dead_waiters_than_one_sweep_takes_out_get_no_permit() {
    let mut steps = vec![acquire(0, 60_000)];
    steps.extend((0..5).map(|i| acquire(1 + i % 3, 5_000)));
    steps.extend([
        acquire(3, 60_000),
        Step::Time(Time::By(6_000_000)),
        Step::Release { node: 0, picks: (0..512).map(Pick::Known).collect() },
    ]);
    steps.extend((0..6).map(|_| Step::Release { node: 0, picks: Vec::new() }));
    let expected = told(512, steps);
    // The sweep alone reaches the bound: nothing is left for grants.
    assert!(expected[7].more && counts(&expected[7]) == (0, 5 * 512 + 512 - WORK_MAX));
    assert_eq!(counts(expected.last().unwrap()), (512, 0));
}

/// Ways to write the scripts wrongly: file, text, what stands there instead.
const MUTANTS: [(&str, &str, &str); 62] = [
    ("acquire", "  all = all - left\n", ""),
    ("acquire", "queued .. members[i]", "members[i]"),
    ("acquire", "if waiting > 0 and left > 1 then", "if false then"),
    ("acquire", "unpack(ARGV, 7, first - 1)", "unpack(ARGV, 7, first)"),
    ("acquire", "if waiting == 0 and all +", "if all - 2 * waiting +"),
    ("acquire", "count_of_ids <= limit then", "count_of_ids <= limit + 1 then"),
    ("acquire", "all = all + redis.call('ZADD', key, unpack", "redis.call('ZADD', key, unpack"),
    ("acquire", "all = all + redis.call('ZADD', key, lease", "redis.call('ZADD', key, lease"),
    ("renew", "if waiting == 0 and #writes == 2 * #ids", "if #writes == 2 * #ids"),
    ("renew", "if waiting == 0 and #writes == 2 * #ids", "if waiting == 0"),
    ("acquire", "if all == count_of_ids or", "if true or"),
    ("acquire", "or redis.call('PTTL', key) < lease_ms + 1000 then", "then"),
    ("acquire", "if swept then", "if false then"),
    ("acquire", "--@sweep", "local swept, budget = false, 500\nlocal earliest"),
    ("acquire", "--@promote", "local own, gone = {}, false"),
    ("acquire", "waiting >= max_queue", "waiting > max_queue"),
    ("acquire", "max_queue < 0", "max_queue <= 0"),
    ("acquire", "math.max(now, ticket + 1)", "now"),
    ("acquire", "math.max(now, ticket + 1)", "ticket + 1"),
    ("acquire", "ticket == 0 then", "ticket < 0 then"),
    ("acquire", "    in_use = in_use + 1\n", ""),
    ("acquire", "    waiting = waiting + 1\n", ""),
    ("acquire", "tonumber(scores[#ids + i] or 1)", "1"),
    ("acquire", "    moved = true\n", ""),
    ("acquire", "local moved = gone", "local moved = false"),
    ("acquire", "lease_end < earliest", "false"),
    ("write", "  if ttl < lease_ms + 1000 then", "  if false then"),
    ("write", "  if ttl < lease_ms + 1000 then", "  if true then"),
    ("release", "if waiting == 0 then", "if waiting >= 0 then"),
    ("release", "unpack(members)) > 1 then", "unpack(members)) > 2 then"),
    ("release", "  if waiting == 0 then return {} end\n", ""),
    ("release", "if swept then waiting", "if false then waiting"),
    ("release", "--@sweep", "local swept, budget = false, 500"),
    ("release", "queued .. members[i]", "members[i]"),
    ("renew", "--@sweep", "local budget, earliest = 500, nil"),
    ("renew", "tonumber(scores[#ids + i] or 1)", "1"),
    ("renew", "if waiting > 0 then", "if waiting > 1 then"),
    ("renew", "math.max(redis.call('PTTL', key), 3 * lease_ms + 1000)", "3 * lease_ms + 1000"),
    ("renew", "--@promote", "local own = {}"),
    ("renew", "earliest = nil", ""),
    ("reassert", "--@sweep", "local budget, earliest = 500, nil"),
    ("reassert", "proofs[i] > now_ms", "proofs[i] >= now_ms"),
    ("reassert", "proofs[i] > now_ms", "proofs[i] > 0"),
    ("reassert", "status = proofs[i]", "status = now_ms * 1000"),
    ("reassert", "--@write", "if #writes > 0 then redis.call('ZADD', key, unpack(writes)) end"),
    ("acquire", "--@write", "if #writes > 0 then redis.call('ZADD', key, unpack(writes)) end"),
    ("sweep", "earliest <= now_ms", "earliest < now_ms"),
    ("sweep", "dead[#dead + 1] = queued .. dead[i]", "dead[#dead + 1] = dead[i]"),
    ("promote", "if heard == 0 and counted then", "if heard == 0 then"),
    ("promote", "if heard == 0 and counted then", "if false then"),
    ("promote", "if poll_only == '' or to == node then", "if true then"),
    ("promote", "if to ~= node then", "if true then"),
    ("promote", "if poll_only == '' and absent[to] then", "if absent[to] then"),
    (
        "promote",
        "  while waiting > 0 and in_use < limit",
        "  while waiting > 0 and in_use <= limit",
    ),
    ("promote", "  while waiting > 0 and in_use", "  while #ids < 1 and waiting > 0 and in_use"),
    ("promote", "'LIMIT', passed, count", "'LIMIT', 0, count"),
    ("promote", "      in_use = in_use - #mail[to]\n", ""),
    ("answer", "if waiting == 0 then", "if false then"),
    ("release", "if #ARGV > 3 then redis", "if true then redis"),
    ("revoke", "id, queued .. id", "id"),
    ("revoke", "id, queued .. id", "queued .. id"),
    ("revoke", "lease_end) - now_ms, 0", "lease_end) - now_ms, 1"),
];

/// The same for the bound on work.
const BOUND_MUTANTS: [(&str, &str, &str); 11] = [
    ("sweep", "  budget = budget - #dead\n", ""),
    ("sweep", "'LIMIT', 0, budget", "'LIMIT', 0, 1000"),
    ("promote", "    budget = budget - 1\n", ""),
    ("promote", "            budget = budget - 4\n", ""),
    ("promote", "      absent[to] = true\n", ""),
    ("answer", "elseif in_use < limit then", "elseif false then"),
    ("answer", "elseif in_use < limit then", "elseif true then"),
    ("release", "if waiting > 0 and in_use < limit then", "if false then"),
    ("release", "if waiting > 0 and in_use < limit then", "if waiting > 0 then"),
    ("release", "if waiting > 0 and in_use < limit then", "if in_use < limit then"),
    ("acquire", "elseif waiting == 0 and in_use < limit then", "elseif in_use < limit then"),
];

#[test]
fn a_script_that_does_otherwise_is_found_out() {
    let bound = BOUND_MUTANTS.map(|mutant| (SMALL_WORK, mutant));
    for (work_max, (file, text, instead)) in
        MUTANTS.map(|mutant| (WORK_MAX, mutant)).into_iter().chain(bound)
    {
        let lua = Lua::new(work_max, |name, body| {
            if name != file {
                return body.to_owned();
            }
            assert!(body.contains(text), "{file} has no {text:?} any more");
            body.replacen(text, instead, 1)
        });
        let found = run(&lua, 3000, 0, &history(1..=4, 50..=90));
        assert!(found.is_err(), "not found out: {file}, {instead:?} for {text:?}");
    }
}
