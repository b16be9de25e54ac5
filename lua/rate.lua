-- rate: the grants of the last window, of places whose ids have a rate; and, by charges.lua, what is left of budgets.
--
-- A piece of the scripts, inserted where one has `--@rate`. It creates functions; so it is inserted after the path
-- of an uncontended call.
--
-- A grant leaves one member for each of its permits, which nothing but time takes out: neither a release nor the end
-- of a lease. Its score is -(seconds): these members have the lowest ranks, and the latest has rank 0. So the member
-- of rank (starts - cost) alone says whether the window of a place has room, and if not, from when on. Each place is
-- judged by its own window. A double holds these scores to a quarter of a us.
--
-- A start more than a second ahead counts for none: the clock has stepped back since, and it would keep others back
-- until that time. A start takes out what it does not keep, if it needs the room: nothing else may, because a place
-- that is not granted can have a shorter window than others. It keeps what started within its window, doubled as often
-- as its id says, and at most 4000. One call takes out at most 500 members that are ahead or not kept, and as many more
-- as permits are asked for; later calls take out the rest.
--
-- Needs     key, now; opening_of, start, undo, charges: declared
-- Leaves    opening_of(member, cost, taken), which returns nil if the rate of this place allows so many permits now and
--           its budgets allow its charges, or it has none; else from when on they do, in us, the index of the budget
--           that is the last to do so, if one is, and from when on those of its tenant do, if not now; math.huge: the
--           rate never does. taken: see charges.lua.
--           start(id): notes that the place is granted, right after opening_of of it. undo(ids): takes that back
-- Cost      with a rate, of opening_of: 1 command, 1 more if the window is full, 3 more if any are ahead; of start: 2,
--           sometimes 3, 2 more if grants have left the window. With charges, what charges.lua costs, and 1 for start

-- has_left: whether the place that was asked for last needs the room of starts that have left its window.
local removable, has_left = 500, false
local function forget(from, to)
  local old = redis.call('ZRANGEBYSCORE', key, from, to, 'LIMIT', '0', math.min(removable, 4000))
  if old[1] then removable = removable - redis.call('ZREM', key, unpack(old)) end
  return #old
end

-- When the start of this rank leaves the window, in us; 0: there is none.
local function end_of(rank, window)
  local score = tonumber(redis.call('ZRANGE', key, rank, rank, 'WITHSCORES')[2] or 0)
  return score < -1000000000 and math.floor(-score * 1e6 + 0.5) + window or 0
end

local function opening_by_rate(member, cost)
  has_left = false
  local at = string.find(member, '/', 13, true)
  if not at then return nil end
  local rank = tonumber(string.sub(member, at + 1, at + 3), 36) - cost
  if rank < 0 then return math.huge end
  local window = tonumber(string.sub(member, at + 4, at + 11), 36)
  removable = removable + cost
  local opening = end_of(rank, window)
  if opening > now then
    local before = string.format('(%.17g', -now / 1e6 - 1)
    local ahead = redis.call('ZCOUNT', key, '-inf', before)
    if ahead > 0 then opening = end_of(rank + ahead - forget('-inf', before), window) end
    if opening > now then return opening end
  end
  has_left = opening > 0
  return nil
end

function opening_of(member, cost, taken)
  local by_rate = opening_by_rate(member, cost)
  if not string.find(member, '$', 13, true) then return by_rate end
  if not charges then
    --@charges
  end
  local by_budget, index, own = charges.opening_of(member, taken)
  if by_budget and by_budget > (by_rate or 0) then return by_budget, index, own end
  return by_rate, nil, own
end

-- Notes the starts of a place with a rate. Returns for how long they are kept, in us.
local function note(id, at)
  local number, window = string.sub(id, 1, at - 1), tonumber(string.sub(id, at + 4, at + 11), 36)
  local doublings = tonumber(string.sub(id, at + 12, at + 12), 36)
  local kept = window * 2 ^ doublings
  if has_left then
    forget((kept - now) / 1e6, '(-1000000000')
    if doublings > 0 then
      local score = redis.call('ZRANGE', key, '4000', '4000', 'WITHSCORES')[2]
      if tonumber(score or 0) < -1000000000 then forget('(' .. score, '(-1000000000') end
    end
  end
  local writes = { -now / 1e6, 'r' .. number }
  for i = 2, tonumber(string.sub(id, -2), 36) do
    writes[2 * i - 1], writes[2 * i] = -now / 1e6, i .. 'r' .. number
  end
  redis.call('ZADD', key, unpack(writes))
  return kept
end

function start(id)
  local at, kept = string.find(id, '/', 13, true), 0
  if at then kept = note(id, at) end
  if string.find(id, '$', 13, true) then
    if not charges then
      --@charges
    end
    kept = math.max(kept, charges.take(id) - now)
  end
  -- As in write.lua; a second more, so that not every grant sets it.
  if kept > 0 and redis.call('PTTL', key) < kept / 1000 + 1 then
    redis.call('PEXPIRE', key, math.ceil(kept / 1000) + 1000)
  end
end

function undo(ids)
  for _, id in ipairs(ids) do
    local at = string.find(id, '/', 13, true)
    if at then
      local number = string.sub(id, 1, at - 1)
      local members = { 'r' .. number }
      for i = 2, tonumber(string.sub(id, -2), 36) do members[i] = i .. 'r' .. number end
      redis.call('ZREM', key, unpack(members))
    end
    if charges and string.find(id, '$', 13, true) then charges.undo(id) end
  end
end
