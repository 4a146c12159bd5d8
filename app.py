"""Front door of the web process: opens the store, lists the pages, runs the chosen one. Loads no torch."""

from functools import partial

import streamlit as st

from db.store import Store
from fp8dash import places
from fp8dash.errors import Fp8dashError
from fp8dash.ui.frame import Frame, dress, guarded, say_error
from fp8dash.ui.linked import with_remarks
from fp8dash.ui.pages import compare, formats, guide, leaderboard, new_run, planner, runs, studies, tensors
from jobs.queue import Queue


@st.cache_resource(show_spinner="Opening the database …", on_release=Store.close)
def _store(url: str) -> Store:
    return Store(url)


@st.cache_resource(show_spinner=False, on_release=Queue.close)
def _queue(url: str) -> Queue:
    return Queue(_store(url))


def main(first: str = "leaderboard") -> None:
    """Draw the chosen page; `first` is the one without a path of its own."""
    st.set_page_config(layout="wide", initial_sidebar_state="collapsed")
    dress()
    try:
        url = places.database_url()
        store, queue = _store(url), _queue(url)
    except Fp8dashError as error:
        say_error(error)
        return
    frame = Frame(store, queue, {})
    for name, title, page in (
        ("leaderboard", "Leaderboard", leaderboard.page),
        ("new_run", "New run", new_run.page),
        ("runs", "Runs", runs.page),
        ("compare", "Compare", compare.page),
        ("studies", "Studies", studies.page),
        ("tensors", "Tensors", tensors.page),
        ("planner", "Planner", planner.page),
        ("formats", "Formats", formats.page),
        ("guide", "Guide", guide.page),
    ):
        frame.pages[name] = st.Page(
            partial(with_remarks(guarded(page)), frame), title=title, url_path=name, default=name == first
        )
    chosen = st.navigation(list(frame.pages.values()), position="top")
    st.set_page_config(page_title=f"{chosen.title} · fp8dash")
    chosen.run()


if __name__ == "__main__":
    main()
