-- reassert: renew places that a renewal found gone, with proof. The proof is the last score that Redis gave the place.
-- A lease end in the future shows that Redis lost a permit that is in use: it is counted again, for its tenant, too,
-- and even past the limit. A ticket gives a waiting place its old turn in the queue, under a new id and however long
-- the queue is; the place that it replaces is named with it, and leaves. Members: see acquire.lua.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, waiting places are granted while fewer permits than this are in use
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   headroom    integer >= 0, permits that are reserved for class 0; -1: none of the ids has a claim
-- ARGV[4]   lease_ms    integer >= 1
-- ARGV[5]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[6]   node        the caller's
-- ARGV[7..] id, score   one or more pairs; score: lease end in ms, or ticket (>= 1e14); 0: the next one replaces this
--                       place, which leaves if it waits; if it holds, the next one is not put there
--
-- Returns   {lease_end, earliest, in_use, waiting, status per id ..., id, lease_end of own grants ...}
--           earliest: the first lease end; 0 if no place waits; 1 if the bound below was reached while a permit was
--           free and a place that could have it waited: call again at once
--           status: 1 holds | a ticket (>= 1e14) waits | 0 the permit is lost, or the place has left
--           The statuses are from before the grants of this call.
-- Errors    none of its own
-- Cost      about 8 commands, and 4 for each tenant; O((ids + 500) * log n): see promote.lua
-- Retry     safe: an id that is present keeps its place, and its lease is renewed

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[4])
local claims = ARGV[3] ~= '-1'
local headroom = claims and tonumber(ARGV[3]) or 0
local for_all, frees = ARGV[2] == '1', false
local counted, node = ARGV[5] == '1', ARGV[6]
local ids, proofs = {}, {}
for i = 7, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
  proofs[#proofs + 1] = tonumber(ARGV[i + 1])
end
--@clock
local lease_end = now_ms + lease_ms
--@lease
--@queued
--@kind
local line_of, cost_of, lease_of, settle, leave, further, asleep, room_of, never_fits, opening_of, start, undo, charges
local silent_before
if not is_plain then
  --@claim
  --@settle
  --@leave
  --@room
  --@rate
end
--@sweep

local members, count = { unpack(ids) }, #ids
for i, id in ipairs(ids) do
  members[count + i] = queued .. id
end
for i = 1, claims and count or 0 do
  -- The turn of its line; any that is not there without one.
  members[2 * count + i] = 't' .. (line_of(ids[i]) or '')
end
local scores = redis.call('ZMSCORE', key, unpack(members))
local statuses, writes, left = {}, {}, {}
-- The lines to settle.
local tenants, lines, seen = {}, {}, {}
local replaced_holds = false
for i, id in ipairs(ids) do
  local status, stands, proof = 0, scores[count + i], proofs[i]
  local is_void = replaced_holds
  replaced_holds = false
  local has_claim = claims and string.byte(id, -16) == 46
  local score, digits, tenant = has_claim and nobodys_score or plain_score, nil, nil
  if has_claim then digits, tenant = line_of(id) end
  local f, touched = digits and tonumber(digits, 36), not scores[i]
  -- A place that holds changes what its tenant has in use, and not its line.
  local is_further, holds = f and f > 16777215, false
  if scores[i] then
    status = tonumber(stands or 1)
    if digits then
      status = 1
      if tonumber(stands) < 0 then
        status = 1e14 + (stands + f) * 268435456
        -- A line that was stopped is looked at once more.
        touched = scores[2 * count + i] == 'inf'
      end
    end
    replaced_holds = proof == 0 and status == 1
    if proof == 0 and status >= 1e14 then
      status, touched = 0, true
      left[#left + 1] = id
    end
  elseif is_void then
    touched = false
  elseif proof >= 1e14 then
    status = proof
    local stands_at = string.format('%.0f', proof)
    if digits then
      local k = math.min(math.max(proof - 1e14, 1), 268435455)
      status, stands_at = 1e14 + k, k / 268435456 - f
    end
    writes[#writes + 1] = stands_at
    writes[#writes + 1] = queued .. id
  elseif proof > now_ms then
    status = 1
    if has_claim then
      -- It started in an outage, and counts from now on.
      if proof == 99999999999999 then start(id) end
      if is_further then
        if not further then leave(ids, 1, 0, nil, true) end
        further.hold(writes, id, further.terms_of(id))
        holds = true
      else
        for j = digits and 1 or 2, cost_of(id) do
          writes[#writes + 1] = f or 1e8
          writes[#writes + 1] = (j > 1 and j or '') .. queued .. id
        end
      end
    end
  end
  if digits then
    score = tenants_score
    if touched and (status > 0 or scores[i]) then
      if is_further and not holds and not seen[digits] then
        seen[digits] = true
        lines[#lines + 1] = digits
      end
      -- Of a place with further limits that leaves, too.
      if (not is_further or holds or status == 0) and tenant and not seen[tenant] then
        seen[tenant] = true
        tenants[#tenants + 1] = tenant
      end
    end
  end
  statuses[i] = status
  if status > 0 then
    writes[#writes + 1] = score
    writes[#writes + 1] = id
  end
end
if left[1] then
  local ids, from, to, removed = left, 1, #left, 0
  --@take
end
--@write
if lines[1] and not further then leave(ids, 1, 0, nil, true) end
if further then further.forget() end
for _, digits in ipairs(lines) do further.settle(digits) end
for _, digits in ipairs(tenants) do settle(digits) end
if not (is_plain or further) then leave(ids, 1, 0) end
if further then further.make_up(left, 1, #left) end
if asleep then asleep.rouse() end

local all, waiting, turn, units
--@survey
local asked = {}
--@promote
earliest = nil
--@answer
