-- release: take out places, waiting or held, and grant the freed permits to the head of the queue.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, waiting places are granted while fewer permits than this are in use
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[4]   node        the caller's
-- ARGV[5..] id          any number; with none the call only sweeps and promotes
--
-- Returns   {id, lease_end of own grants ...}, and 1 as the last item if the bound below was reached while a
--           permit was free and a place waited: call again at once
-- Errors    none of its own
-- Cost      2 commands while no place waits, about 9 with a hand-over; O((ids + 500) * log n): see promote.lua
-- Retry     safe: an id that is not present is ignored

local key = KEYS[1]
local waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
if waiting == 0 then
  if #ARGV > 4 then redis.call('ZREM', key, unpack(ARGV, 5)) end
  return {}
end

local limit, counted, node = tonumber(ARGV[1]), ARGV[3] == '1', ARGV[4]
--@queued
local for_all, frees = ARGV[2] == '1', true
local members = { unpack(ARGV, 5) }
for i = 1, #members do members[#members + 1] = queued .. members[i] end
-- More than one member was removed: a waiting place may be among them.
if #members > 0 and redis.call('ZREM', key, unpack(members)) > 1 then
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
  if waiting == 0 then return {} end
end
--@clock
--@sweep
if swept then waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf') end
local in_use = redis.call('ZCARD', key) - 2 * waiting
local asked, from, to = {}, 1, 0
--@promote
-- Promotion has reached its bound: see answer.lua.
if waiting > 0 and in_use < most and not waits then own[#own + 1] = 1 end
return own
