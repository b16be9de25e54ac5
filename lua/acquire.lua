-- acquire: take out the places that leave; then grant each newcomer a permit, let it join the queue, or refuse it.
--
-- A semaphore is one sorted set with two kinds of member:
--   <id>    score: the end of its lease, ms by TIME (about 1e12)   every place
--   q<id>   score: its ticket, us by TIME (about 1e15)             a place that still waits; for q see queued.lua
-- Scores from 1e14 on are tickets. An <id> is [~]<node>:<n>; '~' marks a node without a mailbox. The id of a place that
-- may wait ends in '-' and the limit of its policy, seven digits in base 36.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, permits; newcomers are judged by it
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   lease_ms    integer >= 1
-- ARGV[4]   max_queue   integer >= 0, the most places that may wait; -1: the newcomers may not wait
-- ARGV[5]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[6]   node        the caller's
-- ARGV[7]   leaving     integer >= 0, the number of ids that leave
-- ARGV[8]   recalls     1: if these are the first to wait, notify nodes that keep permits; 0: do not
-- ARGV[9..] id          the places that leave, in any order; then one or more newcomers, in the order of their arrival
--
-- Returns   lease_end if all newcomers were granted at once; else
--           {lease_end, earliest, in_use, waiting, status per newcomer ..., id, lease_end of own grants ...}
--           earliest: the first lease end; 0 if no place waits; 1 if the bound below was reached while a permit was
--           free and a place waited: call again at once
--           status: 1 granted | a ticket (>= 1e14) waits | -1 no permit free | -2 queue full
-- Errors    none of its own
-- Cost      5 commands while permits are free, 4 if the set is empty, 1 more if any leave, for any number of ids; 12
--           with a hand-over; O((ids + 500) * log n): see promote.lua; and what recall.lua costs when a queue begins
-- Retry     safe: an id that is present keeps its place, and its lease is renewed; one that has left is ignored

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[3])
local first, last = 9 + ARGV[7], #ARGV
local count_of_ids = last - first + 1
--@clock
local lease_end = now_ms + lease_ms
local all = redis.call('ZCARD', key)
--@queued
local leaving = first - 9
-- More members than permits: places wait, or the limit was lowered. Those that leave may be waiting, so their tickets
-- are removed in the same command.
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
  -- Few members, and yet some wait: the limit was raised.
  local members = {}
  for i = 1, leaving do members[i] = queued .. ARGV[8 + i] end
  local left = redis.call('ZREM', key, unpack(members))
  all, waiting = all - left, waiting - left
end

if waiting == 0 and all + count_of_ids <= limit then
  if count_of_ids == 1 then
    all = all + redis.call('ZADD', key, lease_end, ARGV[last])
  else
    -- The last id first: Redis walks a small set from its front to the position of a new member.
    local score, writes, count = string.format('%.0f', lease_end), {}, 0
    for i = last, first, -1 do
      writes[count + 1], writes[count + 2] = score, ARGV[i]
      count = count + 2
    end
    all = all + redis.call('ZADD', key, unpack(writes))
  end
  -- As in write.lua; but if the set has no other place, there is no expiry that this could shorten.
  if all == count_of_ids or redis.call('PTTL', key) < lease_ms + 1000 then
    redis.call('PEXPIRE', key, 3 * lease_ms + 1000)
  end
  return lease_end
end

-- There may be no permit free. Waiting places are served first, then the newcomers.
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
-- A node that is gone may have been the newcomers' own.
if gone or not ends then ends = redis.call('ZMSCORE', key, unpack(ARGV, first, last)) end
-- Whether an existing lease is gone or was extended: it may have been the earliest.
local moved = gone
local scores = {}
for i = 1, count_of_ids do
  if ends[i] then
    -- This call is a repetition: some of its places may be waiting.
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
