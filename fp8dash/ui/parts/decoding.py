"""How fast runs decode: of one run beside BF16, and of several side by side."""

from collections.abc import Mapping, Sequence

import streamlit as st

from db.rows import Run
from fp8dash.choose.records import BASELINE
from fp8dash.report.decoding import BatchSpeeds, Decoding, alike, contests, decodings
from fp8dash.report.numbers import DASH, three
from fp8dash.ui.charts import decode as charts_decode
from fp8dash.ui.charts.looks import look
from fp8dash.ui.frame import Frame, draw
from fp8dash.ui.words import plain

BF16 = "BF16"


def of_run(frame: Frame, run: Run, name: str) -> None:
    """A run's decoding beside that of the newest comparable BF16 run, or why it carries no number."""
    own = decodings(frame.store, [run])
    if not own:
        return
    bases = [] if run.backend == BASELINE else frame.store.decoded([run.device or ""], [BASELINE], limit=20)
    beside = [one for one in decodings(frame.store, bases) if one.kind == own[0].kind][:1]
    _shown("run", [*own, *beside], {run.id: name, **{one.run: BF16 for one in beside}})


def compared(frame: Frame, names: Mapping[str, str]) -> None:
    """The decoding of the runs that may be compared, each by its name; for the others, what differs."""
    runs = {run.id: run for run in frame.store.runs(ids=list(names))}
    if measured := decodings(frame.store, [runs[run_id] for run_id in names]):
        _shown("compare", measured, names)


def _shown(page: str, measured: Sequence[Decoding], names: Mapping[str, str]) -> None:
    st.header("Decoding", anchor=False)
    drawn, others = alike(measured)
    if drawn:
        _figures(page, drawn, names)
        if rows := contests(drawn):
            st.markdown("\n".join(_table(rows, [one.run for one in drawn], names)))
        st.caption(_method(drawn))
    for one, why in others:
        st.warning(plain(f"{names[one.run]} is not drawn: it was measured {why}."))
    for one in measured:
        for why in one.missing:
            what = "has no decoding speed" if not one.speeds else "has no decoding speed everywhere"
            st.caption(plain(f"{names[one.run]} {what}: {why}."))


def _figures(page: str, drawn: Sequence[Decoding], names: Mapping[str, str]) -> None:
    speeds = {names[one.run]: one.speeds for one in drawn}
    looks = {names[one.run]: look(one.recipe, one.backend) for one in drawn}
    left, right = st.columns(2, gap="large")
    with left:
        figure = charts_decode.decode_rates(speeds, looks)
        draw(figure, key=f"{page}_decode", alt=f"Decoded tokens per second by batch for {', '.join(speeds)}")
    with right:
        figure = charts_decode.token_gaps(speeds, looks)
        draw(figure, key=f"{page}_decode_gaps", alt=f"Milliseconds between tokens by batch for {', '.join(speeds)}")


def _table(rows: Sequence[BatchSpeeds], runs: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """One row per batch: each run's tokens per second, the best in bold, and how many times faster the fastest is."""
    lines = ["| Batch | " + " | ".join(f"{plain(names[run])} (tokens/s)" for run in runs) + " | Faster |"]
    lines.append("|--:|" + "--:|" * len(runs) + ":--|")
    for row in rows:
        cells = [f"**{three(row.speeds.get(run))}**" if run in row.best else three(row.speeds.get(run)) for run in runs]
        lines.append(f"| {row.batch:,} | " + " | ".join(cells) + f" | {plain(in_words(row, names))} |")
    return lines


def in_words(row: BatchSpeeds, names: Mapping[str, str]) -> str:
    """How many times faster the fastest decodes than each other run, the nearest first; ties stated.

    >>> speeds = {"a": 131.0, "b": 128.0, "c": 100.0}
    >>> in_words(BatchSpeeds(8, speeds, ("a", "b")), {"a": "FP8_TENSOR", "b": "FP8_DYNAMIC", "c": "BF16"})
    'tied: FP8_TENSOR, FP8_DYNAMIC; 1.31× BF16'
    >>> in_words(BatchSpeeds(8, speeds, ("a",)), {"a": "FP8_TENSOR", "b": "FP8_DYNAMIC", "c": "BF16"})
    'FP8_TENSOR: 1.02× FP8_DYNAMIC, 1.31× BF16'
    """
    behind = sorted((run for run in row.speeds if run not in row.best), key=row.times)
    times = ", ".join(f"{row.times(run):.2f}× {names[run]}" for run in behind)
    winners = ", ".join(names[run] for run in row.best)
    if len(row.best) > 1:
        return f"tied: {winners}" + (f"; {times}" if times else "")
    return f"{winners}: {times}" if times else DASH


def _method(drawn: Sequence[Decoding]) -> str:
    """How the numbers were measured, and what they leave out."""
    one = drawn[0]
    how = one.method[:1].upper() + one.method[1:]
    return (
        f"{plain(how)}, on {plain(one.device)}: {plain(one.way)}. A plain torch loop, no server. Time between "
        "tokens: median, a dash at p90, a line up to p99. Tied: within 5 %."
    )
