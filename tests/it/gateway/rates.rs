//! A quota of requests in a time, through several gateways.

use std::time::{Duration, Instant};

use http::StatusCode;
use tokio::task::{JoinSet, block_in_place};

use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::redis::TestRedis;
use crate::support::until;

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

/// Keeps forty requests waiting before two gateways with a rate of 20 in two seconds while Redis is killed and started
/// again. Returns the most that came to the upstream in any window.
async fn through_a_restart(redis: &[&str], args: &[&str], meanwhile: usize) -> usize {
    const RATE: usize = 20;
    let mut redis = TestRedis::start_with(redis);
    let (upstream, url) = (Upstream::start().await, redis.url());
    let rate = ["--limit", "100", "--rate", "20/2s", "--wait", "60s", "--redis", &url];
    let args = [&rate, args].concat();
    let gateways: Vec<_> = (0..2).map(|_| Gateway::start(&upstream.url(), &args)).collect();
    let mut requests = JoinSet::new();
    let client = Client::new();
    for gateway in gateways.iter().cycle().take(40) {
        let (client, url) = (client.clone(), gateway.url().to_owned());
        // While Redis is away, those without a share are told so.
        requests.spawn(async move { while client.try_get(&url).await.is_some() {} });
    }
    let reach = |total: usize| {
        block_in_place(|| until("they come", || upstream.seen().total >= total));
        upstream.seen().total
    };
    let before = reach(2 * RATE);
    redis.kill();
    let gone = reach(before + meanwhile);
    redis.restart();
    reach(gone + 3 * RATE);
    requests.shutdown().await;
    let starts = upstream.starts();
    // A request comes somewhat later than it is granted, and not always as much.
    let window = Duration::from_millis(1500);
    let most = starts
        .iter()
        .enumerate()
        .map(|(at, from)| starts[at..].partition_point(|start| *start - *from < window));
    most.max().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_that_keeps_the_data_keeps_the_rate() {
    let keeps = ["--appendonly", "yes", "--appendfsync", "always"];
    let most = through_a_restart(&keeps, &[], 0).await;
    assert!(most <= 20, "{most} in a window");
}

/// Redis is away for as long as it takes until both have started what their parts allow them. What it granted them before
/// counts against these, and the window is empty afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_within_a_window_that_loses_the_data_allows_about_twice_the_rate() {
    let share = ["--on-unavailable", "local", "--local-limit", "50"];
    let most = through_a_restart(&[], &share, 20).await;
    // One of the two may have been granted more than half before.
    assert!(most <= 50, "{most} in a window");
}

/// While it is away each has half of the rate, and the window is empty afterwards.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_without_data_allows_at_most_twice_the_rate() {
    let share = ["--on-unavailable", "local", "--local-limit", "50"];
    // Longer than a window.
    let most = through_a_restart(&[], &share, 40).await;
    assert!(most <= 40, "{most} in a window");
}

#[test]
fn a_rate_that_cannot_be_meant_is_an_error() {
    for (flags, said) in [
        (&["--rate", "600"][..], "expected a number of requests and a time, such as 600/60s"),
        (&["--rate", "-1/60s"], "expected a number of requests and a time, such as 600/60s"),
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
