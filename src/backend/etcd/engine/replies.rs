//! Answers of a replica, as the process's sessions take them.

use std::time::Duration;

use tokio::time::Instant;

use super::tracked::{Pending, Tracked};
use crate::backend::Answer;
use crate::backend::etcd::clock::Now;
use crate::error::BackendError;
use crate::protocol::liveness::{self, OwnRows, margin};
use crate::protocol::replica;

/// The answer to a call, and from when its leases count.
pub(super) fn answer_of(
    answer: replica::Answer,
    pending: &Pending,
    tracked: &Tracked,
    own: &OwnRows,
    now: Now,
) -> Answer {
    let error = || {
        let unknown = || BackendError::call("etcd did not carry out the transaction");
        tracked.error.clone().unwrap_or_else(unknown)
    };
    match answer {
        replica::Answer::Reply(reply) => {
            if pending.lease.is_zero() {
                return reply.into();
            }
            match leases_from(pending, own, now) {
                Some(from) => Answer::Reply { reply, late: false, leases_from: Some(from) },
                None => Answer::Failed(BackendError::call("the lease ended meanwhile")),
            }
        }
        replica::Answer::Refused => Answer::Refused(error()),
        replica::Answer::Failed => Answer::Failed(error()),
    }
}

/// From when the leases of a call count, for a session, which takes them to be as long as the call asked, less 1 ms: they
/// are as long as etcd's lease, less its margin.
fn leases_from(pending: &Pending, own: &OwnRows, now: Now) -> Option<Instant> {
    let longer = Duration::from_secs(u64::from(pending.seconds)).saturating_sub(pending.lease);
    let from = own.leases_from(pending.seconds)? + longer + Duration::from_millis(1);
    now.instant_of(from.checked_sub(margin(pending.seconds))?)
}

pub(super) fn too_many_lengths(seconds: u32) -> BackendError {
    let most = liveness::LENGTHS_MAX;
    BackendError::call(format!(
        "lease is {seconds} s, and {most} other lengths are in use; expected at most {most} of one process"
    ))
}
