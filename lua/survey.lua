-- survey: counts the permits in use, and finds which place is first: of those that wait without a tenant, if any
-- do, else the line whose turn is lowest.
--
-- A piece of the scripts, inserted where one has `--@survey`, behind `--@kind`.
--
-- Needs     key, is_plain; of a plain set: all, waiting: the numbers of members and of tickets; of others: turn: member
--           and score of the first, as Redis replies; units: the number of permits in use and of places that wait
--           without a tenant; each nil if it has to be looked up
-- Leaves    turn, units, unless is_plain; queue: the number of places that wait without a tenant; in_use
-- Cost      2 commands, 3 if any wait without a tenant; fewer if something is known

local queue, in_use = 0, nil
if is_plain then
  queue = waiting or redis.call('ZCOUNT', key, '100000000000000', '+inf')
  in_use = (all or redis.call('ZCARD', key)) - 2 * queue
else
  turn = turn or redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
  units = units or redis.call('ZCOUNT', key, '0', '(10000000000000')
  if turn[1] and tonumber(turn[2]) < 4503599627370496 then
    queue = redis.call('ZCOUNT', key, '100000000000000', '(4503599627370496')
  end
  in_use = units - queue
end
