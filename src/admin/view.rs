//! The state of semaphores, as JSON.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use serde::Serialize;

use super::Window;
use super::extract::{Listing, OfSemaphore, Target};
use super::fair_share::fair_shares;
use super::problem::Problem;
use crate::budget::Budget;
use crate::name::Name;
use crate::protocol::{Override, Rate};
use crate::semaphore::{
    AdaptedLimit, BudgetUse, FurtherLimitUse, Holder, Inspection, Listed, Page, Paused, ProcessUse,
    RateUse, TenantUse, Waiter,
};
use crate::tenants::TenantOverride;

type Answer<T> = Result<Json<T>, Problem>;

/// What an operator set for a semaphore.
#[derive(Serialize)]
pub(super) struct SetView {
    limit: Option<u32>,
    mode: &'static str,
    rate: Option<RateView>,
}

#[derive(Serialize)]
struct RateView {
    starts: u32,
    window_ms: u64,
}

impl From<Rate> for RateView {
    fn from(rate: Rate) -> Self {
        Self { starts: rate.starts(), window_ms: ms(rate.window()) }
    }
}

impl From<Override> for SetView {
    fn from(set: Override) -> Self {
        Self { limit: set.limit, mode: set.mode.as_str(), rate: set.rate.map(Into::into) }
    }
}

/// A limit that found itself.
#[derive(Serialize)]
struct AdaptedView {
    limit: u32,
    unchanged_for_ms: u64,
}

impl From<AdaptedLimit> for AdaptedView {
    fn from(adapted: AdaptedLimit) -> Self {
        Self { limit: adapted.limit, unchanged_for_ms: ms(adapted.unchanged_for) }
    }
}

/// A pause until a time.
#[derive(Serialize)]
struct PausedView {
    left_ms: u64,
    by: String,
    cause: String,
}

impl From<Paused> for PausedView {
    fn from(paused: Paused) -> Self {
        Self { left_ms: ms(paused.left), by: paused.by, cause: paused.cause.to_string() }
    }
}

/// How much of a rate is used.
#[derive(Serialize)]
struct RateUseView {
    starts: u32,
    window_ms: u64,
    smooth: bool,
    is_of_place: bool,
    started: u64,
    opens_in_ms: Option<u64>,
}

impl From<RateUse> for RateUseView {
    fn from(RateUse { rate, is_of_place, started, opens_in }: RateUse) -> Self {
        Self {
            starts: rate.starts(),
            window_ms: ms(rate.window()),
            smooth: rate.is_smooth(),
            is_of_place,
            started,
            // Rounded up: a start is allowed once it is over.
            opens_in_ms: opens_in.map(|left| ms(left + Duration::from_nanos(999_999))),
        }
    }
}

/// What an operator set for a tenant.
#[derive(Serialize)]
pub(super) struct TenantSetView {
    limit: Option<u32>,
    weight: Option<u32>,
}

impl From<TenantOverride> for TenantSetView {
    fn from(set: TenantOverride) -> Self {
        Self { limit: set.limit, weight: set.weight }
    }
}

/// What an operator set for a further limit.
#[derive(Serialize)]
pub(super) struct CapView {
    pub(super) limit: Option<u32>,
}

#[derive(Serialize)]
pub(super) struct PageView {
    semaphores: Vec<ListedView>,
    away: Vec<String>,
    next: Option<String>,
}

#[derive(Serialize)]
struct ListedView {
    name: String,
    in_use: u64,
    waiting: u64,
    limit: Option<u32>,
    set: SetView,
}

impl From<Page> for PageView {
    fn from(page: Page) -> Self {
        let semaphores = page.semaphores.into_iter().map(|one| {
            let Listed { name, in_use, waiting, limit, set } = one;
            ListedView { name: name.to_string(), in_use, waiting, limit, set: set.into() }
        });
        Self {
            semaphores: semaphores.collect(),
            away: page.away.iter().map(ToString::to_string).collect(),
            next: page.next.map(|next| next.to_string()),
        }
    }
}

#[derive(Serialize)]
pub(super) struct OverridesView {
    overrides: Vec<OverrideView>,
    tenants: Vec<TenantOverrideView>,
    further_limits: Vec<FurtherLimitOverrideView>,
}

#[derive(Serialize)]
struct OverrideView {
    name: String,
    set: SetView,
}

#[derive(Serialize)]
struct TenantOverrideView {
    name: String,
    tenant: String,
    set: TenantSetView,
}

#[derive(Serialize)]
struct FurtherLimitOverrideView {
    name: String,
    further_limit: String,
    value: String,
    set: CapView,
}

#[derive(Serialize)]
pub(super) struct InspectionView {
    name: String,
    in_use: u64,
    waiting: u64,
    longest_wait_ms: Option<u64>,
    limit: Option<u32>,
    last_limit: Option<u32>,
    rate: Option<RateUseView>,
    set: SetView,
    paused: Option<PausedView>,
    adapted: Option<AdaptedView>,
    is_cut: bool,
    tenants: Vec<TenantView>,
    further_limits: Vec<FurtherLimitView>,
    budgets: Vec<BudgetView>,
    processes: Vec<ProcessView>,
    holders: Vec<HolderView>,
    waiters: Vec<WaiterView>,
}

#[derive(Serialize)]
struct TenantView {
    id: String,
    name: Option<String>,
    in_use: u64,
    waiting: u64,
    weight: u32,
    each: Option<u32>,
    fair_share: Option<f64>,
    longest_wait_ms: Option<u64>,
    set: TenantSetView,
}

#[derive(Serialize)]
struct FurtherLimitView {
    name: Option<String>,
    value: Option<String>,
    cap: u32,
    set: CapView,
    in_use: u64,
    waiting: u64,
}

#[derive(Serialize)]
struct BudgetView {
    name: Option<String>,
    tenant: Option<String>,
    amount: Option<u64>,
    per_ms: Option<u64>,
    burst: Option<u64>,
    left: Option<u64>,
    full_in_ms: u64,
}

impl From<BudgetUse> for BudgetView {
    fn from(one: BudgetUse) -> Self {
        let left = one.left();
        let budget = one.budget;
        Self {
            name: budget.as_ref().map(|budget| budget.name().to_owned()),
            tenant: one.tenant.map(|tenant| tenant.as_str().to_owned()),
            amount: budget.as_ref().map(Budget::amount),
            per_ms: budget.as_ref().map(|budget| ms(budget.per())),
            burst: budget.as_ref().map(Budget::burst_amount),
            left,
            full_in_ms: ms(one.full_in),
        }
    }
}

#[derive(Serialize)]
struct ProcessView {
    node: String,
    process: Option<String>,
    is_own: bool,
    in_use: u64,
    kept: Option<u64>,
    waiting: u64,
    limit: Option<u32>,
    refused: Option<u64>,
    lost: Option<u64>,
}

#[derive(Serialize)]
struct HolderView {
    id: String,
    node: String,
    process: Option<String>,
    is_own: bool,
    tenant: Option<String>,
    cost: u32,
    held_ms: Option<u64>,
    lease_left_ms: u64,
}

#[derive(Serialize)]
struct WaiterView {
    id: String,
    node: String,
    process: Option<String>,
    is_own: bool,
    tenant: Option<String>,
    cost: u32,
    waited_ms: Option<u64>,
    lease_left_ms: u64,
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl TenantView {
    fn new(one: TenantUse, fair_share: Option<f64>) -> Self {
        Self {
            // To a hundredth: more digits say nothing of whole permits.
            fair_share: fair_share.map(|share| (share * 100.0).round() / 100.0),
            id: one.id.to_string(),
            name: one.name.map(|name| name.to_string()),
            in_use: one.in_use,
            waiting: one.waiting,
            weight: one.weight,
            each: one.each,
            longest_wait_ms: one.longest_wait.map(ms),
            set: one.set.into(),
        }
    }
}

impl From<ProcessUse> for ProcessView {
    fn from(one: ProcessUse) -> Self {
        let ProcessUse { node, process, is_own, in_use, kept, waiting, limit, refused, lost } = one;
        Self { node, process, is_own, in_use, kept, waiting, limit, refused, lost }
    }
}

impl From<Holder> for HolderView {
    fn from(one: Holder) -> Self {
        Self {
            id: one.id.to_string(),
            node: one.node,
            process: one.process,
            is_own: one.is_own,
            tenant: one.tenant.map(|tenant| tenant.to_string()),
            cost: one.cost,
            held_ms: one.held.map(ms),
            lease_left_ms: ms(one.lease_left),
        }
    }
}

impl From<Waiter> for WaiterView {
    fn from(one: Waiter) -> Self {
        Self {
            id: one.id.to_string(),
            node: one.node,
            process: one.process,
            is_own: one.is_own,
            tenant: one.tenant.map(|tenant| tenant.to_string()),
            cost: one.cost,
            waited_ms: one.waited.map(ms),
            lease_left_ms: ms(one.lease_left),
        }
    }
}

/// The limit without regard to a pause, during which 0 is in force.
pub(super) fn limit_of(seen: &Inspection) -> Option<u32> {
    let adapted = || seen.adapted.map(|adapted| adapted.limit);
    seen.set.limit.or_else(adapted).or_else(|| limit_of_policies(seen)).or(seen.last_limit)
}

/// The limit of policies.
pub(super) fn limit_of_policies(seen: &Inspection) -> Option<u32> {
    seen.processes.iter().filter_map(|process| process.limit).max()
}

impl InspectionView {
    fn new(name: &Name, seen: Inspection) -> Self {
        let shares = limit_of(&seen).map(|limit| fair_shares(limit, &seen.tenants));
        let share = |i: usize| shares.as_ref().and_then(|shares| shares.get(i)).copied();
        Self {
            name: name.to_string(),
            in_use: seen.in_use,
            waiting: seen.waiting,
            longest_wait_ms: seen.waiters.iter().filter_map(|one| one.waited).max().map(ms),
            limit: seen.limit,
            last_limit: seen.last_limit,
            rate: seen.rate.map(Into::into),
            set: seen.set.into(),
            paused: seen.paused.map(Into::into),
            adapted: seen.adapted.map(Into::into),
            is_cut: seen.is_cut,
            tenants: (seen.tenants.into_iter().enumerate())
                .map(|(i, one)| TenantView::new(one, share(i)))
                .collect(),
            further_limits: seen.further_limits.into_iter().map(Into::into).collect(),
            budgets: seen.budgets.into_iter().map(Into::into).collect(),
            processes: seen.processes.into_iter().map(Into::into).collect(),
            holders: seen.holders.into_iter().map(Into::into).collect(),
            waiters: seen.waiters.into_iter().map(Into::into).collect(),
        }
    }
}

impl From<FurtherLimitUse> for FurtherLimitView {
    fn from(FurtherLimitUse { name, value, cap, set, in_use, waiting }: FurtherLimitUse) -> Self {
        let [name, value] = [name, value].map(|name| name.map(|name| name.to_string()));
        Self { name, value, cap, set: CapView { limit: set }, in_use, waiting }
    }
}

pub(super) async fn list(State(window): State<Window>, listing: Listing) -> Answer<PageView> {
    let page = window.semaphore.list(listing.from, listing.most).await?;
    Ok(Json(page.into()))
}

pub(super) async fn overrides(State(window): State<Window>) -> Answer<OverridesView> {
    let overrides = window.semaphore.overrides().await?.into_iter();
    let tenants = window.semaphore.tenant_overrides().await?.into_iter();
    let further_limits = window.semaphore.further_limit_overrides().await?.into_iter();
    Ok(Json(OverridesView {
        overrides: overrides
            .map(|(name, set)| OverrideView { name: name.to_string(), set: set.into() })
            .collect(),
        tenants: tenants
            .map(|(name, tenant, set)| TenantOverrideView {
                name: name.to_string(),
                tenant: tenant.to_string(),
                set: set.into(),
            })
            .collect(),
        further_limits: further_limits
            .map(|set| FurtherLimitOverrideView {
                name: set.semaphore.to_string(),
                further_limit: set.limit.to_string(),
                value: set.value.to_string(),
                set: CapView { limit: Some(set.cap) },
            })
            .collect(),
    }))
}

pub(super) async fn inspect(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
) -> Answer<InspectionView> {
    let seen = window.semaphore.inspect_fleet(name.clone()).await?;
    Ok(Json(InspectionView::new(&name, seen)))
}
