"""How the screen writes numbers, times and what users typed. No streamlit, no database."""

import re
from collections.abc import Mapping
from datetime import datetime, tzinfo
from pathlib import PurePath

from fp8dash.choose.request import Request
from fp8dash.choose.windows import Reading
from fp8dash.report.numbers import DASH

MARKDOWN = re.compile(r"([!-/:-@\[-`{-~])")
APART = re.compile(r"(?<=:)(?=[\w+/])|(?<=[-<>~=])(?=[-<>=])|(?<=\w)(?=@)|(?<=www)(?=\.)")  # shortcodes, arrows, links
JOINER = "\u2060"  # zero wide


def plain(text: str) -> str:
    r"""Text that Markdown shows letter for letter: nothing in it becomes bold, a link, a colour, a formula or HTML.

    >>> plain("**x**")
    '\\*\\*x\\*\\*'
    """
    text = " ".join(text.split())
    text = APART.sub(JOINER, text)
    return MARKDOWN.sub(r"\\\1", text)


def lasted(seconds: float | None) -> str:
    """A duration.

    >>> lasted(4.84), lasted(31.4), lasted(98.0), lasted(4000), lasted(None)
    ('4.8 s', '31 s', '1 min 38 s', '1 h 06 min', '—')
    """
    if seconds is None:
        return DASH
    if round(seconds) < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def moment(when: datetime | str | None, zone: tzinfo | None = None) -> str:
    """A moment in the reader's zone.

    >>> from datetime import UTC
    >>> moment("2026-05-04T09:08:07+00:00", UTC)
    '2026-05-04 09:08'
    """
    if not when:
        return DASH
    parsed = datetime.fromisoformat(when) if isinstance(when, str) else when
    return parsed.astimezone(zone).strftime("%Y-%m-%d %H:%M")


def short(name: str) -> str:
    """A path's last part; any other name as it is.

    >>> short("/data/wikitext2.txt"), short("org/model"), short("demo")
    ('wikitext2.txt', 'org/model', 'demo')
    """
    return PurePath(name).name if name.startswith(("/", "~", ".")) or PurePath(name).is_absolute() else name


def setting(request: Request, facts: Mapping[str, object]) -> str:
    """How a run measures, in a few words: what was asked, and by its facts whether the tokenizer added BOS."""
    read = reading(request, facts).short
    until = f", until ±{request.windows.until:g} nats" if request.windows.until else ""
    return f"{request.windows.count} windows of {request.windows.length} tokens{f', {read}' if read else ''}{until}"


def reading(request: Request, facts: Mapping[str, object]) -> Reading:
    """How a run cut its text into windows.

    >>> reading(Request(), {"bos": True}).short, reading(Request(), {}).short
    ('BOS', '')
    """
    return request.reading.resolved(bool(facts.get("bos")))


def listed(names: list[str]) -> str:
    """Names joined by commas and "and".

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else ""


def many(count: int, noun: str) -> str:
    """A count with its noun.

    >>> many(1, "run"), many(3, "run")
    ('1 run', '3 runs')
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
