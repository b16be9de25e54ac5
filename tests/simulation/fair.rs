//! The order of turns among tenants, derived from the places of a ledger alone. A ledger is checked against this, which
//! shares no code with it.
//!
//! Each operation is taken apart into its steps: places that leave, places whose lease has ended, grants one by one,
//! and newcomers. The turns of the lines are known after each step. Times that the ledger's rounding makes equal are
//! equal here, and a step that cannot be reconstructed for certain is not judged.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use super::further;
use tower_semaphore_protocol::{
    Charge, Claim, LINE_MAX, LineId, PlaceId, TICKET_MIN, Tenant, Used,
};

/// A place, its lease end in ms, and its ticket while it waits.
pub type Stored = (PlaceId, u64, Option<u64>);

/// An operation on a ledger.
#[derive(Clone, Copy, Debug)]
pub struct Done<'a> {
    /// The places before and after it.
    pub before: &'a [Stored],
    /// See there.
    pub after: &'a [Stored],
    /// The server's clock, in µs.
    pub now: u64,
    /// As the caller knows them.
    pub limit: u32,
    /// See there.
    pub headroom: u32,
    /// Whether the limit applies to all places, whatever limits they have.
    pub for_all: bool,
    /// The places that leave.
    pub leaving: &'a [PlaceId],
    /// What those of them have used that say so.
    pub used: &'a [(PlaceId, Used)],
    /// The newcomers, each with its proof.
    pub coming: &'a [(PlaceId, Option<u64>)],
    /// Whether the operation promotes.
    pub promotes: bool,
    /// Whether the bound on work was reached.
    pub more: bool,
}

/// The name of a broken rule, and how it was broken.
pub type Breach = (&'static str, String);

/// Judges the turns of one semaphore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Judge {
    lines: BTreeMap<Tenant, Turn>,
    /// The lowest limit that applied to all places: a head that needs more may have been set aside.
    least_limit: Option<u32>,
    /// The latest time that the server's clock has shown, in µs. It may have stepped back since.
    latest: u64,
    /// The grants that count for a rate.
    starts: Vec<Start>,
    /// When each budget is full again, in µs.
    budgets: BTreeMap<u32, u64>,
    /// What the grants of this operation take of each budget, until that is charged.
    taken: BTreeMap<u32, u64>,
    /// Whether a place has had further limits: then turns are not known any more.
    has_further: bool,
}

/// A grant that counts for a rate, from which moment it may not any more, and until when it may; in µs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Start {
    id: PlaceId,
    at: u64,
    from: u64,
    until: u64,
}

/// The turn of a line. The lowest is next.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Turn {
    /// Class and level; `None` if the tenant's own cap stops the line.
    key: Option<(u8, u64)>,
    /// The bounds of when the tenant came to this level, in µs.
    from: u64,
    to: u64,
    /// Whether it may be set aside.
    aside: bool,
    /// Whether it may be asleep in the ledger: its head takes of its tenant's own budget.
    sleeps: bool,
}

impl Turn {
    /// Returns whether this turn certainly comes before the other.
    fn precedes(self, other: Self) -> bool {
        let (Some(own), Some(others)) = (self.key, other.key) else { return false };
        // The difference that doubles of this size can hold.
        let grain = 1 << (own.1 + 1).ilog2();
        let is_sooner = self.to.saturating_add(grain) < other.from;
        !self.aside && (own < others || (own == others && is_sooner))
    }
}

/// Turns of lines that are asleep in a ledger are below this.
const ASLEEP: f64 = -536_870_912.0;

/// How many orders of the grants of one operation are tried: among equal turns, any may have come first.
const ORDERS_MAX: usize = 100;

/// The places of a semaphore by tenants.
#[derive(Clone, Default)]
struct Places {
    units: HashMap<Option<Tenant>, u64>,
    all: u64,
    waiting: BTreeMap<Option<Tenant>, BTreeSet<(u64, PlaceId)>>,
}

fn tenant_of(id: PlaceId) -> Option<Tenant> {
    id.tenant()
}

impl Places {
    fn put(&mut self, id: PlaceId, ticket: Option<u64>) {
        match ticket {
            Some(ticket) => {
                self.waiting.entry(tenant_of(id)).or_default().insert((ticket, id));
            }
            None => {
                *self.units.entry(tenant_of(id)).or_default() += u64::from(id.cost());
                self.all += u64::from(id.cost());
            }
        }
    }

    fn take(&mut self, id: PlaceId, ticket: Option<u64>) {
        let tenant = tenant_of(id);
        match ticket {
            Some(ticket) => {
                if let Some(line) = self.waiting.get_mut(&tenant) {
                    line.remove(&(ticket, id));
                    if line.is_empty() {
                        self.waiting.remove(&tenant);
                    }
                }
            }
            None => {
                let units = self.units.entry(tenant).or_default();
                *units = units.saturating_sub(u64::from(id.cost()));
                self.all = self.all.saturating_sub(u64::from(id.cost()));
            }
        }
    }

    fn units_of(&self, tenant: Option<Tenant>) -> u64 {
        self.units.get(&tenant).copied().unwrap_or(0)
    }

    fn head(&self, tenant: Option<Tenant>) -> Option<(u64, PlaceId)> {
        self.waiting.get(&tenant)?.first().copied()
    }

    fn passes_each(&self, id: PlaceId) -> bool {
        let Some(claim) = id.claim else { return false };
        let units = self.units_of(tenant_of(id)) + u64::from(claim.cost());
        claim.each().is_some_and(|each| units > u64::from(each))
    }

    /// Returns the class and the level of this place, if it were the next of its tenant.
    fn key(&self, id: PlaceId) -> (u8, u64) {
        let level = 64 * self.units_of(tenant_of(id));
        id.claim.map_or((0, level), |claim| (claim.class(), level / u64::from(claim.weight())))
    }
}

/// What the grants of an operation take of each budget.
fn taken_by(done: &Done<'_>) -> BTreeMap<u32, u64> {
    let held = |(_, _, ticket): &&Stored| ticket.is_none();
    let before: HashSet<PlaceId> = done.before.iter().filter(held).map(|(id, ..)| *id).collect();
    let mut taken = BTreeMap::new();
    for (id, ..) in done.after.iter().filter(held).filter(|(id, ..)| !before.contains(id)) {
        for charge in id.charges().iter() {
            *taken.entry(charge.number()).or_default() += charge.taken();
        }
    }
    taken
}

fn class_of(id: PlaceId) -> u8 {
    id.claim.map_or(0, Claim::class)
}

/// Returns how many permits may be in use with this one: by the limit that applies to all, else by its own, else by the
/// caller's.
#[must_use]
pub fn room(id: PlaceId, for_all: Option<u32>, caller: (u32, u32)) -> u64 {
    let (limit, headroom) = id.bound.map_or(caller, |bound| (bound.limit, bound.headroom));
    let headroom = if class_of(id) == 0 { 0 } else { headroom };
    u64::from(for_all.unwrap_or(limit).saturating_sub(headroom))
}

impl Done<'_> {
    /// Returns how many permits may be in use with this one, by the limit of its request.
    fn room(&self, id: PlaceId) -> u64 {
        room(id, self.for_all.then_some(self.limit), (self.limit, self.headroom))
    }

    fn fits(&self, places: &Places, id: PlaceId) -> bool {
        places.all + u64::from(id.cost()) <= self.room(id)
    }

    /// Returns the places that came again in this very call after their lease had ended. They come as newcomers, so a
    /// waiting place lost its turn. A call that reached its bound may have kept a place past its lease.
    fn again(&self, after: &HashMap<PlaceId, Option<u64>>) -> HashSet<PlaceId> {
        let coming: HashSet<PlaceId> = self.coming.iter().map(|(id, _)| *id).collect();
        let has_ended = |end: u64| end <= self.now / 1000;
        let is_again = |(id, end, ticket): &&Stored| match after.get(id) {
            Some(now) if coming.contains(id) && has_ended(*end) => {
                now != ticket && !(self.more && now.is_none())
            }
            _ => false,
        };
        self.before.iter().filter(is_again).map(|(id, ..)| *id).collect()
    }
}

impl Judge {
    /// Returns the turns of all lines.
    fn settle(&mut self, places: &Places, now: u64) {
        self.latest = self.latest.max(now);
        let latest = self.latest;
        self.lines.retain(|tenant, _| places.waiting.contains_key(&Some(*tenant)));
        for tenant in places.waiting.keys().copied().flatten() {
            let Some((_, head)) = places.head(Some(tenant)) else { continue };
            let key = (!places.passes_each(head)).then(|| places.key(head));
            let room = self.least_limit.map(|limit| room(head, Some(limit), (limit, 0)));
            let own = || head.charges().iter().filter(|charge| charge.is_tenants());
            let sleeps = own().next().is_some();
            let aside = room.is_some_and(|room| u64::from(head.cost()) > room)
                || u64::from(head.cost()) > self::room(head, None, (u32::MAX, 0))
                || own().any(|charge| !self.allows(charge, now));
            let new =
                Turn { key, from: now, to: if aside { u64::MAX } else { now }, aside, sleeps };
            self.lines
                .entry(tenant)
                .and_modify(|turn| match turn {
                    _ if turn.key != key || key.is_none() => *turn = new,
                    // It may have come back at any time until then.
                    _ if turn.aside || aside => {
                        *turn = Turn { from: turn.from.min(now), to: new.to.max(latest), ..new };
                    }
                    _ => turn.sleeps = sleeps,
                })
                .or_insert(new);
        }
    }

    fn turn(&self, places: &Places, tenant: Option<Tenant>) -> Option<Turn> {
        match tenant {
            Some(tenant) => self.lines.get(&tenant).copied(),
            None => {
                let (ticket, head) = places.head(None)?;
                let key = Some(places.key(head));
                Some(Turn { key, from: ticket, to: ticket, aside: false, sleeps: false })
            }
        }
    }

    /// Returns the line that certainly comes before this turn, if there is one.
    fn before(&self, places: &Places, turn: Turn, own: Option<Tenant>) -> Option<Option<Tenant>> {
        let others = places.waiting.keys().copied().filter(|tenant| *tenant != own);
        others
            .into_iter()
            .find(|other| self.turn(places, *other).is_some_and(|first| first.precedes(turn)))
    }

    fn grant(&mut self, places: &mut Places, (ticket, id): (u64, PlaceId), now: u64) {
        places.take(id, Some(ticket));
        places.put(id, None);
        self.settle(places, now);
    }

    /// Returns why this place may not be granted now; `None` if it may.
    fn objection(&self, places: &Places, id: PlaceId, done: &Done<'_>) -> Option<Breach> {
        let tenant = tenant_of(id);
        let first = places.head(tenant);
        let (all, units, room) = (places.all, places.units_of(tenant), done.room(id));
        let say = |why: String| {
            format!("{id} was granted with {all} in use, {units} by its tenant, {why}")
        };
        if let Some((_, first)) = first.filter(|(_, first)| *first != id) {
            return Some(("order", say(format!("before {first} of its line"))));
        }
        if places.passes_each(id) {
            return Some(("each in the server", say("past its tenant's cap".into())));
        }
        if !done.fits(places, id) {
            return Some(("cap in the server", say(format!("of {room}"))));
        }
        let newcomer = || Turn {
            key: Some(places.key(id)),
            from: done.now,
            to: done.now,
            aside: false,
            sleeps: false,
        };
        let turn = first.and_then(|_| self.turn(places, tenant)).unwrap_or_else(newcomer);
        let other = self.before(places, turn, tenant)?;
        let theirs = self.turn(places, other);
        Some(("turn", say(format!("with {turn:?}, before {other:?} with {theirs:?}"))))
    }

    /// Judges an operation.
    pub fn judge(&mut self, done: &Done<'_>) -> Option<Breach> {
        self.has_further |= done.after.iter().any(|(id, ..)| further::has_further(id));
        if self.has_further {
            let charged = self.charge(done);
            return further::judge(done).or_else(|| self.start(done)).or(charged);
        }
        let now = done.now;
        self.taken = taken_by(done);
        if done.promotes && done.for_all && done.limit > 0 {
            let least = self.least_limit.unwrap_or(u32::MAX);
            self.least_limit = Some(least.min(done.limit));
        }
        let after: HashMap<PlaceId, Option<u64>> =
            done.after.iter().map(|(id, _, ticket)| (*id, *ticket)).collect();
        let mut places = Places::default();
        done.before.iter().for_each(|(id, _, ticket)| places.put(*id, *ticket));
        // The places that leave, those whose lease has ended, and those granted to a process that is known to be gone.
        let leaving: HashSet<PlaceId> = done.leaving.iter().copied().collect();
        let (mut dead, mut passed, mut replaced) = (Vec::new(), Vec::new(), Vec::new());
        // A proof of 0 says that the next place replaces this one.
        let is_replaced = |id: &PlaceId| done.coming.contains(&(*id, Some(0)));
        let again = done.again(&after);
        let gone = |id: &PlaceId| !after.contains_key(id) || again.contains(id);
        for (id, end, ticket) in done.before.iter().filter(|(id, ..)| gone(id)) {
            match ticket {
                _ if leaving.contains(id) => places.take(*id, *ticket),
                _ if is_replaced(id) => replaced.push((*id, *ticket)),
                Some(ticket) if *end > now / 1000 => passed.push((*ticket, *id)),
                _ => dead.push((*id, *ticket)),
            }
        }
        self.settle(&places, now);
        dead.into_iter().for_each(|(id, ticket)| places.take(id, ticket));
        self.settle(&places, now);
        let before = done.before.iter().map(|(id, ..)| *id);
        let known: HashSet<PlaceId> = before.filter(|id| !again.contains(id)).collect();
        for (id, proof) in done.coming.iter().filter(|(id, _)| !known.contains(id)) {
            let Some(proof) = proof.filter(|_| after.contains_key(id)) else { continue };
            let is_ticket = proof >= TICKET_MIN;
            let ticket = match id.tenant() {
                Some(_) => proof.clamp(TICKET_MIN + 1, TICKET_MIN + LINE_MAX),
                None => proof,
            };
            places.put(*id, is_ticket.then_some(ticket));
        }
        // In one step with the place that replaces it: the line is not empty meanwhile, and keeps its turn.
        replaced.into_iter().for_each(|(id, ticket)| places.take(id, ticket));
        self.settle(&places, now);
        let mut breach = self.promoted(&mut places, &after, &passed, done);
        for (id, proof) in done.coming {
            if proof.is_some() || known.contains(id) {
                continue;
            }
            if let Some(ticket) = after.get(id) {
                if ticket.is_none() && breach.is_none() {
                    let behind = places.head(tenant_of(*id));
                    breach = match behind {
                        Some((_, first)) => {
                            Some(("order", format!("{id} came and was granted before {first}")))
                        }
                        None => self.objection(&places, *id, done),
                    };
                }
                places.put(*id, *ticket);
                self.settle(&places, now);
            }
        }
        let charged = self.charge(done);
        self.taken.clear();
        self.settle(&places, now);
        breach = breach.or_else(|| self.start(done)).or(charged);
        if done.promotes && !done.more && passed.is_empty() && breach.is_none() {
            breach = self.idle(&places, done);
        }
        breach
    }

    /// Counts the grants of this operation for their rates. What was in flight before, or is shown to be, is none.
    fn start(&mut self, done: &Done<'_>) -> Option<Breach> {
        // One that lies far in the future shows that the clock has stepped back: it is forgotten.
        self.starts.retain(|start| start.until > done.now && start.at <= done.now + 1_000_000);
        let held: HashSet<PlaceId> = done
            .before
            .iter()
            .filter(|(.., ticket)| ticket.is_none())
            .map(|(id, ..)| *id)
            .collect();
        let coming: HashMap<PlaceId, Option<u64>> = done.coming.iter().copied().collect();
        let mut breach = None;
        // Rates can differ while one is set. The order among grants is not known here: if any is right, this is.
        let holds = done.after.iter().filter(|(.., ticket)| ticket.is_none());
        let mut rated: Vec<_> = holds.filter_map(|(id, ..)| Some((id.rate()?, id))).collect();
        rated.sort_unstable();
        for (rate, id) in rated {
            let end = done.now + u64::try_from(rate.window().as_micros()).unwrap_or(u64::MAX);
            if held.contains(id) {
                // A call that is repeated may move the start.
                let again = self.starts.iter_mut().filter(|start| start.id == *id);
                again.filter(|_| coming.contains_key(id)).for_each(|start| start.until = end);
                continue;
            }
            // A place that no backend knew, as it passed by policy, counts from now on; whatever the rate says.
            let proof = coming.get(id).copied().flatten().filter(|proof| *proof < TICKET_MIN);
            let passed = proof == Some(TICKET_MIN - 1);
            if proof.is_some() && !passed {
                continue;
            }
            // An acquire that is carried out again, late, moves the start: nobody uses that permit.
            self.starts.retain(|start| start.id != *id);
            let count = self.started(|start| start.from > done.now) + u64::from(id.cost());
            if count > u64::from(rate.starts()) && !passed {
                let text = format!("{id} started as the {count}th within {rate:?}");
                breach = breach.or(Some(("rate in the server", text)));
            }
            self.starts.push(Start { id: *id, at: done.now, from: end, until: end });
        }
        breach
    }

    /// Settles what places that leave have used, and charges the grants of this operation.
    fn charge(&mut self, done: &Done<'_>) -> Option<Breach> {
        let now = done.now;
        let held: HashSet<PlaceId> = (done.before.iter())
            .filter(|(.., ticket)| ticket.is_none())
            .map(|(id, ..)| *id)
            .collect();
        for (id, used) in done.used.iter().filter(|(id, _)| held.contains(id)) {
            for (charge, of) in id.charges().iter().zip(used.iter()) {
                let begins = self.begins(charge, now);
                let full_at = self.budgets.entry(charge.number()).or_default();
                let more = i128::from(of.used) - i128::from(charge.taken());
                let most = i128::from(begins).max(i128::from(now + 2 * charge.burst()));
                let settled = (i128::from(begins) + more).clamp(0, most);
                *full_at = u64::try_from(settled).unwrap_or(u64::MAX);
                if of.ahead > 0 {
                    *full_at = (*full_at).max(now + of.ahead.min(charge.burst()));
                }
            }
        }
        // One that is full is forgotten, though the clock may step back.
        self.budgets.retain(|_, full_at| *full_at > now);
        let coming: HashMap<PlaceId, Option<u64>> = done.coming.iter().copied().collect();
        let mut breach = None;
        let holds = done.after.iter().filter(|(.., ticket)| ticket.is_none());
        for (id, ..) in holds.filter(|(id, ..)| !held.contains(id)) {
            let proof = coming.get(id).copied().flatten().filter(|proof| *proof < TICKET_MIN);
            let passed = proof == Some(TICKET_MIN - 1);
            if proof.is_some() && !passed {
                continue;
            }
            for charge in id.charges().iter() {
                let before = self.begins(charge, now);
                let after = before + charge.taken();
                if after > now + charge.burst() && !passed {
                    let text = format!("{id} was granted, which takes {charge:?} from {before}");
                    breach = breach.or(Some(("budget in the server", text)));
                }
                if charge.taken() > 0 {
                    let most = before.max(now + 2 * charge.burst());
                    self.budgets.insert(charge.number(), after.min(most));
                }
            }
        }
        breach
    }

    /// Whether a budget has enough for this, beside what this operation takes of it.
    fn allows(&self, charge: Charge, now: u64) -> bool {
        let others = self.taken.get(&charge.number()).copied().unwrap_or(0);
        self.begins(charge, now) + others + charge.taken() <= now + charge.burst()
    }

    /// Further ahead than any charge takes it, it shows that the clock has stepped back.
    fn begins(&self, charge: Charge, now: u64) -> u64 {
        let full_at = self.budgets.get(&charge.number()).copied().unwrap_or(0);
        if full_at > now + 2 * charge.burst() + 1_000_000 { now } else { full_at.max(now) }
    }

    fn started(&self, counts: impl Fn(&Start) -> bool) -> u64 {
        self.starts
            .iter()
            .filter(|start| counts(start))
            .map(|start| u64::from(start.id.cost()))
            .sum()
    }

    /// Grants the places that were granted, one by one in the order of their turns. Returns those that had no turn.
    fn promoted(
        &mut self,
        places: &mut Places,
        after: &HashMap<PlaceId, Option<u64>>,
        passed: &[(u64, PlaceId)],
        done: &Done<'_>,
    ) -> Option<Breach> {
        let waiting = places.waiting.values().flatten();
        let is_granted = |id: &PlaceId| after.get(id).is_some_and(Option::is_none);
        let mut granted: Vec<_> = waiting.filter(|(_, id)| is_granted(id)).copied().collect();
        if !passed.is_empty() {
            // Their order is not known.
            for place in granted.into_iter().chain(passed.iter().copied()) {
                self.grant(places, place, done.now);
            }
            for (_, id) in passed {
                places.take(*id, None);
            }
            self.settle(places, done.now);
            return None;
        }
        let (mut orders, mut untried, mut breach) = (1, Vec::new(), None);
        while !granted.is_empty() {
            // Of those that may be next, the one with the lowest turn.
            let mut heads: Vec<_> = granted
                .iter()
                .enumerate()
                .filter(|(_, (ticket, id))| places.head(tenant_of(*id)) == Some((*ticket, *id)))
                .map(|(at, (_, id))| (at, self.turn(places, tenant_of(*id)), *id))
                .collect();
            heads.sort_by_key(|(_, turn, _)| {
                turn.map(|turn| (turn.key.is_none(), turn.key, turn.from, turn.to))
            });
            let mut may =
                heads.iter().filter(|(.., id)| self.objection(places, *id, done).is_none());
            if let Some((at, ..)) = may.next() {
                for (other, ..) in may.take(ORDERS_MAX - orders) {
                    let (mut judge, mut places, mut left) =
                        (self.clone(), places.clone(), granted.clone());
                    judge.grant(&mut places, left.remove(*other), done.now);
                    untried.push((judge, places, left));
                    orders += 1;
                }
                let place = granted.remove(*at);
                self.grant(places, place, done.now);
                continue;
            }
            let id = heads.first().map_or(granted[0].1, |(.., id)| *id);
            breach = breach.or_else(|| self.objection(places, id, done));
            if let Some((judge, before, left)) = untried.pop() {
                (*self, *places, granted) = (judge, before, left);
                continue;
            }
            for place in granted {
                self.grant(places, place, done.now);
            }
            return breach;
        }
        None
    }

    /// Returns whether permits are idle although a place whose turn it is fits.
    fn idle(&self, places: &Places, done: &Done<'_>) -> Option<Breach> {
        let in_turn = |tenant: &Option<Tenant>| {
            let turn = self.turn(places, *tenant).filter(|turn| turn.key.is_some())?;
            let is_first = self.before(places, turn, *tenant).is_none();
            is_first.then(|| (turn, places.head(*tenant)))
        };
        let firsts: Vec<_> = places.waiting.keys().filter_map(in_turn).collect();
        let may_come = |(turn, head): &(Turn, Option<(u64, PlaceId)>)| {
            let is_free = places.all < u64::from(done.limit);
            let may_start = |id: PlaceId| {
                let count = self.started(|_| true) + u64::from(id.cost());
                let allows = |charge: Charge| self.allows(charge, done.now);
                id.rate().is_none_or(|rate| count <= u64::from(rate.starts()))
                    && id.charges().iter().all(allows)
            };
            let fits = |id| done.fits(places, id) && may_start(id);
            !turn.aside && is_free && head.is_some_and(|(_, id)| fits(id))
        };
        let (_, head) = firsts.first().filter(|_| firsts.iter().all(may_come))?;
        let (_, id) = (*head)?;
        let (all, room) = (places.all, done.room(id));
        Some(("idle in the server", format!("{id} is next, and {all} of {room} are in use")))
    }

    /// Compares the turns that a ledger keeps with these.
    #[must_use]
    pub fn compare(&self, turns: &[(LineId, f64)]) -> Option<Breach> {
        if self.has_further {
            return None;
        }
        let theirs: BTreeMap<LineId, f64> = turns.iter().copied().collect();
        let own = self.lines.keys().map(|tenant| LineId::from(*tenant));
        let is_one_each = theirs.len() == turns.len() && theirs.keys().copied().eq(own);
        if !is_one_each {
            return Some(("turns", format!("{turns:?} stand there for {:?}", self.lines)));
        }
        self.lines.iter().zip(theirs).find_map(|((tenant, turn), (_, score))| {
            let is_right = match turn.key {
                None => score == f64::INFINITY,
                Some(_) if turn.aside && score == f64::INFINITY => true,
                Some(_) if turn.sleeps && score < ASLEEP => true,
                Some((class, level)) => {
                    let at = |level: u64| level as f64 * 2f64.powi(52 + 80 * i32::from(class));
                    (at(level + 1)..at(level + 2)).contains(&score)
                }
            };
            (!is_right).then(|| ("turns", format!("{tenant} stands at {score}, with {turn:?}")))
        })
    }
}
