-- acquire: take out the places that leave; then grant each newcomer a permit, let it join the queue, or refuse it.
--
-- A semaphore is one sorted set. A place without a tenant has these members:
--   <id>                          score: the end of its lease, ms by TIME (about 1e12); with a claim s (about 1e9)
--   q<id>                         score: its ticket, us by TIME (about 1e15), while it waits; for q see queued.lua
--   2q<id> ... <cost>q<id>        score: 1e8, while it holds: its permits beyond the first
-- An <id> is [~]<node>:<n>; '~' marks a node without a mailbox. The id of a place that may wait ends in '-' and the
-- limit of its policy, seven digits in base 36.
--
-- A place with a tenant, a cost, a rate or further limits has a claim at the end of its id, sixteen bytes: '.', then in
-- base 36 the tenant's number f (5 digits; 0: none), its weight (2), its cap (5; 0: none), the place's class (1) and its
-- cost (2).
-- If it may wait, fifteen bytes precede the claim: '-', then limit and headroom of its policy (7 each). They are cut by
-- position. If it has a rate, thirteen bytes precede these: '/', then the grants in a window (3), the window in us (8),
-- and how often that is doubled for the time for which starts are kept (1). An id without a claim never has '.' there.
-- If it takes of budgets, these stand behind its rate: '$', then for each the number g (5), the us that it takes (8) and
-- the burst in us (8); see charges.lua.
-- A place with a rate, whoever its tenant is, has these members:
--   r<n>, 2r<n> ... <cost>r<n>    score: -(seconds): it was granted then; n: its id up to its rate; see rate.lua
-- A place with a tenant has these members:
--   <id>                          score: 1e13 + the end of its lease, ms
--   q<id>                         score: -f + k * 2^-28: it waits in line f; k: the time in ms, modulo 2^27, or one
--                                 more than that of the last in the line
--   q<id>, 2q<id> ... <cost>q<id>  score: f: it holds, one member for each permit
--   t<f, 5 digits>                score: the turn of line f, from 2^52 on; +inf: the line is stopped; see settle.lua;
--                                 below -(2^29): it is asleep; see asleep.lua
--
-- A place with further limits tells them before that '-', or else the '.': '+', then the number of its line L (5
-- digits, from 2^24 on), then for each limit its number g (5) and its cap (5); and 8 is added to its class. Places of
-- one line have the same tenant and the same limits. It has the members of a place with a tenant, with L in place of f
-- where it waits, 1e8 in place of f = 0 where it holds, and these:
--   a<id>, 2a<id> ... <cost>a<id>  score: 5e13 + g of the first limit, while it holds; b..., c...: of the others
--   t<L, 5 digits>                score: the turn of line L; or below 0, close to it: it is parked; see further.lua
--   x<L, 5 digits>                score: 2e13 + f, while the line exists
--   x                             score: +inf, while any such line exists
-- And each budget g of which any place has taken has the member
--   b<g, 5 digits>                score: -(us at which it is full again) * 2^-23; of a tenant if g begins with a letter
--   s                             score: +inf, while any line is asleep
--
-- So the ranges of scores are, from the lowest: grants, lines that are asleep (from -1e9 on), budgets (from -(2^29) on),
-- lines, lines that are parked, permits by tenant, further permits without one, lease ends (with a claim alone, without
-- one, in a line), tenants of lines from 2e13 on, permits by limit from 5e13 on, tickets from 1e14 on, turns from 2^52
-- on. The permits that f has in use, or that are in use
-- under g, are the members of one score; all in use are those from 0 to 1e13, less the tickets. A set is plain if no
-- place in it has a claim: it has no score below 1e12, and much of the work falls away: see kind.lua.
--
-- Replies have the ticket of a line as 1e14 + k, and each lease end in ms, without the 1e13.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, permits; newcomers are judged by it
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   headroom    integer >= 0, permits that are reserved for class 0; -1: none of the ids has a claim
-- ARGV[4]   lease_ms    integer >= 1
-- ARGV[5]   max_queue   integer >= 0, the most places that may wait in one line; -1: the newcomers may not wait
-- ARGV[6]   max_waiting integer >= 0; a place joins a tenant's line only while that line and all lines together are
--                       shorter
-- ARGV[7]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[8]   node        the caller's
-- ARGV[9]   leaving     integer >= 0, the number of ids that leave
-- ARGV[10]  recalls     1: if these are the first to wait, notify nodes that keep permits; 0: do not
-- ARGV[11..] id         the places that leave, in any order; then one or more newcomers, in the order of their arrival
--
-- Returns   lease_end if all newcomers were granted at once; else
--           {lease_end, earliest, in_use, waiting, status per newcomer ..., id, lease_end of own grants ...}
--           earliest: the first lease end; 0 if no place waits; 1 if the bound below was reached while a permit was
--           free and a place that could have it waited: call again at once
--           status: 1 granted | a ticket (>= 1e14) waits | -1 no permit free | -2 queue full | -3 its tenant is
--           at its cap | -4 it costs more than it could ever get | -5, -6, -7 its first, second or third further limit
--           is full | -7 - ms a permit is free, but its rate allows no grant for so long; -1e12 - ms, -2e12 - ms the
--           same of its first or second budget. The ticket of a newcomer has
--           2^28, 2 * 2^28 or 3 * 2^28 added if that limit is full
--           earliest < 0: only its rate or its budgets keep back the next in turn, for so many ms
-- Errors    none of its own
-- Cost      5 commands while permits are free, 4 if the set is empty, 1 more if any leave, for any number of ids; 12
--           with a hand-over. With claims 5, 6 if none is in use, 1 more with a rate, 1 more with a budget, 1 more if any
--           leave, 1 more for each tenant with a cap and each further limit, 1 more if any joins a tenant's line.
--           O((ids + 500) * log n): see promote.lua; and what recall.lua costs when a queue begins
-- Retry     safe: an id that is present keeps its place, and its lease is renewed; one that has left is ignored

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[4])
local first, last = 11 + ARGV[9], #ARGV
local leaving, count_of_ids = first - 11, last - first + 1
local claims = ARGV[3] ~= '-1'
local headroom = claims and tonumber(ARGV[3]) or 0
--@clock
local lease_end = now_ms + lease_ms
--@queued
-- The numbers of members, and of tickets and turns; of permits in use, and of places that wait without a claim.
local all, waiting, units, held
if not claims then
  all = redis.call('ZCARD', key)
  -- More members than permits: places wait, or the limit was lowered. Those that leave may be waiting, so their tickets
  -- are removed in the same command.
  local crowded = all > limit
  if leaving > 0 and all > 0 then
    if crowded then
      local members = { unpack(ARGV, 11, first - 1) }
      for i = 1, leaving do members[leaving + i] = queued .. members[i] end
      all = all - redis.call('ZREM', key, unpack(members))
    else
      all = all - redis.call('ZREM', key, unpack(ARGV, 11, first - 1))
    end
  end
  waiting = all > 0 and redis.call('ZCOUNT', key, '100000000000000', '+inf') or 0
  if leaving > 0 and waiting > 0 and not crowded then
    -- Few members, and yet some wait: the limit was raised.
    local members = {}
    for i = 1, leaving do members[i] = queued .. ARGV[10 + i] end
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
else
  if leaving > 0 then
    local ids, from, to, removed = ARGV, 11, first - 1, 0
    --@used
    --@take
    held = removed == count
  end
  units = redis.call('ZCOUNT', key, '0', '(10000000000000')
  waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')

  -- The most frequent call: one newcomer with a claim, of one permit and class 0, while no place waits. Most have no
  -- tenant.
  local id, sub = ARGV[last], string.sub
  local is_common = sub(id, -16) == '.000000100000001'
  if waiting == 0 and first == last and (is_common or sub(id, -3) == '001' and string.byte(id, -16) == 46) then
    local f, each = 0, '00000'
    if not is_common then f, each = tonumber(sub(id, -15, -11), 36), sub(id, -8, -4) end
    if units < limit and (each == '00000' or redis.call('ZCOUNT', key, f, f) < tonumber(each, 36)) then
      local at, charged_at = string.find(id, '/', 13, true), string.find(id, '$', 13, true)
      local fits, kept_ms, budget, full_at = true, 0, nil, nil
      if at then
        -- As in rate.lua, while fewer starts are kept than the window allows. A count walks through a small set, which is
        -- a list; ids with budgets are too long for one.
        local starts = tonumber(sub(id, at + 1, at + 3), 36)
        if charged_at then
          fits = redis.call('ZCOUNT', key, '-inf', '(-1000000000') < starts
        else
          local rank = string.format('%d', starts - 1)
          fits = tonumber(redis.call('ZRANGE', key, rank, rank, 'WITHSCORES')[2] or 0) >= -1000000000
        end
        kept_ms = tonumber(sub(id, at + 4, at + 11), 36) / 1000
        if string.byte(id, at + 12) ~= 48 then kept_ms = kept_ms * 2 ^ tonumber(sub(id, at + 12, at + 12), 36) end
      end
      if charged_at and fits then
        -- As in charges.lua, while a budget that is full has a member, and this call is not repeated.
        budget = 'b' .. sub(id, charged_at + 1, charged_at + 5)
        local scores = redis.call('ZMSCORE', key, id, budget)
        local taken = tonumber(sub(id, charged_at + 6, charged_at + 13), 36)
        full_at = math.max((scores[2] or 0) * -8388608, now) + taken
        fits = scores[2] and not scores[1] and taken > 0 and now % 64 > 0 and string.byte(id, charged_at + 22) < 48
          and full_at - tonumber(sub(id, charged_at + 14, charged_at + 21), 36) <= now
        kept_ms = math.max(kept_ms, (full_at - now) / 1000)
      end
      if fits then
        -- Scores are passed as text: Redis 7.0 formats a number with 17 digits, which takes as long as a command. Nine
        -- decimals are enough for the score of a budget: a double is exact to 2^-25 there.
        local format = string.format
        local score = f == 0 and format('%d.%03d', lease_end / 1000, lease_end % 1000) or format('%.0f', lease_end + 1e13)
        full_at = budget and format('-%d.%09d', full_at / 8388608, full_at % 8388608 * (1e9 / 8388608))
        local start = at and 'r' .. sub(id, 1, at - 1)
        local started = at and '-' .. t[1] .. '.' .. sub('00000' .. t[2], -6)
        -- Without a list where that is possible, as it is for most.
        if f > 0 then
          local writes = { score, id, format('%d', f), queued .. id }
          if budget then writes[5], writes[6] = full_at, budget end
          if start then writes[#writes + 1], writes[#writes + 2] = started, start end
          redis.call('ZADD', key, unpack(writes))
        elseif budget and start then
          redis.call('ZADD', key, score, id, full_at, budget, started, start)
        elseif budget or start then
          redis.call('ZADD', key, score, id, full_at or started, budget or start)
        else
          redis.call('ZADD', key, score, id)
        end
        -- As in write.lua.
        local ttl = redis.call('PTTL', key)
        if ttl < lease_ms + 1000 or ttl < kept_ms + 1 then
          redis.call('PEXPIRE', key, math.max(3 * lease_ms, math.ceil(kept_ms)) + 1000)
        end
        return lease_end
      end
    end
  end
end

local for_all, frees = ARGV[2] == '1', leaving > 0
--@kind
--@lease
local sub, byte = string.sub, string.byte
local line_of, cost_of, lease_of, settle, leave, further, asleep, room_of, never_fits, opening_of, start, undo, charges
local silent_before
local turn = nil
if not is_plain then
  turn = {}
  units = units or redis.call('ZCOUNT', key, '0', '(10000000000000')
  if waiting > 0 then
    turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
  end
  -- All newcomers of a call have the same rate, or none; each has budgets of its own.
  local id = ARGV[last]
  local is_rated, is_charged = string.find(id, '/', 13, true), false
  for i = first, claims and last or 0 do is_charged = is_charged or string.find(ARGV[i], '$', 13, true) end
  local is_second, is_tried = false, false
  repeat
    if is_second then
      --@claim
      --@settle
      --@leave
      --@room
      local is_further = false
      for i = first, last do is_further = is_further or byte(ARGV[i], -16) == 46 and byte(ARGV[i], -3) > 55 end
      if turn[1] or is_further then turn = leave(ARGV, 11, first - 1, turn, is_further, held) end
      if asleep then turn = asleep.rouse() end
    end
    if not opening_of and (is_second or is_rated or is_charged) then
      --@rate
    end
    -- Whether all can be granted at once: no waiting place could be served, and no cap forbids it. Without claims, a reply
    -- in short tells that no place waits, so none does.
    local is_quiet = turn[2] == 'inf' and (is_second or leaving == 0 and turn[1] ~= 's')
    -- A caller that gives something back is told when a line wakes, which takes a long reply.
    if is_quiet and leaving > 0 and asleep and asleep.first() then is_quiet = false end
    if not is_tried and (not turn[1] or claims and is_quiet) then
      is_tried = true
      local writes, count, all, room = {}, 0, units, limit
      local fits, seen, share, of_call, has, turns, under = true, nil, nil, nil, nil, nil, nil
      for i = first, last do
        local id = ARGV[i]
        if byte(id, -16) ~= 46 then
          all = all + 1
          writes[count + 1], writes[count + 2] = plain_score, id
          count = count + 2
        else
          local digits, cost, terms = sub(id, -15, -11), 1, sub(id, -8)
          if digits ~= seen then
            seen, share = digits, digits == '00000' and '100000000' or string.format('%d', tonumber(digits, 36))
            if turn[1] and digits ~= '00000' then
              turns = turns or {}
              turns[#turns + 1] = 't' .. digits
            end
          end
          if digits == '00000' and byte(terms, 6) < 56 then
            writes[count + 1], writes[count + 2] = nobodys_score, id
            count = count + 2
          else
            writes[count + 1], writes[count + 2] = tenants_score, id
            writes[count + 3], writes[count + 4] = share, queued .. id
            count = count + 4
          end
          -- No cap, class 0, one permit.
          if terms ~= '00000001' then
            local each = tonumber(sub(terms, 1, 5), 36)
            cost = tonumber(sub(terms, -2), 36)
            for j = 2, cost do
              writes[count + 1], writes[count + 2] = share, j .. queued .. id
              count = count + 2
            end
            if byte(terms, 6) > 55 then
              -- It has further limits. Where anything waits, it takes its turn.
              fits, under = fits and not turn[1], under or {}
              local at, bound, kind = string.find(id, '+', 13, true), byte(id, -31) == 45 and 31 or 16, 96
              for at = at + 6, #id - bound, 10 do
                local limit_share = '5' .. string.format('%013d', tonumber(sub(id, at, at + 4), 36))
                kind = kind + 1
                for j = 1, cost do
                  writes[count + 1] = limit_share
                  writes[count + 2] = (j > 1 and j or '') .. string.char(kind) .. id
                  count = count + 2
                end
                under[limit_share] = cost + (under[limit_share] or redis.call('ZCOUNT', key, limit_share, limit_share))
                if under[limit_share] > tonumber(sub(id, at + 5, at + 9), 36) then fits = false end
              end
            end
            if byte(terms, 6) ~= 48 and byte(terms, 6) ~= 56 then room = limit - headroom end
            if each > 0 then
              if not of_call then
                -- The permits that each tenant asks for in this call, counted once there is a cap.
                of_call, has = {}, {}
                for j = first, i - 1 do
                  local before = ARGV[j]
                  if byte(before, -16) == 46 then
                    local tenant = sub(before, -15, -11)
                    of_call[tenant] = (of_call[tenant] or 0) + tonumber(sub(before, -2), 36)
                  end
                end
              end
              has[digits] = has[digits] or redis.call('ZCOUNT', key, share, share)
              if has[digits] + (of_call[digits] or 0) + cost > each then fits = false end
            end
          end
          if of_call then of_call[digits] = (of_call[digits] or 0) + cost end
          all = all + cost
        end
      end
      if fits and all <= room and turns then
        -- Newcomers may pass stopped lines, but not the line of their own tenant.
        turns = redis.call('ZMSCORE', key, unpack(turns))
        for i = 1, #turns do fits = fits and not turns[i] end
      end
      if fits and all <= room and is_charged then
        local taken, charged = {}, {}
        for i = first, last do
          fits = fits and not opening_of(ARGV[i], 1, taken)
          if string.find(ARGV[i], '$', 13, true) then charged[#charged + 1] = ARGV[i] end
        end
        -- A place that is there has taken already: the call is repeated.
        local there = fits and redis.call('ZMSCORE', key, unpack(charged))
        for i = 1, fits and #charged or 0 do fits = fits and not there[i] end
      end
      if fits and all <= room and not (is_rated and opening_of(id, all - units)) then
        --@write
        if is_rated or is_charged then
          for i = first, last do start(ARGV[i]) end
        end
        return lease_end
      end
    end
    is_second = not is_second
  until not is_second
end

-- There may be no permit free. Waiting places are served first, then the newcomers.
local max_queue, max_waiting = tonumber(ARGV[5]), tonumber(ARGV[6])
local counted, node = ARGV[7] == '1', ARGV[8]
--@sweep
if swept then all, waiting, turn, units = nil, nil, nil, nil end
--@survey
local count = count_of_ids
local members = { unpack(ARGV, first) }
if not is_plain then
  for i = 1, count do
    local id = members[i]
    members[count + i] = queued .. id
    -- The turn of its line; any that is not there without one.
    members[2 * count + i] = 't' .. (line_of(id) or '')
  end
end
local known, asked = #members, members
--@promote
-- Newcomers are judged by the limit of the call.
most = limit
-- A node that is gone may have been the newcomers' own.
if gone or not scores then scores = redis.call('ZMSCORE', key, unpack(members, 1, known)) end
local is_first = ARGV[10] == '1' and queue + (is_plain and 0 or redis.call('ZCOUNT', key, '-33554432', '-0.000000003')) == 0
local latest = nil
if further and is_first then
  -- Some newcomers may be written before it is known whether any waits.
  latest = redis.call('ZRANGE', key, '(20000000000000', '(100000000', 'BYSCORE', 'REV', 'LIMIT', '0', '128')
end
if is_plain then
  for i = 1, count do
    if scores[i] then
      -- This call is a repetition: some of its places may be waiting.
      local tickets = {}
      for j = 1, count do tickets[j] = queued .. members[j] end
      for j, ticket in ipairs(redis.call('ZMSCORE', key, unpack(tickets))) do scores[count + j] = ticket end
      break
    end
  end
end
-- Whether an existing lease is gone or was extended: it may have been the earliest.
local moved = gone
local statuses, writes, ticket = { nil, nil, nil, nil }, { nil, nil, nil, nil, nil, nil, nil, nil }, 0
-- The number of places in all lines, once it is known; the permits that were granted in this call to places without a
-- tenant and are not written yet.
local in_lines, fresh = nil, 0
-- By line: its turn, its tenant's permits in use, the length of the line and the last ticket in it, each once it is
-- known; and whether it was settled in this call, if it was stopped.
local turns, has, lines, tails, seen
if claims then turns, has, lines, tails, seen = {}, {}, {}, {}, {} end
for i = 1, count do
  local id, status, stands = members[i], nil, scores[count + i]
  local has_claim = claims and byte(id, -16) == 46
  local digits, tenant = nil, nil
  if has_claim then digits, tenant = line_of(id) end
  local f, is_last, is_changed = digits and tonumber(digits, 36) or 0, false, false
  if digits and turns[digits] == nil then turns[digits] = tonumber(scores[2 * count + i]) or false end
  if scores[i] then
    moved = true
    status = tonumber(stands or 1)
    if digits then status = status < 0 and 1e14 + (status + f) * 268435456 or 1 end
  else
    local line, to, terms, spot, sleeps_until = queue, f > 1 and 1 - f or '-0.000000003', nil, nil, nil
    if f > 16777215 then
      -- It is judged by what is in use, and by where lines are parked, with all newcomers before it.
      --@add
      writes, fresh, terms = { unpack(writes, math.max(#writes - 1, 1)) }, 0, further.terms_of(id)
      further.forget()
    end
    if digits then
      line = turns[digits] and (lines[digits] or redis.call('ZCOUNT', key, -f, to)) or 0
      lines[digits] = line
    end
    local is_compared = line == 0 and (digits or in_use < limit and (next_turn or has_claim))
    -- The permits of its tenant, or of all places without one, if they matter.
    local cost, class, room, units, refused = 1, 0, limit, 0, -1
    if has_claim then
      cost, class = cost_of(id), tonumber(sub(id, -3, -3), 36) % 8
      local each = tonumber(sub(id, -8, -4), 36)
      local opens, budget, own_opens = opening_of(id, cost)
      sleeps_until = own_opens
      if class > 0 then room = limit - headroom end
      if tenant then
        if not has[tenant] and (each > 0 or is_compared) then
          local share = tonumber(tenant, 36)
          has[tenant] = redis.call('ZCOUNT', key, share, share)
        end
        units = has[tenant] or 0
      end
      local full = terms and further.refused(terms)
      if room > 0 and cost > room or each > 0 and cost > each or full == -4 or opens == math.huge then
        refused = -4
      elseif each > 0 and units + cost > each then
        refused = -3
      elseif full then
        refused = full
      elseif opens and in_use + cost <= room then
        refused = -7 - math.ceil((opens - now) / 1000)
        if budget then refused = refused + 7 - budget * 1e12 end
      end
    end
    if is_compared and not digits then
      units = redis.call('ZCOUNT', key, '(33554432', '(10000000000000') + fresh
    end
    -- As the first of its line: the turn of that, and whether it comes before all others.
    local own_turn, leads = nil, line == 0 and not next_turn
    if is_compared then
      own_turn = math.huge
      if terms and (refused == -1 or refused ~= -4 and max_queue >= 0) then
        spot, own_turn = further.kept_at(terms, now)
      end
      if not spot and (refused == -1 or refused < -7) then
        local level = math.floor(units * 64 / (digits and tonumber(sub(id, -10, -9), 36) or 1))
        own_turn = ((level + 1) * 4503599627370496 + now) * 2 ^ (80 * class)
      else
        sleeps_until = nil
      end
      leads = own_turn < (next_turn or math.huge) or own_turn == next_turn and f < next_f
      -- The first of the queue came before it.
      if sleeps_until or terms and (spot or not tenant and next_turn and next_f == 0) then leads = false end
    end
    if refused == -4 then
      status = -4
    elseif refused == -1 and leads and in_use + cost <= room then
      status = 1
      in_use = in_use + cost
      if has_claim then start(id) end
      if terms then
        further.hold(writes, id, terms)
        --@add
        writes, fresh = {}, 0
        if tenant then
          has[tenant] = nil
          local turn = redis.call('ZMSCORE', key, 't' .. tenant)[1]
          if turn and byte(turn) ~= 45 then turns[tenant], is_changed = settle(tenant, turn), true end
        end
      else
        if digits then has[digits] = units + cost else fresh = fresh + cost end
        for j = digits and 1 or 2, cost do
          writes[#writes + 1] = digits and f or 1e8
          writes[#writes + 1] = (j > 1 and j or '') .. queued .. id
        end
      end
    elseif max_queue < 0 then
      status = refused
    elseif line >= max_queue then
      status = -2
    elseif digits then
      in_lines = in_lines or redis.call('ZCOUNT', key, '-33554432', '-0.000000003')
      if line + in_lines + queue >= max_waiting then status = -2 end
    end
    if status == nil then
      local stands_at = nil
      if not digits then
        if ticket == 0 then
          local latest = is_plain and redis.call('ZRANGE', key, '0', '0', 'REV', 'WITHSCORES')
            or redis.call('ZRANGE', key, '(4503599627370496', '1e14', 'BYSCORE', 'REV', 'LIMIT', '0', '1', 'WITHSCORES')
          ticket = tonumber(latest[2] or 0)
        end
        ticket = math.max(now, ticket + 1)
        status, stands_at = ticket, ticket
        queue = queue + 1
      else
        in_lines = in_lines + 1
        local k = now_ms % 134217728 + 1
        if line == 0 then
          -- Without a tenant, the turn of a line is what its first ticket tells: ms.
          if terms and not (tenant or spot) then own_turn = 4503599627370496 + now_ms * 1000 end
          if sleeps_until then
            if not asleep then
              --@asleep
            end
            own_turn = asleep.score(sleeps_until)
            writes[#writes + 1] = 'inf'
            writes[#writes + 1] = 's'
          end
          turns[digits], seen[digits] = own_turn, true
          writes[#writes + 1] = own_turn
          writes[#writes + 1] = 't' .. digits
          if terms then
            writes[#writes + 1] = 20000000000000 + terms.f
            writes[#writes + 1] = 'x' .. digits
            writes[#writes + 1] = 'inf'
            writes[#writes + 1] = 'x'
          end
        else
          local tail = tails[digits]
          if not tail then
            tail = redis.call('ZRANGE', key, to, -f, 'BYSCORE', 'REV', 'LIMIT', '0', '1', 'WITHSCORES')
            tail = (tail[2] + f) * 268435456
          end
          k = math.min(math.max(k, tail + 1), 268435455)
          -- Several places can have the highest ticket: then their ids decide the order.
          is_last = k == 268435455
        end
        status, stands_at = 1e14 + k, k / 268435456 - f
        -- The further limit that is full.
        if refused <= -5 and refused >= -7 then status = status + (-4 - refused) * 268435456 end
        lines[digits], tails[digits] = line + 1, k
      end
      if own_turn and leads and (digits or not never_fits(id)) then
        next_turn, next_head, next_f, next_cost, next_room = own_turn, id, f, cost, room_of(id)
      end
      -- A line without a tenant can change how the queue compares with all others.
      is_changed = further and line == 0 and not spot and in_use < limit
      writes[#writes + 1] = stands_at
      writes[#writes + 1] = queued .. id
    end
  end
  if status > 0 then
    writes[#writes + 1] = digits and tenants_score or has_claim and nobodys_score or plain_score
    writes[#writes + 1] = id
  end
  -- Where members are written before the end, the last stays in the list, for the expiry.
  local is_stopped = digits and status >= 1e14 and turns[digits] == math.huge
  if is_last or is_stopped and not seen[digits] then
    -- Settle the line again: its head can be another now, or its places, or the limit, have changed since it was stopped.
    seen[digits] = true
    if is_last or f > 16777215 then
      --@add
      writes, fresh = { unpack(writes, math.max(#writes - 1, 1)) }, 0
    end
    if f > 16777215 then
      further.forget()
      turns[digits] = further.settle(digits, turns[digits])
      further.make_up({}, 1, 0)
    else
      turns[digits] = settle(digits, turns[digits])
    end
    is_changed = is_last or turns[digits] < math.huge
  end
  if is_changed then
    -- The first of all lines may be another now.
    --@add
    writes, fresh = { unpack(writes, math.max(#writes - 1, 1)) }, 0
    next_turn = nil
    local line = redis.call('ZRANGEBYSCORE', key, '4503599627370496', '(inf', 'WITHSCORES', 'LIMIT', '0', '1')
    if line[1] then
      next_turn, next_f = tonumber(line[2]), tonumber(sub(line[1], 2), 36)
      local to = next_f > 1 and 1 - next_f or '-0.000000003'
      local head = redis.call('ZRANGEBYSCORE', key, -next_f, to, 'LIMIT', '0', '1')[1]
      next_head, next_cost, next_room = head, cost_of(head), room_of(head)
    end
    if queue > 0 then
      local head = redis.call('ZRANGEBYSCORE', key, '100000000000000', '(inf', 'WITHSCORES', 'LIMIT', '0', '1')
      local held = redis.call('ZCOUNT', key, '(33554432', '(10000000000000') - queue
      local own_turn = (held * 64 + 1) * 4503599627370496 + head[2]
      -- As in promote.lua.
      if further and line[1] and further.is_nobodys(line[1]) then own_turn = 4503599627370496 + head[2] end
      if not never_fits(head[1]) and (not next_turn or own_turn <= next_turn) then
        next_turn, next_head, next_f, next_cost, next_room = own_turn, head[1], 0, cost_of(head[1]), room_of(head[1])
      end
    end
  end
  statuses[i] = status
end
if is_first then
  for _, status in ipairs(statuses) do
    if status >= 1e14 then
      --@recall
      break
    end
  end
end
--@write
if moved then
  earliest = nil
elseif #writes > 0 and (earliest == 0 or lease_end < earliest) then
  earliest = lease_end
end
--@answer
