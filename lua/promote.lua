-- promote: while permits are free, removes the ticket of the head of the queue: that is the grant.
--
-- A piece of the scripts, inserted where one has `--@promote`, behind `--@sweep`.
--
-- Grants to the caller's node are left in `own` as id, lease_end, ...; every other node gets one message,
-- "<key> <n> <lease_end> ...". If nobody receives it, the node is gone: its places are taken out and the next ones are
-- granted. In a cluster, receivers cannot be counted.
--
-- A head of the queue costs 1 of the budget that the sweep left, and a message 4 more. Promotion stops when the budget
-- is spent: 100,000 dead waiters in one call took 1.6 s, 500 take 4 ms at most. If a permit is free then and a place
-- waits, the reply tells the caller to call again; until then newcomers queue, or are refused.
--
-- Each head is judged by the limit in its id, and the places behind it wait for it: passing over a head would starve
-- the lower limit. A call that frees permits goes on past its own limit, because the head may have a higher one.
--
-- Needs     queued, key, limit, for_all, frees, node, counted, in_use, waiting, budget; asked, from, to: ids whose
--           lease ends are looked up along with those of the heads, which are written after them
-- Leaves    most: the number of permits in use up to which it granted; own; in_use and waiting, updated; waits:
--           whether the head's own limit is reached; gone: whether any place was taken out; ends: the lease ends of
--           the ids in `asked`, stale if any place is gone, and nil if none were looked up
-- Cost      3 commands for a grant, 4 if another node is notified; O(budget * log n)

-- Lua reallocates a table at every power of two, so these have room for some grants from the start.
local own, gone, ends = { nil, nil, nil, nil, nil, nil, nil, nil }, false, nil
local count_of_own = 0
-- Tickets have the highest scores, so they are ranked after the leases, of which each place has one.
local leases = in_use + waiting
local tickets, i, passed, absent, left = {}, 0, 0, {}, {}
-- The head's own limit, and the end of its id that has it.
local room, bound, waits = limit, nil, false
local most = frees and not for_all and in_use >= limit and math.huge or limit
while waiting > 0 and in_use < most and budget > 0 and not waits do
  local last, first_own, nodes, mail = to, count_of_own + 2, {}, {}
  while waiting > 0 and in_use < most and budget > 0 do
    if i == #tickets then
      if i > 0 then redis.call('ZREM', key, unpack(tickets)) end
      -- After dead places, read twice as many each time, so that few reads pass over many.
      local count = math.min(math.max(limit - in_use, passed, 1), budget, 100)
      tickets = redis.call('ZRANGE', key, leases, leases + count - 1)
      i = 0
    end
    local ticket = tickets[i + 1]
    if not for_all then
      local own = string.sub(ticket, -8)
      if own ~= bound then
        bound = own
        room = string.byte(own) == 45 and tonumber(string.sub(own, 2), 36) or limit
      end
      if in_use >= room then
        waits = true
        break
      end
    end
    i = i + 1
    passed = passed + 1
    waiting = waiting - 1
    budget = budget - 1
    local id = string.sub(ticket, #queued + 1)
    local holder, is_told = string.sub(id, 1, 11), true
    if holder ~= node and not mail[holder] and string.byte(id) == 126 then
      holder, is_told = string.sub(id, 2, 12), false
    end
    if is_told and absent[holder] then
      left[#left + 1] = id
    else
      in_use = in_use + 1
      last = last + 1
      asked[last] = id
      -- The index of the id stands in for its lease end until that is looked up.
      if holder == node then
        own[count_of_own + 1], own[count_of_own + 2] = id, last - from + 1
        count_of_own = count_of_own + 2
      elseif is_told then
        local words = mail[holder]
        if not words then
          words = { key, nil, nil, nil, nil, nil, nil, nil }
          mail[holder] = words
          nodes[#nodes + 1] = holder
          budget = budget - 4
        end
        local count = #words
        words[count + 1], words[count + 2] = string.sub(id, 13), last - from + 1
      end
    end
  end
  if last > to then ends = redis.call('ZMSCORE', key, unpack(asked, from, last)) end
  for j = first_own, count_of_own, 2 do own[j] = ends[own[j]] end
  for j = 1, #nodes do
    local other = nodes[j]
    local words = mail[other]
    for k = 3, #words, 2 do words[k] = ends[words[k]] end
    local channel = string.match(key, '^(.-):{') .. ':@' .. other
    -- pcall: the user may lack the right to publish. That is like a lost message; the grant stands.
    local heard = redis.pcall('PUBLISH', channel, table.concat(words, ' '))
    if heard == 0 and counted then
      absent[other] = true
      waits = false
      gone = true
      in_use = in_use - (#words - 1) / 2
      for k = 2, #words, 2 do left[#left + 1] = other .. ':' .. words[k] end
    end
  end
  -- There is another round only if a node is gone, and then the caller looks up its own lease ends.
  from = to + 1
end
if i > 0 then redis.call('ZREM', key, unpack(tickets, 1, i)) end
if #left > 0 then redis.call('ZREM', key, unpack(left)) end
if waiting > 0 and in_use < most and not waits and not for_all then
  -- The budget is spent. The reply must say whether the next head could be granted.
  local own = string.sub(redis.call('ZRANGE', key, in_use + waiting, in_use + waiting)[1], -8)
  waits = in_use >= (string.byte(own) == 45 and tonumber(string.sub(own, 2), 36) or limit)
end
