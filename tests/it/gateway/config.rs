//! Everything that the command line can say once can be in the file.

use tempfile::TempDir;

use super::seen;
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway};
use crate::support::redis::free_port;
use crate::support::wire::WireServer;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_says_all_that_the_flags_say() {
    let (dir, upstream, port) = (TempDir::new().unwrap(), WireServer::start().await, free_port());
    let (file, log) = (dir.path().join("gateway.toml"), dir.path().join("access.log"));
    let contents = format!(
        "listen = \"127.0.0.1:0\"\nupstream = \"{}\"\nhost = \"upstream\"\n\
         trusted-proxies = \"127.0.0.1, 10.0.0.0/8\"\nheader-timeout = \"400ms\"\n\
         upstream-timeout = \"1m\"\nidle-timeout = \"none\"\ndrain = \"1s\"\nmax-connections = 9\nmax-requests = 9\nstatus = {port}\n\
         access-log = {log:?}\naccess-log-keys = true\n[[rule]]\nlimit = 1\nkey = \"peer-ip\"\n",
        upstream.url()
    );
    std::fs::write(&file, contents).unwrap();
    let mut command = Gateway::command();
    let gateway = Gateway::running(command.arg("--config").arg(&file).spawn().unwrap());
    upstream.echo_heads();
    let request = "GET / HTTP/1.1\r\nhost: a\r\nx-forwarded-for: 192.0.2.7\r\n\r\n";
    let (status, head) = seen(&gateway, request).await;
    assert_eq!(status, 200);
    assert!(head.contains("\r\nx-forwarded-host: a\r\n"), "{head}");
    assert_eq!(Client::new().get(&format!("http://127.0.0.1:{port}/-/ready")).await, 200);
    let logged = || std::fs::read_to_string(&log).unwrap();
    eventually("it is logged", async || logged().contains("\"key\":\"192.0.2.7\"")).await;

    // A reload that would need a restart changes nothing.
    let other = std::fs::read_to_string(&file).unwrap().replace("\"1s\"", "\"2s\"");
    std::fs::write(&file, other).unwrap();
    gateway.signal("HUP");
    assert_eq!(seen(&gateway, request).await.0, 200);
    gateway.signal("TERM");
    assert_eq!(gateway.exit().await, Some(0));
}

#[test]
fn a_log_filter_that_cannot_be_used_is_refused() {
    let mut command = Gateway::command();
    command.args(["--limit", "1", "--upstream", "http://127.0.0.1:1"]);
    let output = command.env("RUST_LOG", "semaphore_gateway=verbose").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("RUST_LOG is \"semaphore_gateway=verbose\""), "{said}");
}
