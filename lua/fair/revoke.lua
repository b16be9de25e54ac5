-- fair/revoke: revoke.lua for a place with a claim. Members: see fair/acquire.lua.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   id          the place
-- ARGV[2]   take        1: take it out; 0: only look it up
--
-- Returns   how much of its lease is left, or would be, in ms; -1 if it is not present
-- Errors    none of its own
-- Cost      5 commands, 2 more if its tenant waits; O(log n)
-- Retry     safe

local key = KEYS[1]
local id, take = ARGV[1], ARGV[2] == '1'
--@clock
--@queued
local lease_end = redis.call('ZMSCORE', key, id)[1]
if not lease_end then return -1 end
local settle, remove, room_of
--@fair/settle
if take then remove({ id }) end
return math.max(lease_end - 1e13 - now_ms, 0)
