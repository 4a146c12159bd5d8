"""The README and the documents: short where promised, no dead link or command, no term unexplained."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fp8dash import cli

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "fp8dash" / "docs"
README = ROOT / "README.md"
DOCUMENTS = [README, ROOT / "CHANGELOG.md", *sorted(FOLDER.glob("*.md"))]
LARGEST_README = 8_192  # bytes
MAKE = re.compile(r"`make ([\w-]+)`")
PATH = re.compile(r"(?<![\w/.*-])(?:fp8dash|db|jobs|tests|\.images)/[\w./-]*\w")
TERMS = (
    "format", "tile", "scale rule", "cast", "recipe", "run", "study", "baseline", "measurement", "standing", "coverage",
)  # fmt: skip

every_document = pytest.mark.parametrize("file", DOCUMENTS, ids=lambda file: file.name)


def text_of(file: Path) -> str:
    return file.read_text("utf-8")


def prose(text: str) -> str:
    """A document without its fenced blocks."""
    return "".join(text.split("```")[::2])


def anchors(text: str) -> set[str]:
    """A document's headings as GitHub links to them."""
    headings = re.findall(r"^#+ (.+)$", prose(text), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[list[str]]:
    """What a document types after `fp8dash`, in fenced blocks and in code spans."""
    fenced = [line for block in text.split("```")[1::2] for line in block.splitlines() if line.startswith("fp8dash ")]
    spans = re.findall(r"`(fp8dash [^`]+)`", prose(text))
    return [shlex.split(line.partition("  #")[0])[1:] for line in (*fenced, *spans)]


def test_the_readme_is_read_in_a_few_minutes():
    assert README.stat().st_size < LARGEST_README


def test_the_readme_leads_to_every_document():
    for file in FOLDER.glob("*.md"):
        assert f"(fp8dash/docs/{file.name})" in text_of(README)


@every_document
def test_every_link_leads_to_a_file_and_a_heading(file):
    for target in re.findall(r"\]\(([^)]+)\)", prose(text_of(file))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = file.parent / path if path else file
        assert linked.is_file(), target
        assert not anchor or anchor in anchors(text_of(linked)), target


@every_document
def test_every_file_that_is_named_exists(file):
    text = text_of(file)
    for path in set(PATH.findall(text)) - set(re.findall(r"New file `([^`]+)`", text)):
        made = any(path in check for check in re.findall(r"Check: `([^`]+)`", text))  # by the checklist
        assert made or (ROOT / path).exists(), path


@every_document
def test_every_command_parses(file):
    for words in commands(text_of(file)):
        if len(words) == 1 or words[-1] == "--help":
            assert words[0] in subcommands(), words
        else:
            cli._parser().parse_args(words)


def subcommands() -> set[str]:
    actions = cli._parser()._subparsers
    return {name for action in actions._group_actions for name in action.choices}


def test_every_make_target_that_is_named_exists():
    makefile = text_of(ROOT / "Makefile")
    for file in DOCUMENTS:
        for target in MAKE.findall(text_of(file)):
            assert re.search(rf"^{target}:", makefile, re.M), target


@every_document
def test_no_document_names_a_path_of_somebodys_machine(file):
    assert re.findall(r"/(?:home|root|tmp|Users|work|private)/[\w.-]+", text_of(file)) == []


def test_every_term_is_explained_where_the_methods_begin():
    words = text_of(FOLDER / "methods.md").partition("## Words")[2].partition("\n## ")[0].lower()
    for term in TERMS:
        assert f"**{term}**" in words, term


def test_the_glossary_explains_a_word_before_it_uses_it():
    words = text_of(FOLDER / "methods.md").partition("## Words")[2].partition("\n## ")[0].lower()
    for term in ("tile", "cast", "recipe", "baseline"):
        assert words.index(f"**{term}**") + len("**") == words.index(term), term


def test_the_documents_come_with_an_installation():
    code = (
        "from importlib.resources import files\n"
        "names = {f.name for f in files('fp8dash').joinpath('docs').iterdir()}\n"
        "assert 'methods.md' in names, names"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
    assert 'fp8dash = ["docs/*.md"]' in text_of(ROOT / "pyproject.toml")
