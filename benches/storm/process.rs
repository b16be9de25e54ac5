//! Other processes: this program, started again with a job; and what a process uses.

use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{crowd, held, lease_ends, refused, waiters};

/// The job of another process.
#[derive(Serialize, Deserialize)]
pub(crate) enum Job {
    Hold(held::Job),
    Use(refused::Job),
    Wait(waiters::Job),
    Crowd(crowd::Job),
    LeaseEnds(lease_ends::Job),
}

pub(crate) fn run(job: &Job) {
    let parent = Parent::new();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().expect("a runtime");
    match job {
        Job::Hold(job) => runtime.block_on(held::child(job, parent)),
        Job::Use(job) => runtime.block_on(refused::child(job, parent)),
        Job::Wait(job) => runtime.block_on(waiters::child(job, parent)),
        Job::Crowd(job) => runtime.block_on(crowd::child(job, parent)),
        Job::LeaseEnds(job) => runtime.block_on(lease_ends::child(job, parent)),
    }
}

/// Another process, killed when this is dropped.
pub(crate) struct Process {
    child: Child,
    to: ChildStdin,
    lines: Receiver<String>,
}

impl Process {
    pub(crate) fn start(job: &Job) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(["--child", &serde_json::to_string(job).expect("a job is JSON")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("another process");
        let to = child.stdin.take().expect("piped");
        let lines = lines(BufReader::new(child.stdout.take().expect("piped")), || {});
        Self { child, to, lines }
    }

    /// Returns the next thing that it prints, if that comes in time.
    pub(crate) fn hear<T: DeserializeOwned>(&self, bound: Duration) -> Result<T, String> {
        let line = self.lines.recv_timeout(bound).map_err(|error| match error {
            RecvTimeoutError::Timeout => format!("a process says nothing for {bound:?}"),
            RecvTimeoutError::Disconnected => "a process ended before its time".to_owned(),
        })?;
        Ok(serde_json::from_str(&line).expect("what a process says"))
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").expect("it listens");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Watches the process that gave the job, and ends this one with it.
pub(crate) struct Parent {
    lines: Receiver<String>,
}

impl Parent {
    fn new() -> Self {
        Self { lines: lines(BufReader::new(stdin()), || std::process::exit(1)) }
    }

    /// Waits until it prints something.
    pub(crate) async fn heard(self) -> Self {
        tokio::task::spawn_blocking(move || {
            self.lines.recv().expect("a line");
            self
        })
        .await
        .expect("no panic")
    }

    pub(crate) fn say(&self, what: &impl Serialize) {
        let line = serde_json::to_string(what).expect("it is JSON");
        let mut out = stdout().lock();
        writeln!(out, "{line}").and_then(|()| out.flush()).expect("it listens");
    }
}

fn lines(from: impl BufRead + Send + 'static, end: fn()) -> Receiver<String> {
    let (to, lines) = channel();
    std::thread::spawn(move || {
        for line in from.lines().map_while(Result::ok) {
            let _ = to.send(line);
        }
        end();
    });
    lines
}

/// Returns the memory of this process, in MB.
pub(crate) fn rss() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a field");
    let kb: f64 = line.trim().trim_end_matches(" kB").parse().expect("a number");
    kb / 1e3
}

/// Returns the CPU time of all threads of this process, in seconds.
pub(crate) fn cpu() -> f64 {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    // A thread may end meanwhile.
    let ns = tasks.filter_map(|task| {
        let text = std::fs::read_to_string(task.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    });
    ns.sum::<f64>() / 1e9
}
