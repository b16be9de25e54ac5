//! Header fields and trailers: which of them the upstream receives, and which the client.

use std::time::Duration;

use tokio::net::TcpListener;

use super::requests::by_http2;
use super::{Stage, echoing, seen};
use crate::support::gateway::Gateway;
use crate::support::wire::Wire;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_beyond_ascii_keep_no_field_from_being_hop_by_hop() {
    let stage = Stage::start(&[]).await;
    let mut client = stage.client().await;
    let request = b"GET / HTTP/1.1\r\nhost: a\r\nx-hop: h\r\nconnection: x-hop, te, caf\xe9\r\n\
        te: trailers, \xff\r\n\r\n";
    client.send(request).await;
    let mut server = stage.upstream.accept().await;
    let head = server.head().await;
    assert!(!head.contains("x-hop"), "{head}");
    assert!(head.contains("\r\nte: trailers\r\n"), "{head}");
    server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);

    // HTTP/2 inside such a tunnel would not be counted.
    for upgrade in [&b"h2c, \xff"[..], b"\xff, h2c", b"caf\xe9"] {
        let request = [
            b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: ",
            upgrade,
            b"\r\n\r\n",
        ];
        let mut client = stage.client().await;
        client.send(request.concat()).await;
        let mut server = stage.upstream.accept().await;
        let head = server.head().await;
        assert!(!head.contains("upgrade"), "{head}");
        server.send("HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n").await;
        assert_eq!(client.status().await.0, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_with_thousands_of_members_is_rejected() {
    let stage = Stage::start(&[]).await;
    let mut client = stage.client().await;
    let many = vec!["a"; 30_000].join(",");
    client.send(format!("GET / HTTP/1.1\r\nhost: a\r\nconnection: {many}\r\n\r\n")).await;
    assert_eq!(client.status().await.0, 400);
    assert!(stage.upstream.is_left_alone().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_absolute_target_without_a_path_is_the_root() {
    let gateway = echoing(&["--limit", "9"]).await;
    for (target, path) in [("http://h?x=1", "/?x=1"), ("http://h", "/"), ("http://h/?", "/?")] {
        let (status, head) =
            seen(&gateway, &format!("GET {target} HTTP/1.1\r\nhost: h\r\n\r\n")).await;
        assert_eq!(status, 200, "{target}");
        assert!(head.starts_with(&format!("get {path} http/1.1\r\n")), "{target}: {head}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_426_names_the_protocol_that_is_required() {
    let stage = Stage::start(&[]).await;
    let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    server
        .send(
            "HTTP/1.1 426 Upgrade Required\r\nconnection: upgrade\r\nupgrade: toy/1\r\n\
             content-length: 0\r\n\r\n",
        )
        .await;
    let (status, head) = client.status().await;
    assert_eq!(status, 426);
    assert!(head.contains("\r\nupgrade: toy/1\r\n"), "{head}");
    assert!(head.contains("\r\nconnection: upgrade\r\n"), "{head}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_may_have_more_than_a_hundred_fields() {
    let stage = Stage::start(&[]).await;
    for count in [100, 300] {
        let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
        let fields: String = (0..count).map(|i| format!("x-field-{i}: {i}\r\n")).collect();
        let close = "connection: close\r\ncontent-length: 0\r\n\r\n";
        server.send(format!("HTTP/1.1 200 OK\r\n{fields}{close}")).await;
        let (status, head) = client.status().await;
        assert_eq!(status, 200);
        assert_eq!(head.matches("x-field-").count(), count);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_response_over_http2_may_have_a_large_head() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let upstream = format!("h2c://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut connection = h2::server::handshake(socket).await.unwrap();
                while let Some(Ok((_, mut respond))) = connection.accept().await {
                    let mut response = http::Response::builder();
                    for i in 0..300 {
                        response = response.header(format!("x-field-{i}"), "v".repeat(100));
                    }
                    respond.send_response(response.body(()).unwrap(), true).unwrap();
                }
            });
        }
    });
    let gateway = Gateway::start(&upstream, &["--limit", "9"]);
    let mut client = Wire::connect(gateway.url()).await;
    client.send("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let (status, head) = client.status().await;
    assert_eq!(status, 200);
    assert_eq!(head.matches("x-field-").count(), 300);
}

const EXPECTS: &str =
    "PUT / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_upstream_decides_whether_a_body_is_sent() {
    let stage = Stage::start(&[]).await;
    let (mut client, mut server, head) = stage.ask(EXPECTS).await;
    assert!(head.contains("\r\nexpect: 100-continue\r\n"), "{head}");
    assert_eq!(client.glimpse().await, "", "the upstream has not answered yet");
    server.send("HTTP/1.1 100 Continue\r\n\r\n").await;
    assert_eq!(client.status().await.0, 100);
    client.send("hello").await;
    assert_eq!(server.bytes(5).await, "hello");
    server.send("HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
    assert_eq!(client.status().await.0, 204);

    // A refusal is passed on as it is; neither connection is used for another request.
    let (mut client, mut server, _) = stage.ask(EXPECTS).await;
    server.send("HTTP/1.1 413 Content Too Large\r\ncontent-length: 2\r\n\r\nno").await;
    assert_eq!(client.status().await.0, 413);
    assert_eq!(client.bytes(2).await, "no");
    assert_eq!(client.rest().await, "");
    assert_eq!(server.rest().await, "");

    // A queued or rejected request is not asked for its body either.
    let (_held, _server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    let mut client = stage.client().await;
    client.send(EXPECTS).await;
    assert_eq!(client.status().await.0, 429);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_upstream_that_ignores_expect_gets_the_body_after_a_moment() {
    let stage = Stage::start(&[]).await;
    let (mut client, mut server, _) = stage.ask(EXPECTS).await;
    assert_eq!(client.status().await.0, 100);
    client.send("hello").await;
    assert_eq!(server.bytes(5).await, "hello");
    // A client that does not wait is served, too.
    server.send("HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
    assert_eq!(client.status().await.0, 204);
    let (mut client, mut server, _) = stage.ask(&format!("{EXPECTS}hello")).await;
    assert_eq!(server.bytes(5).await, "hello");
    server.send("HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
    let status = async |client: &mut Wire| client.status().await.0;
    let mut found = status(&mut client).await;
    if found == 100 {
        found = status(&mut client).await;
    }
    assert_eq!(found, 204);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trailers_add_no_field_that_a_rule_or_a_proxy_stands_for() {
    let stage = Stage::start(&["--key", "header:x-tenant"]).await;
    let request = "POST / HTTP/1.1\r\nhost: a\r\nx-tenant: t\r\ntransfer-encoding: chunked\r\n\
        trailer: x-tenant, x_tenant, x-forwarded-for, x-note\r\n\r\n";
    let (mut client, mut server, head) = stage.ask(request).await;
    assert!(head.contains("\r\nx-tenant: t\r\n"), "{head}");
    client
        .send(
            "5\r\nhello\r\n0\r\nx-tenant: evil\r\nx_tenant: evil\r\nx-forwarded-for: evil\r\n\
             x-note: fine\r\n\r\n",
        )
        .await;
    let body = server.glimpse().await;
    assert!(body.contains("x-note: fine"), "{body}");
    assert!(body.ends_with("\r\n\r\n") && !body.contains("evil"), "{body}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_name_that_an_upstream_may_take_for_the_key_is_removed() {
    let gateway = echoing(&["--limit", "9", "--key", "header:x-tenant"]).await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nx-tenant: t\r\nX_Tenant: evil\r\nx.tenant: evil\r\n\
        x_forwarded_for: evil\r\ntransfer_encoding: evil\r\nx_other: fine\r\n\r\n";
    let (status, head) = seen(&gateway, request).await;
    assert_eq!(status, 200);
    assert!(
        head.contains("\r\nx-tenant: t\r\n") && head.contains("\r\nx_other: fine\r\n"),
        "{head}"
    );
    assert!(!head.contains("evil"), "{head}");
    // Nor is it a key.
    let request = "GET / HTTP/1.1\r\nhost: a\r\nX_Tenant: t\r\n\r\n";
    assert_eq!(seen(&gateway, request).await.0, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_usual_name_is_removed_too_where_a_rule_reads_an_unusual_one() {
    let stage = Stage::start(&["--key", "header:x_tenant"]).await;
    let request = "POST / HTTP/1.1\r\nhost: a\r\nx_tenant: t\r\nX-Tenant: evil\r\nx.tenant: evil\r\n\
        x-other: fine\r\ntransfer-encoding: chunked\r\ntrailer: x-tenant, x_tenant, x-note\r\n\r\n";
    let (mut client, mut server, head) = stage.ask(request).await;
    assert!(
        head.contains("\r\nx_tenant: t\r\n") && head.contains("\r\nx-other: fine\r\n"),
        "{head}"
    );
    assert!(!head.contains("evil"), "{head}");
    client.send("0\r\nx-tenant: evil\r\nx_tenant: evil\r\nx-note: fine\r\n\r\n").await;
    let body = server.glimpse().await;
    assert!(body.contains("x-note: fine") && !body.contains("evil"), "{body}");

    // What HTTP and proxies need stays, whatever a rule reads.
    let gateway = echoing(&["--limit", "9", "--key", "header:x_forwarded_for"]).await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nx_forwarded_for: evil\r\n\
        x-forwarded-for: 192.0.2.1\r\n\r\n";
    let (_, head) = seen(&gateway, request).await;
    assert!(head.contains("\r\nx-forwarded-for: 192.0.2.1, 127.0.0.1\r\n"), "{head}");
    assert!(!head.contains("evil"), "{head}");
}

#[test]
fn two_spellings_of_one_field_are_refused() {
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("gateway.toml");
    let rule = |name: &str, key: &str| {
        format!(
            "[[rule]]\nname = \"{name}\"\nlimit = 1\nprefix = \"/{name}\"\nkey = \"header:{key}\"\n"
        )
    };
    // It could not listen there.
    let common = "listen = \"192.0.2.1:0\"\nupstream = \"http://127.0.0.1:1\"\n";
    std::fs::write(&file, [common, &rule("a", "x-tenant"), &rule("b", "x_tenant")].concat())
        .unwrap();
    let flags = ["--upstream", "http://127.0.0.1:1", "--listen", "192.0.2.1:0", "--limit", "1"];
    let spelled = ["--key", "header:x-tenant", "--fair-by", "header:x_tenant"];
    for (args, place) in [
        (vec!["--config", file.to_str().unwrap()], "gateway.toml:12: key: "),
        ([&flags[..], &spelled].concat(), "--fair-by: "),
    ] {
        let output = Gateway::command().args(&args).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        let what = "the header x_tenant is x-tenant to many servers; expected one spelling";
        assert!(said.contains(&format!("{place}{what}")), "{said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_field_that_decides_has_one_value() {
    let decides = ["--key", "header:x-tenant", "--fair-by", "header:x-user", "--limit", "9"];
    let missing = ["--missing-key", "bypass", "--missing-tenant", "shared", "--prefix", "/v1"];
    let gateway = echoing(&[&decides[..], &missing].concat()).await;
    let ask = async |path: &str, fields: &str| {
        let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\n{fields}\r\n");
        seen(&gateway, &request).await
    };
    for (name, fields) in [
        ("x-tenant", "x-tenant: mine\r\nx-tenant: banned\r\nx-user: u\r\n"),
        ("x-tenant", "x-tenant: mine\r\nX-Tenant: mine\r\nx-user: u\r\n"),
        ("x-user", "x-tenant: mine\r\nx-user: u\r\nx-user: v\r\n"),
    ] {
        let (status, body) = ask("/v1", fields).await;
        assert_eq!(status, 400, "{fields}: {body}");
        assert!(body.contains(&format!("{name}: more than one value")), "{body}");
    }
    assert_eq!(
        ask("/v1", "x-tenant: mine\r\nx-user: u\r\nx-note: 1\r\nx-note: 2\r\n").await.0,
        200
    );
    // If no rule reads it, it may have several.
    assert_eq!(ask("/v2", "x-tenant: mine\r\nx-tenant: other\r\n").await.0, 200);

    // In another version as well.
    let limits = ["--key", "header:x-tenant", "--cost", "header:x-units", "--limit", "9"];
    let gateway = echoing(&limits).await;
    for (fields, status) in [(&["x-tenant"; 2] as &[_], 400), (&["x-tenant"], 200)] {
        let request = http::Request::get("http://a/");
        let request = fields.iter().fold(request, |request, name| request.header(*name, "1"));
        assert_eq!(by_http2(&gateway, request).await.0, status, "{fields:?}");
    }

    // In shadow every request passes.
    let gateway = echoing(&["--limit", "9", "--key", "header:x-tenant", "--shadow"]).await;
    let request = "GET / HTTP/1.1\r\nhost: a\r\nx-tenant: a\r\nx-tenant: b\r\n\r\n";
    assert_eq!(seen(&gateway, request).await.0, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_to_the_upstream_are_closed() {
    let stage = Stage::start(&["--upstream-idle-timeout", "300ms"]).await;
    let (mut client, mut server, _) = stage.ask("GET / HTTP/1.1\r\nhost: a\r\n\r\n").await;
    server.send("HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").await;
    assert_eq!(client.status().await.0, 200);
    tokio::time::timeout(Duration::from_secs(5), server.rest()).await.expect("it is closed");
}
