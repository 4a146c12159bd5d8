"""Which recipe to ship: the answer in words, quality against speed or size, and the table to check it."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.elements.arrow import DataframeStateInput

from fp8dash import report
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import HIGHER, Window
from fp8dash.errors import InvalidChoice
from fp8dash.metrics import DASH, METRICS, heading, shown
from fp8dash.report import BASELINE_BACKEND, Standing, interval
from fp8dash.stats import paired_difference, pareto_front
from fp8dash.ui import charts
from fp8dash.ui.answer import candidates, headline, reasons, tied_with_best
from fp8dash.ui.frame import Frame, draw, query_ids, zone
from fp8dash.ui.words import many, moment, plain, short

SHOWN = ("kld", "ln_ppl_diff", "top1", "needle", "gemm_speedup", "model_bytes", "bits_per_weight", "coverage")
AXES = {
    "gemm_speedup": "KLD against speed",
    "model_bytes": "KLD against size",
    "bits_per_weight": "KLD against bits per weight",
}
MOST_INTERVALS = 100  # rows with intervals, ties and error bars: each is a bootstrap


def page(frame: Frame) -> None:
    """The leaderboard."""
    rows = report.standings(frame.store)
    if not rows:
        _empty(frame)
        _active(frame)
        return
    top = st.container()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        peers = _group(rows)
        kept = _filtered(peers)
    windows = frame.store.windows([row.run for row in peers[:MOST_INTERVALS]])
    tied = tied_with_best(peers, windows)
    with top:
        st.title(headline(peers, tied), anchor=False)
        st.markdown(reasons(peers, tied))
        _active(frame)
    if not kept:
        st.info("No run passes these filters. Clear the search or a filter above.")
        return
    _figure(kept, windows)
    _table(frame, kept, next((row.run for row in candidates(peers)), ""), tied)


def _active(frame: Frame) -> None:
    counts = frame.store.counts()
    if active := counts["queued"] + counts["running"]:
        frame.link(
            "runs", f"{many(active, 'run')} on the way: {counts['running']} running, {counts['queued']} queued →"
        )


def _empty(frame: Frame) -> None:
    st.title("No finished run yet", anchor=False)
    st.markdown(
        "A run quantizes a model by one recipe and measures that same artefact. Two ways to fill this page: "
        "`make demo` queues eight recipes on a small model that needs no network, or queue your own."
    )
    if st.button("New run", type="primary"):
        frame.go("new_run")


def _group(rows: Sequence[Standing]) -> list[Standing]:
    """The chosen comparable rows: one model, corpus, windows, method and device, and one backend of them."""
    newest = {row.group: row.created for row in sorted(rows, key=lambda row: row.created)}
    size = Counter(row.group for row in rows)
    titles = _titles(rows)
    group = st.selectbox(
        "Comparable runs", sorted(newest, key=lambda group: (size[group], newest[group]), reverse=True),
        format_func=titles.__getitem__, key="group", bind="query-params", width=490,
        help="Rows are ranked only against rows of the same model, corpus, windows, method and device.",
    )  # fmt: skip
    peers = [row for row in rows if row.group == group]
    backends = [name for name, _ in Counter(str(row.backend) for row in peers if not row.is_baseline).most_common()]
    if len(backends) < 2:
        return peers
    backend = st.segmented_control(
        "Backend", backends, default=backends[0], required=True, key="backend", bind="query-params",
        help="Native and emulated numbers are not ranked together. The baseline belongs to both.",
    )  # fmt: skip
    return [row for row in peers if row.is_baseline or row.backend in (backend, BASELINE_BACKEND)]


def _titles(rows: Sequence[Standing]) -> dict[str, str]:
    titles = {row.group: " · ".join(_setting(row)) for row in rows}
    twice = {title for title, count in Counter(titles.values()).items() if count > 1}
    return {group: f"{title} · {_short(group)}" if title in twice else title for group, title in titles.items()}


def _setting(row: Standing) -> tuple[str, ...]:
    return (
        short(row.model),
        short(row.corpus),
        f"{row.windows} × {row.window_length} tokens",
        row.device or "device unknown",
    )


def _short(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()[:6]


def _filtered(rows: Sequence[Standing]) -> list[Standing]:
    owners = sorted({row.owner for row in rows})
    formats = list(dict.fromkeys(name for row in rows for name in _formats(row)))
    search = st.text_input("Search", key="q", bind="query-params", placeholder="recipe, study or owner", width=230)
    wanted = st.multiselect("Format", formats, key="formats", bind="query-params", placeholder="any", width=200)
    people = st.multiselect("Owner", owners, key="owners", bind="query-params", placeholder="anyone", width=200)
    needle = (search or "").strip().lower()
    return [
        row
        for row in rows
        if (not wanted or set(_formats(row)) & set(wanted) or row.is_baseline)
        and (not people or row.owner in people or row.is_baseline)
        and needle in f"{row.name} {row.recipe} {row.study} {row.owner}".lower()
    ]


def _formats(row: Standing) -> list[str]:
    try:
        recipe = parse_recipe(row.recipe)
    except InvalidChoice:
        return []
    casts = (recipe.weights, recipe.activations, recipe.kv, recipe.attention)
    return list(dict.fromkeys(cast.format.name for cast in casts if cast))


def _figure(rows: Sequence[Standing], windows: dict[str, list[Window]]) -> None:
    cast = [row for row in rows if not row.is_baseline and row.kld is not None]
    untimed = [row for row in cast if row.gemm_speedup is None]
    default = AXES["model_bytes" if untimed or not cast else "gemm_speedup"]
    axis = st.segmented_control(
        "Figure", list(AXES.values()), default=default, required=True, key="x", bind="query-params",
        label_visibility="collapsed",
    )  # fmt: skip
    metric = METRICS[next(name for name, title in AXES.items() if title == axis)]
    drawn = [row for row in cast if getattr(row, metric.name) is not None]
    if not drawn:
        st.info("No row has both a divergence and this number: choose another axis.")
        return
    sign = 1 if metric.better == HIGHER else -1
    points = [(math.nan if row.kld is None else row.kld, sign * getattr(row, metric.name)) for row in drawn]
    front = {drawn[i].run for i in pareto_front(points)}
    figure = charts.quality_scatter(rows, metric, front=front, intervals=_intervals(drawn, windows))
    draw(figure, key="leaderboard_scatter", alt=_said(drawn))
    notes = ["Colour is the tile, symbol the format; hollow points have emulated quality, times are of native kernels."]
    if metric.name == "gemm_speedup" and untimed:
        names = ", ".join(plain(row.name) for row in untimed[:6])
        notes.append(f"Not drawn, as no native kernel was legal and no time was taken: {names}.")
    st.caption(" ".join(notes))


def _said(rows: Sequence[Standing]) -> str:
    return "KLD of " + ", ".join(f"{row.name} {shown(METRICS['kld'], row.kld)}" for row in rows[:20])


def _intervals(rows: Sequence[Standing], windows: dict[str, list[Window]]) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each run's mean KLD over its windows."""
    found = {}
    for row in rows:
        klds = [w.kld for w in windows.get(row.run, ())]
        spread = paired_difference(klds, [0.0] * len(klds)) if klds else None
        if spread and spread.low is not None and spread.high is not None:
            found[row.run] = (spread.low, spread.high)
    return found


def _table(frame: Frame, rows: list[Standing], best: str, tied: Sequence[str]) -> None:
    bar = st.container(horizontal=True, vertical_alignment="center")
    ids = [row.run for row in rows]
    linked = query_ids("runs")
    key = hashlib.sha256(",".join(ids).encode()).hexdigest()[:12]
    event = st.dataframe(
        _styled(rows, best, tied),
        key=f"leaderboard_table_{key}",
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
        selection_default=_selection([ids.index(run) for run in linked if run in ids]),
        column_config=_columns(),
        height="content" if len(rows) <= 15 else 560,
        placeholder=DASH,
        alt="The leaderboard: one row a run",
    )
    chosen = [ids[i] for i in event.selection.rows if i < len(ids)]
    _keep(chosen)
    with bar:
        if st.button(
            _label(len(chosen)), type="primary", disabled=not 2 <= len(chosen) <= 6, key="leaderboard_compare"
        ):
            frame.go("compare", runs=",".join(chosen))
        if st.button("Open run", disabled=len(chosen) != 1, key="leaderboard_open"):
            frame.go("runs", run=chosen[0])
        st.download_button(
            "Download CSV",
            report.to_csv(rows),
            "fp8dash-leaderboard.csv",
            "text/csv",
            key="leaderboard_csv",
            on_click="ignore",
        )
        st.caption(f"{many(len(rows), 'run')}, best KLD first. Tick two to six rows to compare them.")
    counts = frame.store.counts()
    if counts["failed"]:
        frame.link("runs", f"{many(counts['failed'], 'failed run')} not ranked: see why →", state="failed")


def _selection(rows: list[int]) -> DataframeStateInput:
    return {"selection": {"rows": rows}}


def _label(count: int) -> str:
    return f"Compare {count} runs" if 2 <= count <= 6 else "Compare selected"


def _keep(chosen: list[str]) -> None:
    """The selection, in the URL."""
    text = ",".join(chosen)
    if text != st.query_params.get("runs", ""):
        if text:
            st.query_params["runs"] = text
        else:
            del st.query_params["runs"]


def _styled(rows: Sequence[Standing], best: str, tied: Sequence[str]) -> "pd.io.formats.style.Styler":
    here = zone()
    table: dict[str, list[object]] = {
        "Rank": [row.rank for row in rows],
        "Recipe": [row.name for row in rows],
    }
    for name in SHOWN:
        table[heading(METRICS[name])] = [getattr(row, name) for row in rows]
        if name == "kld":
            table["Standing"] = [_standing(row, best, tied) for row in rows]
        if name == "ln_ppl_diff":
            table["95 % interval"] = [interval(row) or DASH for row in rows]
    table |= {
        "Backend": [row.backend or DASH for row in rows],
        "Device": [row.device or DASH for row in rows],
        "Owner": [row.owner for row in rows],
        "Study": [row.study for row in rows],
        "Finished": [moment(row.finished, here) for row in rows],
    }
    frame = pd.DataFrame(table)
    for name in SHOWN:
        frame[heading(METRICS[name])] = frame[heading(METRICS[name])].astype("float64")
    formats: dict[Any, Any] = {heading(METRICS[name]): _writer(name) for name in SHOWN}
    formats["Rank"] = "{:.0f}".format
    return frame.style.format(formats, na_rep=DASH)


def _writer(name: str) -> Callable[[Any], str]:
    return lambda value: DASH if pd.isna(value) else shown(METRICS[name], float(value))


def _standing(row: Standing, best: str, tied: Sequence[str]) -> str:
    if row.is_baseline:
        return "baseline"
    if row.kld is None:
        return "partial"
    if row.run == best:
        return "best, tied" if tied else "best"
    return "tied with best" if row.run in tied else ""


def _columns() -> dict[str, Any]:
    config: dict[str, Any] = {
        heading(METRICS[name]): st.column_config.NumberColumn(help=METRICS[name].help) for name in SHOWN
    }
    config["Rank"] = st.column_config.NumberColumn(width=50, help="By KLD among runs of the same backend.")
    config["Recipe"] = st.column_config.TextColumn(width=140)
    config["Standing"] = st.column_config.TextColumn(
        width=110, help="Tied: the 95 % paired bootstrap interval of the difference over windows contains zero."
    )
    config["95 % interval"] = st.column_config.TextColumn(width=175, help="Of Δ ln PPL, paired bootstrap over windows.")
    return config
