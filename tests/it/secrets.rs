//! A server's error may contain what it received: no error and no log shows the password.
//!
//! For URLs that cannot be used, see `url.rs`.

use std::error::Error;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tower_semaphore::backend::RedisBackend;
use tower_semaphore::{AcquireError, Policy, Semaphore};

use crate::support::redis::TestRedis;
use crate::support::told::Told;

const PASSWORD: &str = "hunter2-tr0ub4dor";

/// Returns everything that is visible of a request that is not served.
async fn shown(url: String) -> String {
    let told = Told::new();
    let semaphore = Semaphore::new(RedisBackend::builder(url).build().unwrap());
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(5)).build().unwrap();
    let error = match semaphore.acquire("x", &policy).await {
        Err(error @ AcquireError::Unavailable(_)) => error,
        other => panic!("expected that Redis cannot be asked, but: {other:?}"),
    };
    let mut shown = format!("{semaphore:?} {:?}", semaphore.health());
    let mut error: Option<&dyn Error> = Some(&error);
    while let Some(one) = error {
        shown += &format!("\n{one} {one:?} {one:#?}");
        error = one.source();
    }
    semaphore.shutdown().await;
    shown + &format!("{:?} {:?}", told.events(), told.spans())
}

/// A server that answers everything with an error that contains all of it, except the password, of which it has the
/// first bytes. Ends with its runtime.
async fn echo(length: usize) -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut bytes = vec![0; 4096];
                while let Ok(n @ 1..) = stream.read(&mut bytes).await {
                    let text = String::from_utf8_lossy(&bytes[..n]).replace("\r\n", " ");
                    let text = text.replace(PASSWORD, &PASSWORD[..length]);
                    let answer = format!("-ERR what is this: {text}\r\n").repeat(8);
                    if stream.write_all(answer.as_bytes()).await.is_err() {
                        break;
                    }
                }
            });
        }
    });
    port
}

#[tokio::test]
async fn a_server_without_hello_gives_no_password_away() {
    // It repeats what it did not understand, including arguments.
    let redis = TestRedis::start_with(&["--rename-command", "HELLO", ""]);
    for user in ["", "default"] {
        let url = format!("redis://{user}:{PASSWORD}@127.0.0.1:{}/", redis.port());
        let shown = shown(url).await;
        assert!(!shown.contains(PASSWORD), "{shown}");
        assert!(shown.contains("unknown command 'HELLO'; Redis 6.2 or later"), "{shown}");
    }
}

#[tokio::test]
async fn a_server_that_repeats_all_gives_no_password_away() {
    for length in [PASSWORD.len(), 10] {
        let port = echo(length).await;
        for url in [
            format!("redis://user:{PASSWORD}@127.0.0.1:{port}/"),
            format!("redis://{PASSWORD}@127.0.0.1:{port}/"),
            format!("redis-cluster://user:{PASSWORD}@127.0.0.1:{port}"),
            format!("redis-sentinel://127.0.0.1:{port}/m?sentinel_password={PASSWORD}"),
        ] {
            let shown = shown(url.clone()).await;
            assert!(!shown.contains(&PASSWORD[..length]), "{url}: {shown}");
            assert!(shown.contains("could not be reached"), "{url}: {shown}");
        }
    }
}

#[tokio::test]
async fn what_a_server_says_is_shown_if_no_password_is_in_it() {
    let redis = TestRedis::start();
    redis.command::<()>(&["CONFIG", "SET", "requirepass", "another"]);
    let shown = shown(format!("redis://:{PASSWORD}@127.0.0.1:{}/", redis.port())).await;
    assert!(shown.contains("invalid username-password pair"), "{shown}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_named() {
    let port = crate::support::redis::free_port();
    let shown = shown(format!("redis://user:{PASSWORD}@127.0.0.1:{port}/")).await;
    assert!(shown.contains(&format!("Redis at 127.0.0.1:{port} could not be reached")), "{shown}");
    assert!(!shown.contains(PASSWORD), "{shown}");
    assert!(!shown.contains("user:"), "{shown}");
}
