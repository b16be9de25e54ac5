//! An operator's queries and commands.

mod budget_use;
mod further;
mod further_use;
mod ids;
mod inspect;
mod inspection;
mod limits;
mod tenants;

use std::sync::Arc;

pub use self::budget_use::BudgetUse;
pub use self::further_use::FurtherLimitUse;
pub use self::ids::{PlaceId, TenantId};
pub use self::inspect::{Cursor, Listed, Page};
pub use self::inspection::{
    AdaptedLimit, Holder, Inspection, Paused, ProcessUse, RateUse, TenantUse, Waiter,
};
use super::Semaphore;
use crate::backend::{Change, OVERRIDES};
use crate::error::BackendError;
use crate::name::Name;

impl Semaphore {
    /// Changes the override of a name, and applies it here.
    async fn change(&self, name: impl Into<Name>, change: Change) -> Result<(), BackendError> {
        self.set(name.into().as_str(), change).await?;
        self.running_node()?.catch_up().await
    }

    /// Changes a field of the overrides. All processes, including this one, are notified and apply it some time later.
    async fn set(&self, field: &str, change: Change) -> Result<(), BackendError> {
        let node = self.running_node()?;
        let (key, name) = (node.backend().key(OVERRIDES), Arc::from(field));
        node.query(None, &key, |server| server.set_override(&key, &name, change.clone())).await
    }
}
