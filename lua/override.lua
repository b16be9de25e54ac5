-- override: change the override of a name, pause it until a time, or record the revocation of a place, and notify every
-- process.
--
-- KEYS[1]   <prefix>:{!overrides}  hash  `@`   -> the version, in us by TIME
--                                        name  -> "<limit> <mode>", limit: permits, or `-` for the policy's own;
--                                                 mode: open, paused or draining
--                                        name`@`tenant, name`@`tenant`@weight` -> the same; limit: the cap of that
--                                                 tenant, or its weight
--                                        `@- `name -> "<end> <by> <cause>": grants are paused until then, in ms by
--                                                 TIME; by: the process that asked for it; cause: operator, upstream,
--                                                 or the status of a response. Dropped a second after its end
--                                        `@`id name -> "<end>": this place of that semaphore was revoked, and must
--                                                 not be counted again; end: when the record can be dropped, in ms by
--                                                 TIME
--                                        Without overrides and revocations there is no key. No name begins with `@`
--                                        or has a space in it. A field that cannot be read is kept, and counted; a
--                                        version that cannot be read is replaced.
-- ARGV[1]   name        encoded
-- ARGV[2]   limit       integer >= 0, permits; `-`: the policy's own; `=`: unchanged
-- ARGV[3]   mode        open, paused or draining; `=`: unchanged. `open` also ends a pause until a time
-- ARGV[4]   id          the place of this name that is revoked; `-`: the name is paused until a time; empty: neither
-- ARGV[5]   keep_ms     integer >= 0, how long to keep the record of that, or to pause; 0: remove it
-- ARGV[6]   most        integer >= 1, the most names and places in this hash
-- ARGV[7]   tell        1: notify every process; 0: each finds out at its next reading
-- ARGV[8]   slack_ms    integer >= 0, how much longer to pause, unless the known pause ends late enough
-- ARGV[9]   why         "<by> <cause>" of a pause; else empty
--
-- Returns   the version; 0: nothing was changed, because a pause that ends as late is known
-- Errors    FULL, if there are `most` already
-- Cost      about 6 commands, 2 if nothing is changed; O(names + places)
-- Retry     safe

local key = KEYS[1]
local name, limit, mode = ARGV[1], ARGV[2], ARGV[3]
local id, keep_ms, most, tell = ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7] == '1'
local slack_ms, why = tonumber(ARGV[8]), ARGV[9]
--@clock
local is_pause = id == '-'
local pause = table.concat({ '@-', name }, ' ')
local place = table.concat({ '@', id, ' ', name })
local version, names, places, last = now, 0, 0, 0
local old, was, paused, ended = nil, false, nil, {}
local all = redis.call('HGETALL', key)
for i = 1, #all, 2 do
  local field, value = all[i], all[i + 1]
  -- A longer number was not written by this script.
  local digits, rest = string.match(value, '^(%d+)(.*)$')
  local number = digits and #digits <= 16 and tonumber(digits)
  -- When the record can be dropped.
  local over = rest == '' and number
  if number and string.match(field, '^@%- %S+$') then
    over = string.find(rest, '^ %S+ %S+$') and number + 1000
  end
  if field == '@' then
    -- Beyond 2^53, n + 1 can be n.
    if over and number < 9e15 then version = math.max(now, number + 1) end
  elseif field == place and not is_pause then
    was = true
  elseif field == pause and over then
    paused = number
  elseif field == name then
    old = value
  elseif not (over and string.find(field, '^@%S+ %S+$')) then
    names = names + 1
  elseif over > now_ms then
    places = places + 1
    last = math.max(last, over)
  else
    ended[#ended + 1] = field
  end
end

if is_pause and paused and paused >= now_ms + keep_ms then return 0 end
local had = names + places + (old and 1 or 0) + (was and 1 or 0) + (paused and 1 or 0)
local writes = { '@', string.format('%.0f', version) }
local is_set = old ~= nil
if is_pause then
  paused = now_ms + keep_ms + slack_ms
  writes[3] = pause
  writes[4] = table.concat({ string.format('%.0f', paused), why }, ' ')
elseif id ~= '' and keep_ms > 0 then
  places = places + 1
  last = math.max(last, now_ms + keep_ms)
  writes[3] = place
  writes[4] = string.format('%.0f', now_ms + keep_ms)
elseif id ~= '' then
  if was then ended[#ended + 1] = place end
else
  if paused and mode == 'open' then
    ended[#ended + 1] = pause
    paused = nil
  end
  local old_limit, old_mode = string.match(old or '', '^([%d-]+) (%l+)$')
  if limit == '=' then limit = old_limit or '-' end
  if mode == '=' then mode = old_mode or 'open' end
  is_set = limit ~= '-' or mode ~= 'open'
  if is_set then
    writes[3] = name
    writes[4] = table.concat({ limit, mode }, ' ')
  elseif old then
    ended[#ended + 1] = name
  end
end
if is_set then names = names + 1 end
if paused and paused + 1000 > now_ms then
  places = places + 1
  last = math.max(last, paused + 1000)
elseif paused then
  ended[#ended + 1] = pause
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
