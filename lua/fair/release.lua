-- fair/release: release.lua for any set. Members: see fair/acquire.lua.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, waiting places are granted while fewer permits than this are in use
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   headroom    integer >= 0, permits that are reserved for class 0
-- ARGV[4]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[5]   node        the caller's
-- ARGV[6..] id          any number; with none the call only sweeps and promotes
--
-- Returns   {id, lease_end of own grants ...}, and 1 as the last item if the bound below was reached while a
--           permit was free and a place that could have it waited: call again at once; or -ms if only its rate keeps
--           back the next in turn: call again then
-- Errors    none of its own
-- Cost      2 commands while no place waits, about 12 with a hand-over from line to line; O((ids + 500) * log n)
-- Retry     safe: an id that is not present is ignored

local key = KEYS[1]
local last = #ARGV
--@queued
if last == 6 and string.sub(ARGV[last], -2) == '01' then
  -- One place of one permit, or without a claim.
  redis.call('ZREM', key, ARGV[last], queued .. ARGV[last])
elseif last > 5 then
  local members, count, sub = {}, 0, string.sub
  for i = 6, last do
    local id = ARGV[i]
    members[count + 1], members[count + 2] = id, queued .. id
    count = count + 2
    if sub(id, -2) ~= '01' and string.byte(id, -16) == 46 then
      for share = 2, tonumber(sub(id, -2), 36) do
        count = count + 1
        members[count] = share .. queued .. id
      end
      if count > 4000 then
        redis.call('ZREM', key, unpack(members, 1, count))
        count = 0
      end
    end
  end
  if count > 0 then redis.call('ZREM', key, unpack(members, 1, count)) end
end
local turn = redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
if not turn[1] then return {} end
-- A write that needs no memory goes first: Redis refuses a script only at its first write when memory is used up.
if last == 5 then redis.call('ZREM', key, '') end

local limit, headroom = tonumber(ARGV[1]), tonumber(ARGV[3])
local for_all, frees = ARGV[2] == '1', true
local counted, node = ARGV[4] == '1', ARGV[5]
local left = { unpack(ARGV, 6) }
--@clock
local settle, remove, room_of, opening_of, start, undo
--@fair/settle
--@fair/rate
--@fair/leave
if not turn[1] then return {} end
--@fair/sweep
local units
if swept then turn = nil end
--@fair/survey
--@fair/promote
if in_use < most and next_turn and next_room > 0 then
  -- Promotion has reached its bound, or a rate keeps back the next in turn: see fair/answer.lua.
  local opens, fits = opening_of(next_head, next_cost), in_use + next_cost <= next_room
  if next_cost > next_room or opens == math.huge or fits and not opens then
    own[#own + 1] = 1
  elseif fits then
    own[#own + 1] = -math.ceil((opens - now) / 1000)
  end
end
return own
