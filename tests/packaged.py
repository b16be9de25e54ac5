#!/usr/bin/env python3
"""Whether all that the packaged pages link to is in the package too, headings among it.

A file of another package of this repository, such as an example, only has to be there: no package can contain it.
"""

import os
import re
import subprocess
import sys

files = subprocess.run(
    ["cargo", "package", "--package", "tower-semaphore", "--list", "--allow-dirty"],
    check=True,
    capture_output=True,
    text=True,
).stdout.split()
pages = [name for name in files if name.endswith(".md")]


def is_elsewhere(path):
    """Whether it is a file of another package of this repository."""
    folders = [os.path.dirname(path)]
    while folders[-1]:
        folders.append(os.path.dirname(folders[-1]))
    return os.path.isfile(path) and any(os.path.isfile(f"{folder}/Cargo.toml") for folder in folders[:-1])


def text_of(page):
    """The page without its code, where a link is no link."""
    with open(page, encoding="utf-8") as file:
        text = file.read()
    return re.sub(r"`[^`\n]*`", "`code`", re.sub(r"(?ms)^```.*?^```", "", text))


def anchors(page):
    """What its headings are called in links to them."""
    with open(page, encoding="utf-8") as file:
        text = re.sub(r"(?ms)^```.*?^```", "", file.read())
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        for heading in re.findall(r"(?m)^#+ (.*)$", text)
    }


broken = []
count = 0
for page in pages:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", link):
            continue
        count += 1
        path, _, anchor = link.partition("#")
        path = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
        if path not in files and not is_elsewhere(path):
            broken.append(f"{page}: {link}: {path} is not in the package")
        elif anchor and anchor not in anchors(path):
            broken.append(f"{page}: {link}: no heading of {path} is called so")

for line in broken:
    print(line)
print(f"{len(files)} files; {count} links in {len(pages)} pages, {len(broken)} broken")
sys.exit(bool(broken) or not count)
