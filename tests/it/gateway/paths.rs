//! Paths: rules match the normal form, and the upstream receives it.

use super::{echoing, seen};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_spelling_of_a_path_gets_around_its_rule() {
    let gateway = echoing(&["--prefix", "/v1/chat", "--limit", "0"]).await;
    for path in [
        "/v1/chat",
        "/v1/chat/",
        "/v1/chat?x=/other",
        "/v1/%63hat",
        "/v1/ch%61t/completions",
        "//v1/chat",
        "/v1//chat",
        "/./v1/./chat",
        "/x/../v1/chat",
        "/v1/x/%2e%2e/chat",
        "/../v1/chat/x",
        "http://a/v1/%63hat",
    ] {
        let (status, _) = seen(&gateway, &format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        assert_eq!(status, 429, "{path}");
    }
    for (path, normal) in [
        ("/v1/chats", "/v1/chats"),
        ("/v1/chat/../x", "/v1/x"),
        ("/v1/chat%2Fx", "/v1/chat%2fx"),
        ("/x//y/?q=//%63", "/x/y/?q=//%63"),
        ("/v1", "/v1"),
    ] {
        let (status, head) =
            seen(&gateway, &format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        assert_eq!(status, 200, "{path}");
        assert!(head.starts_with(&format!("get {normal} http/1.1\r\n")), "{path}: {head}");
    }
    for path in ["/%zz", "/%4", "chat", "ftp://a/x", "*"] {
        let (status, _) = seen(&gateway, &format!("GET {path} HTTP/1.1\r\nhost: a\r\n\r\n")).await;
        assert_eq!(status, 400, "{path}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefix_is_normal_as_paths_are() {
    let gateway = echoing(&["--prefix", "/v1//%63hat", "--limit", "0"]).await;
    assert_eq!(seen(&gateway, "GET /v1/chat HTTP/1.1\r\nhost: a\r\n\r\n").await.0, 429);
    assert_eq!(seen(&gateway, "GET /v1/cat HTTP/1.1\r\nhost: a\r\n\r\n").await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn options_of_the_whole_server_are_counted_and_passed() {
    let gateway = echoing(&["--limit", "0"]).await;
    assert_eq!(seen(&gateway, "OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n").await.0, 429);
    let gateway = echoing(&["--limit", "9"]).await;
    let (status, head) = seen(&gateway, "OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(status, 200);
    assert!(head.starts_with("options * http/1.1\r\n"), "{head}");
}
