//! The scripts' side: a server, and its replies.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant, SystemTime};

use deadpool_redis::redis::{Cmd, Script, cmd};
use tower_semaphore::protocol::WORK_MAX;

use super::model::{BUDGET_UNIT, Expected, Message, Model, Plan};
use super::{History, KEY};
use crate::support::redis::TestRedis;
use crate::support::scripts::{SCRIPTS, whole};

/// The prefix of members that are tickets.
pub(super) const QUEUED: &str = "qqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqqq";

/// The form of a script's reply.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Told {
    All,
    /// The lease end alone, if all ids hold and no more permits are in use than the limit.
    InShort,
    /// The long or the short form: the script decides.
    Either,
    /// The same; but who gave something back is told when a line wakes.
    Timed,
    Grants,
}

/// The scripts, with the test's clock.
pub(super) struct Lua {
    pub(super) work_max: usize,
    texts: HashMap<&'static str, String>,
    pub(super) hashes: HashMap<&'static str, String>,
}

impl Lua {
    /// `change` may alter a file's text, given its name. `work_max` replaces the bound on work.
    pub(super) fn new(work_max: usize, change: impl Fn(&str, &str) -> String) -> Self {
        const CLOCK: &str = "redis.call('TIME')";
        let bound = format!("budget = false, {WORK_MAX}\n");
        let (mut texts, mut hashes) = (HashMap::new(), HashMap::new());
        for (name, body) in SCRIPTS {
            let text = whole(&change(name, body), &change);
            let text = text.replace(CLOCK, "redis.call('MGET', 'now:s', 'now:us')");
            assert!(!text.contains("'TIME'"), "{name} reads the time in another way");
            let swept = text.contains("local swept");
            assert_eq!(text.contains(&bound), swept, "{name} has another bound than the ledger");
            let text = text.replace(&bound, &format!("budget = false, {work_max}\n"));
            hashes.insert(name, Script::new(&text).get_hash().to_owned());
            texts.insert(name, text);
        }
        Self { work_max, texts, hashes }
    }

    pub(super) fn as_it_is() -> Self {
        Self::new(WORK_MAX, |_, text| text.to_owned())
    }

    /// Begins every call: the first argument is a number.
    pub(super) fn call(&self, name: &str, first: u32) -> Cmd {
        let mut command = cmd("EVALSHA");
        command.arg(&self.hashes[name]).arg(1).arg(KEY).arg(first);
        command
    }
}

/// A value from a server, as far as these tests meet it.
#[derive(Clone, Debug)]
pub(super) enum Item {
    Int(i64),
    Text(String),
    Double(f64),
    Null,
    Error(String),
    List(Vec<Self>),
    Push(Vec<Self>),
}

/// Scores come as texts: two texts of the same number are equal.
impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        let number = |text: &str| text.parse::<f64>().ok();
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => a == b,
            (Self::Text(a), Self::Text(b)) => {
                a == b || number(a).is_some_and(|a| Some(a) == number(b))
            }
            (Self::Double(a), Self::Double(b)) => a == b,
            (Self::Null, Self::Null) => true,
            (Self::Error(a), Self::Error(b)) => a == b,
            (Self::List(a), Self::List(b)) | (Self::Push(a), Self::Push(b)) => a == b,
            _ => false,
        }
    }
}

/// A connection that speaks RESP3: answers and messages in the order in which the server wrote them.
pub(super) struct Wire {
    stream: BufReader<TcpStream>,
    pushed: Vec<Message>,
}

impl Wire {
    pub(super) fn open(server: &TestRedis) -> Self {
        let stream = TcpStream::connect(("127.0.0.1", server.port())).unwrap();
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut wire = Self { stream: BufReader::new(stream), pushed: Vec::new() };
        wire.write(&cmd("HELLO").arg(3).get_packed_command());
        wire.reply();
        wire
    }

    pub(super) fn load(&mut self, lua: &Lua) {
        for (name, text) in &lua.texts {
            self.write(&cmd("SCRIPT").arg("LOAD").arg(text).get_packed_command());
            assert_eq!(self.reply(), Item::Text(lua.hashes[name].clone()), "{name}");
        }
    }

    fn write(&mut self, bytes: &[u8]) {
        self.stream.get_mut().write_all(bytes).unwrap();
    }

    /// Returns the next answer, and keeps messages that come before it.
    fn reply(&mut self) -> Item {
        loop {
            match self.item() {
                Item::Push(words) => match &*words {
                    [Item::Text(kind), Item::Text(channel), Item::Text(text)]
                        if kind == "message" =>
                    {
                        self.pushed.push((channel.clone(), text.clone()));
                    }
                    // A channel is, or is no longer, subscribed.
                    _ => {}
                },
                item => return item,
            }
        }
    }

    fn item(&mut self) -> Item {
        let mut line = String::new();
        assert_ne!(self.stream.read_line(&mut line).unwrap(), 0, "the server closed");
        let (kind, rest) = line.trim_end().split_at(1);
        let size = || rest.parse::<usize>().unwrap();
        match kind {
            ":" => Item::Int(rest.parse().unwrap()),
            "," => Item::Double(rest.parse().unwrap()),
            "+" => Item::Text(rest.to_owned()),
            "-" => Item::Error(rest.to_owned()),
            "_" => Item::Null,
            "$" => {
                let mut text = vec![0; size() + 2];
                self.stream.read_exact(&mut text).unwrap();
                text.truncate(size());
                Item::Text(String::from_utf8(text).unwrap())
            }
            "*" => Item::List((0..size()).map(|_| self.item()).collect()),
            ">" => Item::Push((0..size()).map(|_| self.item()).collect()),
            "%" => Item::List((0..2 * size()).map(|_| self.item()).collect()),
            _ => panic!("not expected from the server: {line:?}"),
        }
    }

    /// Carries out a history and compares. Returns the number of operations and of those that reached the bound on
    /// work, or the first difference.
    pub(super) fn check(&mut self, lua: &Lua, history: &History) -> Result<[usize; 2], String> {
        let plan = Model::new(lua, history).run(history);
        // The key's expiry counts in the server's time, and is at least one second: a run during which that clock went
        // on for as long, or stepped, proves nothing.
        for _ in 0..10 {
            let (began, clock) = (Instant::now(), SystemTime::now());
            let differs = self.compare(&plan, began);
            let took = began.elapsed();
            let steady = clock.elapsed().is_ok_and(|t| t.abs_diff(took) < Duration::from_millis(2));
            if steady && took < Duration::from_millis(900) {
                let early = plan.expected.iter().filter(|expected| expected.more).count();
                return differs.map(|()| [plan.expected.len(), early]);
            }
        }
        panic!("this machine is too slow to compare anything");
    }

    fn compare(&mut self, plan: &Plan, began: Instant) -> Result<(), String> {
        self.write(&plan.commands);
        // Everything is read in any case, so that the next history finds the connection empty.
        let mut shown = Vec::with_capacity(plan.expected.len());
        for expected in &plan.expected {
            for _ in 0..expected.before {
                self.reply();
            }
            let took = [self.reply(), self.reply(), self.reply(), self.reply()];
            shown.push((took, std::mem::take(&mut self.pushed)));
        }
        for _ in 0..plan.asides {
            self.reply();
        }
        let slack = u64::try_from(began.elapsed().as_millis()).unwrap() + 2;
        for (expected, ([_, reply, set, ttl], messages)) in plan.expected.iter().zip(shown) {
            expected
                .holds(&reply, &messages, &set, &ttl, slack)
                .map_err(|difference| format!("{}\n{difference}", expected.what))?;
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "no time has more than 53 bits")]
impl Expected {
    /// `slack` is how much of a lease can have passed in real time, in ms.
    fn holds(
        &self,
        reply: &Item,
        messages: &[Message],
        set: &Item,
        ttl: &Item,
        slack: u64,
    ) -> Result<(), String> {
        if self.in_short.as_ref() != Some(reply) {
            same("reply", &self.reply, reply)?;
        }
        same("messages", &*self.messages, messages)?;
        // A budget that is full may have a member or none.
        let is_full = |member: &str, score: f64| {
            member.len() == 6
                && member.starts_with('b')
                && score >= -(self.now as f64) / BUDGET_UNIT
        };
        let but_full = |set: &[(String, f64)]| -> Vec<_> {
            set.iter().filter(|(member, score)| !is_full(member, *score)).cloned().collect()
        };
        let (known, shown) = (but_full(&self.set), members(set));
        same("set", &known, &but_full(&shown))?;
        if known.is_empty() && !shown.is_empty() {
            return Ok(());
        }
        let Item::Int(ttl) = *ttl else { return Err(format!("PTTL: {ttl:?}")) };
        let (longest, ever) = self.longest;
        let good = if known.is_empty() {
            ttl == -2
        } else {
            u64::try_from(ttl).is_ok_and(|ttl| ttl + slack >= longest && ttl <= 3 * ever + 1000)
        };
        if good { Ok(()) } else { Err(format!("expiry: {ttl} ms, leases {longest}, {ever} ms")) }
    }
}

fn same<T: std::fmt::Debug + PartialEq + ?Sized>(
    what: &str,
    ledger: &T,
    lua: &T,
) -> Result<(), String> {
    if ledger == lua {
        return Ok(());
    }
    Err(format!("{what}\n  of the ledger: {ledger:?}\n  of the script: {lua:?}"))
}

/// RESP3 returns members and scores in pairs.
fn members(set: &Item) -> Vec<(String, f64)> {
    let Item::List(pairs) = set else { panic!("not a set: {set:?}") };
    let pair = |item: &Item| match item {
        Item::List(pair) => match &**pair {
            [Item::Text(member), Item::Double(score)] => (member.clone(), *score),
            other => panic!("not a member and a score: {other:?}"),
        },
        other => panic!("not a pair: {other:?}"),
    };
    pairs.iter().map(pair).collect()
}
