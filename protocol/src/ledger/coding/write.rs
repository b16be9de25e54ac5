//! Writes a ledger.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::numbers::{write_count, write_near, write_number};
use super::table::Table;
use super::terms::Terms;
use super::{OLDEST_WRITER, VERSION};
use crate::claim::LineId;
use crate::id::{NodeId, PlaceId};
use crate::ledger::fair::OfPlaces;
use crate::ledger::starts::Starts;
use crate::ledger::{Ledger, Place};
use crate::lines::Lines;

pub(super) fn write(ledger: &Ledger, out: &mut Vec<u8>) {
    out.extend([VERSION, OLDEST_WRITER]);
    let starts = ledger.starts_kept();
    let of_starts = starts.iter().flat_map(|starts| starts.iter()).map(|(node, ..)| node);
    let nodes = Table::of(ledger.places.keys().map(|id| id.node).chain(of_starts));
    nodes.write(out, |out, node| out.extend(node.number().to_le_bytes()));
    write_places(ledger, &nodes, out);
    let none = Lines::new();
    write_lines(ledger.lines.as_ref().map_or(&none, |fair| &fair.lines), out);
    write_starts(starts, &nodes, out);
    let budgets = ledger.budgets_kept();
    write_count(out, budgets.map_or(0, |budgets| budgets.iter().count()));
    let mut last = 0;
    for (full_at, number) in budgets.iter().flat_map(|budgets| budgets.by_time()) {
        write_number(out, full_at - last);
        write_number(out, number.into());
        last = full_at;
    }
}

/// Twice the index of the process, and one more if it polls; and the lease end.
type Row = (usize, u64);

fn row_of(nodes: &Table<NodeId>, id: &PlaceId, place: Place) -> Row {
    (nodes.index(id.node) << 1 | usize::from(id.poll_only), place.lease_end)
}

/// The places as indexes into their tables, in order: those that hold come first, as if their ticket were 0.
fn write_places(ledger: &Ledger, nodes: &Table<NodeId>, out: &mut Vec<u8>) {
    let rows = Table::of(ledger.places.iter().map(|(id, place)| row_of(nodes, id, *place)));
    let mut last = Row::default();
    rows.write(out, |out, (process, lease_end)| {
        write_count(out, process);
        write_number(out, if process == last.0 { lease_end - last.1 } else { lease_end });
        last = (process, lease_end);
    });
    let terms = write_terms(ledger, out);
    let entry = |(id, place): (&PlaceId, &Place)| {
        let terms = terms.get(&Terms::of(id)).copied().unwrap_or(0);
        (place.ticket, rows.index(row_of(nodes, id, *place)), id.n, terms)
    };
    let mut entries: Vec<_> = ledger.places.iter().map(entry).collect();
    entries.sort_unstable();
    let (held, waiting) = entries.split_at(entries.partition_point(|entry| entry.0.is_none()));
    let mut last_of_row = vec![0; rows.len()];
    for entries in [held, waiting] {
        write_count(out, entries.len());
        let mut last_ticket = 0;
        for (ticket, row, n, terms) in entries {
            if let Some(ticket) = ticket {
                write_number(out, ticket - last_ticket);
                last_ticket = *ticket;
            }
            write_count(out, *row);
            write_near(out, *n, std::mem::replace(&mut last_of_row[*row], *n));
            write_count(out, *terms);
        }
    }
}

/// Writes the terms of all places in the order of their bytes. Returns the index of each.
fn write_terms(ledger: &Ledger, out: &mut Vec<u8>) -> HashMap<Terms, usize, RandomState> {
    let all = ledger.places.keys().map(|id| (Terms::of(id), 0));
    let mut indexes: HashMap<_, _, RandomState> = all.collect();
    let bytes_of = |terms: &Terms| {
        let mut bytes = Vec::new();
        terms.write(&mut bytes);
        (bytes, *terms)
    };
    let mut texts: Vec<_> = indexes.keys().map(bytes_of).collect();
    texts.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
    write_count(out, texts.len());
    for (index, (bytes, terms)) in texts.iter().enumerate() {
        out.extend(bytes);
        indexes.insert(*terms, index);
    }
    indexes
}

/// Where the lines stand that wait. A line is named by its index among these, in the order of their numbers.
fn write_lines(lines: &Lines<PlaceId>, out: &mut Vec<u8>) {
    let waiting: Table<LineId> = Table::of(lines.waiting_lines());
    let elsewhere: Vec<_> = lines.listed_elsewhere(&OfPlaces).collect();
    write_count(out, elsewhere.len());
    for (line, tenant) in elsewhere {
        waiting.write_index(out, line);
        write_number(out, tenant.number().into());
    }
    write_count(out, lines.in_turn().count());
    let mut last = 0;
    for (bits, line) in lines.in_turn() {
        write_number(out, bits - last);
        waiting.write_index(out, line);
        last = bits;
    }
    write_count(out, lines.parked().count());
    let mut last = 0;
    for (spot, code, line) in lines.parked() {
        write_number(out, u64::from(spot.number()) - last);
        write_number(out, code.bits());
        waiting.write_index(out, line);
        last = spot.number().into();
    }
    write_count(out, lines.asleep().count());
    let mut last = 0;
    for (until, line) in lines.asleep() {
        write_number(out, until - last);
        waiting.write_index(out, line);
        last = until;
    }
}

fn write_starts(starts: Option<&Starts>, nodes: &Table<NodeId>, out: &mut Vec<u8>) {
    write_count(out, starts.map_or(0, |starts| starts.iter().count()));
    let Some(starts) = starts else { return };
    write_number(out, starts.longest());
    let windows = Table::of(starts.iter().map(|(.., at, end)| end - at));
    let mut last = 0;
    windows.write(out, |out, window| {
        write_number(out, window - last);
        last = window;
    });
    let mut last_at = 0;
    let mut last_of_node = vec![0; nodes.len()];
    for (node, n, at, end) in starts.iter() {
        write_number(out, at - last_at);
        last_at = at;
        nodes.write_index(out, node);
        let last = &mut last_of_node[nodes.index(node)];
        write_near(out, n, std::mem::replace(last, n));
        windows.write_index(out, end - at);
    }
}
