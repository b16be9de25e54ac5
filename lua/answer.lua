-- answer: what a call says that gives leases.
--
-- A piece of the scripts, put in at their end, where they say `--@answer`.
--
-- A place that waits while a permit is free for it shows that promotion reached its bound. The reply says so by an
-- earliest lease end of 1: call again, at once.
--
-- Needs     key, most, lease_end, in_use, waiting, waits, statuses, own; earliest, or nil if that is to be looked up

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
