//! What an error of etcd means for the call, and for the connection.

use std::error::Error;
use std::fmt;

use tonic::{Code, Status};

use crate::backend::socket::tls_advice;
use crate::error::BackendError;

/// Why a call failed, or a stream ended.
#[derive(Clone, Debug)]
pub struct WireError {
    reason: Reason,
    did_nothing: bool,
    error: BackendError,
}

/// What a caller acts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The connection broke, or the member stopped.
    Disconnected,
    /// The member is not in touch with a leader.
    NoLeader,
    /// The leader changed while the request was under way.
    LeaderChanged,
    /// The cluster did not answer the member in time.
    TimedOut,
    /// There is no such lease, or no longer.
    LeaseNotFound,
    /// The revision was compacted.
    Compacted,
    /// The database is full.
    NoSpace,
    /// The request is larger than the member accepts.
    TooLarge,
    /// The cluster is behind with its work.
    TooManyRequests,
    /// The token has ended, or rights changed since it was issued; with another one, the same request may succeed.
    InvalidToken,
    /// The cluster wants a user, or another password.
    NotAuthenticated,
    /// The cluster has no users.
    AuthenticationDisabled,
    /// The user lacks rights.
    PermissionDenied,
    /// Anything else.
    Other,
}

/// Whether etcd did nothing of a request that it answered with an error.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Effect {
    None,
    Unknown,
}

/// Whether the connection is of further use after an error.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Connection {
    Usable,
    Useless,
}

/// What etcd's messages begin with, after `etcdserver: `.
const KNOWN: [(&str, Reason, Effect, Connection); 19] = {
    use Connection::{Usable, Useless};
    use Effect::{None, Unknown};
    [
        ("no leader", Reason::NoLeader, None, Useless),
        ("leader changed", Reason::LeaderChanged, Unknown, Usable),
        ("request timed out", Reason::TimedOut, Unknown, Usable),
        ("server stopped", Reason::Disconnected, Unknown, Useless),
        ("requested lease not found", Reason::LeaseNotFound, None, Usable),
        ("mvcc: required revision has been compacted", Reason::Compacted, None, Usable),
        // A request that was let in before the quota was reached can be carried out, and is answered with this.
        ("mvcc: database space exceeded", Reason::NoSpace, Unknown, Usable),
        ("request is too large", Reason::TooLarge, None, Usable),
        ("too many requests", Reason::TooManyRequests, None, Usable),
        ("invalid auth token", Reason::InvalidToken, None, Useless),
        ("revision of auth store is old", Reason::InvalidToken, None, Useless),
        ("user name is empty", Reason::NotAuthenticated, None, Useless),
        ("authentication failed", Reason::NotAuthenticated, None, Useless),
        ("authentication is not enabled", Reason::AuthenticationDisabled, None, Usable),
        ("permission denied", Reason::PermissionDenied, None, Usable),
        ("corrupt cluster", Reason::Other, Unknown, Useless),
        ("not capable", Reason::Other, None, Useless),
        ("rpc not supported for learner", Reason::Other, None, Useless),
        ("unhealthy cluster", Reason::Other, Unknown, Useless),
    ]
};

/// What is in front of a message where etcd writes an error as text.
const AS_TEXT: &str = "rpc error: code = ";

impl WireError {
    /// Classifies the status of a call or stream.
    pub(super) fn of_status(status: Status) -> Self {
        // A status that the member sent has no source.
        if let Some(cause) = status.source() {
            let text = format!("the connection to etcd failed: {}", causes(cause));
            let error = BackendError::connection(text).with_source(status);
            return Self { reason: Reason::Disconnected, did_nothing: false, error };
        }
        let text = status.message().to_owned();
        Self::of_message(&text, status.code()).with_source(status)
    }

    /// Classifies the reason that etcd gives for the end of a watch.
    pub(super) fn of_reason(text: &str) -> Self {
        let message = text.strip_prefix(AS_TEXT).and_then(|text| text.split_once(" desc = "));
        Self::of_message(message.map_or(text, |(_, message)| message), Code::Unknown)
    }

    /// The start of a watch was compacted.
    pub(super) fn compacted(oldest: i64) -> Self {
        let text = format!("etcd has no revisions before {oldest} any more");
        Self { reason: Reason::Compacted, did_nothing: true, error: BackendError::call(text) }
    }

    /// The member did not answer in time.
    pub(in crate::backend::etcd) fn silent() -> Self {
        let error = BackendError::connection("etcd did not answer in time");
        Self { reason: Reason::TimedOut, did_nothing: false, error }
    }

    /// A stream ended without an error.
    pub(super) fn ended() -> Self {
        let error = BackendError::connection("etcd ended the stream");
        Self { reason: Reason::Disconnected, did_nothing: false, error }
    }

    fn of_message(text: &str, code: Code) -> Self {
        let (reason, effect, connection) = classify(text, code);
        let advice = match reason {
            Reason::PermissionDenied => "; the user needs read and write rights on the prefix",
            Reason::NotAuthenticated => "; check user and password in the URL",
            Reason::NoSpace => "; compact, defragment, and disarm the alarm, or raise the quota",
            Reason::TooLarge => "; see the setting max-request-bytes of etcd",
            _ => "",
        };
        let text =
            format!("etcd refused: {}{advice}", if text.is_empty() { "no reason" } else { text });
        let error = match connection {
            Connection::Usable => BackendError::call(text),
            Connection::Useless => BackendError::connection(text),
        };
        Self { reason, did_nothing: effect == Effect::None, error }
    }

    fn with_source(self, source: impl Error + Send + Sync + 'static) -> Self {
        Self { error: self.error.with_source(source), ..self }
    }

    /// What a caller acts on.
    #[must_use]
    pub const fn reason(&self) -> Reason {
        self.reason
    }

    /// Returns whether etcd certainly did nothing of the call. Otherwise it may have carried the call out, or may still
    /// do so.
    #[must_use]
    pub const fn did_nothing(&self) -> bool {
        self.did_nothing
    }

    /// Returns whether the connection is of no further use.
    #[must_use]
    pub fn is_connection(&self) -> bool {
        self.error.is_connection()
    }
}

fn classify(text: &str, code: Code) -> (Reason, Effect, Connection) {
    if let Some(text) = text.strip_prefix("etcdserver: ") {
        let known = KNOWN.iter().find(|(start, ..)| text.starts_with(start));
        if let Some((_, reason, effect, connection)) = known {
            return (*reason, *effect, *connection);
        }
        let effect = match code {
            Code::InvalidArgument
            | Code::NotFound
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::PermissionDenied
            | Code::Unauthenticated => Effect::None,
            _ => Effect::Unknown,
        };
        return (Reason::Other, effect, Connection::Usable);
    }
    match code {
        // The member's gRPC library does not pass such a request on.
        Code::ResourceExhausted if text.contains("received message larger than max") => {
            (Reason::TooLarge, Effect::None, Connection::Usable)
        }
        Code::Unimplemented => (Reason::Other, Effect::None, Connection::Useless),
        Code::Unavailable => (Reason::Disconnected, Effect::Unknown, Connection::Useless),
        _ => (Reason::Other, Effect::Unknown, Connection::Usable),
    }
}

/// Returns an error of a connection that could not be opened.
pub(super) fn unreachable(
    whom: &str,
    error: impl Error + Send + Sync + 'static,
    is_refused: bool,
) -> BackendError {
    let text = causes(&error);
    let advice = tls_advice(&text).unwrap_or(if is_refused {
        "; check that it listens on this port"
    } else {
        "; check that the URL begins with etcds if and only if the port speaks TLS"
    });
    let text = format!("{whom} could not be reached: {text}{advice}");
    BackendError::connection(text).with_source(error)
}

/// Returns the error of a connection that could not be opened in time.
pub(super) fn not_in_time(whom: &str, error: impl Error + Send + Sync + 'static) -> BackendError {
    let text = format!(
        "{whom} could not be reached in time; check that it is running, and that the URL begins with etcds if and \
         only if the port speaks TLS"
    );
    BackendError::connection(text).with_source(error)
}

/// Returns the texts of an error and of what caused it. hyper's own say little.
fn causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for WireError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl From<WireError> for BackendError {
    fn from(error: WireError) -> Self {
        error.error
    }
}

#[cfg(test)]
mod tests {
    use tonic::{Code, Status};

    use super::{Reason, WireError};

    #[test]
    fn a_status_says_what_became_of_the_call_and_of_the_connection() {
        use Code::*;
        for (code, text, reason, did_nothing, is_connection) in [
            (Unavailable, "etcdserver: no leader", Reason::NoLeader, true, true),
            (Unavailable, "etcdserver: leader changed", Reason::LeaderChanged, false, false),
            (Unavailable, "etcdserver: request timed out", Reason::TimedOut, false, false),
            (
                Unavailable,
                "etcdserver: request timed out, possibly due to previous leader failure",
                Reason::TimedOut,
                false,
                false,
            ),
            (Unavailable, "etcdserver: server stopped", Reason::Disconnected, false, true),
            (Unavailable, "transport is closing", Reason::Disconnected, false, true),
            (NotFound, "etcdserver: requested lease not found", Reason::LeaseNotFound, true, false),
            (
                OutOfRange,
                "etcdserver: mvcc: required revision has been compacted",
                Reason::Compacted,
                true,
                false,
            ),
            (
                ResourceExhausted,
                "etcdserver: mvcc: database space exceeded",
                Reason::NoSpace,
                false,
                false,
            ),
            (InvalidArgument, "etcdserver: request is too large", Reason::TooLarge, true, false),
            (
                ResourceExhausted,
                "grpc: received message larger than max (3000000 vs. 2097152)",
                Reason::TooLarge,
                true,
                false,
            ),
            (
                ResourceExhausted,
                "etcdserver: too many requests",
                Reason::TooManyRequests,
                true,
                false,
            ),
            (Unauthenticated, "etcdserver: invalid auth token", Reason::InvalidToken, true, true),
            (
                InvalidArgument,
                "etcdserver: user name is empty",
                Reason::NotAuthenticated,
                true,
                true,
            ),
            (
                PermissionDenied,
                "etcdserver: permission denied",
                Reason::PermissionDenied,
                true,
                false,
            ),
            (
                InvalidArgument,
                "etcdserver: duplicate key given in txn request",
                Reason::Other,
                true,
                false,
            ),
            (FailedPrecondition, "etcdserver: lease already exists", Reason::Other, true, false),
            (Unknown, "raft proposal dropped", Reason::Other, false, false),
            (DeadlineExceeded, "context deadline exceeded", Reason::Other, false, false),
            // Found by this side, in an answer.
            (OutOfRange, "Error, decoded message length too large", Reason::Other, false, false),
            (Unimplemented, "unknown service etcdserverpb.KV", Reason::Other, true, true),
        ] {
            let error = WireError::of_status(Status::new(code, text));
            assert_eq!(error.reason(), reason, "{text}");
            assert_eq!(error.did_nothing(), did_nothing, "{text}");
            assert_eq!(error.is_connection(), is_connection, "{text}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }

    #[test]
    fn a_status_of_this_side_is_of_the_connection() {
        let cause = std::io::Error::other("it broke");
        let error = WireError::of_status(Status::from_error(Box::new(cause)));
        assert_eq!(error.reason(), Reason::Disconnected);
        assert!(!error.did_nothing() && error.is_connection());
        assert!(error.to_string().contains("it broke"), "{error}");
    }

    #[test]
    fn a_reason_is_read_as_text() {
        for text in [
            "etcdserver: permission denied",
            "rpc error: code = PermissionDenied desc = etcdserver: permission denied",
        ] {
            let error = WireError::of_reason(text);
            assert_eq!(error.reason(), Reason::PermissionDenied, "{text}");
            assert_eq!(
                error.to_string(),
                "etcd refused: etcdserver: permission denied; the user needs read and write rights on the prefix"
            );
        }
        assert_eq!(WireError::of_reason("").reason(), Reason::Other);
    }
}
