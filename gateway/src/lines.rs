//! Log lines for a writer that may be slow, full or blocked. A dedicated thread writes them; lines that it cannot take
//! are dropped and counted.

use std::io::{self, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::counts::{self, Log};

/// Bytes that are passed to the system at once.
const BATCH: usize = 64 * 1024;
/// How often a failed write is tried again.
const RETRY: Duration = Duration::from_secs(1);

/// A queue of lines, and the thread that writes them.
#[derive(Debug)]
pub(crate) struct Lines {
    queue: Sender<Message>,
    shared: Arc<Shared>,
    /// Disconnected once the thread has ended.
    end: Mutex<Receiver<()>>,
}

#[derive(Debug)]
struct Shared {
    log: Log,
    /// Bytes and lines that the thread has not taken yet.
    bytes: AtomicUsize,
    lines: AtomicU64,
    dropped: AtomicU64,
    /// How many of the dropped lines were reported.
    reported: AtomicU64,
}

#[derive(Debug)]
enum Message {
    Line(Vec<u8>),
    Reopen,
    End,
}

type Output = Box<dyn Write + Send>;

impl Log {
    /// Bytes that may wait for the writer.
    const fn capacity(self) -> usize {
        match self {
            Self::Access => 4 << 20,
            Self::Stderr => 1 << 20,
        }
    }

    const fn title(self) -> &'static str {
        match self {
            Self::Access => "the access log",
            Self::Stderr => "the log",
        }
    }
}

impl Lines {
    /// # Errors
    ///
    /// If it cannot be opened, or the thread cannot be started.
    pub(crate) fn start(
        log: Log,
        mut open: impl FnMut() -> io::Result<Output> + Send + 'static,
    ) -> io::Result<Self> {
        let to = Some(open()?);
        let shared = Arc::new(Shared {
            log,
            bytes: AtomicUsize::new(0),
            lines: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            reported: AtomicU64::new(0),
        });
        let (queue, queued) = channel();
        let (ends, end) = channel();
        let mut writer = Writer {
            open,
            to,
            batch: Vec::new(),
            is_torn: false,
            failed: None,
            shared: Arc::clone(&shared),
        };
        let thread = std::thread::Builder::new().name(format!("log-{}", log.name()));
        thread.spawn(move || {
            writer.run(&queued);
            drop(ends);
        })?;
        Ok(Self { queue, shared, end: Mutex::new(end) })
    }

    /// Queues a line, or drops it. Never blocks.
    pub(crate) fn push(&self, line: Vec<u8>) {
        let (shared, size) = (&self.shared, line.len());
        let before = shared.bytes.fetch_add(size, Ordering::Relaxed);
        shared.lines.fetch_add(1, Ordering::Relaxed);
        if before + size > shared.log.capacity() || self.queue.send(Message::Line(line)).is_err() {
            shared.taken(size);
            shared.lost(1);
        }
    }

    /// Opens the file again, which may have been moved.
    pub(crate) fn reopen(&self) {
        let _ = self.queue.send(Message::Reopen);
    }

    /// Returns once all lines are written, at the latest at the deadline.
    pub(crate) fn finish(&self, deadline: Instant) {
        let _ = self.queue.send(Message::End);
        let end = self.end.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = end.recv_timeout(deadline.saturating_duration_since(Instant::now()));
        self.shared.lost(self.shared.lines.swap(0, Ordering::Relaxed));
        self.shared.report();
    }
}

/// A whole line with each call, as tracing writes them.
impl Write for &Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.push(line.to_vec());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn taken(&self, size: usize) {
        self.bytes.fetch_sub(size, Ordering::Relaxed);
        self.lines.fetch_sub(1, Ordering::Relaxed);
    }

    fn lost(&self, lines: u64) {
        self.dropped.fetch_add(lines, Ordering::Relaxed);
        counts::lines_dropped(self.log, lines);
    }

    /// Logs how many lines were dropped since the last report.
    fn report(&self) {
        let all = self.dropped.load(Ordering::Relaxed);
        let dropped = all - self.reported.swap(all, Ordering::Relaxed).min(all);
        if dropped > 0 {
            tracing::warn!(dropped, "lines of {} were dropped", self.log.title());
        }
    }
}

/// The thread's side.
struct Writer<O> {
    open: O,
    /// `None` after a failure.
    to: Option<Output>,
    batch: Vec<u8>,
    /// Whether the last write ended within a line.
    is_torn: bool,
    /// When a write last failed, if none succeeded since.
    failed: Option<Instant>,
    shared: Arc<Shared>,
}

impl<O: FnMut() -> io::Result<Output>> Writer<O> {
    fn run(&mut self, queue: &Receiver<Message>) {
        while let Ok(message) = queue.recv() {
            let mut next = Some(message);
            while let Some(message) = next {
                match message {
                    Message::Line(line) => {
                        self.batch.extend_from_slice(&line);
                        self.shared.taken(line.len());
                        if self.batch.len() >= BATCH {
                            self.write();
                        }
                    }
                    Message::Reopen => {
                        self.write();
                        self.reopen();
                    }
                    Message::End => return self.write(),
                }
                next = queue.try_recv().ok();
            }
            self.write();
            // Here the queue has room for the report. While writes fail, stderr could only drop and report it again.
            if self.failed.is_none() {
                self.shared.report();
            }
        }
    }

    fn reopen(&mut self) {
        self.to = None;
        match (self.open)() {
            Ok(to) => {
                self.to = Some(to);
                self.succeeded();
            }
            Err(error) => self.failed(&error),
        }
    }

    /// Writes the batch, or drops what is left of it.
    fn write(&mut self) {
        if self.batch.is_empty() {
            return;
        }
        let batch = std::mem::take(&mut self.batch);
        let mut written = 0;
        if self.failed.is_none_or(|failed| failed.elapsed() >= RETRY) {
            match self.try_write(&batch, &mut written) {
                Ok(()) => self.succeeded(),
                Err(error) => {
                    self.to = None;
                    self.failed(&error);
                }
            }
            if written > 0 {
                self.is_torn = batch[written - 1] != b'\n';
            }
        }
        let lost = batch[written..].iter().filter(|byte| **byte == b'\n').count();
        self.shared.lost(lost as u64);
        self.batch = batch;
        self.batch.clear();
        self.batch.shrink_to(2 * BATCH);
    }

    fn try_write(&mut self, batch: &[u8], written: &mut usize) -> io::Result<()> {
        let to = match &mut self.to {
            Some(to) => to,
            None => self.to.insert((self.open)()?),
        };
        if self.is_torn {
            to.write_all(b"\n")?;
            self.is_torn = false;
        }
        while *written < batch.len() {
            match to.write(&batch[*written..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => *written += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        to.flush()
    }

    fn succeeded(&mut self) {
        if self.failed.take().is_some() {
            tracing::info!("{} is written again", self.shared.log.title());
        }
    }

    fn failed(&mut self, error: &io::Error) {
        if self.failed.replace(Instant::now()).is_none() {
            tracing::error!(%error, "{} cannot be written", self.shared.log.title());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::{Arc, Mutex};

    use super::*;

    /// A file on a disk with so much room.
    #[derive(Clone, Default)]
    struct Disk {
        file: Arc<Mutex<Vec<u8>>>,
        room: Arc<AtomicUsize>,
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let taken = bytes.len().min(self.room.load(Ordering::Relaxed));
            if taken == 0 {
                return Err(io::ErrorKind::StorageFull.into());
            }
            self.room.fetch_sub(taken, Ordering::Relaxed);
            self.file.lock().unwrap().extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_write_that_fails_within_a_line_leaves_all_others_whole() {
        let disk = Disk::default();
        disk.room.store(9, Ordering::Relaxed);
        let to = disk.clone();
        let lines = Lines::start(Log::Access, move || Ok(Box::new(to.clone()))).unwrap();
        let until = |holds: &dyn Fn() -> bool| {
            let end = Instant::now() + Duration::from_secs(10);
            while !holds() {
                assert!(Instant::now() < end);
                std::thread::yield_now();
            }
        };
        lines.push(b"one\n".to_vec());
        until(&|| disk.file.lock().unwrap().len() == 4);
        lines.push(b"two and more\n".to_vec());
        until(&|| lines.shared.dropped.load(Ordering::Relaxed) == 1);
        disk.room.store(100, Ordering::Relaxed);
        lines.reopen();
        lines.push(b"three\n".to_vec());
        lines.finish(Instant::now() + Duration::from_secs(10));
        let text = String::from_utf8(disk.file.lock().unwrap().clone()).unwrap();
        assert_eq!(text, "one\ntwo a\nthree\n");
        assert_eq!(lines.shared.dropped.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn a_writer_that_stands_still_is_not_waited_for_past_the_deadline() {
        struct Stuck;
        impl Write for Stuck {
            fn write(&mut self, _: &[u8]) -> io::Result<usize> {
                loop {
                    std::thread::park();
                }
            }

            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let lines = Lines::start(Log::Access, || Ok(Box::new(Stuck))).unwrap();
        let line = [vec![b'x'; (1 << 20) - 1], b"\n".to_vec()].concat();
        for _ in 0..10 {
            lines.push(line.clone());
        }
        let began = Instant::now();
        lines.finish(began + Duration::from_millis(100));
        assert!(began.elapsed() < Duration::from_secs(5));
        // All but the one in the writer's hands.
        let dropped = lines.shared.dropped.load(Ordering::Relaxed);
        assert!((9..=10).contains(&dropped), "{dropped}");
    }
}
