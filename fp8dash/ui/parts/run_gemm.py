"""A run’s GEMM rates by M, and every shape in a table."""

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from fp8dash.choose.records import GemmPoint, Measurement
from fp8dash.ui.charts.gemm import gemm_rates
from fp8dash.ui.charts.looks import Look
from fp8dash.ui.frame import draw
from fp8dash.ui.words import plain


def rates(name: str, points: list[GemmPoint], looks: dict[str, Look], numbers: Sequence[Measurement]) -> None:
    """TFLOPS by M, where the cast pays off, and every shape in a table."""
    draw(gemm_rates({name: points}, looks), key="run_gemm_rates", alt="TFLOPS by M")
    if cross := next((m for m in numbers if m.name == "gemm_crossover_m"), None):
        crossover = f"from M = {cross.value:,.0f}" if cross.value is not None else "at no M"
        st.caption(f"Cast and product beat BF16 {crossover} ({plain(cross.note)}).")
    peaks = {m.label: m.value for m in numbers if m.name in ("peak_tflops", "peak_gb_per_s")}
    with st.expander("Every shape, cold caches and spread"):
        st.dataframe(pd.DataFrame([_shape_row(point, peaks) for point in points]), hide_index=True, key="run_shapes")


def _shape_row(p: GemmPoint, peaks: dict[str, float | None]) -> dict[str, object]:
    """A shape at one M; shares are of the rates that this run measured on one large product and one large copy."""
    base, product = p.tflops(p.baseline_us), p.tflops(p.matmul_us)
    moved = p.matmul_bytes / p.matmul_us / 1e3 if p.matmul_bytes and p.matmul_us else None
    return {
        "M": p.m,
        "N": p.n,
        "K": p.k,
        "Linears": p.count,
        "BF16 (µs)": p.baseline_us,
        "Cast (µs)": p.cast_us,
        "Product (µs)": p.matmul_us,
        "BF16, cold (µs)": p.baseline_cold_us,
        "Cast, cold (µs)": p.cast_cold_us,
        "Product, cold (µs)": p.matmul_cold_us,
        "BF16 TFLOPS": base,
        "TFLOPS": product,
        "BF16, share of peak": _share(base, peaks.get("BF16")),
        "Share of peak": _share(product, peaks.get(p.kernel)),
        "BF16 GB/s": p.baseline_bytes / p.baseline_us / 1e3,
        "GB/s": moved,
        "Share of copy rate": _share(moved, peaks.get("copy")),
        "BF16 spread": p.baseline_iqr,
        "Cast spread": p.cast_iqr,
        "Product spread": p.matmul_iqr,
    }


def _share(value: float | None, peak: float | None) -> float | None:
    return value / peak if value is not None and peak else None
