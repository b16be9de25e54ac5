-- room: how many permits the limit of a place leaves for it.
--
-- A piece of the scripts, inserted where one has `--@room`, behind `--@claim`. It creates functions; so it is inserted
-- after the path of an uncontended call.
--
-- Needs     limit, headroom, for_all; room_of, never_fits: declared
-- Leaves    room_of(member): how many permits may be in use once this waiting place is granted; never_fits(member):
--           whether that can never be
-- Cost      no command

function room_of(member)
  if string.byte(member, -16) ~= 46 then
    if for_all or string.byte(member, -8) ~= 45 then return limit end
    return tonumber(string.sub(member, -7), 36)
  end
  local own_limit, own_headroom = limit, headroom
  if string.byte(member, -31) == 45 then
    if not for_all then own_limit = tonumber(string.sub(member, -30, -24), 36) end
    own_headroom = tonumber(string.sub(member, -23, -17), 36)
  end
  local class = string.byte(member, -3)
  return class ~= 48 and class ~= 56 and own_limit - own_headroom or own_limit
end

function never_fits(member)
  local cost = cost_of(member)
  if cost == 1 then return false end
  local room, at = room_of(member), string.find(member, '/', 13, true)
  return room > 0 and (cost > room or at ~= nil and tonumber(string.sub(member, at + 1, at + 3), 36) < cost)
end
