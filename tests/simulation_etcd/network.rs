//! The network between processes and members: streams of bytes that arrive late, stand still, or are cut.
//!
//! Bytes that are written in one window of time arrive in a later one, so the order in which processes run in a window
//! does not matter.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

use crate::chance::Rng;

/// How many bytes are on their way at most, in one direction. More than HTTP/2 sends without an answer.
const FLYING_MAX: usize = 1 << 20;

/// What the way between a process and a member is like. Times are in ms.
#[derive(Clone, Copy, Debug, Default)]
pub struct Way {
    /// How long bytes take at least, and how much longer at most.
    pub latency: (u64, u64),
    pub slow_until: u64,
    pub slow_by: u64,
    /// Nothing arrives before this, and no connection is opened: bytes to the member, and from it.
    pub stalled_until: [u64; 2],
    /// New connections are refused.
    pub refuses_until: u64,
}

/// A connection that a process wants.
struct Dial {
    process: usize,
    member: usize,
    at: u64,
    reply: oneshot::Sender<io::Result<End>>,
}

struct State {
    now: u64,
    rng: Rng,
    ways: BTreeMap<(usize, usize), Way>,
    dials: VecDeque<Dial>,
    next: u64,
    connections: BTreeMap<u64, Connection>,
    opened: u64,
}

struct Connection {
    process: usize,
    member: usize,
    /// From the process, and from the member.
    pipes: [Pipe; 2],
    /// It was cut: both ends notice at once.
    is_cut: bool,
    /// The machine of the process is gone without a word.
    is_silent: bool,
}

#[derive(Default)]
struct Pipe {
    flying: VecDeque<(u64, Bytes)>,
    last: u64,
    size: usize,
    arrived: BytesMut,
    /// The writing end was dropped, and when that arrives.
    ends_at: Option<u64>,
    has_ended: bool,
    /// The reading end was dropped.
    is_deaf: bool,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

/// All connections. Clones share them.
#[derive(Clone)]
pub struct Network(Arc<Mutex<State>>);

/// An end of a connection.
pub struct End {
    network: Network,
    connection: u64,
    /// The index of the pipe that it writes to: 0 for the process, 1 for the member.
    side: usize,
}

/// A connection that a member accepts.
pub struct Accepted {
    pub process: usize,
    pub member: usize,
    pub end: End,
}

impl Network {
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(Arc::new(Mutex::new(State {
            now: 0,
            rng: Rng::new(seed),
            ways: BTreeMap::new(),
            dials: VecDeque::new(),
            next: 0,
            connections: BTreeMap::new(),
            opened: 0,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the way between a process and a member.
    pub fn change(&self, process: usize, member: usize, change: impl FnOnce(&mut Way)) {
        change(self.state().ways.entry((process, member)).or_default());
    }

    /// Opens a connection to a member, as a process does.
    ///
    /// # Errors
    ///
    /// If the member refuses.
    pub async fn dial(&self, process: usize, member: usize) -> io::Result<End> {
        let (reply, answer) = oneshot::channel();
        {
            let mut state = self.state();
            let at = state.now + state.latency(process, member);
            state.dials.push_back(Dial { process, member, at, reply });
        }
        answer.await.unwrap_or_else(|_| Err(io::ErrorKind::ConnectionRefused.into()))
    }

    /// Cuts the connections of a process to a member: both ends notice at once.
    pub fn cut(&self, process: usize, member: usize) {
        let mut wakers = Vec::new();
        for connection in self.state().connections.values_mut() {
            if (connection.process, connection.member) == (process, member) {
                connection.is_cut = true;
                wakers.extend(connection.pipes.iter_mut().flat_map(Pipe::wakers));
            }
        }
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The machine of a process is gone: no member hears that.
    pub fn silence(&self, process: usize) {
        for connection in self.state().connections.values_mut() {
            connection.is_silent |= connection.process == process;
        }
    }

    /// Returns the number of connections that were opened.
    #[must_use]
    pub fn opened(&self) -> u64 {
        self.state().opened
    }

    /// Delivers what has arrived by now, in ms. Returns the connections that members accept.
    pub fn deliver(&self, now: u64) -> Vec<Accepted> {
        let (mut wakers, mut accepted, mut replies) = (Vec::new(), Vec::new(), Vec::new());
        let mut state = self.state();
        let State { ways, connections, .. } = &mut *state;
        for connection in connections.values_mut() {
            let way = ways.get(&(connection.process, connection.member)).copied();
            let way = way.unwrap_or_default();
            for (pipe, stalled) in connection.pipes.iter_mut().zip(way.stalled_until) {
                if now >= stalled && !connection.is_silent {
                    pipe.deliver(now, &mut wakers);
                }
            }
        }
        connections.retain(|_, of| !of.pipes.iter().all(|pipe| pipe.is_deaf));
        state.now = now;
        for dial in std::mem::take(&mut state.dials) {
            let way = state.way(dial.process, dial.member);
            if dial.reply.is_closed() {
            } else if dial.at > now || way.stalled_until.iter().any(|until| *until > now) {
                state.dials.push_back(dial);
            } else if way.refuses_until > now {
                replies.push((dial.reply, Err(io::ErrorKind::ConnectionRefused.into())));
            } else {
                let Dial { process, member, reply, .. } = dial;
                let [ours, theirs] = state.open(self, process, member);
                accepted.push(Accepted { process, member, end: theirs });
                replies.push((reply, Ok(ours)));
            }
        }
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        for (reply, result) in replies {
            // A process that has given up closes the connection, by dropping its end.
            _ = reply.send(result);
        }
        accepted
    }
}

impl State {
    fn way(&self, process: usize, member: usize) -> Way {
        self.ways.get(&(process, member)).copied().unwrap_or_default()
    }

    /// Returns how long bytes take that are sent now, in ms: at least until the next window.
    fn latency(&mut self, process: usize, member: usize) -> u64 {
        let Way { latency: (least, more), slow_until, slow_by, .. } = self.way(process, member);
        let slow = if slow_until > self.now { slow_by } else { 0 };
        (least + self.rng.below(more + 1) + slow).max(1)
    }

    fn open(&mut self, network: &Network, process: usize, member: usize) -> [End; 2] {
        let connection = self.next;
        self.next += 1;
        self.opened += 1;
        let pipes = [Pipe::default(), Pipe::default()];
        let new = Connection { process, member, pipes, is_cut: false, is_silent: false };
        self.connections.insert(connection, new);
        [0, 1].map(|side| End { network: network.clone(), connection, side })
    }
}

impl Pipe {
    fn wakers(&mut self) -> impl Iterator<Item = Waker> {
        [self.reader.take(), self.writer.take()].into_iter().flatten()
    }

    fn deliver(&mut self, now: u64, wakers: &mut Vec<Waker>) {
        while self.flying.front().is_some_and(|(at, _)| *at <= now)
            && let Some((_, bytes)) = self.flying.pop_front()
        {
            self.arrived.extend_from_slice(&bytes);
            wakers.extend(self.reader.take());
        }
        if self.flying.is_empty() && self.ends_at.is_some_and(|at| at <= now) && !self.has_ended {
            self.has_ended = true;
            wakers.extend(self.reader.take());
        }
    }
}

impl AsyncRead for End {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let mut state = self.network.state();
        let Some(connection) = state.connections.get_mut(&self.connection) else {
            return Poll::Ready(Ok(()));
        };
        if connection.is_cut {
            return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
        }
        let pipe = &mut connection.pipes[1 - self.side];
        if pipe.arrived.is_empty() {
            if pipe.has_ended {
                return Poll::Ready(Ok(()));
            }
            pipe.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let count = pipe.arrived.len().min(buffer.remaining());
        buffer.put_slice(&pipe.arrived[..count]);
        pipe.arrived.advance(count);
        pipe.size -= count;
        let writer = pipe.writer.take();
        drop(state);
        writer.into_iter().for_each(Waker::wake);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let mut state = self.network.state();
        let now = state.now;
        let broken = || Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        let Some(connection) = state.connections.get(&self.connection) else { return broken() };
        let (process, member) = (connection.process, connection.member);
        let latency = state.latency(process, member);
        let Some(connection) = state.connections.get_mut(&self.connection) else { return broken() };
        let pipe = &mut connection.pipes[self.side];
        if connection.is_cut || (pipe.is_deaf && !connection.is_silent) {
            return broken();
        }
        if pipe.size >= FLYING_MAX {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        pipe.last = pipe.last.max(now + latency);
        pipe.flying.push_back((pipe.last, Bytes::copy_from_slice(bytes)));
        pipe.size += bytes.len();
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.network.state().end(self.connection, self.side);
        Poll::Ready(Ok(()))
    }
}

impl State {
    /// An end sends no more.
    fn end(&mut self, connection: u64, side: usize) {
        let now = self.now;
        if let Some(connection) = self.connections.get_mut(&connection) {
            let pipe = &mut connection.pipes[side];
            pipe.ends_at.get_or_insert_with(|| pipe.last.max(now + 1));
        }
    }
}

impl Drop for End {
    fn drop(&mut self) {
        let mut wakers = Vec::new();
        let mut state = self.network.state();
        state.end(self.connection, self.side);
        if let Some(connection) = state.connections.get_mut(&self.connection) {
            let pipe = &mut connection.pipes[1 - self.side];
            pipe.is_deaf = true;
            wakers.extend(pipe.wakers());
        }
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}
