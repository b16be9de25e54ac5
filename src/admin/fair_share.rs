//! The fair shares of the tenants of a semaphore.

use crate::semaphore::TenantUse;

/// Returns the permits that each of these tenants would have in use if all of them wanted as many as they could get: the
/// limit is divided by weight, and what a tenant's cap leaves of its part is divided among the others.
pub(super) fn fair_shares(limit: u32, tenants: &[TenantUse]) -> Vec<f64> {
    let mut shares = vec![0.0; tenants.len()];
    let caps: Vec<_> = tenants.iter().map(|one| one.set.limit.or(one.each)).collect();
    let weight = |i: usize| f64::from(tenants[i].weight);
    let mut left = f64::from(limit);
    // The tenant that reaches its cap first is first, so that the others share what it leaves.
    let mut open: Vec<usize> = (0..tenants.len()).collect();
    open.sort_by(|a, b| {
        let full = |i: usize| caps[i].map_or(f64::INFINITY, |cap| f64::from(cap) / weight(i));
        full(*a).total_cmp(&full(*b))
    });
    let mut weights: f64 = open.iter().map(|i| weight(*i)).sum();
    for i in open {
        let part = left * weight(i) / weights;
        shares[i] = caps[i].map_or(part, |cap| part.min(f64::from(cap)));
        left -= shares[i];
        weights -= weight(i);
    }
    shares
}

#[cfg(test)]
mod tests {
    use super::fair_shares;
    use crate::protocol::{Claim, Tenant};
    use crate::semaphore::TenantUse;

    fn shares(limit: u32, tenants: &[(u32, Option<u32>)]) -> Vec<f64> {
        let tenants = tenants.iter().zip(0..).map(|((weight, each), number)| {
            let claim = Claim::new(Tenant::of_hash(number));
            TenantUse::of(claim.with_weight(*weight).with_each(*each))
        });
        let shares = fair_shares(limit, &tenants.collect::<Vec<_>>());
        shares.iter().map(|share| (share * 100.0).round() / 100.0).collect()
    }

    #[test]
    fn a_limit_is_divided_by_weight_and_what_a_cap_leaves_goes_to_the_others() {
        assert_eq!(shares(10, &[]), [0.0; 0]);
        assert_eq!(shares(10, &[(1, None)]), [10.0]);
        assert_eq!(shares(10, &[(1, None), (1, None), (1, None)]), [3.33, 3.33, 3.33]);
        assert_eq!(shares(10, &[(3, None), (1, None), (1, None)]), [6.0, 2.0, 2.0]);
        assert_eq!(shares(10, &[(3, Some(4)), (1, None), (1, None)]), [4.0, 3.0, 3.0]);
        assert_eq!(shares(12, &[(1, None), (1, Some(1)), (2, Some(4))]), [7.0, 1.0, 4.0]);
        assert_eq!(shares(10, &[(1, Some(2)), (1, Some(3))]), [2.0, 3.0], "5 are left over");
        assert_eq!(shares(0, &[(1, None), (1, Some(0))]), [0.0, 0.0]);
    }
}
