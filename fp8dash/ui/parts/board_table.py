"""The leaderboard's table: one row per run, the selection in the address, the downloads."""

import base64
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.elements.arrow import DataframeStateInput

from db.board import Choice, Standing
from db.rows import FAILED
from fp8dash.choose.metrics import METRICS
from fp8dash.report import export
from fp8dash.report.contest import Contest, interval_of
from fp8dash.report.numbers import DASH, heading, shown
from fp8dash.ui import linked
from fp8dash.ui.frame import Frame, zone
from fp8dash.ui.parts.board_figure import intervals
from fp8dash.ui.words import many, moment

SHOWN = ("kld", "ln_ppl_diff", "top1", "needle", "gemm_speedup", "model_bytes", "bits_per_weight", "coverage")
HIDDEN = ("Coverage", "Backend", "Device", "Note")
BEHIND = "Minus the best (nats)"
MEDALS = {1: "best", 2: "second", 3: "third"}
PAGE = 50  # rows


def table(frame: Frame, choice: Choice, count: int, base: Sequence[Standing], judged: Contest) -> None:
    """The rows of a choice, page by page, with the ways on: compare, open, download."""
    bar = st.container(horizontal=True, vertical_alignment="center")
    place = st.container()
    pages = math.ceil(count / PAGE)
    number = linked.pagination(pages)
    rows = [*base, *frame.store.standings(dataclasses.replace(choice, limit=PAGE, offset=(number - 1) * PAGE))]
    with bar:
        buttons = st.container(horizontal=True, vertical_alignment="center", width="content")
        columns = st.container(width="content")
    with columns:
        wanted = _columns()
    with place:
        chosen = _rows(frame, rows, wanted, judged)
    with buttons:
        if st.button(
            _label(len(chosen)), type="primary", disabled=not 2 <= len(chosen) <= 6, key="leaderboard_compare"
        ):
            frame.go("compare", runs=",".join(chosen))
        if st.button("Open run", disabled=len(chosen) != 1, key="leaderboard_open"):
            frame.go("runs", run=chosen[0])
        _downloads(frame, choice, base)
        where = f", rows {(number - 1) * PAGE + 1:,} to {min(count, number * PAGE):,}" if pages > 1 else ""
        st.caption(
            f"{many(count, 'run')}, {_ordered(choice)} first{where}. Tick two to six rows to compare them.",
            width="content",
        )
    counts = frame.store.counts()
    if counts[FAILED]:
        frame.link("runs", f"{many(counts[FAILED], 'failed run')} not ranked: see why →", state=FAILED)


def _ordered(choice: Choice) -> str:
    return "newest" if choice.sort == "finished" else f"best {METRICS[choice.sort].title}"


def _downloads(frame: Frame, choice: Choice, base: Sequence[Standing]) -> None:
    """All rows of the choice, not this page of it; written when asked for."""

    def rows() -> list[Standing]:
        return [*base, *frame.store.standings(choice)]

    for label, name, kind, write in (
        ("Download CSV", "csv", "text/csv", lambda: export.to_csv(rows())),
        ("Parquet", "parquet", "application/vnd.apache.parquet", lambda: export.to_parquet(rows())),
    ):
        st.download_button(
            label, write, f"fp8dash-leaderboard.{name}", kind, key=f"leaderboard_{name}", on_click="ignore"
        )


def _columns() -> list[str]:
    """The columns to show; in the address where it is not the usual choice."""
    every = list(_frame([], Contest(METRICS["kld"], None)).columns)
    usual = [column for column in every if column not in HIDDEN]
    with st.popover("Columns", type="tertiary"):
        wanted = linked.multiselect("Columns", every, default=usual, key="columns")
    return [column for column in every if column in wanted] or usual


def _rows(frame: Frame, rows: Sequence[Standing], columns: Sequence[str], judged: Contest) -> list[str]:
    """The table; the chosen runs."""
    ids = [row.run for row in rows]
    named = frame.linked_runs()
    key = hashlib.sha256(",".join(ids).encode()).hexdigest()[:12]
    event = st.dataframe(
        _styled(rows, judged),
        key=f"leaderboard_table_{key}",
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
        selection_default=_selection([ids.index(run) for run in named if run in ids]),
        column_config=_configured(),
        column_order=columns,
        height="content" if len(rows) <= 15 else 560,
        placeholder=DASH,
        alt="The leaderboard: one row per run",
    )
    here = [ids[i] for i in event.selection.rows if i < len(ids)]
    chosen = [run for run in named if run not in ids or run in here]  # those ticked on other pages stay
    chosen += [run for run in here if run not in chosen]
    _keep(chosen)
    return chosen


def _selection(rows: list[int]) -> DataframeStateInput:
    return {"selection": {"rows": rows}}


def _label(count: int) -> str:
    return f"Compare {count} runs" if 2 <= count <= 6 else "Compare selected"


def _keep(chosen: list[str]) -> None:
    """The selection, in the URL."""
    linked.write("runs", ",".join(chosen))


def _frame(rows: Sequence[Standing], judged: Contest) -> pd.DataFrame:
    here = zone()
    table: dict[str, list[object]] = {
        "Rank": [row.rank for row in rows],
        "Recipe": [f"{'★ ' if row.pinned else ''}{row.name}" for row in rows],
    }
    bars: list[object] = [*_bars(rows)]
    for name in SHOWN:
        table[heading(METRICS[name])] = [getattr(row, name) for row in rows]
        if name == "kld":
            table["KLD interval"] = bars
            table["Standing"] = [_standing(row, judged) for row in rows]
            table[BEHIND] = [_behind(row, judged) for row in rows]
        if name == "ln_ppl_diff":
            table["95 % interval"] = [DASH if row.is_baseline else interval_of(row) or DASH for row in rows]
    table |= {
        "Backend": [row.backend or DASH for row in rows],
        "Device": [row.device or DASH for row in rows],
        "Owner": [row.owner for row in rows],
        "Study": [row.study for row in rows],
        "Note": [row.note for row in rows],
        "Finished": [moment(row.finished, here) for row in rows],
    }
    return pd.DataFrame(table).astype({heading(METRICS[name]): "float64" for name in SHOWN})


def _styled(rows: Sequence[Standing], judged: Contest) -> "pd.io.formats.style.Styler":
    formats: dict[Any, Any] = {heading(METRICS[name]): _writer(name) for name in SHOWN}
    formats["Rank"] = "{:.0f}".format
    return _frame(rows, judged).style.format(formats, na_rep=DASH)


def _writer(name: str) -> Callable[[Any], str]:
    return lambda value: DASH if pd.isna(value) else shown(METRICS[name], float(value))


def _bars(rows: Sequence[Standing]) -> list[str | None]:
    """Each row's KLD with its 95 % interval as a small picture; one log scale for the page."""
    ends = intervals([row for row in rows if row.kld is not None and row.kld > 0])
    values = [value for pair in ends.values() for value in pair if value > 0]
    if not values:
        return [None] * len(rows)
    low, span = math.log(min(values)), math.log(max(values)) - math.log(min(values)) or 1.0

    def place(value: float) -> float:
        return 5 + 86 * (math.log(max(value, min(values))) - low) / span

    return [
        _bar(place(ends[row.run][0]), place(row.kld or 0), place(ends[row.run][1])) if row.run in ends else None
        for row in rows
    ]


def _bar(low: float, mid: float, high: float) -> str:
    ink = "#0f8a83"  # reads on light and on dark
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="96" height="30"><g stroke="{ink}" stroke-width="1.5">'
        f'<path d="M{low:.1f} 15H{high:.1f}M{low:.1f} 10V20M{high:.1f} 10V20"/></g>'
        f'<circle cx="{mid:.1f}" cy="15" r="3.5" fill="{ink}"/></svg>'
    )
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _standing(row: Standing, judged: Contest) -> str:
    """A row's place among comparable rows, or why it has none."""
    if row.is_baseline:
        return "baseline"
    if row.is_partly_cast:
        return f"{row.uncast_share:.0%} left in BF16"
    if row.kld is None:
        return "partial"
    return ", ".join(word for word in (_place(row, judged), "as BF16" if row.is_within_noise else "") if word)


def _place(row: Standing, judged: Contest) -> str:
    outcome = judged.outcome_of(row.run)
    if outcome == "tied":
        return "tied with best"
    if outcome == "open":
        return "too few windows"
    if judged.leader is None or row.run != judged.leader.run:
        return MEDALS.get(row.rank or 0, "") if outcome == "apart" else ""
    if judged.of("open"):
        return "lowest, too few windows"
    return "best, tied" if judged.of("tied") else "best"


def _behind(row: Standing, judged: Contest) -> str:
    """The difference from the best, with the interval that the standing rests on."""
    return next((rival.spread for rival in judged.rivals if rival.row.run == row.run), DASH)


def _configured() -> dict[str, Any]:
    config: dict[str, Any] = {
        heading(METRICS[name]): st.column_config.NumberColumn(help=METRICS[name].help) for name in SHOWN
    }
    config["Rank"] = st.column_config.NumberColumn(width=50, help="By KLD among runs of the same backend.")
    config["Recipe"] = st.column_config.TextColumn(width=140, help="★: pinned.")
    config["KLD interval"] = st.column_config.ImageColumn(
        width=110, help="KLD with its 95 % interval over windows, on one log scale for this page."
    )
    config["Standing"] = st.column_config.TextColumn(
        width=110,
        help="Tied: the paired interval of the difference from the best contains zero and nothing larger than the "
        "best KLD. Too few windows: it contains larger differences too. Intervals hold at 95 % for the whole "
        "board (Holm). As BF16: the KLD’s interval reaches down to the noise floor, the KLD of the same "
        "weights in float32. Left in BF16: more than a tenth of the blocks’ matrix weights were not cast, so "
        "the KLD covers only the rest.",
    )
    config[BEHIND] = st.column_config.TextColumn(
        width=210, help="Paired over windows, with the interval that the standing beside it rests on."
    )
    config["95 % interval"] = st.column_config.TextColumn(width=175, help="Of Δ ln PPL, paired bootstrap over windows.")
    return config
