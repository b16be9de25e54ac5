-- fair/answer: answer.lua for a set with tenants.
--
-- A piece of the scripts, inserted at their end, where they have `--@fair/answer`.
--
-- If only its rate keeps back the next in turn, for which a permit is free, the reply has how long, in ms, as a negative
-- number in place of the earliest lease end: call again then.
--
-- Needs     key, now, most, lease_end, in_use, queue, statuses, own; next_turn, next_head, next_cost and next_room;
--           opening_of; rejected_until: from when on a rejected newcomer's rate allows it, in us, or nil;
--           earliest, or nil if it has to be looked up

local waiting = redis.call('ZCOUNT', key, '-33554432', '(0') + queue
if waiting == 0 then
  earliest = rejected_until and -math.ceil((rejected_until - now) / 1000) or 0
else
  if in_use < most and next_turn and next_room > 0 then
    local opens, fits = opening_of(next_head, next_cost), in_use + next_cost <= next_room
    if next_cost > next_room or opens == math.huge or fits and not opens then
      earliest = 1
    elseif fits then
      earliest = -math.ceil((opens - now) / 1000)
    end
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
