//! A quota of requests in a time, through several gateways.

use std::time::{Duration, Instant};

use http::StatusCode;
use tokio::task::JoinSet;

use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::redis::TestRedis;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gateways_start_no_more_than_the_rate_and_one_that_is_killed_gives_nothing_back() {
    let (redis, upstream) = (TestRedis::start(), Upstream::start().await);
    let url = redis.url();
    let start = |wait| {
        let args = ["--limit", "50", "--rate", "6/3s", "--wait", wait, "--redis", &url];
        Gateway::start(&upstream.url(), &args)
    };
    let (mut doomed, patient, hasty) = (start("20s"), start("20s"), start("0s"));
    let client = Client::new();
    let began = Instant::now();
    for _ in 0..6 {
        assert_eq!(client.get(doomed.url()).await, StatusCode::OK);
    }
    doomed.kill();
    assert_eq!(client.get(hasty.url()).await, StatusCode::TOO_MANY_REQUESTS);
    let response = client.open(hasty.url()).await;
    assert_eq!(response.headers()["ratelimit-policy"].to_str().unwrap().split(", ").count(), 2);
    let mut waiting = JoinSet::new();
    for _ in 0..6 {
        let (client, url) = (Client::new(), patient.url().to_owned());
        waiting.spawn(async move { client.get(&url).await });
    }
    while let Some(status) = waiting.join_next().await {
        assert_eq!(status.unwrap(), StatusCode::OK);
        assert!(began.elapsed() >= Duration::from_secs(3), "{:?}", began.elapsed());
    }
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
    assert_eq!(upstream.seen().total, 12);
}

#[test]
fn a_rate_that_cannot_be_meant_is_an_error() {
    for (flags, said) in [
        (&["--rate", "600"][..], "expected a number of requests and a time, such as 600/60s"),
        (&["--rate", "0/1s"], "rate is 0, which rejects every request"),
        (&["--rate", "4001/60s"], "expected at most 4000 in a window; or a smooth one"),
        (&["--rate", "5/25h"], "window of the rate is 90000s"),
        (&["--smooth"], "there is no rate to spread; set rate, too"),
        (&["--rate", "5/1s", "--reuse"], "reuse is set beside a rate"),
    ] {
        let mut command = Gateway::command();
        let output = command.args(["--upstream", "http://127.0.0.1:9", "--limit", "1"]);
        let output = output.args(flags).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{flags:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains(said), "{flags:?}: {text}");
    }
}
