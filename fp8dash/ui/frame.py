"""What every page is given, and what pages do alike: say errors in words, link to each other, look the same."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import streamlit as st

from db.rows import Worker
from db.store import Store
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import HIGHER, LOWER, NEITHER
from fp8dash.errors import Fp8dashError
from fp8dash.report.numbers import heading
from fp8dash.ui import linked
from fp8dash.ui.charts.dress import IMAGES, config, inked
from fp8dash.ui.charts.figure_data import data_csv
from fp8dash.ui.parts.glyph import glyph_width, recipe_glyph
from fp8dash.ui.words import many, plain
from jobs.queue import Queue

INTERNAL = "Internal error: this page could not be drawn. The web process’s log has the cause."
STYLE = """<style>
.stMainBlockContainer, .block-container {max-width: 1500px; padding-top: 4.5rem; padding-bottom: 3rem;}
h1, h2, h3 {letter-spacing: -0.01em;}
[data-testid="stMetricValue"], [data-testid="stMarkdownContainer"] td {font-variant-numeric: tabular-nums;}
.st-key-new_run_panel {position: sticky; top: 4rem;}
.st-key-new_run_panel [data-testid="stMarkdownContainer"] {overflow-x: auto;}
.st-key-new_run_cards {display: grid !important; grid-template-columns: repeat(auto-fill, minmax(165px, 1fr));}
.st-key-new_run_cards > * {width: 100% !important; max-width: none !important;}
.st-key-new_run_panel table {font-size: 0.85rem;}
.st-key-new_run_panel th, .st-key-new_run_panel td {padding: 0.35rem 0.5rem !important; white-space: nowrap;}
</style>"""
DARK = """<style>
[data-testid="stBaseButton-primary"]:not(:disabled) p,
[data-testid="stMultiSelect"] span[title], [data-testid="stMultiSelect"] span[title] ~ *
{color: #06201e !important;}
</style>"""  # Streamlit writes white on the accent, which is light on a dark page

BETTER = {LOWER: "Lower is better.", HIGHER: "Higher is better.", NEITHER: "Neither direction is better."}

P = ParamSpec("P")


@dataclass(frozen=True, slots=True)
class Frame:
    """The store, the queue and the other pages."""

    store: Store
    queue: Queue
    pages: dict[str, Any]  # by name: leaderboard, new_run, runs, compare

    def link(self, page: str, label: str, **query: str) -> None:
        """A link to another page."""
        st.page_link(self.pages[page], label=label, query_params=query or None)

    def linked_runs(self, name: str = "runs") -> list[str]:
        """The runs that the page's address names, without those that do not exist."""
        return linked.known_ids(name, lambda ids: {run.id for run in self.store.runs(ids=ids)}, "run")

    def go(self, page: str, **query: str) -> None:
        """Open another page."""
        st.switch_page(self.pages[page], query_params=query or None)


def is_dark() -> bool:
    """True where the reader's theme is dark."""
    return st.context.theme.type == "dark"


def dress() -> None:
    """The few rules of style that the theme's settings do not know."""
    st.html(STYLE)
    if is_dark():
        st.html(DARK)


def guarded(draw: Callable[P, None]) -> Callable[P, None]:
    """The page or fragment, with its errors said in a sentence and never a traceback."""

    @functools.wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            draw(*args, **kwargs)
        except Fp8dashError as error:
            say_error(error)
        except Exception:
            logging.getLogger(__name__).exception("%s failed", draw.__name__)
            st.error(INTERNAL)

    return drawn


def say_error(error: Exception) -> None:
    """The error's sentence, letter for letter."""
    st.error(plain(str(error)))


def answer_first(head: Any, wrong: str, key: str, view: Callable[[], tuple[str, str]]) -> None:
    """Draws a view in a container of its own, and in `head`, above it, the title and sentence that it comes to.

    Where what was typed cannot be, the title is `wrong` and the sentence says why.
    """
    try:
        with st.container(key=key):
            answer, more = view()
    except Fp8dashError as error:
        head.title(wrong, anchor=False)
        say_error(error)
        return
    with head:
        st.title(answer, anchor=False)
        st.markdown(more)


def draw(figure: Any, *, key: str, alt: str) -> None:
    """A figure, its text in the theme's ink, and ways to save it.

    `alt` is what a screen reader reads: an attribute, so names stand in it as they are, unescaped.
    """
    st.plotly_chart(_inked(figure), key=key, config=config(key, _image()), alt=alt)
    _take_along(figure, key)


def draw_points(figure: Any, *, key: str, alt: str) -> list[str]:
    """A figure whose points can be clicked: the custom data of the chosen ones."""
    event = st.plotly_chart(
        _inked(figure),
        key=key,
        config=config(key, _image()),
        alt=alt,
        on_select="rerun",
        selection_mode="points",
    )
    _take_along(figure, key)
    chosen = [point.get("customdata") for point in event["selection"]["points"]]
    return [str(run[0] if isinstance(run, (list, tuple)) else run) for run in chosen if run]


def _inked(figure: Any) -> Any:
    return inked(figure, dark=is_dark())


def _image() -> str:
    """What a figure's camera saves, from the address."""
    return linked.choice("image", IMAGES, IMAGES[0])


def _take_along(figure: Any, key: str) -> None:
    with st.popover("Save figure", type="tertiary", key=f"{key}_save"):
        st.download_button(
            "Data as CSV",
            lambda: data_csv(figure),
            f"fp8dash-{key.replace('_', '-')}.csv",
            "text/csv",
            key=f"{key}_csv",
            on_click="ignore",
        )
        image = st.segmented_control(
            "Image format of the camera button at the figure’s top right",
            IMAGES,
            default=_image(),
            required=True,
            format_func=str.upper,
            key=f"{key}_image",
        )
    if image != _image():
        linked.write("image", str(image))
        st.rerun()


def metric_help() -> None:
    """What each metric is, its unit and which way is better; one click away wherever metrics are shown."""
    with st.popover("What the numbers mean", type="tertiary"):
        st.markdown(
            "\n".join(f"- **{heading(m)}**: {m.help} {BETTER[m.better]}" for m in METRICS.values())
            + (
                "\n\nNumbers from different models, corpora, windows, methods, devices or backends are never ranked "
                "together."
            )
        )


def glyph(recipe: Recipe) -> None:
    """A recipe's picture."""
    st.image(recipe_glyph(recipe), width=glyph_width(recipe), alt=f"Tiles of {recipe.text}")


def worker_line(workers: Sequence[Worker], *, waiting: int) -> None:
    """The live workers, or how to start one: a warning if runs wait or are about to."""
    if alive := [worker for worker in workers if worker.is_alive]:
        names = "; ".join(plain(f"{w.device or 'device not known yet'} on {w.host}") for w in alive)
        st.markdown(f":green-badge[{many(len(alive), 'worker')} alive] {names}")
    else:
        (st.warning if waiting else st.caption)(
            "No worker is alive: queued runs wait. Start one on the machine with the accelerator: `fp8dash worker`, "
            "with the same FP8DASH\\_DATA\\_DIR or FP8DASH\\_DATABASE\\_URL."
        )


def zone() -> ZoneInfo:
    """The reader's time zone; UTC where the browser does not tell it."""
    try:
        return ZoneInfo(st.context.timezone or "UTC")
    except (ZoneInfoNotFoundError, ValueError):
        return ZoneInfo("UTC")
