"""Pages drawn without a browser, by Streamlit's AppTest."""

from streamlit.testing.v1 import AppTest

from db.rows import Run
from db.store import Store

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


def queued(store: Store) -> list[Run]:
    """The runs that wait, in the order in which they were submitted."""
    return sorted(store.runs(states=["queued"]), key=lambda run: run.created_at)
