-- sweep: takes out places whose lease has ended, waiting or held. It opens the budget of the call: a call
-- sweeps and promotes 500 places at most, beside the ids that it names. While any of that is left behind
-- this piece, no dead place is left.
--
-- A piece of the scripts, put in where one says `--@sweep`; a run of statements, because to make a
-- function costs as much as a command. Each piece is put in once at the most.
--
-- A lowest score below any lease end shows places with a claim: see fair/acquire.lua. What their members are
-- is not known here, so the call ends with 0, and the caller makes it once more with the script of the same
-- name in fair/. What stands before this piece must be safe on such a set.
--
-- Needs     queued, key, now_ms
-- Leaves    swept: whether anyone was taken out; earliest: the lease end that comes first, 0 if none is left;
--           budget: how many places promotion may look at

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
