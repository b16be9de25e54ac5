-- queued: the prefix of members that are tickets.
--
-- A piece of the scripts, inserted where one has `--@queued`. It makes such a member longer than 64 bytes,
-- so that Redis stores a set with a queue as a skip list. A small set is a list of up to 128 members, which Redis walks
-- to find one.

local queued = 'qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq'
