-- again: decides when the caller has to call again, although nothing leaves until then.
--
-- A piece of the scripts, inserted where one has `--@again`, behind `--@promote`.
--
-- Needs     key, now, most, in_use, is_short, further; next_turn, next_head, next_cost, next_room; opening_of, or nil if no place has a rate
-- Leaves    call_again: 1: at once, because promotion reached its bound while a permit was free and a place that could
--           have it waited, or the sweep did, while a line waits that may be parked at a limit that the dead hold; -ms: then, because only its rate keeps back the next in turn; nil: neither

local call_again = nil
if is_short and further and redis.call('ZMSCORE', key, 'x')[1] then
  call_again = 1
elseif in_use < most and next_turn and next_room > 0 then
  local opens, fits = opening_of and opening_of(next_head, next_cost), in_use + next_cost <= next_room
  if next_cost > next_room or opens == math.huge or fits and not opens then
    call_again = 1
  elseif fits then
    call_again = -math.ceil((opens - now) / 1000)
  end
end
