-- acquire: take places out; then grant each of the others a permit, or let it join the queue, or refuse it.
--
-- A semaphore is one sorted set with two kinds of member:
--   <id>    score: end of its lease, ms by TIME (about 1e12)   every place
--   q<id>   score: its ticket, us by TIME (about 1e15)         a place that still waits; for q see queued.lua
-- Scores from 1e14 on are tickets. An <id> is [~]<node>:<n>; '~' marks a node that has no mailbox. One that may wait ends
-- in '-' and the limit of its policy, seven digits to the base 36.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, permits; those that come are judged by it
-- ARGV[2]   for_all     1: the limit counts for every place; 0: one that waits is judged by the limit in its id
-- ARGV[3]   lease_ms    integer >= 1
-- ARGV[4]   max_queue   integer >= 0, places that may wait; -1: these may not wait
-- ARGV[5]   counted     1: PUBLISH tells whether a node listens; 0: it cannot (cluster)
-- ARGV[6]   node        the caller's
-- ARGV[7]   leaving     integer >= 0, how many of the ids leave
-- ARGV[8]   recalls     1: if these are the first to wait, nodes that keep permits are told; 0: not
-- ARGV[9..] id          those that leave, in any order; then one or many that come, in the order of their arrival
--
-- Returns   lease_end, if all that come were granted at once; else
--           {lease_end, earliest, in_use, waiting, status of each that comes ..., id, lease_end of own grants ...}
--           earliest: the lease end that comes first, 0 if nobody waits; 1: the bound below was reached while a
--           permit was free and a place waited: call again, at once
--           status: 1 granted | a ticket (>= 1e14) waits | -1 no permit free | -2 queue full
-- Errors    none of its own
-- Cost      5 commands while permits are free, 4 for the first, 1 more if any leave, whatever the number
--           of ids; 12 with a hand-over; O((ids + 500) * log n): see promote.lua; once for each queue, what
--           recall.lua costs
-- Retry     safe: an id that is there keeps its place and has its lease renewed; one that left is passed over

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[3])
local first, last = 9 + ARGV[7], #ARGV
local count_of_ids = last - first + 1
--@clock
local lease_end = now_ms + lease_ms
local all = redis.call('ZCARD', key)
--@queued
local leaving = first - 9
-- More members than permits: somebody waits, or the limit was lowered. Those that leave may wait, too, and go at once
-- with their tickets.
local crowded = all > limit
if leaving > 0 and all > 0 then
  if crowded then
    local members = { unpack(ARGV, 9, first - 1) }
    for i = 1, leaving do members[leaving + i] = queued .. members[i] end
    all = all - redis.call('ZREM', key, unpack(members))
  else
    all = all - redis.call('ZREM', key, unpack(ARGV, 9, first - 1))
  end
end
local waiting = all > 0 and redis.call('ZCOUNT', key, '100000000000000', '+inf') or 0
if leaving > 0 and waiting > 0 and not crowded then
  -- Few members, and some wait all the same: the limit was raised.
  local members = {}
  for i = 1, leaving do members[i] = queued .. ARGV[8 + i] end
  local left = redis.call('ZREM', key, unpack(members))
  all, waiting = all - left, waiting - left
end

if waiting == 0 and all + count_of_ids <= limit then
  if count_of_ids == 1 then
    all = all + redis.call('ZADD', key, lease_end, ARGV[last])
  else
    -- The last id first: a list of members is walked from its front to where a new one belongs.
    local score, writes, count = string.format('%.0f', lease_end), {}, 0
    for i = last, first, -1 do
      writes[count + 1], writes[count + 2] = score, ARGV[i]
      count = count + 2
    end
    all = all + redis.call('ZADD', key, unpack(writes))
  end
  -- As in write.lua; but if nobody else is there, there is no expiry to be shortened.
  if all == count_of_ids or redis.call('PTTL', key) < lease_ms + 1000 then
    redis.call('PEXPIRE', key, 3 * lease_ms + 1000)
  end
  return lease_end
end

-- Full, or so it looks: waiting places go first, and only then the newcomers.
local for_all, frees = ARGV[2] == '1', leaving > 0
local max_queue, counted, node = tonumber(ARGV[4]), ARGV[5] == '1', ARGV[6]
--@sweep
if swept then
  all = redis.call('ZCARD', key)
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
end
local in_use = all - 2 * waiting
local asked, from, to = ARGV, first, last
--@promote
-- Newcomers are judged by the limit of the call.
most = limit
-- A node that is gone may have taken one of them along.
if gone or not ends then ends = redis.call('ZMSCORE', key, unpack(ARGV, first, last)) end
-- Whether a lease that was there before is gone or longer: it may have been the earliest.
local moved = gone
local scores = {}
for i = 1, count_of_ids do
  if ends[i] then
    -- A call that is repeated: some of them may wait.
    moved = true
    local members = {}
    for j = first, last do members[#members + 1] = queued .. ARGV[j] end
    scores = redis.call('ZMSCORE', key, unpack(members))
    break
  end
end
local score = string.format('%.0f', lease_end)
local is_first = waiting == 0
local statuses, ticket = { nil, nil, nil, nil, nil, nil, nil, nil }, 0
local writes, count = { nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil }, 0
for i = 1, count_of_ids do
  local id, status = asked[first + i - 1], nil
  if ends[i] then
    status = tonumber(scores[i] or 1)
  elseif waiting == 0 and in_use < limit then
    status = 1
    in_use = in_use + 1
  elseif max_queue < 0 then
    status = -1
  elseif waiting >= max_queue then
    status = -2
  else
    if ticket == 0 then
      local latest = redis.call('ZREVRANGE', key, '0', '0', 'WITHSCORES')[2]
      ticket = tonumber(latest or 0)
    end
    ticket = math.max(now, ticket + 1)
    status = ticket
    waiting = waiting + 1
    writes[count + 1], writes[count + 2] = ticket, queued .. id
    count = count + 2
  end
  statuses[i] = status
  if status > 0 then
    writes[count + 1], writes[count + 2] = score, id
    count = count + 2
  end
end
if is_first and waiting > 0 and ARGV[8] == '1' then
  --@recall
end
--@write
if moved then
  earliest = nil
elseif #writes > 0 and (earliest == 0 or lease_end < earliest) then
  earliest = lease_end
end
--@answer
