-- lease: the end of a lease as each kind of place has it in the set.
--
-- A piece of the scripts, inserted where one has `--@lease`.
--
-- Needs     lease_end, ms; claims: whether any id of the call has a claim
-- Leaves    the scores of a lease that ends then: plain_score without a claim, and, if claims, tenants_score with a
--           tenant and nobodys_score with a claim alone
-- Cost      no command

local plain_score = string.format('%.0f', lease_end)
local tenants_score = claims and string.format('%.0f', lease_end + 1e13)
local nobodys_score = claims and string.format('%.3f', lease_end / 1000)
