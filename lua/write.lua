-- write: adds what was decided, and keeps the key for long enough.
--
-- A piece of the scripts, put in where one says `--@write`.
--
-- The key's expiry is only the backstop for names that nobody touches after a crash: never shorter than
-- a lease in the set, and never shortened.
--
-- Needs     key, lease_ms; writes: score, member, ...

if #writes > 0 then
  redis.call('ZADD', key, unpack(writes))
  local ttl = redis.call('PTTL', key)
  if ttl < lease_ms + 1000 then redis.call('PEXPIRE', key, 3 * lease_ms + 1000) end
end
