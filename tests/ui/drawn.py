"""Pages drawn without a browser, by Streamlit's AppTest."""

from typing import Any

import pandas as pd
from streamlit.testing.v1 import AppTest

from db.rows import Run
from db.store import Store

KEYED = (
    "button",
    "button_group",
    "checkbox",
    "multiselect",
    "number_input",
    "selectbox",
    "text_area",
    "text_input",
    "toggle",
)
PATIENCE = 60  # seconds; a page takes one at most, a shared machine may stall


def draw(first: str) -> None:
    """The app, opened on a page; runs in a script of its own."""
    from app import main

    main(first)


def opened(name: str, **query: str) -> AppTest:
    """A page, drawn once."""
    app = AppTest.from_function(draw, kwargs={"first": name}, default_timeout=PATIENCE)
    for key, value in query.items():
        app.query_params[key] = value
    return app.run()


def page_text(app: AppTest) -> str:
    """All text on the page."""
    kinds = ("title", "header", "markdown", "caption", "info", "success", "warning", "error")
    return "\n".join(element.value for kind in kinds for element in app.get(kind))


def widget(app: AppTest, key: str) -> Any:
    """The one element of a key; of a key that begins so, where it ends in an underscore."""
    kinds = (*KEYED, "dataframe")
    mine = [one for kind in kinds for one in app.get(kind) if _is_named(str(one.key or ""), key)]
    assert len(mine) == 1, f"{len(mine)} elements have the key {key}"
    return mine[0]


def _is_named(key: str, asked: str) -> bool:
    return key.startswith(asked) if asked.endswith("_") else key == asked


def table_with(app: AppTest, *columns: str) -> pd.DataFrame:
    """The one table that has these columns."""
    having = [one.value for one in app.dataframe if set(columns) <= set(one.value.columns)]
    assert len(having) == 1, f"{len(having)} tables have the columns {', '.join(columns)}"
    return having[0]


def board(app: AppTest) -> pd.DataFrame:
    """The leaderboard's table."""
    return widget(app, "leaderboard_table_").value  # type: ignore[no-any-return]


def queued(store: Store) -> list[Run]:
    """The runs that wait, in the order in which they were submitted."""
    return sorted(store.runs(states=["queued"]), key=lambda run: run.created_at)
