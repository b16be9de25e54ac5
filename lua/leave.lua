-- leave: settles the lines of tenants whose places have left.
--
-- A piece of the scripts, inserted where one has `--@leave`, behind `--@settle`.
--
-- Needs     key, settle; ids, from, to: those from ids[from] to ids[to] have left; turn
-- Leaves    turn, updated
-- Cost      1 command, and what settling costs; 1 more if settling does not show whose turn it is; none without ids
--           of tenants

local tenants, members, seen = {}, {}, {}
for i = from, to do
  local digits = tenant_of(ids[i])
  if digits and not seen[digits] then
    seen[digits] = true
    tenants[#tenants + 1] = digits
    members[#tenants] = 't' .. digits
  end
end
if #members > 0 then
  local turns = redis.call('ZMSCORE', key, unpack(members))
  local unknown = false
  for i, digits in ipairs(tenants) do
    -- Without a turn the tenant has no line: nothing to settle.
    if turns[i] then
      local own_turn, first = settle(digits, turns[i]), tonumber(turn[2])
      if own_turn and own_turn < first then
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
end
