//! Extractors for the paths, queries and bodies of requests.

use std::collections::HashMap;
use std::fmt::Display;
use std::str::FromStr;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::QueryRejection;
use axum::extract::{FromRequest, FromRequestParts, Query, RawPathParams, Request};
use http::request::Parts;
use serde::de::value::{Error as ValueError, MapDeserializer};
use serde::de::{DeserializeOwned, Error};
use serde::{Deserialize, Deserializer};

use super::problem::Problem;
use crate::ask::Ask;
use crate::name::Name;
use crate::policy::rate_in_place;
use crate::semaphore::{Cursor, PlaceId};
use crate::tenants::TenantChange;

/// The longest wait for a drain.
const DRAIN_MAX_MS: u64 = 60_000;
/// Semaphores in one response by default, and at most.
const LISTED: u32 = 100;
const LISTED_MAX: u32 = 1000;

/// A path's parameters. A router around this one may have parameters of its own, of the same names too: the
/// last one of a name is ours.
pub(super) struct Target<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned + Send> FromRequestParts<S> for Target<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let params = RawPathParams::from_request_parts(parts, state).await?;
        let last: HashMap<_, _> = params.iter().collect();
        let target = T::deserialize(MapDeserializer::new(last.into_iter()));
        target.map(Self).map_err(|error: ValueError| Problem::bad(error.to_string()))
    }
}

#[derive(Deserialize)]
pub(super) struct OfSemaphore {
    #[serde(deserialize_with = "stored_name")]
    pub(super) name: Name,
}

#[derive(Deserialize)]
pub(super) struct OfTenant {
    #[serde(deserialize_with = "stored_name")]
    pub(super) name: Name,
    #[serde(deserialize_with = "stored_name")]
    pub(super) tenant: Name,
}

#[derive(Deserialize)]
pub(super) struct OfFurtherLimit {
    #[serde(deserialize_with = "stored_name")]
    pub(super) name: Name,
    #[serde(deserialize_with = "stored_name")]
    pub(super) limit: Name,
    #[serde(deserialize_with = "stored_name")]
    pub(super) value: Name,
}

#[derive(Deserialize)]
pub(super) struct OfPlace {
    #[serde(deserialize_with = "stored_name")]
    pub(super) name: Name,
    #[serde(deserialize_with = "place")]
    pub(super) id: PlaceId,
}

fn stored_name<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
    let text = String::deserialize(deserializer)?;
    Name::from_stored(&text).ok_or_else(|| {
        D::Error::custom(format!(
            "name is {text:?}; expected a name as it is stored, percent-encoded"
        ))
    })
}

fn place<'de, D: Deserializer<'de>>(deserializer: D) -> Result<PlaceId, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(D::Error::custom)
}

/// The part of the list of semaphores that is requested.
#[derive(Deserialize)]
pub(super) struct Listing {
    #[serde(default, deserialize_with = "parsed")]
    pub(super) from: Cursor,
    #[serde(default = "listed")]
    pub(super) most: u32,
}

const fn listed() -> u32 {
    LISTED
}

fn parsed<'de, D: Deserializer<'de>, T: FromStr<Err: Display>>(d: D) -> Result<T, D::Error> {
    String::deserialize(d)?.parse().map_err(D::Error::custom)
}

impl<S: Send + Sync> FromRequestParts<S> for Listing {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Problem> {
        let query: Result<_, QueryRejection> = Query::from_request_parts(parts, state).await;
        let Query(Self { from, most }) = query?;
        if !(1..=LISTED_MAX).contains(&most) {
            return Err(Problem::bad(format!("most is {most}; expected 1 to {LISTED_MAX}")));
        }
        Ok(Self { from, most })
    }
}

/// The JSON body of a request, whatever its content type: the required header already keeps other sites out.
pub(super) struct Body<T>(pub(super) T);

pub(super) trait Document: DeserializeOwned {
    fn is_allowed(&self) -> bool;

    fn allowed() -> String;

    /// The value of an empty body, if there may be none.
    fn empty() -> Option<Self> {
        None
    }
}

impl<S: Send + Sync, T: Document> FromRequest<S> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, state: &S) -> Result<Self, Problem> {
        let bytes = Bytes::from_request(request, state).await?;
        if let Some(document) = T::empty().filter(|_| bytes.is_empty()) {
            return Ok(Self(document));
        }
        let Json(document): Json<T> = Json::from_bytes(&bytes).map_err(|rejection| {
            let Problem { status, detail } = Problem::from(rejection);
            Problem::new(status, format!("{detail}; expected {}", T::allowed()))
        })?;
        if !document.is_allowed() {
            return Err(Problem::bad(format!("body is out of range; expected {}", T::allowed())));
        }
        Ok(Self(document))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewLimit {
    pub(super) limit: u32,
}

impl Document for NewLimit {
    fn is_allowed(&self) -> bool {
        true
    }

    fn allowed() -> String {
        format!("{{\"limit\": N}}, with N from 0 to {}", u32::MAX)
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewRate {
    pub(super) starts: u32,
    window_ms: u64,
}

impl NewRate {
    pub(super) const fn window(&self) -> Duration {
        Duration::from_millis(self.window_ms)
    }
}

impl Document for NewRate {
    fn is_allowed(&self) -> bool {
        rate_in_place(self.starts, self.window()).is_ok()
    }

    fn allowed() -> String {
        "{\"starts\": N, \"window_ms\": M}, with N from 1, M from 1 to 86400000, and at most 4000 in 10 ms".to_owned()
    }
}

/// A merge patch (RFC 7396) of what is set for a tenant: what is absent stays, and null clears.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NewTenant {
    #[serde(default, deserialize_with = "present")]
    limit: Option<Option<u32>>,
    #[serde(default, deserialize_with = "present")]
    weight: Option<Option<u32>>,
}

fn present<'de, D: Deserializer<'de>>(d: D) -> Result<Option<Option<u32>>, D::Error> {
    Option::deserialize(d).map(Some)
}

impl Document for NewTenant {
    fn is_allowed(&self) -> bool {
        let names_one = self.limit.is_some() || self.weight.is_some();
        names_one && self.weight.flatten().is_none_or(|of| (1..=Ask::MAX_WEIGHT).contains(&of))
    }

    fn allowed() -> String {
        format!(
            "{{\"limit\": N, \"weight\": M}} or one of them, with N from 0 to {}, M from 1 to {}, or null to clear it",
            u32::MAX,
            Ask::MAX_WEIGHT
        )
    }
}

impl From<NewTenant> for TenantChange {
    fn from(new: NewTenant) -> Self {
        let change = new.limit.map_or(Self::new(), |limit| Self::new().limit(limit));
        new.weight.map_or(change, |weight| change.weight(weight))
    }
}

/// How long to wait for a drain.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Patience {
    #[serde(default)]
    pub(super) timeout_ms: u64,
}

impl Document for Patience {
    fn is_allowed(&self) -> bool {
        self.timeout_ms <= DRAIN_MAX_MS
    }

    fn allowed() -> String {
        format!("{{\"timeout_ms\": N}}, with N from 0 to {DRAIN_MAX_MS}")
    }

    fn empty() -> Option<Self> {
        Some(Self::default())
    }
}
