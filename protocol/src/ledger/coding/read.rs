//! Reads a ledger.

use super::numbers::{Reader, Rising};
use super::table::Known;
use super::terms::Terms;
use super::{DecodeError, OLDEST_WRITER, VERSION};
use crate::bound_rate::BoundRate;
use crate::charge::Charge;
use crate::claim::{LineId, Tenant};
use crate::id::{NodeId, PlaceId};
use crate::ledger::budgets::Budgets;
use crate::ledger::fair::OfPlaces;
use crate::ledger::starts::Starts;
use crate::ledger::{LINE_MAX, Ledger, TICKET_MIN};
use crate::lines::{Code, Lines, Spot, Standing, TURNS};

pub(super) fn read(bytes: &[u8]) -> Result<Ledger, DecodeError> {
    let reader = &mut Reader::new(bytes);
    read_version(reader)?;
    let mut nodes = read_nodes(reader)?;
    let mut ledger = Ledger::new();
    // Places lower it to the first lease end of all.
    ledger.quiet_until = u64::MAX;
    read_places(reader, &mut nodes, &mut ledger)?;
    let mut none = Lines::new();
    read_lines(reader, ledger.lines.as_mut().map_or(&mut none, |fair| &mut fair.lines))?;
    ledger.starts = read_starts(reader, &mut nodes)?.map(Box::new);
    ledger.budgets = read_budgets(reader)?.map(Box::new);
    nodes.end(reader)?;
    reader.end()?;
    Ok(ledger)
}

fn read_version(reader: &mut Reader<'_>) -> Result<(), DecodeError> {
    match reader.bytes()? {
        [VERSION, OLDEST_WRITER] => Ok(()),
        [version, oldest_writer] => Err(DecodeError::Version { version, oldest_writer }),
    }
}

fn read_nodes(reader: &mut Reader<'_>) -> Result<Known<NodeId>, DecodeError> {
    let (mut nodes, mut rising) = (Known::new("process"), Rising::new("id of a process"));
    for _ in 0..reader.count("number of processes", 8)? {
        let number = u64::from_le_bytes(reader.bytes()?);
        rising.next(reader, number, number)?;
        nodes.push(NodeId::new(number));
    }
    Ok(nodes)
}

/// What the places of a row have in common.
#[derive(Clone, Copy)]
struct Row {
    node: NodeId,
    poll_only: bool,
    lease_end: u64,
    /// The number of the last place that was read.
    last: u64,
}

fn read_rows(
    reader: &mut Reader<'_>,
    nodes: &mut Known<NodeId>,
) -> Result<Known<Row>, DecodeError> {
    let (mut rows, mut rising) = (Known::new("row"), Rising::new("row of a process"));
    let (mut last, mut last_end) = (None, 0);
    for _ in 0..reader.count("number of rows", 2)? {
        let key = reader.number("process")?;
        let (_, node) = nodes.take(reader, key >> 1)?;
        let before = if last.replace(key) == Some(key) { last_end } else { 0 };
        let lease_end = reader.above("lease end", before)?;
        rising.next(reader, (key, lease_end), key)?;
        rows.push(Row { node, poll_only: key & 1 == 1, lease_end, last: 0 });
        last_end = lease_end;
    }
    Ok(rows)
}

fn read_terms(reader: &mut Reader<'_>) -> Result<Known<Terms>, DecodeError> {
    let (mut known, mut rising) = (Known::new("terms"), Rising::new("terms"));
    for index in 0..reader.count("number of terms", Terms::LEAST)? {
        let start = reader.at();
        let terms = Terms::read(reader)?;
        rising.next(reader, reader.since(start), index)?;
        known.push(terms);
    }
    Ok(known)
}

fn read_places(
    reader: &mut Reader<'_>,
    nodes: &mut Known<NodeId>,
    ledger: &mut Ledger,
) -> Result<(), DecodeError> {
    let mut rows = read_rows(reader, nodes)?;
    let mut terms = read_terms(reader)?;
    let mut rising = Rising::new("number of a place");
    for _ in 0..reader.count("number of places that hold", 3)? {
        read_place(reader, &mut rows, &mut terms, None, &mut rising, ledger)?;
    }
    let mut rising = Rising::new("number of a place");
    let mut ticket = 0;
    for _ in 0..reader.count("number of places that wait", 4)? {
        ticket = reader.above("ticket", ticket)?;
        read_place(reader, &mut rows, &mut terms, Some(ticket), &mut rising, ledger)?;
    }
    rows.end(reader)?;
    terms.end(reader)
}

/// What places are ordered by: ticket, row, number and terms.
type Order = (Option<u64>, usize, u64, usize);

fn read_place(
    reader: &mut Reader<'_>,
    rows: &mut Known<Row>,
    terms: &mut Known<Terms>,
    ticket: Option<u64>,
    rising: &mut Rising<Order>,
    ledger: &mut Ledger,
) -> Result<(), DecodeError> {
    let (at, row) = rows.read(reader)?;
    let n = reader.near("number of a place", row.last)?;
    if n >= PlaceId::N_MAX {
        let expected = format!("below {}", PlaceId::N_MAX);
        return Err(reader.malformed("number of a place", n, expected));
    }
    rows.set(at, Row { last: n, ..row });
    let (index, Terms { bound, claim }) = terms.read(reader)?;
    rising.next(reader, (ticket, at, n, index), n)?;
    let id = PlaceId { node: row.node, poll_only: row.poll_only, n, bound, claim };
    let in_line = TICKET_MIN + 1..=TICKET_MIN + LINE_MAX;
    if let Some(ticket) = ticket.filter(|ticket| id.line().is_some() && !in_line.contains(ticket)) {
        let expected = format!("{} to {} in a line", in_line.start(), in_line.end());
        return Err(reader.malformed("ticket", ticket, expected));
    }
    if ledger.places.contains_key(&id) {
        return Err(reader.malformed("number of a place", n, "each place once"));
    }
    ledger.put(id, row.lease_end, ticket);
    Ok(())
}

fn read_lines(reader: &mut Reader<'_>, lines: &mut Lines<PlaceId>) -> Result<(), DecodeError> {
    lines.settled_elsewhere(&OfPlaces);
    let mut waiting = Known::new("line");
    lines.waiting_lines().for_each(|line| waiting.push(line));
    read_listed_elsewhere(reader, &waiting, lines)?;
    read_turns(reader, &mut waiting, lines)?;
    read_parked(reader, &mut waiting, lines)?;
    let (mut until, mut rising) = (0, Rising::new("line"));
    for _ in 0..reader.count("number of lines that are asleep", 2)? {
        until = reader.above("time of a line", until)?;
        let (at, line) = waiting.read_once(reader)?;
        rising.next(reader, (until, at), at as u64)?;
        lines.restore(line, Standing::Asleep(until));
    }
    waiting.end(reader)
}

fn read_listed_elsewhere(
    reader: &mut Reader<'_>,
    waiting: &Known<LineId>,
    lines: &mut Lines<PlaceId>,
) -> Result<(), DecodeError> {
    let mut rising = Rising::new("line");
    for _ in 0..reader.count("number of lines listed elsewhere", 2)? {
        let (at, line) = waiting.look(reader)?;
        rising.next(reader, at, at as u64)?;
        let number = reader.within("number of a tenant", 0..=Tenant::MAX.into())?;
        let tenant = Tenant::of_number(number).unwrap_or(Tenant::NOBODY);
        if !line.is_further() || !lines.list_under(line, tenant) {
            let expected =
                "another tenant than that of the first place, of a line with further limits";
            return Err(reader.malformed("number of a tenant", number, expected));
        }
    }
    Ok(())
}

fn read_turns(
    reader: &mut Reader<'_>,
    waiting: &mut Known<LineId>,
    lines: &mut Lines<PlaceId>,
) -> Result<(), DecodeError> {
    let (mut bits, mut rising) = (0, Rising::new("line"));
    for _ in 0..reader.count("number of turns", 2)? {
        bits = reader.above("turn", bits)?;
        let (least, most) = TURNS;
        if !(least..=most).contains(&bits) {
            return Err(reader.malformed("turn", bits, format!("{least} to {most}")));
        }
        let (at, line) = waiting.read_once(reader)?;
        rising.next(reader, (bits, at), at as u64)?;
        lines.restore(line, Standing::InTurn(bits));
    }
    Ok(())
}

fn read_parked(
    reader: &mut Reader<'_>,
    waiting: &mut Known<LineId>,
    lines: &mut Lines<PlaceId>,
) -> Result<(), DecodeError> {
    let (mut number, mut rising) = (0, Rising::new("line"));
    for _ in 0..reader.count("number of lines that are parked", 3)? {
        number = reader.above("limit of a parked line", number)?;
        let no_spot = "the number of a tenant, or 2^24 and that of a further limit";
        let spot = Spot::of_number(number);
        let spot =
            spot.ok_or_else(|| reader.malformed("limit of a parked line", number, no_spot))?;
        let bits = reader.number("turn of a parked line")?;
        let code = Code::of_bits(bits);
        let code =
            code.ok_or_else(|| reader.malformed("turn of a parked line", bits, "36 bits"))?;
        let (at, line) = waiting.read_once(reader)?;
        if !line.is_further() {
            let expected = "one with further limits, as it is parked";
            return Err(reader.malformed("line", at as u64, expected));
        }
        rising.next(reader, (spot, code, at), at as u64)?;
        lines.restore(line, Standing::Parked(spot, code));
    }
    Ok(())
}

fn read_starts(
    reader: &mut Reader<'_>,
    nodes: &mut Known<NodeId>,
) -> Result<Option<Starts>, DecodeError> {
    let count = reader.count("number of starts", 4)?;
    if count == 0 {
        return Ok(None);
    }
    let longest = reader.number("time for which starts are kept")?;
    let mut windows = read_windows(reader, longest)?;
    let mut starts = Starts::kept_for(longest);
    let mut last_of_node = vec![0; nodes.len()];
    let mut at = 0;
    for _ in 0..count {
        at = reader.above("time of a start", at)?;
        let (index, node) = nodes.read(reader)?;
        let n = reader.near("number of a started place", last_of_node[index])?;
        last_of_node[index] = n;
        if n >= PlaceId::N_MAX {
            let expected = format!("below {}", PlaceId::N_MAX);
            return Err(reader.malformed("number of a started place", n, expected));
        }
        let (_, window) = windows.read(reader)?;
        let end = at.checked_add(window);
        let end = end.ok_or_else(|| reader.malformed("time of a start", at, "less"))?;
        if !starts.restore(node, n, at, end) {
            let expected = "the starts of a place together";
            return Err(reader.malformed("number of a started place", n, expected));
        }
    }
    windows.end(reader)?;
    Ok(Some(starts))
}

fn read_windows(reader: &mut Reader<'_>, longest: u64) -> Result<Known<u64>, DecodeError> {
    let (mut windows, mut rising) = (Known::new("window"), Rising::new("window"));
    let most = u64::try_from(BoundRate::WINDOW_MAX.as_micros()).unwrap_or(0).min(longest);
    let mut window = 0;
    for _ in 0..reader.count("number of windows", 1)? {
        window = reader.above("window", window)?;
        rising.next(reader, window, window)?;
        if window > most {
            return Err(reader.malformed("window", window, format!("at most {most}")));
        }
        windows.push(window);
    }
    Ok(windows)
}

fn read_budgets(reader: &mut Reader<'_>) -> Result<Option<Budgets>, DecodeError> {
    let mut budgets = Budgets::default();
    let (mut full_at, mut rising) = (0, Rising::new("number of a budget"));
    for _ in 0..reader.count("number of budgets", 2)? {
        full_at = reader.above("time of a budget", full_at)?;
        let number = reader.within_u32("number of a budget", 1..=u32::MAX)?;
        rising.next(reader, (full_at, number), number.into())?;
        if !Charge::is_number(number) || !budgets.restore(number, full_at) {
            let expected = "that of a budget, once";
            return Err(reader.malformed("number of a budget", number.into(), expected));
        }
    }
    Ok(Some(budgets).filter(|budgets| !budgets.is_empty()))
}
