-- inspect: who holds and who waits. Reads only; what has expired is left for the others to sweep.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   most        integer >= 1, members of each kind to list
--
-- Returns   {now in us, in_use, waiting, leases listed, id, lease_end ..., q<id>, ticket ...}
-- Errors    none of its own
-- Cost      5 commands; O(log n + members listed)
-- Retry     safe

local key, most = KEYS[1], tonumber(ARGV[1])
--@clock
local from = '(' .. string.format('%.0f', now_ms)
local waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
local in_use = redis.call('ZCARD', key) - 2 * waiting
local leases = redis.call('ZRANGEBYSCORE', key, from, '(100000000000000', 'WITHSCORES', 'LIMIT', 0, most)
local tickets = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local reply = { now, in_use, waiting, #leases / 2 }
for i = 1, #leases do reply[#reply + 1] = leases[i] end
for i = 1, #tickets do reply[#reply + 1] = tickets[i] end
return reply
