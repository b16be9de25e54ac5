//! The page of all semaphores.

use axum::extract::{OriginalUri, State};
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};

use super::links::Root;
use super::markup::{
    badge, bar, clear_of_further_limit, clear_of_tenant, link, or_unknown, quarantine, readable,
    set, set_of_further_limit, set_of_tenant, table,
};
use super::{document, failed};
use crate::admin::Window;
use crate::admin::extract::Listing;
use crate::admin::problem::Problem;
use crate::semaphore::Listed;
use crate::semaphore::{ConnectionState, Health};

pub(in crate::admin) async fn all(
    State(window): State<Window>,
    uri: OriginalUri,
    listing: Result<Listing, Problem>,
) -> Response {
    let root = Root::from(&uri);
    match all_of(&window, &root, listing).await {
        Ok(main) => document(&root, "Semaphores", &main).into_response(),
        Err(problem) => failed(&root, &problem),
    }
}

async fn all_of(
    window: &Window,
    root: &Root,
    listing: Result<Listing, Problem>,
) -> Result<Markup, Problem> {
    let Listing { from, most } = listing?;
    let overrides = window.semaphore.overrides().await?;
    let mut page = window.semaphore.list(from, most).await?;
    page.semaphores.sort_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
    let tenants = window.semaphore.tenant_overrides().await?;
    let further_limits = window.semaphore.further_limit_overrides().await?;
    let rows = html! { @for one in &page.semaphores { (listed(root, one)) } };
    let head = ["Name", "State", "In use", "Limit", "Use", "Waiting"];
    Ok(html! {
        h1 { "Semaphores" }
        (health(&window.semaphore.health()))
        @for error in &page.away { p.alert role="alert" { "Some are missing: " (error) } }
        @if page.semaphores.is_empty() { p { "No request holds a permit or waits for one." } }
        @else { (table("all", "In use", &head, &rows)) }
        @if let Some(next) = page.next { p { a href={ (root.all()) "?from=" (next) "&most=" (most) } { "More" } } }
        @if !overrides.is_empty() {
            (table("overrides", "Set in place of policies", &["Name", "Set"], &html! {
                @for (name, over) in &overrides {
                    tr id={ "set-" (name) } { th scope="row" { (link(root, name)) } td { (set(*over)) } }
                }
            }))
        }
        @if !tenants.is_empty() {
            (table("tenant-overrides", "Set for tenants", &["Name", "Tenant", "Set", "Clear"], &html! {
                @for (name, tenant, over) in &tenants {
                    tr id={ "set-" (name) "@" (tenant) } {
                        th scope="row" { (link(root, name)) }
                        td { bdi { (readable(tenant)) } }
                        td { (set_of_tenant(*over)) }
                        td.do { (clear_of_tenant(root, name, tenant, *over)) }
                    }
                }
            }))
        }
        @if !further_limits.is_empty() {
            @let head = ["Name", "Limit", "Value", "Set", "Clear"];
            (table("further-limit-overrides", "Set for further limits", &head, &html! {
                @for one in &further_limits {
                    tr id={ "set-" (one.semaphore) "@@" (one.limit) "@" (one.value) } {
                        th scope="row" { (link(root, &one.semaphore)) }
                        td { bdi { (readable(&one.limit)) } }
                        td { bdi { (readable(&one.value)) } }
                        td { (set_of_further_limit(Some(one.cap))) }
                        td.do { (clear_of_further_limit(root, &one.semaphore, &one.limit, &one.value)) }
                    }
                }
            }))
        }
    })
}

fn listed(root: &Root, one: &Listed) -> Markup {
    let limit = one.set.limit.or(one.limit);
    html! {
        tr id={ "semaphore-" (one.name) } {
            th scope="row" { (link(root, &one.name)) }
            td { (badge(one.set.mode)) }
            td.n { (one.in_use) }
            td.n { (or_unknown(limit)) }
            td { (bar(one.in_use, limit, "in use")) }
            td.n { (one.waiting) }
        }
    }
}

fn health(health: &Health) -> Markup {
    let (state, why) = match &health.connection {
        ConnectionState::Embedded => ("in this process", None),
        ConnectionState::Connecting => ("connecting", None),
        ConnectionState::Up => ("connected", None),
        ConnectionState::Down { error, .. } => ("unavailable", Some(error.to_string())),
    };
    html! {
        section.card aria-label="This process" {
            dl {
                div { dt { "Backend" } dd { (state) } }
                div { dt { "Leases lost" } dd { (health.lost) } }
                div { dt { "Disconnects" } dd { (health.disconnects) } }
                div { dt { "Admitted by policy" } dd { (health.admitted_by_policy) } }
                div { dt { "Refused by policy" } dd { (health.refused_by_policy) } }
            }
            p.note { "Counted by the process that serves this page, since it started." }
            @if let Some(why) = why { p.alert role="alert" { (why) } }
            (quarantine(health))
            @if let Some(warning) = &health.warning { p.alert role="alert" { (warning) } }
        }
    }
}
