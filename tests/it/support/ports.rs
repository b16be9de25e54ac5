//! Free ports for servers.

use std::net::TcpListener;
use std::sync::atomic::{AtomicU32, Ordering};

/// Returns a free loopback port, each only once. They are below those that the system takes for connections, so a
/// server that was killed finds its port free.
pub(crate) fn free_port() -> u16 {
    const FIRST: u32 = 10_000;
    const COUNT: u32 = 20_000;
    static GIVEN: AtomicU32 = AtomicU32::new(0);
    // Each process begins with another one.
    let begin = std::process::id().wrapping_mul(7919) % COUNT;
    let given = (0..COUNT).map(|_| GIVEN.fetch_add(1, Ordering::Relaxed));
    let mut ports = given.map(|n| u16::try_from(FIRST + (begin + n) % COUNT).unwrap());
    ports.find(|port| TcpListener::bind(("127.0.0.1", *port)).is_ok()).expect("a free port")
}
