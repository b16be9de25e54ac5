-- used: puts what places that leave have truly used of their budgets in the place of what they took.
--
-- A piece of the scripts, inserted where one has `--@used`, before `--@take`. Such an id ends in '=' and, for each of its
-- budgets, two numbers of eight digits to the base 36: the us that it used of it, and the us in which it is full again
-- at least, by what its provider says. A place that waits, or is not there any more, took nothing, or has settled; so a
-- repetition is safe. See charges.lua for how much a budget can be charged.
--
-- Needs     key, queued; ids, from, to: those from ids[from] to ids[to] are about to leave
-- Leaves    these ids as they are in the set
-- Cost      no command; 2 to 5, and 1 for each id, if any says what it used

-- When the last of those that are charged more is full: no other needs the key for longer than before.
local now_us, fulls, charged_until = nil, {}, 0
for i = from, to do
  local id = ids[i]
  local used_at = string.find(id, '=', 13, true)
  if used_at then
    local used = string.sub(id, used_at + 1)
    id = string.sub(id, 1, used_at - 1)
    ids[i] = id
    local members, at = { id, queued .. id }, string.find(id, '$', 13, true)
    local first = at
    while at and string.byte(id, at + 1) > 47 do
      members[#members + 1] = 'b' .. string.sub(id, at + 1, at + 5)
      at = at + 21
    end
    local scores = redis.call('ZMSCORE', key, unpack(members))
    -- The member of its ticket is that of a permit once it holds.
    local stands = tonumber(scores[2] or 0)
    if scores[1] and stands >= 0 and stands < 1e14 then
      if not now_us then
        local time = redis.call('TIME')
        now_us = time[1] * 1000000 + time[2]
      end
      for k = 3, #members do
        at = first + (k - 3) * 21
        local taken, burst = tonumber(string.sub(id, at + 6, at + 13), 36), tonumber(string.sub(id, at + 14, at + 21), 36)
        local more = tonumber(string.sub(used, 16 * k - 47, 16 * k - 40), 36) - taken
        local ahead = tonumber(string.sub(used, 16 * k - 39, 16 * k - 32), 36)
        local full = fulls[members[k]] or (scores[k] or 0) * -8388608
        -- What is given back is that much, whatever the clock says; release.lua does the same in one command.
        if more <= 0 then full = full + more end
        if more > 0 or ahead > 0 then
          -- As in charges.lua.
          full = full <= now_us + 2 * burst + 1000000 and math.max(full, now_us) or now_us
          if more > 0 then full = math.max(full, math.min(full + more, now_us + 2 * burst)) end
          if ahead > 0 then full = math.max(full, now_us + math.min(ahead, burst)) end
          charged_until = math.max(charged_until, full)
        end
        fulls[members[k]] = full
      end
    end
  end
end
if now_us then
  local writes, gone = {}, {}
  for member, full in pairs(fulls) do
    if full > now_us then
      writes[#writes + 1] = full / -8388608
      writes[#writes + 1] = member
    else
      gone[#gone + 1] = member
    end
  end
  -- A write that needs no memory goes first: Redis refuses a script only at its first write when memory is used up.
  redis.call('ZREM', key, '', unpack(gone))
  if writes[1] then redis.call('ZADD', key, unpack(writes)) end
  if charged_until > 0 then
    -- As in rate.lua.
    local kept_ms = (charged_until - now_us) / 1000
    if redis.call('PTTL', key) < kept_ms + 1 then redis.call('PEXPIRE', key, math.ceil(kept_ms) + 1000) end
  end
end
