//! The manual names everything that exists: every event of the crate, and every flag of the gateway; and its examples
//! run.

use std::collections::BTreeSet;
use std::path::Path;

const TARGET: &str = "target: \"tower_semaphore\"";

/// Returns the last string literal of the macro call whose arguments continue with `rest`: the message of an event, or
/// the name of a span.
fn message(rest: &str) -> &str {
    let (mut depth, mut last, mut at) = (1, "", 0);
    let bytes = rest.as_bytes();
    while depth > 0 {
        match bytes[at] {
            b'(' => depth += 1,
            b')' => depth -= 1,
            b'"' => {
                let end = at + 1 + rest[at + 1..].find('"').expect("a closing quote");
                last = &rest[at + 1..end];
                at = end;
            }
            _ => {}
        }
        at += 1;
    }
    last
}

fn messages(folder: &Path, found: &mut BTreeSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            messages(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let source = std::fs::read_to_string(&path).unwrap();
            // A literal may continue on the next line.
            let source: Vec<_> = source.split("\\\n").collect();
            let source: String = source.iter().map(|line| line.trim_start()).collect();
            let calls = source.split(TARGET).skip(1);
            // The text of one is in a variable.
            let literal = calls.map(message).filter(|message| !message.starts_with('{'));
            found.extend(literal.map(str::to_owned));
        }
    }
}

#[test]
fn every_event_is_documented() {
    let mut found = BTreeSet::new();
    messages(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src"), &mut found);
    let page = include_str!("../../docs/observability.md");
    assert!(found.len() > 20, "{found:?}");
    for message in found {
        assert!(page.contains(&format!("`{message}")), "docs/observability.md lacks {message:?}");
    }
}

#[test]
fn every_setting_of_a_layer_is_in_the_table() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../src/limit/builder");
    let page = include_str!("../../docs/choosing.md");
    let (_, table) = page.split_once("\n## All settings\n").unwrap();
    let mut found = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let source = std::fs::read_to_string(entry.unwrap().path()).unwrap();
        let (_, methods) =
            source.split_once("\nimpl ConcurrencyLimitBuilder {").unwrap_or_default();
        for line in methods.lines().filter_map(|line| line.strip_prefix("    pub ")) {
            let name = line.trim_start_matches("const ").trim_start_matches("fn ");
            let name = name.split(['(', '<']).next().unwrap();
            assert!(name == "build" || table.contains(&format!("`{name}`")), "no {name} there");
            found += 1;
        }
    }
    assert!(found > 35, "{found}");
}

#[cfg(feature = "redis")]
#[test]
fn every_flag_of_the_gateway_is_documented() {
    fn flags(text: &str) -> BTreeSet<&str> {
        let is_flag = |c: char| c.is_ascii_lowercase() || c == '-';
        let words = text.split(|c| !is_flag(c)).filter(|word| word.starts_with("--"));
        words.filter(|word| word.len() > 2 && !word.starts_with("---")).collect()
    }
    let output = crate::support::gateway::Gateway::command().arg("--help").output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let mut offered = flags(&help);
    assert!(offered.remove("--help"));
    let page = include_str!("../../docs/gateway.md");
    let (_, page) = page.split_once("\n## Flags\n").unwrap();
    let (page, _) = page.split_once("\n## ").unwrap();
    let documented: BTreeSet<_> =
        flags(page).into_iter().filter(|flag| *flag != "--help").collect();
    assert!(offered.is_subset(&documented), "{:?}", offered.difference(&documented));
    if cfg!(all(feature = "admin", feature = "etcd", feature = "tls")) {
        assert_eq!(documented, offered);
    }
}

#[test]
fn every_snippet_of_the_page_on_testing_is_a_test_that_runs() {
    let (page, tests) = (include_str!("../../docs/testing.md"), include_str!("your_service.rs"));
    let snippets: Vec<_> = page.split("```rust\n").skip(1).collect();
    assert!(snippets.len() > 5, "{} snippets", snippets.len());
    for snippet in &snippets {
        let (snippet, _) = snippet.split_once("```").expect("the end of a snippet");
        assert!(tests.contains(snippet), "tests/it/your_service.rs lacks this:\n{snippet}");
    }
    for test in tests.split("\nasync fn ").skip(1).filter_map(|test| test.split('(').next()) {
        assert!(page.contains(test), "docs/testing.md lacks {test}");
    }
}

#[test]
fn the_adapter_of_the_page_on_stacks_is_that_of_the_example() {
    let (page, example) =
        (include_str!("../../docs/stacks.md"), include_str!("../../examples/client/adapter.rs"));
    let (_, adapter) = page.split_once("\n/// Wraps `inner`").unwrap();
    let (adapter, _) = adapter.split_once("\n}\n").unwrap();
    assert!(example.contains(adapter), "examples/client/adapter.rs lacks this:\n{adapter}");
}

#[test]
fn the_exporter_of_the_module_is_that_of_the_page() {
    let module = include_str!("../../src/metrics/mod.rs");
    let (_, snippet) = module.split_once("//! ```ignore\n").unwrap();
    let (snippet, _) = snippet.split_once("//! ```\n").unwrap();
    let shown = |line: &str| !line.starts_with("# ") && !line.is_empty();
    let page = include_str!("../../docs/observability.md").lines().filter(|line| shown(line));
    let page: String = page.map(|line| format!("{line}\n")).collect();
    let snippet = snippet.lines().map(|line| line.strip_prefix("//! ").unwrap_or_default());
    let snippet: String =
        snippet.filter(|line| shown(line)).map(|line| format!("{line}\n")).collect();
    assert!(page.contains(&snippet), "docs/observability.md lacks this:\n{snippet}");
}
