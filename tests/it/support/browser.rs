//! A real headless browser, controlled over the DevTools protocol.
//!
//! Of that protocol five methods are needed, over a WebSocket. The crates for it bring all of its thousand, and minutes
//! of compiling.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

const PATIENCE: Duration = Duration::from_secs(60);

/// One page in a browser of its own, which is ended when this is dropped.
pub(crate) struct Browser {
    _process: Child,
    _home: tempfile::TempDir,
    socket: WebSocketStream<MaybeTlsStream<TcpStream>>,
    session: String,
    calls: u64,
    /// The kinds of all dialogs of the browser itself: `alert`, `confirm`, `prompt`.
    pub(crate) dialogs: Vec<String>,
}

impl Browser {
    /// Returns `None`, and prints why, if there is none in the PATH.
    pub(crate) async fn start() -> Option<Self> {
        Self::start_with(&[]).await
    }

    /// The same, with more arguments.
    pub(crate) async fn start_with(args: &[&str]) -> Option<Self> {
        let Some(program) = program() else {
            println!(
                "skipped: there is no chromium, chromium-browser or google-chrome in the PATH"
            );
            return None;
        };
        let home = tempfile::tempdir().unwrap();
        let mut process = Command::new(program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"])
            .args(["--no-first-run", "--disable-background-networking", "--disable-sync"])
            .args(args)
            .args(["--remote-debugging-port=0", "about:blank"])
            .arg(format!("--user-data-dir={}", home.path().display()))
            .env("HOME", home.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut told = BufReader::new(process.stderr.take().unwrap()).lines();
        let url = tokio::time::timeout(PATIENCE, async {
            loop {
                let line = told.next_line().await.unwrap().expect("the browser ended");
                if let Some(url) = line.strip_prefix("DevTools listening on ") {
                    return url.to_owned();
                }
            }
        });
        let url = url.await.expect("the browser starts");
        // It must be able to write there.
        tokio::spawn(async move { while let Ok(Some(_)) = told.next_line().await {} });
        let (socket, _) = connect_async(url).await.unwrap();
        let (session, calls, dialogs) = (String::new(), 0, Vec::new());
        let mut browser = Self { _process: process, _home: home, socket, session, calls, dialogs };
        let target = browser.call("Target.createTarget", json!({ "url": "about:blank" })).await;
        let target = json!({ "targetId": target["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", target).await;
        browser.session = session["sessionId"].as_str().unwrap().to_owned();
        browser.call("Page.enable", json!({})).await;
        Some(browser)
    }

    pub(crate) async fn open(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url })).await;
        let there = format!("document.readyState === 'complete' && location.href === '{url}'");
        self.wait_for(&there).await;
    }

    /// Returns the value of an expression in the page.
    pub(crate) async fn eval(&mut self, expression: &str) -> Value {
        let what = json!({ "expression": expression, "returnByValue": true });
        let answer = self.call("Runtime.evaluate", what).await;
        // There is no page to evaluate it while one goes and the next comes.
        answer["result"]["value"].clone()
    }

    pub(crate) async fn wait_for(&mut self, condition: &str) {
        let end = tokio::time::Instant::now() + PATIENCE;
        while self.eval(condition).await != Value::Bool(true) {
            assert!(tokio::time::Instant::now() < end, "never: {condition}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Clicks the first link or button whose text begins with this node.
    pub(crate) async fn click(&mut self, text: &str) {
        let text = Value::from(text);
        let found = format!(
            "[...document.querySelectorAll('a, button')].find(one => one.firstChild?.textContent === {text})"
        );
        self.wait_for(&format!("Boolean({found})")).await;
        self.eval(&format!("{found}.click()")).await;
    }

    /// Presses a key of the keyboard: `Tab`, `Enter` or `Escape`.
    pub(crate) async fn press(&mut self, key: &str) {
        let code = match key {
            "Tab" => 9,
            "Enter" => 13,
            "Escape" => 27,
            other => panic!("no such key: {other}"),
        };
        let text = if key == "Enter" { "\r" } else { "" };
        for kind in ["keyDown", "keyUp"] {
            let event = json!({
                "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text
            });
            self.call("Input.dispatchKeyEvent", event).await;
        }
    }

    async fn call(&mut self, method: &str, params: Value) -> Value {
        let id = self.send(method, params).await;
        let answer = tokio::time::timeout(PATIENCE, async {
            loop {
                let Some(Ok(Message::Text(text))) = self.socket.next().await else {
                    panic!("the browser is gone")
                };
                let message: Value = serde_json::from_str(&text).unwrap();
                if message["method"] == "Page.javascriptDialogOpening" {
                    let kind = message["params"]["type"].as_str().unwrap().to_owned();
                    self.dialogs.push(kind);
                    let answer = json!({ "accept": true });
                    self.send("Page.handleJavaScriptDialog", answer).await;
                } else if message["id"] == id {
                    return message["result"].clone();
                }
            }
        });
        answer.await.unwrap_or_else(|_| panic!("{method}: no answer"))
    }

    async fn send(&mut self, method: &str, params: Value) -> u64 {
        self.calls += 1;
        let mut message = json!({ "id": self.calls, "method": method, "params": params });
        if !self.session.is_empty() {
            message["sessionId"] = self.session.clone().into();
        }
        self.socket.send(Message::text(message.to_string())).await.unwrap();
        self.calls
    }
}

fn program() -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let mut found = std::env::split_paths(&paths)
        .flat_map(|path| names.map(|name| path.join(name)))
        .filter(|program| program.is_file());
    found.next()
}
