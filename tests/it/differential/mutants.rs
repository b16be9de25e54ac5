//! Scripts that do otherwise than the ledger, each of which must be found out.

use tower_semaphore::protocol::WORK_MAX;

use super::wire::Lua;
use super::{Of, SMALL_WORK, history, run};

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
        let found = run(&lua, 3000, 0, &history(Of::Plain, 1..=4, 50..=90));
        assert!(found.is_err(), "not found out: {file}, {instead:?} for {text:?}");
    }
}
