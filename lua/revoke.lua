-- revoke: take out a place, waiting or held, for an operator. The caller does not know the limit, so this grants
-- nothing: override.lua notifies all processes, and those with waiting places call again. Members: see acquire.lua.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   id          the place
-- ARGV[2]   take        1: take it out; 0: only look it up
--
-- Returns   how much of its lease is left, or would be, in ms; -1 if it is not present
-- Errors    none of its own
-- Cost      3 commands; with a claim 4, 2 more if its tenant waits; with further limits see further.lua; O(log n)
-- Retry     safe

local key = KEYS[1]
local id, take = ARGV[1], ARGV[2] == '1'
--@clock
--@queued
local lease_end = redis.call('ZMSCORE', key, id)[1]
if not lease_end then return -1 end
local line_of, cost_of, lease_of, settle, leave, further, asleep
--@claim
if take then
  if string.byte(id, -16) == 46 then
    --@settle
    --@leave
    local ids, from, to, removed = { id }, 1, 1, 0
    --@take
    leave(ids, 1, 1)
    if asleep then asleep.first() end
  else
    redis.call('ZREM', key, id, queued .. id)
  end
end
return math.max(lease_of(id, lease_end) - now_ms, 0)
