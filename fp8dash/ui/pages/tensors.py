"""How wide a model's weights and activations are, and what formats and tiles make of them: from a profiled run."""

from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import streamlit as st

from db.rows import Run
from fp8dash.choose.casts import parse_cast
from fp8dash.choose.formats import FORMATS, Format
from fp8dash.choose.records import ACTIVATION, OUTLIER, WEIGHT, LadderPoint, TensorProfile
from fp8dash.report.numbers import DASH, signed, three
from fp8dash.ui import linked
from fp8dash.ui.charts import tensors as charts_tensors
from fp8dash.ui.charts.tensors import Grid, grid_of, step
from fp8dash.ui.frame import Frame, draw, zone
from fp8dash.ui.parts.casting import format_box
from fp8dash.ui.words import many, moment, plain, setting, short

OFFERED = 50  # runs
LISTED = 15  # inputs with the largest channels
ALIGNED, UNIT = "Amax on the largest code", "1.0"
KINDS = {WEIGHT: "Weights", ACTIVATION: "Activations"}
CHANNEL_COLUMNS = dict.fromkeys(("Amax", "× median channel"), st.column_config.NumberColumn(format="%.4g"))


def page(frame: Frame) -> None:
    """A run and a layer, the answer, then what it rests on."""
    runs = {run.id: run for run in frame.store.profiled(OFFERED)}
    if not runs:
        _nothing_yet(frame)
        return
    head = st.container()
    with st.container(horizontal=True, vertical_alignment="bottom"):
        run_id = _linked("Run", "run", list(runs), next(iter(runs)), lambda key: _run_label(runs[key]))
        profiles = frame.store.tensor_profiles([run_id])[run_id]
        widest = _widest(profiles)
        names = list(dict.fromkeys(profile.name for profile in profiles))
        layer = _linked("Layer", "layer", names, widest.name, str, of=run_id)
        fmt = format_box("Format", "format", "e4m3fn")
        scale = str(linked.segmented_control("Scale", [ALIGNED, UNIT], default=ALIGNED, required=True, key="scale"))
    points = frame.store.ladder_points([run_id])[run_id]
    with head:
        st.title(_answer(widest, points), anchor=False)
        st.markdown(_setting(runs[run_id], profiles))
    _magnitudes([profile for profile in profiles if profile.name == layer], fmt, scale)
    left, right = st.columns([1, 1], gap="large")
    with left:
        _spreads(profiles)
    with right:
        _channels(profiles, layer)
    _ladder(points, layer)


def _nothing_yet(frame: Frame) -> None:
    st.title("No run has a profile of its tensors yet", anchor=False)
    st.markdown(
        "A profile counts the magnitudes of every weight and of each layer’s input, ranks outlier channels, and "
        "shows what finer scales would gain. Queue a run with the measure “Tensor profile”, or type `fp8dash submit "
        "--recipe BF16 --measures profile`."
    )
    frame.link("new_run", "New run")


def _linked(
    label: str, name: str, options: Sequence[str], start: str, write: Callable[[str], str], of: str = ""
) -> str:
    """A choice kept in the address under its name; `start` where the address has none."""
    asked = linked.choice(name, options, start)
    chosen = st.selectbox(
        label,
        options,
        options.index(asked),
        key=f"tensors_{name}_{of}",
        format_func=write,
        width=380,
    )
    if chosen != asked:
        linked.write(name, chosen)
    return chosen


def _run_label(run: Run) -> str:
    return f"{short(run.model)}, {run.preset or run.recipe}, {moment(run.created_at, zone())}"


def _widest(profiles: Sequence[TensorProfile]) -> TensorProfile:
    """The input with the largest amax over RMS, or weight where no text reached a layer."""
    inputs = [profile for profile in profiles if profile.kind == ACTIVATION] or profiles
    return max(inputs, key=lambda profile: profile.spread or 0.0)


def _answer(widest: TensorProfile, points: Sequence[LadderPoint]) -> str:
    sentence = f"The widest activation is {plain(widest.name)}: amax is {three(widest.spread)} times its RMS"
    per_tensor = [p for p in points if (p.tensor, p.kind, p.cast) == (widest.name, ACTIVATION, "e4m3fn/tensor")]
    return f"{sentence}; E4M3 per tensor flushes {percent(per_tensor[0].flushed)} of it" if per_tensor else sentence


def _setting(run: Run, profiles: Sequence[TensorProfile]) -> str:
    tokens = max((profile.rows for profile in profiles if profile.kind == ACTIVATION), default=0)
    what = (
        f"{plain(short(run.model))} before anything is cast; activations are each layer’s input over {tokens:,} tokens"
    )
    return f"{what} of {plain(short(run.corpus))} ({setting(run.request, run.facts)}, at most the first four)."


def _magnitudes(profiles: Sequence[TensorProfile], fmt: Format, scale: str) -> None:
    """The chosen layer's weight and input over the format's grid, and the shares beyond it in words."""
    name = fmt.name.upper()
    st.header(f"Magnitudes of {plain(profiles[0].name)} on the grid of {name}", anchor=False)
    scales = {p.kind: p.amax / fmt.max if scale == ALIGNED and p.amax else 1.0 for p in profiles}
    grids = {KINDS[p.kind]: grid_of(fmt, scales[p.kind]) for p in profiles}
    for p in profiles:
        st.markdown(f"**{KINDS[p.kind]}**, {p.rows:,} × {p.cols:,}: {_shares(p, grids[KINDS[p.kind]])}")
    figure = charts_tensors.histograms({KINDS[p.kind]: p for p in profiles}, grids)
    draw(figure, key="tensors_histograms", alt=f"Weights and activations by binade over the ranges of {name}")
    st.caption(
        "Counts are exact per binade. If a bound falls inside a binade, the share is a range. The bounds assume one "
        "scale for the whole tensor over all windows; a dynamic scale is made anew in every pass."
    )


def _shares(profile: TensorProfile, grid: Grid) -> str:
    """Amax and RMS, and how much lies below half the smallest code and beyond the largest."""
    if not profile.amax:
        return "all zeros."
    low, high = profile.share_below(grid.flushed)
    beyond = tuple(1 - share for share in reversed(profile.share_below(grid.largest)))
    fits = profile.amax <= grid.largest * (1 + 2**-20)  # amax / (amax / max) may exceed max by a rounding
    lost = "none is beyond the largest code" if fits else f"{_range(*beyond)} is beyond the largest code"
    zeros = f", {percent(profile.zeros / (profile.rows * profile.cols))} exact zeros" if profile.zeros else ""
    wide = f"amax {three(profile.amax)}, RMS {three(profile.rms)}, {three(profile.spread)} times as much{zeros}"
    small = f"{_range(low, high)} of the non-zero elements is below half the smallest code and becomes zero"
    return f"{wide}. {small}; {lost}."


def _range(low: float, high: float) -> str:
    """A share, or the two that it lies between."""
    return percent(low) if low == high else f"{three(100 * low)} to {percent(high)}"


def percent(share: float) -> str:
    """A share in %.

    >>> percent(0.00312), percent(0.0)
    ('0.312 %', '0 %')
    """
    return f"{three(100 * share)} %"


def _spreads(profiles: Sequence[TensorProfile]) -> None:
    st.header("Amax over RMS of every layer", anchor=False)
    maps: dict[str, dict[str, float]] = {title: {} for title in KINDS.values()}
    for profile in profiles:
        if profile.spread is not None:
            maps[KINDS[profile.kind]][profile.name] = profile.spread
    draw(charts_tensors.spread_maps(maps), key="tensors_spreads", alt="Amax over RMS by layer")
    st.caption("A million Gaussian numbers have about 5. Each factor of ten uses up one decade of a format’s range.")


def _channels(profiles: Sequence[TensorProfile], layer: str) -> None:
    """Outlier channels: of the chosen layer's projection by block, and over the model ranked."""
    inputs = [profile for profile in profiles if profile.kind == ACTIVATION]
    part = layer.rsplit(".", 1)[-1]
    st.header("Outlier channels", anchor=False)
    st.markdown(_channels_in_words(inputs))
    if like := [p for p in inputs if p.name.rsplit(".", 1)[-1] == part and p.outlier_channels]:
        figure = charts_tensors.outlier_channels([p for p in inputs if p.name.rsplit(".", 1)[-1] == part])
        draw(figure, key="tensors_channels", alt=f"Outlier channels of {part} by block")
        st.caption(
            f"Inputs of {plain(part)}: {many(len(like), 'block')} with outlier channels. A larger mark is a larger "
            "outlier."
        )
    st.dataframe(_ranked(inputs), hide_index=True, key="tensors_ranked", height=300, column_config=CHANNEL_COLUMNS)
    with st.expander(f"The largest channels of {plain(layer)}"):
        for profile in profiles:
            if profile.name == layer:
                st.markdown(f"**{KINDS[profile.kind]}**")
                key = f"tensors_of_{profile.kind}"
                st.dataframe(_of_layer(profile), hide_index=True, key=key, column_config=CHANNEL_COLUMNS)


def _channels_in_words(inputs: Sequence[TensorProfile]) -> str:
    having = [profile for profile in inputs if profile.outlier_channels]
    rule = f"a channel is an outlier if its amax exceeds {OUTLIER:g} times the median channel’s"
    if not having:
        return f"No layer’s input has an outlier channel: {rule}."
    most = max(having, key=lambda profile: profile.outlier_channels)
    share = percent(most.outlier_channels / most.cols)
    return (
        f"{len(having)} of {many(len(inputs), 'layer')} have outlier channels in their input: {rule}. Most are in "
        f"{plain(most.name)}: {most.outlier_channels:,} of {most.cols:,} channels, {share}."
    )


def _ranked(inputs: Sequence[TensorProfile]) -> pd.DataFrame:
    """The largest channels over the model; layers that read the same tensor share a row."""
    same: dict[tuple[object, ...], list[str]] = {}
    for profile in inputs:
        block = profile.name.rsplit(".", 1)[0]
        for channel, amax, ratio in profile.outliers:
            same.setdefault((-ratio, block, channel, amax), []).append(profile.name.rsplit(".", 1)[-1])
    rows = sorted(same.items(), key=lambda item: item[0])[:LISTED]
    return pd.DataFrame(
        {
            "Input of": [f"{block}.{', '.join(parts)}" for (_, block, _, _), parts in rows],
            "Channel": [channel for (_, _, channel, _), _ in rows],
            "Amax": [amax for (_, _, _, amax), _ in rows],
            "× median channel": [-float(str(ratio)) for (ratio, *_), _ in rows],
        }
    )


def _of_layer(profile: TensorProfile) -> pd.DataFrame:
    columns = zip(*profile.outliers, strict=True) if profile.outliers else ((), (), ())
    return pd.DataFrame(dict(zip(("Channel", "Amax", "× median channel"), map(list, columns), strict=True)))


def _ladder(points: Sequence[LadderPoint], layer: str) -> None:
    """What finer scales gain, of the chosen layer or the one of its projection that was measured."""
    measured = list(dict.fromkeys(point.tensor for point in points))
    alike = [name for name in measured if name.rsplit(".", 1)[-1] == layer.rsplit(".", 1)[-1]]
    name = layer if layer in measured else next(iter(alike or measured), "")
    if not name:
        return
    mine = {kind: [p for p in points if p.tensor == name and p.kind == kind] for kind in KINDS}
    by_operand = {kind: some for kind, some in mine.items() if some}
    st.header(f"What finer scales gain {plain(name)}", anchor=False)
    st.markdown(_gains_in_words(by_operand) + ("" if name == layer else f" {plain(layer)} itself was not measured."))
    draw(
        charts_tensors.ladder_lines({KINDS[kind]: some for kind, some in by_operand.items()}),
        key="tensors_ladder",
        alt="SQNR by format and tile, with and without outlier channels",
    )
    st.caption(
        "Measured on one Linear per projection, the one with the widest input; activations over the first window. "
        "“Without outlier channels”: they still share scales with the others, but their own error is not counted. "
        "The head’s weight is left out."
    )
    with st.expander("Every format and tile"):
        columns = dict.fromkeys(("Flushed to zero (%)", "Clipped (%)"), st.column_config.NumberColumn(format="%.3g"))
        st.dataframe(_table(by_operand), hide_index=True, key="tensors_table", height="content", column_config=columns)


def _gains_in_words(by_operand: Mapping[str, Sequence[LadderPoint]]) -> str:
    """The gain of 1x128 over one scale, for E4M3 and INT8."""
    kind = ACTIVATION if ACTIVATION in by_operand else WEIGHT
    by = {point.cast: point for point in by_operand[kind]}
    gains = []
    for fmt in ("e4m3fn", "int8"):
        coarse, fine = by[f"{fmt}/tensor"], by[f"{fmt}/1x128"]
        whole, bulk = _gain(coarse.sqnr_db, fine.sqnr_db), _gain(coarse.bulk_sqnr_db, fine.bulk_sqnr_db)
        rest = f" ({bulk} without the outlier channels)" if bulk != whole else ""
        gains.append(f"by {whole} in {FORMATS[fmt].name.upper()}{rest}")
    sentence = f"Going from one scale for all to one per 128 of a row changes the SQNR of {KINDS[kind].lower()} "
    return sentence + " and ".join(gains) + "."


def _gain(coarse: float | None, fine: float | None) -> str:
    """What finer scales gain, dB; a dash where one of them leaves no error."""
    return DASH if coarse is None or fine is None else f"{signed(fine - coarse)} dB"


def _table(by_operand: Mapping[str, Sequence[LadderPoint]]) -> pd.DataFrame:
    points = [point for some in by_operand.values() for point in some]

    def db(value: float | None) -> str:
        return DASH if value is None else f"{value:.1f}".replace("-", "−")

    return pd.DataFrame(
        {
            "Operand": [KINDS[point.kind] for point in points],
            "Format": [parse_cast(point.cast).format.name.upper() for point in points],
            "Scales": [step(point) for point in points],
            "SQNR (dB)": [db(point.sqnr_db) for point in points],
            "Without outlier channels (dB)": [db(point.bulk_sqnr_db) for point in points],
            "Flushed to zero (%)": [100 * point.flushed for point in points],
            "Clipped (%)": [100 * point.clipped for point in points],
            "Bits": [point.bits for point in points],
        }
    )
