-- fair/survey: how many permits are in use, and who is first: of those that wait without a claim, if any do, else
-- the line whose turn comes first.
--
-- A piece of the scripts, put in where one says `--@fair/survey`.
--
-- Needs     key; turn and units, or nil where they are to be looked up
-- Leaves    turn: member and score of the first, as Redis answers; units: how many members a permit in use has, and
--           places without a claim that wait, too; queue: how many those are; in_use
-- Cost      2 commands, 3 if any wait without a claim; less what is known

if not turn then
  turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
end
if not units then units = redis.call('ZCOUNT', key, '0', '(10000000000000') end
local queue = 0
if turn[1] and tonumber(turn[2]) < 4503599627370496 then
  queue = redis.call('ZCOUNT', key, '100000000000000', '(4503599627370496')
end
local in_use = units - queue
