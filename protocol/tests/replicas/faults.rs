//! Rules that are not obeyed, to show that it is noticed.

use tower_semaphore_protocol::replica::{Change, Value};
use tower_semaphore_protocol::{Call, Op, PlaceId};

use super::store::Request;

/// A rule that is not obeyed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// The store writes without comparing the revision.
    NoCompare,
    /// The replicas accept values that are older than what they know.
    GoesBack,
    /// Calls are given up when the outcome of their transaction is unknown.
    DropsUnknown,
    /// A transaction whose outcome is unknown is taken for one that was carried out.
    TrustsUnknown,
    /// Strangers are not released.
    KeepsStrangers,
    /// Processes are forgotten though their signs of life are there.
    ForgetsLiving,
    /// The last that waits is granted in place of the first.
    OutOfTurn,
    /// The store writes for processes whose signs of life have ended.
    DeadWrite,
    /// No hint is made of a value.
    NoHints,
    /// No call is made where places were removed without a grant.
    IgnoresFreed,
    /// A process passes its permits on though it was not told so.
    PassesOn,
}

impl Fault {
    /// With [`OutOfTurn`](Self::OutOfTurn), gives the permit of `held` to the last place that waits.
    pub(crate) fn spoil(self, mut request: Request, held: Option<PlaceId>) -> Request {
        if self == Self::OutOfTurn
            && let (Some(held), Change::Put(bytes)) = (held, &mut request.transaction.change)
            && let Ok(mut value) = Value::decode(bytes)
        {
            let mut waiting: Vec<_> =
                value.ledger.places().filter(|place| place.2.is_some()).collect();
            waiting.sort_unstable_by_key(|place| place.2);
            if let [_, .., (last, lease_end, _)] = waiting[..] {
                let lease_ms = lease_end - value.time / 1000;
                let proofs = vec![(last, lease_end)];
                _ = value.ledger.revoke(held, true, value.time);
                _ = value.ledger.revoke(last, true, value.time);
                let call = Call::of(Op::Reassert { lease_ms, proofs });
                value.ledger.carry_out(last.node, &call, value.time, &mut |_, _| true);
                *bytes = value.encode().into();
            }
        }
        request
    }
}
