//! Access to the operator's page, and the paths below which it works: hosts, token, prefixes.

use axum::Router;
use bytes::Bytes;
use http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use http::{Request, StatusCode};
use http_body_util::Full;
use hyper::Response;
use hyper::body::Incoming;
use reqwest::Url;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tower_semaphore::operate::Mode;
use tower_semaphore::{Semaphore, admin};

use crate::support::eventually;
use crate::support::gateway::{Client, Gateway, Upstream};
use crate::support::http::{Server, curl, text};
use crate::support::redis::free_port;

const TOKEN: &str = "a-token-of-enough.bytes";

async fn get(server: &Server, path: &str, host: &str) -> Response<Incoming> {
    server.send(Request::get(path).header("host", host).body(Full::default()).unwrap()).await
}

/// Returns the response to exactly this text.
async fn status_of(server: &Server, request: &str) -> String {
    let mut socket = TcpStream::connect(server.address).await.unwrap();
    socket.write_all(request.as_bytes()).await.unwrap();
    let mut head = [0; 12];
    socket.read_exact(&mut head).await.unwrap();
    String::from_utf8_lossy(&head[9..]).into_owned()
}

#[tokio::test]
async fn a_host_that_is_not_allowed_is_rejected_on_every_route() {
    let semaphore = Semaphore::in_memory();
    let server = Server::start(admin::without_token(semaphore.clone()).build().unwrap()).await;
    for host in ["localhost", "localhost:80", "127.0.0.1:9", "[::1]:80", "a.localhost"] {
        assert_eq!(get(&server, "/", host).await.status(), StatusCode::OK, "{host}");
    }
    for host in ["evil.example", "localhost.evil.example:80", "10.0.0.1", "localhost@evil.example"]
    {
        for path in ["/", "/page/", "/page/x", "/admin.js", "/semaphores", "/overrides", "/nothing"]
        {
            let response = get(&server, path, host).await;
            assert_eq!(response.status(), StatusCode::FORBIDDEN, "{host} {path}");
            let csp = response.headers()["content-security-policy"].to_str().unwrap();
            assert!(csp.contains("default-src 'none'"), "{csp}");
            let body = text(response).await;
            assert!(body.contains("host is ") && body.contains("expected localhost"), "{body}");
        }
        let change = Request::put("/semaphores/x/limit")
            .header("host", host)
            .header("x-semaphore-admin", "1")
            .body(Full::from(r#"{"limit":0}"#))
            .unwrap();
        assert_eq!(server.send(change).await.status(), StatusCode::FORBIDDEN, "{host}");
    }
    assert_eq!(semaphore.overrides().await.unwrap(), []);
}

#[tokio::test]
async fn the_host_is_that_of_the_target_and_of_every_header() {
    let server = Server::start(admin::without_token(Semaphore::in_memory()).build().unwrap()).await;
    for (request, status) in [
        ("GET / HTTP/1.1\r\nhost: localhost\r\n\r\n", "200"),
        ("GET http://localhost/ HTTP/1.1\r\nhost: localhost\r\n\r\n", "200"),
        ("GET http://evil.example/ HTTP/1.1\r\nhost: localhost\r\n\r\n", "403"),
        ("GET / HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n\r\n", "403"),
        ("GET / HTTP/1.1\r\nhost: a b\r\n\r\n", "403"),
        ("GET / HTTP/1.1\r\nhost:\r\n\r\n", "403"),
        ("GET / HTTP/1.0\r\n\r\n", "403"),
    ] {
        assert_eq!(status_of(&server, request).await, status, "{request:?}");
    }
    let mut http2 = server.http2().await;
    for (host, status) in [("localhost", StatusCode::OK), ("evil.example", StatusCode::FORBIDDEN)] {
        let request =
            Request::get(format!("http://{host}/")).body(Full::<Bytes>::default()).unwrap();
        assert_eq!(http2.send_request(request).await.unwrap().status(), status, "{host}");
    }
}

#[tokio::test]
async fn more_hosts_can_be_allowed() {
    let semaphore = Semaphore::in_memory();
    let builder = admin::without_token(semaphore.clone())
        .allow_host("Ops.Example")
        .bound_to(([10, 0, 0, 7], 9090).into());
    let server = Server::start(builder.build().unwrap()).await;
    for host in ["ops.example", "OPS.example:8443", "10.0.0.7:9090", "localhost"] {
        assert_eq!(get(&server, "/", host).await.status(), StatusCode::OK, "{host}");
    }
    for host in ["x.ops.example", "ops.example.evil", "10.0.0.8"] {
        let response = get(&server, "/", host).await;
        assert_eq!(response.status(), StatusCode::FORBIDDEN, "{host}");
        let said = text(response).await;
        assert!(!said.contains("10.0.0.7"), "{said}");
    }
    let everywhere = admin::without_token(semaphore.clone()).bound_to(([0, 0, 0, 0], 9090).into());
    let server = Server::start(everywhere.build().unwrap()).await;
    assert_eq!(get(&server, "/", "10.0.0.8").await.status(), StatusCode::OK);
    assert_eq!(get(&server, "/", "ops.example").await.status(), StatusCode::FORBIDDEN);

    let error = admin::without_token(semaphore).allow_host("ops.example:80").build().unwrap_err();
    assert!(error.to_string().contains("without a port"), "{error}");
}

#[tokio::test]
async fn a_token_is_needed_where_one_is_set() {
    let semaphore = Semaphore::in_memory();
    let router = admin::with_token(semaphore.clone(), TOKEN).build().unwrap();
    let server = Server::start(router).await;
    let (bearer, wrong) = (format!("authorization: Bearer {TOKEN}"), format!("{TOKEN}x"));
    for args in
        [&["-H", &bearer][..], &["-u", &format!("anyone:{TOKEN}")], &["-u", &format!(":{TOKEN}")]]
    {
        assert_eq!(curl(&server.url("/"), args).await.status, 200, "{args:?}");
    }
    for args in [
        &[][..],
        &["-u", &format!("{TOKEN}:")],
        &["-u", &format!("anyone:{wrong}")],
        &["-u", &format!("anyone:{}", &TOKEN[1..])],
        &["-H", &format!("authorization: Bearer {wrong}")],
        &["-H", &format!("authorization: {TOKEN}")],
        &["-H", "authorization: Bearer"],
        &["-H", "authorization: Basic !"],
    ] {
        for path in ["/", "/admin.js", "/semaphores"] {
            let reply = curl(&server.url(path), args).await;
            assert_eq!(reply.status, 401, "{args:?}");
            let challenges: Vec<_> = reply.headers.get_all(WWW_AUTHENTICATE).iter().collect();
            assert!(challenges[0].to_str().unwrap().starts_with("Basic realm="), "{challenges:?}");
            assert!(challenges[1].to_str().unwrap().starts_with("Bearer"), "{challenges:?}");
            assert!(!reply.body.contains(TOKEN), "{}", reply.body);
        }
    }
    // A token does not replace the header that keeps other sites out, or the check of the host.
    let put = ["-X", "PUT", "-d", "{\"limit\": 1}", "-H", &bearer];
    assert_eq!(curl(&server.url("/semaphores/x/limit"), &put).await.status, 403);
    let marked = [&put[..], &["-H", "x-semaphore-admin: 1"]].concat();
    assert_eq!(curl(&server.url("/semaphores/x/limit"), &marked).await.status, 200);
    let evil = ["-H", &bearer, "-H", "host: evil.example"];
    assert_eq!(curl(&server.url("/"), &evil).await.status, 403);
    assert_eq!(semaphore.overrides().await.unwrap().len(), 1);

    let error = admin::with_token(semaphore, "secret").build().unwrap_err().to_string();
    assert!(error.contains("6 bytes") && !error.contains("secret"), "{error}");
}

/// All that a page links to exists below its path, and what its buttons send arrives.
async fn links_lead_somewhere(semaphore: &Semaphore, index: &str) {
    let client = Client::new();
    let index = Url::parse(index).unwrap();
    let page = async |url: &Url| {
        let (status, body) = client.send(Request::get(url.as_str())).await;
        assert_eq!(status, StatusCode::OK, "{url}");
        String::from_utf8(body.unwrap().into()).unwrap()
    };
    let all = page(&index).await;
    let mut names = 0;
    for link in links(&all) {
        assert!(!link.starts_with('/') && !link.contains(':'), "{link} is not relative");
        let url = index.join(link).unwrap();
        let content = page(&url).await;
        if !link.contains("page/tenant") {
            continue;
        }
        names += 1;
        assert!(content.contains("<h1><bdi>tenant:acme/eu</bdi></h1>"), "{content}");
        for link in links(&content) {
            page(&url.join(link).unwrap()).await;
        }
        let button = content.split("data-url=\"").nth(1).unwrap().split('"').next().unwrap();
        let url = url.join(button).unwrap();
        let request = Request::post(url.as_str()).header("x-semaphore-admin", "1");
        assert_eq!(client.send(request).await.0, StatusCode::OK, "{url}");
        assert_eq!(semaphore.limit_of(name()).await.unwrap().mode, Mode::Paused, "{url}");
        semaphore.resume(name()).await.unwrap();
    }
    assert_eq!(names, 1, "{all}");
}

fn name() -> tower_semaphore::Name {
    tower_semaphore::Name::new("tenant").part("acme/eu")
}

/// Returns what a document links to, except its own parts.
fn links(html: &str) -> impl Iterator<Item = &str> {
    let links = html.split(['"', ' ']).zip(html.split(['"', ' ']).skip(1));
    let links = links.filter(|(before, _)| ["href=", "src="].contains(before));
    links.map(|(_, link)| link).filter(|link| !link.starts_with('#'))
}

#[tokio::test]
async fn it_works_wherever_it_is_nested() {
    let semaphore = Semaphore::in_memory();
    let _held = semaphore.try_acquire(name(), &tower_semaphore::Policy::new(1)).await.unwrap();
    let router = || admin::without_token(semaphore.clone()).build().unwrap();
    for (app, path) in [
        (router(), "/"),
        (router(), "/page/"),
        (Router::new().nest("/ops/semaphores/", router()), "/ops/semaphores/"),
        (Router::new().nest("/ops/semaphores", router()), "/ops/semaphores"),
        (Router::new().nest_service("/ops/semaphores", router()), "/ops/semaphores"),
        (Router::new().nest_service("/ops/semaphores", router()), "/ops/semaphores/"),
        (Router::new().nest("/{anything}/ops", router()), "/x/ops"),
        (Router::new().nest("/{name}/ops", router()), "/x/ops"),
        (Router::new().nest_service("/{name}/{tenant}/{id}/ops", router()), "/x/y/z/ops/"),
    ] {
        let server = Server::start(app).await;
        links_lead_somewhere(&semaphore, &server.url(path)).await;
    }
}

#[tokio::test]
async fn it_works_behind_a_proxy_that_strips_a_prefix() {
    let semaphore = Semaphore::in_memory();
    let _held = semaphore.try_acquire(name(), &tower_semaphore::Policy::new(1)).await.unwrap();
    let inner = Server::start(admin::without_token(semaphore.clone()).build().unwrap()).await;
    let (base, client) = (inner.url(""), Client::new());
    let forward = move |request: Request<axum::body::Body>| {
        let (base, client) = (base.clone(), client.clone());
        async move {
            let path = request.uri().path().strip_prefix("/ops/semaphores").unwrap();
            let mut onward =
                Request::builder().method(request.method()).uri(format!("{base}{path}"));
            onward.headers_mut().unwrap().clone_from(request.headers());
            let (status, body) = client.send(onward).await;
            (status, body.unwrap())
        }
    };
    let proxy = Server::start(Router::new().fallback(forward)).await;
    links_lead_somewhere(&semaphore, &proxy.url("/ops/semaphores/")).await;
}

// ----- the gateway's -----

#[tokio::test]
async fn the_gateway_serves_it_on_loopback_and_for_its_hosts_alone() {
    let upstream = Upstream::start().await;
    let port = free_port().to_string();
    let args = ["--limit", "1", "--admin", &port, "--admin-host", "ops.example"];
    let _gateway = Gateway::start(&upstream.url(), &args);
    let client = Client::new();
    let url = format!("http://127.0.0.1:{port}/");
    eventually("it is there", async || client.try_get(&url).await.is_some()).await;
    for (host, status) in [
        ("127.0.0.1", StatusCode::OK),
        ("localhost", StatusCode::OK),
        ("ops.example", StatusCode::OK),
        ("evil.example", StatusCode::FORBIDDEN),
    ] {
        let request = Request::get(&url).header("host", format!("{host}:{port}"));
        assert_eq!(client.send(request).await.0, status, "{host}");
    }
}

#[tokio::test]
async fn the_gateway_needs_a_token_off_loopback() {
    let upstream = Upstream::start().await;
    let port = free_port();
    let address = format!("0.0.0.0:{port}");
    let args = ["--listen", "127.0.0.1:0", "--limit", "1", "--admin", &address];
    let url = upstream.url();
    let args = [&args[..], &["--upstream", &url]].concat();
    for (more, allowed) in
        [(&[][..], "--admin-token"), (&["--admin-token", "too-short"], "16 to 256")]
    {
        let output = Gateway::command().args(&args).args(more).output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{error}");
        assert!(error.contains(allowed) && !error.contains("too-short"), "{error}");
    }
    let args = [&args[..], &["--admin-token", TOKEN]].concat();
    let _gateway = Gateway::running(
        Gateway::command().args(&args).stderr(std::process::Stdio::null()).spawn().unwrap(),
    );
    let client = Client::new();
    let url = format!("http://127.0.0.1:{port}/");
    eventually("it is there", async || client.try_get(&url).await.is_some()).await;
    assert_eq!(client.get(&url).await, StatusCode::UNAUTHORIZED);
    let request = Request::get(&url).header(AUTHORIZATION, format!("Bearer {TOKEN}"));
    assert_eq!(client.send(request).await.0, StatusCode::OK);
}

#[tokio::test]
async fn what_the_gateway_says_of_itself_has_no_token_in_it() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let text =
        format!("admin = \"0.0.0.0:1\"\nadmin-token = \"hunter2\"\nadmin-host = [\"a\"]\n{RULE}");
    std::fs::write(file.path(), text).unwrap();
    let output = Gateway::command().arg("--config").arg(file.path()).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(error.contains("too short: it has 7 bytes") && !error.contains("hunter2"), "{error}");
}

const RULE: &str = "upstream = \"http://127.0.0.1:1\"\n[[rule]]\nlimit = 1\n";
