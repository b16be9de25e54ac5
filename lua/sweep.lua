-- sweep: takes out places whose lease has ended, waiting or held.
--
-- A piece of the scripts, put in where one says `--@sweep`; a run of statements, because to make a
-- function costs as much as a command. Each piece is put in once at the most.
--
-- Needs     queued, key, now_ms
-- Leaves    swept: whether anyone was taken out; earliest: the lease end that comes first, 0 if none is left

local swept = false
local earliest = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
if earliest > 0 and earliest <= now_ms then
  local dead = redis.call('ZRANGEBYSCORE', key, '-inf', now_ms, 'LIMIT', 0, 1000)
  for i = 1, #dead do dead[#dead + 1] = queued .. dead[i] end
  redis.call('ZREM', key, unpack(dead))
  swept = true
  earliest = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2] or 0)
end
