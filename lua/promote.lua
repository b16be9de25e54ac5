-- promote: while permits are free, takes the ticket of the head of the queue away: that is the grant.
--
-- A piece of the scripts, put in where one says `--@promote`, behind `--@sweep`.
--
-- Grants of the caller's own node are left in `own` as id, lease_end, ...; other nodes get one message
-- each, "<key> <n> <lease_end> ...". A node that nobody listens for is gone: its places are taken out and
-- the next ones granted, unless receivers cannot be counted here (a cluster).
--
-- A head of the queue costs 1 of the budget that the sweep left, and a message 4 more. Promotion stops when
-- the budget is spent. If a permit is free then and a place waits, the reply tells the caller to call again;
-- until then newcomers queue, or are refused.
--
-- Needs     queued, key, limit, node, counted, in_use, waiting, budget
-- Leaves    own; in_use and waiting as they are then; gone: whether anyone was taken out
-- Cost      3 commands for a grant, 4 if another node is told; O(budget * log n)

local own, gone = {}, false
local tickets, i, passed = {}, 0, 0
local leave, absent = {}, {}
while waiting > 0 and in_use < limit and budget > 0 do
  local ids, numbers, nodes, mail = {}, {}, {}, {}
  while waiting > 0 and in_use < limit and budget > 0 do
    if i == #tickets then
      -- Behind dead places twice as many each time: few reads pass over many.
      local count = math.min(math.max(limit - in_use, passed), budget, 100)
      tickets = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'LIMIT', passed, count)
      i = 0
    end
    i = i + 1
    passed = passed + 1
    waiting = waiting - 1
    budget = budget - 1
    local id = string.sub(tickets[i], #queued + 1)
    leave[#leave + 1] = tickets[i]
    local poll_only, to, n = string.match(id, '^(~?)(%w+):(%w+)$')
    if poll_only == '' and absent[to] then
      leave[#leave + 1] = id
    else
      in_use = in_use + 1
      ids[#ids + 1] = id
      numbers[#ids] = n
      if poll_only == '' or to == node then
        if not mail[to] then
          mail[to] = {}
          if to ~= node then
            nodes[#nodes + 1] = to
            budget = budget - 4
          end
        end
        mail[to][#mail[to] + 1] = #ids
      end
    end
  end
  local ends = #ids > 0 and redis.call('ZMSCORE', key, unpack(ids))
  for _, j in ipairs(mail[node] or {}) do
    own[#own + 1] = ids[j]
    own[#own + 1] = ends[j]
  end
  for _, to in ipairs(nodes) do
    local words = { key }
    for _, j in ipairs(mail[to]) do
      words[#words + 1] = numbers[j]
      words[#words + 1] = ends[j]
    end
    local channel = string.match(key, '^(.-):{') .. ':@' .. to
    -- A message that may not be sent is like one that is lost: the grant stands all the same.
    local heard = redis.pcall('PUBLISH', channel, table.concat(words, ' '))
    if heard == 0 and counted then
      absent[to] = true
      gone = true
      in_use = in_use - #mail[to]
      for _, j in ipairs(mail[to]) do leave[#leave + 1] = ids[j] end
    end
  end
end
if passed > 0 then redis.call('ZREM', key, unpack(leave)) end
