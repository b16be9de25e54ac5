-- fair/promote: while permits are free, grants the head of the line whose turn is next: its long member moves from its
-- line to its tenant's permits.
--
-- A piece of the scripts, inserted where one has `--@fair/promote`, behind `--@fair/settle`, `--@fair/sweep` and
-- `--@fair/survey`. Own grants, messages and the budget are those of promote.lua.
--
-- If the head fits once more permits are free, all lines wait for it. A head that could never be served, because the
-- limit was lowered since it came, stops its line, and the next turn is examined.
--
-- Places without a claim form one more line, of weight 1 and class 0. Its turn is not stored; it is computed when it is
-- compared.
--
-- Needs     queued, key, now, limit, for_all, frees, node, counted, remove, room_of, opening_of, start, undo; turn, in_use,
--           queue; budget
-- Leaves    most: as promote.lua; own; in_use and queue, updated; gone: whether any place was taken out. If permits are
--           free: next_turn, next_head, next_f, next_cost, next_room of the place whose turn is next; next_f 0 without a claim;
--           next_turn nil if no place waits
-- Cost      3 commands for a grant, 1 more for the last of a line, 1 more for each node that is notified

local own, gone = {}, false
local next_turn, next_head, next_f, next_cost, next_room
local absent, again = {}, true
local most = frees and not for_all and in_use >= limit and math.huge or limit
while again do
  again = false
  local ids, nodes, mail = {}, {}, {}
  while in_use < most do
    if not turn then
      turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '(inf', 'WITHSCORES', 'LIMIT', '0', '1')
    end
    local member, score = turn[1], tonumber(turn[2] or 'inf')
    turn, next_turn = nil, nil
    if score == math.huge then break end
    local head, behind = nil, nil
    local class = 0
    next_f, next_cost = 0, 1
    if score < 4503599627370496 then
      local held = redis.call('ZCOUNT', key, '(33554432', '(10000000000000') - queue
      local plain = (held * 64 + 1) * 4503599627370496 + score
      local first = redis.call('ZRANGEBYSCORE', key, '4503599627370496', '(inf', 'WITHSCORES', 'LIMIT', '0', '1')
      if first[1] and tonumber(first[2]) < plain then
        member, score = first[1], tonumber(first[2])
      else
        head, score = member, plain
      end
    end
    if not head then
      next_f = tonumber(string.sub(member, 2), 36)
      local heads = redis.call('ZRANGEBYSCORE', key, -next_f, 1 - next_f, 'LIMIT', '0', '2')
      head, behind = heads[1], heads[2]
      next_cost, class = tonumber(string.sub(head, -2), 36), tonumber(string.sub(head, -3, -3))
    end
    next_turn = score
    next_head, next_room = head, room_of(head)
    local opens = opening_of(head, next_cost)
    local never = next_cost > next_room or opens == math.huge
    if next_room <= 0 or budget <= 0 or not never and (opens or in_use + next_cost > next_room) then break end
    budget = budget - (never and 1 or next_cost)
    if never then
      redis.call('ZADD', key, 'inf', member)
    else
      local id = string.sub(head, #queued + 1)
      local poll_only = string.byte(id) == 126
      local to = poll_only and string.sub(id, 2, 12) or string.sub(id, 1, 11)
      local is_absent = absent[to] and not poll_only
      if next_f == 0 then
        queue = queue - 1
        redis.call('ZREM', key, head, is_absent and id or head)
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
        if next_cost > 1 and not is_absent then
          local writes = {}
          for i = 2, next_cost do
            writes[#writes + 1] = next_f
            writes[#writes + 1] = i .. head
          end
          redis.call('ZADD', key, unpack(writes))
        end
      end
      if is_absent then
        gone = true
      else
        in_use = in_use + next_cost
        start(id)
        ids[#ids + 1] = id
        if not poll_only or to == node then
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
  end
  local ends = #ids > 0 and redis.call('ZMSCORE', key, unpack(ids))
  for i = 1, #ids do
    -- Drops the leading 1 of 1e13 + a time of thirteen digits.
    if string.byte(ids[i], -16) == 46 then ends[i] = string.sub(ends[i], 2) end
  end
  for _, i in ipairs(mail[node] or {}) do
    own[#own + 1] = ids[i]
    own[#own + 1] = ends[i]
  end
  local lost = {}
  for _, to in ipairs(nodes) do
    local words = { key }
    for _, i in ipairs(mail[to]) do
      words[#words + 1] = string.sub(ids[i], 13)
      words[#words + 1] = ends[i]
    end
    local channel = string.match(key, '^(.-):{') .. ':@' .. to
    -- pcall: the user may lack the right to publish. That is like a lost message; the grant stands.
    local heard = redis.pcall('PUBLISH', channel, table.concat(words, ' '))
    if heard == 0 and counted then
      absent[to] = true
      again = true
      for _, i in ipairs(mail[to]) do
        local id = ids[i]
        lost[#lost + 1] = id
        in_use = in_use - (string.byte(id, -16) == 46 and tonumber(string.sub(id, -2), 36) or 1)
      end
    end
  end
  if again then
    gone = true
    remove(lost)
    undo(lost)
  end
end
