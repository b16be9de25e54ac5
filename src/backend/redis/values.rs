//! Decodes replies of scripts from values of the redis crate.

use std::collections::HashMap;
use std::time::Duration;

use redis::Value;

use crate::backend::Listing;
use crate::error::BackendError;
use crate::protocol::{
    BoundRate, Charge, Claim, Grant, LINE_MAX, LineId, PlaceId, PlaceStatus, RateUsage, Reply,
    TICKET_MIN, Usage,
};

/// The prefix of members that are tickets: see `lua/queued.lua`.
const QUEUED: [u8; 52] = [b'q'; 52];

/// The lowest score of a lease end of a place that stands in a line: see `lua/acquire.lua`.
const FAIR_LEASES: u64 = 10_000_000_000_000;

/// Replaces the earliest lease end if the bound on work was reached: see `lua/again.lua`.
const MORE: u64 = 1;

pub(super) fn reply(items: &[Value], statuses: usize) -> Option<Reply> {
    let [lease_end, earliest, in_use, waiting, rest @ ..] = items else { return None };
    let (statuses, granted) = rest.split_at_checked(statuses)?;
    let (earliest, opens_in) = match earliest {
        Value::Int(ms) if *ms < 0 => (0, ms.unsigned_abs()),
        earliest => (number(earliest)?, 0),
    };
    let more = earliest == MORE;
    Some(Reply {
        lease_end: number(lease_end)?,
        earliest: if more { 0 } else { earliest },
        usage: Some(Usage { in_use: number(in_use)?, waiting: number(waiting)? }),
        statuses: statuses.iter().map(status).collect::<Option<_>>()?,
        granted: grants(granted)?,
        more,
        opens_in,
        ..Reply::default()
    })
}

pub(super) fn grants(items: &[Value]) -> Option<Vec<Grant>> {
    if !items.len().is_multiple_of(2) {
        return None;
    }
    pairs(items)
        .map(|(id, lease_end)| Some(Grant { id: place(id)?, lease_end: number(lease_end)? }))
        .collect()
}

/// A place with its lease end and, while it waits, its ticket.
type Place = (PlaceId, u64, Option<u64>);

pub(super) fn listing(items: &[Value], most: u32) -> Option<Listing> {
    let [now, in_use, waiting, leases, starts, window, started, opens_at, budgets, rest @ ..] =
        items
    else {
        return None;
    };
    let leases = usize::try_from(number(leases)?).ok()?;
    let (leases, rest) = rest.split_at_checked(leases.checked_mul(2)?)?;
    let budgets = usize::try_from(number(budgets)?).ok()?;
    let (budgets, tickets) = rest.split_at_checked(budgets.checked_mul(2)?)?;
    let budgets = pairs(budgets).map(budget).collect::<Option<_>>()?;
    let mut places: Vec<Place> = Vec::with_capacity(leases.len() / 2);
    for (id, lease_end) in pairs(leases) {
        let id = place(id)?;
        let above = if id.line().is_some() { FAIR_LEASES } else { 0 };
        places.push((id, number(lease_end)?.checked_sub(above)?, None));
    }
    let index: HashMap<_, _> = places.iter().enumerate().map(|(i, place)| (place.0, i)).collect();
    for (member, score) in pairs(tickets) {
        let Value::BulkString(member) = member else { return None };
        let id = PlaceId::parse(member.strip_prefix(&QUEUED)?)?;
        // A ticket is skipped if its lease has ended or was not listed.
        if let Some(i) = index.get(&id) {
            places[*i].2 = match id.claim_in_line() {
                None => Some(number(score)?),
                Some(claim) => ticket_in_line(claim, score)?,
            };
        }
    }
    let (now, mut in_use, mut waiting) = (number(now)?, number(in_use)?, number(waiting)?);
    let most = most as usize;
    if places.len() < most {
        // All places are listed, so the counts need not include expired ones, as those of the script do.
        let (waits, holds): (Vec<&Place>, Vec<&Place>) =
            places.iter().partition(|(_, _, ticket)| ticket.is_some());
        waiting = waits.len() as u64;
        in_use = holds.iter().map(|place| u64::from(place.0.cost())).sum();
    }
    // Places with a claim are listed separately.
    places.sort_by_key(|(_, lease_end, _)| *lease_end);
    places.truncate(most);
    let rate = match number(starts)? {
        0 => None,
        starts => {
            let rate =
                BoundRate::new(starts.try_into().ok()?, Duration::from_micros(number(window)?))?;
            let opens_at = Some(number(opens_at)?).filter(|at| *at > 0);
            Some(RateUsage { rate, started: number(started)?, opens_at })
        }
    };
    Some(Listing { now, in_use, waiting, places, rate, budgets })
}

/// Returns the number of a budget, and when it will be full, µs, from its member and score.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a whole number of at most 53 bits, or taken into range"
)]
fn budget((member, score_of): (&Value, &Value)) -> Option<(u32, u64)> {
    let number = Charge::parse_number(text(member)?.strip_prefix('b')?.as_bytes())?;
    Some((number, (score(score_of)? * -8_388_608.0) as u64))
}

fn text(value: &Value) -> Option<&str> {
    let Value::BulkString(text) = value else { return None };
    std::str::from_utf8(text).ok()
}

fn score(value: &Value) -> Option<f64> {
    text(value)?.parse().ok()
}

/// Returns the ticket of a place in a line from its score, -l + k·2⁻²⁸. That of a held place is not negative.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a whole number in range, or taken into it"
)]
fn ticket_in_line(claim: Claim, score: &Value) -> Option<Option<u64>> {
    let score = self::score(score)?;
    let line = claim.line().map_or(0, LineId::number);
    let k = (score + f64::from(line)) * (LINE_MAX + 1) as f64;
    Some((score < 0.0).then_some(TICKET_MIN + k.clamp(0.0, LINE_MAX as f64) as u64))
}

pub(super) fn pairs(items: &[Value]) -> impl Iterator<Item = (&Value, &Value)> {
    items.chunks_exact(2).map(|pair| (&pair[0], &pair[1]))
}

/// The distance between the numbers that tell of one budget and of the next.
const BUDGETS: u64 = 1_000_000_000_000;

pub(super) fn status(value: &Value) -> Option<PlaceStatus> {
    match value {
        Value::Int(0) => Some(PlaceStatus::Gone),
        Value::Int(1) => Some(PlaceStatus::Held),
        Value::Int(-1) => Some(PlaceStatus::NoPermit),
        Value::Int(-2) => Some(PlaceStatus::QueueFull),
        Value::Int(-3) => Some(PlaceStatus::TenantFull),
        Value::Int(-4) => Some(PlaceStatus::NeverFits),
        Value::Int(-5) => Some(PlaceStatus::LimitFull(0)),
        Value::Int(-6) => Some(PlaceStatus::LimitFull(1)),
        Value::Int(-7) => Some(PlaceStatus::LimitFull(2)),
        Value::Int(below) if *below < 0 && below.unsigned_abs() >= BUDGETS => {
            let (number, ms) = (below.unsigned_abs() / BUDGETS, below.unsigned_abs() % BUDGETS);
            Some(PlaceStatus::NoBudget(u8::try_from(number - 1).ok()?, ms))
        }
        Value::Int(below) if *below < -7 => Some(PlaceStatus::NoStart(below.unsigned_abs() - 7)),
        value => number(value).filter(|ticket| *ticket >= TICKET_MIN).map(waiting),
    }
}

/// Above the tickets of lines, a number tells which further limit is full, too; far above them are those of queues.
fn waiting(number: u64) -> PlaceStatus {
    const STEP: u64 = LINE_MAX + 1;
    let above = number - TICKET_MIN;
    match u8::try_from(above / STEP) {
        Ok(full @ 1..=3) => PlaceStatus::WaitingFor(TICKET_MIN + above % STEP, full - 1),
        _ => PlaceStatus::Waiting(number),
    }
}

pub(super) fn place(value: &Value) -> Option<PlaceId> {
    match value {
        Value::BulkString(text) => PlaceId::parse(text),
        Value::SimpleString(text) => PlaceId::parse(text.as_bytes()),
        _ => None,
    }
}

pub(super) fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Int(number) => u64::try_from(*number).ok(),
        Value::BulkString(digits) => std::str::from_utf8(digits).ok()?.parse().ok(),
        _ => None,
    }
}

pub(super) fn unexpected(value: &Value) -> BackendError {
    let shown: String = format!("{value:?}").chars().take(200).collect();
    BackendError::call(format!(
        "Redis sent a reply that this version of the scripts does not send: {shown}"
    ))
}

#[cfg(test)]
mod tests {
    use redis::Value;

    use std::time::Duration;

    use super::{Listing, listing, status};
    use crate::protocol::{
        BoundRate, Claim, FurtherLimit, LINE_MAX, PlaceId, PlaceStatus, RateUsage, TICKET_MIN,
        Tenant,
    };

    #[test]
    fn a_refusal_tells_which_limit_is_full() {
        let told = |code| status(&Value::Int(code));
        let full = [-5, -6, -7].map(told);
        assert_eq!(full, [0, 1, 2].map(|index| Some(PlaceStatus::LimitFull(index))));
        assert_eq!([-4, -3].map(told), [PlaceStatus::NeverFits, PlaceStatus::TenantFull].map(Some));
        assert_eq!(told(-8), Some(PlaceStatus::NoStart(1)));
        assert_eq!(told(-1_000_000_000_750), Some(PlaceStatus::NoBudget(0, 750)));
        assert_eq!(told(-2_000_000_000_001), Some(PlaceStatus::NoBudget(1, 1)));
        assert_eq!(told(i64::MIN), None);
        let waits = |ticket: i64| told(TICKET_MIN.cast_signed() + ticket);
        let [first, last] = [TICKET_MIN + 1, TICKET_MIN + LINE_MAX];
        assert_eq!(waits(1), Some(PlaceStatus::Waiting(first)));
        assert_eq!(waits((1 << 28) - 1), Some(PlaceStatus::Waiting(last)));
        assert_eq!(waits((1 << 28) + 1), Some(PlaceStatus::WaitingFor(first, 0)));
        assert_eq!(waits((4 << 28) - 1), Some(PlaceStatus::WaitingFor(last, 2)));
        assert_eq!(told(1_795_169_854_000_000), Some(PlaceStatus::Waiting(1_795_169_854_000_000)));
    }

    #[test]
    fn a_place_with_further_limits_has_the_ticket_of_its_line() {
        let claim = Claim::without_tenant().also(FurtherLimit::of_hash(34, 20));
        let line = claim.line().unwrap().number();
        let [waits, holds] = [1, 2].map(|n| PlaceId { n, claim: Some(claim), ..PlaceId::FIRST });
        let text = |text: String| Value::BulkString(text.into_bytes());
        let mut items = [1_795_169_853_126_543, 1, 1, 2, 0, 0, 0, 0, 0].map(Value::Int).to_vec();
        for id in [waits, holds] {
            items.extend([text(id.to_string()), text("11795169853127".to_owned())]);
        }
        let score = 7.0 / f64::from(1 << 28) - f64::from(line);
        for (id, score) in [(waits, score), (holds, 1e8)] {
            items.extend([text(format!("{}{id}", "q".repeat(52))), text(score.to_string())]);
        }
        let listing = listing(&items, 10).unwrap();
        let end = 1_795_169_853_127;
        assert_eq!(listing.places, [(waits, end, Some(TICKET_MIN + 7)), (holds, end, None)]);
        assert_eq!((listing.in_use, listing.waiting), (1, 1));
    }

    #[test]
    fn places_of_tenants_are_listed_among_the_others() {
        let claim = Claim::new(Tenant::of_hash(4)).with_cost(3);
        let id = |text: &str| text.parse::<PlaceId>().unwrap();
        let plain = id("00000000001:1");
        let [holds, waits] =
            [2, 3].map(|n| PlaceId { n, claim: Some(claim), ..id("00000000001:1") });
        let text = |text: String| Value::BulkString(text.into_bytes());
        let queued = |id: PlaceId| text(format!("{}{id}", "q".repeat(52)));
        let line = -5.0 + 7.0 / f64::from(1 << 28);
        let items = |most: u32, used: [i64; 4]| {
            let mut items = [1_795_169_853_126_543, 40, 30, 3].map(Value::Int).to_vec();
            items.extend(used.map(Value::Int));
            items.push(Value::Int(1));
            for (id, end) in
                [(plain, "1795169853999"), (holds, "11795169853127"), (waits, "11795169854000")]
            {
                items.extend([text(id.to_string()), text(end.to_owned())]);
            }
            items.extend([text("b0000z".to_owned()), text("-213999016.42019".to_owned())]);
            items.extend([queued(holds), text("5".to_owned())]);
            items.extend([queued(waits), text(line.to_string())]);
            listing(&items, most)
        };
        let places = vec![
            (holds, 1_795_169_853_127, None),
            (plain, 1_795_169_853_999, None),
            (waits, 1_795_169_854_000, Some(TICKET_MIN + 7)),
        ];
        let budgets = vec![(35, 1_795_153_861_134_537)];
        let now = 1_795_169_853_126_543;
        let all = Listing { now, in_use: 4, waiting: 1, places, rate: None, budgets };
        assert_eq!(items(10, [0; 4]), Some(all.clone()));
        let two =
            Listing { in_use: 40, waiting: 30, places: all.places[..2].to_vec(), ..all.clone() };
        assert_eq!(items(2, [0; 4]), Some(two));
        let rate = BoundRate::new(2, Duration::from_secs(60)).unwrap();
        let open = Listing { rate: Some(RateUsage { rate, started: 1, opens_at: None }), ..all };
        assert_eq!(items(10, [2, 60_000_000, 1, 0]), Some(open.clone()));
        let (opens_at, end) = (Some(1_795_169_903_000_001), 1_795_169_903_000_001);
        let full = Listing { rate: Some(RateUsage { rate, started: 2, opens_at }), ..open };
        assert_eq!(items(10, [2, 60_000_000, 2, end]), Some(full));
        assert_eq!(items(10, [4001, 60_000_000, 2, end]), None);
    }
}
