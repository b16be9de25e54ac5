-- recall: tells the other nodes with places in the set that somebody waits.
--
-- A piece of the scripts, put in where one says `--@recall`, before the newcomers are written.
--
-- A node may pass permits on to its own next requests while nobody else waits. The message is the key alone, once
-- for each node, when a queue begins. Of the places, 128 are looked at, those with the latest lease ends: what is kept
-- was used just now. A message that is lost, or not sent, costs no more than the time for which a node goes on without
-- asking.
--
-- Needs     key, node
-- Cost      1 command, and 1 for each node, 128 at the most

local told = { [node] = true }
for _, id in ipairs(redis.call('ZRANGE', key, '(100000000000000', '(33554432', 'BYSCORE', 'REV', 'LIMIT', '0', '128')) do
  local to = string.match(id, '^(%w+):')
  if to and not told[to] then
    told[to] = true
    local channel = string.match(key, '^(.-):{') .. ':@' .. to
    redis.pcall('PUBLISH', channel, key)
  end
end
