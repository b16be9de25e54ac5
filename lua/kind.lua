-- kind: reads whether any place of the set may have a claim. Without, much of a call's work falls away.
--
-- A piece of the scripts, inserted where one has `--@kind`.
--
-- Places with a claim have members with scores below the lease ends of those without: see acquire.lua.
--
-- Needs     key, claims: whether any id of the call has a claim
-- Leaves    is_plain: no place has a claim, and no id; earliest: the first lease end, 0 without one; if is_plain
-- Cost      1 command; none if an id has a claim

local is_plain, earliest = not claims, nil
if is_plain then
  earliest = tonumber(redis.call('ZRANGE', key, '0', '0', 'WITHSCORES')[2] or 0)
  is_plain = earliest == 0 or earliest >= 1e12
end
