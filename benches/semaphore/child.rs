//! Other processes: this program, started again with a job.

use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::process::{Child as Process, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{contended, counts, crash, fair_cost, http, ladder, queued, watchdog};

/// The job of another process.
#[derive(Serialize, Deserialize)]
pub(crate) enum Job {
    Contended(contended::Job),
    Hold(crash::Job),
    Serve(http::Job),
    Watch(watchdog::Job),
    Queue(queued::Job),
    Ladder(ladder::Job),
    Requests(counts::Job),
    Turns(fair_cost::Job),
}

pub(crate) fn run(job: Job) {
    // One thread only, because every instruction is counted.
    match &job {
        Job::Requests(job) => return counts::child(job),
        Job::Turns(job) => return fair_cost::child(job),
        _ => {}
    }
    let parent = Parent::new();
    match job {
        Job::Contended(job) => contended::child(&job, &parent),
        Job::Hold(job) => crash::child(&job, &parent),
        Job::Serve(job) => http::child(&job, &parent),
        Job::Watch(job) => watchdog::child(&job, &parent),
        Job::Queue(job) => queued::child(&job, &parent),
        Job::Ladder(job) => ladder::child(&job, &parent),
        Job::Requests(_) | Job::Turns(_) => {}
    }
}

/// Another process, killed when this is dropped.
pub(crate) struct Child {
    process: Process,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Child {
    pub(crate) fn start(job: &Job) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args(["--child", &serde_json::to_string(job).expect("a job is JSON")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("another process");
        let to = process.stdin.take().expect("piped");
        let from = BufReader::new(process.stdout.take().expect("piped"));
        Self { process, to, from }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Returns the next line that it prints. Blocks.
    pub(crate) fn hear(&mut self) -> String {
        let mut line = String::new();
        let read = self.from.read_line(&mut line).expect("a line");
        assert!(read > 0, "the other process ended before its time");
        line.trim_end().to_owned()
    }

    pub(crate) fn tell(&mut self, line: &str) {
        writeln!(self.to, "{line}").expect("it listens");
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Watches the process that gave the job, and ends this one with it.
pub(crate) struct Parent {
    lines: Receiver<String>,
}

impl Parent {
    fn new() -> Self {
        let (to, lines) = channel();
        std::thread::spawn(move || {
            for line in stdin().lock().lines().map_while(Result::ok) {
                let _ = to.send(line);
            }
            std::process::exit(1);
        });
        Self { lines }
    }

    pub(crate) fn hear(&self) -> String {
        self.lines.recv_timeout(Duration::from_secs(600)).expect("a line")
    }

    pub(crate) fn say(&self, line: &str) {
        let mut out = stdout().lock();
        writeln!(out, "{line}").and_then(|()| out.flush()).expect("it listens");
    }
}
