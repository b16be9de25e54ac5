//! Links between the pages, all of them relative.

use axum::extract::OriginalUri;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use crate::name::Name;
use crate::semaphore::PlaceId;

/// The characters to encode in a path segment. `.` is one of them: a segment of dots leads up.
const SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'_');

/// The relative path from the page in the browser to the root of these routes.
pub(super) struct Root(pub(super) String);

impl Root {
    /// The path from a page below `page/`.
    pub(super) fn above() -> Self {
        Self("../".to_owned())
    }

    /// The path from the URL that the browser requested. A browser resolves links against the last segment, unless
    /// the URL ends with `/`.
    pub(super) fn from(uri: &OriginalUri) -> Self {
        let path = uri.path();
        if path.ends_with("/page/") {
            return Self::above();
        }
        match path.rsplit('/').next() {
            None | Some("") => Self(String::new()),
            Some(last) => Self(format!("{last}/")),
        }
    }

    pub(super) fn page(&self, name: &Name) -> String {
        format!("{}page/{}", self.0, segment(name.as_str()))
    }

    pub(super) fn all(&self) -> String {
        format!("{}page/", self.0)
    }

    pub(super) fn semaphore(&self, name: &Name) -> String {
        format!("{}semaphores/{}", self.0, segment(name.as_str()))
    }

    pub(super) fn tenant(&self, name: &Name, tenant: &Name) -> String {
        format!("{}/tenants/{}", self.semaphore(name), segment(tenant.as_str()))
    }

    pub(super) fn further_limit(&self, name: &Name, limit: &Name, value: &Name) -> String {
        let of = self.semaphore(name);
        format!("{of}/limits/{}/{}", segment(limit.as_str()), segment(value.as_str()))
    }

    pub(super) fn permit(&self, name: &Name, id: PlaceId) -> String {
        format!("{}/permits/{}", self.semaphore(name), segment(&id.to_string()))
    }
}

pub(super) fn segment(text: &str) -> impl std::fmt::Display + '_ {
    utf8_percent_encode(text, SEGMENT)
}

#[cfg(test)]
mod tests {
    use axum::extract::OriginalUri;
    use http::Uri;

    use super::{Root, segment};

    #[test]
    fn nothing_in_a_segment_ends_it() {
        let text = segment("../a/b?c#d%2F\"é").to_string();
        assert_eq!(text, "%2E%2E%2Fa%2Fb%3Fc%23d%252F%22%C3%A9");
    }

    #[test]
    fn links_are_relative_to_what_was_asked_for() {
        for (path, root) in [
            ("/", ""),
            ("/ops/semaphores/", ""),
            ("/ops/semaphores", "semaphores/"),
            ("/page/", "../"),
            ("/ops/page/", "../"),
        ] {
            assert_eq!(Root::from(&OriginalUri(Uri::from_static(path))).0, root, "{path}");
        }
    }
}
