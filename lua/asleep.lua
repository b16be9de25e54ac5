-- asleep: lines that wait until budgets of their tenants have refilled.
--
-- A piece of the scripts, inserted where one has `--@asleep`. It creates functions; so it is inserted once a line is
-- asleep.
--
-- A budget can be a tenant's own: such a number begins with a letter. If one has too little for the first place of a line
-- when its turn comes, the line goes to sleep until it has enough, and delays nobody else. Its `t` gets the score
--   -(2^29) - (us at which that is) * 2^-23
-- so that these scores are one range, between the grants and the budgets, and exact. While any line is asleep, there is
-- the member `s` with +inf. A line gets its turn anew in the first call from that time on, or once a place of its tenant
-- leaves: that may have used less than it took.
--
-- Needs     key, now, line_of, settle, further; asleep: declared
-- Leaves    asleep: a table of functions. score(opening): that of a line that is asleep until then, us; opening(score):
--           the other way round. put(member, opening): this line goes to sleep. rouse(): gives up to 16 lines their turns
--           whose time has come; returns the first of all turns. first(): returns when the next one's comes; nil: none
--           is asleep. bursts(ids, scores): of the lines of those that wait, by their scores behind those of all leases,
--           the longest burst of their tenants' budgets, us; the shortest of these where places of a line differ
-- Cost      of rouse: 2 commands, 3 more for each line; else 1, 1 more if none is asleep

asleep = {}

function asleep.score(opening) return opening / -8388608 - 536870912 end

function asleep.opening(score) return (score + 536870912) * -8388608 end

function asleep.put(member, opening) redis.call('ZADD', key, asleep.score(opening), member, 'inf', 's') end

local function first_lines(most)
  local lines = redis.call('ZRANGE', key, '-536870912', '(-1000000000', 'BYSCORE', 'REV', 'LIMIT', '0', most, 'WITHSCORES')
  if not lines[1] then redis.call('ZREM', key, 's') end
  return lines
end

function asleep.first()
  local score = first_lines('1')[2]
  return score and asleep.opening(score)
end

function asleep.bursts(ids, scores)
  local bursts = {}
  for i, id in ipairs(ids) do
    local stands = scores[#ids + i]
    if scores[i] and stands and tonumber(stands) < 0 then
      local line, longest, at = line_of(id), 0, string.find(id, '$', 13, true)
      while at and string.byte(id, at + 1) > 47 do
        local burst = string.byte(id, at + 1) > 57 and tonumber(string.sub(id, at + 14, at + 21), 36) or 0
        longest, at = math.max(longest, burst), at + 21
      end
      bursts[line] = math.min(bursts[line] or math.huge, longest)
    end
  end
  return bursts
end

function asleep.rouse()
  local lines, due = first_lines('16'), asleep.score(now)
  for i = 1, #lines, 2 do
    if tonumber(lines[i + 1]) < due then break end
    local digits = string.sub(lines[i], 2)
    if tonumber(digits, 36) < 16777216 then settle(digits, lines[i + 1]) else further.settle(digits, lines[i + 1]) end
  end
  return redis.call('ZRANGEBYSCORE', key, '100000000000000', '+inf', 'WITHSCORES', 'LIMIT', '0', '1')
end
