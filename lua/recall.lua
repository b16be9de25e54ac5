-- recall: notifies the other nodes with places in the set that a place waits.
--
-- A piece of the scripts, inserted where one has `--@recall`, before the newcomers are written.
--
-- A node may pass permits on to its own next requests while no other node waits. The message is the key alone, sent
-- once to each node when a queue begins. Only the nodes of the 128 places with the latest lease ends are notified: a
-- permit that a node keeps was used recently. A lost message costs at most the time for which a node passes permits on
-- without asking.
--
-- Needs     key, node; latest: the places with the latest lease ends, nil if they have to be looked up
-- Cost      1 command, and 1 for each node, at most 128

local told = { [node] = true }
latest = latest or redis.call('ZRANGE', key, '(20000000000000', '(100000000', 'BYSCORE', 'REV', 'LIMIT', '0', '128')
for _, id in ipairs(latest) do
  local to = string.match(id, '^(%w+):')
  if to and not told[to] then
    told[to] = true
    local channel = string.match(key, '^(.-):{') .. ':@' .. to
    redis.pcall('PUBLISH', channel, key)
  end
end
