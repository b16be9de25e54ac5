-- overrides: read all overrides, revocations, pauses and adaptive limits, unless the caller knows them. Reads only.
--
-- KEYS[1]   <prefix>:{!overrides}           hash  see override.lua
-- KEYS[2]   <prefix>:{!overrides}:pauses    hash  see pause.lua
-- KEYS[3]   <prefix>:{!overrides}:adaptive  hash  see adapt.lua. While their slot migrates, each is read alone, as
--                                                 KEYS[1]
-- ARGV[1]   known       the sum of the versions that the caller knows; 0 for none; `-`: read in any case
--
-- Returns   1 if that is the current sum; else the time, in ms, and for each hash a list of field, value ..., which
--           may be empty
-- Errors    none of its own
-- Cost      3 commands if nothing has changed, else 5 to 7; O(names + places + pauses + adaptive limits)
-- Retry     safe

local key, pauses, adaptive = KEYS[1], KEYS[2], KEYS[3]
local known = ARGV[1]
local version = redis.call('HGET', key, '@') or '0'
local of_pauses = pauses and redis.call('HGET', pauses, '@') or '0'
local of_adaptive = adaptive and redis.call('HGET', adaptive, '@') or '0'
-- A version that cannot be read is none that a caller knows.
local sum = (tonumber(version) or -1) + (tonumber(of_pauses) or -1) + (tonumber(of_adaptive) or -1)
if string.format('%.0f', sum) == known then return 1 end
--@clock
local all = redis.call('HGETALL', key)
local all_pauses = of_pauses == '0' and {} or redis.call('HGETALL', pauses)
return { now_ms, all, all_pauses, of_adaptive == '0' and {} or redis.call('HGETALL', adaptive) }
