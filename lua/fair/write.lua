-- fair/write: write.lua for any number of members.
--
-- A piece of the scripts, inserted where one has `--@fair/write`.
--
-- Needs     key, lease_ms; writes: score, member, ...

if #writes > 0 then
  for i = 1, #writes, 4000 do
    redis.call('ZADD', key, unpack(writes, i, math.min(i + 3999, #writes)))
  end
  local ttl = redis.call('PTTL', key)
  if ttl < lease_ms + 1000 then redis.call('PEXPIRE', key, 3 * lease_ms + 1000) end
end
