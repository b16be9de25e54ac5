-- release: take places out, waiting or held, and hand what that frees to the head of the queue.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 1, permits
-- ARGV[2]   counted     1: PUBLISH tells whether a node listens; 0: it cannot (cluster)
-- ARGV[3]   node        the caller's
-- ARGV[4..] id          one or many
--
-- Returns   {0, 0, in_use, waiting, id, lease_end of own grants ...}
-- Errors    none of its own
-- Cost      3 commands while nobody waits, about 9 with a hand-over; O((ids + grants) * log n)
-- Retry     safe: an id that is not there is passed over

local key = KEYS[1]
local limit = tonumber(ARGV[1])
local counted, node = ARGV[2] == '1', ARGV[3]
local members = { unpack(ARGV, 4) }

for i = 1, #members do members[#members + 1] = 'q' .. members[i] end
redis.call('ZREM', key, unpack(members))

local in_use, waiting = count(key)
local own = {}
if waiting > 0 then
  local _, now_ms = clock()
  if sweep(key, now_ms) then in_use, waiting = count(key) end
  own, in_use, waiting = promote(key, limit, now_ms, node, counted, in_use, waiting)
end
return answer(key, 0, in_use, waiting, {}, own)
