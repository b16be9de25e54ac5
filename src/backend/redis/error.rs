//! Classifies errors of the redis crate and of the server: those of one call, and those of its connection.

use redis::{ErrorKind, RedisError};

use crate::backend::socket::tls_advice;
use crate::error::BackendError;

/// Error codes that affect every call: the server is unusable for now.
const OF_NO_USE: [&str; 8] =
    ["LOADING", "BUSY", "READONLY", "MASTERDOWN", "NOAUTH", "CLUSTERDOWN", "MISCONF", "NOREPLICAS"];

/// Classifies an error of the server. `Ok` means that it affects this call alone.
///
/// # Errors
///
/// If the server is unusable for now.
pub(super) fn failure(error: RedisError) -> Result<BackendError, BackendError> {
    let text = format!("Redis refused: {error}{}", advice(&error));
    let in_script = || error.detail().and_then(code_in_script);
    let code = error.code().filter(|code| *code != "ERR").or_else(in_script);
    if code.is_some_and(|code| OF_NO_USE.contains(&code)) {
        return Err(BackendError::connection(text).with_source(error));
    }
    Ok(BackendError::call(text).with_source(error))
}

/// Returns whether an error of a script's call proves that nothing was written.
///
/// In each script, the first command that touches the key needs a sorted set, so a key of another type ends it there.
/// Redis refuses a write because of its memory limit only if the script has written nothing before. Rights are checked
/// for the call itself, and again for each command in it: by then, something may have been written.
pub(super) fn did_nothing(error: &RedisError) -> bool {
    let text = error.detail().unwrap_or_default();
    match error.code() {
        Some("WRONGTYPE" | "OOM" | "CLUSTERDOWN") => true,
        Some("NOPERM") => !text.contains("script"),
        _ => matches!(code_in_script(text), Some("WRONGTYPE" | "OOM")),
    }
}

/// Returns the code of an error of a command in a script, from the text after `ERR`. Redis before 7.0 puts a prefix in
/// front of it: `Error running script (call to f_<sha>): @user_script:<line>:
/// @user_script: <line>: -<code> ...`; the second position and the dash are not always there.
///
/// Parsed strictly from the start, so that no text of a client is taken for a code: names of keys and users occur only
/// after it.
fn code_in_script(text: &str) -> Option<&str> {
    const HASH: usize = 40;
    let rest = text.strip_prefix("Error running script (call to f_")?;
    let (hash, rest) = rest.split_at_checked(HASH)?;
    if !hash.bytes().all(|c| c.is_ascii_hexdigit()) {
        return None;
    }
    let rest = line(rest.strip_prefix("): @user_script:")?)?;
    let rest = rest.strip_prefix("@user_script: ").map_or(Some(rest), line)?;
    let code = rest.strip_prefix('-').unwrap_or(rest).split(' ').next()?;
    (!code.is_empty() && code.bytes().all(|c| c.is_ascii_uppercase())).then_some(code)
}

/// Returns the text after a line number.
fn line(text: &str) -> Option<&str> {
    let (number, rest) = text.split_once(": ")?;
    number.bytes().all(|c| c.is_ascii_digit()).then_some(rest)
}

/// Returns what to do about an error whose own text does not say so.
pub(super) fn advice(error: &RedisError) -> &'static str {
    let text = error.to_string();
    if text.contains("nknown Redis command")
        || text.contains("nknown command")
        || error.kind() == ErrorKind::RESP3NotSupported
    {
        "; Redis 6.2 or later is needed"
    } else if error.code() == Some("NOPERM")
        || text.contains("can't run this command")
        || text.contains("has no permissions to run")
        || text.contains("can't publish")
    {
        "; see RedisBackend for the rights that its user needs"
    } else if error.code() == Some("MOVED") {
        "; this is a node of a cluster; expected a URL that begins with redis-cluster://"
    } else if let Some(advice) = tls_advice(&text) {
        advice
    } else if error.is_connection_refusal() {
        "; check that it listens on this port"
    } else if error.is_connection_dropped() {
        "; check whether it has reached maxclients, and whether this port speaks TLS"
    } else if error.is_timeout() {
        "; check that it is running, and that the URL begins with rediss if and only if the port speaks TLS"
    } else {
        ""
    }
}

/// Returns the error of a connection that broke. Its unanswered calls may or may not have been executed.
pub(super) fn broken(error: RedisError) -> BackendError {
    let text = format!("the connection to Redis failed: {error}{}", advice(&error));
    BackendError::connection(text).with_source(error)
}

#[cfg(test)]
mod tests {
    use redis::{Value, parse_redis_value};

    use super::{code_in_script, failure};

    const BEFORE: &str =
        "Error running script (call to f_b093e1cc552bdfd5a38f09390e8e0625e51a41a6): ";

    /// Whether an error affects the connection, and not its call alone.
    fn is_of_no_use(wire: &str) -> bool {
        let value = parse_redis_value(format!("-{wire}\r\n").as_bytes()).unwrap();
        let Value::ServerError(error) = value else { panic!("{value:?}") };
        match failure(error.into()) {
            Err(error) => error.is_connection(),
            Ok(_) => false,
        }
    }

    #[test]
    fn an_error_of_the_server_is_known_in_a_script_too() {
        // As Redis 6.2 writes it, and as 7.0 does.
        for (text, of_no_use) in [
            ("READONLY You can't write against a read only replica.", true),
            ("MISCONF Redis is configured to save RDB snapshots, but is unable to persist.", true),
            ("NOREPLICAS Not enough good replicas to write.", true),
            ("OOM command not allowed when used memory > 'maxmemory'.", false),
            ("WRONGTYPE Operation against a key holding the wrong kind of value", false),
        ] {
            assert_eq!(is_of_no_use(text), of_no_use, "{text}");
            for place in ["@user_script:22: @user_script: 22: -", "@user_script:22: "] {
                let wire = format!("ERR {BEFORE}{place}{text}");
                assert_eq!(is_of_no_use(&wire), of_no_use, "{wire}");
            }
        }
    }

    #[test]
    fn an_error_says_whether_anything_was_written() {
        let did_nothing = |wire: &str| {
            let value = parse_redis_value(format!("-{wire}\r\n").as_bytes()).unwrap();
            let Value::ServerError(error) = value else { panic!("{value:?}") };
            super::did_nothing(&error.into())
        };
        const IN_SCRIPT: &str =
            "script: 94ac72d956c4040ccbe2c66f035938f186ba8a08, on @user_script:1.";
        for (wire, nothing) in [
            (
                format!(
                    "WRONGTYPE Operation against a key holding the wrong kind of value {IN_SCRIPT}"
                ),
                true,
            ),
            (format!("OOM command not allowed when used memory > 'maxmemory'. {IN_SCRIPT}"), true),
            (
                format!("ERR {BEFORE}@user_script:22: @user_script: 22: -OOM command not allowed"),
                true,
            ),
            (format!("ERR {BEFORE}@user_script:22: WRONGTYPE Operation against a key"), true),
            (
                "NOPERM this user has no permissions to access one of the keys used as arguments"
                    .into(),
                true,
            ),
            ("NOPERM this user has no permissions to run the 'evalsha' command".into(), true),
            (
                format!("NOPERM User u has no permissions to run the 'zadd' command {IN_SCRIPT}"),
                false,
            ),
            (
                format!(
                    "ERR The user executing the script can't run this command or subcommand {IN_SCRIPT}"
                ),
                false,
            ),
            (format!("ERR {BEFORE}@user_script:2: @user_script: 2: -NOPERM x"), false),
            ("ERR Protocol error".into(), false),
        ] {
            assert_eq!(did_nothing(&wire), nothing, "{wire}");
        }
    }

    #[test]
    fn a_code_is_read_only_where_the_server_writes_it() {
        let code = |text: &str| code_in_script(&format!("{BEFORE}{text}")).map(str::to_owned);
        assert_eq!(code("@user_script:2: WRONGTYPE x").as_deref(), Some("WRONGTYPE"));
        assert_eq!(code("@user_script:2: @user_script: 2: -OOM x").as_deref(), Some("OOM"));
        for text in [
            "@user_script:2: @user_script: 2: Unknown key -READONLY x",
            "@user_script:2: the key x: @user_script: 2: -READONLY x",
            "@user_script:2: @user_script: 2: @user_script: 2: -READONLY x",
            "@user_script:x: @user_script: 2: -READONLY x",
            "@user_script:2: ",
            "@user_script:2",
            "-READONLY x",
        ] {
            assert_eq!(code(text), None, "{text}");
        }
        for text in [
            "unknown key Error running script (call to f_): @user_script:2: -READONLY x",
            "Error running script (call to f_READONLY): @user_script:2: -READONLY x",
            "READONLY x",
            "",
        ] {
            assert_eq!(code_in_script(text), None, "{text}");
        }
        for wire in [
            "ERR unknown key '{-READONLY x}'",
            "WRONGTYPE @user_script: 2: -READONLY x",
            "NOPERM this user has no permissions to access the key 'MISCONF'",
        ] {
            assert!(!is_of_no_use(wire), "{wire}");
        }
    }
}
