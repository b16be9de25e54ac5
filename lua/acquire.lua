-- acquire: grant each place a permit, or let it join the queue, or refuse it.
--
-- KEYS[1]   <prefix>:{<name>}  zset  the semaphore
-- ARGV[1]   limit       integer >= 1, permits
-- ARGV[2]   lease_ms    integer >= 1
-- ARGV[3]   max_queue   integer >= 0, places that may wait; -1: these may not wait
-- ARGV[4]   counted     1: PUBLISH tells whether a node listens; 0: it cannot (cluster)
-- ARGV[5]   node        the caller's
-- ARGV[6..] id          one or many, in the order of their arrival
--
-- Returns   {lease_end, earliest, in_use, waiting, standing per id ..., id, lease_end of own grants ...}
--           standing: 1 granted | a ticket (>= 1e14) waits | -1 no permit free | -2 queue full
-- Errors    none of its own
-- Cost      5 commands while permits are free, whatever the number of ids; O(ids * log n)
-- Retry     safe: an id that is there keeps its place and gets its lease anew

local key = KEYS[1]
local limit, lease_ms, max_queue = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local counted, node = ARGV[4] == '1', ARGV[5]
local ids = { unpack(ARGV, 6) }

local now, now_ms = clock()
local lease_end = now_ms + lease_ms
local in_use, waiting = count(key)
local own, standings, writes = {}, {}, {}

if waiting == 0 and in_use + #ids <= limit then
  for i, id in ipairs(ids) do
    standings[i] = 1
    writes[2 * i - 1] = lease_end
    writes[2 * i] = id
  end
  in_use = in_use + redis.call('ZADD', key, unpack(writes))
else
  -- Full, or so it looks: whoever waits goes first, and only then the newcomers.
  if sweep(key, now_ms) then in_use, waiting = count(key) end
  own, in_use, waiting = promote(key, limit, now_ms, node, counted, in_use, waiting)
  local members = { unpack(ids) }
  for _, id in ipairs(ids) do members[#members + 1] = 'q' .. id end
  local scores = redis.call('ZMSCORE', key, unpack(members))
  local ticket = 0
  for i, id in ipairs(ids) do
    local standing
    if scores[i] then
      standing = tonumber(scores[#ids + i] or 1)
    elseif waiting == 0 and in_use < limit then
      standing = 1
      in_use = in_use + 1
    elseif max_queue < 0 then
      standing = -1
    elseif waiting >= max_queue then
      standing = -2
    else
      if ticket == 0 then
        local last = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]
        ticket = tonumber(last or 0)
      end
      ticket = math.max(now, ticket + 1)
      standing = ticket
      waiting = waiting + 1
      writes[#writes + 1] = ticket
      writes[#writes + 1] = 'q' .. id
    end
    standings[i] = standing
    if standing > 0 then
      writes[#writes + 1] = lease_end
      writes[#writes + 1] = id
    end
  end
  if #writes > 0 then redis.call('ZADD', key, unpack(writes)) end
end

if #writes > 0 then backstop(key, lease_ms) end
return answer(key, lease_end, in_use, waiting, standings, own)
