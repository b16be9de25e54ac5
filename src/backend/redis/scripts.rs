//! The scripts of `lua/`, and their calls.

use std::sync::LazyLock;

use redis::{Cmd, Pipeline, Script};

/// The pieces that several scripts share. A line that is `--@` and the name of one stands for it.
const PIECES: [(&str, &str); 23] = [
    ("add", include_str!("../../../lua/add.lua")),
    ("again", include_str!("../../../lua/again.lua")),
    ("answer", include_str!("../../../lua/answer.lua")),
    ("asleep", include_str!("../../../lua/asleep.lua")),
    ("charges", include_str!("../../../lua/charges.lua")),
    ("claim", include_str!("../../../lua/claim.lua")),
    ("clock", include_str!("../../../lua/clock.lua")),
    ("first_end", include_str!("../../../lua/first_end.lua")),
    ("further", include_str!("../../../lua/further.lua")),
    ("kind", include_str!("../../../lua/kind.lua")),
    ("lease", include_str!("../../../lua/lease.lua")),
    ("leave", include_str!("../../../lua/leave.lua")),
    ("promote", include_str!("../../../lua/promote.lua")),
    ("queued", include_str!("../../../lua/queued.lua")),
    ("rate", include_str!("../../../lua/rate.lua")),
    ("recall", include_str!("../../../lua/recall.lua")),
    ("room", include_str!("../../../lua/room.lua")),
    ("settle", include_str!("../../../lua/settle.lua")),
    ("survey", include_str!("../../../lua/survey.lua")),
    ("sweep", include_str!("../../../lua/sweep.lua")),
    ("take", include_str!("../../../lua/take.lua")),
    ("used", include_str!("../../../lua/used.lua")),
    ("write", include_str!("../../../lua/write.lua")),
];

/// The text of a script and its hash.
pub(super) struct Lua {
    text: String,
    hash: String,
}

impl Lua {
    fn new(script: &str) -> Self {
        let mut text = String::new();
        insert_pieces(script, &mut text);
        let hash = Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }
}

fn insert_pieces(lines: &str, text: &mut String) {
    for line in lines.lines() {
        let mark = line.trim_start().strip_prefix("--@");
        match mark.and_then(|mark| PIECES.into_iter().find(|(name, _)| *name == mark)) {
            Some((_, piece)) => insert_pieces(piece, text),
            None => text.extend([line, "\n"]),
        }
    }
}

macro_rules! lua {
    ($file:literal) => {
        LazyLock::new(|| Lua::new(include_str!(concat!("../../../lua/", $file))))
    };
}

pub(super) static ACQUIRE: LazyLock<Lua> = lua!("acquire.lua");
pub(super) static RELEASE: LazyLock<Lua> = lua!("release.lua");
pub(super) static RENEW: LazyLock<Lua> = lua!("renew.lua");
pub(super) static REASSERT: LazyLock<Lua> = lua!("reassert.lua");
pub(super) static INSPECT: LazyLock<Lua> = lua!("inspect.lua");
pub(super) static OVERRIDES: LazyLock<Lua> = lua!("overrides.lua");
pub(super) static OVERRIDE: LazyLock<Lua> = lua!("override.lua");
pub(super) static PAUSE: LazyLock<Lua> = lua!("pause.lua");
pub(super) static ADAPT: LazyLock<Lua> = lua!("adapt.lua");
pub(super) static REVOKE: LazyLock<Lua> = lua!("revoke.lua");

static ALL: [&LazyLock<Lua>; 10] = [
    &ACQUIRE, &RELEASE, &RENEW, &REASSERT, &INSPECT, &OVERRIDES, &OVERRIDE, &PAUSE, &ADAPT, &REVOKE,
];

/// Loads all scripts, so that none has to be sent a second time: it would be executed behind calls that were sent after
/// it.
pub(super) fn load() -> Pipeline {
    let mut pipeline = Pipeline::new();
    for script in ALL {
        pipeline.cmd("SCRIPT").arg("LOAD").arg(&*script.text);
    }
    pipeline
}

/// How a call refers to its script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// By its hash. Redis replies NOSCRIPT if it does not know the script.
    Hash,
    /// By its text. Redis knows the script afterwards.
    Text,
}

/// Begins a call of a script, with capacity for this number of arguments and bytes.
pub(super) fn call(script: &Lua, by: By, key: &str, arguments: usize, bytes: usize) -> Cmd {
    call_with(script, by, [key], arguments, bytes)
}

/// Begins a call of a script with these keys, which are in one slot.
pub(super) fn call_with<const KEYS: usize>(
    script: &Lua,
    by: By,
    keys: [&str; KEYS],
    arguments: usize,
    bytes: usize,
) -> Cmd {
    let (command, script) = match by {
        By::Hash => ("EVALSHA", &script.hash),
        By::Text => ("EVAL", &script.text),
    };
    let of_keys: usize = keys.iter().map(|key| key.len()).sum();
    let size = command.len() + script.len() + of_keys + bytes;
    let mut call = Cmd::with_capacity(3 + KEYS + arguments, size);
    call.arg(command).arg(script).arg(KEYS).arg(&keys);
    call
}
