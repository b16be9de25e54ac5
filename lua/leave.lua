-- leave: settles the lines whose places have left, and those of their tenants. If lines are parked, those that wait
-- for the limits of these places come back: see further.lua.
--
-- A piece of the scripts, inserted where one has `--@leave`, behind `--@settle`. It creates functions; so it is
-- inserted after the path of an uncontended call.
--
-- Needs     what further.lua needs; line_of; leave, asleep: declared
-- Leaves    leave(ids, from, to, turn, is_further, held): those from ids[from] to ids[to] have left, or none if `to` is
--           less. turn: the first of all turns, if it is known; it returns that as it is then, and sometimes the second.
--           held: whether it is known that those with further limits held. It leaves `further` if the set has lines of
--           places with further limits, or is_further; and `asleep` if lines are asleep
-- Cost      1 command, and what settling costs; 1 more if settling does not show whose turn it is. If the set has lines
--           of places with further limits, 1 more for each tenant and each limit, and what further.lua costs; 1 less if
--           no line waits for its turn and all that left held

function leave(ids, from, to, turn, is_further, held)
  if further then further.forget() end
  local tenants, lines, members, seen = {}, nil, {}, {}
  -- If `x` is the first of all turns, no line waits for its turn, or is stopped; and if only places that held left, what
  -- is parked stays so until it comes back.
  local nobody = turn and turn[1] == 'x'
  for i = from, nobody and held and 0 or to do
    local line, digits = line_of(ids[i])
    if digits and not seen[digits] then
      seen[digits] = true
      tenants[#tenants + 1] = digits
      members[#tenants] = 't' .. digits
    end
    if line ~= digits and not seen[line] then
      seen[line], lines = true, lines or {}
      lines[#lines + 1] = line
    end
  end
  local turns, has_further = {}, nobody
  if not (nobody and held) then
    for i = 1, lines and #lines or 0 do members[#tenants + i] = 't' .. lines[i] end
    local count = #members
    members[count + 1], members[count + 2] = 'x', 's'
    turns = redis.call('ZMSCORE', key, unpack(members))
    has_further = turns[count + 1]
    if not asleep and turns[count + 2] then
      --@asleep
    end
  end
  if not further and (has_further or is_further) then
    --@further
  end
  if has_further then
    for i = 1, lines and #lines or 0 do
      local before = turns[#tenants + i]
      local at = tonumber(before)
      -- A place that held was not the first of its line, and a line that is parked stays so; one that is asleep wakes.
      if at and not (held and at < 0 and at > -33554432) then further.settle(lines[i], before) end
    end
    for i, digits in ipairs(tenants) do
      if turns[i] then settle(digits, turns[i]) end
    end
    local count, last = further.make_up(ids, from, to, nobody)
    if nobody and count == 1 then return { last[1], last[2], 'x', 'inf' } end
    -- If a place that waited has left, its line may have been the last.
    if nobody and held and count == 0 then return turn end
    return turn and redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '2')
  end
  local unknown = false
  for i, digits in ipairs(tenants) do
    -- Without a turn the tenant has no line: nothing to settle.
    if turns[i] then
      local own_turn, first = settle(digits, turns[i]), turn and tonumber(turn[2])
      if not turn then
        -- Nobody asks.
      elseif own_turn and own_turn < first then
        turn = { members[i], own_turn }
      elseif (members[i] == turn[1]) ~= (own_turn == first) then
        -- It was the first and may not be any more, or its turn now equals that of the first.
        unknown = true
      end
    end
  end
  if unknown then
    turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
  end
  return turn
end
