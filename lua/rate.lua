-- rate: the grants of the last window, of places whose ids have a rate.
--
-- A piece of the scripts, inserted where one has `--@rate`. It creates functions; so it is inserted after the path
-- of an uncontended call.
--
-- A grant leaves one member for each of its permits, which nothing but time takes out: neither a release nor the end of
-- a lease. Its score is -(seconds): these members have the lowest ranks, and the latest has rank 0. So the member of
-- rank (starts - cost) alone says whether the window of a place has room, and if not, from when on. Each place is judged
-- by its own window. A double holds these scores to a quarter of a us.
--
-- Needs     key, now; opening_of, start, undo: declared
-- Leaves    opening_of(member, cost), which returns nil if the rate of this place allows so many permits now, or it has
--           none; else from when on it does, in us; math.huge: it never does. start(id): notes that the place is granted.
--           undo(ids): takes that back
-- Cost      of opening_of: 1 command, 2 more if grants have left the window; of start: 2, sometimes 3

function opening_of(member, cost)
  local at = string.find(member, '/', 13, true)
  if not at then return nil end
  local rank = tonumber(string.sub(member, at + 1, at + 3), 36) - cost
  if rank < 0 then return math.huge end
  local window = tonumber(string.sub(member, at + 4, at + 11), 36)
  local score = tonumber(redis.call('ZRANGE', key, rank, rank, 'WITHSCORES')[2] or 0)
  if score >= -33554432 then return nil end
  local opening = math.floor(-score * 1e6 + 0.5) + window
  if opening > now then
    -- A start in the future: the clock has stepped back since. It would keep others back until that time.
    local ahead = -now / 1e6 - 1
    if tonumber(redis.call('ZRANGE', key, '0', '0', 'WITHSCORES')[2]) >= ahead then return opening end
    redis.call('ZREM', key, unpack(redis.call('ZRANGEBYSCORE', key, '-inf', ahead, 'LIMIT', '0', '500')))
    return opening_of(member, cost)
  end
  local over = redis.call('ZRANGEBYSCORE', key, (window - now) / 1e6, '(-33554432', 'LIMIT', '0', '500')
  if over[1] then redis.call('ZREM', key, unpack(over)) end
  return nil
end

function start(id)
  local at = string.find(id, '/', 13, true)
  if not at then return end
  local number, window = string.sub(id, 1, at - 1), tonumber(string.sub(id, at + 4, at + 11), 36)
  local writes = { -now / 1e6, 'r' .. number }
  for i = 2, tonumber(string.sub(id, -2), 36) do
    writes[2 * i - 1], writes[2 * i] = -now / 1e6, i .. 'r' .. number
  end
  redis.call('ZADD', key, unpack(writes))
  -- As in write.lua; a second more, so that not every grant sets it.
  if redis.call('PTTL', key) < window / 1000 + 1 then
    redis.call('PEXPIRE', key, math.ceil(window / 1000) + 1000)
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
  end
end
