"""What became of a run’s layers: coverage, error by layer, scales made beforehand, gradients."""

import math

import pandas as pd
import streamlit as st

from fp8dash.choose.records import Layer, Measurement
from fp8dash.report.numbers import DASH, three
from fp8dash.ui.charts import coverage as charts_coverage
from fp8dash.ui.charts.layers import layer_map, sqnr_maps
from fp8dash.ui.frame import draw, is_dark
from fp8dash.ui.words import plain

WORST = 10
BY_PLACE = {"activation_scale": "Scale", "activation_clipped": "Clipped", "kv_scale": "Scale"}  # of one layer each
GRADIENTS = {  # what is measured of each layer's gradient, and how the screen calls it
    "amax": "Largest",
    "rms": "RMS",
    "sqnr_db_e4m3fn": "SQNR in E4M3 (dB)",
    "sqnr_db_e5m2": "SQNR in E5M2 (dB)",
    "flushed_e4m3fn": "Flushed in E4M3",
    "flushed_e5m2": "Flushed in E5M2",
    "clipped_e4m3fn": "Clipped in E4M3",
    "clipped_e5m2": "Clipped in E5M2",
}


def scales(numbers: list[Measurement]) -> None:
    """Scales that were made beforehand, by the place that reads by them, and the share beyond their largest code."""
    by: dict[str, dict[str, float | None]] = {}
    for m in numbers:
        by.setdefault(BY_PLACE[m.name], {})[m.label] = m.value
    places = list(dict.fromkeys(m.label for m in numbers))
    with st.expander(f"{len(places)} scales made beforehand: {plain(numbers[0].note)}"):
        columns = {title: [by_place.get(place) for place in places] for title, by_place in by.items()}
        st.dataframe(pd.DataFrame({"Place": places, **columns}), hide_index=True, key="run_scales")


def layers_of(layers: list[Layer], parameters: int) -> None:
    cast = [layer for layer in layers if layer.sqnr_db is not None and math.isfinite(layer.sqnr_db)]
    kept = [layer for layer in layers if layer.backend == "kept"]
    st.header("Layers", anchor=False)
    st.markdown(f"{len(layers) - len(kept)} weights were cast, {len(kept)} kept: areas are parameters.")
    tree = charts_coverage.coverage_tree(charts_coverage.stored(layers, parameters), dark=is_dark())
    draw(tree, key="run_coverage", alt="Weights that were cast and kept, by module")
    if cast:
        left, right = st.columns([1.4, 1], gap="large")
        with left:
            draw(layer_map(cast), key="run_layers", alt="Weight SQNR by layer")
        worst = sorted(cast, key=lambda layer: layer.sqnr_db or 0.0)[:WORST]
        with right:
            st.markdown(f"The {len(worst)} worst by weight SQNR:")
            st.dataframe(
                pd.DataFrame(
                    {
                        "Layer": [w.name for w in worst],
                        "SQNR (dB)": [f"{w.sqnr_db:.1f}" for w in worst],
                        "‖W−Ŵ‖/‖W‖": [three(w.relative_error) for w in worst],
                        "Backend": [w.backend for w in worst],
                    }
                ),
                hide_index=True,
                key="run_worst",
                column_config={"SQNR (dB)": st.column_config.TextColumn(alignment="right")},
            )
    with st.expander("Every layer, with what was done to it and why"):
        st.dataframe(
            pd.DataFrame(
                {
                    "Layer": [x.name for x in layers],
                    "Shape": [f"{x.rows} × {x.cols}" for x in layers],
                    "Cast": [x.cast or DASH for x in layers],
                    "Backend": [x.backend for x in layers],
                    "Bits": [x.bits_per_weight for x in layers],
                    "SQNR (dB)": [x.sqnr_db for x in layers],
                    "Flushed to zero": [x.flushed for x in layers],
                    "Clipped": [x.clipped for x in layers],
                    "Why": [x.reason for x in layers],
                }
            ),
            hide_index=True,
            key="run_all_layers",
        )


def is_gradient(m: Measurement) -> bool:
    return m.name.startswith("gradient_")


def gradients_of(numbers: list[Measurement]) -> None:
    """What E4M3 and E5M2 would cost each layer's output gradient, from rows by layer and unlabelled medians."""
    by: dict[str, dict[str, float | None]] = {key: {} for key in GRADIENTS}
    for m in numbers:
        by.setdefault(m.name.removeprefix("gradient_"), {})[m.label] = m.value
    maps = {
        title: {layer: value for layer, value in by[f"sqnr_db_{fmt}"].items() if layer and value is not None}
        for title, fmt in (("E4M3", "e4m3fn"), ("E5M2", "e5m2"))
    }
    st.header("Gradients", anchor=False)
    st.markdown(_compared(by, *maps.values()))
    if all(maps.values()):
        draw(sqnr_maps(maps), key="run_gradients", alt="SQNR of each layer’s gradient in E4M3 and E5M2")
    with st.expander("Every layer’s gradient"):
        table = {title: by[key] for key, title in GRADIENTS.items()}
        layers = dict.fromkeys(m.label for m in numbers if m.label)
        columns = {title: [by_layer.get(layer) for layer in layers] for title, by_layer in table.items()}
        st.dataframe(pd.DataFrame({"Layer": list(layers), **columns}), hide_index=True, key="run_all_gradients")


def _compared(by: dict[str, dict[str, float | None]], e4m3: dict[str, float], e5m2: dict[str, float]) -> str:
    """The two formats compared in a sentence or two."""
    flushed = [by[f"flushed_{fmt}"].get("") for fmt in ("e5m2", "e4m3fn")]
    if None in flushed:
        return "No layer has a gradient."
    shares = [f"{three(100 * (share or 0))} %" for share in flushed]
    both = [layer for layer in e4m3 if layer in e5m2]
    finer = sum(e4m3[layer] > e5m2[layer] for layer in both)
    worst = max((share or 0, layer) for layer, share in by["flushed_e4m3fn"].items() if layer)
    return (
        f"E5M2 flushes {shares[0]} of the median layer’s gradient to zero, E4M3 {shares[1]}. "
        f"The largest share is that of {plain(worst[1])} in E4M3, {three(100 * worst[0])} %. "
        f"E4M3 has the higher SQNR in {finer} of {len(both)} layers. One float32 scale a tensor; the "
        "gradients are those of the unquantized model."
    )
