-- sweep: takes out places whose lease has ended, waiting or held, in the order of their scores. It begins the budget of
-- the call: a call sweeps and promotes at most 500 permits, beside the ids that it names; a place with further limits
-- counts as 4 more. If any of the budget is left after this piece, no dead place is left.
--
-- A piece of the scripts, inserted where one has `--@sweep`, behind `--@kind` and `--@leave`. It is no function,
-- because creating one costs as much as a command.
--
-- Needs     queued, key, now_ms, is_plain, earliest; leave, cost_of, unless is_plain
-- Leaves    swept: whether any place was taken out; earliest: the first lease end, 0 if none is left;
--           budget: how many permits promotion may grant; is_short: whether dead places may be left

local swept, budget = false, 500
repeat
  if not is_plain or swept then
    --@first_end
  end
  local is_first = not swept
  if is_first and earliest > 0 and earliest <= now_ms then
    if is_plain then
      local dead = redis.call('ZRANGEBYSCORE', key, '(33554432', string.format('%.0f', now_ms), 'LIMIT', '0', budget)
      budget = budget - #dead
      for i = 1, #dead do dead[#dead + 1] = queued .. dead[i] end
      redis.call('ZREM', key, unpack(dead))
    else
      local dead, ended = {}, { now_ms / 1000, now_ms, 1e13 + now_ms }
      for kind, from in ipairs({ '(100000000', '1000000000000', '10000000000000' }) do
        if budget > 0 then
          for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, from, ended[kind], 'LIMIT', '0', budget)) do
            -- It has one member for each of its permits.
            if budget > 0 then
              dead[#dead + 1] = id
              budget = budget - cost_of(id) - (string.byte(id, -16) == 46 and string.byte(id, -3) > 55 and 4 or 0)
            end
          end
        end
      end
      local ids, from, to, removed = dead, 1, #dead, 0
      --@take
      leave(dead, 1, #dead)
      -- Some of them may have been asleep.
      if asleep then asleep.first() end
    end
    swept = true
  end
until not (is_first and swept)
local is_short = budget <= 0
