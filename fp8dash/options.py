"""The command line's options: a request's fields, the owner, and where the web server listens."""

import argparse
import getpass

from fp8dash.choose.presets import PRESETS
from fp8dash.choose.request import LEAVES
from fp8dash.choose.studies import QUESTIONS

HOST, PORT = "127.0.0.1", 8501


def add_place(parser: argparse.ArgumentParser) -> None:
    """Adds the address that the dashboard listens on."""
    parser.add_argument("--host", default=HOST, help="anyone who reaches it can submit runs (default: %(default)s)")
    parser.add_argument("--port", type=int, default=PORT)


def add_owner(parser: argparse.ArgumentParser) -> None:
    """Adds the name that runs are submitted under."""
    parser.add_argument("--owner", default=_user(), help="owner of the runs (default: %(default)s)")


def add_study(parser: argparse.ArgumentParser) -> None:
    """Adds a question and the fields that a study of it may choose."""
    asked = "; ".join(f"{question.name}: {question.question}" for question in QUESTIONS.values())
    parser.add_argument("question", choices=QUESTIONS, metavar="QUESTION", help=asked)
    for name in ("model", "corpus", "backend", "device"):
        _add_field(parser, name)
    parser.add_argument("--wait", action="store_true", help="until all have ended, then print the answer")
    add_owner(parser)


def add_request(parser: argparse.ArgumentParser) -> None:
    """Adds the fields of a request, repeated recipes, and what happens once runs are queued."""
    names = ", ".join(PRESETS)
    parser.add_argument(
        "--recipe", action="append", help=f"{names}, or a text such as “w=e4m3fn/row a=e4m3fn/row”; repeatable"
    )
    for name in LEAVES:
        if name != "recipe":
            _add_field(parser, name)
    parser.set_defaults(window_length=None, haystack=None)  # by the workers, and by the kind of needle
    parser.add_argument("--study", default="From the command line", help="a name for runs submitted together")
    parser.add_argument("--wait", action="store_true", help="until all have ended; status 1 if one did not finish")
    add_owner(parser)


def _add_field(parser: argparse.ArgumentParser, name: str) -> None:
    """A request's field as an option: its type, its choices and its default are the field's own."""
    leaf = LEAVES[name]
    limits, several = leaf.limits, " (comma separated)" if leaf.limits.several else ""
    many = {int: _numbers, str: _words}
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        type=many[limits.kind] if limits.several else limits.kind,
        choices=limits.choices or None if not limits.several else None,
        default=leaf.default,
        help=(limits.help + several).replace("%", "%%"),
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container without a user entry
        return "anonymous"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))
