//! What the ids of many places have in common: bound and claim.

use super::DecodeError;
use super::numbers::{Reader, write_number};
use crate::bound::Bound;
use crate::bound_rate::BoundRate;
use crate::charge::{Charge, Charges};
use crate::claim::{Claim, Tenant};
use crate::further::{Further, FurtherLimit};
use crate::id::PlaceId;

/// What is said in an id beside the process and the number.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Terms {
    pub(super) bound: Option<Bound>,
    pub(super) claim: Option<Claim>,
}

// The first byte: what there is, and how many further limits (0 to 3) and charges (0 to 2).
const BOUND: u8 = 1;
const RATE: u8 = 2;
const CLAIM: u8 = 4;
const FURTHER_AT: u8 = 3;
const CHARGES_AT: u8 = 5;

impl Terms {
    /// The fewest bytes of any.
    pub(super) const LEAST: usize = 1;

    pub(super) const fn of(id: &PlaceId) -> Self {
        Self { bound: id.bound, claim: id.claim }
    }

    fn rate(self) -> Option<BoundRate> {
        self.bound?.rate.filter(|_| self.claim.is_some())
    }

    pub(super) fn write(self, out: &mut Vec<u8>) {
        let further = self.claim.map_or(Further::NONE, Claim::further);
        let charges = self.claim.map_or(Charges::NONE, Claim::charges);
        let rate = self.rate();
        let counts = (0..).zip(further.iter()).map(|_| 1 << FURTHER_AT).sum::<u8>()
            + (0..).zip(charges.iter()).map(|_| 1 << CHARGES_AT).sum::<u8>();
        let flag = |is_there: bool, flag: u8| if is_there { flag } else { 0 };
        out.push(
            counts
                | flag(self.bound.is_some(), BOUND)
                | flag(rate.is_some(), RATE)
                | flag(self.claim.is_some(), CLAIM),
        );
        if let Some(bound) = self.bound {
            write_number(out, bound.limit.into());
            // Only a claim has a class, and so a use for the headroom.
            if self.claim.is_some() {
                write_number(out, bound.headroom.into());
            }
        }
        if let Some(rate) = rate {
            write_number(out, rate.starts().into());
            write_number(out, rate.window_us());
            write_number(out, rate.doublings());
        }
        if let Some(claim) = self.claim {
            write_claim(out, claim);
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let [flags] = reader.bytes()?;
        let has = |flag: u8| flags & flag == flag;
        let (further, charges) = (flags >> FURTHER_AT & 3, flags >> CHARGES_AT);
        let is_bare = !has(CLAIM) && (further > 0 || charges > 0);
        let is_rated = has(RATE) && !(has(CLAIM) && has(BOUND));
        if is_bare || is_rated || usize::from(charges) > Charges::MAX {
            let expected = "such as go together";
            return Err(reader.malformed("flags of terms", flags.into(), expected));
        }
        let bound =
            if has(BOUND) { Some(read_bound(reader, has(CLAIM), has(RATE))?) } else { None };
        let claim = if has(CLAIM) { Some(read_claim(reader, further, charges)?) } else { None };
        Ok(Self { bound, claim })
    }
}

fn read_bound(
    reader: &mut Reader<'_>,
    has_claim: bool,
    has_rate: bool,
) -> Result<Bound, DecodeError> {
    let limit = reader.within_u32("limit", 0..=u32::MAX)?;
    let headroom = if has_claim { reader.within_u32("headroom", 0..=u32::MAX)? } else { 0 };
    let rate = if has_rate { Some(read_rate(reader)?) } else { None };
    Ok(Bound { limit, headroom, rate })
}

fn read_rate(reader: &mut Reader<'_>) -> Result<BoundRate, DecodeError> {
    let starts = reader.within_u32("starts of a rate", 1..=BoundRate::STARTS_MAX)?;
    let windows = [BoundRate::WINDOW_MIN, BoundRate::WINDOW_MAX];
    let [least, most] = windows.map(|window| u64::try_from(window.as_micros()).unwrap_or(0));
    let window_us = reader.within("window of a rate", least..=most)?;
    let doublings = reader.number("doublings of a window")?;
    let rate = BoundRate::of_parts(starts, window_us, doublings);
    rate.ok_or_else(|| reader.malformed("doublings of a window", doublings, "up to a day"))
}

fn write_claim(out: &mut Vec<u8>, claim: Claim) {
    write_number(out, claim.tenant().number().into());
    // Without a tenant there is only a cost.
    write_number(out, claim.cost().into());
    if claim.has_tenant() {
        write_number(out, claim.weight().into());
        write_number(out, claim.class().into());
        write_number(out, claim.each().unwrap_or(0).into());
    }
    for limit in claim.further().iter() {
        write_number(out, limit.number().into());
        write_number(out, limit.cap().into());
    }
    for charge in claim.charges().iter() {
        write_number(out, charge.number().into());
        write_number(out, charge.taken());
        write_number(out, charge.burst());
    }
}

fn read_claim(reader: &mut Reader<'_>, further: u8, charges: u8) -> Result<Claim, DecodeError> {
    let number = reader.within("number of a tenant", 0..=Tenant::MAX.into())?;
    let tenant = Tenant::of_number(number).unwrap_or(Tenant::NOBODY);
    let cost = reader.within_u32("cost", 1..=Claim::COST_MAX)?;
    let mut claim = Claim::new(tenant).with_cost(cost);
    if claim.has_tenant() {
        let weight = reader.within_u32("weight", 1..=Claim::WEIGHT_MAX)?;
        let [class, ..] = reader.within("class", 0..=Claim::CLASS_MAX.into())?.to_le_bytes();
        let each = reader.within_u32("cap of a tenant", 0..=Claim::EACH_MAX)?;
        let each = Some(each).filter(|each| *each > 0);
        claim = claim.with_weight(weight).with_class(class).with_each(each);
    }
    for count in 1..=further {
        let limit = read_limit(reader)?;
        claim = claim.also(limit);
        if claim.further().iter().count() < count.into() {
            let number = limit.number().into();
            return Err(reader.malformed("number of a further limit", number, "each number once"));
        }
    }
    for count in 1..=charges {
        let charge = read_charge(reader)?;
        claim = claim.charged(charge);
        if claim.charges().iter().count() < count.into() {
            let (number, expected) =
                (charge.number(), "each number once, and a tenant for its own");
            return Err(reader.malformed("number of a budget", number.into(), expected));
        }
    }
    Ok(claim)
}

fn read_limit(reader: &mut Reader<'_>) -> Result<FurtherLimit, DecodeError> {
    let numbers = 1..=FurtherLimit::NUMBER_MAX.into();
    let number = reader.within("number of a further limit", numbers)?;
    let cap = reader.within_u32("cap of a further limit", 1..=FurtherLimit::CAP_MAX)?;
    Ok(FurtherLimit::of_hash(number - 1, cap))
}

fn read_charge(reader: &mut Reader<'_>) -> Result<Charge, DecodeError> {
    let number = reader.within_u32("number of a budget", 1..=u32::MAX)?;
    let taken = reader.within("charge", 0..=Charge::BURST_MAX)?;
    let burst = reader.within("burst", taken.max(1)..=Charge::BURST_MAX)?;
    let charge = Charge::of_number(number, taken, burst);
    charge.ok_or_else(|| reader.malformed("number of a budget", number.into(), "that of a budget"))
}
