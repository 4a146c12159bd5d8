"""A run’s layers: coverage, error by layer, precomputed scales, gradients."""

import math

import pandas as pd
import streamlit as st

from fp8dash.choose.measurements import MEASUREMENTS, gradient_name
from fp8dash.choose.records import KEPT, Layer, Measurement
from fp8dash.report.numbers import DASH, heading, three
from fp8dash.ui.charts import coverage as charts_coverage
from fp8dash.ui.charts.layers import layer_map, sqnr_maps
from fp8dash.ui.frame import draw, is_dark
from fp8dash.ui.words import plain

WORST = 10
BY_LAYER = ("activation_scale", "activation_clipped", "kv_scale")  # of scales that were made beforehand
GRADIENTS = [metric for metric in MEASUREMENTS.values() if metric.stage == "gradients"]


def scales(numbers: list[Measurement]) -> None:
    """Scales made beforehand, by the place that uses them, and the share beyond their largest code."""
    by: dict[str, dict[str, float | None]] = {}
    for m in numbers:
        by.setdefault(MEASUREMENTS[m.name].title, {})[m.label] = m.value
    places = list(dict.fromkeys(m.label for m in numbers))
    with st.expander(f"{len(places)} scales made beforehand: {plain(numbers[0].note)}"):
        columns = {title: [by_place.get(place) for place in places] for title, by_place in by.items()}
        st.dataframe(pd.DataFrame({"Place": places, **columns}), hide_index=True, key="run_scales")


def layers_of(layers: list[Layer], parameters: int) -> None:
    cast = [layer for layer in layers if layer.sqnr_db is not None and math.isfinite(layer.sqnr_db)]
    kept = [layer for layer in layers if layer.backend == KEPT]
    st.header("Layers", anchor=False)
    st.markdown(f"{len(layers) - len(kept)} weights were cast, {len(kept)} kept. Areas show parameter counts.")
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


def gradients_of(numbers: list[Measurement]) -> None:
    """What E4M3 and E5M2 would cost each layer's output gradient, from rows per layer and unlabelled medians."""
    by: dict[str, dict[str, float | None]] = {metric.name: {} for metric in GRADIENTS}
    for m in numbers:
        by[m.name][m.label] = m.value
    sqnr = {"E4M3": by[gradient_name("sqnr_db", "e4m3fn")], "E5M2": by[gradient_name("sqnr_db", "e5m2")]}
    maps = {
        title: {layer: value for layer, value in by_layer.items() if layer and value is not None}
        for title, by_layer in sqnr.items()
    }
    st.header("Gradients", anchor=False)
    st.markdown(_compared(by, *maps.values()))
    if all(maps.values()):
        draw(sqnr_maps(maps), key="run_gradients", alt="SQNR of each layer’s gradient in E4M3 and E5M2")
    with st.expander("Every layer’s gradient"):
        layers = dict.fromkeys(m.label for m in numbers if m.label)
        columns = {heading(metric): [by[metric.name].get(layer) for layer in layers] for metric in GRADIENTS}
        st.dataframe(pd.DataFrame({"Layer": list(layers), **columns}), hide_index=True, key="run_all_gradients")


def _compared(by: dict[str, dict[str, float | None]], e4m3: dict[str, float], e5m2: dict[str, float]) -> str:
    """The two formats compared in a sentence or two."""
    flushed = [by[gradient_name("flushed", fmt)].get("") for fmt in ("e5m2", "e4m3fn")]
    if None in flushed:
        return "No layer has a gradient."
    shares = [f"{three(100 * (share or 0))} %" for share in flushed]
    both = [layer for layer in e4m3 if layer in e5m2]
    finer = sum(e4m3[layer] > e5m2[layer] for layer in both)
    worst = max((share or 0, layer) for layer, share in by[gradient_name("flushed", "e4m3fn")].items() if layer)
    return (
        f"E5M2 flushes {shares[0]} of the median layer’s gradient to zero, E4M3 {shares[1]}. The worst layer is "
        f"{plain(worst[1])} in E4M3, {three(100 * worst[0])} %. E4M3 has the higher SQNR in {finer} of {len(both)} "
        "layers. One float32 scale per tensor; the gradients are those of the unquantized model."
    )
