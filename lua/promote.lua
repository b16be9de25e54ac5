-- promote: while permits are free, grants the next in turn. That is the head of the queue, if no place has a claim: its
-- ticket is removed. Else it is the head of the line whose turn is lowest: its long member moves from its line to its
-- tenant's permits.
--
-- A piece of the scripts, inserted where one has `--@promote`, behind `--@settle`, `--@sweep` and `--@survey`.
--
-- Grants to the caller's node are left in `own` as id, lease_end, ...; every other node gets one message,
-- "<key> <n> <lease_end> ...". If nobody receives it, the node is gone: its places are taken out and the next ones are
-- granted. In a cluster, receivers cannot be counted.
--
-- A head costs its permits of the budget that the sweep left, 4 more with further limits, and a message 4 more.
-- Promotion stops when the budget is spent: 100,000 dead waiters in one call took 1.6 s, 500 take 4 ms at most. If a
-- permit is free then and a place waits, the reply tells the caller to call again; until then newcomers queue, or are
-- refused.
--
-- Each head is judged by the limit in its id, and all that wait do so behind it: passing over a head would starve the
-- lower limit, the larger cost, or the rate that has to be waited for. A call that frees permits goes on past its own
-- limit, because the head may have a higher one. A head that could never be served, because the limit was lowered since
-- it came, stops its line, and the next turn is examined; one that finds too little of a budget of its tenant puts it
-- to sleep: see asleep.lua.
--
-- Places without a tenant form one more line, of weight 1 and class 0. Its turn is not stored; it is computed when it
-- is compared.
--
-- A renewal also examines the next in turn, if that has to wait: if its node is gone, it would keep others back until its
-- lease ends. It is examined if its lease ends early, as that of a place does that missed its renewals, by a message that
-- is the key alone, as in recall.lua. A head whose node is gone is taken out whether it could be granted or not.
--
-- A line whose places have further limits parks at the first of them that keeps its head back: see further.lua. That
-- costs 1 of the budget, too, as does each line that is parked anew; but one that parks with a grant costs nothing more.
--
-- Needs     queued, key, now, is_plain, limit, for_all, frees, node, counted, in_use, queue, budget; asked: members
--           whose scores are looked up along with the lease ends of those granted; unless is_plain: turn, and what
--           claim.lua, settle.lua, leave.lua, room.lua and rate.lua leave; further, if the set has lines of places with
--           further limits; asleep: declared; silent_before: the lease end before which the next in turn is examined, nil
--           if it is not
-- Leaves    most: the number of permits in use up to which it granted; own; in_use and queue, updated; gone: whether
--           any place was taken out; scores: those of the first of `asked`, stale if any place is gone, and nil if
--           none were looked up. If permits are free: next_turn, next_head, next_f, next_cost, next_room of the place
--           whose turn is next; next_f: the number of its line, 0 without one; next_turn nil if no place waits, or, in
--           a plain set, unless the budget is spent
-- Cost      3 commands for any number of grants in a plain set, 1 more for each node that is notified; else 3 for
--           each grant, 1 more for the last of a line; to examine the next in turn: 1 or 2; O(budget * log n)

-- Lua reallocates a table at every power of two, so these have room for some grants from the start. Others are made once
-- there is something to put in: in most calls that find no permit free there is not.
local none = {}
local own, gone, scores = { nil, nil, nil, nil, nil, nil, nil, nil }, false, nil
local next_turn, next_head, next_f, next_cost, next_room = nil, nil, 0, 1, nil
local count_of_own, absent, repeats = 0, {}, true
local most = frees and not for_all and in_use >= limit and math.huge or limit
-- In a plain set: how many heads were passed, and the end of an id with the limit of the next one.
local passed, bound = 0, nil
while repeats do
  repeats = false
  -- The messages by node, as words; the nodes, in the order of their first grants.
  local nodes, mail = none, none
  local ids, known, first_own = asked, #asked, count_of_own + 2
  local last = known
  -- In a plain set: heads that were read, how many of them were passed, and those of nodes that are gone.
  local heads, at, left = none, 0, none
  -- The place that is next and has to wait.
  local kept = nil
  -- Tickets have the highest scores, so they are ranked after the leases, of which each place has one.
  local leases = in_use + queue
  while in_use < most do
    if further then budget, further.passed = budget - further.passed, 0 end
    local member, score, head, behind, class, line, second = nil, nil, nil, nil, 0, nil, nil
    if is_plain then
      next_turn = nil
      if queue == 0 then break end
      if at == #heads then
        if at > 0 then redis.call('ZREM', key, unpack(heads)) end
        -- After dead places, read twice as many each time, so that few reads pass over many.
        local count = math.min(math.max(limit - in_use, passed, 1), math.max(budget, 1), 100)
        heads, at = redis.call('ZRANGE', key, leases, leases + count - 1), 0
      end
      head = heads[at + 1]
      if not for_all then
        local own_bound = string.sub(head, -8)
        if own_bound ~= bound then
          bound = own_bound
          next_room = string.byte(bound) == 45 and tonumber(string.sub(bound, 2), 36) or limit
        end
        if in_use >= next_room and not (next_room > 0 and absent[string.sub(head, #queued + 1, #queued + 11)]) then
          kept = head
          break
        end
      end
      if budget <= 0 then
        -- The reply must say that this head could be granted.
        next_turn, next_room = 0, next_room or limit
        break
      end
      at, passed = at + 1, passed + 1
      queue, budget = queue - 1, budget - 1
    else
      if not turn then
        -- With further limits, `x` is behind all turns.
        local to, count = further and '+inf' or '(inf', further and '2' or '1'
        turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', to, 'WITHSCORES', 'LIMIT', '0', count)
      end
      -- Of use only if the first line parks, now or once its head is granted.
      if turn[3] then second = { turn[3], turn[4] } end
      member, score = turn[1], tonumber(turn[2] or 'inf')
      turn, next_turn = nil, nil
      if score == math.huge then break end
      next_f, next_cost = 0, 1
      if score < 4503599627370496 then
        local held = redis.call('ZCOUNT', key, '(33554432', '(10000000000000') - queue
        local plain = (held * 64 + 1) * 4503599627370496 + score
        local first = redis.call('ZRANGEBYSCORE', key, '4503599627370496', '(inf', 'WITHSCORES', 'LIMIT', '0', '1')
        -- Neither has a tenant: they go in the order of their arrival.
        if further and first[1] and further.is_nobodys(first[1]) then plain = 4503599627370496 + score end
        local is_stopped = never_fits(member)
        if is_stopped and not first[1] then break end
        if is_stopped or first[1] and tonumber(first[2]) < plain then
          member, score = first[1], tonumber(first[2])
        else
          head, score, next_cost = member, plain, cost_of(member)
        end
      end
      if not head then
        next_f = tonumber(string.sub(member, 2), 36)
        if next_f < 16777216 then
          local to = next_f > 1 and 1 - next_f or '-0.000000003'
          local places = redis.call('ZRANGEBYSCORE', key, -next_f, to, 'LIMIT', '0', '2')
          head, behind = places[1], places[2]
          next_cost, class = tonumber(string.sub(head, -2), 36), tonumber(string.sub(head, -3, -3))
        else
          line = further.read(member, score, budget > 0)
          if line then
            head, next_cost = line.places[1], line.terms.cost
          else
            budget = budget - 1
          end
        end
      end
      if head then
        next_turn, next_head, next_room = score, head, room_of(head)
        local opens, _, own_opens = opening_of(head, next_cost)
        local never = next_cost > next_room or opens == math.huge
        local sleeps = own_opens and not never and next_f > 0
        local waits = not (never or sleeps) and (opens or in_use + next_cost > next_room)
        if next_room <= 0 or budget <= 0 then break end
        if waits and not absent[string.sub(head, #queued + 1, #queued + 11)] then
          kept = head
          break
        end
        local parks, is_back = false, false
        if line and not (never or sleeps) then parks, is_back = further.park(line) end
        if never or sleeps or parks then
          budget, head = budget - 1, nil
          if line and not parks then further.flush() end
          if never then
            redis.call('ZADD', key, 'inf', member)
          elseif sleeps then
            if not asleep then
              --@asleep
            end
            asleep.put(member, own_opens)
          elseif not is_back and queue == 0 then
            turn = second
          end
          if line and not parks then further.come_back(line.terms) end
        else
          budget = budget - next_cost - (line and 4 or 0)
        end
      end
    end
    if head then
      local id = string.sub(head, #queued + 1)
      local to, poll_only = string.sub(id, 1, 11), false
      if to ~= node and string.byte(id) == 126 then to, poll_only = string.sub(id, 2, 12), true end
      local is_absent = absent[to] and not poll_only
      if is_plain then
        if is_absent then
          if left == none then left = {} end
          left[#left + 1] = id
        end
      elseif next_f == 0 then
        queue = queue - 1
        redis.call('ZREM', key, head, is_absent and id or head)
      elseif line then
        if is_absent then
          local ids, from, to, removed = { id }, 1, 1, 0
          --@take
          leave(ids, 1, 1)
        else
          local is_alone = second and second[1] == 'x'
          if not further.grant(line, is_alone) and queue == 0 then turn = second end
        end
      else
        -- The turn contains the permits of its tenant, which saves a count.
        local level = math.floor(score / 2 ^ (80 * class) / 4503599627370496) - 1
        local units = math.ceil(level * tonumber(string.sub(head, -10, -9), 36) / 64)
        if not is_absent then units = units + next_cost end
        if behind then
          -- As settle does; but permits that are taken back at once change the level twice.
          local each = string.sub(behind, -8, -4)
          if each ~= '00000' and units + tonumber(string.sub(behind, -2), 36) > tonumber(each, 36) then
            score = math.huge
          else
            local factor = 2 ^ (80 * tonumber(string.sub(behind, -3, -3)))
            level = math.floor(units * 64 / tonumber(string.sub(behind, -10, -9), 36))
            local start = (level + 1) * 4503599627370496
            if is_absent or score < start * factor or score >= (start + 4503599627370496) * factor then
              score = (start + now) * factor
            end
          end
        end
        if is_absent then
          redis.call('ZREM', key, id, head)
          if behind then redis.call('ZADD', key, score, member) end
        elseif behind then
          redis.call('ZADD', key, next_f, head, score, member)
        else
          redis.call('ZADD', key, next_f, head)
        end
        if not behind then redis.call('ZREM', key, member) end
        if further then
          further.forget()
          if is_absent then further.make_up({ id }, 1, 1) end
        end
      end
      if next_cost > 1 and not (is_absent or line) then
        local writes = {}
        for i = 2, next_cost do
          writes[#writes + 1] = next_f > 0 and next_f or 1e8
          writes[#writes + 1] = i .. head
        end
        redis.call('ZADD', key, unpack(writes))
      end
      if is_absent then
        gone = true
      else
        in_use = in_use + next_cost
        if not is_plain then start(id) end
        last = last + 1
        ids[last] = id
        -- The index of the id stands in for its lease end until that is looked up.
        if to == node then
          own[count_of_own + 1], own[count_of_own + 2] = id, last
          count_of_own = count_of_own + 2
        elseif not poll_only then
          local words = mail[to]
          if not words then
            if mail == none then mail, nodes = {}, {} end
            words = { key, nil, nil, nil, nil, nil, nil, nil }
            mail[to], nodes[#nodes + 1] = words, to
            budget = budget - 4
          end
          local count = #words
          words[count + 1], words[count + 2] = string.sub(id, 13), last
        end
      end
    end
  end
  if further then further.flush() end
  if at > 0 then redis.call('ZREM', key, unpack(heads, 1, at)) end
  if #left > 0 then redis.call('ZREM', key, unpack(left)) end
  local ends = last > known and redis.call('ZMSCORE', key, unpack(ids))
  if ends and not is_plain then
    for i = known + 1, last do ends[i] = lease_of(ids[i], ends[i]) end
  end
  scores = ends or nil
  for i = first_own, count_of_own, 2 do own[i] = ends[own[i]] end
  if kept and silent_before and next_room > 0 and budget > 0 then
    local id = string.sub(kept, #queued + 1)
    local to = string.sub(id, 1, 11)
    if not (to == node or string.byte(id) == 126 or mail[to]) then
      local lease_end = redis.call('ZMSCORE', key, id)[1]
      if tonumber(is_plain and lease_end or lease_of(id, lease_end)) < silent_before then
        if mail == none then mail, nodes = {}, {} end
        mail[to], nodes[#nodes + 1] = { key }, to
        budget = budget - 4
      end
    end
  end
  local lost = nodes == none and none or {}
  for _, to in ipairs(nodes) do
    local words = mail[to]
    for i = 3, #words, 2 do words[i] = ends[words[i]] end
    local channel = string.match(key, '^(.-):{') .. ':@' .. to
    -- pcall: the user may lack the right to publish. That is like a lost message; the grant stands.
    local heard = redis.pcall('PUBLISH', channel, table.concat(words, ' '))
    if heard == 0 and counted then
      absent[to] = true
      repeats = true
      for i = 2, #words, 2 do
        local id = to .. ':' .. words[i]
        lost[#lost + 1] = id
        in_use = in_use - (is_plain and 1 or cost_of(id))
      end
    end
  end
  if repeats then
    gone, asked, turn = true, {}, nil
    if lost[1] and is_plain then
      redis.call('ZREM', key, unpack(lost))
    elseif lost[1] then
      local ids, from, to, removed = lost, 1, #lost, 0
      --@take
      leave(lost, 1, #lost)
      undo(lost)
    end
  end
end
