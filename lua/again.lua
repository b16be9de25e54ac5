-- again: decides when the caller has to call again, although nothing leaves until then.
--
-- A piece of the scripts, inserted where one has `--@again`, behind `--@promote`.
--
-- Needs     key, now, most, in_use, is_short, further, asleep; next_turn, next_head,
--           next_cost, next_room; opening_of, or nil if no place has a rate
-- Leaves    call_again: 1: at once, because promotion reached its bound while a permit was free and a place that could
--           have it waited, or the sweep did, while a line waits that may be parked at a limit that the dead hold; -ms:
--           then, because only its rate or its budgets keep back the next in turn, or the first line that is asleep;
--           nil: neither; wakes: when that line gets its turn, us; nil: none is asleep

local call_again, wakes = nil, nil
if is_short and further and redis.call('ZMSCORE', key, 'x')[1] then
  call_again = 1
elseif in_use < most and next_turn and next_room > 0 then
  local opens, _, own = nil, nil, nil
  if opening_of then opens, _, own = opening_of(next_head, next_cost) end
  local fits = in_use + next_cost <= next_room
  if next_cost > next_room or opens == math.huge or fits and not opens or own then
    call_again = 1
  elseif fits then
    call_again = -math.ceil((opens - now) / 1000)
  end
end
if asleep then
  wakes = asleep.first()
  if wakes and in_use < most and call_again ~= 1 then
    call_again = math.max(call_again or -math.huge, -math.ceil((wakes - now) / 1000))
    -- More were to be roused than one call does.
    if call_again >= 0 then call_again = 1 end
  end
end
