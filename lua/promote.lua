-- promote: while permits are free, takes the ticket of the head of the queue away: that is the grant.
--
-- A piece of the scripts, put in where one says `--@promote`.
--
-- Grants of the caller's own node are left in `own` as id, lease_end, ...; other nodes get one message
-- each, "<key> <n> <lease_end> ...". A node that nobody listens for is gone: its places are taken out and
-- the next ones granted, unless receivers cannot be counted here (a cluster).
--
-- Needs     queued, key, limit, now_ms, node, counted, in_use, waiting
-- Leaves    own; in_use and waiting as they are then; gone: whether anyone was taken out

local own, gone = {}, false
while waiting > 0 and in_use < limit do
  local free = math.min(limit - in_use, 1000)
  local heads = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'LIMIT', 0, free)
  redis.call('ZREM', key, unpack(heads))
  for i = 1, #heads do heads[i] = string.sub(heads[i], #queued + 1) end
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
  if #dead > 0 then
    redis.call('ZREM', key, unpack(dead))
    gone = true
  end
  in_use = in_use + #heads - #dead
  waiting = waiting - #heads
end
