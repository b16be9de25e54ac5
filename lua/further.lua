-- further: lines of places that have further limits, and what keeps them in order.
--
-- A piece of the scripts, inserted where one has `--@further`. It creates functions; so it is inserted where such lines
-- are in the set, or such places among the newcomers.
--
-- Such a line waits for its turn as those of tenants do. If one of its limits is full when its turn comes or its head was
-- granted, or an earlier line waits there for more room, it parks there: its `t` gets a score of that spot. When a place
-- leaves, or the head of a line does not wait for its turn any more, the first line that is parked at each of its limits
-- comes back, if there is room for its head. While permits are granted, limits only lose room: so lines do not go to and
-- fro.
--
-- The spot of a tenant's cap is f, that of a further limit 2^24 + g. The score of a line that is parked is
--   -(2^52 + (spot % 2^16) * 2^36 + 2^36 - 1 - code) * 2^(floor(spot / 2^16) - 600)
-- so that the scores of one spot are one range, between the lines and 0, with the lowest code first. The code is
-- class * 2^33 + level * 2^24 + time: a short form of the turn; the level in 5 bits of exponent and 4 of mantissa, the
-- time in 1/8 ms, modulo 2^24. The turn of a line without a tenant is the arrival of its head.
--
-- Needs     queued, key, now, now_ms, settle; further: declared
-- Leaves    further: a table of functions. They keep what they have read until `forget`: the caller calls that once
--           places hold or leave, or lines park, by other commands than these; and `flush` before turns are read, or
--           the script ends
-- Cost      of settle: as of settle.lua, 1 command more to end a line; of the return of a line: 1 command if none is
--           parked there, 3 or 4 if one is, 1 more if it comes back, unless it is granted or parks in the same call; of a
--           place that leaves: 1 for each of up to 16 lines of its tenant. A hand-over at a full limit, where no line
--           waits for its turn: 17 commands in all if its tenant has no other line

-- passed: how many lines were parked anew since promote.lua counted them.
-- A table that has room for its functions from the start costs less than one that grows.
further = {
  passed = 0, terms_of = nil, forget = nil, settle = nil, come_back = nil, make_up = nil, kept_at = nil, refused = nil,
  hold = nil, is_nobodys = nil, read = nil, park = nil, grant = nil, renewed = nil, flush = nil,
}
-- By spot: the permits in use; the lines that are parked first, as Redis replies (-spot); whether there is no room for
-- the head of the first (spot + 0.5). By the `t` of a line: its first places.
local memo = nil
-- Where lines were parked whose first places do not need that limit.
local vacated = {}
-- How many lines got turns since the last places left, and the last of these, with its turn.
local count_of_turns, last_turn = nil, nil
-- Whether the next line that comes back may keep its turn unwritten, and the line that does, as `last_turn`.
local may_wait, unwritten = false, nil
local byte, sub, find, match, format = string.byte, string.sub, string.find, string.match, string.format
local floor, frexp, ldexp = math.floor, math.frexp, math.ldexp

-- What the end of an id says: its limits, by spot and cap in the order in which they are examined; the first of them is
-- its tenant's own cap if `own` is 1. Places of a line say the same.
local known = {}
local function terms_of(member)
  local at = find(member, '+', 13, true)
  local text = sub(member, at)
  if known[text] then return known[text] end
  local f, weight, each, class, cost = match(member, '^(.....)(..)(.....)(.)(..)', -15)
  f, each = tonumber(f, 36), tonumber(each, 36)
  local spots, caps, own = { nil, nil, nil, nil }, { nil, nil, nil, nil }, 0
  if each > 0 then
    spots[1], caps[1], own = f, each, 1
  end
  local count = own
  for i = at + 6, #member - (byte(member, -31) == 45 and 31 or 16), 10 do
    count = count + 1
    spots[count], caps[count] = 16777216 + tonumber(sub(member, i, i + 4), 36), tonumber(sub(member, i + 5, i + 9), 36)
  end
  local terms = { f = f, weight = tonumber(weight, 36), class = tonumber(class, 36) % 8, cost = tonumber(cost, 36),
    spots = spots, caps = caps, own = own }
  known[text] = terms
  return terms
end
further.terms_of = terms_of

-- Writes the turn of the line that came back, unless it was granted or parked since: in most calls it is, which saves a
-- command.
function further.flush()
  if unwritten then redis.call('ZADD', key, unwritten[2], unwritten[1]) end
  unwritten = nil
end

-- `memo` has room for what a hand-over reads.
function further.forget()
  further.flush()
  memo, count_of_turns = { a = nil, b = nil, c = nil, d = nil, e = nil, f = nil, g = nil, h = nil, i = nil }, 0
end
further.forget()

-- The score of permits in use under the limit of a spot. As text it costs less than a number.
local function share_of(spot)
  return spot < 16777216 and format('%d', spot) or '5' .. format('%013d', spot - 16777216)
end

local function used(spot)
  local count = memo[spot]
  if not count then
    local share = share_of(spot)
    count = redis.call('ZCOUNT', key, share, share)
    memo[spot] = count
  end
  return count
end

-- The first two places of the line whose `t` this is.
local function places_of(member)
  local places = memo[member]
  if not places then
    local line = tonumber(sub(member, 2), 36)
    places = redis.call('ZRANGEBYSCORE', key, format('-%d', line), format('-%d', line - 1), 'LIMIT', '0', '2')
    memo[member] = places
  end
  return places
end

-- Spot and code of a line that is parked.
local function parts_of(score)
  local mantissa, exponent = frexp(-score)
  mantissa = mantissa * 9007199254740992 - 4503599627370496
  local spot = (exponent + 547) * 65536 + floor(mantissa / 68719476736)
  return spot, 68719476735 - mantissa % 68719476736
end

-- The line that is parked first at a spot, and its code; nil: none is. The next one is read with it, because it is asked
-- for once this one came back.
local function first_at(spot)
  local page = memo[-spot]
  if not page then
    local from = -ldexp(4503668346847231 + spot % 65536 * 68719476736, floor(spot / 65536) - 600)
    page = redis.call('ZRANGEBYSCORE', key, from, '0', 'WITHSCORES', 'LIMIT', '0', '2')
    page.next = { page[3], page[4] }
    memo[-spot] = page
  end
  if page.code == nil then
    local at, code = nil, nil
    if page[1] and byte(page[1]) == 116 then at, code = parts_of(page[2]) end
    page.code = at == spot and code
  end
  if page.code then return page[1], page.code end
  return nil
end

-- Class and level of a code.
local function rank_of(class, units, weight)
  local level = floor(units * 64 / weight)
  if level >= 16 then
    local mantissa, exponent = frexp(level)
    level = math.min((exponent - 5) * 16 + floor(mantissa * 32), 511)
  end
  return class * 512 + level
end

local function time_of(since)
  local steps = floor(since / 125)
  -- The time began again since: the line is the first of its level.
  return floor(steps / 16777216) < floor(floor(now / 125) / 16777216) and 0 or steps % 16777216
end

local function parked_at(spot, rank, time)
  local mantissa = 4503599627370496 + spot % 65536 * 68719476736 + 68719476735 - rank * 16777216 - time
  return -ldexp(mantissa, floor(spot / 65536) - 600)
end

-- A line parks at a spot, with this score: another may be the first there, or the second.
local function note_parked(spot, score)
  local page = memo[-spot]
  if not page then return end
  local first, code = first_at(spot)
  memo[-spot] = first and tonumber(page[2]) < score and { first, page[2], code = code } or nil
end

-- The turn of a line at this class and level since then; or the one `before`, if that is at both.
local function turn_at(class, units, weight, since, before)
  local start, factor = (floor(units * 64 / weight) + 1) * 4503599627370496, 2 ^ (80 * class)
  if before and before >= start * factor and before < (start + 4503599627370496) * factor then return before end
  return (start + since) * factor
end

local function class_of(turn)
  local _, exponent = frexp(turn)
  return floor((exponent - 53) / 80)
end

-- The turn of a line with this head. It keeps its time if it was at the same class and level before.
local function turn_of(head, line, before)
  local terms = terms_of(head)
  if terms.f == 0 then
    local score = redis.call('ZMSCORE', key, head)[1]
    local ago = (now_ms - (score + line) * 268435456 + 1) % 134217728
    if ago >= 67108864 then ago = ago - 134217728 end
    return 4503599627370496 + math.max(now_ms - ago, 0) * 1000
  end
  return turn_at(terms.class, used(terms.f), terms.weight, now, before)
end

local function end_line(digits)
  redis.call('ZREM', key, 't' .. digits, 'x' .. digits)
  if redis.call('ZCOUNT', key, '20000000000000', '20000016777216') == 0 then redis.call('ZREM', key, 'x') end
end

local function add(spots, spot)
  if not spots[-spot] then
    spots[-spot] = true
    spots[#spots + 1] = spot
  end
end

-- Settles a line with these digits, which has the turn `before`, or is parked. A parked line stays where it is if its
-- first place needs that limit; make_up sees to where it stood. Returns the turn; nil for an empty line.
function further.settle(digits, before)
  local line = tonumber(digits, 36)
  local head = places_of('t' .. digits)[1]
  if not head then
    end_line(digits)
    return nil
  end
  before = tonumber(before or redis.call('ZMSCORE', key, 't' .. digits)[1] or 0)
  local terms = terms_of(head)
  -- Or it was asleep.
  if before < 0 and before > -33554432 then
    local spot = parts_of(before)
    for _, own in ipairs(terms.spots) do
      if own == spot then return before end
    end
    add(vacated, spot)
    memo[-spot] = nil
  elseif before > 0 and before < math.huge and terms.f > 0 and terms.own == 0 then
    -- The head before it may have needed that.
    add(vacated, terms.f)
  end
  local turn = turn_of(head, line, before)
  count_of_turns, last_turn = count_of_turns + 1, { 't' .. digits, turn }
  if before == 0 then
    local tenants = 20000000000000 + tonumber(sub(head, -15, -11), 36)
    redis.call('ZADD', key, turn, 't' .. digits, tenants, 'x' .. digits, 'inf', 'x')
  elseif turn ~= before then
    redis.call('ZADD', key, turn, 't' .. digits)
  end
  return turn
end

-- The first line that is parked at a spot comes back among the turns, if there is room for its head. One whose tenant
-- got permits since is parked there anew, and the next one is the first; after 16 of these, one comes back all the same.
-- Returns whether one came back.
local function come_back(spot)
  if memo[spot + 0.5] then return false end
  local is_back = false
  while not is_back do
    local member, code = first_at(spot)
    if not member then return false end
    local head = places_of(member)[1]
    if not head then return false end
    local terms = terms_of(head)
    for i, cap in ipairs(terms.caps) do
      if terms.spots[i] == spot and used(spot) + terms.cost > cap then
        memo[spot + 0.5] = true
        return false
      end
    end
    local anew = nil
    if terms.f == 0 then
      anew, is_back = turn_of(head, tonumber(sub(member, 2), 36), 0), true
    else
      local units = used(terms.f)
      local was, rank = floor(code / 16777216), rank_of(terms.class, units, terms.weight)
      if was < rank and further.passed < 16 then
        anew, further.passed = parked_at(spot, rank, time_of(now)), further.passed + 1
      else
        local steps = floor(now / 125)
        local since = was == rank and (steps - (steps - code) % 16777216) * 125 or now
        anew, is_back = turn_at(terms.class, units, terms.weight, since), true
      end
    end
    further.flush()
    if is_back then
      memo[-spot] = memo[-spot].next
      count_of_turns, last_turn = count_of_turns + 1, { member, anew }
    else
      memo[-spot] = nil
    end
    if is_back and may_wait then
      may_wait, unwritten = false, last_turn
    else
      redis.call('ZADD', key, anew, member)
    end
  end
  return true
end

-- The same at each limit of a place that was first of a line among the turns, and is so no more: others may have stayed
-- parked there for it.
local function come_back_all(terms)
  local is_back = false
  for _, spot in ipairs(terms.spots) do is_back = come_back(spot) or is_back end
  return is_back
end
further.come_back = come_back_all

-- Lines of a tenant, a place of which left: those at another level get their turns anew. Adds the spots of those
-- that are parked.
local function retime(f, spots)
  local tenants = 20000000000000 + f
  local lines = redis.call('ZRANGEBYSCORE', key, tenants, tenants, 'LIMIT', '0', '17')
  if #lines == 17 then
    local count = redis.call('ZCOUNT', key, tenants, tenants)
    lines = redis.call('ZRANGEBYSCORE', key, tenants, tenants, 'LIMIT', math.min(now % count, count - 16), '16')
  end
  if not lines[1] then return end
  for i, member in ipairs(lines) do lines[i] = 't' .. sub(member, 2) end
  local units, writes = used(f), {}
  for i, score in ipairs(redis.call('ZMSCORE', key, unpack(lines))) do
    local turn, anew = tonumber(score or 'inf'), nil
    -- Its own weight: that of its tenant may have been changed since the place came that left.
    local head = turn < math.huge and places_of(lines[i])[1]
    local weight = head and terms_of(head).weight
    if turn < -33554432 then
      further.settle(sub(lines[i], 2), turn)
    elseif turn < 0 then
      local spot, code = parts_of(turn)
      local rank = rank_of(floor(code / 8589934592), units, weight)
      if floor(code / 16777216) ~= rank then
        anew = parked_at(spot, rank, time_of(now))
        memo[-spot] = nil
        add(spots, spot)
      end
    elseif turn < math.huge then
      anew = turn_at(class_of(turn), units, weight, now, turn)
      if anew == turn then anew = nil end
    end
    if anew then
      writes[#writes + 1] = anew
      writes[#writes + 1] = lines[i]
    end
  end
  if writes[1] then redis.call('ZADD', key, unpack(writes)) end
end

-- After the places from ids[from] to ids[to] have left and all lines are settled: what waits for that comes back. Returns
-- how many lines got turns since `forget`, and the last of these, with its turn. is_alone: no line waits for its turn; if
-- only one gets one, it is written by `flush`.
function further.make_up(ids, from, to, is_alone)
  local tenants, spots = {}, vacated
  vacated, may_wait = {}, is_alone and count_of_turns == 0
  for i = from, to do
    local id = ids[i]
    local f = byte(id, -16) == 46 and tonumber(sub(id, -15, -11), 36) or 0
    if f > 0 and not tenants[f] then
      tenants[f] = true
      retime(f, spots)
    end
  end
  for i = from, to do
    local id = ids[i]
    if byte(id, -16) == 46 then
      local f = tonumber(sub(id, -15, -11), 36)
      if f > 0 then add(spots, f) end
      if byte(id, -3) > 55 then
        local terms = terms_of(id)
        for j = terms.own + 1, #terms.spots do add(spots, terms.spots[j]) end
      end
    end
  end
  for _, spot in ipairs(spots) do come_back(spot) end
  may_wait = false
  return count_of_turns, last_turn
end

-- The spot of the limit that keeps a place back which has been at its level for so long, and the score of a line that
-- parks there with it; nil: none does.
local function kept_at(terms, since)
  local rank, time = rank_of(terms.class, terms.f > 0 and used(terms.f) or 0, terms.weight), time_of(since)
  for i, spot in ipairs(terms.spots) do
    local is_kept = used(spot) + terms.cost > terms.caps[i]
    if not is_kept then
      local _, code = first_at(spot)
      is_kept = code and code < rank * 16777216 + time
    end
    if is_kept then return spot, parked_at(spot, rank, time) end
  end
  return nil
end
further.kept_at = kept_at

-- The status with which a further limit refuses a place; nil: none does.
function further.refused(terms)
  local full = nil
  for i = #terms.spots, terms.own + 1, -1 do
    if terms.cost > terms.caps[i] then return -4 end
    if used(terms.spots[i]) + terms.cost > terms.caps[i] then full = terms.own - 4 - i end
  end
  return full
end

-- Adds the members with which a place holds.
function further.hold(writes, id, terms)
  local share = terms.f > 0 and share_of(terms.f) or '100000000'
  for i = terms.own, #terms.spots do
    local kind = queued
    if i > terms.own then
      kind, share = string.char(96 + i - terms.own), share_of(terms.spots[i])
    end
    for j = 1, terms.cost do
      writes[#writes + 1] = share
      writes[#writes + 1] = (j > 1 and j or '') .. kind .. id
    end
  end
end

-- Whether the first place of a line has no tenant.
function further.is_nobodys(member)
  if tonumber(sub(member, 2), 36) < 16777216 then return false end
  return sub(places_of(member)[1], -15, -11) == '00000'
end

-- Reads the line whose turn has come. Returns nil if it gives the line its turn anew, because its tenant got permits by
-- other lines since; so it does if `may_change`.
function further.read(member, score, may_change)
  local places = places_of(member)
  local terms = terms_of(places[1])
  if may_change and terms.f > 0 then
    local units = used(terms.f)
    if score < turn_at(terms.class, units, terms.weight, 0) then
      unwritten = nil
      redis.call('ZADD', key, turn_at(terms.class, units, terms.weight, now), member)
      return nil
    end
  end
  return { member = member, score = score, places = places, terms = terms }
end

local function since_of(turn) return ldexp(turn, -80 * class_of(turn)) % 4503599627370496 end

-- Parks the line, if one of its limits keeps it back. Returns whether it did, and whether another came back.
function further.park(line)
  local spot, score = kept_at(line.terms, since_of(line.score))
  if not spot then return false end
  unwritten = nil
  redis.call('ZADD', key, score, line.member)
  note_parked(spot, score)
  return true, come_back_all(line.terms)
end

-- Gives the first place of the line its permits, and the line its next turn; or it parks at once. Returns whether any
-- line may have a turn now that had none, or another. `is_alone`: no other line waits for its turn, or is stopped.
function further.grant(line, is_alone)
  local terms, places, member, writes = line.terms, line.places, line.member, {}
  local own, next = places[1], places[2]
  if places.is_rest then
    memo[member] = nil
    next = places_of(member)[2]
  end
  further.hold(writes, sub(own, #queued + 1), terms)
  if terms.f > 0 then memo[terms.f] = used(terms.f) + terms.cost end
  for i = terms.own + 1, #terms.spots do memo[terms.spots[i]] = used(terms.spots[i]) + terms.cost end
  local is_changed = false
  if next then
    memo[member] = { next, is_rest = true }
    local turn = turn_of(next, tonumber(sub(member, 2), 36), line.score)
    local spot, score = kept_at(terms_of(next), since_of(turn))
    if spot then note_parked(spot, score) else is_changed = true end
    writes[#writes + 1] = score or turn
    writes[#writes + 1] = member
  end
  redis.call('ZADD', key, unpack(writes))
  unwritten = nil
  if not next then end_line(sub(member, 2)) end
  if terms.f > 0 and not is_alone then
    local digits = sub(own, -15, -11)
    local turn = redis.call('ZMSCORE', key, 't' .. digits)[1]
    -- A line that is asleep stays so: a grant brings it no nearer.
    if turn and byte(turn) ~= 45 then
      settle(digits, turn)
      is_changed = true
    end
  end
  return come_back_all(terms) or is_changed
end

-- A place of a line was renewed that is parked with this score. If its time is ahead of the present, because that began
-- again or the clock stepped back, the line would be last for long: now it is the first of its level. Returns whether it
-- was so.
function further.renewed(digits, score)
  local spot, code = parts_of(score)
  if code % 16777216 <= time_of(now) then return false end
  -- It may have come back by the renewal of another place.
  if tonumber(redis.call('ZMSCORE', key, 't' .. digits)[1]) < 0 then
    redis.call('ZADD', key, parked_at(spot, floor(code / 16777216), 0), 't' .. digits)
    memo[-spot], memo[spot + 0.5] = nil, nil
    come_back(spot)
  end
  return true
end
