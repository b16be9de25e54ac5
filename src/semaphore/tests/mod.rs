//! The semaphore over a backend of two servers, with the data of the embedded one.

mod servers;
mod two_servers;
mod wakers;

use self::two_servers::{TwoServers, World};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use crate::policy::Policy;
use crate::semaphore::Semaphore;

fn policy(lease: Duration) -> Policy {
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(10)).lease(lease);
    policy.build().unwrap()
}

const LEASE: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

/// One process on two servers. `x` is on a, and moves to b when `moved` is set.
fn one_process(world: World) -> (Arc<World>, Semaphore) {
    let backend = TwoServers(Arc::new(world));
    (Arc::clone(&backend.0), Semaphore::new(backend))
}

fn settled() -> World {
    World { moved: AtomicBool::new(true), ..World::default() }
}
