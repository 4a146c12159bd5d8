"""The documents of `fp8dash/docs`, read as Markdown and made fit for the guide: no HTML, no picture from elsewhere."""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

CODE = re.compile(r"(^```.*?^```$|^~~~.*?^~~~$|`[^`\n]+`)", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(r"!\[([^\]]*)\]\([^)]*\)")
LINK = re.compile(r"(?<!\!)\[([^\]]+)\]\(([^)\s]+)\)")
ELSEWHERE = ("http://", "https://", "#")


@dataclass(frozen=True, slots=True)
class Document:
    """One file: its name without .md, the title in its first line, and what follows it."""

    name: str
    title: str
    text: str


@cache
def documents() -> dict[str, Document]:
    """All documents by name, the methods first, the others by title."""
    folder = resources.files("fp8dash") / "docs"
    files = [file for file in folder.iterdir() if file.name.endswith(".md")] if folder.is_dir() else []
    read = [document(file.name.removesuffix(".md"), file.read_text("utf-8")) for file in files]
    return {one.name: one for one in sorted(read, key=lambda one: (one.name != "methods", one.title))}


def document(name: str, text: str) -> Document:
    """A document from its file's text.

    >>> document("limits", "# Known limits\\n\\nNone.\\n")
    Document(name='limits', title='Known limits', text='None.')
    """
    first, _, rest = text.strip().partition("\n")
    titled = first.startswith("# ")
    return Document(name, first.removeprefix("# ").strip() if titled else name, (rest if titled else text).strip())


def as_shown(text: str, names: frozenset[str]) -> str:
    r"""A document for st.markdown: links between documents lead to the guide, `$` and `:name:` mean themselves.

    >>> as_shown("See [M](methods.md#words), [x](../x.py), ![p](a.png), $1 `$2`", frozenset({"methods"}))
    'See [M](guide?doc=methods#words), x, p, \\$1 `$2`'
    """
    parts = CODE.split(text)
    parts[::2] = [_plain_part(part, names) for part in parts[::2]]
    return "".join(parts)


def _plain_part(text: str, names: frozenset[str]) -> str:
    """What stands outside of code."""
    text = PICTURE.sub(r"\1", text)
    text = LINK.sub(lambda link: _linked(link[1], link[2], names), text)
    return re.sub(r"(?<!\\)\$", r"\\$", re.sub(r":(?=\w+[\[:])", r"\\:", text))


def _linked(words: str, target: str, names: frozenset[str]) -> str:
    """A link that works in the app; bare words where it leads to a file that the app does not show."""
    if target.startswith(ELSEWHERE):
        return f"[{words}]({target})"
    name, _, place = target.rpartition("/")[2].partition("#")
    doc_name = name.removesuffix(".md")
    return f"[{words}](guide?doc={doc_name}{f'#{place}' if place else ''})" if doc_name in names else words
