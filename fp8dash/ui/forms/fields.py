"""Widgets for a request's fields: key, bounds and choices are the field's own; what they say is kept by flat names."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import streamlit as st

from fp8dash.choose.request import LEAVES, Request
from fp8dash.errors import InvalidChoice
from fp8dash.ui.frame import say_error

Width = int | Literal["stretch"]  # pixels


@dataclasses.dataclass(frozen=True, slots=True)
class Names:
    """Widget keys of one visit: another's widgets start from its own defaults."""

    visit: int

    def __call__(self, name: str) -> str:
        """The key of a widget."""
        return f"new_run_new{self.visit or ''}_{name}"


@dataclasses.dataclass(frozen=True, slots=True)
class Fields:
    """Widgets that start as a request has it; `changed` collects what they say."""

    start: Request
    key: Names
    changed: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def request(self) -> Request:
        """The request as the widgets have it."""
        return self.start.but(**self.changed)

    def number(self, name: str, label: str, *, step: int = 1, width: int = 150, help: str | None = None) -> int:
        """A whole number within the field's bounds."""
        leaf = LEAVES[name]
        low, high, start = int(leaf.limits.low), int(leaf.limits.high), leaf.of(self.start)
        number = st.number_input(label, low, high, start, step, key=self.key(name), width=width, help=help)
        self.changed[name] = int(number)
        return int(number)

    def choice(
        self,
        name: str,
        label: str,
        meanings: Mapping[Any, str],
        *,
        width: Width = "stretch",
        help: str = "",
    ) -> str:
        """One of a field's choices, shown with its meaning."""
        leaf = LEAVES[name]
        chosen = st.selectbox(
            label,
            list(leaf.limits.choices),
            leaf.limits.choices.index(leaf.of(self.start)),
            key=self.key(name),
            format_func=lambda choice: f"{choice} · {meanings[choice]}",
            width=width,
            help=help or None,
        )
        self.changed[name] = str(chosen)
        return str(chosen)

    def short_choice(
        self, name: str, label: str, meanings: Mapping[Any, str], *, more: str = "", width: int = 150
    ) -> str:
        """One of a field's choices in a narrow widget, whose help says what each means."""
        leaf = LEAVES[name]
        names = leaf.limits.choices
        lines = [f"**{choice}**: {meaning}" for choice, meaning in meanings.items()]
        text = "  \n".join(lines) + (f"\n\n{more}" if more else "")
        chosen = st.selectbox(
            label, names, names.index(leaf.of(self.start)), key=self.key(name), width=width, help=text
        )
        self.changed[name] = str(chosen)
        return str(chosen)

    def text(self, name: str, label: str, *, placeholder: str = "", help: str = "") -> str:
        """A line of text, without spaces around it."""
        start = LEAVES[name].of(self.start)
        typed = st.text_input(label, start, key=self.key(name), placeholder=placeholder or None, help=help or None)
        self.changed[name] = (typed or "").strip()
        return str(self.changed[name])

    def wholes(self, name: str, label: str, *, help: str = "Separated by commas.") -> None:
        """Whole numbers. Anything else is reported and leaves the field empty, which a check refuses."""
        leaf = LEAVES[name]
        start = ", ".join(str(value) for value in leaf.of(self.start))
        text = st.text_input(label, start, key=self.key(name), help=help) or ""
        try:
            self.changed[name] = tuple(dict.fromkeys(int(part) for part in text.replace(",", " ").split()))
        except ValueError:
            self.changed[name] = ()
            what = leaf.limits.what
            say_error(
                InvalidChoice(
                    f"“{text}” is not a list of whole numbers: write each {what} separated by commas, as in 1, 16."
                )
            )
