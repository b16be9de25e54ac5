//! What the status of a member tells: whether it can be used, and what its operator should know.

use super::wire::messages::StatusResponse;
use crate::error::BackendError;

/// The first version that is used. Those from 3.4.0 to 3.4.21, and from 3.5.0 to 3.5.5, can lose or mix up data
/// (etcd-io/etcd#13766 and its postmortems).
const OLDEST: [u32; 3] = [3, 4, 0];
const MENDED: [[u32; 3]; 2] = [[3, 4, 22], [3, 5, 6]];

const NO_SPACE: &str =
    "no space left; compact, defragment, and disarm the alarm, or raise the quota";

/// Checks that a member can be used.
pub(super) fn check(whom: &str, status: &StatusResponse) -> Result<(), BackendError> {
    let unusable = |why: String| Err(BackendError::connection(format!("{whom} {why}")));
    let version = &status.version;
    if parse(version).is_some_and(|version| version < OLDEST) {
        return unusable(format!("has version {version}; expected 3.4 or later"));
    }
    if status.is_learner {
        return unusable("is a learner; expected a member that votes".to_owned());
    }
    if status.leader == 0 {
        return unusable("is not in touch with a leader".to_owned());
    }
    if is_full(status) {
        return unusable(format!("has {NO_SPACE}"));
    }
    Ok(())
}

fn is_full(status: &StatusResponse) -> bool {
    status.errors.iter().any(|error| error.contains("NOSPACE"))
}

/// What its operator should know.
pub(super) fn warning(status: &StatusResponse) -> Option<String> {
    let StatusResponse { version, db_size, db_size_quota, .. } = status;
    let parsed = parse(version).unwrap_or([u32::MAX; 3]);
    let is_mended = |mended: &[u32; 3]| parsed[..2] != mended[..2] || parsed >= *mended;
    if !MENDED.iter().all(is_mended) {
        return Some(format!(
            "etcd has version {version}, which can lose data; expected 3.4.22, 3.5.6 or later"
        ));
    }
    if is_full(status) {
        return Some(format!("etcd has {NO_SPACE}"));
    }
    // Versions before 3.6 do not tell it.
    if *db_size_quota > 0 && *db_size > *db_size_quota / 2 {
        return Some(format!(
            "etcd uses {db_size} of {db_size_quota} bytes; at the quota it refuses every write, so compact and \
             defragment it"
        ));
    }
    None
}

/// Reads a version; what follows its numbers does not count.
fn parse(version: &str) -> Option<[u32; 3]> {
    let mut numbers = version.split(['.', '-', '+']).map(|number| number.parse().ok());
    Some([numbers.next()??, numbers.next()??, numbers.next()??])
}

#[cfg(test)]
mod tests {
    use super::{check, warning};
    use crate::backend::etcd::wire::messages::StatusResponse;

    fn status(version: &str) -> StatusResponse {
        StatusResponse { version: version.to_owned(), leader: 1, ..StatusResponse::default() }
    }

    #[test]
    fn versions_that_can_lose_data_are_warned_of() {
        for version in ["3.4.0", "3.4.21", "3.5.0", "3.5.5"] {
            let text = warning(&status(version)).unwrap();
            assert!(text.contains(version), "{text}");
        }
        for version in ["3.4.22", "3.4.23", "3.5.6", "3.5.16", "3.6.0", "3.7.0-rc.1", "4.0.0", "?"]
        {
            assert_eq!(warning(&status(version)), None, "{version}");
            assert!(check("etcd", &status(version)).is_ok());
        }
        assert!(check("etcd", &status("3.3.27")).unwrap_err().to_string().contains("3.3.27"));
    }

    #[test]
    fn a_member_that_serves_nobody_is_not_used() {
        let quota = StatusResponse { db_size: 60, db_size_quota: 100, ..status("3.6.0") };
        assert!(warning(&quota).unwrap().contains("60 of 100 bytes"));
        for (status, why) in [
            (StatusResponse { leader: 0, ..status("3.6.0") }, "leader"),
            (StatusResponse { is_learner: true, ..status("3.6.0") }, "learner"),
            (
                StatusResponse {
                    errors: vec!["memberID:1 alarm:NOSPACE ".into()],
                    ..status("3.6.0")
                },
                "space",
            ),
        ] {
            let error = check("etcd at x:1", &status).unwrap_err().to_string();
            assert!(error.contains(why) && error.starts_with("etcd at x:1 "), "{error}");
        }
    }
}
