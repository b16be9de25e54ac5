//! The operator's page and its JSON, over real sockets.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use http_body_util::Full;
use serde_json::json;
use tokio::runtime::Builder;
use tower_semaphore::backend::{AfterLoss, MemoryBackend, RedisBackend};
use tower_semaphore::operate::Mode;
use tower_semaphore::{Ask, Feedback, Name, Policy, Semaphore};

use crate::support::admin::{HOSTILE, ask, page, policy, segment, window};
use crate::support::eventually;
use crate::support::http::text;
use crate::support::redis::TestRedis;

#[tokio::test]
async fn an_operator_sees_that_a_quarantine_is_on() {
    // The server is young, so all of its data may be lost.
    let redis = TestRedis::start();
    let backend = RedisBackend::builder(redis.url()).after_loss(AfterLoss::Quarantine);
    let semaphore = Semaphore::new(backend.build().unwrap());
    let server = window(&semaphore).await;
    assert!(!page(&server, "").await.contains("quarantine"), "no name is in use");
    let policy = Policy::builder(1).lease(Duration::from_secs(30)).build().unwrap();
    semaphore.try_acquire("x", &policy).await.unwrap_err();
    for path in ["", "/page/x"] {
        let html = page(&server, path).await;
        assert!(html.contains("In quarantine for another"), "{html}");
    }
}

#[tokio::test]
async fn an_operator_sees_who_paused_a_semaphore_and_why_and_ends_it() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let permit = semaphore.acquire("x", &policy(1)).await.unwrap();
    assert!(!page(&server, "/page/x").await.contains("paused for another"));
    permit.feedback(Feedback::Backoff(Duration::from_secs(30)));
    let html = page(&server, "/page/x").await;
    let pid = format!(":{}", std::process::id());
    assert!(html.contains("paused for another ") && html.contains(&pid), "{html}");
    assert!(html.contains("the upstream asked for it") && html.contains("Resume"), "{html}");
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    assert_eq!(seen["paused"]["cause"], "upstream");
    assert!(seen["paused"]["left_ms"].as_u64().unwrap() > 20_000, "{seen}");
    assert!(seen["paused"]["by"].as_str().unwrap().ends_with(&pid), "{seen}");
    assert_eq!(semaphore.health().paused, 1);
    ask(&server, Method::POST, "/semaphores/x/resume", "").await;
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    assert_eq!((&seen["paused"], &seen["limit"]), (&json!(null), &json!(1)));
    assert_eq!(semaphore.health().paused, 0);
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
    let one = json!({ "name": "tenant:acme%2Feu", "in_use": 1, "waiting": 1, "limit": null,
                      "set": { "limit": null, "mode": "open", "rate": null } });
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
    assert_eq!(set, json!({ "limit": 2, "mode": "paused", "rate": null }));
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
    assert_eq!(set, json!({ "limit": null, "mode": "open", "rate": null }));
    let rate = json!({ "starts": 300, "window_ms": 60_000 });
    let (_, set) = ask(&server, Method::PUT, &format!("{path}/rate"), &rate.to_string()).await;
    assert_eq!(set, json!({ "limit": null, "mode": "open", "rate": rate }));
    let set = other.limit_of(name.clone()).await.unwrap().rate.unwrap();
    assert_eq!((set.starts(), set.window()), (300, Duration::from_secs(60)));
    let (_, set) = ask(&server, Method::DELETE, &format!("{path}/rate"), "").await;
    assert_eq!(set["rate"], json!(null));
    eventually("nothing is left", async || redis.is_clear()).await;
}

#[tokio::test]
async fn the_used_part_of_a_rate_is_shown() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let _other = semaphore.acquire("y", &policy(2)).await.unwrap();
    let (_, seen) = ask(&server, Method::GET, "/semaphores/y", "").await;
    assert_eq!(seen["rate"], json!(null));
    assert!(!page(&server, "/page/y").await.contains("id=\"rate\""));

    let policy = Policy::builder(9).rate(2, Duration::from_secs(60)).build().unwrap();
    drop(semaphore.acquire("x", &policy).await.unwrap());
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    let rate = json!({
        "starts": 2, "window_ms": 60_000, "smooth": false, "is_of_place": false, "started": 1,
        "opens_in_ms": null,
    });
    assert_eq!(seen["rate"], rate);
    let html = page(&server, "/page/x").await;
    assert!(html.contains("id=\"rate\">2 in 60s<"), "{html}");
    assert!(html.contains("1 started; the rate allows the next now<"), "{html}");
    drop(semaphore.acquire("x", &policy).await.unwrap());
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    assert_eq!(seen["rate"]["started"], 2);
    let opens_in = seen["rate"]["opens_in_ms"].as_u64().unwrap();
    assert!((30_000..=60_000).contains(&opens_in), "{seen}");
    let html = page(&server, "/page/x").await;
    assert!(html.contains("2 started; the rate allows the next in "), "{html}");
    assert!(!html.contains("Clear rate"), "{html}");
    semaphore.set_rate("x", 7, Duration::from_secs(60)).await.unwrap();
    let html = page(&server, "/page/x").await;
    assert!(html.contains("set here, in place of policies; 2 started"), "{html}");
    assert!(html.contains("Clear rate"), "{html}");
    assert!(page(&server, "/page/").await.contains("rate 7/60s<"));
}

#[tokio::test]
async fn a_rate_that_replaces_none_is_shown_as_such() {
    let backend = MemoryBackend::new();
    let (semaphore, other) = (Semaphore::new(backend.clone()), Semaphore::new(backend));
    let server = window(&semaphore).await;
    let _held = semaphore.acquire("x", &policy(2)).await.unwrap();
    let rate = json!({ "starts": 7, "window_ms": 60_000 });
    let set = ask(&server, Method::PUT, "/semaphores/x/rate", &rate.to_string()).await;
    assert_eq!(set.0, StatusCode::SERVICE_UNAVAILABLE);
    assert!(set.1["detail"].as_str().unwrap().contains("has no rate"), "{}", set.1);
    other.set_rate("x", 7, Duration::from_secs(60)).await.unwrap();
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    assert_eq!((&seen["rate"], &seen["set"]["rate"]), (&json!(null), &rate));
    let html = page(&server, "/page/x").await;
    assert!(html.contains("id=\"rate\">7 in 60s<"), "{html}");
    assert!(html.contains("set here, but not in force: no known policy has a rate<"), "{html}");
    assert!(html.contains("Clear rate") && !html.contains("Set rate"), "{html}");
}

/// One in 20 s is what six in 120 s, spread, are for each request.
#[test]
fn the_window_of_a_part_of_a_rate_is_not_that_of_a_new_one() {
    let redis = TestRedis::start();
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let dead = runtime();
    let _held = dead.block_on(async {
        let policy = Policy::builder(9).rate(6, Duration::from_secs(120)).smooth().build();
        redis.semaphore().acquire("x", &policy.unwrap()).await.unwrap()
    });
    // Its process answers no more.
    drop(dead);
    runtime().block_on(async {
        let semaphore = redis.semaphore();
        let server = window(&semaphore).await;
        let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
        let rate = json!({
            "starts": 1, "window_ms": 20_000, "smooth": false, "is_of_place": true, "started": 1,
            "opens_in_ms": seen["rate"]["opens_in_ms"],
        });
        assert_eq!(seen["rate"], rate);
        let html = page(&server, "/page/x").await;
        assert!(html.contains("of a listed request, perhaps a part of a smooth rate; "), "{html}");
        assert!(!html.contains("Set rate"), "{html}");
        semaphore.set_rate("x", 3, Duration::from_secs(60)).await.unwrap();
        let html = page(&server, "/page/x").await;
        assert!(html.contains("data-window-ms=\"60000\""), "{html}");
    });
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
    let (status, set) = ask(&server, Method::PATCH, &path, "{\"limit\": 7}").await;
    assert_eq!((status, set), (StatusCode::OK, json!({ "limit": 7, "weight": null })));
    let (_, set) = ask(&server, Method::PATCH, &path, "{\"weight\": 3}").await;
    assert_eq!(set, json!({ "limit": 7, "weight": 3 }), "what is not named stays");
    for (body, allowed) in [("{\"weight\": 0}", "1 to 64"), ("{\"weight\": 65}", "1 to 64")] {
        let (status, problem) = ask(&server, Method::PATCH, &path, body).await;
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

    let (_, set) = ask(&server, Method::PATCH, &path, "{\"limit\": null}").await;
    assert_eq!(set, json!({ "limit": null, "weight": 3 }));
    ask(&server, Method::PATCH, &path, "{\"limit\": null, \"weight\": null}").await;
    let set = semaphore.tenant_override_of("openai", tenant).await.unwrap();
    assert_eq!((set.limit, set.weight), (None, None));
    drop(held);
}

#[tokio::test]
async fn further_limits_are_shown() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let policy = policy(9);
    let ask_for = |model: &str| Ask::of("llm").also("route", HOSTILE[0], 5).also("model", model, 1);
    let _held = semaphore.acquire(ask_for("opus"), &policy).await.unwrap();
    let _waits = semaphore.acquire(ask_for("opus"), &policy);
    let (_, seen) = ask(&server, Method::GET, "/semaphores/llm", "").await;
    let of = |name, value: &Name, cap| json!({ "name": name, "value": value.as_str(), "cap": cap, "set": { "limit": null }, "in_use": 1, "waiting": 1 });
    let limits = seen["further_limits"].as_array().unwrap();
    assert_eq!(limits.len(), 2, "{seen}");
    assert!(limits.contains(&of("route", &Name::new(HOSTILE[0]), 5)), "{seen}");
    assert!(limits.contains(&of("model", &Name::new("opus"), 1)), "{seen}");
    assert_eq!(seen["tenants"], json!([]), "no request has one");
    let html = page(&server, "/page/llm").await;
    assert!(html.contains("Further limits") && html.contains("opus"), "{html}");
    assert!(html.contains("&lt;script&gt;") && !html.contains("<script>alert"), "{html}");

    let value = Name::new(HOSTILE[0]);
    let path = format!("/semaphores/llm/limits/route/{}", segment(&value));
    let (status, set) = ask(&server, Method::PUT, &path, r#"{"limit":7}"#).await;
    assert_eq!((status, set), (StatusCode::OK, json!({ "limit": 7 })));
    let set = semaphore.further_limit_of("llm", "route", value.clone()).await.unwrap();
    assert_eq!(set, Some(7));
    let (_, all) = ask(&server, Method::GET, "/overrides", "").await;
    let one = json!({ "name": "llm", "further_limit": "route", "value": value.as_str(), "set": { "limit": 7 } });
    assert_eq!(all, json!({ "overrides": [], "tenants": [], "further_limits": [one] }));
    for at in ["/page/llm", "/page/"] {
        let html = page(&server, at).await;
        assert!(html.contains("cap 7") && html.contains("Clear cap"), "{html}");
        assert!(html.contains("&lt;script&gt;") && !html.contains("<script>alert"), "{html}");
    }
    let (_, set) = ask(&server, Method::DELETE, &path, "").await;
    assert_eq!(set, json!({ "limit": null }));
    assert_eq!(semaphore.further_limit_overrides().await.unwrap(), []);
}

#[tokio::test]
async fn each_tenant_is_shown_with_its_fair_share() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let asks = [("a", 3, None), ("b", 1, None), ("c", 2, Some(1))];
    let mut permits = Vec::new();
    for (tenant, weight, each) in asks {
        let ask = Ask::of("openai").by(tenant).weight(weight);
        let ask = if let Some(each) = each { ask.each(each) } else { ask };
        permits.push(semaphore.acquire(ask, &policy(8)).await.unwrap());
    }
    let share = |seen: &serde_json::Value, tenant: &str| {
        let tenants = seen["tenants"].as_array().unwrap().iter();
        tenants.clone().find(|one| one["name"] == tenant).unwrap()["fair_share"].clone()
    };
    let (_, seen) = ask(&server, Method::GET, "/semaphores/openai", "").await;
    let shares = ["a", "b", "c"].map(|tenant| share(&seen, tenant));
    assert_eq!(shares, [json!(5.25), json!(1.75), json!(1.0)], "{seen}");
    let html = page(&server, "/page/openai").await;
    assert!(html.contains(">Fair share</th>"), "{html}");
    assert!(html.contains(">5.2<") || html.contains(">5.3<"), "{html}");
    assert!(html.contains(">1.8<") && html.contains(">1.0<"), "{html}");
    // Of the limit that the pause hides.
    semaphore.pause("openai").await.unwrap();
    let (_, seen) = ask(&server, Method::GET, "/semaphores/openai", "").await;
    assert_eq!((&seen["limit"], share(&seen, "a")), (&json!(0), json!(5.25)), "{seen}");
}

#[tokio::test]
async fn the_page_lists_the_longest_held_permit_first_and_says_when_plots_are_recorded() {
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let long = Policy::builder(2).lease(Duration::from_secs(60)).build().unwrap();
    let first = semaphore.acquire("x", &long).await.unwrap();
    tokio::time::sleep(Duration::from_millis(20)).await;
    let second = semaphore.acquire("x", &policy(2)).await.unwrap();
    // By the ends of their leases, they would be in the other order.
    let seen = semaphore.inspect("x").await.unwrap();
    assert!(seen.holders[0].held < seen.holders[1].held, "{seen:?}");
    let html = page(&server, "/page/x").await;
    let (_, holders) = html.split_once("id=\"holders\"").unwrap();
    let at = |i: usize| holders.find(&format!("place-{}", seen.holders[i].id)).unwrap();
    assert!(at(1) < at(0), "{holders}");
    assert!(html.contains("Recorded while somebody has this page open"), "{html}");
    drop((first, second));
}

#[tokio::test]
async fn what_another_site_can_send_changes_nothing() {
    let redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let server = window(&semaphore).await;
    let changes = [
        (Method::PUT, "/limit"),
        (Method::DELETE, "/limit"),
        (Method::PUT, "/rate"),
        (Method::DELETE, "/rate"),
        (Method::POST, "/pause"),
        (Method::POST, "/resume"),
        (Method::POST, "/drain"),
        (Method::PATCH, "/tenants/t"),
        (Method::PUT, "/limits/route/v"),
        (Method::DELETE, "/limits/route/v"),
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
        (Method::GET, "/semaphores/a%2Fb", "", "name is \"a/b\""),
        (Method::GET, "/semaphores?most=x", "", "most: "),
        (Method::GET, "/semaphores?most=1&most=2", "", "duplicate field `most`"),
        (Method::PUT, "/semaphores/x/limit", "", "\"limit\": N"),
        (Method::PUT, "/semaphores/x/limit", "{", "\"limit\": N"),
        (Method::PUT, "/semaphores/x/limit", "{}", "missing field `limit`"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":null}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":""}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":"5"}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":1.5}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":1,"weight":1}"#, "unknown field `weight`"),
        (Method::PATCH, "/semaphores/x/tenants/t", "", "\"limit\": N, \"weight\": M"),
        (Method::PATCH, "/semaphores/x/tenants/t", "{}", "or one of them"),
        (Method::PATCH, "/semaphores/x/tenants/t", r#"{"limit":-1}"#, "0 to 4294967295"),
        (Method::PATCH, "/semaphores/x/tenants/t", r#"{"limit":1,"weight":0}"#, "1 to 64"),
        (Method::PATCH, "/semaphores/x/tenants/t", r#"{"weight":""}"#, "1 to 64"),
        (Method::PATCH, "/semaphores/x/tenants/t", r#"{"cap":1}"#, "unknown field `cap`"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":-1}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limit", r#"{"limit":4294967296}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limits/route/v", r#"{"limit":-1}"#, "0 to 4294967295"),
        (Method::PUT, "/semaphores/x/limits/route/a%2Fb", r#"{"limit":1}"#, "name is \"a/b\""),
        (Method::PUT, "/semaphores/x/rate", r#"{"starts":1}"#, "missing field `window_ms`"),
        (Method::PUT, "/semaphores/x/rate", r#"{"starts":0,"window_ms":1}"#, "N from 1"),
        (
            Method::PUT,
            "/semaphores/x/rate",
            r#"{"starts":1,"window_ms":0}"#,
            "M from 1 to 86400000",
        ),
        (Method::PUT, "/semaphores/x/rate", r#"{"starts":1,"window_ms":86400001}"#, "M from 1 to"),
        (Method::PUT, "/semaphores/x/rate", r#"{"starts":9000,"window_ms":10}"#, "4000 in 10 ms"),
        (Method::POST, "/semaphores/x/drain", r#"{"timeout_ms":60001}"#, "0 to 60000"),
        (Method::DELETE, "/semaphores/x/permits/1", "", "id is \"1\""),
    ];
    for (method, path, body, detail) in wrong {
        let (status, problem) = ask(&server, method, path, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {body}");
        assert!(problem["detail"].as_str().unwrap().contains(detail), "{path}: {problem}");
    }
    assert_eq!(semaphore.overrides().await.unwrap(), []);
    assert_eq!(semaphore.tenant_overrides().await.unwrap(), []);
    assert_eq!(semaphore.further_limit_overrides().await.unwrap(), []);
    let response = server.get("/ops/page/%3Cscript%3E").await;
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let html = text(response).await;
    assert!(html.contains("name is &quot;&lt;script&gt;&quot;"), "{html}");
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
        let url = segment(&name);
        assert!(all.contains(&format!("href=\"ops/page/{url}\"")), "{name}: {all}");
        let one = page(&server, &format!("/page/{url}")).await;
        assert!(one.contains(&format!("data-url=\"../semaphores/{url}/pause\"")), "{name}: {one}");
        for html in [&all, &one] {
            assert!(!html.contains("<script>") && !html.contains("<img"), "{html}");
            assert!(!html.contains("style="), "nothing inline: {html}");
        }
    }
}

#[tokio::test]
async fn while_redis_is_away_the_page_says_so() {
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let server = window(&semaphore).await;
    redis.kill();
    for path in ["/semaphores", "/semaphores/x", "/overrides"] {
        let response = server.get(&format!("/ops{path}")).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        assert!(text(response).await.contains("Redis"), "{path}");
    }
    for path in ["", "/page/", "/page/x"] {
        let response = server.get(&format!("/ops{path}")).await;
        assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE, "{path}");
        let html = text(response).await;
        let (_, problem) =
            html.split_once("<p id=\"problem\" role=\"alert\">").expect("the reason");
        assert!(problem.contains("Redis") && html.contains("admin.js"), "{path}: {html}");
    }
}

#[tokio::test]
async fn the_limit_in_force_is_told_where_nobody_waits() {
    let redis = TestRedis::start();
    let (own, other) = (redis.semaphore(), redis.semaphore());
    let server = window(&own).await;
    let held = other.acquire("x", &policy(3)).await.unwrap();
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    assert_eq!(seen["waiting"], 0);
    assert_eq!((&seen["limit"], &seen["set"]["limit"]), (&json!(3), &json!(null)), "{seen}");

    own.set_limit("x", 7).await.unwrap();
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    assert_eq!((&seen["limit"], &seen["set"]["limit"]), (&json!(7), &json!(7)));
    own.pause("x").await.unwrap();
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    assert_eq!((&seen["limit"], &seen["set"]["mode"]), (&json!(0), &json!("paused")));
    own.resume("x").await.unwrap();
    own.clear_limit("x").await.unwrap();

    // If no process holds, it is the last limit that this process used.
    drop(held);
    drop(own.acquire("x", &policy(4)).await.unwrap());
    eventually("its record is gone", async || own.health().semaphores == 0).await;
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    let limits = [&seen["in_use"], &seen["limit"], &seen["last_limit"]];
    assert_eq!(limits, [&json!(0), &json!(null), &json!(4)], "{seen}");
    let html = page(&server, "/page/x").await;
    assert!(
        html.contains("id=\"limit\">4<") && html.contains("of the last request here"),
        "{html}"
    );
}

#[tokio::test]
async fn each_process_tells_what_it_refused_and_lost() {
    let redis = TestRedis::start();
    let (own, other) = (redis.semaphore(), redis.semaphore());
    let server = window(&own).await;
    let held = other.acquire("x", &policy(2)).await.unwrap();
    let second = other.acquire("x", &policy(2)).await.unwrap();
    for _ in 0..3 {
        other.try_acquire("x", &policy(2)).await.unwrap_err();
    }
    own.try_acquire("x", &policy(0)).await.unwrap_err();
    own.revoke("x", own.inspect("x").await.unwrap().holders[0].id).await.unwrap();
    tokio::select! {
        () = held.lost() => {}
        () = second.lost() => {}
    }
    let (_, seen) = ask(&server, Method::GET, "/semaphores/x", "").await;
    let mut processes = seen["processes"].as_array().unwrap().clone();
    processes.sort_by_key(|process| process["is_own"].as_bool());
    let numbers = |process: &serde_json::Value| {
        ["in_use", "waiting", "limit", "refused", "lost"].map(|field| process[field].clone())
    };
    let [told, here] = &processes[..] else { panic!("{seen}") };
    assert_eq!(numbers(told), [json!(1), json!(0), json!(2), json!(3), json!(1)], "{seen}");
    assert_eq!(numbers(here), [json!(0), json!(0), json!(null), json!(1), json!(0)], "{seen}");
    let html = page(&server, "/page/x").await;
    assert!(html.contains("id=\"refused\">4<") && html.contains("id=\"lost\">1<"), "{html}");
}
