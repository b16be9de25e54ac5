//! The actions of an operator.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use serde::Serialize;

use super::Window;
use super::extract::{
    Body, NewLimit, NewRate, NewTenant, OfFurtherLimit, OfPlace, OfSemaphore, OfTenant, Patience,
    Target,
};
use super::problem::Problem;
use super::view::{CapView, SetView, TenantSetView};
use crate::name::Name;

type JsonResult<T> = Result<Json<T>, Problem>;

#[derive(Serialize)]
pub(super) struct Drained {
    empty: bool,
}

#[derive(Serialize)]
pub(super) struct Revoked {
    revoked: bool,
}

/// Returns what is set now.
async fn set_of(window: &Window, name: Name) -> JsonResult<SetView> {
    Ok(Json(window.semaphore.limit_of(name).await?.into()))
}

pub(super) async fn set_limit(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
    Body(NewLimit { limit }): Body<NewLimit>,
) -> JsonResult<SetView> {
    window.semaphore.set_limit(name.clone(), limit).await?;
    set_of(&window, name).await
}

pub(super) async fn clear_limit(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
) -> JsonResult<SetView> {
    window.semaphore.clear_limit(name.clone()).await?;
    set_of(&window, name).await
}

pub(super) async fn set_rate(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
    Body(rate): Body<NewRate>,
) -> JsonResult<SetView> {
    window.semaphore.set_rate(name.clone(), rate.starts, rate.window()).await?;
    set_of(&window, name).await
}

pub(super) async fn clear_rate(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
) -> JsonResult<SetView> {
    window.semaphore.clear_rate(name.clone()).await?;
    set_of(&window, name).await
}

pub(super) async fn set_tenant(
    State(window): State<Window>,
    Target(OfTenant { name, tenant }): Target<OfTenant>,
    Body(change): Body<NewTenant>,
) -> JsonResult<TenantSetView> {
    window.semaphore.set_tenant(name.clone(), tenant.clone(), change.into()).await?;
    Ok(Json(window.semaphore.tenant_override_of(name, tenant).await?.into()))
}

async fn change_further_limit(
    window: &Window,
    of: OfFurtherLimit,
    cap: Option<u32>,
) -> JsonResult<CapView> {
    let OfFurtherLimit { name, limit, value } = of;
    let semaphore = &window.semaphore;
    semaphore.set_further_limit(name.clone(), limit.clone(), value.clone(), cap).await?;
    Ok(Json(CapView { limit: semaphore.further_limit_of(name, limit, value).await? }))
}

pub(super) async fn set_further_limit(
    State(window): State<Window>,
    Target(of): Target<OfFurtherLimit>,
    Body(NewLimit { limit }): Body<NewLimit>,
) -> JsonResult<CapView> {
    change_further_limit(&window, of, Some(limit)).await
}

pub(super) async fn clear_further_limit(
    State(window): State<Window>,
    Target(of): Target<OfFurtherLimit>,
) -> JsonResult<CapView> {
    change_further_limit(&window, of, None).await
}

pub(super) async fn pause(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
) -> JsonResult<SetView> {
    window.semaphore.pause(name.clone()).await?;
    set_of(&window, name).await
}

pub(super) async fn resume(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
) -> JsonResult<SetView> {
    window.semaphore.resume(name.clone()).await?;
    set_of(&window, name).await
}

pub(super) async fn drain(
    State(window): State<Window>,
    Target(OfSemaphore { name }): Target<OfSemaphore>,
    Body(Patience { timeout_ms }): Body<Patience>,
) -> JsonResult<Drained> {
    let empty = window.semaphore.drain(name, Duration::from_millis(timeout_ms)).await?;
    Ok(Json(Drained { empty }))
}

pub(super) async fn revoke(
    State(window): State<Window>,
    Target(OfPlace { name, id }): Target<OfPlace>,
) -> JsonResult<Revoked> {
    if window.semaphore.revoke(name, id).await? {
        Ok(Json(Revoked { revoked: true }))
    } else {
        Err(Problem::new(StatusCode::NOT_FOUND, format!("there is no place {id} any more")))
    }
}
