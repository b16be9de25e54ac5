-- inspect: who holds and who waits. Reads only; what has expired is left for the others to sweep.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   most        integer >= 1, members of each kind to list
--
-- Returns   {now in us, in_use, waiting, leases listed, id, lease_end ..., q<id>, ticket ...}
-- Errors    none of its own
-- Cost      5 commands; O(log n + members listed)
-- Retry     safe

--@prelude

local key, most = KEYS[1], tonumber(ARGV[1])
local now, now_ms = clock()
local in_use, waiting = count(key)
local leases = redis.call('ZRANGEBYSCORE', key, '(' .. string.format('%.0f', now_ms), TICKET, 'WITHSCORES', 'LIMIT', 0, most)
local tickets = redis.call('ZRANGEBYSCORE', key, TICKET, '+inf', 'WITHSCORES', 'LIMIT', 0, most)
local reply = { now, in_use, waiting, #leases / 2 }
for i = 1, #leases do reply[#reply + 1] = leases[i] end
for i = 1, #tickets do reply[#reply + 1] = tickets[i] end
return reply
