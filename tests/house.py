#!/usr/bin/env python3
"""Counts what a reader of this repository meets: files, long functions, large structs, comments, prose.

No figure is a limit. Compare them before and after a change of the structure: tests/house.py [FOLDER]
"""

import re
import sys
from pathlib import Path

root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
crates = [path for path in (root / "src", root / "protocol" / "src", root / "gateway" / "src") if path.is_dir()]
TEST_FOLDERS = {"tests"}
TEST_FILES = {"tests.rs", "test.rs"}


def is_test(path):
    return path.name in TEST_FILES or TEST_FOLDERS & set(path.relative_to(root).parts[1:-1])


def without_tests(text):
    """The text before its module of tests."""
    at = re.search(r"(?m)^#\[cfg\((?:all\()?test\b[^\n]*\n(?:#\[[^\n]*\n)*mod \w+ \{", text)
    return text[: at.start()] if at else text


def blank(text):
    """The text with comments, strings and characters blanked: braces that are left are code."""
    pattern = (
        r"//[^\n]*|/\*.*?\*/"
        r'|r(#*)".*?"\1|b?"(?:\\.|[^"\\])*"'
        r"|b?'(?:\\.[^']*|[^'\\])'"
    )
    return re.sub(pattern, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S)


def block(code, start):
    """Where the braces that begin at or after `start` end; `None`: there are none before a semicolon."""
    depth = 0
    for at in range(start, len(code)):
        if code[at] == "{":
            depth += 1
        elif code[at] == "}":
            depth -= 1
            if depth == 0:
                return at
        elif code[at] == ";" and depth == 0:
            return None
    return None


def functions(path, code):
    for found in re.finditer(r"\bfn (\w+)", code):
        end = block(code, found.end())
        if end is not None:
            yield code.count("\n", found.start(), end) + 1, f"{path.relative_to(root)}: {found[1]}"


def structs(path, code):
    for found in re.finditer(r"\bstruct (\w+)[^;{(]*\{", code):
        end = block(code, found.start())
        if end is not None:
            fields = re.findall(r"(?m)^\s*(?:pub(?:\([^)]*\))? )?\w+:", code[found.end() : end])
            yield len(fields), f"{path.relative_to(root)}: {found[1]}"


def words(text):
    """The words of a page without its code."""
    text = re.sub(r"(?ms)^ *```.*?^ *```", "", text)
    return len(re.findall(r"[^\W\d_][\w'’-]*", text))


class Count:
    def __init__(self):
        self.files = self.code = self.comments = self.docs = 0
        self.inner = self.public = self.cfgs = 0
        self.long, self.large = [], []

    def add(self, path):
        text = without_tests(path.read_text())
        lines = [line.strip() for line in text.splitlines()]
        self.files += 1
        self.docs += sum(line.startswith(("///", "//!")) for line in lines)
        self.comments += sum(line.startswith("//") and not line.startswith(("///", "//!")) for line in lines)
        self.code += sum(bool(line) and not line.startswith("//") for line in lines)
        code = blank(text)
        self.inner += len(re.findall(r"\bpub\((?:crate|super|in )", code))
        self.public += len(re.findall(r"(?m)^\s*pub (?:const |async |unsafe )*(?:fn|struct|enum|trait|type|mod|const|static)\b", code))
        self.cfgs += code.count("#[cfg(")
        self.long += functions(path, code)
        self.large += structs(path, code)


def row(what, value, beside=""):
    print(f"{what:<46} {value:>10}  {beside}".rstrip())


total = Count()
folders = {}
for crate in crates:
    for path in sorted(crate.rglob("*.rs")):
        if not is_test(path):
            total.add(path)
            folders[path.parent] = folders.get(path.parent, 0) + 1

thousand = total.code / 1000
row("files of the crates, without tests", total.files)
row("lines of code", total.code)
row("comments to code", f"{total.comments / total.code:.3f}")
row("docs to code", f"{total.docs / total.code:.2f}")
row("items inside only, per 1,000 lines", f"{total.inner / thousand:.0f}", "pub(crate), pub(super), pub(in …)")
row("items declared pub", total.public)
row("cfg per 1,000 lines", f"{total.cfgs / thousand:.1f}")
for count, folder in sorted(((count, folder) for folder, count in folders.items()), reverse=True)[:3]:
    row("files side by side", count, folder.relative_to(root))
for lines, name in sorted(total.long, reverse=True)[:5]:
    row("longest functions, lines", lines, name)
row("functions of more than 60 lines", sum(lines > 60 for lines, _ in total.long), f"of {len(total.long)}")
for fields, name in sorted(total.large, reverse=True)[:5]:
    row("largest structs, fields", fields, name)

pages = [path for path in root.rglob("*.md") if not {"target", ".git", "node_modules", ".tools", ".server"} & set(path.parts)]
prose = {path: words(path.read_text()) for path in pages}
row("words of Markdown, without code", sum(prose.values()), f"in {len(pages)} pages")
for path, count in sorted(prose.items(), key=lambda item: -item[1])[:6]:
    row("longest pages, words", count, path.relative_to(root))
scripts = [path for path in (root / "tests").iterdir() if path.is_file() and path.suffix in ("", ".py")]
row("programs in tests/", len(scripts), f"{sum(len(path.read_text().splitlines()) for path in scripts)} lines")
lock = root / "Cargo.lock"
if lock.is_file():
    row("packages in Cargo.lock", lock.read_text().count("[[package]]"))
