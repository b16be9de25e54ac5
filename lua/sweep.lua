-- sweep: takes out places whose lease has ended, waiting or held. It begins the budget of the call: a call sweeps and
-- promotes at most 500 places, beside the ids that it names. If any of the budget is left after this piece, no dead
-- place is left.
--
-- A piece of the scripts, inserted where one has `--@sweep`, at most once. It is no function,
-- because creating one costs as much as a command.
--
-- A lowest score below any lease end shows that the set has places with a claim: see fair/acquire.lua. This script does
-- not know their members, so the call ends with 0, and the caller repeats it with the script of the same name in fair/.
-- What precedes this piece must be safe on such a set.
--
-- Needs     queued, key, now_ms
-- Leaves    swept: whether any place was taken out; earliest: the first lease end, 0 if none is left;
--           budget: how many places promotion may examine

local swept, budget = false, 500
local lowest = redis.call('ZRANGE', key, '0', '0', 'WITHSCORES')[2]
local earliest = tonumber(lowest or 0)
if lowest and earliest < 1e12 then return 0 end
if earliest > 0 and earliest <= now_ms then
  local dead = redis.call('ZRANGEBYSCORE', key, '-inf', now_ms, 'LIMIT', 0, budget)
  budget = budget - #dead
  for i = 1, #dead do dead[#dead + 1] = queued .. dead[i] end
  redis.call('ZREM', key, unpack(dead))
  swept = true
  earliest = tonumber(redis.call('ZRANGE', key, '0', '0', 'WITHSCORES')[2] or 0)
end
