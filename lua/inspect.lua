-- inspect: list the places that hold and that wait. Reads only; other scripts sweep expired places.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   most        integer >= 1, members of each kind to list
--
-- Returns   {now in us, in_use, waiting, leases listed, id, lease_end ..., q<id>, ticket ...}
--           lease_end and ticket are raw scores; see fair/acquire.lua for those of places with a claim. Up to `most`
--           of these are listed after the others; one that holds has the score of its permit instead of a ticket
-- Errors    none of its own
-- Cost      5 commands, 4 more with tenants; O(log n + members listed)
-- Retry     safe

local key, most = KEYS[1], tonumber(ARGV[1])
--@clock
local from = '(' .. string.format('%.0f', now_ms)
local waiting = redis.call('ZCOUNT', key, '100000000000000', '(4503599627370496')
local in_use = redis.call('ZCOUNT', key, '(33554432', '(10000000000000') - waiting
local leases = redis.call('ZRANGEBYSCORE', key, from, '(100000000000000', 'WITHSCORES', 'LIMIT', 0, most)
local tickets = redis.call('ZRANGEBYSCORE', key, '100000000000000', '(4503599627370496', 'WITHSCORES', 'LIMIT', 0, most)
-- Places with a claim have the highest lease scores: they are at the end of the list, unless it was full before them.
local count = #leases
if count == 2 * most or count > 0 and tonumber(leases[count]) >= 1e13 then
  while count > 0 and tonumber(leases[count]) >= 1e13 do count = count - 2 end
  local running = '(' .. string.format('%.0f', 1e13 + now_ms)
  local fair = redis.call('ZRANGEBYSCORE', key, running, '(100000000000000', 'WITHSCORES', 'LIMIT', 0, most)
  in_use = in_use + redis.call('ZCOUNT', key, '1', '33554432')
  waiting = waiting + redis.call('ZCOUNT', key, '-33554432', '(0')
  for i = #leases, count + 1, -1 do leases[i] = nil end
  --@queued
  for i = 1, #fair, 2000 do
    local members = {}
    for j = i, math.min(i + 1998, #fair - 1), 2 do members[#members + 1] = queued .. fair[j] end
    for j, score in ipairs(redis.call('ZMSCORE', key, unpack(members))) do
      tickets[#tickets + 1] = members[j]
      tickets[#tickets + 1] = score
    end
  end
  for i = 1, #fair do leases[#leases + 1] = fair[i] end
end
local reply = { now, in_use, waiting, #leases / 2 }
for i = 1, #leases do reply[#reply + 1] = leases[i] end
for i = 1, #tickets do reply[#reply + 1] = tickets[i] end
return reply
