//! Errors in the file and on the command line show no secret.

use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::support::gateway::Gateway;
use crate::support::redis::TestRedis;
use crate::support::wire::{Wire, WireServer};

const SECRET: &str = "8675309867530986753098";

/// Runs it until it ends. Returns what it prints.
fn refused(command: &mut Command) -> String {
    let Output { status, stderr, .. } = command.stdin(Stdio::null()).output().unwrap();
    assert!(!status.success());
    String::from_utf8(stderr).unwrap()
}

#[test]
fn errors_of_the_file_show_no_secret() {
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("gateway.toml");
    let rule = "[[rule]]\nkey = \"header:x-api-key\"\nlimit = 1\n";
    let mut cases = vec![
        (format!("upstream = \"ftp://user:{SECRET}@host\"\n{rule}"), 1, "upstream"),
        (format!("upstream = \"http://user:{SECRET}@host/\"\n{rule}"), 1, "upstream"),
        (format!("upstream = {SECRET}\n{rule}"), 1, "upstream"),
        (format!("redis = {SECRET}\n{rule}"), 1, ""),
        (format!("redis = 86753098675309.5\n{rule}"), 1, "redis"),
        (format!("redis = \"redis://:{SECRET}\n{rule}"), 1, ""),
        (format!("{rule}limit-for = {{ {SECRET} = \"x\" }}\n"), 4, "limit-for"),
        (format!("{rule}limit-for = {{ \"{SECRET}\" = \"x\" }}\n"), 4, "limit-for"),
        (format!("{rule}limit-for = {{ \"{SECRET}\" = 1, {SECRET} = 2 }}\n"), 4, ""),
        (format!("{rule}limit-for = {{ \"{SECRET}\" 1 }}\n"), 4, ""),
        (format!("{rule}limit-for = \"{SECRET}\"\n"), 4, "limit-for"),
        (format!("{rule}each-for = {{ \"{SECRET}\" = -1 }}\n"), 4, "each-for"),
        (format!("{rule}weight-for = {{ \"{SECRET}\" = 99 }}\n"), 4, "weight-for"),
        (format!("{rule}class-for = {{ \"{SECRET}\" = 99 }}\n"), 4, "class-for"),
        (format!("{rule}[rule.limit-for]\n\"{SECRET}\" = \"x\"\n"), 4, "limit-for"),
        // A key in place of a field.
        (format!("{rule}\"{SECRET}\" = 3\n"), 4, "unknown field"),
        (format!("\"{SECRET}\" = 3\n{rule}"), 1, "unknown field"),
    ];
    if cfg!(feature = "admin") {
        cases.extend([
            (format!("admin-token = {}\n{rule}", &SECRET[..17]), 1, "admin-token"),
            (format!("admin-token = {SECRET}\n{rule}"), 1, ""),
            (format!("admin-token = 867530986753.5\n{rule}"), 1, "admin-token"),
            (format!("admin-token = [\"{SECRET}\"]\n{rule}"), 1, "admin-token"),
            (format!("admin-token = x{SECRET}\n{rule}"), 1, ""),
            (format!("admin-token = \"{SECRET}\n{rule}"), 1, ""),
        ]);
    }
    let mut wrong = Vec::new();
    for (contents, line, field) in cases {
        std::fs::write(&file, &contents).unwrap();
        let said = refused(Gateway::command().arg("--config").arg(&file));
        let place = format!("gateway.toml:{line}: {field}");
        if said.contains("86753") || !said.contains(&place) {
            wrong.push(format!("{contents}: {said}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn errors_of_the_command_line_show_no_secret() {
    let url = format!("http://user:{SECRET}@host/");
    let (bad, twice) = (format!("{SECRET}=x"), format!("{SECRET}=1"));
    let keyed = ["--limit", "1", "--key", "path"];
    let cases: [(&[&str], &str); 6] = [
        (&["--upstream", &url], "--upstream"),
        (&["--limit-for", &bad], "--limit-for"),
        (&["--fair-by", "path", "--each-for", &bad], "--each-for"),
        (&["--fair-by", "path", "--weight-for", &bad], "--weight-for"),
        (&["--fair-by", "path", "--class-for", &bad], "--class-for"),
        (&["--limit-for", &twice, "--limit-for", &twice], "--limit-for"),
    ];
    for (args, flag) in cases {
        let said = refused(Gateway::command().args(keyed).args(args));
        assert!(!said.contains(SECRET) && said.contains(flag), "{args:?}: {said}");
        assert!(said.contains("expected "), "{args:?}: {said}");
    }
}

#[test]
fn arguments_that_are_not_expected_are_not_shown() {
    let (url, flag) = (format!("redis://u:{SECRET}@h/"), format!("--{SECRET}"));
    let (short, value) = (format!("-{SECRET}"), format!("--shadow={SECRET}"));
    let unknown = format!("--redsi={url}");
    let mut cases = vec![
        (vec!["--limit", "1", &url], "'number 3'"),
        (vec![&*flag, "--limit", "1"], "'number 1'"),
        (vec!["--limit", "1", "--redis", &flag], "'number 4'"),
        (vec!["--limit", "1", &short], "'number 3'"),
        (vec!["--limit", "1", &value], "--shadow"),
        (vec!["--limit", "1", &unknown], "--redis"),
    ];
    if cfg!(feature = "admin") {
        cases.push((vec!["--limit", "1", "--admin-token", &flag], "'number 4'"));
    }
    for (args, named) in cases {
        let said = refused(Gateway::command().args(&args));
        assert!(!said.contains("86753"), "{args:?}: {said}");
        assert!(said.contains(named), "{args:?}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_url_of_redis_can_stand_in_the_environment_and_is_not_shown() {
    let (redis, upstream) = (TestRedis::start(), WireServer::start().await);
    let start = |args: &[&str]| {
        let mut command = Gateway::command();
        command.args(["--listen", "127.0.0.1:0", "--limit", "1", "--upstream", &upstream.url()]);
        command.args(args).env("REDIS_URL", redis.url());
        Gateway::running(command.spawn().unwrap())
    };
    let gateway = start(&[]);
    let mut client = Wire::connect(gateway.url()).await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut server = upstream.accept().await;
    server.head().await;
    assert_eq!(redis.keys(), 1, "the permit is counted there");

    // The command line takes precedence.
    let other = TestRedis::start();
    let gateway = start(&["--redis", &other.url()]);
    let mut client = Wire::connect(gateway.url()).await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut other_server = upstream.accept().await;
    other_server.head().await;
    assert_eq!(other.keys(), 1, "the permit is counted there");

    let mut help = Gateway::command();
    let Output { stdout, .. } = help.arg("--help").env("REDIS_URL", SECRET).output().unwrap();
    let help = String::from_utf8(stdout).unwrap();
    assert!(help.contains("REDIS_URL") && !help.contains(SECRET), "{help}");
    let mut command = Gateway::command();
    let said = refused(
        command.args(["--limit", "1", "--upstream", "http://127.0.0.1:1"]).env("REDIS_URL", SECRET),
    );
    assert!(!said.contains("86753") && said.contains("redis"), "{said}");
}

#[test]
fn a_salt_in_place_of_its_file_is_not_shown() {
    let args = ["--limit", "1", "--upstream", "http://127.0.0.1:1", "--tenant-salt-file", SECRET];
    let said = refused(Gateway::command().args(args));
    assert!(!said.contains("86753") && said.contains("tenant-salt-file"), "{said}");
}
