"""What extend.md says to do, done: its steps are read from the document and applied to a copy of the project.

A step is one of these lines; those that end in a colon are followed by a fenced block:

    New file `PATH`:                       the block is the file
    In `PATH`, below `TEXT`:               the block goes below the one line that holds the text
    In `PATH`, above `TEXT`:               the block goes above it
    In `PATH`, `OLD` becomes `NEW`.        in the one place where the old text stands
    Run `COMMAND`.                         in the copy, when all files are as they should be
    Check: `COMMAND`.                      the same; it proves that the addition works
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "fp8dash" / "docs" / "extend.md"
FENCED = r"\n+```\w*\n(?P<block>.*?)^```$"
PLACED = re.compile(r"In `(?P<path>[^`\n]+)`, (?P<where>below|above) `(?P<text>[^`\n]+)`:" + FENCED, re.M | re.S)
NEW = re.compile(r"New file `(?P<path>[^`\n]+)`:" + FENCED, re.M | re.S)
BECOMES = re.compile(r"In `(?P<path>[^`\n]+)`, `(?P<old>[^`\n]+)` becomes `(?P<new>[^`\n]+)`\.")
COMMAND = re.compile(r"(?:Run|Check:) `(?P<command>[^`\n]+)`\.")
WRITTEN = re.compile(r"New file `|(?:below|above) `[^`\n]+`:\n|` becomes `|Run `|Check: `")
RUNNER = """
import json, runpy, sys, pytest
for words in json.loads(sys.argv[1]):
    print("$", *words, flush=True)
    if words[0] == "pytest":
        status = pytest.main(["-p", "no:cacheprovider", *words[1:]])
        if status:
            sys.exit(int(status))
    else:
        runpy.run_module(words[2], run_name="__main__")
"""


def sections() -> dict[str, str]:
    """The checklists by their titles."""
    parts = re.split(r"^## (Add .+)$", DOCUMENT.read_text("utf-8"), flags=re.M)[1:]
    return dict(zip(parts[::2], (part.partition("\n## ")[0] for part in parts[1::2]), strict=True))


def copied(folder: Path) -> Path:
    """A copy of the project in a folder."""
    ignored = shutil.ignore_patterns(".*_cache", ".git", ".venv", "__pycache__", "*.egg-info", ".hypothesis", "build")
    return Path(shutil.copytree(ROOT, folder, ignore=ignored, dirs_exist_ok=True))


def follow(section: str, folder: Path) -> list[list[str]]:
    """Makes a checklist's changes to files, in order, and returns the commands that are to be run then, as words.

    Raises AssertionError where a step cannot be done.
    """
    changes: list[tuple[int, Callable[[Path], None]]] = [
        (step.start(), partial(change, step=step))
        for pattern, change in ((NEW, _create), (PLACED, _place), (BECOMES, _replace))
        for step in pattern.finditer(section)
    ]
    commands = [shlex.split(step["command"]) for step in COMMAND.finditer(section)]
    written = len(WRITTEN.findall(section))
    assert len(changes) + len(commands) == written, "a step is not written as this test reads it"
    for _, change in sorted(changes, key=lambda place: place[0]):
        change(folder)
    return commands


def run(commands: list[list[str]], folder: Path) -> None:
    """Runs commands one after another in one process, since each would import torch; the first failure ends it."""
    environment = os.environ | {"PYTHONPATH": str(folder), "FP8DASH_DATA_DIR": str(folder / "data")}
    done = subprocess.run(
        [sys.executable, "-c", RUNNER, json.dumps(commands)],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"


def _create(folder: Path, step: re.Match[str]) -> None:
    last = max(int(file.name[:4]) for file in (folder / "db/migrations/versions").glob("0*.py"))
    numbers = {"NEXT": f"{last + 1:04}", "LAST": f"{last:04}"}  # of migrations
    path, block = (re.sub("NEXT|LAST", lambda word: numbers[word[0]], step[part]) for part in ("path", "block"))
    file = folder / path
    assert not file.exists(), f"{path} is there already"
    file.parent.mkdir(exist_ok=True)
    file.write_text(block, "utf-8")


def _place(folder: Path, step: re.Match[str]) -> None:
    file = folder / step["path"]
    lines = file.read_text("utf-8").splitlines(keepends=True)
    places = [index for index, line in enumerate(lines) if step["text"] in line]
    assert len(places) == 1, f"{step['path']} has {len(places)} lines with {step['text']}"
    place = places[0] + (step["where"] == "below")
    file.write_text("".join([*lines[:place], step["block"], *lines[place:]]), "utf-8")


def _replace(folder: Path, step: re.Match[str]) -> None:
    file = folder / step["path"]
    text = file.read_text("utf-8")
    assert text.count(step["old"]) == 1, f"{step['path']} has {step['old']} {text.count(step['old'])} times"
    file.write_text(text.replace(step["old"], step["new"]), "utf-8")
