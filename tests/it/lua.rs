//! The headers of the scripts against their bodies, and against the commands and rights in the docs.

use std::collections::BTreeSet;
use std::time::Duration;

use deadpool_redis::redis::{self, FromRedisValue, Script, Value};
use tower_semaphore::backend::RedisBackend;
use tower_semaphore::protocol::WORK_MAX;
use tower_semaphore::{AcquireError, Policy, Semaphore};

use crate::support::eventually;
use crate::support::redis::TestRedis;
use crate::support::scripts::{PIECES, SCRIPTS, whole};

const DOCS: &str = include_str!("../../src/backend/redis/mod.rs");

// --- the texts --------------------------------------------------------------------------------

/// Returns the comment at the top, without its dashes.
fn header(text: &str) -> Vec<&str> {
    let lines = text.lines().map_while(|line| line.strip_prefix("--"));
    lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect()
}

/// Returns the code, without comments.
fn code(text: &str) -> String {
    text.lines().map(|line| line.split("--").next().unwrap().trim_end().to_owned() + "\n").collect()
}

/// Returns everything between `open` and `close`.
fn between<'a>(text: &'a str, open: &'a str, close: &'a str) -> impl Iterator<Item = &'a str> {
    text.split(open).skip(1).map(move |rest| rest.split(close).next().unwrap())
}

/// Indexes, and the first index of a list of any length.
type Indexes = (BTreeSet<usize>, Option<usize>);

fn told(text: &str, list: &str) -> Indexes {
    let (mut fixed, mut from) = (BTreeSet::new(), None);
    for line in header(text) {
        let Some(index) = line.strip_prefix(list).and_then(|rest| rest.strip_prefix('[')) else {
            continue;
        };
        let index = index.split(']').next().unwrap();
        match index.strip_suffix("..") {
            Some(first) => assert_eq!(from.replace(first.parse().unwrap()), None),
            None => assert!(fixed.insert(index.parse().unwrap()), "{list}[{index}] twice"),
        }
    }
    (fixed, from)
}

fn read(text: &str, list: &str) -> Indexes {
    let code = code(text);
    let fixed =
        between(&code, &format!("{list}["), "]").filter_map(|index| index.parse().ok()).collect();
    let (unpacked, counted) = (format!("unpack({list}, "), format!(", #{list},"));
    let from = between(&code, &unpacked, ")").next().and_then(|rest| rest.split(',').next());
    let from = from.or_else(|| {
        let (before, _) = code.split_once(&counted)?;
        before.rsplit("= ").next()
    });
    (fixed, from.map(|index| index.parse().unwrap()))
}

#[test]
fn every_header_tells_the_same_things_in_the_same_order() {
    for (name, text) in SCRIPTS {
        let header = header(text);
        let purpose = header[0].strip_prefix(name).and_then(|rest| rest.strip_prefix(": "));
        assert!(purpose.is_some_and(|purpose| purpose.len() > 20), "{name}: {}", header[0]);
        let words = ["KEYS", "ARGV", "Returns", "Errors", "Cost", "Retry"];
        let mut found: Vec<_> = header
            .iter()
            .filter_map(|line| words.into_iter().find(|word| line.starts_with(word)))
            .collect();
        found.dedup();
        assert_eq!(found, words, "{name}");
        for word in words {
            let line = header.iter().find(|line| line.starts_with(word)).unwrap();
            assert!(line.split_whitespace().count() > 1, "{name}: {word} says nothing");
        }
    }
}

#[test]
fn headers_list_the_keys_and_arguments_that_bodies_read() {
    for (name, text) in SCRIPTS {
        for list in ["KEYS", "ARGV"] {
            let (told, read) = (told(text, list), read(text, list));
            assert_eq!(told, read, "{name}: {list}");
            let (fixed, from) = told;
            let count = fixed.len();
            assert!(fixed.into_iter().eq(1..=count), "{name}: {list} has a gap");
            assert!(from.is_none_or(|from| from == count + 1), "{name}: {list} has a gap");
        }
    }
    for (name, text) in PIECES {
        assert!(!code(text).contains("KEYS[") && !code(text).contains("ARGV["), "{name}");
    }
}

/// `tostring` and `..` round a time in µs to 14 digits.
#[test]
fn no_number_becomes_text_inaccurately() {
    let mut joins = Vec::new();
    for (name, text) in PIECES.into_iter().chain(SCRIPTS) {
        let code = code(text);
        assert!(!code.contains("tostring"), "{name}");
        for line in code.lines().filter(|line| line.contains("..")) {
            joins.push(format!("{name}: {}", line.trim()));
        }
    }
    // Each of these joins texts only: ids, nodes, a number that was formatted exactly, or the number of a share.
    let known = [
        "charges: full_at[number] = (redis.call('ZMSCORE', key, 'b' .. number)[1] or 0) * -8388608",
        "charges: writes[#writes + 1] = 'b' .. number",
        "charges: redis.call('ZADD', key, full_at[number] / -8388608, 'b' .. number)",
        "charges: redis.call('ZREM', key, 'b' .. number)",
        "further: local f, weight, each, class, cost = match(member, '^(.....)(..)(.....)(.)(..)', -15)",
        "further: return spot < 16777216 and format('%d', spot) or '5' .. format('%013d', spot - 16777216)",
        "further: redis.call('ZREM', key, 't' .. digits, 'x' .. digits)",
        "further: local head = places_of('t' .. digits)[1]",
        "further: before = tonumber(before or redis.call('ZMSCORE', key, 't' .. digits)[1] or 0)",
        "further: count_of_turns, last_turn = count_of_turns + 1, { 't' .. digits, turn }",
        "further: redis.call('ZADD', key, turn, 't' .. digits, tenants, 'x' .. digits, 'inf', 'x')",
        "further: redis.call('ZADD', key, turn, 't' .. digits)",
        "further: for i, member in ipairs(lines) do lines[i] = 't' .. sub(member, 2) end",
        "further: writes[#writes + 1] = (j > 1 and j or '') .. kind .. id",
        "further: local turn = redis.call('ZMSCORE', key, 't' .. digits)[1]",
        "further: if tonumber(redis.call('ZMSCORE', key, 't' .. digits)[1]) < 0 then",
        "further: redis.call('ZADD', key, parked_at(spot, floor(code / 16777216), 0), 't' .. digits)",
        "lease: local tenants_score = claims and '1' .. plain_score",
        "lease: local nobodys_score = claims and string.sub(plain_score, 1, -4) .. '.' .. string.sub(plain_score, -3)",
        "leave: members[#tenants] = 't' .. digits",
        "leave: for i = 1, lines and #lines or 0 do members[#tenants + i] = 't' .. lines[i] end",
        "promote: writes[#writes + 1] = i .. head",
        "promote: local channel = string.match(key, '^(.-):{') .. ':@' .. to",
        "promote: local id = to .. ':' .. words[i]",
        "rate: if tonumber(score or 0) < -1000000000 then forget('(' .. score, '(-1000000000') end",
        "rate: local writes = { -now / 1e6, 'r' .. number }",
        "rate: writes[2 * i - 1], writes[2 * i] = -now / 1e6, i .. 'r' .. number",
        "rate: local members = { 'r' .. number }",
        "rate: for i = 2, tonumber(string.sub(id, -2), 36) do members[i] = i .. 'r' .. number end",
        "recall: local channel = string.match(key, '^(.-):{') .. ':@' .. to",
        "settle: local f, member = tonumber(digits, 36), 't' .. digits",
        "sweep: for i = 1, #dead do dead[#dead + 1] = queued .. dead[i] end",
        "take: members[count + 1], members[count + 2] = id, queued .. id",
        "take: members[count] = share .. queued .. id",
        "take: members[count] = (share > 1 and share or '') .. kind .. id",
        "used: local members, at = { id, queued .. id }, string.find(id, '$', 13, true)",
        "used: members[#members + 1] = 'b' .. string.sub(id, at + 1, at + 5)",
        "acquire: for i = 1, leaving do members[leaving + i] = queued .. members[i] end",
        "acquire: for i = 1, leaving do members[i] = queued .. ARGV[10 + i] end",
        "acquire: budget = 'b' .. sub(id, charged_at + 1, charged_at + 5)",
        "acquire: local start = at and 'r' .. sub(id, 1, at - 1)",
        "acquire: local started = at and '-' .. t[1] .. '.' .. sub('00000' .. t[2], -6)",
        "acquire: local writes = { score, id, format('%d', f), queued .. id }",
        "acquire: turns[#turns + 1] = 't' .. digits",
        "acquire: writes[count + 3], writes[count + 4] = share, queued .. id",
        "acquire: writes[count + 1], writes[count + 2] = share, j .. queued .. id",
        "acquire: local limit_share = '5' .. string.format('%013d', tonumber(sub(id, at, at + 4), 36))",
        "acquire: writes[count + 2] = (j > 1 and j or '') .. string.char(kind) .. id",
        "acquire: members[count + i] = queued .. id",
        "acquire: members[2 * count + i] = 't' .. (line_of(id) or '')",
        "acquire: for j = 1, count do tickets[j] = queued .. members[j] end",
        "acquire: local turn = redis.call('ZMSCORE', key, 't' .. tenant)[1]",
        "acquire: writes[#writes + 1] = (j > 1 and j or '') .. queued .. id",
        "acquire: writes[#writes + 1] = 't' .. digits",
        "acquire: writes[#writes + 1] = 'x' .. digits",
        "acquire: writes[#writes + 1] = queued .. id",
        "release: local budget, nobodys = 'b' .. sub(id, at + 1, at + 5), sub(id, -32, -28) == '00000'",
        "release: if (nobodys and redis.call('ZREM', key, id) or redis.call('ZREM', key, id, queued .. id)) > 0 then",
        "release: removed = redis.call('ZREM', key, ARGV[last], queued .. ARGV[last])",
        "renew: for i, id in ipairs(ids) do members[count + i] = queued .. id end",
        "renew: turns[#lines] = 't' .. digits",
        "reassert: members[count + i] = queued .. id",
        "reassert: members[2 * count + i] = 't' .. (line_of(ids[i]) or '')",
        "reassert: writes[#writes + 1] = queued .. id",
        "reassert: writes[#writes + 1] = (j > 1 and j or '') .. queued .. id",
        "inspect: local from = '(' .. string.format('%.0f', now_ms)",
        "inspect: local running = '(' .. string.format('%.0f', 1e13 + now_ms)",
        "inspect: for j = i, math.min(i + 1998, #fair - 1), 2 do members[#members + 1] = queued .. fair[j] end",
        "inspect: local running = '(' .. string.format('%.17g', now_ms / 1000)",
        "inspect: local latest, left = (now + 1e6) / -1e6, '(' .. string.format('%.17g', (window - now) / 1e6)",
        "inspect: local left = '(' .. string.format('%.17g', now / -8388608)",
        "override: local channel = string.match(key, '^(.-):{') .. ':@overrides'",
        "pause: local channel = string.match(key, '^(.-):{') .. ':@overrides'",
        "adapt: local channel = string.match(key, '^(.-):{') .. ':@overrides'",
        "revoke: redis.call('ZREM', key, id, queued .. id)",
    ];
    assert_eq!(joins, known, "look at each new one, then list it here");
}

/// Returns the commands that a script calls, and the first argument of each.
fn calls(text: &str) -> Vec<(String, String)> {
    let code = code(text).replace("redis.pcall(", "redis.call(");
    let calls = between(&code, "redis.call(", "\n").map(|call| {
        let (command, rest) = call.strip_prefix('\'').unwrap().split_once('\'').unwrap();
        let first = rest.trim_start_matches(", ").split([',', ')']).next().unwrap();
        (command.to_owned(), first.to_owned())
    });
    calls.collect()
}

#[test]
fn only_the_keys_that_are_passed_are_touched() {
    let (reads_three, text) = SCRIPTS[5];
    assert_eq!(reads_three, "overrides");
    assert!(
        code(text)
            .trim_start()
            .starts_with("local key, pauses, adaptive = KEYS[1], KEYS[2], KEYS[3]\n")
    );
    assert_eq!(code(text).matches("KEYS").count(), 3);
    for (name, text) in SCRIPTS.into_iter().filter(|(name, _)| *name != reads_three) {
        let code = code(text);
        assert!(
            code.trim_start().starts_with("local key") && code.contains(" = KEYS[1]"),
            "{name}"
        );
        assert_eq!(code.matches("KEYS").count(), 1, "{name}");
        assert_eq!(
            code.matches("key =").count() + code.matches("key, most =").count(),
            1,
            "{name}"
        );
    }
    for (name, text) in PIECES.into_iter().chain(SCRIPTS) {
        // Only a message may fail.
        let pcalls =
            usize::from(["promote", "recall", "override", "pause", "adapt"].contains(&name));
        assert_eq!(code(text).matches("pcall").count(), pcalls, "{name}");
        assert_eq!(code(text).matches("redis.pcall('PUBLISH', channel,").count(), pcalls, "{name}");
        assert!(!code(text).contains("redis.call ("), "{name}");
        for (command, first) in calls(text) {
            let expected = match &*command {
                "TIME" => "",
                "PUBLISH" => "channel",
                _ if name == reads_three && first == "pauses" => "pauses",
                _ if name == reads_three && first == "adaptive" => "adaptive",
                _ => "key",
            };
            assert_eq!(first, expected, "{name}: {command}");
        }
    }
}

// --- access control ---------------------------------------------------------------------------

/// Returns the rules that the docs of `RedisBackend` list: `~...`, `&...`, `+...`.
fn rules() -> Vec<String> {
    let (_, rest) = DOCS.split_once("A user with an ACL needs").expect("the docs tell the ACL");
    let paragraph =
        rest.lines().take_while(|line| !line.ends_with("///") && !line.contains("pub "));
    let text: String = paragraph.map(|line| line.replace("///", " ")).collect();
    text.split(|c: char| c.is_whitespace() || c == '`')
        .filter(|word| word.starts_with(['~', '&', '+']))
        .map(|word| word.trim_end_matches(['.', ',']).to_owned())
        .collect()
}

#[test]
fn the_docs_list_the_commands_that_are_used() {
    let mut used = BTreeSet::new();
    for (_, text) in PIECES.into_iter().chain(SCRIPTS) {
        for (command, _) in calls(text) {
            assert_eq!(command, command.to_uppercase());
            used.insert(format!("+{}", command.to_lowercase()));
        }
    }
    // The commands that the process itself sends.
    used.extend(
        ["+evalsha", "+eval", "+script|load", "+subscribe", "+hello", "+info", "+scan"]
            .map(str::to_owned),
    );
    let listed: BTreeSet<_> = rules().into_iter().filter(|rule| rule.starts_with('+')).collect();
    assert_eq!(listed, used);
}

/// A user with the rules of the docs, except those in `without`.
fn user(server: &TestRedis, without: &[&str]) {
    let rules = rules();
    assert!(without.iter().all(|rule| rules.iter().any(|listed| listed.starts_with(rule))));
    let mut words = vec!["ACL", "SETUSER", "app", "reset", "on", ">secret", "resetchannels"];
    words.extend(
        rules
            .iter()
            .map(|rule| &**rule)
            .filter(|rule| !without.iter().any(|w| rule.starts_with(w))),
    );
    let done: String = server.command(&words);
    assert_eq!(done, "OK");
}

fn as_user(server: &TestRedis) -> Semaphore {
    let url = format!("redis://app:secret@127.0.0.1:{}/", server.port());
    Semaphore::new(RedisBackend::builder(url).build().unwrap())
}

/// Returns what was refused to any user, except what the Redis client sends about itself on every connection.
fn refused(server: &TestRedis) -> Vec<String> {
    let log: Vec<Value> = server.command(&["ACL", "LOG"]);
    let object = |entry: &Value| {
        let entry = std::collections::HashMap::<String, Value>::from_redis_value(entry.clone());
        String::from_redis_value(entry.unwrap()["object"].clone()).unwrap()
    };
    log.iter().map(object).filter(|object| !object.starts_with("client")).collect()
}

/// A grant, a renewal, a loss of all data, a wait, a hand-over, a release.
async fn cycle(server: &TestRedis) {
    let (a, b) = (as_user(server), as_user(server));
    let lease = Duration::from_millis(600);
    let policy =
        Policy::builder(1).lease(lease).wait_timeout(Duration::from_secs(10)).build().unwrap();
    let first = a.acquire("x", &policy).await.unwrap();
    tokio::time::sleep(lease * 2).await;
    assert!(!first.is_lost());
    let _: String = server.command(&["FLUSHALL"]);
    eventually("the permit is counted again", async || a.inspect("x").await.unwrap().in_use == 1)
        .await;
    let waiting = tokio::spawn(b.acquire("x", &policy));
    eventually("it waits", async || a.inspect("x").await.unwrap().waiting == 1).await;
    assert!(matches!(a.try_acquire("x", &policy).await, Err(AcquireError::Rejected(_))));
    first.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(server.keys(), 0);
}

#[tokio::test]
async fn the_rules_of_the_docs_are_enough() {
    let server = TestRedis::start();
    user(&server, &[]);
    cycle(&server).await;
    assert_eq!(refused(&server), Vec::<String>::new());
    let tries = 2; // One for each process, when it connects.
    assert_eq!(server.calls("publish"), tries + 1, "the hand-over came as a message");
}

#[tokio::test]
async fn a_user_that_may_not_subscribe_is_served_all_the_same() {
    let server = TestRedis::start();
    for without in [&["+subscribe"][..], &["&"], &["+subscribe", "+publish", "&"]] {
        user(&server, without);
        cycle(&server).await;
    }
    let tries = 2; // Of the processes that may.
    assert_eq!(server.calls("publish"), tries, "nobody listens");
}

#[tokio::test]
async fn a_user_that_may_not_call_the_scripts_is_told_what_is_missing() {
    let server = TestRedis::start();
    user(&server, &["+evalsha"]);
    let error = as_user(&server).try_acquire("x", &Policy::new(1)).await.unwrap_err();
    assert!(matches!(error, AcquireError::Unavailable(_)), "{error}");
    assert!(error.to_string().contains("evalsha"), "{error}");
}

#[tokio::test]
async fn a_user_that_lacks_a_command_of_the_scripts_is_told_so() {
    let server = TestRedis::start();
    for missing in ["+zadd", "+time", "+pexpire"] {
        user(&server, &[missing]);
        let error = as_user(&server).try_acquire("x", &Policy::new(1)).await.unwrap_err();
        assert!(matches!(error, AcquireError::Unavailable(_)), "{error}");
        // Newer servers name the command, older ones only say that one was not allowed.
        let text = error.to_string();
        let named = text.contains(&format!("'{}'", &missing[1..]));
        assert!(named || text.contains("can't run this command"), "{missing}: {text}");
        assert_eq!(refused(&server)[0], missing[1..], "the server's own log names it");
        // The commands before it were executed, so remove what they wrote.
        let _: String = server.command(&["FLUSHALL"]);
    }
}

// --- on the server ----------------------------------------------------------------------------

fn script(name: &str) -> Script {
    let (_, body) = SCRIPTS.into_iter().find(|(script, _)| *script == name).unwrap();
    Script::new(&whole(body, &|_, piece| piece.to_owned()))
}

#[test]
fn all_scripts_load() {
    let server = TestRedis::start();
    for (name, _) in SCRIPTS {
        let script = script(name);
        let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
        assert_eq!(script.load(&mut connection).unwrap(), script.get_hash(), "{name}");
    }
}

/// Returns how many commands the header says that a call costs.
fn cost(name: &str) -> u64 {
    let (_, text) = SCRIPTS.into_iter().find(|(script, _)| *script == name).unwrap();
    let line = header(text).into_iter().find(|line| line.starts_with("Cost")).unwrap();
    line.split_whitespace().find_map(|word| word.parse().ok()).unwrap()
}

/// Returns how many commands a call makes.
fn commands(server: &TestRedis, name: &str, arguments: &[&str]) -> u64 {
    let mut connection = redis::Client::open(server.url()).unwrap().get_connection().unwrap();
    let script = script(name);
    script.load(&mut connection).unwrap();
    let _: () = redis::cmd("CONFIG").arg("RESETSTAT").query(&mut connection).unwrap();
    let mut call = script.prepare_invoke();
    call.key("semaphore:{x}");
    for argument in arguments {
        call.arg(*argument);
    }
    let _: Value = call.invoke(&mut connection).unwrap();
    let stats: String = redis::cmd("INFO").arg("commandstats").query(&mut connection).unwrap();
    stats
        .lines()
        .filter_map(|line| line.strip_prefix("cmdstat_")?.split_once(":calls="))
        .filter(|(command, _)| !["evalsha", "info", "config|resetstat", "config"].contains(command))
        .map(|(_, rest)| rest.split(',').next().unwrap().parse::<u64>().unwrap())
        .sum()
}

#[test]
fn calls_cost_what_the_headers_say() {
    let server = TestRedis::start();
    let node = "00000000001";
    let id = |n: &str| format!("{node}:{n}");
    let (one, two, three) = (id("1"), id("2"), id("3"));
    let acquire = |leaving: &[&str], ids: &[&str]| {
        let count = leaving.len().to_string();
        let arguments =
            [&["10", "0", "-1", "5000", "100", "0", "1", node, &count, "0"][..], leaving, ids]
                .concat();
        commands(&server, "acquire", &arguments)
    };
    assert_eq!(cost("acquire"), 5);
    assert_eq!(acquire(&[], &[&one]), 4, "the first");
    assert_eq!(acquire(&[], &[&two, &three]), 5, "two more");
    let (four, five) = (id("4"), id("5"));
    assert_eq!(acquire(&[&two, &three], &[&four, &five]), 6, "two for two");
    assert_eq!(acquire(&[&four, &five], &[&two, &three]), 6, "and back");
    assert_eq!(
        commands(&server, "renew", &["10", "0", "-1", "5000", "1", node, &one, &two]),
        cost("renew")
    );
    let reassert = commands(&server, "reassert", &["10", "0", "-1", "5000", "1", node, &one, "1"]);
    assert!(reassert.abs_diff(cost("reassert")) <= 1, "{reassert}");
    assert_eq!(commands(&server, "inspect", &["10", "0", "0"]), cost("inspect"));
    assert_eq!(commands(&server, "release", &["10", "0", "-1", "1", node, &one]), cost("release"));
    let last = commands(&server, "release", &["10", "0", "-1", "1", node, &two, &three]);
    assert!(last <= cost("release"), "{last}");
    assert_eq!(server.keys(), 0);
}

/// Returns the score of a start that was so long ago.
fn seconds_ago(server: &TestRedis, seconds: f64) -> String {
    let [at, us] = server.command::<[f64; 2]>(&["TIME"]);
    (seconds - at - us / 1e6).to_string()
}

/// How much of a rate is used, in a set with starts alone.
#[test]
fn an_inspection_counts_the_starts_of_a_window() {
    let server = TestRedis::start();
    // The last would keep others back for an hour, if the clock had not stepped back since.
    for (i, ago) in [90.0, 20.0, 10.0, -0.5, -3600.0].into_iter().enumerate() {
        let score = seconds_ago(&server, ago);
        let _: u64 = server.command(&["ZADD", "semaphore:{x}", &score, &format!("r:{i}")]);
    }
    let mut connection = connection(&server);
    let mut used = |starts: &str| -> [i64; 9] {
        let (reply, members) = call(&mut connection, "inspect", &["10", starts, "60000000"]);
        assert_eq!(members, 5, "it only reads");
        FromRedisValue::from_redis_value(Value::Array(reply)).unwrap()
    };
    let [now, in_use, waiting, listed, none @ ..] = used("0");
    assert_eq!([in_use, waiting, listed], [0; 3]);
    assert_eq!(none, [0, 60_000_000, 0, 0, 0], "no rate is known");
    assert_eq!(used("4")[4..], [4, 60_000_000, 3, 0, 0]);
    for (starts, opens_in) in [("3", 40.0), ("2", 50.0), ("1", 60.5)] {
        let [.., started, opening, _] = used(starts);
        let differs = (opening - now) as f64 / 1e6 - opens_in;
        assert_eq!(started, 3);
        assert!(differs.abs() < 0.4, "{starts}: {differs}");
    }
}

/// Of places with a rate that no process of this crate has written.
#[test]
fn an_inspection_passes_over_a_rate_that_is_no_number() {
    let server = TestRedis::start();
    let mut connection = connection(&server);
    for id in ["00000000001:1/!!!00zq0zk00", "00000000001:2/0go!!!!!!!!!", "00000000001:3/"] {
        let _: u64 = server.command(&["ZADD", "semaphore:{x}", "19000000000000", id]);
    }
    let reply: Vec<Value> = invoke(&mut connection, "inspect", &["10", "0", "0"]);
    assert_eq!(reply[4..9], [0; 5].map(Value::Int));
    assert_eq!(reply.len(), 9 + 2 * 3 + 2 * 3, "and lists them");
}

/// The clock stepped back by an hour after a rate of 4,000 was used up.
#[test]
fn what_lies_ahead_after_a_step_of_the_clock_is_taken_out_in_parts() {
    const AHEAD: usize = 4000;
    let server = TestRedis::start();
    let mut pipeline = redis::pipe();
    for i in 0..AHEAD {
        let score = seconds_ago(&server, -3600.0);
        pipeline.cmd("ZADD").arg("semaphore:{x}").arg(score).arg(format!("r:{i}")).ignore();
    }
    // Two counted before, by the clock as it is now.
    for i in 0..2 {
        let score = seconds_ago(&server, 10.0);
        pipeline.cmd("ZADD").arg("semaphore:{x}").arg(score).arg(format!("r::{i}")).ignore();
    }
    let mut connection = connection(&server);
    let _: () = pipeline.query(&mut connection).unwrap();
    let node = "00000000001";
    // In a minute three of them, or two.
    let id = |n: usize, starts: usize| format!("{node}:{n}/00{starts}000zq0ao0.000000100000001");
    let mut acquire = |n: usize, starts: usize| {
        let place = id(n, starts);
        let arguments = ["10", "0", "0", "5000", "-1", "200", "1", node, "0", "0", &place];
        let reply: Value = invoke(&mut connection, "acquire", &arguments);
        let count: usize = server.command(&["ZCARD", "semaphore:{x}"]);
        (reply, count)
    };
    let mut before = AHEAD + 2;
    let (reply, after) = acquire(1, 2);
    let Value::Array(of_refused) = reply else { panic!("{reply:?}") };
    let Value::Int(status) = of_refused[4] else { panic!("{of_refused:?}") };
    assert!((-50_007..=-49_007).contains(&status), "two have started: {of_refused:?}");
    let taken = before - after;
    assert!((400..=WORK_MAX + 2).contains(&taken), "{taken} in one call");
    before = after;
    let (reply, after) = acquire(2, 3);
    assert!(matches!(reply, Value::Int(_)), "the third: {reply:?}");
    let taken = before + 3 - after;
    assert!((400..=WORK_MAX + 2).contains(&taken), "{taken} in one call");
    let mut left = after;
    let calls = (3..).find(|n| {
        let (_, count) = acquire(*n, 3);
        let is_done = count == left;
        left = count;
        is_done
    });
    assert!(calls < Some(15), "{calls:?}");
    assert_eq!(left, 2 + 2, "two starts and a place with its own");
}

#[test]
fn calls_of_tenants_cost_what_the_headers_say() {
    let server = TestRedis::start();
    let node = "00000000001";
    let id = |n: &str, tenant: &str, each: &str| format!("{node}:{n}.{tenant}01{each}001");
    let (one, two) = (id("1", "0000a", "00000"), id("2", "0000b", "00000"));
    let (three, four) = (id("3", "0000c", "00002"), id("4", "0000c", "00002"));
    let acquire = |leaving: &[&str], ids: &[&str]| {
        let count = leaving.len().to_string();
        let arguments =
            [&["10", "0", "0", "5000", "100", "200", "1", node, &count, "0"][..], leaving, ids]
                .concat();
        commands(&server, "acquire", &arguments)
    };
    assert_eq!(cost("acquire"), 5);
    assert_eq!(acquire(&[], &[&one]), 6, "the first sets the expiry");
    assert_eq!(acquire(&[&one], &[&two]), 7, "one for one, and none beside them");
    assert_eq!(acquire(&[], &[&one, &three, &four]), 6, "one tenant of two has a cap");
    let renew = ["10", "0", "0", "5000", "1", node, &one, &two];
    assert_eq!(commands(&server, "renew", &renew), cost("renew"));
    let inspect =
        |starts: &str| commands(&server, "inspect", &["10", starts, "60000000"]) - cost("inspect");
    assert_eq!(inspect("0"), 4, "no place has a rate");
    assert_eq!(inspect("3"), 4 + 1, "and no start is left");
    let started: u64 =
        server.command(&["ZADD", "semaphore:{x}", &seconds_ago(&server, 1.0), "r:1"]);
    assert_eq!((started, inspect("2"), inspect("1")), (1, 4 + 1, 4 + 2));
    let _: u64 = server.command(&["ZREM", "semaphore:{x}", "r:1"]);
    let release = ["10", "0", "0", "1", node, &one, &two, &three, &four];
    assert_eq!(commands(&server, "release", &release), cost("release"));
    assert_eq!(server.keys(), 0);
    // From line to line.
    let (five, six) = (id("5", "0000a", "00000"), id("6", "0000b", "00000"));
    let waits = ["1", "0", "0", "5000", "100", "200", "1", node, "0", "0"];
    for id in [&one, &two, &five, &six] {
        commands(&server, "acquire", &[&waits[..], &[id]].concat());
    }
    let release = commands(&server, "release", &["1", "0", "0", "1", node, &one]);
    assert!(release <= 14, "{release}");
}

#[test]
fn calls_with_a_budget_cost_what_the_headers_say() {
    let server = TestRedis::start();
    let node = "00000000001";
    // 750 µs of a minute.
    let id = |n: &str, rate: &str, tenant: &str| {
        format!("{node}:{n}{rate}$0000z000000ku000zq0ao-00000140000000.{tenant}0100000001")
    };
    let acquire = |id: &str| {
        let arguments = ["20", "0", "0", "5000", "100", "200", "1", node, "0", "0", id];
        commands(&server, "acquire", &arguments)
    };
    let release = |id: &str, used: &str| {
        commands(&server, "release", &["20", "0", "0", "1", node, &format!("{id}={used}")])
    };
    // The first finds its budget full, and sets the expiry. One call of 64 looks for others that are full.
    acquire(&id("1", "", "00000"));
    let rate = "/0go000zq0ao0";
    for (n, rate, tenant) in [("2", "", "00000"), ("3", "", "0000a"), ("4", rate, "00000")] {
        let id = id(n, rate, tenant);
        let expected = cost("acquire") + 1 + u64::from(!rate.is_empty());
        assert!((expected..=expected + 6).contains(&acquire(&id)), "{id}");
        assert_eq!(release(&id, "000000a000000000"), 3, "{id}");
        assert_eq!(release(&id, "000000a000000000"), 2, "{id} is not there any more");
    }
    let used_nothing = release(&id("1", "", "00000"), "0000000000000000");
    assert!((5..=6).contains(&used_nothing), "{used_nothing}");
}

#[test]
fn calls_with_further_limits_cost_what_the_headers_say() {
    let server = TestRedis::start();
    let node = "00000000001";
    // Under one limit more each.
    let limits = ["0000700002", "0000800002", "0000900001"];
    let id = |n: &str, count: usize, each: &str| {
        format!("{node}:{n}+ad2w{count}{}.0000a01{each}801", limits[..count].concat())
    };
    let waits = ["10", "0", "0", "5000", "100", "200", "1", node, "0", "0"];
    let acquire = |id: &str| commands(&server, "acquire", &[&waits[..], &[id]].concat());
    let release = |id: &str| commands(&server, "release", &["10", "0", "0", "1", node, id]);
    let members = || server.command::<u64>(&["ZCARD", "semaphore:{x}"]);
    assert_eq!(acquire(&id("1", 0, "00000").replace("+ad2w0", "").replace("801", "001")), 6);
    let alone = members();
    for count in 1..=3 {
        for (each, more) in [("00000", 0), ("00005", 1)] {
            let id = id("2", count, each);
            assert_eq!(acquire(&id), 5 + count as u64 + more, "{id}");
            assert_eq!(members(), alone + 2 + count as u64, "{id}");
            assert_eq!(release(&id), cost("release"), "{id}");
            assert_eq!(members(), alone, "{id}");
        }
    }
    // The third limit is full: a second place parks there, and comes back when the first leaves.
    let (first, second) = (id("3", 3, "00000"), id("4", 3, "00000"));
    assert_eq!(acquire(&first), 5 + 3);
    acquire(&second);
    let parked: Option<f64> = server.command(&["ZSCORE", "semaphore:{x}", "tad2w3"]);
    assert!(parked.is_some_and(|score| (-2e-9..0.0).contains(&score)), "{parked:?}");
    let hands_over = release(&first);
    assert!((20..=32).contains(&hands_over), "{hands_over}");
    assert_eq!(members(), alone + 2 + 3, "the second holds");
    release(&second);
    assert_eq!(members(), alone, "nothing else is left");
}

/// The node of the dead waiters, and whether their leases have ended.
#[derive(Clone, Copy, Debug)]
struct Dead {
    one_node: bool,
    ended: bool,
}

const CROWDS: [Dead; 4] = [
    Dead { one_node: true, ended: true },
    Dead { one_node: true, ended: false },
    Dead { one_node: false, ended: true },
    Dead { one_node: false, ended: false },
];

fn connection(server: &TestRedis) -> redis::Connection {
    redis::Client::open(server.url()).unwrap().get_connection().unwrap()
}

/// Has this number of places wait whose nodes do not listen, and `behind` after them.
fn queue_up(server: &TestRedis, dead: Dead, count: u64, behind: &[&str]) {
    let (_, queued) = PIECES.into_iter().find(|(piece, _)| *piece == "queued").unwrap();
    let queued = between(queued, "local queued = '", "'").next().unwrap();
    let now: Vec<u64> = server.command(&["TIME"]);
    let ms = now[0] * 1000 + now[1] / 1000;
    let mut pipeline = redis::pipe();
    for first in (0..count).step_by(250) {
        let command = pipeline.cmd("ZADD").arg("semaphore:{x}");
        for n in first..count.min(first + 250) {
            let node = if dead.one_node { 1 } else { n + 1 };
            let id = format!("{node:011}:{n}");
            let lease_end = if dead.ended { ms - 1 } else { ms + 600_000 + n };
            let ticket = (ms - 1_000_000) * 1000 + n;
            command.arg(lease_end).arg(&id).arg(ticket).arg(format!("{queued}{id}"));
        }
        command.ignore();
    }
    for (n, id) in behind.iter().enumerate() {
        pipeline.cmd("ZADD").arg("semaphore:{x}").arg(ms + 600_000).arg(id);
        pipeline.arg(ms * 1000 + n as u64).arg(format!("{queued}{id}")).ignore();
    }
    let _: () = pipeline.query(&mut connection(server)).unwrap();
}

fn invoke<T: FromRedisValue>(
    connection: &mut redis::Connection,
    name: &str,
    arguments: &[&str],
) -> T {
    let script = script(name);
    let mut call = script.prepare_invoke();
    call.key("semaphore:{x}");
    arguments.iter().for_each(|argument| {
        call.arg(*argument);
    });
    call.invoke(connection).unwrap()
}

/// Calls a script. Returns its reply, and how many members the semaphore has then.
fn call(connection: &mut redis::Connection, name: &str, arguments: &[&str]) -> (Vec<Value>, usize) {
    let reply = invoke(connection, name, arguments);
    (reply, redis::cmd("ZCARD").arg("semaphore:{x}").query(connection).unwrap())
}

/// Releases nothing until no more is to be done. Returns the last reply, and the number of calls.
fn release_nothing(server: &TestRedis, limit: &str, node: &str) -> (Vec<Value>, usize) {
    let mut connection = connection(server);
    let mut before: usize = server.command(&["ZCARD", "semaphore:{x}"]);
    for calls in 1.. {
        let (reply, members) = call(&mut connection, "release", &[limit, "0", "-1", "1", node]);
        assert!(before - members <= 2 * WORK_MAX, "{before} {members}");
        before = members;
        if reply.last() != Some(&Value::Int(1)) {
            return (reply, calls);
        }
    }
    unreachable!()
}

#[test]
fn a_hundred_thousand_dead_waiters_are_passed_over_in_steps() {
    let server = TestRedis::start();
    let (node, id) = ("zzzzzzzzzzz", "zzzzzzzzzzz:1");
    for (dead, limit) in CROWDS.into_iter().flat_map(|dead| [(dead, "1"), (dead, "1000")]) {
        let _: String = server.command(&["FLUSHALL"]);
        queue_up(&server, dead, 100_000, &[id]);
        let (reply, calls) = release_nothing(&server, limit, node);
        // It is granted, and no other place is left.
        let granted = Vec::<String>::from_redis_value(Value::Array(reply)).unwrap();
        assert_eq!(granted[0], id, "{dead:?}");
        assert_eq!(server.command::<u64>(&["ZCARD", "semaphore:{x}"]), 1, "{dead:?}");
        let each = if dead.one_node || dead.ended { 490 } else { 100 };
        assert!(calls <= 100_000 / each + 2, "{dead:?}: {calls} calls");
    }
}

#[test]
fn every_script_keeps_to_the_bound() {
    let server = TestRedis::start();
    let node = "zzzzzzzzzzz";
    let ids: Vec<_> = (0..512).map(|n| format!("{node}:{n}")).collect();
    let ids: Vec<_> = ids.iter().map(String::as_str).collect();
    let proofs: Vec<_> = ids.iter().flat_map(|id| [*id, "2000000000000"]).collect();
    let calls = [
        (
            "acquire",
            [&["1000", "0", "-1", "5000", "1000000", "0", "1", node, "0", "0"][..], &ids].concat(),
        ),
        (
            "acquire",
            [&["1000", "0", "-1", "5000", "-1", "0", "1", node, "1", "0"][..], &ids].concat(),
        ),
        ("renew", [&["1000", "0", "-1", "5000", "1", node][..], &ids].concat()),
        ("reassert", [&["1000", "0", "-1", "5000", "1", node][..], &proofs].concat()),
        ("release", [&["1000", "0", "-1", "1", node][..], &ids].concat()),
    ];
    for dead in CROWDS {
        let mut connection = connection(&server);
        for (name, arguments) in &calls {
            let _: String = server.command(&["FLUSHALL"]);
            queue_up(&server, dead, 5_000, &["zzzzzzzzzzy:1"]);
            let (reply, members) = call(&mut connection, name, arguments);
            assert!(members + 2 * WORK_MAX >= 10_002, "{name} {dead:?}: {members}");
            let at = if *name == "release" { reply.len() - 1 } else { 1 };
            assert_eq!(reply[at], Value::Int(1), "{name} {dead:?}");
            if *name == "acquire" {
                // Permits are free, and no newcomer gets one.
                let barged = reply[4..].iter().any(|status| *status == Value::Int(1));
                assert!(!barged, "{dead:?}");
            }
        }
    }
}

#[tokio::test]
async fn a_request_behind_ten_thousand_dead_waiters_is_served_at_once() {
    let server = TestRedis::start();
    let semaphore = server.semaphore();
    let policy = Policy::builder(1).max_queue(1_000_000).build().unwrap();
    drop(semaphore.acquire("y", &policy).await.unwrap());
    for dead in CROWDS {
        let _: String = server.command(&["FLUSHALL"]);
        queue_up(&server, dead, 10_000, &[]);
        let _: String = server.command(&["CONFIG", "RESETSTAT"]);
        let permit = tokio::time::timeout(Duration::from_secs(10), semaphore.acquire("x", &policy));
        let permit = permit.await.expect("it is told to go on").unwrap();
        let calls = server.calls("evalsha");
        assert!((20..=160).contains(&calls), "{dead:?}: {calls} calls");
        permit.release().await.unwrap();
        eventually("nothing is left", async || server.keys() == 0).await;
    }
}

#[tokio::test]
async fn scripts_that_the_server_forgot_are_sent_again() {
    let server = TestRedis::start();
    let (a, b) = (server.semaphore(), server.semaphore());
    let policy = Policy::builder(1).wait_timeout(Duration::from_secs(10)).build().unwrap();
    let flush = || {
        let _: String = server.command(&["SCRIPT", "FLUSH"]);
    };
    for _ in 0..20 {
        flush();
        let first = a.acquire("x", &policy).await.unwrap();
        flush();
        let waiting = tokio::spawn(b.acquire("x", &policy));
        eventually("it waits", async || a.inspect("x").await.unwrap().waiting == 1).await;
        flush();
        first.release().await.unwrap();
        let second = waiting.await.unwrap().unwrap();
        flush();
        drop(second);
        eventually("nothing is left", async || server.keys() == 0).await;
    }
}
