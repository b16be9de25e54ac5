-- reassert: renew places that a renewal found gone, with proof. The proof is the last score that Redis gave the place.
-- A lease end in the future shows that Redis lost a permit that is in use: it is counted again, even past the limit. A
-- ticket gives a waiting place its old turn in the queue, under a new id and however long the queue is.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 0, waiting places are granted while fewer permits than this are in use
-- ARGV[2]   for_all     1: the limit applies to every place; 0: a waiting place is judged by the limit in its id
-- ARGV[3]   lease_ms    integer >= 1
-- ARGV[4]   counted     1: PUBLISH returns whether a node listens; 0: it cannot, in a cluster
-- ARGV[5]   node        the caller's
-- ARGV[6..] id, score   one or more pairs; score: lease end in ms, or ticket (>= 1e14)
--
-- Returns   {lease_end, earliest, in_use, waiting, status per id ..., id, lease_end of own grants ...}
--           earliest: the first lease end; 0 if no place waits; 1 if the bound below was reached while a permit was
--           free and a place waited: call again at once
--           status: 1 holds | a ticket (>= 1e14) waits | 0 the permit is lost
--           The statuses are from before the grants of this call.
-- Errors    none of its own
-- Cost      about 8 commands for any number of ids; O((ids + 500) * log n): see promote.lua
-- Retry     safe: an id that is present keeps its place, and its lease is renewed

local key = KEYS[1]
local limit, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[3])
local for_all, frees = ARGV[2] == '1', false
local counted, node = ARGV[4] == '1', ARGV[5]
local ids, proofs = {}, {}
for i = 6, #ARGV, 2 do
  ids[#ids + 1] = ARGV[i]
  proofs[#proofs + 1] = tonumber(ARGV[i + 1])
end
--@clock
local lease_end = now_ms + lease_ms
--@queued
--@sweep

local members = { unpack(ids) }
for _, id in ipairs(ids) do members[#members + 1] = queued .. id end
local scores = redis.call('ZMSCORE', key, unpack(members))
local score = string.format('%.0f', lease_end)
local statuses, writes = {}, {}
for i, id in ipairs(ids) do
  local status = 0
  if scores[i] then
    status = tonumber(scores[#ids + i] or 1)
  elseif proofs[i] >= 1e14 then
    status = proofs[i]
    writes[#writes + 1] = status
    writes[#writes + 1] = queued .. id
  elseif proofs[i] > now_ms then
    status = 1
  end
  statuses[i] = status
  if status > 0 then
    writes[#writes + 1] = score
    writes[#writes + 1] = id
  end
end
--@write

local waiting = redis.call('ZCOUNT', key, '100000000000000', '+inf')
local in_use = redis.call('ZCARD', key) - 2 * waiting
local asked, from, to = {}, 1, 0
--@promote
earliest = nil
--@answer
