-- write: adds the members that were decided, if any, and extends the expiry of the key.
--
-- A piece of the scripts, inserted where one has `--@write`.
--
-- The expiry is only a backstop for names that no process uses after a crash. It is never shorter than a lease in the
-- set, and never shortened.
--
-- Needs     key, lease_ms; writes: score, member, ...

if #writes > 0 then
  --@add
  local ttl = redis.call('PTTL', key)
  if ttl < lease_ms + 1000 then redis.call('PEXPIRE', key, 3 * lease_ms + 1000) end
end
