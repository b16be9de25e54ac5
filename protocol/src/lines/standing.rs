//! Where lines stand, as parts that a ledger stores.
//!
//! Units and queues follow from the places. These do not: since when a line is at its level, where and since when it is
//! parked, and until when it is asleep.

use super::further::Stands;
use super::spot::{Code, Spot};
use super::{Changed, LEVEL, Lines, Register, STOPPED};
use crate::claim::{LineId, Tenant};

/// Where a line stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Among the turns, or stopped; the bits of its turn.
    InTurn(u64),
    /// Parked at a limit.
    Parked(Spot, Code),
    /// Asleep until then (µs).
    Asleep(u64),
}

/// The bits of the lowest turn, and of the turn of a line that is stopped.
pub(crate) const TURNS: (u64, u64) = (LEVEL.to_bits(), STOPPED.to_bits());

impl<I: Copy + Ord> Lines<I> {
    /// The lines in which a place waits, by their numbers.
    pub(crate) fn waiting_lines(&self) -> impl Iterator<Item = LineId> + '_ {
        let of_tenants = self.tenants.iter().filter(|(_, line)| !line.queue.is_empty());
        of_tenants.map(|(tenant, _)| LineId::from(*tenant)).chain(self.further.waiting())
    }

    /// The lines among the turns, with the bits of these, the next first; those that are stopped come last.
    pub(crate) fn in_turn(&self) -> impl Iterator<Item = (u64, LineId)> + '_ {
        self.turns.iter().copied()
    }

    /// The lines that are parked, by where they are, the first of each to come back first.
    pub(crate) fn parked(&self) -> impl Iterator<Item = (Spot, Code, LineId)> + '_ {
        self.further.by_spot()
    }

    /// The lines that are asleep, and until when (µs), the first to wake first.
    pub(crate) fn asleep(&self) -> impl Iterator<Item = (u64, LineId)> + '_ {
        self.asleep.by_time()
    }

    /// The lines that are listed under another tenant than that of their first place: those of two tenants have one
    /// number.
    pub(crate) fn listed_elsewhere(
        &self,
        of: &impl Register<I>,
    ) -> impl Iterator<Item = (LineId, Tenant)> {
        self.further.listed().filter_map(|(line, head, tenant)| {
            let of_head = of.claim_of(head?).tenant();
            (of_head != tenant).then_some((line, tenant))
        })
    }

    /// Ends the adding of places of another ledger, which has settled them: each line is listed under the tenant of its
    /// first place.
    pub(crate) fn settled_elsewhere(&mut self, of: &impl Register<I>) {
        self.changed = Changed::default();
        let listed: Vec<_> = self.further.listed().collect();
        for (line, head, _) in listed {
            if let Some(head) = head {
                self.further.list_under(line, of.claim_of(head).tenant());
            }
        }
    }

    /// Lists a line with further limits under this tenant. Returns whether that is another than before.
    pub(crate) fn list_under(&mut self, line: LineId, tenant: Tenant) -> bool {
        self.further.list_under(line, tenant)
    }

    /// Puts a line that waits where it stood in another ledger. Only one with further limits can be parked.
    pub(crate) fn restore(&mut self, line: LineId, standing: Standing) {
        match standing {
            Standing::InTurn(bits) if line.is_further() => {
                self.stand(line, Some(Stands::InTurn(bits)));
            }
            Standing::InTurn(bits) => self.set_turn(line.tenant(), Some(bits)),
            Standing::Parked(spot, code) => self.stand(line, Some(Stands::At(spot, code))),
            Standing::Asleep(until) => self.lay(line, until),
        }
    }
}
