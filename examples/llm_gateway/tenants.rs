//! The tenants: their API keys and their plans.

use std::collections::HashMap;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::request::Parts;
use sha2::{Digest, Sha256};

/// All tenants, with their keys. In a real program, a table of the database.
const KEYS: [(&str, Tenant); 3] = [
    ("acme-key", Tenant { name: "acme", plan: Plan::Pro }),
    ("globex-key", Tenant { name: "globex", plan: Plan::Pro }),
    ("hobby-key", Tenant { name: "hobby", plan: Plan::Free }),
];

/// The tenant of a request, in the request's extensions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tenant {
    pub(crate) name: &'static str,
    pub(crate) plan: Plan,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Plan {
    Free,
    Pro,
}

impl Plan {
    /// The share of the quota while other tenants wait, relative to theirs.
    pub(crate) const fn weight(self) -> u32 {
        match self {
            Self::Free => 1,
            Self::Pro => 3,
        }
    }

    /// The concurrent requests to the provider.
    pub(crate) const fn requests(self) -> u32 {
        match self {
            Self::Free => 2,
            Self::Pro => 4,
        }
    }

    /// The concurrent WebSockets.
    pub(crate) const fn sockets(self) -> u32 {
        match self {
            Self::Free => 1,
            Self::Pro => 10,
        }
    }
}

impl Tenant {
    /// The plan of the tenant of a request. Behind [`authenticate`], every request has one.
    pub(crate) fn plan_of(parts: &Parts) -> Plan {
        parts.extensions.get::<Self>().map_or(Plan::Free, |tenant| tenant.plan)
    }

    pub(crate) fn names() -> impl Iterator<Item = &'static str> {
        KEYS.iter().map(|(_, tenant)| tenant.name)
    }
}

/// Lets `ExtensionKey` use it as the key.
impl AsRef<[u8]> for Tenant {
    fn as_ref(&self) -> &[u8] {
        self.name.as_bytes()
    }
}

/// Tenants by the hash of their key, so that lookups leak nothing about keys through timing.
#[derive(Clone)]
pub(crate) struct ApiKeys {
    tenants: Arc<HashMap<[u8; 32], Tenant>>,
}

impl ApiKeys {
    pub(crate) fn new() -> Self {
        let hashed = KEYS.map(|(key, tenant)| (Sha256::digest(key).into(), tenant));
        Self { tenants: Arc::new(HashMap::from(hashed)) }
    }

    fn tenant(&self, key: &str) -> Option<Tenant> {
        let hash: [u8; 32] = Sha256::digest(key).into();
        self.tenants.get(&hash).copied()
    }
}

/// Puts the tenant of the API key into the request's extensions, or rejects the request with 401.
pub(crate) async fn authenticate(
    State(keys): State<ApiKeys>,
    mut request: Request,
    next: Next,
) -> Response {
    let credentials = request.headers().get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let key = credentials.and_then(|value| value.strip_prefix("Bearer "));
    let Some(tenant) = key.and_then(|key| keys.tenant(key)) else {
        return (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")]).into_response();
    };
    request.extensions_mut().insert(tenant);
    next.run(request).await
}
