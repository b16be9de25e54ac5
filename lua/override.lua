-- override: change the override of a name, or record the revocation of a place, and notify every process.
--
-- KEYS[1]   <prefix>:{!overrides}  hash  `@`   -> the version, in us by TIME
--                                        name  -> "<limit> <mode>", limit: permits, or `-` for the policy's own;
--                                                 mode: open, paused or draining
--                                        name`@`tenant, name`@`tenant`@weight` -> the same; limit: the cap of that
--                                                 tenant, or its weight
--                                        name`@@`limit`@`value -> the same; limit: the cap of that further limit
--                                        name`@@rate` -> "<starts>/<ms> open": the rate. A name of its own here, and
--                                                 for ARGV[1]
--                                        `@`id name -> "<end>": this place of that semaphore was revoked, and must
--                                                 not be counted again; end: when the record can be dropped, in ms by
--                                                 TIME
--                                        Without overrides and revocations there is no key. No name begins with `@`
--                                        or has a space in it. A field that cannot be read is kept, and counted; a
--                                        version that cannot be read is replaced.
-- ARGV[1]   name        encoded
-- ARGV[2]   limit       integer >= 0, permits; or a rate; `-`: the policy's own; `=`: unchanged
-- ARGV[3]   mode        open, paused or draining; `=`: unchanged
-- ARGV[4]   id          the place of this name that is revoked; empty: none
-- ARGV[5]   keep_ms     integer >= 0, how long to keep the record of that; 0: remove it
-- ARGV[6]   most        integer >= 1, the most names and places in this hash
-- ARGV[7]   tell        1: notify every process; 0: each finds out at its next reading
--
-- Returns   the version
-- Errors    FULL, if there are `most` already
-- Cost      about 6 commands; O(names + places)
-- Retry     safe

local key = KEYS[1]
local name, limit, mode = ARGV[1], ARGV[2], ARGV[3]
local id, keep_ms, most, tell = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1'
--@clock
local place = table.concat({ '@', id, ' ', name })
local version, names, places, last = now, 0, 0, 0
local old, was, ended = nil, false, {}
local all = redis.call('HGETALL', key)
for i = 1, #all, 2 do
  local field, value = all[i], all[i + 1]
  -- A longer number was not written by this script.
  local number = #value <= 16 and tonumber(string.match(value, '^%d+$'))
  if field == '@' then
    -- Beyond 2^53, n + 1 can be n.
    if number and number < 9e15 then version = math.max(now, number + 1) end
  elseif field == place then
    was = true
  elseif field == name then
    old = value
  elseif not (number and string.find(field, '^@%S+ %S+$')) then
    names = names + 1
  elseif number > now_ms then
    places = places + 1
    last = math.max(last, number)
  else
    ended[#ended + 1] = field
  end
end

local had = names + places + (old and 1 or 0) + (was and 1 or 0)
local writes = { '@', string.format('%.0f', version) }
if id ~= '' then
  names = names + (old and 1 or 0)
  if keep_ms > 0 then
    places = places + 1
    last = math.max(last, now_ms + keep_ms)
    writes[3] = place
    writes[4] = string.format('%.0f', now_ms + keep_ms)
  elseif was then
    ended[#ended + 1] = place
  end
else
  local old_limit, old_mode = string.match(old or '', '^([%d-]+) (%l+)$')
  if limit == '=' then limit = old_limit or '-' end
  if mode == '=' then mode = old_mode or 'open' end
  if limit ~= '-' or mode ~= 'open' then
    names = names + 1
    writes[3] = name
    writes[4] = table.concat({ limit, mode }, ' ')
  elseif old then
    ended[#ended + 1] = name
  end
end
if names + places > math.max(had, most) then
  local text = { 'FULL', most, 'names have something set in place of their policy, as many as may' }
  return redis.error_reply(table.concat(text, ' '))
end

-- The version alone is not worth a key.
if names + places == 0 then ended[#ended + 1] = '@' end
if #ended > 0 then redis.call('HDEL', key, unpack(ended)) end
if names + places > 0 then redis.call('HSET', key, unpack(writes)) end
if names > 0 then
  redis.call('PERSIST', key)
elseif places > 0 then
  redis.call('PEXPIRE', key, last - now_ms)
end
-- pcall: the user may lack the right to publish. That is like a lost message: every process reads each second.
local channel = string.match(key, '^(.-):{') .. ':@overrides'
if tell then redis.pcall('PUBLISH', channel, table.concat({ key, name }, ' ')) end
return version
