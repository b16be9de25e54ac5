-- settle: sets a tenant's turn by its line and its permits.
--
-- A piece of the scripts, inserted where one has `--@settle`, behind `--@claim`. It creates functions; so it is inserted
-- after the path of an uncontended call.
--
-- A turn is ((level + 1) * 2^52 + us) * 2^(80 * class), where level = floor(permits in use * 64 / weight), and us is
-- the time since which the tenant has been at that level. Class, weight and cap are those of the line's first place. A
-- line that stays at its level keeps its time. A line that its tenant's cap stops has +inf. The lowest turn is next; a
-- double loses bits of the time at high levels, never of the level.
--
-- Needs     key, now; settle: declared
-- Leaves    settle(digits, before), which returns the turn, nil for an empty line; before: the previous turn, if it is
--           known
-- Cost      of settle: 2 commands for an empty line, else 3, or 4 if the turn changes; 1 less if `before` is known

function settle(digits, before)
  local f, member = tonumber(digits, 36), 't' .. digits
  -- Above the last line, lines are parked.
  local to = f > 1 and 1 - f or '-0.000000003'
  local head = redis.call('ZRANGEBYSCORE', key, -f, to, 'LIMIT', '0', '1')[1]
  if not head then
    redis.call('ZREM', key, member)
    return nil
  end
  local units = redis.call('ZCOUNT', key, f, f)
  before = tonumber(before or redis.call('ZMSCORE', key, member)[1] or 0)
  local each, class = tonumber(string.sub(head, -8, -4), 36), tonumber(string.sub(head, -3, -3))
  local turn, factor = math.huge, 2 ^ (80 * class)
  if each == 0 or units + tonumber(string.sub(head, -2), 36) <= each then
    local level = math.floor(units * 64 / tonumber(string.sub(head, -10, -9), 36))
    local start = (level + 1) * 4503599627370496
    turn = before
    if before < start * factor or before >= (start + 4503599627370496) * factor then
      turn = (start + now) * factor
    end
  end
  if turn ~= before then redis.call('ZADD', key, turn, member) end
  return turn
end
