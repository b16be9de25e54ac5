//! `lua/adapt.lua` beside [`Adapted::adjusted`]: random changes, by a clock of the test, and wrong versions of the script,
//! each of which must be noticed.

use std::time::Duration;

use tower_semaphore::Adaptive;
use tower_semaphore::protocol::{Adapted, Adjustment, SentUnder};

use crate::support::redis::TestRedis;
use crate::support::scripts::{SCRIPTS, whole};

const KEY: &str = "semaphore:{!overrides}:adaptive";
/// The moment at which a history begins, µs.
const BEGIN: u64 = 1_700_000_000_000_000;

/// Wrong versions of the script: text, and its replacement.
const MUTANTS: [(&str, &str); 25] = [
    // Every refusal lowers it.
    ("if limit and seen < lowered then", "if false then"),
    ("if limit and seen < lowered then", "if limit and seen <= lowered then"),
    // Growth counts for what decreases are compared with.
    ("  new = current + 1", "  new, lowered = current + 1, version"),
    ("  lowered = version", "  lowered = lowered or version"),
    // Another part.
    ("* 9 / 10", "* 7 / 10"),
    ("* 9 / 10", "* 19 / 20"),
    ("math.min(current, in_use)", "current"),
    ("math.min(current, in_use)", "in_use"),
    // Out of its range.
    ("* 9 / 10), min)", "* 9 / 10), 1)"),
    ("math.min(math.max(limit or max, min), max)", "limit or max"),
    ("current >= max then", "false then"),
    ("limit or max, min)", "limit or min, min)"),
    // The minimum ends while refusals go on, or is written at each.
    (
        "if not limit or now - changed < kept_ms * 500 then return 0 end",
        "if true then return 0 end",
    ),
    ("if not limit or now - changed < kept_ms * 500", "if not limit"),
    ("    new = limit\n", ""),
    ("if new < current then", "if true then"),
    // Growth by another clock, or at any time.
    ("now - changed < grow_ms * 1000", "false"),
    ("now - changed < grow_ms * 1000", "now - lowered < grow_ms * 1000"),
    ("now - changed < grow_ms * 1000", "now - changed <= grow_ms * 1000"),
    ("if now >= changed and now", "if now"),
    // What is over, and what was never written.
    ("changed + kept_ms * 1000 > now", "true"),
    ("lowered <= changed and changed <= last", "true"),
    // Versions.
    ("math.max(now, last + 1)", "now"),
    ("math.max(now, last + 1)", "last + 1"),
    ("redis.call('PEXPIRE', key, kept_ms)", ""),
];

/// The script, with the clock of the test.
fn script(change: impl Fn(&str) -> String) -> String {
    let (_, text) = SCRIPTS.into_iter().find(|(name, _)| *name == "adapt").expect("the script");
    let text = whole(&change(text), &|_, piece| piece.to_owned());
    let clock = "redis.call('MGET', 'now:s', 'now:us')";
    let with_clock = text.replace("redis.call('TIME')", clock);
    assert_ne!(with_clock, text);
    with_clock
}

/// What the script should know.
#[derive(Default)]
struct Model {
    now: u64,
    version: u64,
    record: Option<Adapted>,
}

impl Model {
    fn adjust(&mut self, range: Adaptive, adjustment: Adjustment) {
        let before = self.record.filter(|record| !record.left(self.now).is_zero());
        let version = self.now.max(self.version + 1);
        let at = (version, self.now);
        if let Some(after) = Adapted::adjusted(before, range, adjustment, at) {
            (self.version, self.record) = (version, Some(after));
        }
    }

    /// A change that may be asked for now, and how much time passes before it.
    fn next(&mut self, chance: &mut fastrand::Rng) -> (Adaptive, Adjustment) {
        let steps = [
            0,
            1,
            999,
            999_999,
            1_000_000,
            1_000_001,
            3_000_000,
            299_999_999,
            300_000_000,
            599_999_999,
            600_000_000,
        ];
        let most = if chance.u8(..8) == 0 { steps.len() } else { 7 };
        self.now += steps[chance.usize(..most)];
        if chance.u8(..20) == 0 {
            // The clock steps back.
            self.now -= 5_000_000;
        }
        let ranges = [
            Adaptive::between(1, 10),
            Adaptive::between(5, 100),
            Adaptive::between(20, 30).grow_every(Duration::from_secs(3)),
        ];
        let other = chance.usize(..3);
        let range = ranges[if chance.u8(..4) == 0 { other } else { 1 }];
        if chance.bool() {
            return (range, Adjustment::Raise);
        }
        let (lowered, changed) = self.record.map_or((0, 0), |one| (one.lowered, one.changed));
        let versions = [0, lowered.saturating_sub(1), lowered, lowered + 1, changed];
        let in_use = if chance.bool() { u32::MAX } else { chance.u32(..120) };
        let version = versions[chance.usize(..versions.len())];
        (range, Adjustment::Lower(SentUnder { version, in_use }))
    }
}

/// Runs a history. Returns where the script differs, if it does.
fn differs(server: &TestRedis, script: &str, seed: u64) -> Option<String> {
    const STEPS: usize = 60;
    let mut chance = fastrand::Rng::with_seed(seed);
    let mut model = Model { now: BEGIN, ..Model::default() };
    let _: u64 = server.command(&["DEL", KEY]);
    for step in 0..STEPS {
        if chance.u8(..15) == 0 {
            // Another program writes what the script would not.
            let record = ["50 2 1", "50 9 9000000000000009", "50 x 1"][chance.usize(..3)];
            let _: u64 = server.command(&["HSET", KEY, "x", record]);
            model.record = None;
        }
        let (range, adjustment) = model.next(&mut chance);
        let (seconds, micros) =
            ((model.now / 1_000_000).to_string(), (model.now % 1_000_000).to_string());
        let _: String = server.command(&["MSET", "now:s", &seconds, "now:us", &micros]);
        let (seen, in_use) = match adjustment {
            Adjustment::Lower(sent) => (sent.version.to_string(), sent.in_use.to_string()),
            Adjustment::Raise => (String::new(), String::new()),
        };
        let [min, max] = [range.min(), range.max()].map(|number| number.to_string());
        let interval = range.interval().as_millis().to_string();
        let call = ["EVAL", script, "1", KEY, "x", &seen, &in_use, &min, &max, &interval, "9"];
        let before = model.version;
        let answer: u64 = server.command(&call);
        model.adjust(range, adjustment);
        let expected = if model.version == before { 0 } else { model.version };
        let text: Option<String> = server.command(&["HGET", KEY, "x"]);
        let record = text.as_deref().and_then(|text| Adapted::parse(text, model.version));
        let ttl: i64 = server.command(&["PTTL", KEY]);
        let is_kept = text.is_none() || expected == 0 || (1..=600_000).contains(&ttl);
        if answer != expected || record != model.record || !is_kept {
            return Some(format!(
                "{step}: {adjustment:?} in {range:?}: {answer} {text:?} {ttl}; expected {expected} {:?}",
                model.record
            ));
        }
    }
    None
}

#[test]
fn the_script_and_the_protocol_agree() {
    let (server, script) = (TestRedis::start(), script(str::to_owned));
    for seed in 0..40 {
        assert_eq!(differs(&server, &script, seed), None, "seed {seed}");
    }
}

#[test]
fn wrong_versions_of_the_script_are_noticed() {
    let server = TestRedis::start();
    for (text, replacement) in MUTANTS {
        let wrong = script(|whole| {
            assert_eq!(whole.matches(text).count(), 1, "{text}");
            whole.replace(text, replacement)
        });
        let noticed = (0..200).any(|seed| differs(&server, &wrong, seed).is_some());
        assert!(noticed, "{text} -> {replacement}");
    }
}
