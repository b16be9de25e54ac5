//! What the window tells and does, as JSON.

use std::ops::RangeInclusive;
use std::time::Duration;

use axum::body::{Body, to_bytes};
use axum::extract::{Path, RawQuery, State};
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::CONTENT_TYPE;
use serde_json::{Value, json};

use super::{Problem, Window};
use crate::error::ConfigError;
use crate::name::Name;
use crate::protocol::id::PlaceId;
use crate::protocol::overrides::Override;
use crate::semaphore::{Ask, Cursor, TenantOverride};

/// The longest body that is read.
const BODY_MAX: usize = 4096;
/// How long a drain may be waited for.
const DRAIN_MAX_MS: u64 = 60_000;

type Answer = Result<Response, Problem>;

fn answer(value: &Value) -> Response {
    ([(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn ms(duration: Duration) -> Value {
    json!(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX))
}

fn set(set: Override) -> Value {
    json!({ "limit": set.limit, "mode": set.mode.as_str() })
}

pub(super) fn name_of(text: &str) -> Result<Name, Problem> {
    Name::from_stored(text).ok_or_else(|| {
        Problem::bad(format!(
            "name: {text:?} cannot be used; allowed: a name as it is stored, percent-encoded"
        ))
    })
}

/// What the query says of something.
fn value<'a>(query: Option<&'a str>, name: &str) -> Option<&'a str> {
    let mut pairs = query?.split('&').filter_map(|pair| pair.split_once('='));
    pairs.rfind(|(key, _)| *key == name).map(|(_, value)| value)
}

/// Where a page begins.
pub(super) fn cursor(query: Option<&str>) -> Result<Cursor, Problem> {
    value(query, "from")
        .map_or_else(|| Ok(Cursor::default()), str::parse)
        .map_err(|error: ConfigError| Problem::bad(error.to_string()))
}

/// The document that came along; null if none did.
async fn document(body: Body) -> Result<Value, Problem> {
    let bytes = to_bytes(body, BODY_MAX).await.map_err(|_| {
        let detail = format!("the body has more than {BODY_MAX} bytes, or did not come");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    })?;
    if bytes.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&bytes).map_err(|error| Problem::bad(format!("body: no JSON: {error}")))
}

pub(super) async fn list(State(window): State<Window>, RawQuery(query): RawQuery) -> Answer {
    let from = cursor(query.as_deref())?;
    let most = value(query.as_deref(), "most").unwrap_or("100");
    let allowed = most.parse().ok().filter(|most| (1..=1000).contains(most));
    let most = allowed.ok_or_else(|| {
        Problem::bad(format!("most: {most:?} cannot be used; allowed: 1 to 1000"))
    })?;
    let page = window.semaphore.list(from, most).await?;
    let semaphores: Vec<_> = page
        .semaphores
        .iter()
        .map(|one| {
            json!({
                "name": one.name.as_str(),
                "in_use": one.in_use,
                "waiting": one.waiting,
                "set": set(one.set),
            })
        })
        .collect();
    let away: Vec<_> = page.away.iter().map(ToString::to_string).collect();
    let next = page.next.map(|next| next.to_string());
    Ok(answer(&json!({ "semaphores": semaphores, "away": away, "next": next })))
}

pub(super) async fn overrides(State(window): State<Window>) -> Answer {
    let all = window.semaphore.overrides().await?;
    let all: Vec<_> = all
        .iter()
        .map(|(name, over)| json!({ "name": name.as_str(), "set": set(*over) }))
        .collect();
    let tenants = window.semaphore.tenant_overrides().await?;
    let tenants: Vec<_> = tenants
        .iter()
        .map(|(name, tenant, set)| {
            let (name, tenant) = (name.as_str(), tenant.as_str());
            json!({ "name": name, "tenant": tenant, "set": set_of_tenant(*set) })
        })
        .collect();
    Ok(answer(&json!({ "overrides": all, "tenants": tenants })))
}

pub(super) async fn inspect(State(window): State<Window>, Path(name): Path<String>) -> Answer {
    let seen = window.semaphore.inspect_fleet(name_of(&name)?).await?;
    let holders: Vec<_> = seen
        .holders
        .iter()
        .map(|one| {
            json!({
                "id": one.id.to_string(),
                "node": one.node,
                "process": one.process,
                "is_own": one.is_own,
                "tenant": one.tenant.map(|tenant| tenant.to_string()),
                "cost": one.cost,
                "held_ms": one.held.map(ms),
                "lease_left_ms": ms(one.lease_left),
            })
        })
        .collect();
    let waiters: Vec<_> = seen
        .waiters
        .iter()
        .map(|one| {
            json!({
                "id": one.id.to_string(),
                "node": one.node,
                "process": one.process,
                "is_own": one.is_own,
                "tenant": one.tenant.map(|tenant| tenant.to_string()),
                "cost": one.cost,
                "waited_ms": one.waited.map(ms),
                "lease_left_ms": ms(one.lease_left),
            })
        })
        .collect();
    let tenants: Vec<_> = seen
        .tenants
        .iter()
        .map(|one| {
            json!({
                "id": one.id.to_string(),
                "name": one.name.as_ref().map(Name::as_str),
                "in_use": one.in_use,
                "waiting": one.waiting,
                "weight": one.weight,
                "each": one.each,
                "longest_wait_ms": one.longest_wait.map(ms),
                "set": set_of_tenant(one.set),
            })
        })
        .collect();
    Ok(answer(&json!({
        "name": name,
        "in_use": seen.in_use,
        "waiting": seen.waiting,
        "limit": seen.limit,
        "set": set(seen.set),
        "is_cut": seen.is_cut,
        "tenants": tenants,
        "holders": holders,
        "waiters": waiters,
    })))
}

/// What is set for a tenant.
fn set_of_tenant(set: TenantOverride) -> Value {
    json!({ "limit": set.limit, "weight": set.weight })
}

/// Tells what is set for a tenant now.
async fn told_of_tenant(window: &Window, name: Name, tenant: Name) -> Answer {
    Ok(answer(&set_of_tenant(window.semaphore.tenant_override_of(name, tenant).await?)))
}

fn tenant_of(text: &str) -> Result<Name, Problem> {
    Name::from_stored(text).ok_or_else(|| {
        Problem::bad(format!(
            "tenant: {text:?} cannot be used; allowed: a name as it is stored, percent-encoded"
        ))
    })
}

/// The number that the body gives by this name.
async fn number(body: Body, name: &str, allowed: RangeInclusive<u32>) -> Result<u32, Problem> {
    let document = document(body).await?;
    let number = document[name].as_u64().and_then(|number| u32::try_from(number).ok());
    number.filter(|number| allowed.contains(number)).ok_or_else(|| {
        let (least, most) = allowed.into_inner();
        Problem::bad(format!("body: allowed: {{\"{name}\": N}}, with N from {least} to {most}"))
    })
}

pub(super) async fn set_tenant_limit(
    State(window): State<Window>,
    Path((name, tenant)): Path<(String, String)>,
    body: Body,
) -> Answer {
    let (name, tenant) = (name_of(&name)?, tenant_of(&tenant)?);
    let limit = number(body, "limit", 0..=u32::MAX).await?;
    window.semaphore.set_tenant_limit(name.clone(), tenant.clone(), limit).await?;
    told_of_tenant(&window, name, tenant).await
}

pub(super) async fn clear_tenant_limit(
    State(window): State<Window>,
    Path((name, tenant)): Path<(String, String)>,
) -> Answer {
    let (name, tenant) = (name_of(&name)?, tenant_of(&tenant)?);
    window.semaphore.clear_tenant_limit(name.clone(), tenant.clone()).await?;
    told_of_tenant(&window, name, tenant).await
}

pub(super) async fn set_tenant_weight(
    State(window): State<Window>,
    Path((name, tenant)): Path<(String, String)>,
    body: Body,
) -> Answer {
    let (name, tenant) = (name_of(&name)?, tenant_of(&tenant)?);
    let weight = number(body, "weight", 1..=Ask::MAX_WEIGHT).await?;
    window.semaphore.set_tenant_weight(name.clone(), tenant.clone(), weight).await?;
    told_of_tenant(&window, name, tenant).await
}

pub(super) async fn clear_tenant_weight(
    State(window): State<Window>,
    Path((name, tenant)): Path<(String, String)>,
) -> Answer {
    let (name, tenant) = (name_of(&name)?, tenant_of(&tenant)?);
    window.semaphore.clear_tenant_weight(name.clone(), tenant.clone()).await?;
    told_of_tenant(&window, name, tenant).await
}

/// Tells what is set now.
async fn told(window: &Window, name: Name) -> Answer {
    Ok(answer(&set(window.semaphore.limit_of(name).await?)))
}

pub(super) async fn set_limit(
    State(window): State<Window>,
    Path(name): Path<String>,
    body: Body,
) -> Answer {
    let name = name_of(&name)?;
    let limit = number(body, "limit", 0..=u32::MAX).await?;
    window.semaphore.set_limit(name.clone(), limit).await?;
    told(&window, name).await
}

pub(super) async fn clear_limit(State(window): State<Window>, Path(name): Path<String>) -> Answer {
    let name = name_of(&name)?;
    window.semaphore.clear_limit(name.clone()).await?;
    told(&window, name).await
}

pub(super) async fn pause(State(window): State<Window>, Path(name): Path<String>) -> Answer {
    let name = name_of(&name)?;
    window.semaphore.pause(name.clone()).await?;
    told(&window, name).await
}

pub(super) async fn resume(State(window): State<Window>, Path(name): Path<String>) -> Answer {
    let name = name_of(&name)?;
    window.semaphore.resume(name.clone()).await?;
    told(&window, name).await
}

pub(super) async fn drain(
    State(window): State<Window>,
    Path(name): Path<String>,
    body: Body,
) -> Answer {
    let (name, document) = (name_of(&name)?, document(body).await?);
    let timeout = match &document["timeout_ms"] {
        Value::Null => Some(0),
        value => value.as_u64().filter(|ms| *ms <= DRAIN_MAX_MS),
    };
    let timeout = timeout.ok_or_else(|| {
        Problem::bad(format!(
            "body: allowed: {{\"timeout_ms\": N}}, with N from 0 to {DRAIN_MAX_MS}"
        ))
    })?;
    let empty = window.semaphore.drain(name, Duration::from_millis(timeout)).await?;
    Ok(answer(&json!({ "empty": empty })))
}

pub(super) async fn revoke(
    State(window): State<Window>,
    Path((name, id)): Path<(String, String)>,
) -> Answer {
    let name = name_of(&name)?;
    let place: PlaceId = id.parse().map_err(|_| {
        Problem::bad(format!("id: {id:?} cannot be used; allowed: an id that an inspection tells"))
    })?;
    if window.semaphore.revoke(name, place).await? {
        Ok(answer(&json!({ "revoked": true })))
    } else {
        Err(Problem::new(StatusCode::NOT_FOUND, format!("there is no place {id}")))
    }
}
