//! The `INFO` of a server when a connection opens.

use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::{Pipeline, Value};

use super::error;
use crate::backend::ServerInfo;
use crate::error::BackendError;

/// Reads the sections on server, replication and memory. Without the right to `INFO`, everything is unknown.
pub(super) async fn ask(
    connection: &mut MultiplexedConnection,
) -> Result<ServerInfo, BackendError> {
    let mut pipeline = Pipeline::new();
    for section in ["server", "replication", "memory"] {
        pipeline.cmd("INFO").arg(section);
    }
    let count = pipeline.len();
    let values =
        connection.send_packed_commands(&pipeline, 0, count).await.map_err(error::broken)?;
    Ok(read(&values.iter().filter_map(text).collect::<Vec<_>>().join("\n")))
}

fn read(info: &str) -> ServerInfo {
    let field = |name: &str| {
        info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    // A restart changes the first part, a promotion the second. A key that marked the data would be one more key, in
    // another slot, and present even when nothing is in use.
    let data =
        field("run_id").zip(field("master_replid")).map(|(run, data)| format!("{run}/{data}"));
    // The age of a promoted replica's data is unknown.
    let promoted = field("master_replid2").is_none_or(|id| id.bytes().any(|c| c != b'0'));
    let age = field("uptime_in_seconds").and_then(|seconds| seconds.parse().ok());
    let age = age.filter(|_| !promoted);
    let evicts = field("maxmemory_policy").filter(|policy| *policy != "noeviction");
    let bounded = field("maxmemory").is_some_and(|bytes| bytes != "0");
    let warning = evicts.filter(|_| bounded).map(|policy| {
        format!(
            "Redis may evict semaphores, and with them forget who holds permits: its \
             maxmemory-policy is {policy}, and should be noeviction"
        )
    });
    ServerInfo { poll_only: true, data, age: age.map(Duration::from_secs), warning }
}

fn text(value: &Value) -> Option<&str> {
    match value {
        Value::BulkString(text) => std::str::from_utf8(text).ok(),
        Value::VerbatimString { text, .. } | Value::SimpleString(text) => Some(text),
        _ => None,
    }
}
