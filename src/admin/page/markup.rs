//! Parts of pages: buttons, tables, names, numbers.

use std::time::Duration;

use maud::{Markup, html};
use percent_encoding::percent_decode_str;
use tokio::time::Instant;

use super::links::Root;
use crate::ask::Ask;
use crate::name::Name;
use crate::protocol::{Mode, Override, Rate};
use crate::semaphore::Health;
use crate::semaphore::TenantUse;
use crate::tenants::TenantOverride;

/// Why nothing is granted, in a quarantine.
pub(super) fn quarantine(health: &Health) -> Markup {
    html! {
        @if let Some(until) = health.quarantined_until {
            p.alert role="alert" {
                "In quarantine for another " (until.duration_since(Instant::now()).as_secs() + 1)
                " s: data may have been lost, and no permits are granted until those in use have been counted again."
            }
        }
    }
}

/// A button: its confirmation, and the request that it sends.
pub(super) struct Action<'a> {
    label: &'a str,
    method: &'static str,
    url: String,
    title: String,
    text: String,
    /// The number that the request carries: field name, label, range, current value.
    field: Option<(&'static str, &'static str, u32, u32, Option<u32>)>,
    /// The window of the rate whose starts that number is, in ms.
    window_ms: Option<u64>,
    /// The field that the request clears.
    clears: Option<&'static str>,
    is_grave: bool,
}

impl<'a> Action<'a> {
    pub(super) fn new(
        label: &'a str,
        method: &'static str,
        url: String,
        title: String,
        text: String,
    ) -> Self {
        Self {
            label,
            method,
            url,
            title,
            text,
            field: None,
            window_ms: None,
            clears: None,
            is_grave: false,
        }
    }

    pub(super) fn limit(mut self, label: &'static str, now: Option<u32>) -> Self {
        self.field = Some(("limit", label, 0, u32::MAX, now));
        self
    }

    pub(super) fn weight(mut self, now: u32) -> Self {
        let label = "Weight, from 1 to 64";
        self.field = Some(("weight", label, 1, Ask::MAX_WEIGHT, Some(now)));
        self
    }

    pub(super) fn starts(mut self, rate: Rate) -> Self {
        let window_ms = u64::try_from(rate.window().as_millis()).unwrap_or(u64::MAX);
        // At most 4000 in 10 ms.
        let most = u32::try_from(window_ms.saturating_mul(400)).unwrap_or(u32::MAX).max(4000);
        self.field =
            Some(("starts", "Starts in the window of the rate", 1, most, Some(rate.starts())));
        self.window_ms = Some(window_ms);
        self
    }

    const fn clears(mut self, field: &'static str) -> Self {
        self.clears = Some(field);
        self
    }

    pub(super) const fn grave(mut self) -> Self {
        self.is_grave = true;
        self
    }

    /// `of`: what it is for, where that stands elsewhere in the row.
    pub(super) fn render(&self, of: Option<&str>) -> Markup {
        let (name, label, least, most, now) = match self.field {
            Some((name, label, least, most, now)) => {
                (Some(name), Some(label), Some(least), Some(most), now)
            }
            None => (None, None, None, None, None),
        };
        html! {
            button type="button" class=[self.is_grave.then_some("grave")]
                data-method=(self.method) data-url=(self.url)
                data-title=(self.title) data-text=(self.text)
                data-clears=[self.clears] data-window-ms=[self.window_ms]
                data-field=[name] data-label=[label] data-min=[least] data-max=[most] data-now=[now] {
                (self.label)
                @if let Some(of) = of { span.unseen { " " (of) } }
            }
        }
    }
}

/// The name before encoding, as far as it can be shown.
pub(super) fn readable(name: &Name) -> String {
    let bytes: Vec<u8> = percent_decode_str(name.as_str()).collect();
    let text = String::from_utf8_lossy(&bytes);
    text.chars().map(|c| if c.is_control() || is_format(c) { '\u{fffd}' } else { c }).collect()
}

/// Characters that are invisible or change the text direction: with them two names could look alike.
const fn is_format(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}')
}

pub(super) fn seconds(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

pub(super) fn or_unknown<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "unknown".to_owned(), |value| value.to_string())
}

pub(super) fn badge(mode: Mode) -> Markup {
    html! { span.badge.(mode.as_str()) { (mode.as_str()) } }
}

pub(super) fn set(set: Override) -> Markup {
    html! {
        @let limit = set.limit.map(|limit| format!("limit {limit}"));
        @let rate = set.rate.map(|rate| format!("rate {rate}"));
        @let mode = (set.mode != Mode::Open).then(|| set.mode.as_str().to_owned());
        @let all: Vec<_> = limit.into_iter().chain(rate).chain(mode).collect();
        @if all.is_empty() { "–" } @else { (all.join(", ")) }
    }
}

pub(super) fn set_of_tenant(set: TenantOverride) -> String {
    let limit = set.limit.map(|limit| format!("cap {limit}"));
    let weight = set.weight.map(|weight| format!("weight {weight}"));
    match (limit, weight) {
        (Some(limit), Some(weight)) => format!("{limit}, {weight}"),
        (one, other) => one.or(other).unwrap_or_else(|| "–".to_owned()),
    }
}

pub(super) fn set_of_further_limit(set: Option<u32>) -> String {
    set.map_or_else(|| "–".to_owned(), |cap| format!("cap {cap}"))
}

/// A bar: a value out of a maximum.
pub(super) fn bar(value: u64, of: Option<u32>, what: &str) -> Markup {
    html! {
        @if let Some(of) = of.filter(|of| *of > 0) {
            // A full bar is shown as not optimal.
            meter min="0" max=(of) high=(of - 1) optimum="0" value=(value.min(of.into()))
                aria-label={ (what) ": " (value) " of " (of) } {}
        }
    }
}

/// A table that scrolls in a narrow window.
pub(super) fn table(id: &str, caption: &str, head: &[&str], rows: &Markup) -> Markup {
    html! {
        section #(id) {
            h2 #{ (id) "-title" } { (caption) }
            div.scroll role="region" aria-labelledby={ (id) "-title" } tabindex="0" {
                table aria-labelledby={ (id) "-title" } {
                    thead { tr { @for one in head { th scope="col" { (one) } } } }
                    tbody { (rows) }
                }
            }
        }
    }
}

pub(super) fn link(root: &Root, name: &Name) -> Markup {
    html! { a href=(root.page(name)) { bdi { (readable(name)) } } }
}

pub(super) fn process_name(name: &str, is_own: bool) -> Markup {
    html! { (name) @if is_own { " (this one)" } }
}

pub(super) fn tenant_name(one: &TenantUse) -> Markup {
    html! {
        @if let Some(name) = &one.name { bdi { (readable(name)) } } @else { code { "#" (one.id) } }
    }
}

pub(super) fn clear_of_tenant(
    root: &Root,
    name: &Name,
    tenant: &Name,
    set: TenantOverride,
) -> Markup {
    let (url, of, shown) = (root.tenant(name, tenant), readable(name), readable(tenant));
    let clear = |label, what: &str, field| {
        let title = format!("Clear the {what} of tenant {shown} at {of}?");
        let text = "What its requests carry applies again.".to_owned();
        let action = Action::new(label, "PATCH", url.clone(), title, text);
        action.clears(field).render(Some(&shown))
    };
    html! {
        @if set.limit.is_some() { (clear("Clear cap", "cap", "limit")) }
        @if set.weight.is_some() { (clear("Clear weight", "weight", "weight")) }
    }
}

/// A further limit in words, such as `route /chat`.
pub(super) fn shown_limit(limit: &Name, value: &Name) -> String {
    format!("{} {}", readable(limit), readable(value))
}

pub(super) fn clear_of_further_limit(
    root: &Root,
    name: &Name,
    limit: &Name,
    value: &Name,
) -> Markup {
    let (shown, of) = (shown_limit(limit, value), readable(name));
    let title = format!("Clear the cap of {shown} at {of}?");
    let text = "What requests ask for applies again.".to_owned();
    let url = root.further_limit(name, limit, value);
    Action::new("Clear cap", "DELETE", url, title, text).render(Some(&shown))
}

#[cfg(test)]
mod tests {
    use super::readable;
    use crate::name::Name;

    #[test]
    fn a_name_is_shown_as_it_was_written() {
        let name = Name::new("tenant").part("acme/eu é%<b>\r\n");
        assert_eq!(readable(&name), "tenant:acme/eu é%<b>\u{fffd}\u{fffd}");
        assert_eq!(readable(&Name::new("")), "%");
        assert_eq!(readable(&Name::new([0xff])), "\u{fffd}");
    }
}
