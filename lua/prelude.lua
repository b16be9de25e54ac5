-- prelude: what the scripts share. It takes the place of the line `--@prelude` in each of them: behind
-- what needs none of it, because to make a function costs as much as a command.
--
-- A semaphore is one sorted set with two kinds of member:
--   <id>    score: end of its lease, ms by TIME (about 1e12)   every place
--   q<id>   score: its ticket, us by TIME (about 1e15)         a place that still waits
-- An <id> is [~]<node>:<n>; '~' marks a node that has no mailbox.

local TICKET = 1e14     -- scores from here on are tickets
local SWEEP_MAX = 1000  -- dead places taken out by one call at the most
local GRANT_MAX = 1000  -- places granted by one round of promote at the most

-- Now, in us and in whole ms. Read once a call: on Redis 7.0 TIME moves while a script runs. (What
-- acquire does without these functions, it reads for itself.)
local function clock()
  local t = redis.call('TIME')
  local us = t[1] * 1000000 + t[2]
  return us, (us - us % 1000) / 1000
end

-- How many places hold, and how many wait.
local function count(key)
  local all = redis.call('ZCARD', key)
  local waiting = all > 0 and redis.call('ZCOUNT', key, TICKET, '+inf') or 0
  return all - 2 * waiting, waiting
end

-- Takes out places whose lease has ended, waiting or held; returns whether there were any.
local function sweep(key, now_ms)
  local dead = redis.call('ZRANGEBYSCORE', key, '-inf', now_ms, 'LIMIT', 0, SWEEP_MAX)
  if #dead == 0 then return false end
  for i = 1, #dead do dead[#dead + 1] = 'q' .. dead[i] end
  redis.call('ZREM', key, unpack(dead))
  return true
end

-- While permits are free, takes the ticket of the head of the queue away: that is the grant.
-- Grants of the caller's own node are returned as {id, lease_end, ...}; other nodes get one
-- message each, "<key> <n> <lease_end> ...". A node that nobody listens for is gone: its places
-- are taken out and the next ones granted, unless receivers cannot be counted here (a cluster).
local function promote(key, limit, now_ms, node, counted, in_use, waiting)
  local own = {}
  while waiting > 0 and in_use < limit do
    local free = math.min(limit - in_use, GRANT_MAX)
    local heads = redis.call('ZRANGEBYSCORE', key, TICKET, '+inf', 'LIMIT', 0, free)
    redis.call('ZREM', key, unpack(heads))
    for i = 1, #heads do heads[i] = string.sub(heads[i], 2) end
    local ends = redis.call('ZMSCORE', key, unpack(heads))
    local dead, nodes, mail = {}, {}, {}
    for i, id in ipairs(heads) do
      local deaf, to, n = string.match(id, '^(~?)(%w+):(%w+)$')
      if not ends[i] or tonumber(ends[i]) <= now_ms then
        dead[#dead + 1] = id
      elseif to == node then
        own[#own + 1] = id
        own[#own + 1] = ends[i]
      elseif deaf == '' then
        if not mail[to] then
          nodes[#nodes + 1] = to
          mail[to] = { words = { key }, ids = {} }
        end
        local words, ids = mail[to].words, mail[to].ids
        words[#words + 1] = n
        words[#words + 1] = ends[i]
        ids[#ids + 1] = id
      end
    end
    for _, to in ipairs(nodes) do
      local channel = string.match(key, '^(.-):{') .. ':@' .. to
      -- A message that may not be sent is like one that is lost: the grant stands all the same.
      local heard = redis.pcall('PUBLISH', channel, table.concat(mail[to].words, ' '))
      if heard == 0 and counted then
        for _, id in ipairs(mail[to].ids) do dead[#dead + 1] = id end
      end
    end
    if #dead > 0 then redis.call('ZREM', key, unpack(dead)) end
    in_use = in_use + #heads - #dead
    waiting = waiting - #heads
  end
  return own, in_use, waiting
end

-- The key's expiry is only the backstop for names that nobody touches after a crash: never
-- shorter than a lease in the set, and never shortened.
local function backstop(key, lease_ms)
  local ttl = redis.call('PTTL', key)
  if ttl < lease_ms + 1000 then redis.call('PEXPIRE', key, 3 * lease_ms + 1000) end
end

-- {lease_end, earliest lease end while anyone waits, in use, waiting, standings ..., own grants ...}
local function answer(key, lease_end, in_use, waiting, standings, own)
  local earliest = 0
  if waiting > 0 then earliest = tonumber(redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) end
  local reply = { lease_end, earliest, in_use, waiting, unpack(standings) }
  for i = 1, #own do reply[#reply + 1] = own[i] end
  return reply
end
