-- answer: what a call says that gives leases.
--
-- A piece of the scripts, put in at their end, where they say `--@answer`.
--
-- Needs     key, lease_end, in_use, waiting, standings, own; earliest, or nil if that is to be looked up

if waiting == 0 then
  earliest = 0
elseif not earliest then
  earliest = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end
local reply = { lease_end, earliest, in_use, waiting, unpack(standings) }
for i = 1, #own do reply[#reply + 1] = own[i] end
return reply
