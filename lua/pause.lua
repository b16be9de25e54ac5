-- pause: pause a name until a time, or end that, and notify every process.
--
-- KEYS[1]   <prefix>:{!overrides}:pauses  hash  `@`  -> the version, in us by TIME
--                                               name -> "<end> <resumed> <by> <cause>": grants are paused until then,
--                                                       in ms by TIME; 0: they are not. resumed: the version at which
--                                                       an operator last ended a pause of the name; 0: none is
--                                                       remembered. by: the process that asked for the pause. cause:
--                                                       operator, upstream, or the status of a response
--                                               No name begins with `@` or has a space in it. The key expires with
--                                               the record that is of use for longest.
-- ARGV[1]   name        encoded
-- ARGV[2]   pause_ms    integer >= 0, how long to pause; 0: end the pause
-- ARGV[3]   slack_ms    integer >= 0, how much longer to pause, unless the known pause ends late enough
-- ARGV[4]   seen        integer >= 0, the version that the process knew when it asked: a later resume ends the pause
-- ARGV[5]   why         "<by> <cause>" of a pause; else empty
-- ARGV[6]   most        integer >= 1, the most pauses by operators, the most by others, and the most records of resumes
--
-- Returns   the version; 0: nothing was changed, because a pause that ends as late is known, or a later resume
-- Errors    FULL, if there are `most` pauses of this kind already; a resume is never refused
-- Cost      about 8 commands; O(records) if there are more than `most`, and the name is not paused
-- Retry     safe

local key = KEYS[1]
local name, pause_ms, slack_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local seen, why, most = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
--@clock
local hour = 3600000
-- A process repeats what it asked for until that ends, so for an hour at most. A minute for the way.
local function kept_until(ends, resumed) return math.max(ends, math.ceil(resumed / 1000) + hour + 60000) end
-- Returns the end of a record, the version of its resume, and whether an operator paused.
local function read(record)
  local ends, resumed, by, cause = string.match(record or '', '^(%d+) (%d+) (%S+) (%S+)$')
  if not ends or #ends > 16 or #resumed > 16 then return 0, 0, false end
  -- No pause lasts longer, unless the clock stepped back.
  local longest = (cause == 'operator' and 24 * hour or hour) + 1000
  return math.min(tonumber(ends), now_ms + longest), tonumber(resumed), cause == 'operator'
end

local is_pause, is_operator = pause_ms > 0, string.find(why, ' operator$') ~= nil
local version = redis.call('HGET', key, '@')
version = version and #version <= 16 and tonumber(string.match(version, '^%d+$'))
-- The clock stepped back since the last change: the end of a record from before says nothing, and which are from before
-- is not known. Until the clock has caught up, each pause is written, and the last one counts.
local stepped_back = version and version > now + 1e6
-- Beyond 2^53, n + 1 can be n.
version = version and version < 9e15 and math.max(now, version + 1) or now
local ends, resumed = read(redis.call('HGET', key, name))
if stepped_back then ends = 0 end
if is_pause and (resumed > seen or ends >= now_ms + pause_ms) then return 0 end

if ends <= now_ms and redis.call('HLEN', key) > most then
  local all, same, resumes, dropped = redis.call('HGETALL', key), 0, {}, {}
  for i = 1, #all, 2 do
    local field = all[i]
    local other_ends, other_resumed, by_operator = read(all[i + 1])
    if field == '@' or field == name then
      -- Neither counts.
    elseif other_ends > now_ms then
      if by_operator == is_operator then same = same + 1 end
    elseif other_resumed > 0 and kept_until(0, other_resumed) > now_ms then
      resumes[#resumes + 1] = { other_resumed, field }
    else
      dropped[#dropped + 1] = field
    end
  end
  if is_pause and same >= most then
    return redis.error_reply(table.concat({ 'FULL', most, 'names are paused until a time, as many as may' }, ' '))
  end
  if #resumes >= most then
    -- Some more than one, so that the next calls do not sort them again.
    table.sort(resumes, function(a, b) return a[1] < b[1] end)
    for i = 1, #resumes - most + 50 do dropped[#dropped + 1] = resumes[i][2] end
  end
  if #dropped > 0 then redis.call('HDEL', key, unpack(dropped)) end
end

if is_pause then
  ends = now_ms + pause_ms + slack_ms
else
  ends, resumed, why = 0, version, '- -'
end
local record = table.concat({ string.format('%.0f', ends), string.format('%.0f', resumed), why }, ' ')
redis.call('HSET', key, '@', string.format('%.0f', version), name, record)
local kept_ms = (resumed > 0 and kept_until(ends, resumed) or ends) - now_ms
if redis.call('PTTL', key) < kept_ms then redis.call('PEXPIRE', key, kept_ms) end
-- pcall: the user may lack the right to publish. That is like a lost message: every process reads each second.
local channel = string.match(key, '^(.-):{') .. ':@overrides'
redis.pcall('PUBLISH', channel, table.concat({ string.match(key, '^.-}'), name }, ' '))
return version
