-- charges: what requests take of budgets, such as tokens a minute.
--
-- A piece of the scripts, inserted where one has `--@charges`. It creates functions; so it is inserted once a place names
-- a budget.
--
-- A budget refills evenly, so the time at which it will be full again says all of it. A request takes a part of that
-- time, and is granted if the budget is then no further ahead than its burst. The member b<g> of budget g has the score
-- -(us at which it is full) * 2^-23, which a double holds exactly; one that is full counts as if it were not there.
--
-- No charge takes a budget further ahead than twice its burst: more than the burst is taken only where requests are in
-- flight after an outage, or have used more than was estimated.
--
-- A grant that finds a budget full without a member, and one of 64 others, takes out up to 100 others that are full; one
-- call looks ten times at most.
--
-- Needs     key, now; charges: declared
-- Leaves    charges.opening_of(member, taken), which returns nil if its budgets allow this place now; else from when on
--           they do, in us, the index of the last of them, and from when on those of its tenant do, nil if they do
--           now; taken: what others take that are granted with it, by budget, to which it adds, or nil. charges.take(id): it is granted; returns when the last of its budgets will
--           be full. charges.undo(id): takes that back
-- Cost      1 command for each budget when it is first asked for; of take and undo: 1, sometimes 3

local full_at, removable = {}, 500
charges = {}

local function each(member, visit)
  local at, index = string.find(member, '$', 13, true), 0
  -- Each has 21 digits; what follows the last one is none.
  while at and string.byte(member, at + 1) > 47 do
    local number = string.sub(member, at + 1, at + 5)
    if not full_at[number] then
      full_at[number] = (redis.call('ZMSCORE', key, 'b' .. number)[1] or 0) * -8388608
    end
    index = index + 1
    local us, burst = tonumber(string.sub(member, at + 6, at + 13), 36), tonumber(string.sub(member, at + 14, at + 21), 36)
    -- The clock has stepped back since it was further ahead than any charge takes it.
    local begins = full_at[number] <= now + 2 * burst + 1000000 and math.max(full_at[number], now) or now
    visit(number, us, burst, begins, index)
    at = at + 21
  end
end

function charges.opening_of(member, taken)
  local last, last_index, own = nil, nil, nil
  each(member, function(number, us, burst, begins, index)
    local before = taken and taken[number] or 0
    local opening = begins + before + us - burst
    if taken then taken[number] = before + us end
    if opening > now and (not last or opening > last) then last, last_index = opening, index end
    -- See asleep.lua.
    if opening > now and string.byte(number) > 57 and (not own or opening > own) then own = opening end
  end)
  return last, last_index, own
end

function charges.take(id)
  local writes, last, is_new = {}, 0, now % 64 == 0
  each(id, function(number, us, burst, begins)
    if us == 0 then return end
    is_new = is_new or full_at[number] == 0
    full_at[number] = math.max(begins, math.min(begins + us, now + 2 * burst))
    last = math.max(last, full_at[number])
    writes[#writes + 1] = full_at[number] / -8388608
    writes[#writes + 1] = 'b' .. number
  end)
  if is_new and removable > 0 then
    local full = redis.call('ZRANGEBYSCORE', key, now / -8388608, '(-33554432', 'LIMIT', '0', math.min(removable, 100))
    removable = removable - math.max(#full, 50)
    if full[1] then redis.call('ZREM', key, unpack(full)) end
  end
  if writes[1] then redis.call('ZADD', key, unpack(writes)) end
  return last
end

function charges.undo(id)
  each(id, function(number, us, burst, begins)
    full_at[number] = begins - us
    if full_at[number] > now then
      redis.call('ZADD', key, full_at[number] / -8388608, 'b' .. number)
    else
      full_at[number] = 0
      redis.call('ZREM', key, 'b' .. number)
    end
  end)
end
