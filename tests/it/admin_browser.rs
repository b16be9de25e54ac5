//! The operator's page in a browser: it stays up to date, says what it cannot show, and does what was confirmed and
//! nothing else.

use std::time::Duration;

use axum::Router;
use serde_json::Value;
use tower_semaphore::operate::{Mode, TenantChange};
use tower_semaphore::{Ask, Name, Policy, Semaphore, admin};

use crate::support::admin::{HOSTILE, policy, segment, window};
use crate::support::browser::Browser;
use crate::support::eventually;
use crate::support::http::Server;
use crate::support::redis::TestRedis;

/// Waits until the page shows this number of holders and of waiters.
async fn numbers(browser: &mut Browser, in_use: u64, waiting: u64) {
    let shown = "['in-use', 'waiting'].map(id => document.getElementById(id)?.textContent).join()";
    browser.wait_for(&format!("{shown} === '{in_use},{waiting}'")).await;
}

const IS_OPEN: &str = "document.getElementById('ask').open";

/// Clicks a button, and waits for its question.
async fn click(browser: &mut Browser, button: &str) {
    browser.click(button).await;
    browser.wait_for(IS_OPEN).await;
}

/// Fills in the field of the question, and confirms it.
async fn answer(browser: &mut Browser, text: &str) {
    let text = Value::from(text);
    browser.eval(&format!("document.getElementById('ask-number').value = {text}")).await;
    browser.eval("document.getElementById('ask-confirm').click()").await;
}

async fn confirm(browser: &mut Browser) {
    browser.eval("document.getElementById('ask-confirm').click()").await;
}

/// Returns what the page says of the last action.
async fn told(browser: &mut Browser, text: &str) {
    let text = Value::from(text);
    browser
        .wait_for(&format!("document.getElementById('told').textContent.includes({text})"))
        .await;
}

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
    assert_eq!(browser.eval("document.getElementById('limit').textContent").await, "1");
    drop(held);
    numbers(&mut browser, 1, 0).await;
    drop(wait.await.unwrap().unwrap());
    numbers(&mut browser, 0, 0).await;
    // One point came with the page, and one more with each update; the limit is beside it.
    let points = |line| {
        format!(
            "document.querySelector('polyline.{line}').getAttribute('points').split(' ').length > 2"
        )
    };
    browser.wait_for(&points("value")).await;
    browser.wait_for(&points("limit")).await;
    assert_eq!(browser.eval("document.getElementById('stale').hidden").await, true);
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
    for (button, mode) in
        [("Pause", Mode::Paused), ("Drain", Mode::Draining), ("Resume", Mode::Open)]
    {
        click(&mut browser, button).await;
        let title = browser.eval("document.getElementById('ask-title').textContent").await;
        assert_eq!(title, format!("{button} {name}?"));
        confirm(&mut browser).await;
        set(mode, None).await;
        told(&mut browser, &format!("Done: {button}")).await;
    }
    click(&mut browser, "Set limit").await;
    answer(&mut browser, "2").await;
    set(Mode::Open, Some(2)).await;
    let second = wait.await.unwrap().unwrap();
    numbers(&mut browser, 2, 0).await;
    click(&mut browser, "Clear limit").await;
    confirm(&mut browser).await;
    set(Mode::Open, None).await;

    drop(second);
    numbers(&mut browser, 1, 0).await;
    click(&mut browser, "Revoke").await;
    confirm(&mut browser).await;
    held.lost().await;
    numbers(&mut browser, 0, 0).await;
    assert_eq!(browser.dialogs, [""; 0], "of the browser's own there is none");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_no_number_in_range_sets_nothing() {
    let Some(mut browser) = Browser::start().await else { return };
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let tenant = Name::new(HOSTILE[0]);
    let asked = Ask::of("x").by(tenant.clone());
    let rated = Policy::builder(2).rate(9, Duration::from_secs(60)).build().unwrap();
    let _held = semaphore.acquire(asked, &rated).await.unwrap();
    browser.open(&server.url("/ops/page/x")).await;
    for (button, wrong, right) in [
        ("Set limit", &["", " ", "-1", "1.5", "4294967296", "many", "1e99"][..], "0"),
        ("Set rate", &["", "0", "-1", "1.5", "24000001"], "24000000"),
        ("Set cap", &["", "-1", "0.1", "4294967296"], "4294967295"),
        ("Set weight", &["", "0", "65", "-1", "1.5"], "64"),
    ] {
        for text in wrong {
            click(&mut browser, button).await;
            answer(&mut browser, text).await;
            // A question with an invalid answer stays open, with the browser's message about the field.
            let wrong = "!document.getElementById('ask-number').validity.valid";
            assert_eq!(browser.eval(&format!("{IS_OPEN} && {wrong}")).await, true, "{text:?}");
            browser.press("Escape").await;
            browser.wait_for(&format!("!{IS_OPEN}")).await;
            assert_eq!(browser.eval("document.getElementById('told').textContent").await, "");
            assert_eq!(semaphore.overrides().await.unwrap(), [], "{button}: {text:?}");
            assert_eq!(semaphore.tenant_overrides().await.unwrap(), [], "{button}: {text:?}");
        }
        click(&mut browser, button).await;
        browser.eval("document.getElementById('ask-cancel').click()").await;
        assert_eq!(semaphore.overrides().await.unwrap(), [], "{button}: cancelled");
        click(&mut browser, button).await;
        answer(&mut browser, right).await;
        told(&mut browser, &format!(": {right}")).await;
        match button {
            "Set limit" => {
                assert_eq!(semaphore.limit_of("x").await.unwrap().limit, Some(0));
                semaphore.clear_limit("x").await.unwrap();
            }
            "Set rate" => {
                let set = semaphore.limit_of("x").await.unwrap().rate.unwrap();
                assert_eq!((set.starts(), set.window()), (24_000_000, Duration::from_secs(60)));
                semaphore.clear_rate("x").await.unwrap();
            }
            "Set cap" => {
                let set = semaphore.tenant_override_of("x", tenant.clone()).await.unwrap();
                assert_eq!(set.limit, Some(u32::MAX));
                semaphore
                    .set_tenant("x", tenant.clone(), TenantChange::new().limit(None))
                    .await
                    .unwrap();
            }
            _ => {
                let set = semaphore.tenant_override_of("x", tenant.clone()).await.unwrap();
                assert_eq!(set.weight, Some(64));
            }
        }
        browser.eval("document.getElementById('told').textContent = ''").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_confirmed_is_revoked_though_the_table_moves() {
    let Some(mut browser) = Browser::start().await else { return };
    let redis = TestRedis::start();
    let (own, other) = (redis.semaphore(), redis.semaphore());
    let server = window(&own).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(other.acquire("x", &policy(9)).await.unwrap());
    }
    browser.open(&server.url("/ops/page/x")).await;
    numbers(&mut browser, 3, 0).await;
    let row = "document.querySelectorAll('#holders tbody tr')[1]";
    let id = browser.eval(&format!("{row}.cells[0].textContent")).await;
    let process = browser.eval(&format!("{row}.cells[1].textContent")).await;
    let (id, process) = (id.as_str().unwrap().to_owned(), process.as_str().unwrap().to_owned());
    assert!(process.ends_with(&format!(":{}", std::process::id())), "{process}");
    browser.eval(&format!("{row}.querySelector('button').click()")).await;
    browser.wait_for(IS_OPEN).await;
    let question =
        "['ask-title', 'ask-text'].map(id => document.getElementById(id).textContent).join(' ')";
    let question = browser.eval(question).await.as_str().unwrap().to_owned();
    assert!(question.contains(&id) && question.contains(&process), "{question}");

    // In any row: others come, and the one in question moves.
    let others: Vec<_> =
        futures_util::future::join_all((0..4).map(|_| own.acquire("x", &policy(9))))
            .await
            .into_iter()
            .map(Result::unwrap)
            .collect();
    numbers(&mut browser, 7, 0).await;
    let place = |holder: &tower_semaphore::operate::Holder| holder.id.to_string() == id;
    let seen = own.inspect("x").await.unwrap();
    assert!(seen.holders.iter().any(place));
    let shown = browser.eval("document.getElementById('ask-title').textContent").await;
    assert!(shown.as_str().unwrap().contains(&id), "{shown}");
    confirm(&mut browser).await;
    told(&mut browser, &format!("Done: Revoke place {id} of process {process}")).await;
    numbers(&mut browser, 6, 0).await;
    let seen = own.inspect("x").await.unwrap();
    assert!(!seen.holders.iter().any(place), "{seen:?}");
    eventually("one is lost", async || held.iter().any(tower_semaphore::Permit::is_lost)).await;
    assert_eq!(held.iter().filter(|permit| permit.is_lost()).count(), 1);
    assert!(!others.iter().any(tower_semaphore::Permit::is_lost));

    // It has ended meanwhile: the page says so, and revokes nothing else.
    let row = "[...document.querySelectorAll('#holders tbody tr')].find(row => !row.textContent.includes('this one'))";
    browser.eval(&format!("{row}.querySelector('button').click()")).await;
    browser.wait_for(IS_OPEN).await;
    held.clear();
    numbers(&mut browser, 4, 0).await;
    confirm(&mut browser).await;
    told(&mut browser, "Failed: Revoke place").await;
    told(&mut browser, "there is no place").await;
    assert!(!others.iter().any(tower_semaphore::Permit::is_lost));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_fetched_is_said_with_the_reason_and_the_age() {
    let Some(mut browser) = Browser::start().await else { return };
    let mut redis = TestRedis::start();
    let semaphore = redis.semaphore();
    let server = window(&semaphore).await;
    let held = semaphore.acquire("x", &policy(1)).await.unwrap();
    browser.open(&server.url("/ops/page/x")).await;
    numbers(&mut browser, 1, 0).await;
    let stale = "document.getElementById('stale')";
    assert_eq!(browser.eval(&format!("{stale}.hidden")).await, true);

    redis.kill();
    let reason = "document.getElementById('stale-reason').textContent";
    browser.wait_for(&format!("!{stale}.hidden && {reason}.includes('Redis')")).await;
    let age =
        "Number(/is (\\d+) s old/.exec(document.getElementById('stale-age').textContent)?.[1])";
    browser.wait_for(&format!("{age} >= 3")).await;
    // What was shown is still there.
    numbers(&mut browser, 1, 0).await;

    // A new request is reported as failed.
    click(&mut browser, "Pause").await;
    confirm(&mut browser).await;
    told(&mut browser, "Failed: Pause x: ").await;

    drop(held);
    redis.restart();
    browser.wait_for(&format!("{stale}.hidden")).await;
    numbers(&mut browser, 0, 0).await;

    // A page that was empty at first gets what comes later.
    redis.kill();
    browser.open(&server.url("/ops/page/y")).await;
    browser.wait_for("document.getElementById('problem')?.textContent.includes('Redis')").await;
    redis.restart();
    numbers(&mut browser, 0, 0).await;

    drop(server);
    browser.wait_for(&format!("{reason}.includes('the server cannot be reached')")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keyboard_is_enough() {
    let Some(mut browser) = Browser::start().await else { return };
    let semaphore = Semaphore::in_memory();
    let server = window(&semaphore).await;
    let _held = semaphore.acquire("x", &policy(2)).await.unwrap();
    browser.open(&server.url("/ops/page/x")).await;
    numbers(&mut browser, 1, 0).await;
    let focused = "document.activeElement?.firstChild?.textContent";
    tab_to(&mut browser, "Pause").await;
    // It keeps the focus while the page is updated.
    let held = semaphore.acquire("x", &policy(2)).await.unwrap();
    numbers(&mut browser, 2, 0).await;
    assert_eq!(browser.eval(focused).await, "Pause");
    browser.press("Enter").await;
    browser.wait_for(IS_OPEN).await;
    // An accidental Enter does nothing.
    assert_eq!(browser.eval(focused).await, "Cancel");
    browser.press("Enter").await;
    browser.wait_for(&format!("!{IS_OPEN}")).await;
    assert_eq!(browser.eval(focused).await, "Pause");
    assert_eq!(semaphore.limit_of("x").await.unwrap().mode, Mode::Open);
    browser.press("Enter").await;
    browser.wait_for(IS_OPEN).await;
    browser.press("Tab").await;
    assert_eq!(browser.eval("document.activeElement.id").await, "ask-confirm");
    browser.press("Enter").await;
    told(&mut browser, "Done: Pause x").await;
    assert_eq!(semaphore.limit_of("x").await.unwrap().mode, Mode::Paused);
    // The button is gone: the focus stays in the content.
    browser.wait_for("document.activeElement === document.getElementById('main')").await;
    drop(held);
}

async fn tab_to(browser: &mut Browser, button: &str) {
    for _ in 0..30 {
        browser.press("Tab").await;
        if browser.eval("document.activeElement?.firstChild?.textContent").await == button {
            return;
        }
    }
    panic!("no way to {button:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_of_another_site_shows_nothing() {
    let Some(mut browser) =
        Browser::start_with(&["--host-resolver-rules=MAP evil.example 127.0.0.1"]).await
    else {
        return;
    };
    let semaphore = Semaphore::in_memory();
    let _held = semaphore.acquire("a-secret", &policy(2)).await.unwrap();
    let app = Router::new().nest("/ops", admin::without_token(semaphore.clone()).build().unwrap());
    let server = Server::start(app).await;
    let url = format!("http://evil.example:{}/ops", server.address.port());
    browser.open(&url).await;
    browser.wait_for("document.body.textContent.includes('expected localhost')").await;
    assert_eq!(browser.eval("document.body.textContent.includes('a-secret')").await, false);
    // Its own script is on its own site.
    let change = "fetch('/ops/semaphores/a-secret/pause', \
                  { method: 'POST', headers: { 'x-semaphore-admin': '1' } })\
                  .then(response => { document.title = response.status; })\
                  .catch(() => { document.title = 'blocked'; })";
    browser.eval(change).await;
    browser.wait_for("['403', 'blocked'].includes(document.title)").await;
    assert_eq!(semaphore.limit_of("a-secret").await.unwrap().mode, Mode::Open);
}
