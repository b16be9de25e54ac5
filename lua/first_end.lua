-- first_end: reads the first lease end.
--
-- A piece of the scripts, inserted where one has `--@first_end`, behind `--@kind`.
--
-- Needs     key, is_plain
-- Leaves    earliest: 0 if there is no lease
-- Cost      1 command; 1 more for each further kind of leases in the set: see acquire.lua

if is_plain then
  earliest = tonumber(redis.call('ZRANGE', key, '0', '0', 'WITHSCORES')[2] or 0)
else
  -- Leases of one kind come before those of another by score, even if they end later.
  local from = '(100000000'
  earliest = 0
  while from do
    local first = redis.call('ZRANGEBYSCORE', key, from, '(20000000000000', 'WITHSCORES', 'LIMIT', '0', '1')[2]
    local lease_end = tonumber(first or 0)
    from = nil
    if lease_end >= 1e13 then
      lease_end = lease_end - 1e13
    elseif lease_end >= 1e12 then
      from = '10000000000000'
    elseif first then
      lease_end = math.floor(lease_end * 1000 + 0.5)
      from = '1000000000000'
    end
    if first and (earliest == 0 or lease_end < earliest) then earliest = lease_end end
  end
end
