-- acquire: take places out; then grant each of the others a permit, or let it join the queue, or refuse it.
--
-- A semaphore is one sorted set with two kinds of member:
--   <id>    score: end of its lease, ms by TIME (about 1e12)   every place
--   q<id>   score: its ticket, us by TIME (about 1e15)         a place that still waits; for q see queued.lua
-- Scores from 1e14 on are tickets. An <id> is [~]<node>:<n>; '~' marks a node that has no mailbox.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 1, permits
-- ARGV[2]   lease_ms    integer >= 1
-- ARGV[3]   max_queue   integer >= 0, places that may wait; -1: these may not wait
-- ARGV[4]   counted     1: PUBLISH tells whether a node listens; 0: it cannot (cluster)
-- ARGV[5]   node        the caller's
-- ARGV[6]   leaving     integer >= 0, how many of the ids leave
-- ARGV[7]   recalls     1: if these are the first to wait, nodes that keep permits are told; 0: not
-- ARGV[8..] id          those that leave, in any order; then one or many that come, in the order of their arrival
--
-- Returns   lease_end, if all that come were granted at once; else
--           {lease_end, earliest, in_use, waiting, status of each that comes ..., id, lease_end of own grants ...}
--           earliest: the lease end that comes first, 0 if nobody waits; 1: the bound below was reached while a
--           permit was free and a place waited: call again, at once
--           status: 1 granted | a ticket (>= 1e14) waits | -1 no permit free | -2 queue full
-- Errors    none of its own
-- Cost      5 commands while permits are free, 4 for the first, 1 more if any leave, whatever the number
--           of ids; O((ids + 500) * log n): see promote.lua; once for each queue, what recall.lua costs
-- Retry     safe: an id that is there keeps its place and has its lease renewed; one that left is passed over

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[2])
local first, last = 8 + ARGV[6], #ARGV
local count_of_ids = last - first + 1
--@clock
local lease_end = now_ms + lease_ms
local all = redis.call('ZCARD', key)
local waiting = all > 0 and redis.call('ZCOUNT', key, '100000000000000', '+inf') or 0
--@queued
if first > 8 then
  local members = { unpack(ARGV, 8, first - 1) }
  if waiting > 0 then
    for i = 1, #members do members[#members + 1] = queued .. members[i] end
  end
  local left = all > 0 and redis.call('ZREM', key, unpack(members)) or 0
  all = all - left
  -- More than one member: one that waited may be among them.
  if waiting > 0 and left > 1 then
    waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
  end
end

if waiting == 0 and all + count_of_ids <= limit then
  if count_of_ids == 1 then
    all = all + redis.call('ZADD', key, lease_end, ARGV[last])
  else
    -- The last id first: a list of members is walked from its front to where a new one belongs.
    local score, writes = string.format('%.0f', lease_end), {}
    for i = last, first, -1 do
      writes[#writes + 1] = score
      writes[#writes + 1] = ARGV[i]
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
local max_queue, counted, node = tonumber(ARGV[3]), ARGV[4] == '1', ARGV[5]
--@sweep
if swept then
  all = redis.call('ZCARD', key)
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
end
local in_use = all - 2 * waiting
--@promote
local ids = { unpack(ARGV, first) }
local members = { unpack(ids) }
for _, id in ipairs(ids) do members[#members + 1] = queued .. id end
local scores = redis.call('ZMSCORE', key, unpack(members))
local score = string.format('%.0f', lease_end)
-- Whether a lease that was there before is gone or longer: it may have been the earliest.
local moved = gone
local is_first = waiting == 0
local statuses, writes, ticket = {}, {}, 0
for i, id in ipairs(ids) do
  local status
  if scores[i] then
    status = tonumber(scores[#ids + i] or 1)
    moved = true
  elseif waiting == 0 and in_use < limit then
    status = 1
    in_use = in_use + 1
  elseif max_queue < 0 then
    status = -1
  elseif waiting >= max_queue then
    status = -2
  else
    if ticket == 0 then
      local latest = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]
      ticket = tonumber(latest or 0)
    end
    ticket = math.max(now, ticket + 1)
    status = ticket
    waiting = waiting + 1
    writes[#writes + 1] = ticket
    writes[#writes + 1] = queued .. id
  end
  statuses[i] = status
  if status > 0 then
    writes[#writes + 1] = score
    writes[#writes + 1] = id
  end
end
if is_first and waiting > 0 and ARGV[7] == '1' then
  --@recall
end
--@write
if moved then
  earliest = nil
elseif #writes > 0 and (earliest == 0 or lease_end < earliest) then
  earliest = lease_end
end
--@answer
