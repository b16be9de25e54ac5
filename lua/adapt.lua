-- adapt: lower or raise the limit of a name that finds its limit itself, and notify every process of the new one.
--
-- KEYS[1]   <prefix>:{!overrides}:adaptive  hash  `@`  -> the version, in us by TIME
--                                                 name -> "<limit> <lowered> <changed>": the limit in place of that of
--                                                         the policy; the versions at which it was last lowered, and
--                                                         last changed
--                                                 No name begins with `@` or has a space in it. A record counts for ten
--                                                 minutes after its last change, and the key expires with the last one.
-- ARGV[1]   name        encoded
-- ARGV[2]   seen        lower it: integer >= 0, the version of the limit under which a request was sent that the upstream
--                       refused; nothing changes if it was lowered since. At `min`, this keeps the record, once in
--                       five minutes. Empty: raise it by one
-- ARGV[3]   in_use      integer >= 0, the permits in use when that request was sent: a lower limit begins there
-- ARGV[4]   min         integer >= 1
-- ARGV[5]   max         integer >= min, which is the limit where there is no record
-- ARGV[6]   grow_ms     integer >= 1, it is raised no sooner after its last change
-- ARGV[7]   most        integer >= 1, the most records
--
-- Returns   the version; 0: nothing was changed
-- Errors    FULL, if there are `most` records already
-- Cost      about 6 commands; O(records) if there are more than `most`, and the name has none
-- Retry     safe: a repetition changes nothing

local key = KEYS[1]
local name, seen, in_use = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local min, max, grow_ms, most = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
--@clock
local kept_ms = 600000
local last = redis.call('HGET', key, '@')
last = last and #last <= 16 and tonumber(string.match(last, '^%d+$')) or 0
-- Beyond 2^53, n + 1 can be n.
if last >= 9e15 then last = 0 end
local version = math.max(now, last + 1)
-- Returns what a record says; nil if it is over, or was not written by this script.
local function read(record)
  local limit, lowered, changed = string.match(record or '', '^(%d+) (%d+) (%d+)$')
  if not limit or #limit > 10 or #lowered > 16 or #changed > 16 then return nil end
  limit, lowered, changed = tonumber(limit), tonumber(lowered), tonumber(changed)
  local is_whole = limit < 4294967296 and lowered <= changed and changed <= last
  if is_whole and changed + kept_ms * 1000 > now then return limit, lowered, changed end
end

local limit, lowered, changed = read(redis.call('HGET', key, name))
local current = math.min(math.max(limit or max, min), max)
local new
if seen then
  if limit and seen < lowered then return 0 end
  new = math.max(math.floor(math.min(current, in_use) * 9 / 10), min)
  if new < current then
    lowered = version
  else
    -- Refusals at the minimum keep it: without them it would end, and the maximum would follow.
    if not limit or now - changed < kept_ms * 500 then return 0 end
    new = limit
  end
else
  if not limit or current >= max then return 0 end
  -- A clock that stepped back is no reason to wait.
  if now >= changed and now - changed < grow_ms * 1000 then return 0 end
  new = current + 1
end

if not limit and redis.call('HLEN', key) > most then
  local all, records, dropped = redis.call('HGETALL', key), 0, {}
  for i = 1, #all, 2 do
    local field = all[i]
    if field == '@' or field == name then
      -- Neither counts.
    elseif read(all[i + 1]) then
      records = records + 1
    else
      dropped[#dropped + 1] = field
    end
  end
  if records >= most then
    return redis.error_reply(table.concat({ 'FULL', most, 'names have a limit that finds itself, as many as may' }, ' '))
  end
  for i = 1, #dropped, 4000 do
    redis.call('HDEL', key, unpack(dropped, i, math.min(i + 3999, #dropped)))
  end
end

local record = string.format('%.0f %.0f %.0f', new, lowered, version)
redis.call('HSET', key, '@', string.format('%.0f', version), name, record)
redis.call('PEXPIRE', key, kept_ms)
-- pcall: the user may lack the right to publish. That is like a lost message: every process reads each second.
local channel = string.match(key, '^(.-):{') .. ':@overrides'
redis.pcall('PUBLISH', channel, table.concat({ string.match(key, '^.-}'), name, record }, ' '))
return version
