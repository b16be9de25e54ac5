//! Gateways that are told by a file what to do, and told anew while they run.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tempfile::TempDir;

use crate::support::eventually;
use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::redis::TestRedis;

/// A gateway with a file, and what it logs.
struct Configured {
    redis: TestRedis,
    upstream: Upstream,
    gateway: Gateway,
    client: Client,
    log: Arc<Mutex<Vec<String>>>,
    dir: TempDir,
}

impl Configured {
    /// Rules, and what else stands in the file.
    async fn start(rules: &str) -> Self {
        let (redis, upstream) = (TestRedis::start(), Upstream::start().await);
        let dir = TempDir::new().unwrap();
        let path = dir.path().join("gateway.toml");
        std::fs::write(&path, contents(&redis, &upstream, rules)).unwrap();
        let mut command = Gateway::command();
        command.arg("--config").arg(&path).env("NO_COLOR", "1").stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let log = Arc::<Mutex<Vec<String>>>::default();
        let (stderr, lines) = (process.stderr.take().unwrap(), Arc::clone(&log));
        // Ends with the process.
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                lines.lock().unwrap().push(line);
            }
        });
        let gateway = Gateway::running(process);
        Self { redis, upstream, gateway, client: Client::new(), log, dir }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.gateway.url())
    }

    async fn status(&self, path: &str, tenant: &str) -> u16 {
        let request = http::Request::get(self.url(path)).header("x-tenant", tenant);
        self.client.send(request).await.0.as_u16()
    }

    /// Other contents, and the signal; then what it says of them.
    async fn reload(&self, contents: &str) -> String {
        std::fs::write(self.dir.path().join("gateway.toml"), contents).unwrap();
        let before = self.log.lock().unwrap().len();
        self.gateway.signal("HUP");
        let said = || {
            let log = self.log.lock().unwrap();
            log[before..].iter().find(|line| line.contains("configuration")).cloned()
        };
        eventually("it says what became of it", async || said().is_some()).await;
        said().unwrap()
    }

    async fn reload_rules(&self, rules: &str) -> String {
        self.reload(&contents(&self.redis, &self.upstream, rules)).await
    }

    async fn waiting(&self, name: tower_semaphore::Name, count: u64) {
        let watch = self.redis.semaphore();
        eventually("so many wait", async || {
            watch.inspect(name.clone()).await.is_ok_and(|seen| seen.waiting == count)
        })
        .await;
    }
}

/// Six lines, and then the rules.
fn contents(redis: &TestRedis, upstream: &Upstream, rules: &str) -> String {
    format!(
        "# Line 1.\nlisten = \"127.0.0.1:0\"\nupstream = \"{}\"\nredis = \"{}\"\n\
         after-loss = \"continue\"\n\n{rules}",
        upstream.url(),
        redis.url()
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rules_are_for_their_paths_and_outermost_first() {
    let stage = Configured::start(
        r#"
[[rule]]
name = "tenant"
key = "header:x-tenant"
limit = 1
limit-for = { acme = 2, staff = "unlimited" }
wait = "0s"

[[rule]]
name = "chat"
prefix = "/v1/chat"
limit = 3
wait = "0ms"

[[rule]]
name = "tried"
limit = 0
shadow = true
"#,
    )
    .await;
    let open = async |path: &str, tenant: &str| {
        let request = http::Request::get(stage.url(path)).header("x-tenant", tenant);
        let (client, request) = (stage.client.clone(), request);
        tokio::spawn(async move { client.send(request).await.0.as_u16() })
    };
    let held = [
        open("/v1/chat?stream_ms=3000", "acme").await,
        open("/v1/chat/a?stream_ms=3000", "acme").await,
        open("/v1/chat?stream_ms=3000", "staff").await,
    ];
    eventually("all are in flight", async || stage.upstream.seen().in_flight == 3).await;
    // Its own limit, before the one of the path.
    let request = http::Request::get(stage.url("/v1/chat")).header("x-tenant", "acme");
    let (status, body) = stage.client.send(request).await;
    assert_eq!(status, 429);
    assert!(String::from_utf8_lossy(&body.unwrap()).contains("[\"tenant\"]"));
    let request = http::Request::get(stage.url("/v1/chat/b")).header("x-tenant", "globex");
    let (status, body) = stage.client.send(request).await;
    assert_eq!(status, 429);
    assert!(String::from_utf8_lossy(&body.unwrap()).contains("[\"chat\"]"));
    // Neither of these is below the prefix; and a limit of 0 in shadow refuses nobody.
    assert_eq!(stage.status("/v1/chatter", "globex").await, 200);
    assert_eq!(stage.status("/", "globex").await, 200);
    assert_eq!(stage.status("/", "").await, 200);
    for request in held {
        assert_eq!(request.await.unwrap(), 200);
    }
    eventually("nothing is left", async || stage.redis.keys() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_that_raises_a_limit_lets_waiters_in_and_cuts_nobody() {
    let rules = |limit: &str| {
        format!(
            "[[rule]]\nname = \"t\"\nkey = \"header:x-tenant\"\nlimit = {limit}\nwait = \"60s\""
        )
    };
    let stage = Configured::start(&rules("1")).await;
    let request = http::Request::get(stage.url("/?stream_ms=6000")).header("x-tenant", "acme");
    let (client, request) = (stage.client.clone(), request);
    let stream = tokio::spawn(async move { client.send(request).await });
    eventually("it flows", async || stage.upstream.seen().in_flight == 1).await;
    let waiters: Vec<_> = (0..3)
        .map(|_| {
            let request = http::Request::get(stage.url("/?ms=1")).header("x-tenant", "acme");
            let client = stage.client.clone();
            tokio::spawn(async move { client.send(request).await.0.as_u16() })
        })
        .collect();
    let name = tower_semaphore::Name::new("t").part("acme");
    stage.waiting(name, 3).await;

    let began = Instant::now();
    let said = stage.reload_rules(&rules("2")).await;
    assert!(said.contains("is in force"), "{said}");
    // Nobody comes after it: those who wait get in by themselves.
    for status in join_all(waiters).await {
        assert_eq!(status.unwrap(), 200);
    }
    let took = began.elapsed();
    println!("the waiters got in {took:?} after the signal");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(!stream.is_finished(), "they had to wait for its end");
    assert_eq!(stage.upstream.seen().peak, 2);
    // The stream of before the reload flows to its end.
    let (status, body) = stream.await.unwrap();
    assert_eq!((status.as_u16(), body.unwrap().len()), (200, 300 * "chunk\n".len()));

    // No limit at all is higher still; and a lower one is in force at once.
    stage.reload_rules(&rules("\"unlimited\"")).await;
    stage.reload_rules(&rules("0")).await;
    assert_eq!(stage.status("/", "acme").await, 429);
    eventually("nothing is left", async || stage.redis.keys() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_file_is_refused_with_its_line_and_the_old_one_stays() {
    let good = "[[rule]]\nname = \"all\"\nlimit = 1\nwait = \"0s\"\n";
    let stage = Configured::start(good).await;
    let body = stage.client.open(&stage.url("/?stream_ms=20000")).await.into_body();
    assert_eq!(stage.status("/", "x").await, 429);

    let bad = [
        ("[[rule]]\nname = \"all\"\nlimit = 5\nwait = \"5\"\n", "gateway.toml:10: \"5\" cannot"),
        ("[[rule]]\nname = \"all\"\n\nlimit = -1\n", "gateway.toml:10: \"-1\" cannot be used; all"),
        ("[[rule]\n", "gateway.toml:7: "),
        ("", "no [[rule]]; allowed: one or more"),
    ];
    for (rules, words) in bad {
        let said = stage.reload_rules(rules).await;
        assert!(said.contains(words) && said.contains("of before stays"), "{said}");
        assert_eq!(stage.status("/", "x").await, 429);
    }
    // What cannot change while it runs.
    let elsewhere = contents(&stage.redis, &stage.upstream, "[[rule]]\nlimit = 9\n")
        .replace("continue", "quarantine");
    let said = stage.reload(&elsewhere).await;
    assert!(said.contains("gateway.toml:5: after-loss: changed; allowed: with a"), "{said}");
    std::fs::remove_file(stage.dir.path().join("gateway.toml")).unwrap();
    stage.gateway.signal("HUP");
    eventually("it says so", async || {
        stage.log.lock().unwrap().iter().any(|line| line.contains("No such file"))
    })
    .await;
    assert_eq!(stage.status("/", "x").await, 429);

    let said = stage.reload_rules(&good.replace("limit = 1", "limit = 2")).await;
    assert!(said.contains("is in force"), "{said}");
    assert_eq!(stage.status("/", "x").await, 200);
    drop(body);
    eventually("nothing is left", async || stage.redis.keys() == 0).await;
}

/// How it ends with this file, and what it says.
fn refused(contents: &str, args: &[&str]) -> String {
    let dir = TempDir::new().unwrap();
    let path: PathBuf = dir.path().join("gateway.toml");
    std::fs::write(&path, contents).unwrap();
    let output = Gateway::command().arg("--config").arg(&path).args(args).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{said}");
    said
}

#[tokio::test]
async fn what_cannot_be_used_is_told_with_its_line_and_what_is_allowed() {
    let cases = [
        ("listen = \"here\"\n", ":1: \"here\" cannot be used; allowed: an IP address and a port"),
        ("\nupstream = \"ftp://x\"\n", ":2: \"ftp://x\" cannot be used; allowed: http://host"),
        (
            "[[rule]]\nlimt = 1\n",
            ":2: unknown field `limt`, expected one of `prefix`, `key`, `limit`",
        ),
        ("colour = 1\n", ":1: unknown field `colour`"),
        ("redis = 5\n", ":1: invalid type: integer `5`, expected a string"),
        ("\n\n[[rule]]\nname = \"x\"\n", ":3: limit: not set; allowed: a number, or unlimited"),
        ("[[rule]]\nlimit = 2.5\n", ":2: \"2.5\" cannot be used; allowed: a number from 0 to"),
        (
            "[[rule]]\nlimit = 1\nwait = 2\n",
            ":3: \"2\" cannot be used; allowed: a whole number with ms",
        ),
        ("[[rule]]\nlimit = 1\nwait = \"2h\"\n", ":3: wait timeout: 7200s is too long; allowed: 0"),
        (
            "[[rule]]\nlimit = 1\nlease = \"1ms\"\n",
            ":3: lease: 1ms is out of range; allowed: 500ms",
        ),
        (
            "[[rule]]\nlimit = 1\n\nname = \"a b\"\n",
            ":4: layer name: \"a b\" cannot be used; allowed",
        ),
        (
            "[[rule]]\nlimit = 1\nkey = \"cookie\"\n",
            ":3: \"cookie\" cannot be used; allowed: global",
        ),
        ("[[rule]]\nlimit = 1\nprefix = \"v1/\"\n", ":3: \"v1/\" cannot be used; allowed: a path"),
        ("[[rule]]\nlimit = 1\nhold = \"foot\"\n", ":3: unknown variant `foot`, expected `body`"),
        (
            "[[rule]]\nlimit = 1\nlimit-for = { a = 1 }\n",
            ":3: limit-for: the key global is but one",
        ),
        (
            "[[rule]]\nlimit = 1\nkey = \"path\"\nlimit-for = { a = \"x\" }\n",
            ":4: a: \"x\" cannot be used; allowed: a number from 0",
        ),
        ("[[rule]]\nlimit = 1\nlocal-limit = 1\n", ":3: local-limit: allowed with on-unavailable"),
        (
            "[[rule]]\nlimit = 1\n[[rule]]\nlimit = 1\nname = \"gateway\"\n",
            ":5: name: \"gateway\" is that of line 1; allowed: once each",
        ),
        ("redis = \"http://x\"\n[[rule]]\nlimit = 1\n", ":1: redis: "),
    ];
    for (text, words) in cases {
        let said = refused(text, &["--upstream", "http://127.0.0.1:1"]);
        let words = format!("gateway.toml{words}");
        assert!(said.contains(&words), "{said}\n{words}");
    }
    let good = "[[rule]]\nlimit = 1\n";
    let said = refused(good, &[]);
    assert!(said.contains("gateway.toml:1: upstream: not set; allowed: http://host"), "{said}");
    let said = refused(good, &["--max-queue", "5"]);
    assert!(said.contains("--max-queue: allowed in the file alone"), "{said}");
}
