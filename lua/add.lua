-- add: adds the members that were decided.
--
-- A piece of the scripts, inserted where one has `--@add`.
--
-- Needs     key; writes: score, member, ...
-- Cost      1 command, 1 more for each 2000 members

for i = 1, #writes, 4000 do
  redis.call('ZADD', key, unpack(writes, i, math.min(i + 3999, #writes)))
end
