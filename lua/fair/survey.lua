-- fair/survey: counts the permits in use, and finds which place is first: of those that wait without a claim, if any
-- do, else the line whose turn is lowest.
--
-- A piece of the scripts, inserted where one has `--@fair/survey`.
--
-- Needs     key; turn and units, or nil if they have to be looked up
-- Leaves    turn: member and score of the first, as Redis replies; units: the number of permits in use and of places
--           that wait without a claim; queue: the number of the latter; in_use
-- Cost      2 commands, 3 if any wait without a claim; fewer if turn or units is known

if not turn then
  turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
end
if not units then units = redis.call('ZCOUNT', key, '0', '(10000000000000') end
local queue = 0
if turn[1] and tonumber(turn[2]) < 4503599627370496 then
  queue = redis.call('ZCOUNT', key, '100000000000000', '(4503599627370496')
end
local in_use = units - queue
