-- release: take places out, waiting or held, and hand what that frees to the head of the queue.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 1, permits
-- ARGV[2]   counted     1: PUBLISH tells whether a node listens; 0: it cannot (cluster)
-- ARGV[3]   node        the caller's
-- ARGV[4..] id          one or many
--
-- Returns   {id, lease_end of own grants ...}
-- Errors    none of its own
-- Cost      2 commands while nobody waits, about 9 with a hand-over; O((ids + grants) * log n)
-- Retry     safe: an id that is not there is passed over

local key = KEYS[1]
local waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
if waiting == 0 then
  redis.call('ZREM', key, unpack(ARGV, 4))
  return {}
end

local limit, counted, node = tonumber(ARGV[1]), ARGV[2] == '1', ARGV[3]
--@queued
local members = { unpack(ARGV, 4) }
for i = 1, #members do members[#members + 1] = queued .. members[i] end
-- More than one member: one that waited may be among them.
if redis.call('ZREM', key, unpack(members)) > 1 then
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
  if waiting == 0 then return {} end
end
--@clock
--@sweep
if swept then waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf') end
local in_use = redis.call('ZCARD', key) - 2 * waiting
--@promote
return own
