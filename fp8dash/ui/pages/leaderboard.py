"""Which recipe to ship: the answer for each model in words, quality against speed or size, the table to check it."""

import base64
import dataclasses
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import streamlit as st
from streamlit.elements.arrow import DataframeStateInput

from db.standings import SORTS, Choice, Group
from fp8dash.choose.catalog import architecture_of
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.records import HIGHER
from fp8dash.predict.accelerators import ACCELERATORS, Accelerator
from fp8dash.report import export
from fp8dash.report.comparison import BASELINE_BACKEND, Standing
from fp8dash.report.export import interval
from fp8dash.report.numbers import DASH, heading, shown, three
from fp8dash.report.planned import predicted_times
from fp8dash.stats import pareto_front
from fp8dash.ui import linked
from fp8dash.ui.charts.scatter import quality_scatter
from fp8dash.ui.frame import Frame, draw_points, metric_help, zone
from fp8dash.ui.parts.answer import (
    CLOSE,
    MEASURED,
    PREDICTED,
    Answer,
    Budget,
    Speed,
    candidates,
    choose,
    evidence,
    headline,
    reasons,
    shipping,
    tied_with_best,
)
from fp8dash.ui.words import many, moment, plain, reading, short

SHOWN = ("kld", "ln_ppl_diff", "top1", "needle", "gemm_speedup", "model_bytes", "bits_per_weight", "coverage")
AXES = {
    "gemm_speedup": "KLD against speed",
    "model_bytes": "KLD against size",
    "bits_per_weight": "KLD against bits per weight",
}
FINISHED_RUNS = ("finished",)
PAGE = 50  # rows
MOST_POINTS = 150  # in the figure: the front, then the lowest KLDs
MOST_TIES = 30  # recipes compared with the best, window by window: each is a bootstrap
MOST_MODELS = 6  # with an answer of their own on the first screen
MOST_STUDIES = 50  # offered as a filter: the newest
BUDGETS = {"KLD": "kld", "Δ ln PPL": "ln_ppl_diff"}
SORTED = {"finished": "Newest", **{name: METRICS[name].title for name in SORTS if name in METRICS}}
HIDDEN = ("Coverage", "Backend", "Device", "Note")
MEDALS = {1: "best", 2: "second", 3: "third"}
FORETOLD = ", predicted"
WELCOME = (
    "A **run** quantizes one model by one recipe and measures that same artefact: quality against its BF16 baseline, "
    "and the speed of its GEMMs.  \n"
    "Set how much quality may go and where you will serve; the first line then says what to ship, and why the others "
    "lost.  \n"
    "Only numbers made alike are ranked together. Where the evidence cannot tell two recipes apart, it says so."
)


@dataclasses.dataclass(frozen=True, slots=True)
class Target:
    """Where a recipe is to be served: a device that was measured, or an accelerator and the batch to predict for."""

    name: str
    accelerator: Accelerator | None = None
    batch: int = 0


def page(frame: Frame) -> None:
    """The leaderboard."""
    groups = [group for group in frame.store.groups() if group.backend]
    if not any(group.backend != BASELINE_BACKEND for group in groups):
        _empty(frame)
        _active(frame)
        return
    _welcome()
    top, cards = st.container(), st.container()
    group, mates, budget, target = _asked(frame, groups)
    rows = frame.store.newest_by_recipe([group.key])
    rows = [row for row in rows if row.backend in (group.backend, BASELINE_BACKEND)]
    tied = _tied(frame, rows)
    speeds = _speeds(frame, group.model, rows, mates, target)
    answer = choose(rows, budget, speeds, [*tied, *(row.run for row in candidates(rows)[:1] if tied)])
    with top:
        st.title(shipping(answer, budget, short(group.model), target.name), anchor=False)
        st.markdown(evidence(answer))
        st.markdown(f"{headline(rows, tied)}. {reasons(rows, tied)}")
        _why(answer, speeds)
    with cards:
        _other_models(frame, groups, group, budget, target)
        _active(frame)
    choice = _filtered(frame, group)
    base = [] if choice.search else [row for row in rows if row.is_baseline][:1]
    count = frame.store.standing_count(choice)
    if not count:
        st.info("No run passes these filters. Clear the search or a filter above.")
        return
    _figure(frame, choice, base, speeds, "" if target.name == group.device else target.name)
    _table(frame, choice, count, base, tied)


def _welcome() -> None:
    """Three lines for whoever opens the bare address; gone once read, and never on a link."""
    if st.session_state.get("welcomed") or linked.given():
        st.session_state["welcomed"] = True
        return
    with st.container(border=True, horizontal=True, vertical_alignment="center", key="leaderboard_welcome"):
        st.markdown(WELCOME)
        st.button("Got it", on_click=_welcomed, key="leaderboard_welcomed")


def _welcomed() -> None:
    st.session_state["welcomed"] = True


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


def _asked(frame: Frame, groups: Sequence[Group]) -> tuple[Group, list[Group], Budget, Target]:
    """What the reader set: comparable runs of one backend, the model's other groups, the budget and the target."""
    cast = [group for group in groups if group.backend != BASELINE_BACKEND]
    with st.container(horizontal=True, vertical_alignment="bottom", key="leaderboard_asked"):
        mates = _narrowed("Model", "model", cast, lambda group: short(group.model), 230)
        here = _narrowed("Measured on", "device", mates, lambda group: group.device or "device unknown", 230)
        here = _narrowed("Setting", "setting", here, _settings(frame, here).__getitem__, 250)
        group = _narrowed("Backend", "backend", here, lambda group: group.backend, 130)[0]
        what = linked.segmented_control(
            "Budget", list(BUDGETS), default="KLD", required=True, key="budget", 
            help="How much quality may go, in nats from the baseline.",
        )  # fmt: skip
        limit = linked.number_input("At most (nats)", 0.0, 10.0, CLOSE, 0.01, "%.3f", key="limit", width=130)
        target = _target([str(group.device), *(str(mate.device) for mate in mates)])
    return group, mates, Budget(BUDGETS[str(what)], float(limit)), target


def _target(devices: Sequence[str]) -> Target:
    """A device that something was measured on, or an accelerator that is predicted."""
    planned = {f"{name}{FORETOLD}": accelerator for name, accelerator in ACCELERATORS.items()}
    name = str(linked.selectbox(
        "To be served on", [*dict.fromkeys(devices), *planned], key="target", width=230,
        help="A device: speeds are those of GEMMs measured on it. An accelerator: decoding as the planner predicts it "
        "from data sheets, at most; nothing was measured there.",
    ))  # fmt: skip
    if name not in planned:
        return Target(name)
    batch = linked.number_input("Requests at once", 1, 1 << 16, 32, key="batch", width=130)
    return Target(planned[name].name, planned[name], int(batch))


def _narrowed(label: str, key: str, groups: Sequence[Group], said: Callable[[Group], str], width: int) -> list[Group]:
    """The groups of one choice; asked only where there is more than one."""
    names = list(dict.fromkeys(said(group) for group in groups))
    if len(names) < 2:
        return list(groups)
    name = linked.selectbox(
        label, names, key=key, width=width,
        help="Rows are ranked only against rows of the same model, corpus, windows, method, device and backend.",
    )  # fmt: skip
    return [group for group in groups if said(group) == name]


def _settings(frame: Frame, groups: Sequence[Group]) -> dict[Group, str]:
    """What each group's numbers were measured on and how; told apart by the group's key where all else is alike."""
    written = {}
    for group in groups if len(groups) > 1 else ():
        (row,) = frame.store.standings(Choice(FINISHED_RUNS, groups=(group.key,), limit=1))
        run = frame.store.run(row.run)
        way = reading(run.request, run.facts).short
        tokens = f"{group.windows} × {group.window_length} tokens{f', {way}' if way else ''}"
        written[group] = f"{short(group.corpus)} · {tokens} · {group.key[:4]}"
    return written or dict.fromkeys(groups, "")


def _tied(frame: Frame, rows: Sequence[Standing]) -> list[str]:
    ranked = candidates(rows)[:MOST_TIES]
    return tied_with_best(ranked, frame.store.windows([row.run for row in ranked]))


def _speeds(
    frame: Frame, model: str, rows: Sequence[Standing], mates: Sequence[Group], target: Target
) -> dict[str, Speed]:  # fmt: skip
    """How fast each row's recipe is on the target: as measured there, by this run or by one of the same model, or as
    predicted."""
    if target.accelerator:
        return _predicted(model, rows, target.accelerator, target.batch)
    there = {mate.key for mate in mates if mate.device == target.name}
    others = [
        row for row in frame.store.newest_by_recipe(list(there - {row.group for row in rows})) if row.gemm_speedup
    ]
    elsewhere = {row.recipe: row.gemm_speedup for row in others}
    found = {row.run: row.gemm_speedup if row.device == target.name else elsewhere.get(row.recipe) for row in rows}
    return {run: Speed(times, MEASURED) for run, times in found.items() if times is not None}


def _predicted(model: str, rows: Sequence[Standing], accelerator: Accelerator, batch: int) -> dict[str, Speed]:
    """By run; none for a model whose architecture is not known here."""
    known = architecture_of(model)
    times = predicted_times(known, [row.recipe for row in rows], accelerator, batch) if known else {}
    return {row.run: Speed(times[row.recipe], PREDICTED.format(batch)) for row in rows if row.recipe in times}


def _why(answer: Answer, speeds: dict[str, Speed]) -> None:
    with st.container(horizontal=True, gap="small"):
        with st.popover(f"Why the others lost ({len(answer.lost)})", type="tertiary", disabled=not answer.lost):
            st.markdown(
                f"| Recipe | KLD (nats) | × BF16{_how(speeds)} | Why not |\n|:--|--:|--:|:--|\n"
                + "\n".join(
                    f"| {plain(row.name)} | {three(row.kld)} | "
                    f"{f'{speeds[row.run].times:.2f}' if row.run in speeds else DASH} | {plain(why)} |"
                    for row, why in answer.lost
                )
            )
        metric_help()


def _how(speeds: dict[str, Speed]) -> str:
    return next((f", {speed.how}" for speed in speeds.values()), "")


def _other_models(
    frame: Frame, groups: Sequence[Group], shown_group: Group, budget: Budget, target: Target
) -> None:  # fmt: skip
    """One line for each further model, from its largest group."""
    largest: dict[str, Group] = {}
    for group in groups:
        if group.backend != BASELINE_BACKEND:
            largest.setdefault(group.model, group)
    largest.pop(shown_group.model, None)
    if not largest:
        return
    first = list(largest.values())[: MOST_MODELS - 1]
    rows = frame.store.newest_by_recipe([group.key for group in first])
    lines = []
    for group in first:
        mine = [row for row in rows if row.group == group.key and row.backend == group.backend]
        own = target if target.accelerator else Target(str(group.device))
        answer = choose(mine, budget, _speeds(frame, group.model, mine, [], own))
        lines.append(f"- **{plain(short(group.model))}**: {shipping(answer, budget, group.model, own.name)}.")
    left = len(largest) - len(first)
    with st.expander(f"{many(len(largest), 'further model')}: what to ship", expanded=len(largest) < MOST_MODELS):
        st.markdown("\n".join(lines))
        if left:
            st.caption(f"{many(left, 'more model')}: choose it under “Model”.")


def _filtered(frame: Frame, group: Group) -> Choice:
    """The rows of the group that the reader wants, in which order; each filter lives in the address."""
    facets = frame.store.facets([group.key], studies=MOST_STUDIES)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        search = linked.text_input("Search", key="q", placeholder="recipe, study, owner or run", width=230)
        sort = linked.selectbox(
            "Order", list(SORTED), format_func=SORTED.__getitem__, index=list(SORTED).index("kld"), key="sort",
            width=170, help="The best first; what was not measured comes last.",
        )  # fmt: skip
        kept: dict[str, Any] = {
            name: tuple(linked.multiselect(label, options, key=name, placeholder="any", width=width))
            for name, label, options, width in (
                ("formats", "Format", facets.formats, 150),
                ("tiles", "Tile", facets.tiles, 150),
                ("owners", "Owner", facets.owners, 170),
                ("studies", "Study", facets.studies, 200),
            )
        }
        pins = linked.segmented_control("Pins", ["Pinned"], key="pins")
    metric = METRICS.get(sort)
    order = "descending" if metric is None or metric.better == HIGHER else "ascending"
    return Choice(
        FINISHED_RUNS, groups=(group.key,), backends=(group.backend,), search=search or "", sort=sort, order=order,
        pins=(True,) if pins else (), **kept,
    )  # fmt: skip


def _figure(
    frame: Frame, choice: Choice, base: Sequence[Standing], speeds: dict[str, Speed], elsewhere: str
) -> None:  # fmt: skip
    some = frame.store.standings(dataclasses.replace(choice, sort="kld", order="ascending", limit=MOST_POINTS))
    known = {row.run for row in some if row.gemm_speedup is not None} if not elsewhere else set(speeds)
    default = AXES["gemm_speedup" if all(row.run in known for row in some) else "model_bytes"]
    axis = linked.segmented_control(
        "Figure", list(AXES.values()), default=default, required=True, key="x", 
        label_visibility="collapsed",
    )  # fmt: skip
    metric = METRICS[next(name for name, title in AXES.items() if title == axis)]
    front = frame.store.front(choice, metric.name, metric.better)
    rows = list({row.run: row for row in (*front, *some)}.values())
    best = {row.run for row in front}
    predicted = {run for run, speed in speeds.items() if speed.how != MEASURED}
    if elsewhere and metric.name == "gemm_speedup":  # the target is another device: its speeds, where they are known
        metric = _retitled(metric, speeds)
        times = {run: speed.times for run, speed in speeds.items()}
        rows = [dataclasses.replace(row, gemm_speedup=times.get(row.run)) for row in rows]
        best = _front(rows, metric.name)
    drawn = [row for row in rows if row.kld and getattr(row, metric.name) is not None]
    if not drawn:
        st.info("No row has both a divergence and this number: choose another axis.")
        return
    figure = quality_scatter([*base, *rows], metric, front=best, intervals=_intervals(drawn), predicted=predicted)
    chosen = draw_points(figure, key="leaderboard_scatter", alt=_said(drawn))
    if chosen:
        frame.go("runs", run=chosen[0])
    st.caption(" ".join(_notes(frame, choice, rows, drawn, metric.name, elsewhere)))


def _retitled(metric: Metric, speeds: dict[str, Speed]) -> Metric:
    """The speed-up's axis, where what is drawn is predicted."""
    hows = {speed.how for speed in speeds.values()} - {MEASURED}
    return dataclasses.replace(metric, title=f"Speed-up {hows.pop()}") if hows else metric


def _front(rows: Sequence[Standing], x: str) -> set[str]:
    points = [(row.kld or math.nan, math.nan if (value := getattr(row, x)) is None else value) for row in rows]
    return {rows[i].run for i in pareto_front(points)}


def _notes(
    frame: Frame, choice: Choice, rows: Sequence[Standing], drawn: Sequence[Standing], x: str, elsewhere: str
) -> list[str]:  # fmt: skip
    """What the figure's marks mean, and what it leaves out."""
    notes = ["Colour is the tile, symbol the format; hollow where quality is emulated or speed predicted."]
    if elsewhere:
        notes.append(f"Speeds are those known for {plain(elsewhere)}.")
    if len(rows) >= MOST_POINTS:
        count = frame.store.standing_count(choice)
        notes.append(f"{len(drawn)} of {count:,} runs are drawn: the Pareto front and the lowest KLDs.")
    untimed = [plain(row.name) for row in rows if row.gemm_speedup is None]
    if x == "gemm_speedup" and untimed:
        notes.append(f"Not drawn, as no native kernel was timed: {', '.join(untimed[:6])}.")
    return notes


def _said(rows: Sequence[Standing]) -> str:
    return "KLD of " + ", ".join(f"{row.name} {shown(METRICS['kld'], row.kld)}" for row in rows[:20])


def _intervals(rows: Sequence[Standing]) -> dict[str, tuple[float, float]]:
    """The 95 % interval of each run's mean KLD over its windows."""
    return {
        row.run: (row.kld_low, row.kld_high) for row in rows if row.kld_low is not None and row.kld_high is not None
    }


def _table(frame: Frame, choice: Choice, count: int, base: Sequence[Standing], tied: Sequence[str]) -> None:
    bar = st.container(horizontal=True, vertical_alignment="center")
    table = st.container()
    pages = math.ceil(count / PAGE)
    number = linked.pagination(pages)
    rows = [*base, *frame.store.standings(dataclasses.replace(choice, limit=PAGE, offset=(number - 1) * PAGE))]
    with bar:
        buttons = st.container(horizontal=True, vertical_alignment="center", width="content")
        columns = st.container(width="content")
    with columns:
        wanted = _columns()
    with table:
        chosen = _rows(frame, rows, wanted, tied)
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
    if counts["failed"]:
        frame.link("runs", f"{many(counts['failed'], 'failed run')} not ranked: see why →", state="failed")


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
    every = list(_frame([], []).columns)
    usual = [column for column in every if column not in HIDDEN]
    with st.popover("Columns", type="tertiary"):
        wanted = linked.multiselect("Columns", every, default=usual, key="columns")
    return [column for column in every if column in wanted] or usual


def _rows(frame: Frame, rows: Sequence[Standing], columns: Sequence[str], tied: Sequence[str]) -> list[str]:
    """The table; the chosen runs."""
    ids = [row.run for row in rows]
    named = frame.linked_runs()
    key = hashlib.sha256(",".join(ids).encode()).hexdigest()[:12]
    event = st.dataframe(
        _styled(rows, tied),
        key=f"leaderboard_table_{key}",
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
        selection_default=_selection([ids.index(run) for run in named if run in ids]),
        column_config=_configured(),
        column_order=columns,
        height="content" if len(rows) <= 15 else 560,
        placeholder=DASH,
        alt="The leaderboard: one row a run",
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


def _frame(rows: Sequence[Standing], tied: Sequence[str]) -> pd.DataFrame:
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
            table["Standing"] = [_standing(row, tied) for row in rows]
        if name == "ln_ppl_diff":
            table["95 % interval"] = [DASH if row.is_baseline else interval(row) or DASH for row in rows]
    table |= {
        "Backend": [row.backend or DASH for row in rows],
        "Device": [row.device or DASH for row in rows],
        "Owner": [row.owner for row in rows],
        "Study": [row.study for row in rows],
        "Note": [row.note for row in rows],
        "Finished": [moment(row.finished, here) for row in rows],
    }
    return pd.DataFrame(table).astype({heading(METRICS[name]): "float64" for name in SHOWN})


def _styled(rows: Sequence[Standing], tied: Sequence[str]) -> "pd.io.formats.style.Styler":
    formats: dict[Any, Any] = {heading(METRICS[name]): _writer(name) for name in SHOWN}
    formats["Rank"] = "{:.0f}".format
    return _frame(rows, tied).style.format(formats, na_rep=DASH)


def _writer(name: str) -> Callable[[Any], str]:
    return lambda value: DASH if pd.isna(value) else shown(METRICS[name], float(value))


def _bars(rows: Sequence[Standing]) -> list[str | None]:
    """Each row's KLD with its 95 % interval as a small picture; one log scale for the page."""
    ends = _intervals([row for row in rows if row.kld])
    values = [value for pair in ends.values() for value in pair if value > 0]
    if not values:
        return [None] * len(rows)
    low, span = math.log(min(values)), math.log(max(values)) - math.log(min(values)) or 1.0

    def place(value: float) -> float:
        return 5 + 86 * (math.log(max(value, min(values))) - low) / span

    return [_bar(place(ends[row.run][0]), place(row.kld or 0), place(ends[row.run][1])) if row.run in ends else None
            for row in rows]  # fmt: skip


def _bar(low: float, mid: float, high: float) -> str:
    ink = "#0f8a83"  # reads on light and on dark
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="96" height="30"><g stroke="{ink}" stroke-width="1.5">'
        f'<path d="M{low:.1f} 15H{high:.1f}M{low:.1f} 10V20M{high:.1f} 10V20"/></g>'
        f'<circle cx="{mid:.1f}" cy="15" r="3.5" fill="{ink}"/></svg>'
    )
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _standing(row: Standing, tied: Sequence[str]) -> str:
    """A medal among comparable rows, or why there is none."""
    if row.is_baseline:
        return "baseline"
    if row.kld is None:
        return "partial"
    if row.is_partly_cast:
        return f"{row.uncast_share:.0%} left in BF16"
    noise = ", as BF16" if row.is_within_noise else ""
    if row.run in tied:
        return f"tied with best{noise}"
    said = MEDALS.get(row.rank or 0, "")
    return f"{said}{', tied' if row.rank == 1 and tied else ''}{noise}".removeprefix(", ")


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
        help="Tied: windows do not tell it from the best, at 95 % for the whole board (paired bootstrap, Holm). As "
        "BF16: its KLD’s interval reaches down to the noise floor, the KLD of the same weights in float32. Left "
        "in BF16: more than a tenth of the blocks’ matrix weights were not cast, so the KLD is of the rest alone.",
    )
    config["95 % interval"] = st.column_config.TextColumn(width=175, help="Of Δ ln PPL, paired bootstrap over windows.")
    return config
