-- fair/answer: answer.lua for a set with tenants.
--
-- A piece of the scripts, inserted at their end, where they have `--@fair/answer`.
--
-- Needs     key, most, lease_end, in_use, queue, statuses, own; next_turn, next_cost and next_room;
--           earliest, or nil if it has to be looked up

local waiting = redis.call('ZCOUNT', key, '-inf', '(0') + queue
if waiting == 0 then
  earliest = 0
else
  if in_use < most and next_turn then
    if next_room > 0 and (next_cost > next_room or in_use + next_cost <= next_room) then earliest = 1 end
  end
  if not earliest then
    -- Leases without a claim come first by score, even if they end later.
    local ended = redis.call('ZRANGEBYSCORE', key, '(33554432', '(100000000000000', 'WITHSCORES', 'LIMIT', '0', '1')
    earliest = tonumber(ended[2])
    if earliest >= 1e13 then
      earliest = earliest - 1e13
    else
      ended = redis.call('ZRANGEBYSCORE', key, '10000000000000', '(100000000000000', 'WITHSCORES', 'LIMIT', '0', '1')
      if ended[2] then earliest = math.min(earliest, tonumber(ended[2]) - 1e13) end
    end
  end
end
local reply = { lease_end, earliest, in_use, waiting, unpack(statuses) }
for i = 1, #own do reply[#reply + 1] = own[i] end
return reply
