-- take: takes out places, waiting or held.
--
-- A piece of the scripts, inserted where one has `--@take`.
--
-- Needs     key, queued; ids, from, to: those from ids[from] to ids[to] leave; removed: a number
-- Leaves    removed, plus the number of members that were there; count: that of the last command, of all if each was there
-- Cost      1 command, 1 more for each 4000 members

local members, count = {}, 0
for i = from, to do
  local id = ids[i]
  members[count + 1], members[count + 2] = id, queued .. id
  count = count + 2
  if string.byte(id, -16) == 46 then
    local cost = tonumber(string.sub(id, -2), 36)
    for share = 2, cost do
      count = count + 1
      members[count] = share .. queued .. id
    end
    if string.byte(id, -3) > 55 then
      -- It has further limits: ten bytes each.
      local at, bound = string.find(id, '+', 13, true), string.byte(id, -31) == 45 and 15 or 0
      for limit = 1, (#id - at - 21 - bound) / 10 do
        local kind = string.char(96 + limit)
        for share = 1, cost do
          count = count + 1
          members[count] = (share > 1 and share or '') .. kind .. id
        end
      end
    end
  end
  if count > 4000 then
    removed = removed + redis.call('ZREM', key, unpack(members, 1, count))
    count = 0
  end
end
if count > 0 then removed = removed + redis.call('ZREM', key, unpack(members, 1, count)) end
