-- take: takes out places, waiting or held.
--
-- A piece of the scripts, inserted where one has `--@take`.
--
-- Needs     key, queued; ids, from, to: those from ids[from] to ids[to] leave; removed: a number
-- Leaves    removed, plus the number of members that were there
-- Cost      1 command, 1 more for each 4000 members

local members, count = {}, 0
for i = from, to do
  local id = ids[i]
  members[count + 1], members[count + 2] = id, queued .. id
  count = count + 2
  if string.byte(id, -16) == 46 and string.sub(id, -2) ~= '01' then
    for share = 2, tonumber(string.sub(id, -2), 36) do
      count = count + 1
      members[count] = share .. queued .. id
    end
  end
  if count > 4000 then
    removed = removed + redis.call('ZREM', key, unpack(members, 1, count))
    count = 0
  end
end
if count > 0 then removed = removed + redis.call('ZREM', key, unpack(members, 1, count)) end
