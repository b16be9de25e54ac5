//! A budget of tokens, through several gateways.

use tempfile::TempDir;

use crate::support::gateway::Gateway;
use crate::support::redis::TestRedis;
use crate::support::wire::{Wire, WireServer};

/// Sends a request with this estimate. Returns the status, or that of the response that the upstream sends.
async fn ask(
    gateway: &Gateway,
    upstream: &WireServer,
    tokens: &str,
    answer: &str,
) -> (u16, String) {
    let mut client = Wire::connect(gateway.url()).await;
    let field = if tokens.is_empty() { String::new() } else { format!("x-tokens: {tokens}\r\n") };
    client.send(&format!("GET / HTTP/1.1\r\nhost: a\r\n{field}\r\n")).await;
    tokio::select! {
        refused = client.status() => refused,
        mut server = upstream.accept() => {
            server.head().await;
            let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n";
            server.send(&format!("{head}{answer}\r\n")).await;
            client.status().await
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateways_share_a_budget_and_settle_what_responses_say() {
    let (redis, upstream) = (TestRedis::start(), WireServer::start().await);
    let url = redis.url();
    let start = || {
        let args = [
            &["--limit", "50", "--wait", "0s", "--redis", &url][..],
            &["--budget", "tokens=1000/1000s", "--estimate", "header:x-tokens"],
            &["--settle", "header:x-used", "--left", "header:x-left"],
        ];
        Gateway::start(&upstream.url(), &args.concat())
    };
    let (mut a, b) = (start(), start());
    let asks = async |gateway: &Gateway, tokens: &str, answer: &str| {
        ask(gateway, &upstream, tokens, answer).await
    };
    assert_eq!(asks(&a, "900", "x-used: 100\r\n").await.0, 200);
    assert_eq!(asks(&b, "800", "x-used: 100\r\n").await.0, 200);
    // Of eight hundred, the provider knows of four.
    assert_eq!(asks(&b, "100", "x-used: 0\r\nx-left: 400\r\n").await.0, 200);
    assert_eq!(asks(&b, "500", "").await.0, 429);
    // What is not settled stands, whatever becomes of the gateway.
    assert_eq!(asks(&a, "300", "").await.0, 200);
    a.kill();
    let (status, head) = asks(&b, "200", "").await;
    assert_eq!(status, 429);
    assert!(head.contains("ratelimit: \"gateway/tokens\";r=0;t="), "{head}");
    assert_eq!(asks(&b, "1001", "").await.0, 400);
    for bad in ["", "many", "-1"] {
        assert_eq!(asks(&b, bad, "").await.0, 400, "{bad}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_file_has_budgets_too() {
    let upstream = WireServer::start().await;
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("gateway.toml");
    let text = format!(
        "listen = \"127.0.0.1:0\"\nupstream = \"{}\"\n[[rule]]\nlimit = 50\nwait = \"0s\"\n\
         budget = [\"tokens=100/1000s,burst=60\", \"requests=2/1000s\"]\n\
         estimate = [\"tokens=header:x-tokens,10\", \"requests=1\"]\nsettle = [\"tokens=header:x-used\"]\n",
        upstream.url()
    );
    std::fs::write(&path, text).unwrap();
    let mut command = Gateway::command();
    let gateway = Gateway::running(command.arg("--config").arg(&path).spawn().unwrap());
    assert_eq!(ask(&gateway, &upstream, "61", "").await.0, 400);
    assert_eq!(ask(&gateway, &upstream, "60", "x-used: 5\r\n").await.0, 200);
    assert_eq!(ask(&gateway, &upstream, "", "").await.0, 200);
    let (status, head) = ask(&gateway, &upstream, "", "").await;
    assert_eq!(status, 429);
    assert!(head.contains("\"gateway/requests\";r=0"), "{head}");
}

#[test]
fn a_budget_that_cannot_be_meant_is_an_error() {
    let budget = ["--budget", "tokens=80000/60s"];
    for (flags, said) in [
        (&["--budget", "tokens=80000"][..], "expected NAME=N/TIME, such as tokens=80000/60s"),
        (&["--budget", "tokens=0/60s"], "the tokens budget is 0; expected 1 to"),
        (&budget, "what a request uses of the tokens budget is not said; set estimate, too"),
        (&["--estimate", "5"], "there is no budget; set budget, too"),
        (&["--settle", "x-used"], "expected header:NAME"),
        (&["--estimate", "-5"], "expected header:NAME, header:NAME,N or N"),
    ] {
        let output = Gateway::command()
            .args(["--upstream", "http://127.0.0.1:9", "--limit", "1"])
            .args(flags)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(said), "{flags:?}: {text}");
    }
    let output = Gateway::command()
        .args(["--upstream", "http://127.0.0.1:9", "--limit", "1", "--reuse", "--estimate", "5"])
        .args(budget)
        .output()
        .unwrap();
    assert!(String::from_utf8(output.stderr).unwrap().contains("expected no reuse beside one"));
}
