-- answer: builds the reply of a call that gives leases.
--
-- A piece of the scripts, inserted at their end, where they have `--@answer`.
--
-- Needs     key, now, is_plain, lease_end, in_use, queue, statuses, own; earliest, or nil if it has to be looked up; what
--           again.lua needs

local waiting = is_plain and queue or queue + redis.call('ZCOUNT', key, '-33554432', '-0.000000003')
if waiting == 0 then
  earliest = 0
  -- What was asleep may have been swept.
  if asleep then asleep.first() end
else
  --@again
  local is_timed = call_again and call_again < 0
  if not call_again or is_timed and wakes then
    if not earliest then
      --@first_end
    end
    -- A lease that ends before a line wakes may serve others.
    if is_timed and earliest > 0 and earliest < now_ms - call_again then call_again = nil end
  end
  earliest = call_again or earliest
end
local reply = { lease_end, earliest, in_use, waiting, unpack(statuses) }
for i = 1, #own do reply[#reply + 1] = own[i] end
return reply
