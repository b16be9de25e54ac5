-- first_end: reads the first lease end.
--
-- A piece of the scripts, inserted where one has `--@first_end`, behind `--@kind`.
--
-- Needs     key, is_plain
-- Leaves    earliest: 0 if there is no lease
-- Cost      1 command; 2 if the set has both places without a claim and others

if is_plain then
  earliest = tonumber(redis.call('ZRANGE', key, '0', '0', 'WITHSCORES')[2] or 0)
else
  -- Leases without a claim come first by score, even if they end later.
  local first = redis.call('ZRANGEBYSCORE', key, '(33554432', '(1e14', 'WITHSCORES', 'LIMIT', '0', '1')[2]
  earliest = tonumber(first or 0)
  if earliest >= 1e13 then
    earliest = earliest - 1e13
  elseif first then
    local behind = redis.call('ZRANGEBYSCORE', key, '10000000000000', '(1e14', 'WITHSCORES', 'LIMIT', '0', '1')[2]
    if behind then earliest = math.min(earliest, tonumber(behind) - 1e13) end
  end
end
