//! The scripts of `lua/`, and the pieces of them that several share.

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../lua/", $name, ".lua")))),*]
    };
}

pub(crate) const SCRIPTS: [(&str, &str); 10] = files![
    "acquire",
    "release",
    "renew",
    "reassert",
    "inspect",
    "overrides",
    "override",
    "pause",
    "adapt",
    "revoke",
];

pub(crate) const PIECES: [(&str, &str); 23] = files![
    "add",
    "again",
    "answer",
    "asleep",
    "charges",
    "claim",
    "clock",
    "first_end",
    "further",
    "kind",
    "lease",
    "leave",
    "promote",
    "queued",
    "rate",
    "recall",
    "room",
    "settle",
    "survey",
    "sweep",
    "take",
    "used",
    "write",
];

/// Returns a script with its pieces, each as `change` makes it of its name and text.
pub(crate) fn whole(text: &str, change: &dyn Fn(&str, &str) -> String) -> String {
    let line = |line: &str| match line.trim_start().strip_prefix("--@") {
        Some(mark) => {
            let piece = PIECES.into_iter().find(|(name, _)| *name == mark);
            let (name, lines) = piece.unwrap_or_else(|| panic!("no piece is {mark:?}"));
            whole(&change(name, lines), change)
        }
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}
