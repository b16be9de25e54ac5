-- fair/sweep: sweep.lua for a set with tenants. Places without a claim are swept first.
--
-- A piece of the scripts, inserted where one has `--@fair/sweep`, behind `--@fair/settle`.
--
-- Needs     key, now_ms, remove
-- Leaves    swept: whether any place was taken out; earliest: the first lease end, 0 if none is left;
--           budget: how many permits promotion may grant

local swept, budget = false, 500
local earliest
repeat
  local lowest = redis.call('ZRANGEBYSCORE', key, '(33554432', '(100000000000000', 'WITHSCORES', 'LIMIT', '0', '1')[2]
  earliest = tonumber(lowest or 0)
  local plain = earliest
  if earliest >= 1e13 then
    earliest = earliest - 1e13
  elseif lowest then
    lowest = redis.call('ZRANGEBYSCORE', key, '10000000000000', '(100000000000000', 'WITHSCORES', 'LIMIT', '0', '1')[2]
    if lowest then earliest = math.min(plain, tonumber(lowest) - 1e13) end
  end
  local again = false
  if earliest > 0 and earliest <= now_ms and not swept then
    local dead = {}
    if plain <= now_ms then
      dead = redis.call('ZRANGEBYSCORE', key, '(33554432', string.format('%.0f', now_ms), 'LIMIT', '0', budget)
    end
    budget = budget - #dead
    if budget > 0 then
      local ended = string.format('%.0f', 1e13 + now_ms)
      for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '10000000000000', ended, 'LIMIT', '0', budget)) do
        -- It has one member for each of its permits.
        if budget > 0 then
          dead[#dead + 1] = id
          budget = budget - tonumber(string.sub(id, -2), 36)
        end
      end
    end
    remove(dead)
    swept, again = true, true
  end
until not again
