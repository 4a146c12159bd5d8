"""Whatever a page's address holds, the page is drawn, and one line says what in it was ignored."""

import re
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from fp8dash.ui import linked
from fp8dash.ui.forms.address import NAMES
from fp8dash.ui.frame import INTERNAL
from tests.ui.drawn import opened, page_text

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # AppTest leaves its event loop to the collector
PAGES = ("leaderboard", "new_run", "runs", "compare", "studies", "tensors", "planner", "formats", "guide")
UNBOUND = ("run", "runs", "study", "question", "log", "queued", "image", "layer", "doc", *NAMES)  # no widget holds them
HOSTILE = {
    "empty": "",
    "infinite": "inf",
    "no number": "nan",
    "negative": "-1",
    "beyond floats": "1e999",
    "a fraction": "2.5",
    "huge": "9" * 5000,
    "long": "x" * 30_000,
    "markup": "<img src=x onerror=alert(1)>",
    "object": '{"a": [1]}',
    "half a character": "%ED%A0%80",
    "NUL": "a\0b",
    "path": "/dev/zero",
    "formula": "=1+1",
    "arabic digits": "١٢",
}


def names_of(app: AppTest) -> list[str]:
    """What the page's address may name: what its widgets are bound to and what it reads itself."""
    with app.session_state._state.query_params() as held:
        return sorted({*held._bindings_by_param, *UNBOUND})


def drawn(app: AppTest) -> bool:
    """True where the page has its title and no internal error."""
    return bool(app.title) and not app.exception and not any(INTERNAL in error.value for error in app.error)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_is_drawn_whatever_its_address_says(page: str, ids: dict[str, str]) -> None:
    app = opened(page)
    names = names_of(app)
    assert len(names) > len(set(UNBOUND)) or page == "new_run"
    for what, value in HOSTILE.items():
        assert drawn(opened(page, **dict.fromkeys(names, value))), (page, what)


@pytest.mark.parametrize(
    ("page", "name", "value", "sentence"),
    [
        ("leaderboard", "budget", "", "budget=, which is not one of the choices"),
        ("leaderboard", "limit", "nan", "limit=nan, which is not a number from 0.0 to 10.0"),
        ("planner", "batch", "inf", "batch=inf, which is not a whole number from 1 to 65,536"),
        ("planner", "batch", "2.5", "batch=2.5, which is not a whole number"),
        ("planner", "gpu", "H9000", "gpu=H9000, which is not one of the choices"),
        ("planner", "recipes", "w=e9m9/row", "which is not one of the choices"),
        ("runs", "page", "-1", "page=-1, which is not a page from 1 to 1"),
        ("runs", "run", "nonesuch", "There is no run nonesuch"),
        ("runs", "state", "asleep", "state=asleep, which is not one of the choices"),
        ("compare", "image", "exe", "image=exe, which is not one of the choices"),
        ("studies", "study", "nonesuch", "There is no study nonesuch"),
        ("tensors", "format", "e9m9", "format=e9m9"),
        ("formats", "view", "Everything", "view=Everything"),
        ("guide", "verdict", "maybe", "verdict=maybe"),
    ],
)
def test_a_value_that_cannot_be_is_left_out_and_said_in_one_line(
    page: str, name: str, value: str, sentence: str, ids: dict[str, str]
) -> None:
    query = {"runs": f"{ids['FP8_BLOCK']},{ids['INT8']}"} if page == "compare" else {}
    app = opened(page, **query, **{name: value})
    assert drawn(app) and name not in app.query_params
    (line,) = [
        warning.value.replace("\\", "") for warning in app.warning if sentence in warning.value.replace("\\", "")
    ]
    assert "\n" not in line


def test_one_unknown_run_hides_no_other(ids: dict[str, str]) -> None:
    good = f"{ids['FP8_BLOCK']},{ids['INT8']}"
    app = opened("compare", runs=f"nonesuch,{good}")
    assert "There is no run nonesuch" in page_text(app) and not app.error
    assert app.title[0].value == opened("compare", runs=good).title[0].value
    assert app.query_params["runs"] == good


def test_markup_in_an_address_is_shown_letter_for_letter(ids: dict[str, str]) -> None:
    warnings = [warning.value for warning in opened("runs", state="<b>*x*</b>").warning]
    assert any("\\<b\\>\\*x\\*\\<\\/b\\>" in text for text in warnings)


def test_only_one_file_reads_addresses() -> None:
    root = Path(linked.__file__).parents[1]
    readers = {
        path.name for path in root.rglob("*.py") if re.search(r"st\.query_params|query-params", path.read_text())
    }
    assert readers == {"linked.py"}
