-- answer: builds the reply of a call that gives leases.
--
-- A piece of the scripts, inserted at their end, where they have `--@answer`.
--
-- If a place waits while a permit is free for it, promotion has reached its bound. Then the reply has an earliest lease
-- end of 1: call again at once.
--
-- Needs     key, most, lease_end, in_use, waiting, waits, statuses, own; earliest, or nil if it has to be looked up

if waiting == 0 then
  earliest = 0
elseif in_use < most and not waits then
  earliest = 1
elseif not earliest then
  earliest = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
end
local reply = { lease_end, earliest, in_use, waiting, unpack(statuses) }
for i = 1, #own do reply[#reply + 1] = own[i] end
return reply
