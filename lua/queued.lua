-- queued: what a member begins with that is a ticket.
--
-- A piece of the scripts, put in where one says `--@queued`. As long as this because then such a member
-- has more than 64 bytes: from the first place that waits on, Redis keeps the set as a skip list and not
-- as a list of up to 128 members, in which it would look for each by walking.

local queued = 'qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq'
