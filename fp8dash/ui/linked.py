"""Widgets and names whose values live in the page's address.

Whatever an address holds, the page is drawn: a value that cannot be used is left out, and one line above the page says
which and why. Only this module reads an address; widgets are Streamlit's own, asked for as it asks for them.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import streamlit as st
from streamlit.runtime.scriptrunner import get_script_run_ctx
from streamlit.runtime.state.session_state_proxy import get_session_state

from fp8dash.errors import InvalidChoice
from fp8dash.ui.words import plain

REMARKS = "linked_remarks"  # in the session: what in this page's address was ignored, and why
MOST_REMARKS = 3  # in the line above a page
MOST_IDS = 500  # in one address
LONGEST_ID, LONGEST_TEXT, LONGEST_QUOTED = 64, 20_000, 40  # characters
NO_CHOICE = "is not one of the choices"

P = ParamSpec("P")
Number = TypeVar("Number", int, float)
Option = TypeVar("Option")


def with_remarks(draw: Callable[P, None]) -> Callable[P, None]:
    """The page, with a line above it on what in its address could not be used."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> None:
        head = st.container()
        st.session_state[REMARKS] = []
        draw(*args, **kwargs)
        if remarks := list(dict.fromkeys(st.session_state[REMARKS])):
            more = f" And {len(remarks) - MOST_REMARKS} more." if len(remarks) > MOST_REMARKS else ""
            head.warning(" ".join(remarks[:MOST_REMARKS]) + more)

    return drawn


def leave_out(name: str, value: str, why: str) -> None:
    """Drops a name from the address, and says why its value was not used."""
    with get_session_state().query_params() as held:
        held.remove_param(name)
        held._initial_query_params.pop(name, None)  # widgets start from these: one of them may not even parse
    _remark(name, value, why)


def values(name: str) -> list[str]:
    """All values of a name, in order; none where the address lacks it."""
    return [_clean(value) for value in st.query_params.get_all(name)]


def text(name: str) -> str:
    """The last value of a name; empty where the address lacks it."""
    return next(reversed(values(name)), "")


def ids(name: str) -> list[str]:
    """Ids of a link, in order, each once."""
    parts = [part.strip()[:LONGEST_ID] for value in values(name) for part in value.split(",")]
    return list(dict.fromkeys(part for part in parts if part))[:MOST_IDS]


def known_ids(name: str, existing: Callable[[list[str]], Collection[str]], what: str) -> list[str]:
    """Those of a link's ids that exist; the others leave the address and are named once.

    `existing` returns those of some ids that exist, and `what` is the word for one of them: run, study.
    """
    given = ids(name)
    there = existing(given) if given else ()
    missing, kept = [one for one in given if one not in there], [one for one in given if one in there]
    if missing:
        st.query_params.update({name: ",".join(kept) or []})
        shown = ", ".join(one[:LONGEST_QUOTED] for one in missing[:MOST_REMARKS])
        more = f" and {len(missing) - MOST_REMARKS} more" if len(missing) > MOST_REMARKS else ""
        st.session_state[REMARKS].append(
            f"There is no {what} {plain(shown)}{more}: it may have been deleted, or the link is truncated."
        )
    return kept


def choice(name: str, options: Collection[str], default: str) -> str:
    """One of some options, by a name that no widget holds."""
    given = text(name)
    if given and given not in options:
        leave_out(name, given, NO_CHOICE)
        return default
    return given or default


def write(name: str, value: str) -> None:
    """Puts a value into the address; an empty one takes the name out."""
    if value != text(name):
        st.query_params.update({name: value or []})


def write_all(address: Mapping[str, list[str]]) -> None:
    """Puts values into the address at once, which is one step of the browser's history; none take a name out."""
    st.query_params.update(address)


def given() -> bool:
    """True where the address says anything."""
    return len(st.query_params) > 0


def number_input(label: str, low: Number, high: Number, value: Number, *rest: Any, key: str, **how: Any) -> Number:
    """A number between two bounds; whole where its default is."""
    whole = isinstance(value, int)
    kind = "a whole number" if whole else "a number"
    _check(key, lambda given: _is_number(given[-1], low, high, whole=whole), f"is not {kind} from {low:,} to {high:,}")
    draw: Any = st.number_input  # its overloads know each number by itself
    chosen: Number | None = draw(label, low, high, value, *rest, key=key, bind="query-params", **how)
    return value if chosen is None else chosen


def selectbox(
    label: str,
    options: Sequence[Option],
    index: int = 0,
    *,
    key: str,
    format_func: Callable[[Option], str] = str,
    accept_new_options: bool = False,
    **how: Any,
) -> Option:
    """One of some options, or where new ones are accepted any text."""
    if accept_new_options:
        _check_text(key, LONGEST_TEXT)
    else:
        _check_choices(key, options, format_func, how)
    chosen = st.selectbox(
        label,
        options,
        index,
        key=key,
        format_func=format_func,
        accept_new_options=accept_new_options,
        bind="query-params",
        **how,
    )
    return options[index] if chosen is None else chosen  # type: ignore[return-value]  # new options are text


def segmented_control(
    label: str, options: Sequence[Option], *, key: str, format_func: Callable[[Option], str] = str, **how: Any
) -> Option | None:
    """One of a few options, all in sight; none only where that is not required."""
    _check_choices(key, options, format_func, how)
    chosen: Option | None = st.segmented_control(
        label, options, key=key, format_func=format_func, bind="query-params", **how
    )
    return how.get("default") if chosen is None and how.get("required") else chosen


def pills(label: str, options: Sequence[Option], *, key: str, **how: Any) -> Option | None:
    """One of a few options or none."""
    _check_choices(key, options, str, how)
    chosen: Option | None = st.pills(label, options, key=key, bind="query-params", **how)
    return chosen


def multiselect(
    label: str,
    options: Sequence[Option],
    *rest: Any,
    key: str,
    format_func: Callable[[Option], str] = str,
    valid: Callable[[str], object] | None = None,
    **how: Any,
) -> list[Option]:
    """Some of the options; where `valid` is given also what it does not raise InvalidChoice for."""
    names = {format_func(option) for option in options}
    _check(key, lambda given: all(not one or one in names or _passes(valid, one) for one in given), NO_CHOICE)
    if valid:
        how["accept_new_options"] = True
    draw: Any = st.multiselect  # its overloads know new options by themselves
    return list(draw(label, options, *rest, key=key, format_func=format_func, bind="query-params", **how))


def text_input(label: str, value: str = "", *, key: str, **how: Any) -> str:
    """A line of text."""
    _check_text(key, how.get("max_chars") or LONGEST_TEXT)
    return st.text_input(label, value, key=key, bind="query-params", **how) or ""


def text_area(label: str, value: str = "", *, key: str, **how: Any) -> str:
    """Text of several lines."""
    _check_text(key, how.get("max_chars") or LONGEST_TEXT)
    return st.text_area(label, value, key=key, bind="query-params", **how) or ""


def toggle(label: str, value: bool = False, *, key: str, **how: Any) -> bool:
    """A switch."""
    _check(key, lambda given: given[-1].lower() in ("true", "false"), "is neither true nor false")
    return st.toggle(label, value, key=key, bind="query-params", **how)


def pagination(pages: int, *, key: str = "page") -> int:
    """Which page of a list, from 1; drawn only where there is more than one."""
    last = max(1, pages)
    _check(key, lambda given: _is_number(given[-1], 1, last, whole=True), f"is not a page from 1 to {last:,}")
    return int(st.pagination(pages, key=key, bind="query-params")) if last > 1 else 1


def _check(name: str, good: Callable[[list[str]], bool], why: str) -> None:
    """Leaves a value out that a widget is about to start from and cannot."""
    context = get_script_run_ctx()
    starts = name not in st.session_state or (context is not None and context.is_history_navigation)
    given = st.query_params.get_all(name)
    if starts and given and not good(given):
        leave_out(name, ", ".join(given), why)


def _check_choices(
    name: str, options: Sequence[Option], format_func: Callable[[Option], str], how: dict[str, Any]
) -> None:
    """One of the options; nothing at all only where the widget may be empty."""
    names = {format_func(option) for option in options} | (set() if how.get("required", True) else {""})
    _check(name, lambda given: given[-1] in names, NO_CHOICE)


def _check_text(name: str, longest: int) -> None:
    _check(name, lambda given: len(given[-1]) <= longest, f"is longer than {longest:,} characters")
    _check(name, lambda given: _clean(given[-1]) == given[-1], "is not text")


def _is_number(given: str, low: float, high: float, *, whole: bool) -> bool:
    try:
        number = float(given)
    except ValueError:
        return False
    return math.isfinite(number) and low <= number <= high and (not whole or number == int(number))


def _passes(valid: Callable[[str], object] | None, given: str) -> bool:
    if valid is None:
        return False
    try:
        valid(given)
    except InvalidChoice:
        return False
    return True


def _clean(given: str) -> str:
    """Text that a database and a terminal take: no half characters, no NUL."""
    return given.encode("utf-8", "replace").decode().replace("\0", "")


def _remark(name: str, value: str, why: str) -> None:
    short = value if len(value) <= LONGEST_QUOTED else f"{value[:LONGEST_QUOTED]} …"
    remarks: list[str] = st.session_state.setdefault(REMARKS, [])
    remarks.append(f"This page’s address says {name}={plain(_clean(short))}, which {why}: it was ignored.")
