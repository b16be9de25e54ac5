//! What happens in a run.

use proptest::prelude::*;
use tower_semaphore_protocol::liveness::Grace;

/// A rule that a run goes without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Removed {
    /// A keepalive counts without a reading of the sign.
    Reading,
    /// A reading counts in any term.
    Term,
    /// Leases count from the answer.
    Sending,
    /// Leases count in full.
    Margin,
    /// Places count whenever they were seen.
    RegisteredAt,
    /// Rows are forgotten at once.
    Grace,
    /// A lost lease is not granted again.
    Registering,
    /// Rows are forgotten whether their sign is there or not.
    Guard,
    /// A process that wakes up acts on what it saw before.
    Restart,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    /// A process stands still. When it wakes, it looks at its timers before its messages, or after them.
    Freeze {
        process: usize,
        ms: u64,
        timers_first: bool,
    },
    /// No message reaches it, or comes from it.
    Cut {
        process: usize,
        ms: u64,
    },
    /// Three of ten messages to and from it are lost.
    Lossy {
        process: usize,
        ms: u64,
    },
    /// Its watch loses all events.
    Deaf {
        process: usize,
        ms: u64,
    },
    /// A new leader, after some time without any. One process, if it is one, is in touch with the old leader, which goes
    /// on acknowledging keepalives.
    Elect {
        gap_ms: u64,
        deposed_ms: u64,
        attached: usize,
    },
    /// A lease ends early.
    Revoke {
        process: usize,
        length: usize,
    },
    Kill {
        process: usize,
    },
}

#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) processes: usize,
    pub(crate) grace: Grace,
    /// How long a message takes at most.
    pub(crate) delay_ms: u64,
    /// How much faster or slower than true time some clocks run, in parts per million.
    pub(crate) drift: i64,
    /// What happens when, in ms.
    pub(crate) faults: Vec<(u64, Fault)>,
    pub(crate) removed: Option<Removed>,
}

/// When the last fault begins at the latest, in ms.
pub(crate) const FAULTS_MS: u64 = 25_000;

impl Plan {
    pub(crate) fn quiet(seed: u64, processes: usize, grace: Grace) -> Self {
        Self { seed, processes, grace, delay_ms: 20, drift: 50, faults: Vec::new(), removed: None }
    }

    pub(crate) fn without(self, removed: Removed) -> Self {
        Self { removed: Some(removed), ..self }
    }
}

fn fault() -> impl Strategy<Value = Fault> {
    let process = 0..3_usize;
    let ms = 100..12_000_u64;
    let freeze = (process.clone(), ms.clone(), any::<bool>())
        .prop_map(|(process, ms, timers_first)| Fault::Freeze { process, ms, timers_first });
    let elect = (300..3000_u64, 0..10_000_u64, 0..4_usize)
        .prop_map(|(gap_ms, deposed_ms, attached)| Fault::Elect { gap_ms, deposed_ms, attached });
    prop_oneof![
        3 => freeze,
        3 => (process.clone(), ms.clone()).prop_map(|(process, ms)| Fault::Cut { process, ms }),
        2 => (process.clone(), ms.clone()).prop_map(|(process, ms)| Fault::Lossy { process, ms }),
        2 => (process.clone(), ms).prop_map(|(process, ms)| Fault::Deaf { process, ms }),
        3 => elect,
        4 => (process.clone(), 0..3_usize)
            .prop_map(|(process, length)| Fault::Revoke { process, length }),
        1 => process.prop_map(|process| Fault::Kill { process }),
    ]
}

pub(crate) fn plan() -> impl Strategy<Value = Plan> {
    let faults = prop::collection::vec((0..FAULTS_MS, fault()), 0..10);
    let grace = prop_oneof![Just(Grace::Half), Just(Grace::Whole)];
    let delay_ms = prop_oneof![Just(5_u64), Just(40), Just(250)];
    (any::<u64>(), 2..4_usize, grace, delay_ms, faults).prop_map(
        |(seed, processes, grace, delay_ms, faults)| Plan {
            seed,
            processes,
            grace,
            delay_ms,
            drift: 4500,
            faults,
            removed: None,
        },
    )
}
