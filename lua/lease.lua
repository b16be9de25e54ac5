-- lease: the end of a lease as each kind of place has it in the set.
--
-- A piece of the scripts, inserted where one has `--@lease`.
--
-- Needs     lease_end, ms; claims: whether any id of the call has a claim
-- Leaves    the scores of a lease that ends then: plain_score without a claim, and, if claims, tenants_score with a
--           tenant and nobodys_score with a claim alone
-- Cost      no command

-- In two parts, because an integer of this format can have 32 bits; with '%.0f' a score costs half as much as a command.
local plain_score = string.format('%d%03d', (lease_end - lease_end % 1000) / 1000, lease_end % 1000)
local tenants_score = claims and '1' .. plain_score
local nobodys_score = claims and string.sub(plain_score, 1, -4) .. '.' .. string.sub(plain_score, -3)
