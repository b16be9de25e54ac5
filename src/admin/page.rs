//! What the window shows. All of it is made here; the script only fetches it again and sends what a
//! button says.

use std::fmt::{self, Display, Write};
use std::time::Duration;

use axum::extract::rejection::NestedPathRejection;
use axum::extract::{NestedPath, Path, RawQuery, State};
use axum::response::{Html, IntoResponse};
use http::header::CONTENT_TYPE;

use super::history::{Sample, plot};
use super::json::{cursor, name_of};
use super::{Problem, Window};
use crate::name::Name;
use crate::protocol::overrides::Override;
use crate::semaphore::{TenantOverride, TenantUse};

/// Semaphores on a page.
const LISTED: u32 = 100;

pub(super) async fn script() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/javascript; charset=utf-8")], include_str!("admin.js"))
}

pub(super) async fn style() -> impl IntoResponse {
    ([(CONTENT_TYPE, "text/css; charset=utf-8")], include_str!("admin.css"))
}

/// Text, as it may stand in a document and in a quoted attribute.
struct Text<T>(T);

impl<T: Display> Display for Text<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.0.to_string().chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// A segment of a path.
struct Segment<'a>(&'a str);

impl Display for Segment<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // `.` is encoded too: a segment of dots is a way up.
        for byte in self.0.bytes() {
            if byte.is_ascii_alphanumeric() || b"_-".contains(&byte) {
                f.write_char(char::from(byte))?;
            } else {
                write!(f, "%{byte:02X}")?;
            }
        }
        Ok(())
    }
}

fn document(base: &str, title: &str, main: &str) -> Html<String> {
    let (base, title) = (Text(base), Text(title));
    Html(format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title>\
         <link rel=\"stylesheet\" href=\"{base}/admin.css\">\
         <script src=\"{base}/admin.js\" defer></script>\
         <body><p id=\"told\" role=\"status\"></p><main>{main}</main></body></html>\n"
    ))
}

fn ago(duration: Duration) -> String {
    format!("{:.1} s", duration.as_secs_f64())
}

fn shown(set: Override) -> String {
    match set.limit {
        Some(limit) => format!("{limit}, {}", set.mode.as_str()),
        None => set.mode.as_str().to_owned(),
    }
}

/// The name as it was chosen, as far as that can be shown.
fn readable(name: &Name) -> String {
    let mut bytes = Vec::new();
    let mut rest = name.as_str().as_bytes();
    while let [first, then @ ..] = rest {
        rest = then;
        let coded = then.get(..2).filter(|_| *first == b'%');
        let coded = coded.and_then(|digits| std::str::from_utf8(digits).ok());
        match coded.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &then[2..];
            }
            None => bytes.push(*first),
        }
    }
    let text = String::from_utf8_lossy(&bytes);
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// A button that sends a request.
fn button(label: &str, method: &str, url: &str) -> String {
    format!("<button data-method=\"{method}\" data-url=\"{}\">{label}</button>", Text(url))
}

fn link(base: &str, name: &Name) -> String {
    let (url, name) = (Segment(name.as_str()), Text(readable(name)));
    format!("<a href=\"{}/page/{url}\"><bdi>{name}</bdi></a>", Text(base))
}

/// Under what path the window is mounted, if not at the root.
type Nested = Result<NestedPath, NestedPathRejection>;

fn base_of(nested: &Nested) -> &str {
    nested.as_ref().map_or("", |path| path.as_str().trim_end_matches('/'))
}

pub(super) async fn all(
    State(window): State<Window>,
    nested: Nested,
    RawQuery(query): RawQuery,
) -> Result<Html<String>, Problem> {
    let base = base_of(&nested);
    let from = cursor(query.as_deref())?;
    let overrides = window.semaphore.overrides().await?;
    let mut page = window.semaphore.list(from, LISTED).await?;
    page.semaphores.sort_by(|a, b| a.name.as_str().cmp(b.name.as_str()));
    let mut main = "<h1>Semaphores</h1><table><thead><tr><th>name<th>in use<th>waiting<th>set\
                    </thead><tbody>"
        .to_owned();
    for one in &page.semaphores {
        let _ = write!(
            main,
            "<tr><td>{}<td class=\"n\">{}<td class=\"n\">{}<td>{}",
            link(base, &one.name),
            one.in_use,
            one.waiting,
            shown(one.set),
        );
    }
    main.push_str("</tbody></table>");
    for error in &page.away {
        let _ = write!(main, "<p role=\"alert\">Some are missing: {}</p>", Text(error));
    }
    if page.semaphores.is_empty() {
        main.push_str("<p>Nobody holds or waits here.</p>");
    }
    if let Some(next) = page.next {
        let _ = write!(main, "<p><a href=\"{}?from={next}\">more</a></p>", Text(base));
    }
    if !overrides.is_empty() {
        main.push_str("<h2>Set in place of policies</h2><ul>");
        for (name, set) in &overrides {
            let _ = write!(main, "<li>{}: {}", link(base, name), shown(*set));
        }
        main.push_str("</ul>");
    }
    let tenants = window.semaphore.tenant_overrides().await?;
    if !tenants.is_empty() {
        main.push_str("<h2>Set for tenants</h2><ul>");
        for (name, tenant, set) in &tenants {
            let (of, at) = (Segment(name.as_str()), Segment(tenant.as_str()));
            let url = format!("{base}/semaphores/{of}/tenants/{at}");
            let clear = button("clear cap", "DELETE", &format!("{url}/limit"))
                + &button("clear weight", "DELETE", &format!("{url}/weight"));
            let (link, tenant) = (link(base, name), Text(readable(tenant)));
            let set = shown_of_tenant(*set);
            let _ = write!(main, "<li>{link}, <bdi>{tenant}</bdi>: {set} {clear}");
        }
        main.push_str("</ul>");
    }
    Ok(document(base, "Semaphores", &main))
}

pub(super) async fn one(
    State(window): State<Window>,
    nested: Nested,
    Path(text): Path<String>,
) -> Result<Html<String>, Problem> {
    let base = base_of(&nested);
    let name = name_of(&text)?;
    let seen = window.semaphore.inspect_fleet(name.clone()).await?;
    let sample = Sample { in_use: seen.in_use, waiting: seen.waiting };
    let samples = window.history.keep(name.as_str(), sample);
    let url = format!("{base}/semaphores/{}", Segment(name.as_str()));

    let mut main = format!(
        "<p><a href=\"{}\">all semaphores</a></p><h1><bdi>{}</bdi></h1><p><code>{}</code></p>",
        Text(if base.is_empty() { "/" } else { base }),
        Text(readable(&name)),
        Text(&name)
    );
    let limit = seen.limit.map_or_else(|| "not known here".to_owned(), |limit| limit.to_string());
    let _ = write!(
        main,
        "<p>limit: {limit}; in use: <b>{}</b>; waiting: <b>{}</b>; set: {}</p><p class=\"do\">",
        seen.in_use,
        seen.waiting,
        shown(seen.set),
    );
    for (label, method, end) in
        [("pause", "POST", "pause"), ("drain", "POST", "drain"), ("resume", "POST", "resume")]
    {
        main.push_str(&button(label, method, &format!("{url}/{end}")));
    }
    main.push_str(&button("set limit", "PUT", &format!("{url}/limit")));
    main.push_str(&button("clear limit", "DELETE", &format!("{url}/limit")));
    main.push_str("</p><div class=\"plots\">");
    let of = |part: fn(&Sample) -> u64| samples.iter().map(part).collect::<Vec<_>>();
    main.push_str(&plot("in use", &of(|sample| sample.in_use)));
    main.push_str(&plot("waiting", &of(|sample| sample.waiting)));

    main.push_str("</div>");
    if seen.is_cut {
        main.push_str("<p role=\"alert\">More hold or wait than are listed here.</p>");
    }
    if !seen.tenants.is_empty() {
        main.push_str(&tenants(&seen.tenants, &url));
    }
    main.push_str(
        "<h2>Holders</h2><table><thead><tr><th>place<th>process<th>held<th>lease left<th>\
         </thead><tbody>",
    );
    for one in &seen.holders {
        let _ = write!(
            main,
            "<tr><td>{}<td>{}{}<td class=\"n\">{}<td class=\"n\">{}<td>{}",
            Text(one.id),
            Text(one.process.as_ref().unwrap_or(&one.node)),
            if one.is_own { " (this one)" } else { "" },
            one.held.map_or_else(|| "–".to_owned(), ago),
            ago(one.lease_left),
            button("revoke", "DELETE", &format!("{url}/permits/{}", Segment(&one.id.to_string()))),
        );
    }
    main.push_str(
        "</tbody></table><h2>Queue</h2><table><thead><tr><th>place<th>process<th>waits<th>\
         </thead><tbody>",
    );
    for one in &seen.waiters {
        let _ = write!(
            main,
            "<tr><td>{}<td>{}{}<td class=\"n\">{}<td>{}",
            Text(one.id),
            Text(one.process.as_ref().unwrap_or(&one.node)),
            if one.is_own { " (this one)" } else { "" },
            one.waited.map_or_else(|| "–".to_owned(), ago),
            button("revoke", "DELETE", &format!("{url}/permits/{}", Segment(&one.id.to_string()))),
        );
    }
    main.push_str("</tbody></table>");
    Ok(document(base, &readable(&name), &main))
}

/// The table of tenants, with what can be set for those whose names are known.
fn tenants(seen: &[TenantUse], url: &str) -> String {
    let mut table = "<h2>Tenants</h2><table><thead><tr><th>tenant<th>in use<th>waiting<th>longest \
                     wait<th>weight<th>cap<th>set<th></thead><tbody>"
        .to_owned();
    let or_none = |number: Option<u32>| number.map_or_else(|| "–".to_owned(), |n| n.to_string());
    for one in seen {
        let name = one.name.as_ref().map(readable).unwrap_or_default();
        let _ = write!(
            table,
            "<tr><td><bdi>{}</bdi> <code>#{}</code><td class=\"n\">{}<td class=\"n\">{}<td class=\"n\">{}\
             <td class=\"n\">{}<td class=\"n\">{}<td>{}<td class=\"do\">",
            Text(name),
            one.id,
            one.in_use,
            one.waiting,
            one.longest_wait.map_or_else(|| "–".to_owned(), ago),
            one.weight,
            or_none(one.each),
            shown_of_tenant(one.set),
        );
        if let Some(name) = &one.name {
            let url = format!("{url}/tenants/{}", Segment(name.as_str()));
            table.push_str(&button("set cap", "PUT", &format!("{url}/limit")));
            table.push_str(&button("clear cap", "DELETE", &format!("{url}/limit")));
            table.push_str(&button("set weight", "PUT", &format!("{url}/weight")));
            table.push_str(&button("clear weight", "DELETE", &format!("{url}/weight")));
        }
    }
    table + "</tbody></table>"
}

fn shown_of_tenant(set: TenantOverride) -> String {
    let limit = set.limit.map(|limit| format!("cap {limit}"));
    let weight = set.weight.map(|weight| format!("weight {weight}"));
    match (limit, weight) {
        (Some(limit), Some(weight)) => format!("{limit}, {weight}"),
        (one, other) => one.or(other).unwrap_or_else(|| "–".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::{Segment, Text, readable};
    use crate::name::Name;

    #[test]
    fn a_name_is_shown_as_it_was_written() {
        let name = Name::new("tenant").part("acme/eu é%<b>\r\n");
        assert_eq!(readable(&name), "tenant:acme/eu é%<b>\u{fffd}\u{fffd}");
        assert_eq!(readable(&Name::new("")), "%");
        assert_eq!(readable(&Name::new([0xff])), "\u{fffd}");
    }

    #[test]
    fn nothing_in_a_text_is_markup() {
        let hostile = "<script>alert(1)</script>\"' onload=x &amp;";
        let text = Text(hostile).to_string();
        assert!(!text.contains(['<', '>', '"', '\'']), "{text}");
        assert!(text.starts_with("&lt;script&gt;") && text.ends_with("&amp;amp;"), "{text}");
    }

    #[test]
    fn nothing_in_a_segment_ends_it() {
        let text = Segment("../a/b?c#d%2F\"é").to_string();
        assert_eq!(text, "%2E%2E%2Fa%2Fb%3Fc%23d%252F%22%C3%A9");
    }
}
