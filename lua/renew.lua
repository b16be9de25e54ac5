-- renew: renew the leases of places, waiting or held. It is also the poll that makes up for a lost message, and the
-- sweep that replaces a dead holder. Members: see acquire.lua.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, waiting places are granted while fewer permits than this are in use
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   headroom    integer >= 0, permits that are reserved for class 0; -1: none of the ids has a claim
-- ARGV[4]   lease_ms    integer >= 1
-- ARGV[5]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[6]   node        the caller's
-- ARGV[7..] id          one or more
--
-- Returns   lease_end if no place waits, every id holds, and no more permits are in use than the limit; else
--           {lease_end, earliest, in_use, waiting, status per id ..., id, lease_end of own grants ...}
--           earliest: the first lease end; 0 if no place waits; 1 if the bound below was reached while a permit was
--           free and a place that could have it waited: call again at once
--           status: 1 holds | a ticket (>= 1e14) waits | 0 is not present (any more)
--           The statuses are from before the grants of this call.
-- Errors    none of its own
-- Cost      8 commands while no place waits, for any number of ids; O((ids + 500) * log n): see promote.lua
-- Retry     safe: the lease counts from the last call

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[4])
local claims = ARGV[3] ~= '-1'
local headroom = claims and tonumber(ARGV[3]) or 0
local for_all, frees = ARGV[2] == '1', false
local counted, node = ARGV[5] == '1', ARGV[6]
local ids = { unpack(ARGV, 7) }
--@clock
local lease_end = now_ms + lease_ms
--@lease
-- Sweep first: a late renewal must not bring back a place whose lease has ended.
--@queued
--@kind
local line_of, cost_of, lease_of, settle, leave, further, asleep, room_of, never_fits, opening_of, start, undo, charges
local silent_before
if not is_plain then
  --@claim
  --@settle
  --@leave
  --@room
  --@rate
end
--@sweep
local all, waiting, turn, units
if is_plain then
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
else
  turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
end
local is_quiet = waiting == 0 or turn and not turn[1]

local members, count = { unpack(ids) }, #ids
if not is_quiet then
  for i, id in ipairs(ids) do members[count + i] = queued .. id end
end
local scores = redis.call('ZMSCORE', key, unpack(members))
local statuses, writes = {}, {}
-- The lines of waiting places.
local lines, turns, seen = {}, {}, {}
for i, id in ipairs(ids) do
  local status, stands = 0, scores[count + i]
  if scores[i] then
    local digits, score = claims and line_of(id), plain_score
    status = tonumber(stands or 1)
    if not digits then
      if claims and string.byte(id, -16) == 46 then score = nobodys_score end
    else
      status, score = 1, tenants_score
      if stands and tonumber(stands) < 0 then
        status = 1e14 + (stands + tonumber(digits, 36)) * 268435456
        if not seen[digits] then
          seen[digits] = true
          lines[#lines + 1] = digits
          turns[#lines] = 't' .. digits
        end
      end
    end
    writes[#writes + 1] = score
    writes[#writes + 1] = id
  end
  statuses[i] = status
end
if #writes > 0 then
  -- A write that needs no memory goes first: Redis refuses a script only at its first write when memory is used up.
  redis.call('PEXPIRE', key, math.max(redis.call('PTTL', key), 3 * lease_ms + 1000))
  redis.call('ZADD', key, 'XX', unpack(writes))
elseif not is_plain then
  redis.call('ZREM', key, '')
end
if is_plain then
  all = redis.call('ZCARD', key)
  if is_quiet and #writes == 2 * count and all <= limit then return lease_end end
elseif is_quiet and #writes == 2 * count and redis.call('ZCOUNT', key, '0', '(10000000000000') <= limit then
  return lease_end
end

-- Lines that are parked are looked after by further.lua.
if not is_plain then leave(ids, 1, 0) end
if #lines > 0 then
  local bursts = nil
  turns = redis.call('ZMSCORE', key, unpack(turns))
  for i, digits in ipairs(lines) do
    local turn_before = tonumber(turns[i] or 0)
    local is_far = false
    if turn_before < -33554432 then
      bursts = bursts or asleep.bursts(ids, scores)
      is_far = asleep.opening(turn_before) > now + 2 * bursts[digits] + 1000000
    end
    if turn_before == math.huge or is_far then
      -- Settle lines again that are stopped, because the limit may have changed; or asleep for longer than their budgets
      -- can need, because the clock has stepped back since.
      if tonumber(digits, 36) < 16777216 then settle(digits) else further.settle(digits, turns[i]) end
      turn = nil
    elseif further and turn_before < 0 and turn_before > -33554432 then
      if further.renewed(digits, turns[i]) then turn = nil end
    end
  end
end
if asleep then turn = asleep.rouse() end
--@survey
local asked = {}
-- Waiting places are renewed each second; where lengths of leases differ, more or fewer are examined. After an outage all
-- have missed renewals: then others get time to come back. In a cluster, listeners cannot be counted.
for i = 1, counted and count or 0 do
  local stands = scores[count + i]
  local waits = stands and (tonumber(stands) < 0 or tonumber(stands) >= 1e14)
  if waits and scores[i] and tonumber(is_plain and scores[i] or lease_of(ids[i], scores[i])) >= lease_end - 2000 then
    silent_before = lease_end - 2000
    break
  end
end
--@promote
-- The earliest lease may be one that was just renewed.
earliest = nil
--@answer
