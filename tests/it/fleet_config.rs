//! Gateways with a configuration file, which is reloaded while they run.

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

/// A gateway with a file, and its log.
struct Configured {
    redis: TestRedis,
    upstream: Upstream,
    gateway: Gateway,
    client: Client,
    log: Arc<Mutex<Vec<String>>>,
    dir: TempDir,
}

impl Configured {
    /// The rules, and the rest of the file.
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

    /// Writes new contents and sends the signal. Returns what the gateway logs about them.
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
    // Its own limit, before that of the path.
    let request = http::Request::get(stage.url("/v1/chat")).header("x-tenant", "acme");
    let (status, body) = stage.client.send(request).await;
    assert_eq!(status, 429);
    assert!(String::from_utf8_lossy(&body.unwrap()).contains("[\"tenant\"]"));
    let request = http::Request::get(stage.url("/v1/chat/b")).header("x-tenant", "globex");
    let (status, body) = stage.client.send(request).await;
    assert_eq!(status, 429);
    assert!(String::from_utf8_lossy(&body.unwrap()).contains("[\"chat\"]"));
    // Neither of these is below the prefix; and a limit of 0 in shadow refuses none.
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

    // They came before a reload that changes nothing, too.
    stage.reload_rules(&rules("1")).await;
    let began = Instant::now();
    let said = stage.reload_rules(&rules("2")).await;
    assert!(said.contains("is in force"), "{said}");
    // No request comes after it: waiting requests are admitted without one.
    for status in join_all(waiters).await {
        assert_eq!(status.unwrap(), 200);
    }
    let took = began.elapsed();
    println!("the waiters got in {took:?} after the signal");
    assert!(took < Duration::from_secs(3), "{took:?}");
    assert!(!stream.is_finished(), "they had to wait for its end");
    assert_eq!(stage.upstream.seen().peak, 2);
    // The stream from before the reload goes on to its end.
    let (status, body) = stream.await.unwrap();
    assert_eq!((status.as_u16(), body.unwrap().len()), (200, 300 * "chunk\n".len()));

    // No limit at all is higher still; and a lower one is in force at once.
    stage.reload_rules(&rules("\"unlimited\"")).await;
    stage.reload_rules(&rules("0")).await;
    assert_eq!(stage.status("/", "acme").await, 429);
    eventually("nothing is left", async || stage.redis.keys() == 0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_that_waits_further_out_at_a_reload_finds_the_new_limit_further_in() {
    let rules = |inner: &str| {
        format!(
            "[[rule]]\nname = \"outer\"\nprefix = \"/a\"\nlimit = 1\nwait = \"60s\"\n\
             [[rule]]\nname = \"inner\"\n{inner}\nwait = \"60s\"\n"
        )
    };
    let stage = Configured::start(&rules("limit = 1")).await;
    let send = |path: &str| {
        let (client, request) = (stage.client.clone(), http::Request::get(stage.url(path)));
        tokio::spawn(async move { client.send(request).await.0.as_u16() })
    };
    let holds = send("/?ms=15000");
    eventually("it is in flight", async || stage.upstream.seen().in_flight == 1).await;
    let further_in = send("/a/1?ms=1");
    stage.waiting(tower_semaphore::Name::new("inner"), 1).await;
    let further_out = send("/a/2?ms=1");
    stage.waiting(tower_semaphore::Name::new("outer"), 1).await;

    stage.reload_rules(&rules("limit = 2")).await;
    for request in [further_in, further_out] {
        assert_eq!(request.await.unwrap(), 200);
    }
    assert!(!holds.is_finished(), "a permit was free, and they waited for another");
    // A later request does not wait behind it either.
    assert_eq!(send("/?ms=1").await.unwrap(), 200);
    assert!(!holds.is_finished(), "a permit was free, and a newcomer waited for another");
    holds.abort();
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
        (
            "[[rule]]\nname = \"all\"\n\nlimit = -1\n",
            "gateway.toml:10: \"-1\" cannot be used; expected",
        ),
        ("[[rule]\n", "gateway.toml:7: "),
        ("", "no [[rule]]; expected one or more"),
    ];
    for (rules, words) in bad {
        let said = stage.reload_rules(rules).await;
        assert!(said.contains(words) && said.contains("previous configuration stays"), "{said}");
        assert_eq!(stage.status("/", "x").await, 429);
    }
    // Settings that cannot change while it runs.
    let elsewhere = contents(&stage.redis, &stage.upstream, "[[rule]]\nlimit = 9\n")
        .replace("continue", "quarantine");
    let said = stage.reload(&elsewhere).await;
    assert!(said.contains("gateway.toml:5: after-loss: changed; restart the gateway"), "{said}");
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

/// Returns how it ends with this file, and what it prints.
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
        ("listen = \"here\"\n", ":1: \"here\" cannot be used; expected an IP address and a port"),
        ("\nupstream = \"ftp://x\"\n", ":2: \"ftp://x\" cannot be used; expected http://host"),
        ("[[rule]]\nlimt = 1\n", ":2: unknown field; expected one of `prefix`, `key`, `limit`"),
        ("colour = 1\n", ":1: unknown field; expected one of `listen`"),
        (
            "trusted-proxies = \"10.0.0.0/99\"\n",
            ":1: \"10.0.0.0/99\" cannot be used; expected networks and addresses",
        ),
        (
            "\nmax-connections = 0\n",
            ":2: \"0\" cannot be used; expected a number from 1 to 1000000",
        ),
        ("max-requests = 0\n", ":1: \"0\" cannot be used; expected a number from 1 to 1000000"),
        (
            "[[rule]]\nlimit = 1\nmax-waiting = 9\n",
            ":3: max-waiting: there are no tenants; set fair",
        ),
        ("\nidle-timeout = \"0s\"\n", ":2: \"0s\" cannot be used; expected 1ms or more, or none"),
        ("keepalive = \"500ms\"\n", ":1: \"500ms\" cannot be used; expected 1s or more, or none"),
        ("drain = 5\n", ":1: \"5\" cannot be used; expected a whole number with ms"),
        ("host = \"mine\"\n", ":1: unknown variant `mine`, expected `client` or `upstream`"),
        ("status = \"x\"\n", ":1: \"x\" cannot be used; expected a port, or an IP address"),
        ("[[rule]]\nlimit = 1\nprefix = \"/%zz\"\n", ":3: \"/%zz\" cannot be used; expected %"),
        ("redis = 5\n", ":1: redis: not a string; expected text in quotes"),
        ("\n\n[[rule]]\nname = \"x\"\n", ":3: limit: not set; expected a number, or unlimited"),
        ("[[rule]]\nlimit = 2.5\n", ":2: \"2.5\" cannot be used; expected a number from 0 to"),
        (
            "[[rule]]\nlimit = 1\nwait = 2\n",
            ":3: \"2\" cannot be used; expected a whole number with ms",
        ),
        ("[[rule]]\nlimit = 1\nwait = \"2h\"\n", ":3: wait timeout is 7200s; expected 0"),
        ("[[rule]]\nlimit = 1\nlease = \"1ms\"\n", ":3: lease is 1ms; expected 500ms"),
        ("[[rule]]\nlimit = 1\n\nname = \"a b\"\n", ":4: layer name is \"a b\"; expected"),
        (
            "[[rule]]\nlimit = 1\nkey = \"cookie\"\n",
            ":3: \"cookie\" cannot be used; expected global",
        ),
        ("[[rule]]\nlimit = 1\nprefix = \"v1/\"\n", ":3: \"v1/\" cannot be used; expected a path"),
        ("[[rule]]\nlimit = 1\nhold = \"foot\"\n", ":3: unknown variant `foot`, expected `body`"),
        (
            "[[rule]]\nlimit = 1\nlimit-for = { a = 1 }\n",
            ":3: limit-for: the key global has one value",
        ),
        (
            "[[rule]]\nlimit = 1\nkey = \"path\"\nlimit-for = { a = \"x\" }\n",
            ":4: limit-for: \"x\" cannot be used; expected a number from 0",
        ),
        (
            "[[rule]]\nlimit = 1\nlocal-limit = 1\n",
            ":3: local-limit: is set without on-unavailable local",
        ),
        (
            "[[rule]]\nlimit = 1\non-unavailable = \"local\"\nlocal-limit = 2\n",
            ":4: local-limit: 2 is more than the limit; expected up to 1",
        ),
        (
            "[[rule]]\nlimit = 1\nfair-by = \"path\"\neach = 2\n",
            ":4: each: 2 is more than the limit; expected up to 1",
        ),
        (
            "[[rule]]\nlimit = 1\nfair-by = \"global\"\n",
            ":3: \"global\" cannot be used; expected path, peer-ip, header:NAME",
        ),
        ("[[rule]]\nlimit = 1\n\neach = 1\n", ":4: each: there are no tenants; set fair"),
        (
            "[[rule]]\nlimit = 1\nmissing-tenant = \"shared\"\n",
            ":3: missing-tenant: there are no tenants; set fair",
        ),
        (
            "[[rule]]\nlimit = \"unlimited\"\nfair-by = \"path\"\n",
            ":3: fair-by: without a limit no request waits; set a limit",
        ),
        (
            "[[rule]]\nlimit = \"unlimited\"\npause-on = \"429\"\n",
            ":3: pause-on: without a limit there is nothing to pause; set a limit",
        ),
        (
            "[[rule]]\nlimit = 1\nfair-by = \"path\"\neach = 0\n",
            ":4: each: 0 rejects all requests; expected 1 or more",
        ),
        (
            "[[rule]]\nlimit = 1\nfair-by = \"path\"\neach-for = { a = \"x\" }\n",
            ":4: each-for: \"x\" cannot be used; expected a number from 0",
        ),
        (
            "[[rule]]\nlimit = 1\nfair-by = \"path\"\nweight-for = { a = 0 }\n",
            ":4: weight-for: \"0\" cannot be used; expected a number from 1 to 64",
        ),
        (
            "[[rule]]\nlimit = 1\nfair-by = \"path\"\nclass-for = { a = 8 }\n",
            ":4: class-for: \"8\" cannot be used; expected a number from 0 to 7",
        ),
        (
            "[[rule]]\nlimit = 9\nfair-by = \"path\"\nheadroom = 2\n",
            ":4: headroom: all tenants have class 0; set another class",
        ),
        (
            "[[rule]]\nlimit = 9\nkey = \"path\"\nfair-by = \"header:x\"\nclass-for = { a = 1 }\n\
             limit-for = { b = 4 }\nheadroom = 4\n",
            ":7: headroom: 4 leaves nothing of 4 permits to the other classes; expected 0 to 3",
        ),
        (
            "[[rule]]\nlimit = 1\ncost = \"path\"\n",
            ":3: \"path\" cannot be used; expected header:NAME",
        ),
        (
            "tenant-salt-file = \"/none\"\n[[rule]]\nlimit = 1\n",
            ":1: tenant-salt-file: the file cannot be read: No such file",
        ),
        (
            "[[rule]]\nlimit = 1\n[[rule]]\nlimit = 1\nname = \"gateway\"\n",
            ":5: name: \"gateway\" is the name of the rule in line 1; expected each name once",
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
    assert!(said.contains("gateway.toml:1: upstream: not set; expected http://host"), "{said}");
    let said = refused(good, &["--max-queue", "5"]);
    assert!(said.contains("--max-queue cannot be given beside --config"), "{said}");
}

/// A gateway that counts its permits itself; returns status and problem of its responses.
struct Alone {
    upstream: Upstream,
    gateway: Gateway,
    client: Client,
}

impl Alone {
    async fn start(args: &[&str]) -> Self {
        let upstream = Upstream::start().await;
        let gateway = Gateway::start(&upstream.url(), args);
        Self { upstream, gateway, client: Client::new() }
    }

    async fn ask(&self, path: &str, headers: &[(&str, &str)]) -> (u16, serde_json::Value) {
        let mut request = http::Request::get(format!("{}{path}", self.gateway.url()));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let (status, body) = self.client.send(request).await;
        (status.as_u16(), serde_json::from_slice(&body.unwrap()).unwrap_or_default())
    }

    /// A request that is in flight until its task is aborted.
    async fn hold(&self, headers: &[(&'static str, &str)]) -> tokio::task::JoinHandle<()> {
        let before = self.upstream.seen().in_flight;
        let mut request = http::Request::get(format!("{}/?stream_ms=60000", self.gateway.url()));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let client = self.client.clone();
        let held = tokio::spawn(async move { drop(client.send(request).await) });
        eventually("it is in flight", async || self.upstream.seen().in_flight == before + 1).await;
        held
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_has_its_cap_and_its_turn() {
    let args = ["--limit", "3", "--wait", "0s", "--fair-by", "header:x-tenant", "--each", "1"];
    let more = ["--each-for", "acme=2", "--each-for", "banned=0", "--each-for", "staff=unlimited"];
    let stage = Alone::start(&[&args[..], &more].concat()).await;
    let acme = [("x-tenant", "acme")];
    let held = [stage.hold(&acme).await, stage.hold(&acme).await];
    let (status, problem) = stage.ask("/", &acme).await;
    assert_eq!((status, &problem["reason"]), (429, &"tenant_limit".into()), "{problem}");
    assert_eq!(problem["violated-policies"], serde_json::json!(["gateway/each"]));
    let (status, problem) = stage.ask("/", &[("x-tenant", "banned")]).await;
    assert_eq!((status, &problem["reason"]), (429, &"tenant_limit".into()), "{problem}");
    assert_eq!(stage.ask("/", &[("x-tenant", "globex")]).await.0, 200);
    let globex = stage.hold(&[("x-tenant", "globex")]).await;
    let (status, problem) = stage.ask("/", &[("x-tenant", "staff")]).await;
    assert_eq!((status, &problem["reason"]), (429, &"limit".into()), "{problem}");
    held.iter().chain([&globex]).for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_without_a_tenant_is_rejected_or_counted_as_one_with_its_like() {
    let args = ["--limit", "3", "--wait", "0s", "--fair-by", "header:x-tenant", "--each", "1"];
    let stage = Alone::start(&args).await;
    let (status, problem) = stage.ask("/", &[]).await;
    assert_eq!((status, &problem["reason"]), (400, &"missing_tenant".into()), "{problem}");
    assert_eq!(problem["detail"], "the request has no x-tenant header");
    let stage = Alone::start(&[&args[..], &["--missing-tenant", "shared"]].concat()).await;
    let held = stage.hold(&[]).await;
    let (status, problem) = stage.ask("/", &[]).await;
    assert_eq!((status, &problem["reason"]), (429, &"tenant_limit".into()), "{problem}");
    held.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn weights_and_classes_decide_whose_turn_it_is() {
    let args = ["--limit", "3", "--wait", "60s", "--fair-by", "header:x-tenant"];
    let more = ["--weight-for", "acme=2", "--class-for", "batch=1", "--headroom", "1"];
    let stage = Alone::start(&[&args[..], &more].concat()).await;
    // One permit of three is for class 0 alone.
    let batch = [("x-tenant", "batch")];
    let mut held = vec![stage.hold(&batch).await, stage.hold(&batch).await];
    let wait = |tenant: &'static str, number: u64| {
        let request = http::Request::get(format!("{}/?ms=300", stage.gateway.url()))
            .header("x-tenant", tenant)
            .header("x-number", number);
        let client = stage.client.clone();
        tokio::spawn(async move { client.send(request).await.0.as_u16() })
    };
    let third = wait("batch", 1);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert_eq!(stage.upstream.seen().in_flight, 2, "the third permit is not for it");
    held.push(stage.hold(&[("x-tenant", "globex")]).await);
    let fourth = wait("globex", 2);
    tokio::time::sleep(Duration::from_millis(100)).await;
    let fifth = wait("acme", 3);
    tokio::time::sleep(Duration::from_millis(100)).await;
    // First to acme, which has none; then to globex; to the other class last.
    held[0].abort();
    for waiter in [fifth, fourth] {
        assert_eq!(waiter.await.unwrap(), 200);
    }
    held.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(third.await.unwrap(), 200);
    assert_eq!(stage.upstream.seen().arrivals, [3, 2, 1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_takes_what_its_header_says() {
    let stage = Alone::start(&["--limit", "10", "--wait", "0s", "--cost", "header:x-units"]).await;
    let held = stage.hold(&[("x-units", "8")]).await;
    let (status, problem) = stage.ask("/", &[("x-units", "3")]).await;
    assert_eq!((status, &problem["reason"]), (429, &"limit".into()), "{problem}");
    assert_eq!(stage.ask("/", &[("x-units", "2")]).await.0, 200);
    assert_eq!(stage.ask("/", &[]).await.0, 200, "one, unless it says more");
    for units in ["0", "65", "-1", "1.5", "many", ""] {
        let (status, problem) = stage.ask("/", &[("x-units", units)]).await;
        let detail = format!("x-units: {units:?} cannot be used; expected a number from 1 to 64");
        assert_eq!((status, &problem["detail"]), (400, &detail.into()), "{problem}");
    }
    let (status, problem) = stage.ask("/", &[("x-units", "1"), ("x-units", "1")]).await;
    assert_eq!(status, 400);
    assert!(problem["detail"].as_str().unwrap().contains("more than one value"), "{problem}");
    let (status, problem) = stage.ask("/", &[("x-units", "11")]).await;
    assert_eq!((status, &problem["reason"]), (400, &"cost_too_high".into()), "{problem}");
    held.abort();

    // In shadow every request passes.
    let args = ["--limit", "10", "--cost", "header:x-units", "--shadow"];
    let stage = Alone::start(&args).await;
    assert_eq!(stage.ask("/", &[("x-units", "many")]).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_changes_what_each_may_have() {
    let dir = TempDir::new().unwrap();
    let (path, salt) = (dir.path().join("gateway.toml"), dir.path().join("salt"));
    let upstream = Upstream::start().await;
    let write = |rule: &str| {
        let site = format!(
            "listen = \"127.0.0.1:0\"\nupstream = \"{}\"\ntenant-salt-file = {salt:?}\n",
            upstream.url()
        );
        let rule = format!("[[rule]]\nfair-by = \"header:x-tenant\"\nwait = \"0s\"\n{rule}\n");
        std::fs::write(&path, site + &rule).unwrap();
    };
    std::fs::write(&salt, "\n").unwrap();
    write("limit = 4\neach = 1");
    let args = ["--config", path.to_str().unwrap()];
    let output = Gateway::command().args(args).output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("gateway.toml:3: tenant-salt-file: ") && said.contains("is empty"),
        "{said}"
    );

    std::fs::write(&salt, "a secret of the fleet\n").unwrap();
    let gateway = Gateway::running(Gateway::command().args(args).spawn().unwrap());
    let stage = Alone { upstream, gateway, client: Client::new() };
    let acme = [("x-tenant", "acme")];
    let held = stage.hold(&acme).await;
    assert_eq!(stage.ask("/", &acme).await.0, 429);
    let write = |rule: &str| {
        let text = std::fs::read_to_string(&path).unwrap();
        let (site, _) = text.split_once("limit = 4").unwrap();
        std::fs::write(&path, format!("{site}limit = 4\n{rule}\n")).unwrap();
        stage.gateway.signal("HUP");
    };
    write("each = 1\neach-for = { acme = 2 }\nweight-for = { acme = 2 }");
    eventually("it may have one more", async || stage.ask("/", &acme).await.0 == 200).await;
    write("class-for = { acme = 1 }\nheadroom = 3");
    eventually("three are for others", async || stage.ask("/", &acme).await.0 == 429).await;
    assert_eq!(stage.ask("/", &[("x-tenant", "globex")]).await.0, 200);
    held.abort();
}
