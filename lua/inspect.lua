-- inspect: list the places that hold and that wait, and tell how much of a rate is used. Reads only; other scripts
-- sweep expired places.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   most        integer >= 1, members of each kind to list
-- ARGV[2]   starts      integer >= 0, the most grants in a window of the rate; 0: it is that of the last of the listed
--                       places that has one
-- ARGV[3]   window      of the rate, in us; read if there are starts
--
-- Returns   {now in us, in_use, waiting, leases listed, starts, window, started, opening, budgets listed, id,
--           lease_end ..., b<g>, score ..., q<id>, ticket ...}
--           starts, window: of the rate; starts is 0 if there is none. started: the permits that were granted in the
--           window that ends now. opening: from when on the rate allows one more, in us; 0: now. Budgets: up to 100
--           that are not full, see charges.lua
--           ticket is the raw score, and so is lease_end of a place with a tenant: see acquire.lua; others are in ms.
--           Up to `most` places with a tenant are listed after those without a claim, and up to `most` with a claim
--           alone after these; one with a tenant that holds has the score of its permit instead of a ticket
-- Errors    none of its own
-- Cost      7 commands, 4 more with tenants, 1 more with a rate, 1 more if it allows no start now;
--           O(log n + members listed + starts)
-- Retry     safe

local key, most = KEYS[1], tonumber(ARGV[1])
local starts, window = tonumber(ARGV[2]), tonumber(ARGV[3])
--@clock
local from = '(' .. string.format('%.0f', now_ms)
local waiting = redis.call('ZCOUNT', key, '100000000000000', '(4503599627370496')
local in_use = redis.call('ZCOUNT', key, '(33554432', '(10000000000000') - waiting
local leases = redis.call('ZRANGEBYSCORE', key, from, '(20000000000000', 'WITHSCORES', 'LIMIT', 0, most)
local tickets = redis.call('ZRANGEBYSCORE', key, '100000000000000', '(4503599627370496', 'WITHSCORES', 'LIMIT', 0, most)
-- Places with a claim have the highest lease scores: they are at the end of the list, unless it was full before them.
local count = #leases
if count == 2 * most or count > 0 and tonumber(leases[count]) >= 1e13 then
  while count > 0 and tonumber(leases[count]) >= 1e13 do count = count - 2 end
  local running = '(' .. string.format('%.0f', 1e13 + now_ms)
  local fair = redis.call('ZRANGEBYSCORE', key, running, '(20000000000000', 'WITHSCORES', 'LIMIT', 0, most)
  in_use = in_use + redis.call('ZCOUNT', key, '1', '33554432')
  waiting = waiting + redis.call('ZCOUNT', key, '-33554432', '-0.000000003')
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
local running = '(' .. string.format('%.17g', now_ms / 1000)
local nobodys = redis.call('ZRANGEBYSCORE', key, running, '(1000000000000', 'WITHSCORES', 'LIMIT', 0, most)
for i = 1, #nobodys, 2 do
  leases[#leases + 1] = nobodys[i]
  leases[#leases + 1] = string.format('%.0f', nobodys[i + 1] * 1000)
end
for i = #leases - 1, 1, -2 do
  local at = starts == 0 and string.find(leases[i], '/', 13, true)
  if at then
    starts = tonumber(string.sub(leases[i], at + 1, at + 3), 36)
    window = tonumber(string.sub(leases[i], at + 4, at + 11), 36)
    -- Another program wrote the id.
    if not (starts and window) then starts, window = 0, 0 end
  end
end
local started, opening = 0, 0
if starts > 0 then
  -- See rate.lua. A start that is more than a second ahead counts for none: the clock has stepped back since.
  local latest, left = (now + 1e6) / -1e6, '(' .. string.format('%.17g', (window - now) / 1e6)
  started = redis.call('ZCOUNT', key, latest, left)
  if started >= starts then
    local score = redis.call('ZRANGEBYSCORE', key, latest, left, 'WITHSCORES', 'LIMIT', starts - 1, 1)[2]
    opening = math.floor(-score * 1e6 + 0.5) + window
  end
end
local left = '(' .. string.format('%.17g', now / -8388608)
local budgets = redis.call('ZRANGEBYSCORE', key, '-536870912', left, 'WITHSCORES', 'LIMIT', 0, 100)
local reply = { now, in_use, waiting, #leases / 2, starts, window, started, opening, #budgets / 2 }
for i = 1, #leases do reply[#reply + 1] = leases[i] end
for i = 1, #budgets do reply[#reply + 1] = budgets[i] end
for i = 1, #tickets do reply[#reply + 1] = tickets[i] end
return reply
