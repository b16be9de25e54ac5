//! The operator's window, over real sockets.

use std::time::Duration;

use axum::Router;
use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::{Value, json};
use tower_semaphore::{Ask, Mode, Name, Policy, Semaphore, admin};

use crate::support::browser::Browser;
use crate::support::eventually;
use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::http::{Server, text};
use crate::support::redis::{TestRedis, free_port};

const HOSTILE: [&str; 7] = [
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "../../x",
    "a/b?c#d",
    "é&amp;",
    "%2F",
    "a'b",
];

/// One process, with the window mounted below a path.
async fn window(semaphore: &Semaphore) -> Server {
    Server::start(Router::new().nest("/ops", admin::router(semaphore.clone()))).await
}

fn policy(limit: u32) -> Policy {
    // What was revoked is remembered for a lease.
    let lease = Duration::from_secs(2);
    Policy::builder(limit).wait_timeout(Duration::from_secs(20)).lease(lease).build().unwrap()
}

/// As a URL has it: percent-encoded once more.
fn segment(name: &Name) -> String {
    let encoded = name.as_str().bytes().map(|byte| match byte {
        b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'-' => char::from(byte).to_string(),
        byte => format!("%{byte:02X}"),
    });
    encoded.collect()
}

/// Asks as an operator does.
async fn ask(server: &Server, method: Method, path: &str, body: &str) -> (StatusCode, Value) {
    let request = Request::builder()
        .method(method)
        .uri(format!("/ops{path}"))
        .header("host", "localhost")
        .header("x-semaphore-admin", "1")
        .body(Full::from(body.to_owned()))
        .unwrap();
    let response = server.send(request).await;
    let status = response.status();
    (status, serde_json::from_str(&text(response).await).unwrap_or(Value::Null))
}

async fn page(server: &Server, path: &str) -> String {
    let response = server.get(&format!("/ops{path}")).await;
    assert_eq!(response.status(), StatusCode::OK, "{path}");
    let policy = response.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    assert_eq!(response.headers()["cache-control"], "no-store");
    text(response).await
}

#[tokio::test]
async fn an_operator_sees_and_steers_another_process() {
    let redis = TestRedis::start();
    let (own, other) = (redis.semaphore(), redis.semaphore());
    let server = window(&own).await;
    let name = Name::new("tenant").part("acme/eu");
    let path = format!("/semaphores/{}", segment(&name));
    let held = other.acquire(name.clone(), &policy(1)).await.unwrap();
    let wait = tokio::spawn(other.acquire(name.clone(), &policy(1)));
    eventually("one waits", async || own.inspect(name.clone()).await.unwrap().waiting == 1).await;

    let (status, list) = ask(&server, Method::GET, "/semaphores?most=10", "").await;
    assert_eq!(status, StatusCode::OK);
    let one = json!({ "name": "tenant:acme%2Feu", "in_use": 1, "waiting": 1,
                      "set": { "limit": null, "mode": "open" } });
    assert_eq!(list, json!({ "semaphores": [one], "away": [], "next": null }));

    let (_, seen) = ask(&server, Method::GET, &path, "").await;
    assert_eq!((&seen["in_use"], &seen["waiting"]), (&json!(1), &json!(1)));
    assert!(seen["holders"][0]["lease_left_ms"].as_u64().unwrap() > 0, "{seen}");
    let id = seen["holders"][0]["id"].as_str().unwrap().to_owned();

    let (status, set) = ask(&server, Method::PUT, &format!("{path}/limit"), r#"{"limit":2}"#).await;
    assert_eq!((status, &set["limit"]), (StatusCode::OK, &json!(2)));
    let second = wait.await.unwrap().unwrap();
    let (status, done) =
        ask(&server, Method::DELETE, &format!("{path}/permits/{}", id.replace(':', "%3A")), "")
            .await;
    assert_eq!((status, done), (StatusCode::OK, json!({ "revoked": true })));
    held.lost().await;
    assert!(!second.is_lost());

    let (_, set) = ask(&server, Method::POST, &format!("{path}/pause"), "").await;
    assert_eq!(set, json!({ "limit": 2, "mode": "paused" }));
    assert_eq!(other.limit_of(name.clone()).await.unwrap().mode, Mode::Paused);
    let (_, all) = ask(&server, Method::GET, "/overrides", "").await;
    assert_eq!(all["overrides"][0]["name"], "tenant:acme%2Feu");
    let (_, drained) = ask(&server, Method::POST, &format!("{path}/drain"), "").await;
    assert_eq!(drained, json!({ "empty": false }));
    drop(second);
    let (_, drained) =
        ask(&server, Method::POST, &format!("{path}/drain"), r#"{"timeout_ms":9000}"#).await;
    assert_eq!(drained, json!({ "empty": true }));
    ask(&server, Method::POST, &format!("{path}/resume"), "").await;
    let (_, set) = ask(&server, Method::DELETE, &format!("{path}/limit"), "").await;
    assert_eq!(set, json!({ "limit": null, "mode": "open" }));
    eventually("nothing is left", async || redis.keys() == 0).await;
}

#[tokio::test]
async fn tenants_are_shown_and_steered() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let tenant = Name::new(HOSTILE[0]);
    let policy = policy(2);
    let ask_for = |tenant: &Name| Ask::of("openai").by(tenant.clone()).weight(2).each(1);
    let held = semaphore.acquire(ask_for(&tenant), &policy).await.unwrap();
    let _wait = semaphore.acquire(ask_for(&tenant), &policy);
    let path = format!("/semaphores/openai/tenants/{}", segment(&tenant));
    let (status, set) = ask(&server, Method::PUT, &format!("{path}/limit"), "{\"limit\": 7}").await;
    assert_eq!((status, set), (StatusCode::OK, json!({ "limit": 7, "weight": null })));
    let weight = format!("{path}/weight");
    let (_, set) = ask(&server, Method::PUT, &weight, "{\"weight\": 3}").await;
    assert_eq!(set, json!({ "limit": 7, "weight": 3 }));
    for (body, allowed) in [("{\"weight\": 0}", "1 to 64"), ("{\"weight\": 65}", "1 to 64")] {
        let (status, problem) = ask(&server, Method::PUT, &weight, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST);
        assert!(problem["detail"].as_str().unwrap().contains(allowed), "{problem}");
    }

    let (_, seen) = ask(&server, Method::GET, "/semaphores/openai", "").await;
    let shown = &seen["tenants"][0];
    assert_eq!(shown["name"], tenant.as_str());
    assert_eq!((&shown["in_use"], &shown["waiting"]), (&json!(1), &json!(1)));
    assert_eq!((&shown["weight"], &shown["each"]), (&json!(2), &json!(1)));
    assert!(shown["longest_wait_ms"].is_u64());
    assert_eq!(shown["set"], json!({ "limit": 7, "weight": 3 }));
    let (_, all) = ask(&server, Method::GET, "/overrides", "").await;
    assert_eq!(all["tenants"][0]["tenant"], tenant.as_str());
    for path in ["/page/openai", ""] {
        let page = page(&server, path).await;
        assert!(page.contains("cap 7, weight 3"), "{page}");
        assert!(page.contains("&lt;script&gt;") && !page.contains("<script>alert"), "{page}");
    }

    for end in ["limit", "weight"] {
        ask(&server, Method::DELETE, &format!("{path}/{end}"), "").await;
    }
    let set = semaphore.tenant_override_of("openai", tenant).await.unwrap();
    assert_eq!((set.limit, set.weight), (None, None));
    drop(held);
}

#[tokio::test]
async fn what_another_site_can_send_changes_nothing() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let server = window(&semaphore).await;
    let changes = [
        (Method::PUT, "/limit"),
        (Method::DELETE, "/limit"),
        (Method::POST, "/pause"),
        (Method::POST, "/resume"),
        (Method::POST, "/drain"),
        (Method::DELETE, "/permits/00000000001:1"),
    ];
    for (method, end) in changes {
        let request = Request::builder()
            .method(&method)
            .uri(format!("/ops/semaphores/x{end}"))
            .header("host", "localhost")
            .header("content-type", "text/plain")
            .body(Full::<Bytes>::from(r#"{"limit":1}"#))
            .unwrap();
        let response = server.send(request).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN, "{method} {end}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        assert!(text(response).await.contains("x-semaphore-admin"));
    }
    assert_eq!(redis.keys(), 0);
}

#[tokio::test]
async fn what_cannot_be_used_is_named() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let wrong = [
        (Method::GET, "/semaphores?most=0", "", "1 to 1000"),
        (Method::GET, "/semaphores?from=x", "", "cursor: \"x\""),
        (Method::GET, "/semaphores/a%2Fb", "", "name: \"a/b\""),
        (Method::GET, "/page/%3Cscript%3E", "", "name: \"<script>\""),
        (Method::PUT, "/semaphores/x/limit", "", "\"limit\": N"),
        (Method::PUT, "/semaphores/x/limit", "{", "no JSON"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":-1}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":4294967296}"#, "0 to 4294967295"),
        (Method::POST, "/semaphores/x/drain", r#"{"timeout_ms":60001}"#, "0 to 60000"),
        (Method::DELETE, "/semaphores/x/permits/1", "", "id: \"1\""),
    ];
    for (method, path, body, detail) in wrong {
        let (status, problem) = ask(&server, method, path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}");
        assert!(problem["detail"].as_str().unwrap().contains(detail), "{path}: {problem}");
    }
    let long = " ".repeat(5000);
    let (status, _) = ask(&server, Method::PUT, "/semaphores/x/limit", &long).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    let none = "/semaphores/x/permits/00000000001%3A1";
    assert_eq!(ask(&server, Method::DELETE, none, "").await.0, StatusCode::NOT_FOUND);
}

#[tokio::test]
async fn a_hostile_name_is_text() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let mut permits = Vec::new();
    for name in HOSTILE {
        permits.push(semaphore.acquire(name, &policy(1)).await.unwrap());
        semaphore.set_limit(name, 3).await.unwrap();
    }
    let all = page(&server, "").await;
    assert!(all.contains("<bdi>&lt;script&gt;alert(1)&lt;/script&gt;</bdi>"), "{all}");
    assert!(all.contains("<bdi>&quot;&gt;&lt;img src=x onerror=alert(1)&gt;</bdi>"), "{all}");
    for name in HOSTILE.map(Name::from) {
        let url = format!("/ops/page/{}", segment(&name));
        assert!(all.contains(&format!("href=\"{url}\"")), "{name}: {all}");
        let one = page(&server, url.strip_prefix("/ops").unwrap()).await;
        assert!(
            one.contains(&format!("<code>{name}</code>").replace('\'', "&#39;")),
            "{name}: {one}"
        );
        for html in [&all, &one] {
            assert!(!html.contains("<script>") && !html.contains("<img"), "{html}");
            assert!(!html.contains("style="), "nothing inline: {html}");
        }
    }
}

#[tokio::test]
async fn while_redis_is_away_the_window_says_so() {
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let server = window(&semaphore).await;
    redis.kill();
    for path in ["", "/page/x", "/semaphores", "/semaphores/x", "/overrides"] {
        let response = server.get(&format!("/ops{path}")).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert!(text(response).await.contains("Redis"), "{path}");
    }
}

#[tokio::test]
async fn the_gateway_serves_it_on_loopback_and_by_address_alone() {
    let upstream = Upstream::start().await;
    let port = free_port().to_string();
    let _gateway = Gateway::start(&upstream.url(), &["--limit", "1", "--admin", &port]);
    let client = Client::new();
    let url = format!("http://127.0.0.1:{port}/");
    eventually("it is there", async || client.try_get(&url).await.is_some()).await;
    assert_eq!(client.get(&url).await, StatusCode::OK);
    let (status, body) =
        client.send(Request::get(&url).header("host", format!("evil.example:{port}"))).await;
    assert_eq!(status, StatusCode::FORBIDDEN, "{body:?}");
    let local = Request::get(&url).header("host", format!("localhost:{port}"));
    assert_eq!(client.send(local).await.0, StatusCode::OK);
}

// --- in a browser -------------------------------------------------------------------------------

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_browser_shows_it_keeps_it_up_to_date_and_runs_no_name() {
    let Some(mut browser) = Browser::start().await else { return };
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let one = policy(1);
    let held = semaphore.acquire(HOSTILE[0], &one).await.unwrap();
    let wait = tokio::spawn(semaphore.acquire(HOSTILE[0], &one));
    eventually("one waits", async || semaphore.inspect(HOSTILE[0]).await.unwrap().waiting == 1)
        .await;
    browser.open(&server.url("/ops")).await;
    browser.click(HOSTILE[0]).await;
    let name = Value::from(HOSTILE[0]);
    browser.wait_for(&format!("document.querySelector('h1')?.textContent === {name}")).await;
    numbers(&mut browser, 1, 1).await;
    drop(held);
    numbers(&mut browser, 1, 0).await;
    drop(wait.await.unwrap().unwrap());
    numbers(&mut browser, 0, 0).await;
    // A point came with the page, and one more each time that it kept itself up to date.
    let points = "document.querySelector('polyline').getAttribute('points').split(' ').length > 2";
    browser.wait_for(points).await;
    assert_eq!(browser.eval("document.getElementById('told').textContent").await, "");
    assert_eq!(browser.dialogs, [""; 0], "a name was run");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_buttons_do_what_they_say() {
    let Some(mut browser) = Browser::start().await else { return };
    let redis = TestRedis::start();
    let (own, other) = (redis.semaphore(), redis.semaphore());
    let server = window(&own).await;
    let name = "é'\"<b>";
    let held = other.acquire(name, &policy(1)).await.unwrap();
    let wait = tokio::spawn(other.acquire(name, &policy(1)));
    browser.open(&server.url(&format!("/ops/page/{}", segment(&Name::from(name))))).await;
    numbers(&mut browser, 1, 1).await;

    let set = async |mode, limit| {
        eventually("it is set", async || {
            let set = other.limit_of(name).await.unwrap();
            (set.mode, set.limit) == (mode, limit)
        })
        .await;
    };
    browser.click("pause").await;
    set(Mode::Paused, None).await;
    browser.click("drain").await;
    set(Mode::Draining, None).await;
    browser.click("resume").await;
    set(Mode::Open, None).await;
    assert_eq!(browser.dialogs, ["confirm"; 3]);

    "many".clone_into(&mut browser.says);
    browser.click("set limit").await;
    browser.wait_for("document.getElementById('told').textContent.includes('limit')").await;
    set(Mode::Open, None).await;
    "2".clone_into(&mut browser.says);
    browser.click("set limit").await;
    set(Mode::Open, Some(2)).await;
    let second = wait.await.unwrap().unwrap();
    numbers(&mut browser, 2, 0).await;
    browser.click("clear limit").await;
    set(Mode::Open, None).await;

    drop(second);
    numbers(&mut browser, 1, 0).await;
    browser.click("revoke").await;
    held.lost().await;
    numbers(&mut browser, 0, 0).await;
}

/// The page shows that so many hold, and so many wait.
async fn numbers(browser: &mut Browser, in_use: u64, waiting: u64) {
    let shown = "[...document.querySelectorAll('main b')].map(one => one.textContent).join()";
    browser.wait_for(&format!("{shown} === '{in_use},{waiting}'")).await;
}
