"""Two to six runs side by side: the verdict in words, every metric with its better side, and the figures behind it."""

import dataclasses
from collections.abc import Sequence

import pandas as pd
import streamlit as st

from db.board import Choice
from db.rows import FINISHED
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.records import BASELINE
from fp8dash.errors import InvalidChoice
from fp8dash.report import comparison
from fp8dash.report.comparison import Comparison, Standing, Verdict
from fp8dash.report.contest import TOO_FEW, interval_of, needed, spread
from fp8dash.report.numbers import DASH, heading, shown, three
from fp8dash.report.tasks import TaskLine, TaskScore, task_lines
from fp8dash.stats import Difference
from fp8dash.ui import linked
from fp8dash.ui.charts.gemm import gemm_bars, gemm_rates
from fp8dash.ui.charts.layers import layer_lines
from fp8dash.ui.charts.looks import Look, look
from fp8dash.ui.charts.needles import needle_differences, needle_maps
from fp8dash.ui.charts.windows import kld_quantiles, window_differences
from fp8dash.ui.frame import Frame, draw, glyph, metric_help
from fp8dash.ui.parts import decoding, needles
from fp8dash.ui.parts.answer import difference, loss, verdict
from fp8dash.ui.words import moment, plain

FEWEST, MOST = 2, 6
OFFERED = 100  # runs to pick from
NOTHING = "These runs share no measured number to compare"
BY_TOKEN = "KLD by token"
LOWEST = ("minimum", "0.1 %", "1 %", "5 %")  # percentiles that say nothing and would take half the axis


def page(frame: Frame) -> None:
    """The comparison of the runs named in the link."""
    head = st.container()
    chosen = _chosen(frame)
    if len(chosen) < FEWEST:
        head.title("Choose two to six runs to compare", anchor=False)
        head.markdown(
            "Pick them here or tick rows on the leaderboard. Anyone you send this page’s address to sees the same "
            "comparison."
        )
        return
    whole = comparison.comparison(frame.store, chosen)
    rows = whole.standings
    cast = [row.run for row in rows if not row.is_baseline]
    contest = comparison.comparison(frame.store, cast) if FEWEST <= len(cast) < len(rows) else None
    with head:
        lone = next(iter(row for row in rows if not row.is_baseline), None) if len(cast) == 1 else None
        title = loss(lone) if lone else verdict(whole, contest, ("kld", "gemm_speedup"))
        st.title(title or NOTHING, anchor=False)
        if more := verdict(whole, contest, ("ln_ppl_diff", "needle", "model_bytes")):
            st.markdown(f"{more}.")
    for sentence in whole.unlike:
        st.warning(plain(sentence))
    names = _names(rows)
    _recipes(frame, rows, names)
    _metrics(whole, contest, names)
    _tasks(frame, rows, names)
    _quality(frame, rows, names)
    _needles(frame, rows, names)
    _graded_needles(frame, rows, names)
    _speed(frame, rows, names)
    decoding.compared(frame, names)
    _layers(frame, rows, names)


def _chosen(frame: Frame) -> list[str]:
    """The runs named in the link, as changed in the picker."""
    named = frame.linked_runs()
    search = linked.text_input("Find runs", key="find", placeholder="recipe, model, study, owner or run", width=280)
    newest = frame.store.runs(states=(FINISHED,), search=search or "", limit=OFFERED)
    rows = {run.id: run for run in (*frame.store.runs(ids=named), *newest)}
    titles = {
        run: " · ".join(
            (row.preset or row.recipe, row.device or "no device", row.owner, moment(row.created_at), run[:6])
        )
        for run, row in rows.items()
    }
    picked = st.multiselect(
        "Runs",
        list(rows),
        default=named[:MOST],
        format_func=titles.__getitem__,
        max_selections=MOST,
        key=f"compare_runs_{','.join(named)}",
        placeholder="two to six runs",
        help=f"Lists the {OFFERED} newest runs that match the search.",
    )
    if picked != named[:MOST]:
        linked.write("runs", ",".join(picked))
    return picked


def _names(rows: Sequence[Standing]) -> dict[str, str]:
    """A name for each run, told apart where two share one."""
    names = [row.name for row in rows]
    return {
        row.run: row.name if names.count(row.name) == 1 else f"{row.name} ({row.backend}, {row.run[:4]})"
        for row in rows
    }


def _recipes(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    for column, row in zip(st.columns(len(rows)), rows, strict=True):
        with column, st.container(border=True, height="stretch"):
            glyph(_parsed(row.recipe))
            st.markdown(f"**{plain(names[row.run])}**  \n:small[{plain(row.recipe)}]")
            state = "" if row.state == FINISHED else f" :orange-badge[{row.state}]"
            st.caption(f"{plain(row.backend or DASH)} on {plain(row.device or DASH)}, {plain(row.owner)}{state}")
            if row.note:
                st.caption(f"Note by {plain(row.note_by)}: {plain(row.note)}")
            frame.link("runs", "Open the run", run=row.run)
            if row is not rows[0] and not rows[0].is_baseline:
                st.caption(f"Against {plain(names[rows[0].run])}: {difference(rows[0], row)}.")


def _parsed(text: str) -> Recipe:
    try:
        return parse_recipe(text)
    except InvalidChoice:
        return Recipe()


def _metrics(whole: Comparison, contest: Comparison | None, names: dict[str, str]) -> None:
    """One row per metric, one column per run; the best in bold, ties stated. The baseline is shown but not judged."""
    judged = {v.metric.name: v for v in (contest or whole).verdicts}
    lines = ["| Metric | " + " | ".join(plain(names[row.run]) for row in whole.standings) + " | Better |"]
    lines.append("|:--|" + "--:|" * len(whole.standings) + ":--|")
    for line in whole.verdicts:
        verdict_row = judged[line.metric.name]
        best = {(contest or whole).standings[i].run for i in verdict_row.best if not verdict_row.open}
        cells = [_cell(line, row, value, best) for row, value in zip(whole.standings, line.values, strict=True)]
        lines.append(
            f"| {heading(line.metric)} | "
            + " | ".join(cells)
            + f" | {_judgement(verdict_row, names, contest or whole)} |"
        )
    st.header("Every metric", anchor=False)
    st.markdown("\n".join(lines))
    metric_help()
    st.caption(
        "Bold is best. Small type: difference from the best, paired over windows, with intervals adjusted so that "
        "all of them hold together at 95 % (Holm). Tied: the interval contains zero and no difference that matters, "
        "needles differ no more than by chance (McNemar), or speeds are within 5 %. Next to Δ ln PPL: its own 95 % "
        "interval."
    )


def _cell(line: Verdict, row: Standing, value: float | None, best: set[str]) -> str:
    text = shown(line.metric, value)
    if line.metric.name == "ln_ppl_diff" and interval_of(row):
        return (f"**{text}** " if row.run in best else f"{text} ") + f":small[{plain(interval_of(row))}]"
    return f"**{text}**" if row.run in best else text


def _judgement(row: Verdict, names: dict[str, str], judged: Comparison) -> str:
    """Who is better, with the differences that the verdict rests on."""
    if row.open:
        undecided = ", ".join(_gap(row, i, names, judged) for i in row.open)
        return f"{TOO_FEW}: {undecided}{f'; {needed(row.more)}' if row.more else ''}"
    if not row.best:
        return plain(row.why or DASH)
    if not row.is_tied:
        return plain(names[judged.standings[row.best[0]].run])
    tied = ", ".join(_gap(row, i, names, judged) for i in row.best)
    return f"tied: {tied}{f'; {needed(row.more)}' if row.more else ''}"


def _gap(row: Verdict, index: int, names: dict[str, str], judged: Comparison) -> str:
    """A run, and its difference from the best one at the level of the verdict."""
    behind = row.behind[index] if row.behind else None
    name = plain(names[judged.standings[index].run])
    return f"{name} :small[{plain(spread(behind))}]" if behind else name


def _tasks(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    """One row per task and metric, one column per run, with the paired difference from the baseline or first run."""
    reference = next((i for i, row in enumerate(rows) if row.is_baseline), 0)
    scored = task_lines(frame.store, [row.run for row in rows], reference=reference)
    if not scored:
        return
    basis = plain(names[rows[reference].run])
    lines = ["| Task | Metric | " + " | ".join(plain(names[row.run]) for row in rows) + " | Better |"]
    lines.append("|:--|:--|" + "--:|" * len(rows) + ":--|")
    for line in scored:
        cells = [_task_cell(line, *pair) for pair in zip(line.scores, line.differences, strict=True)]
        lines.append(
            f"| {plain(line.task)} | {plain(line.metric)} | " + " | ".join(cells) + f" | {line.better or DASH} |"
        )
    st.header("Tasks", anchor=False)
    st.markdown("\n".join(lines))
    for sentence in dict.fromkeys(sentence for line in scored for sentence in line.unlike):
        st.warning(plain(sentence))
    st.caption(
        f"Small type: difference from {basis} over the same documents, with its 95 % interval (bootstrap over "
        "documents; for right and wrong answers also McNemar’s); perplexities are compared as logarithms. Tied: the "
        "interval contains zero."
    )


def _task_cell(line: TaskLine, score: TaskScore | None, minus: Difference | None) -> str:
    text = three(score.value if score else None)
    if minus is None:
        return text
    unit, tied = f" {line.unit}" if line.unit in ("nats", "bits") else "", ", tied" if minus.is_tie else ""
    return f"{text} :small[{plain(f'{spread(minus)}{unit}{tied}')}]"


def _looks(rows: Sequence[Standing], names: dict[str, str]) -> dict[str, Look]:
    return {names[row.run]: look(row.recipe, row.backend) for row in rows}


def _quality(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    windows = frame.store.windows([row.run for row in rows])
    by_run = {names[row.run]: windows[row.run] for row in rows if windows[row.run] and not row.is_baseline}
    if not by_run:
        return
    st.header("Against BF16, by window or by token", anchor=False)
    fields = {"KLD": "kld", "Δ ln PPL": "nll"}
    field = linked.segmented_control(
        "What",
        [*fields, BY_TOKEN],
        default="KLD",
        required=True,
        key="windows",
        label_visibility="collapsed",
    )
    if field == BY_TOKEN:
        _by_token(frame, rows, names)
        return
    floor = max((row.kld_noise_floor or 0.0 for row in rows), default=0.0)
    figure = window_differences(by_run, _looks(rows, names), fields[str(field)], floor or None)
    draw(figure, key="compare_windows", alt=f"{field} per window for {', '.join(by_run)}")


def _by_token(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    """How the divergence is distributed over tokens: a recipe may lose little on average and much on a few."""
    measured = frame.store.measurements([row.run for row in rows if not row.is_baseline], ["kld_tokens"])
    kept = {
        names[run]: {m.label: m.value for m in all_of if m.value is not None and m.label not in LOWEST}
        for run, all_of in measured.items()
    }
    percentiles = {name: values for name, values in kept.items() if values}
    if not percentiles:
        st.info("These runs predate percentiles over tokens: run them again to see them here.")
        return
    draw(
        kld_quantiles(percentiles, _looks(rows, names)),
        key="compare_tokens",
        alt=f"KLD by token: {', '.join(percentiles)}",
    )


def _needles(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    cells = frame.store.needle_cells([row.run for row in rows])
    by_run = {names[row.run]: cells[row.run] for row in rows if cells[row.run]}
    if not by_run:
        return
    st.header("Needles by length and depth", anchor=False)
    draw(needle_maps(by_run), key="compare_needles", alt="Share of needles found")
    if needles.changed({names[row.run]: cells[row.run] for row in rows if cells[row.run] and not row.is_baseline}):
        return  # else a cell was measured before cells stored the baseline's score
    base = next((row for row in rows if row.is_baseline and cells[row.run]), None) or _baseline(frame, rows)
    others = {name: run_cells for name, run_cells in by_run.items() if not base or name != names.get(base.run)}
    if base and others:
        basis = cells.get(base.run) or frame.store.needle_cells([base.run])[base.run]
        scores = {c.key: c.score for c in basis}
        moved = [c for run_cells in others.values() for c in run_cells if c.score != scores.get(c.key, c.score)]
        if not moved:
            st.markdown("All needle scores equal the baseline’s.")
            return
        st.markdown("Difference from the baseline:")
        figure = needle_differences(others, basis)
        draw(figure, key="compare_needle_differences", alt="Needle scores: difference from the baseline")


def _graded_needles(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    cells = frame.store.needle_cells([row.run for row in rows])
    by_run = {names[row.run]: cells[row.run] for row in rows if cells[row.run]}
    needles.compared(by_run, [names[row.run] for row in rows if row.is_baseline])


def _baseline(frame: Frame, rows: Sequence[Standing]) -> Standing | None:
    """The newest baseline that may be compared with these runs."""
    groups = tuple({row.group for row in rows})
    choice = Choice((FINISHED,), groups=groups, backends=(BASELINE,), sort="finished", order="descending")
    baselines = frame.store.standings(dataclasses.replace(choice, limit=OFFERED))
    return next((row for row in baselines if row.needle is not None), None)


def _speed(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    points = frame.store.gemm_points([row.run for row in rows])
    by_run = {names[row.run]: points[row.run] for row in rows if points[row.run] and not row.is_baseline}
    if not by_run:
        return
    st.header("GEMM time of all Linears: BF16 against cast and multiply", anchor=False)
    draw(gemm_bars(by_run, _looks(rows, names)), key="compare_gemm", alt="GEMM times")
    draw(gemm_rates(by_run, _looks(rows, names)), key="compare_gemm_rates", alt="TFLOPS by M")
    _crossovers(frame, rows, names)
    without = {
        name: sorted({p.reason for p in run_points if p.matmul_us is None and p.reason})
        for name, run_points in by_run.items()
    }
    for name, why in without.items():
        if why:
            st.caption(
                f"{plain(name)} has no bar where no native kernel is legal: {plain('; '.join(why[:2]))}. Emulated "
                "products are not timed: they say nothing about speed."
            )


def _crossovers(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    """The M from which each run's cast and product are faster than BF16."""
    measured = frame.store.measurements([row.run for row in rows], ["gemm_crossover_m"])
    for row in rows:
        for m in measured[row.run]:
            if m.backend == "native":
                crossover = f"from M = {m.value:,.0f}" if m.value is not None else "at no M"
                st.caption(f"{plain(names[row.run])}: cast and product beat BF16 {crossover} ({plain(m.note)}).")


def _layers(frame: Frame, rows: Sequence[Standing], names: dict[str, str]) -> None:
    layers = frame.store.layers([row.run for row in rows])
    by_run = {names[row.run]: layers[row.run] for row in rows if any(x.sqnr_db is not None for x in layers[row.run])}
    if not by_run:
        return
    st.header("Weight error, layer by layer", anchor=False)
    draw(layer_lines(by_run, _looks(rows, names)), key="compare_layers", alt="Weight SQNR by layer")
    with st.expander("As a table"):
        table = pd.DataFrame({name: {x.name: x.sqnr_db for x in run_layers} for name, run_layers in by_run.items()})
        st.dataframe(table.round(2), key="compare_layer_table")
