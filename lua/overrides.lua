-- overrides: read all overrides, pauses and revocations, unless the caller knows them. Reads only.
--
-- KEYS[1]   <prefix>:{!overrides}  hash  see override.lua
-- ARGV[1]   known       the version that the caller knows; 0 for none
--
-- Returns   1 if that is the current version; else the time, in ms, and a list of field, value ... of the whole hash,
--           which may be empty
-- Errors    none of its own
-- Cost      1 command if nothing has changed, else 3; O(names + places)
-- Retry     safe

local key = KEYS[1]
local known = ARGV[1]
if (redis.call('HGET', key, '@') or '0') == known then return 1 end
--@clock
return { now_ms, redis.call('HGETALL', key) }
