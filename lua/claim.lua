-- claim: reads what the id of a place with a claim says: see acquire.lua.
--
-- A piece of the scripts, inserted where one has `--@claim`. It creates functions; so it is inserted after the path of
-- an uncontended call.
--
-- Needs     line_of, cost_of, lease_of: declared
-- Leaves    line_of(member): the digits of its line, nil without one; and those of its tenant, nil without one.
--           cost_of(member): how many permits it takes. lease_of(id, score): the lease end in ms, as text, that this
--           score of the place tells
-- Cost      no command

local byte, sub = string.byte, string.sub
function line_of(member)
  if byte(member, -16) ~= 46 then return nil end
  local tenant = sub(member, -15, -11)
  if tenant == '00000' then tenant = nil end
  if byte(member, -3) < 56 then return tenant, tenant end
  local at = string.find(member, '+', 13, true)
  return sub(member, at + 1, at + 5), tenant
end

function cost_of(member) return byte(member, -16) == 46 and tonumber(sub(member, -2), 36) or 1 end

function lease_of(id, score)
  if byte(id, -16) ~= 46 then return score end
  -- Drops the leading 1 of 1e13 + a time of thirteen digits.
  return line_of(id) and sub(score, 2) or string.format('%.0f', score * 1000)
end
