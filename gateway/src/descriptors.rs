//! How many connections the limit of file descriptors leaves room for.

/// Descriptors that are not for connections of clients and to the upstream: the gateway's own pages, Redis or etcd, logs.
const RESERVED: usize = 64;

/// The most that a limit allows by itself.
const MOST: usize = 65_536;

/// How many connections of clients may be open: each may need a second one to the upstream.
pub(crate) fn connections() -> usize {
    of(limit())
}

fn of(limit: Option<u64>) -> usize {
    let limit = limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX);
    (limit.saturating_sub(RESERVED) / 2).clamp(8, MOST)
}

/// The soft limit; `None`: none.
#[cfg(unix)]
fn limit() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

#[cfg(not(unix))]
const fn limit() -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::of;

    #[test]
    fn each_connection_has_room_for_one_to_the_upstream() {
        for (limit, connections) in [
            (Some(0), 8),
            (Some(128), 32),
            (Some(1024), 480),
            (Some(u64::MAX), 65_536),
            (None, 65_536),
        ] {
            assert_eq!(of(limit), connections, "{limit:?}");
        }
    }
}
