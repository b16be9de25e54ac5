-- clock: the time, read once a call: on Redis 7.0 TIME moves while a script runs.
--
-- A piece of the scripts, put in where one says `--@clock`.
--
-- Leaves    now, us; now_ms, whole ms

local t = redis.call('TIME')
local now = t[1] * 1000000 + t[2]
local now_ms = (now - now % 1000) / 1000
