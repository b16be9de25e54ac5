//! The page of one semaphore.

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use maud::{Markup, html};
use tokio::time::Instant;

use super::links::Root;
use super::markup::{
    Action, badge, bar, clear_of_further_limit, clear_of_tenant, or_unknown, process_name,
    quarantine, readable, seconds, set_of_further_limit, set_of_tenant, shown_limit, table,
    tenant_name,
};
use super::{document, failed};
use crate::admin::Window;
use crate::admin::extract::{OfSemaphore, Target};
use crate::admin::fair_share::fair_shares;
use crate::admin::history::Sample;
use crate::admin::plot::Plot;
use crate::admin::problem::Problem;
use crate::admin::view::{limit_of, limit_of_policies};
use crate::name::Name;
use crate::protocol::{Mode, PauseCause, Rate};
use crate::semaphore::{
    FurtherLimitUse, Holder, Inspection, PlaceId, ProcessUse, RateUse, TenantId, TenantUse, Waiter,
};

pub(in crate::admin) async fn one(
    State(window): State<Window>,
    target: Result<Target<OfSemaphore>, Problem>,
) -> Response {
    let root = Root::above();
    let Target(OfSemaphore { name }) = match target {
        Ok(target) => target,
        Err(problem) => return failed(&root, &problem),
    };
    match window.semaphore.inspect_fleet(name.clone()).await {
        Ok(seen) => {
            let main = One { root: &root, name: &name, seen: &seen }.render(&window);
            document(&root, &readable(&name), &main).into_response()
        }
        Err(error) => failed(&root, &error.into()),
    }
}

/// The page of one semaphore.
struct One<'a> {
    root: &'a Root,
    name: &'a Name,
    seen: &'a Inspection,
}

/// A place, as a row of holders or of the queue shows it.
struct PlaceRow<'a> {
    id: PlaceId,
    process: &'a str,
    is_own: bool,
    tenant: Option<TenantId>,
    cost: u32,
    waits: bool,
}

/// Why grants are paused until a time, in words.
fn cause(cause: PauseCause) -> String {
    match cause {
        PauseCause::Operator => "an operator ordered it".to_owned(),
        PauseCause::Status(status) => format!("the upstream answered {status}"),
        // There are no others.
        _ => "the upstream asked for it".to_owned(),
    }
}

/// The rate, and how much of it is used.
fn rate_use(used: &RateUse, is_set: bool) -> Markup {
    let RateUse { rate, is_of_place, started, opens_in } = used;
    let note = html! {
        @if is_set { "set here, in place of policies; " }
        @else if *is_of_place { "of a listed request, perhaps a part of a smooth rate; " }
        @if rate.is_smooth() { "spread over the window; " }
        @else { (started) " started; " }
        @match opens_in {
            Some(left) => { "the rate allows the next in " (seconds(*left)) }
            None => "the rate allows the next now",
        }
    };
    rate_figure(*rate, &note)
}

fn rate_figure(rate: Rate, note: &Markup) -> Markup {
    html! {
        div {
            dt { "Rate" }
            dd #rate { (rate.starts()) " in " (format!("{:?}", rate.window())) }
            dd.note #rate-use { (note) }
        }
    }
}

impl One<'_> {
    fn render(&self, window: &Window) -> Markup {
        let Self { name, seen, .. } = self;
        let shown = readable(name);
        html! {
            h1 { bdi { (shown) } }
            @if shown != name.as_str() { p.note { "stored as " code { (name) } } }
            (quarantine(&window.semaphore.health()))
            (self.card())
            (self.plots(window))
            @if seen.is_cut {
                p.alert role="alert" { "More requests hold or wait than are listed: tables and sums cover the first 1000." }
            }
            @if !seen.tenants.is_empty() { (self.tenants()) }
            @if !seen.further_limits.is_empty() { (self.further_limits()) }
            @if !seen.budgets.is_empty() { (self.budgets()) }
            (self.holders())
            (self.queue())
            (self.processes())
        }
    }

    /// The limit without regard to a pause, during which 0 is in force.
    fn limit(&self) -> Option<u32> {
        limit_of(self.seen)
    }

    fn card(&self) -> Markup {
        let silent = self.seen.processes.iter().filter(|one| one.refused.is_none()).count();
        html! {
            section.card aria-label="State and limit" {
                (self.figures())
                p.note {
                    "Refused and lost: counted by the processes below since their start"
                    @if silent > 0 { ", without " (silent) " that did not answer" }
                    "."
                }
                (self.disagreement())
                p.do { (self.actions()) }
            }
        }
    }

    fn figures(&self) -> Markup {
        let seen = self.seen;
        let limit = self.limit();
        let longest = seen.waiters.iter().filter_map(|one| one.waited).max();
        let sum = |count: fn(&ProcessUse) -> Option<u64>| {
            seen.processes.iter().filter_map(count).fold(0, u64::saturating_add)
        };
        html! {
            dl {
                div {
                    dt { "State" }
                    dd #state { (badge(seen.set.mode)) }
                    @if let Some(paused) = &seen.paused {
                        dd.note #paused {
                            "paused for another " (seconds(paused.left)) ": " (cause(paused.cause))
                            ", by " (paused.by)
                        }
                    }
                }
                div {
                    dt { "Limit" }
                    dd #limit { (or_unknown(limit)) }
                    dd.note {
                        @if seen.set.limit.is_some() { "set here, in place of policies" }
                        @else if let Some(adapted) = seen.adapted {
                            "found by the refusals of the upstream, changed "
                            (seconds(adapted.unchanged_for)) " ago"
                        }
                        @else if limit_of_policies(seen).is_some() { "of the policy" }
                        @else if limit.is_some() { "of the last request here" }
                        @else { "no process that uses it responded" }
                    }
                }
                @if let Some(used) = &seen.rate { (rate_use(used, seen.set.rate.is_some())) }
                @else if let Some(set) = seen.set.rate {
                    (rate_figure(set, &html! { "set here, but not in force: no known policy has a rate" }))
                }
                div { dt { "In use" } dd #in-use { (seen.in_use) } dd { (bar(seen.in_use, limit, "in use")) } }
                div { dt { "Waiting" } dd #waiting { (seen.waiting) } }
                div {
                    dt { "Longest wait" }
                    dd #longest-wait { @match longest {
                        Some(longest) => (seconds(longest)),
                        None if seen.waiting == 0 => "–",
                        None => "unknown",
                    } }
                }
                div { dt { "Refused" } dd #refused { (sum(|process| process.refused)) } }
                div { dt { "Leases lost" } dd #lost { (sum(|process| process.lost)) } }
            }
        }
    }

    /// A warning, if processes use different limits and no limit is set in place of theirs.
    fn disagreement(&self) -> Markup {
        let limits = || self.seen.processes.iter().filter_map(|process| process.limit);
        let differ = limits().min().zip(limits().max()).filter(|(least, most)| least != most);
        html! {
            @if let (None, Some((least, most))) = (self.seen.set.limit, differ) {
                p.alert role="alert" { "Processes use different limits: " (least) " to " (most) "." }
            }
        }
    }

    fn actions(&self) -> Markup {
        let (shown, url) = (readable(self.name), self.root.semaphore(self.name));
        let set = self.seen.set;
        let post = |label, title: &str, text: &str| {
            let url = format!("{url}/{}", str::to_lowercase(label));
            Action::new(label, "POST", url, format!("{title} {shown}?"), text.to_owned())
        };
        let limit = Action::new(
            "Set limit",
            "PUT",
            format!("{url}/limit"),
            format!("Set the limit of {shown}"),
            "Applies to the whole fleet, in place of every policy, until it is cleared.".to_owned(),
        );
        let clear = Action::new(
            "Clear limit",
            "DELETE",
            format!("{url}/limit"),
            format!("Clear the limit of {shown}?"),
            "The limit of each request's own policy applies again.".to_owned(),
        );
        html! {
            @if set.mode != Mode::Paused {
                (post("Pause", "Pause", "No permit is granted in the whole fleet until you resume. Waiting requests keep their position.").grave().render(None))
            }
            @if set.mode != Mode::Draining {
                (post("Drain", "Drain", "New requests are rejected in the whole fleet until you resume. Waiting requests are still served.").grave().render(None))
            }
            @if set.mode != Mode::Open || self.seen.paused.is_some() {
                (post("Resume", "Resume", "Permits are granted again in the whole fleet.").render(None))
            }
            (limit.limit("Permits, from 0 (none is granted) to 4294967295", self.limit()).render(None))
            @if set.limit.is_some() { (clear.render(None)) }
            @if let Some(rate) = self.rate_to_replace() { (self.rate_action(rate)) }
            @if set.rate.is_some() { (self.clear_rate_action()) }
        }
    }

    /// The rate whose window a new one takes over. That of a place can be a part of the whole.
    fn rate_to_replace(&self) -> Option<Rate> {
        let used = self.seen.rate?;
        self.seen.set.rate.or_else(|| (!used.is_of_place).then_some(used.rate))
    }

    fn rate_action(&self, rate: Rate) -> Markup {
        let url = format!("{}/rate", self.root.semaphore(self.name));
        let title = format!("Set the rate of {}", readable(self.name));
        let text = format!(
            "Starts in {:?}. Applies to the whole fleet, in place of the rate of every policy that has one, until it is cleared.",
            rate.window()
        );
        Action::new("Set rate", "PUT", url, title, text).starts(rate).render(None)
    }

    fn clear_rate_action(&self) -> Markup {
        let url = format!("{}/rate", self.root.semaphore(self.name));
        let title = format!("Clear the rate of {}?", readable(self.name));
        let text = "The rate of each request's own policy applies again.".to_owned();
        Action::new("Clear rate", "DELETE", url, title, text).render(None)
    }

    fn plots(&self, window: &Window) -> Markup {
        let now = Instant::now();
        let Inspection { in_use, waiting, .. } = *self.seen;
        let sample = Sample { at: now, in_use, waiting, limit: self.limit() };
        let samples = &window.history.keep(self.name.as_str(), sample)[..];
        let in_use = Plot {
            title: "In use",
            unit: "permits",
            samples,
            value: |sample| sample.in_use,
            limit: |sample| sample.limit.map(u64::from),
            now,
        };
        let waiting = Plot {
            title: "Waiting",
            unit: "requests",
            value: |sample| sample.waiting,
            limit: |_| None,
            ..in_use
        };
        html! {
            div.plots { (in_use.render()) (waiting.render()) }
            p.note {
                "Recorded while somebody has this page open, and kept for four minutes. Gaps are times at which nobody had."
            }
        }
    }

    fn tenants(&self) -> Markup {
        let head = [
            "Tenant",
            "In use",
            "Fair share",
            "Waiting",
            "Longest wait",
            "Weight",
            "Cap",
            "Set",
            "Change",
        ];
        let shares = self.limit().map(|limit| fair_shares(limit, &self.seen.tenants));
        let share = |i: usize| shares.as_ref().and_then(|shares| shares.get(i));
        table(
            "tenants",
            "Tenants",
            &head,
            &html! {
                @for (i, one) in self.seen.tenants.iter().enumerate() {
                    tr id={ "tenant-" (one.id) } {
                        th scope="row" { (tenant_name(one)) }
                        td.n {
                        (one.in_use) " "
                        (bar(one.in_use, one.set.limit.or(one.each).or_else(|| self.limit()), "in use"))
                    }
                        td.n { (or_unknown(share(i).map(|share| format!("{share:.1}")))) }
                        td.n { (one.waiting) }
                        td.n { (one.longest_wait.map_or_else(|| "–".to_owned(), seconds)) }
                        td.n { (one.weight) }
                        td.n { (one.each.map_or_else(|| "–".to_owned(), |each| each.to_string())) }
                        td { (set_of_tenant(one.set)) }
                        td.do {
                            @if let Some(name) = &one.name { (self.change_of_tenant(one, name)) }
                            @else { "its name is unknown" }
                        }
                    }
                }
            },
        )
    }

    fn budgets(&self) -> Markup {
        let head = ["Budget", "Amount", "At once", "Left", "Full in"];
        table(
            "budgets",
            "Budgets",
            &head,
            &html! {
                @for one in &self.seen.budgets {
                    tr {
                        @if let Some(budget) = &one.budget {
                            th scope="row" {
                                bdi { (budget.name()) }
                                @if let Some(tenant) = &one.tenant { " of " bdi { (tenant) } }
                            }
                            td.n { (budget.to_string()) }
                            td.n { (budget.burst_amount()) }
                        } @else {
                            th scope="row" { "unknown to this process" }
                            td { "–" }
                            td { "–" }
                        }
                        td.n { @if let Some(left) = one.left() { (left) } @else { "–" } }
                        td.n { @if one.full_in.is_zero() { "full" } @else { (seconds(one.full_in)) } }
                    }
                }
            },
        )
    }

    fn further_limits(&self) -> Markup {
        let head = ["Limit", "Value", "In use", "Waiting", "Cap", "Set", "Change"];
        table(
            "further-limits",
            "Further limits",
            &head,
            &html! {
                @for one in &self.seen.further_limits {
                    tr {
                        @if let (Some(name), Some(value)) = (&one.name, &one.value) {
                            th scope="row" { bdi { (readable(name)) } }
                            td { bdi { (readable(value)) } }
                        } @else {
                            th scope="row" { "unknown to this process" }
                            td { "–" }
                        }
                        td.n { (one.in_use) " " (bar(one.in_use, one.set.or(Some(one.cap)), "in use")) }
                        td.n { (one.waiting) }
                        td.n { (one.cap) }
                        td { (set_of_further_limit(one.set)) }
                        td.do {
                            @if let (Some(limit), Some(value)) = (&one.name, &one.value) {
                                (self.change_of_further_limit(one, limit, value))
                            } @else { "its name is unknown" }
                        }
                    }
                }
            },
        )
    }

    fn change_of_further_limit(&self, one: &FurtherLimitUse, limit: &Name, value: &Name) -> Markup {
        let (shown, of) = (shown_limit(limit, value), readable(self.name));
        let url = self.root.further_limit(self.name, limit, value);
        let title = format!("Set the cap of {shown} at {of}");
        let text = "Applies to requests that arrive from then on, in the whole fleet.".to_owned();
        let label = "Permits, from 0 (all are refused) to 4294967295";
        let cap =
            Action::new("Set cap", "PUT", url, title, text).limit(label, one.set.or(Some(one.cap)));
        html! {
            (cap.render(Some(&shown)))
            @if one.set.is_some() { (clear_of_further_limit(self.root, self.name, limit, value)) }
        }
    }

    fn change_of_tenant(&self, one: &TenantUse, tenant: &Name) -> Markup {
        let (shown, of) = (readable(tenant), readable(self.name));
        let url = self.root.tenant(self.name, tenant);
        let text = "Applies to requests that arrive from then on, in the whole fleet.";
        let set = |label, what: &str| {
            let title = format!("Set the {what} of tenant {shown} at {of}");
            Action::new(label, "PATCH", url.clone(), title, text.to_owned())
        };
        let cap = set("Set cap", "cap")
            .limit("Permits, from 0 (all are refused) to 4294967295", one.set.limit.or(one.each));
        let weight = set("Set weight", "weight").weight(one.weight);
        html! {
            (cap.render(Some(&shown)))
            (weight.render(Some(&shown)))
            (clear_of_tenant(self.root, self.name, tenant, one.set))
        }
    }

    fn tenant(&self, tenant: Option<TenantId>) -> Markup {
        let known = self.seen.tenants.iter().find(|one| Some(one.id) == tenant);
        html! {
            @if let Some(known) = known { (tenant_name(known)) } @else { "–" }
        }
    }

    fn revoke(&self, id: PlaceId, process: &str, waits: bool) -> Markup {
        let text = if waits {
            format!(
                "The request at place {id} of process {process} is refused, and leaves the queue."
            )
        } else {
            format!(
                "Process {process} loses the permit of place {id}: its request is aborted, unless the layer lets it \
                 go on. The permit goes to the head of the queue."
            )
        };
        let title = format!("Revoke place {id} of process {process}?");
        let action = Action::new("Revoke", "DELETE", self.root.permit(self.name, id), title, text);
        action.grave().render(Some(&format!("place {id} of {process}")))
    }

    /// A row of holders, or of the queue.
    fn place(&self, row: &PlaceRow<'_>, times: &[String]) -> Markup {
        let PlaceRow { id, process, is_own, tenant, cost, waits } = *row;
        html! {
            tr id={ "place-" (id) } {
                th scope="row" { code { (id) } }
                td { (process_name(process, is_own)) }
                td { (self.tenant(tenant)) }
                td.n { (cost) }
                @for time in times { td.n { (time) } }
                td.do { (self.revoke(id, process, waits)) }
            }
        }
    }

    fn holders(&self) -> Markup {
        let head = ["Place", "Process", "Tenant", "Permits", "Held", "Lease left", "Revoke"];
        let mut holders: Vec<_> = self.seen.holders.iter().collect();
        // The longest first, and those that nobody could tell of last.
        holders.sort_by_key(|one| std::cmp::Reverse(one.held));
        let rows = html! {
            @for one in holders {
                @let Holder { id, tenant, cost, is_own, .. } = *one;
                @let process = one.process.as_ref().unwrap_or(&one.node);
                @let times = [or_unknown(one.held.map(seconds)), seconds(one.lease_left)];
                (self.place(&PlaceRow { id, process, is_own, tenant, cost, waits: false }, &times))
            }
        };
        if self.seen.holders.is_empty() {
            return html! { section #holders { h2 { "Holders" } p { "No request holds a permit." } } };
        }
        table("holders", "Holders", &head, &rows)
    }

    fn queue(&self) -> Markup {
        let head = ["Place", "Process", "Tenant", "Permits", "Waits", "Revoke"];
        let rows = html! {
            @for one in &self.seen.waiters {
                @let Waiter { id, tenant, cost, is_own, .. } = *one;
                @let process = one.process.as_ref().unwrap_or(&one.node);
                @let times = [or_unknown(one.waited.map(seconds))];
                (self.place(&PlaceRow { id, process, is_own, tenant, cost, waits: true }, &times))
            }
        };
        if self.seen.waiters.is_empty() {
            return html! { section #queue { h2 { "Queue" } p { "No request waits." } } };
        }
        table("queue", "Queue", &head, &rows)
    }

    fn processes(&self) -> Markup {
        let head = ["Process", "In use", "Kept", "Waiting", "Limit", "Refused", "Leases lost"];
        table(
            "processes",
            "Processes",
            &head,
            &html! {
                @for one in &self.seen.processes {
                    tr id={ "process-" (one.node) } {
                        th scope="row" { (process_name(one.process.as_ref().unwrap_or(&one.node), one.is_own)) }
                        td.n { (one.in_use) }
                        td.n { (or_unknown(one.kept)) }
                        td.n { (one.waiting) }
                        td.n { (or_unknown(one.limit)) }
                        td.n { (or_unknown(one.refused)) }
                        td.n { (or_unknown(one.lost)) }
                    }
                }
            },
        )
    }
}
