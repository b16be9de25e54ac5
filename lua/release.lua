-- release: take out places, waiting or held, and grant the freed permits to those that wait. Members: see acquire.lua.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, waiting places are granted while fewer permits than this are in use
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   headroom    integer >= 0, permits that are reserved for class 0; -1: none of the ids has a claim
-- ARGV[4]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[5]   node        the caller's
-- ARGV[6..] id          any number, see used.lua; with none the call only sweeps and promotes
--
-- Returns   {id, lease_end of own grants ...}, and 1 as the last item if the bound below was reached while a
--           permit was free and a place that could have it waited: call again at once; or -ms if only its rate or its
--           budgets keep back the next in turn: call again then
-- Errors    none of its own
-- Cost      2 commands while no place waits, 3 if the only id used no more of one budget than it took; about 9 with a
--           hand-over in a plain set, about 12 from line to line; O((ids + 500) * log n): see promote.lua
-- Retry     safe: an id that is not present is ignored

local key = KEYS[1]
local last = #ARGV
local claims = ARGV[3] ~= '-1'
local headroom = claims and tonumber(ARGV[3]) or 0
local waiting, all, turn, units
if not claims then
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
  if waiting == 0 then
    if last > 5 then redis.call('ZREM', key, unpack(ARGV, 6)) end
    return {}
  end
end
--@queued
local removed, held = 0, false
if claims then
  local id, sub = ARGV[last], string.sub
  if last == 6 and sub(id, -20, -17) == '001=' then
    -- The most frequent place that settles: one permit, class 0, one budget, of which it used some and no more than it
    -- took. As in used.lua; but a budget that time has filled meanwhile keeps its member: so this needs no clock.
    local at, used = string.find(id, '$', 13, true), tonumber(sub(id, -16, -9), 36)
    local back = tonumber(sub(id, at + 6, at + 13), 36) - used
    if used > 0 and back >= 0 and sub(id, -8) == '00000000'
      and redis.call('ZCOUNT', key, '100000000000000', '+inf') == 0 then
      -- No place waits, so it holds, or is not there. Without a tenant, it has no other member.
      local budget, nobodys = 'b' .. sub(id, at + 1, at + 5), sub(id, -32, -28) == '00000'
      id = sub(id, 1, -18)
      if (nobodys and redis.call('ZREM', key, id) or redis.call('ZREM', key, id, queued .. id)) > 0 then
        back = string.format('%d.%09d', back / 8388608, back % 8388608 * (1e9 / 8388608))
        redis.call('ZADD', key, 'XX', 'INCR', back, budget)
      end
      return {}
    end
  end
  local ids, from, to = ARGV, 6, last
  --@used
end
if last == 6 and (not claims or string.sub(ARGV[last], -2) == '01' and string.byte(ARGV[last], -3) < 56) then
  -- One place of one permit, without further limits.
  removed = redis.call('ZREM', key, ARGV[last], queued .. ARGV[last])
else
  local ids, from, to = ARGV, 6, last
  --@take
  held = removed == count
end
if claims then
  turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
  if not turn[1] then return {} end
elseif removed > 1 then
  -- More than one member was removed: a waiting place may be among them.
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
  if waiting == 0 then return {} end
end

local limit = tonumber(ARGV[1])
local for_all, frees = ARGV[2] == '1', true
local counted, node = ARGV[4] == '1', ARGV[5]
--@clock
--@kind
local line_of, cost_of, lease_of, settle, leave, further, asleep, room_of, never_fits, opening_of, start, undo, charges
local silent_before
if not is_plain then
  -- A write that needs no memory goes first: Redis refuses a script only at its first write when memory is used up.
  if last == 5 then redis.call('ZREM', key, '') end
  --@claim
  --@settle
  --@leave
  --@room
  -- Most places have neither a rate nor budgets.
  function start() end
  undo = start
  function opening_of(member, cost)
    if not (string.find(member, '/', 13, true) or string.find(member, '$', 13, true)) then return nil end
    --@rate
    return opening_of(member, cost)
  end
  turn = leave(ARGV, 6, claims and last or 5, turn, false, held)
  if asleep then turn = asleep.rouse() end
  if turn and not turn[1] then return {} end
end
--@sweep
if swept then waiting, turn = nil, nil end
--@survey
local asked = {}
--@promote
--@again
own[#own + 1] = call_again
return own
