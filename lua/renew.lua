-- renew: renew the leases of places, waiting or held. It is also the poll that makes up for a lost message, and the
-- sweep that replaces a dead holder.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, waiting places are granted while fewer permits than this are in use
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   lease_ms    integer >= 1
-- ARGV[4]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[5]   node        the caller's
-- ARGV[6..] id          one or more
--
-- Returns   lease_end if no place waits, every id holds, and no more permits are in use than the limit; else
--           {lease_end, earliest, in_use, waiting, status per id ..., id, lease_end of own grants ...}
--           earliest: the first lease end; 0 if no place waits; 1 if the bound below was reached while a permit was
--           free and a place waited: call again at once
--           status: 1 holds | a ticket (>= 1e14) waits | 0 is not present (any more)
--           The statuses are from before the grants of this call.
-- Errors    none of its own
-- Cost      8 commands while no place waits, for any number of ids; O((ids + 500) * log n): see promote.lua
-- Retry     safe: the lease counts from the last call

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[3])
local for_all, frees = ARGV[2] == '1', false
local counted, node = ARGV[4] == '1', ARGV[5]
local ids = { unpack(ARGV, 6) }
--@clock
local lease_end = now_ms + lease_ms
local score = string.format('%.0f', lease_end)
-- Sweep first: a late renewal must not bring back a place whose lease has ended.
--@queued
--@sweep
local waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')

local members = { unpack(ids) }
if waiting > 0 then
  for _, id in ipairs(ids) do members[#members + 1] = queued .. id end
end
local scores = redis.call('ZMSCORE', key, unpack(members))
local statuses, writes = {}, {}
for i, id in ipairs(ids) do
  statuses[i] = 0
  if scores[i] then
    statuses[i] = tonumber(scores[#ids + i] or 1)
    writes[#writes + 1] = score
    writes[#writes + 1] = id
  end
end
if #writes > 0 then
  -- A write that needs no memory goes first: Redis refuses a script only at its first write when memory is used up.
  redis.call('PEXPIRE', key, math.max(redis.call('PTTL', key), 3 * lease_ms + 1000))
  redis.call('ZADD', key, 'XX', unpack(writes))
end
local in_use = redis.call('ZCARD', key) - 2 * waiting
if waiting == 0 and #writes == 2 * #ids and in_use <= limit then return lease_end end

local asked, from, to = {}, 1, 0
--@promote
-- The earliest lease may be one that was just renewed.
earliest = nil
--@answer
