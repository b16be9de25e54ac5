-- clock: reads the time, once per call: in Redis 7.0, TIME advances while a script runs.
--
-- A piece of the scripts, inserted where one has `--@clock`.
--
-- Leaves    now, us; now_ms, whole ms

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local now_ms = (now - now % 1000) / 1000
