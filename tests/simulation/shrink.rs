//! Makes the plan of a failed run smaller while it still fails.

use crate::plan::Plan;

/// Makes a plan smaller. `fails` returns whether a plan fails like the first one, and is called at most `most`
/// times.
pub fn shrink(plan: &Plan, most: usize, mut fails: impl FnMut(&Plan) -> bool) -> Plan {
    let mut best = plan.clone();
    let mut left = most;
    let mut attempt = |plan: Plan, best: &mut Plan| {
        if left == 0 || plan == *best {
            return false;
        }
        left -= 1;
        let smaller = fails(&plan);
        if smaller {
            *best = plan;
        }
        smaller
    };
    loop {
        let before = best.clone();
        for process in (0..best.processes).rev() {
            let mut plan = best.clone();
            plan.requests.retain(|request| request.process != process);
            plan.operations.retain(|operation| operation.process != process);
            plan.faults.retain(|fault| fault.process != process);
            attempt(plan, &mut best);
        }
        for name in (0..best.names).rev() {
            let mut plan = best.clone();
            plan.requests.retain(|request| request.name != name);
            plan.operations.retain(|operation| operation.name != name);
            attempt(plan, &mut best);
        }
        pieces(&mut best, |plan| &mut plan.faults, &mut attempt);
        pieces(&mut best, |plan| &mut plan.operations, &mut attempt);
        pieces(&mut best, |plan| &mut plan.requests, &mut attempt);
        drop_last_process(&mut best, &mut attempt);
        if best == before {
            return best;
        }
    }
}

/// Removes smaller and smaller pieces of a list.
fn pieces<T: Clone>(
    best: &mut Plan,
    list: impl Fn(&mut Plan) -> &mut Vec<T>,
    attempt: &mut impl FnMut(Plan, &mut Plan) -> bool,
) {
    let mut size = list(best).len().div_ceil(2);
    while size > 0 {
        let mut from = 0;
        while from < list(best).len() {
            let mut plan = best.clone();
            let items = list(&mut plan);
            let to = (from + size).min(items.len());
            items.drain(from..to);
            if !attempt(plan, best) {
                from += size;
            }
        }
        size = if size == 1 { 0 } else { size.div_ceil(2) };
    }
}

fn drop_last_process(best: &mut Plan, attempt: &mut impl FnMut(Plan, &mut Plan) -> bool) {
    while best.processes > 1 {
        let last = best.processes - 1;
        let used = best.requests.iter().any(|request| request.process == last)
            || best.operations.iter().any(|operation| operation.process == last)
            || best.faults.iter().any(|fault| fault.process == last);
        let mut plan = best.clone();
        plan.processes = last;
        plan.policies.pop();
        if used || !attempt(plan, best) {
            return;
        }
    }
}
