"""A run’s measurements, each with its interval, unit and method, and how tokens differ from the baseline’s."""

import pandas as pd
import streamlit as st

from fp8dash.choose.metrics import METRICS
from fp8dash.choose.records import Measurement
from fp8dash.report.numbers import DASH, shown, signed, three
from fp8dash.report.tasks import TaskLine
from fp8dash.ui.frame import metric_help
from fp8dash.ui.parts.run_layers import GRADIENTS

TITLES = {
    "model_bits_per_weight": "Bits/weight, whole model",
    "gemm_coverage": "GEMM coverage",
    "baseline_ppl": "Baseline PPL",
    "weight_flushed": "Weights flushed to zero",
    "kld_noise_floor": "KLD of BF16 against float32",
    "kld_reverse": "KLD, reversed",
    "top5": "Top-5",
    "delta_p": "Δp of the true token, mean",
    "delta_p_rms": "Δp of the true token, RMS",
    "ppl_ratio": "PPL over baseline PPL",
    "ppl_diff": "PPL minus baseline PPL",
    "ln_ppl_correlation": "Correlation of token ln p",
    "word_ppl": "Word PPL",
    "byte_ppl": "Byte PPL",
    "bits_per_byte": "Bits a byte",
    "weight_clipped": "Weights clipped",
    "kv_bytes_per_token": "KV cache, bytes a token",
    "activation_clipped": "Activations clipped",
    "kv_kld": "KV cache: KLD",
    "kv_ppl": "KV cache: PPL",
    "kv_baseline_ppl": "KV cache: baseline PPL",
    "kv_ln_ppl_diff": "KV cache: Δ ln PPL",
    "kv_top1": "KV cache: top-1",
    "kv_scale_lowest": "KV cache: lowest scale",
    "kv_scale_highest": "KV cache: highest scale",
    "kv_scales_at_one": "KV cache: scales at 1.0",
    "baseline_needle": "Baseline needle",
    "needle_logprob": "Needle ln p",
    "baseline_needle_logprob": "Baseline needle ln p",
    "needle_logprob_diff": "Δ needle ln p",
    "gemm_speedup_cold": "GEMM speed-up, cold",
    "gemm_crossover_m": "Faster than BF16 from M =",
    "peak_tflops": "Peak, measured",
    "peak_gb_per_s": "Memory rate, measured",
    "prefill_tokens_per_s": "Prefill",
    "ttft_ms": "Time to first token",
    "decode_tokens_per_s": "Decode",
    "itl_ms": "Time between tokens, median",
    "itl_ms_p90": "Time between tokens, p90",
    "itl_ms_p99": "Time between tokens, p99",
    "decode_joules_per_token": "Energy a token",
    "resident_memory_bytes": "Resident memory",
    "peak_memory_bytes": "Peak memory",
    "sensitivity_kld": "KLD of the whole recipe",
    "sensitivity_kld_sum": "Sum of its parts’ KLDs",
    "mixed_kld": "KLD of the mixed recipe",
    "mixed_kld_predicted": "KLD of the mixed recipe, predicted",
    "mixed_bits_per_weight": "Bits/weight, mixed recipe",
    "weight_amax_over_rms": "Weights: amax over RMS",
    "activation_amax_over_rms": "Activations: amax over RMS",
}
OVER_TOKENS = {  # percentiles over tokens, by label
    "kld_tokens": "KLD, BF16 to run (nats)",
    "kld_reverse_tokens": "KLD, run to BF16 (nats)",
    "delta_p_tokens": "Δp of the true token",
}
NUMBERS_HEIGHT = 420  # pixels: the table of all numbers scrolls, so that the figures are in reach
BOUNDS = ("_low", "_high")  # how the ends of a number's interval are named


def all_numbers(numbers: list[Measurement]) -> None:
    st.header("Measurements", anchor=False)
    metric_help()
    if not numbers:
        st.info("Nothing is measured yet: the stages above say how far the run is.")
        return
    bounds = {(m.name, m.label): m.value for m in numbers if m.name.endswith(BOUNDS)}
    listed = [m for m in numbers if not m.name.endswith(BOUNDS)]
    table = pd.DataFrame(
        {
            "What": [number_title(m.name) for m in listed],
            "Of": [m.label for m in listed],
            "Value": [_value(m) for m in listed],
            "95 % interval": [_bounds(bounds, m) for m in listed],
            "Unit": ["MB" if _in_mb(m) else m.unit.replace("x ", "× ") for m in listed],
            "Better": [m.better or DASH for m in listed],
            "Backend": [m.backend for m in listed],
            "Note": [m.note for m in listed],
            "Method": [m.method for m in listed],
        }
    )
    table = table[[column for column in table if (table[column] != "").any()]]
    config = {
        "What": st.column_config.TextColumn(width=190),
        "Of": st.column_config.TextColumn(width=70),
        "Value": st.column_config.TextColumn(width=100, alignment="right"),
        "95 % interval": st.column_config.TextColumn(width=175),
        "Note": st.column_config.TextColumn(width=200),
    }
    st.dataframe(table, hide_index=True, key="run_numbers", height=NUMBERS_HEIGHT, column_config=config)


def task_scores(lines: list[TaskLine]) -> None:
    """The numbers of lm-eval's tasks, as it makes them."""
    st.header("Tasks", anchor=False)
    scores = [(line, score) for line in lines for score in line.scores if score]
    table = pd.DataFrame(
        {
            "Task": [line.task for line, _ in scores],
            "Metric": [line.metric for line, _ in scores],
            "Value": [three(score.value) for _, score in scores],
            "Standard error": [three(score.stderr) for _, score in scores],
            "Better": [line.better or DASH for line, _ in scores],
            "Of": [score.note for _, score in scores],
            "Method": [score.method for _, score in scores],
        }
    )
    right = st.column_config.TextColumn(alignment="right")
    columns = {"Value": right, "Standard error": right}
    st.dataframe(table, hide_index=True, key="run_tasks", height="content", column_config=columns)


def _bounds(values: dict[tuple[str, str], float | None], m: Measurement) -> str:
    """The interval of a number that has one; a dash where its units are too few."""
    ends = [(m.name + end, m.label) for end in BOUNDS]
    if not all(end in values for end in ends):
        return ""
    low, high = (values[end] for end in ends)
    return DASH if low is None or high is None else f"[{signed(low)}, {signed(high)}]"


def number_title(name: str) -> str:
    if name.startswith("gradient_"):
        return f"Gradient: {GRADIENTS.get(name.removeprefix('gradient_'), name).replace(' (dB)', '')}"
    return METRICS[name].title if name in METRICS else TITLES.get(name, name.replace("_", " ").capitalize())


def _value(m: Measurement) -> str:
    if m.name in METRICS:
        return shown(METRICS[m.name], m.value)
    if _in_mb(m) and m.value is not None:
        return three(m.value / 1e6)
    return f"{m.value:,.0f}" if m.unit == "tokens" and m.value is not None else three(m.value)


def _in_mb(m: Measurement) -> bool:
    return m.name == "model_bytes" or m.name.endswith("_memory_bytes")


def divergence(percentiles: list[Measurement], by_name: dict[str, Measurement]) -> None:
    """How tokens differ from the baseline's: what llama.cpp's --kl-divergence lists, a row a percentile."""
    st.header("Divergence from BF16, token by token", anchor=False)
    means = [
        f"{TITLES.get(name, METRICS[name].title if name in METRICS else name)} {_value(by_name[name])}"
        for name in ("kld", "kld_reverse", "top1", "top5", "delta_p", "delta_p_rms")
        if name in by_name
    ]
    st.markdown(f"Means over tokens: {'; '.join(means)}. {_noise(by_name)}")
    table: dict[str, dict[str, str]] = {title: {} for title in OVER_TOKENS.values()}
    for m in percentiles:
        table[OVER_TOKENS[m.name]][m.label] = signed(m.value) if m.name == "delta_p_tokens" else three(m.value)
    order = [m.label for m in percentiles if m.name == "delta_p_tokens"]  # has the most of them
    columns = {title: [row.get(label, DASH) for label in order] for title, row in table.items()}
    st.dataframe(
        pd.DataFrame({"Tokens": order, **columns}),
        hide_index=True,
        key="run_divergence",
        height="content",
        column_config={title: st.column_config.TextColumn(alignment="right") for title in columns},
    )


def _noise(by_name: dict[str, Measurement]) -> str:
    """How the run's KLD lies to the noise floor."""
    floor, low = (by_name[name].value if name in by_name else None for name in ("kld_noise_floor", "kld_low"))
    if floor is None:
        return ""
    sentence = f"The same weights in float32 lie {three(floor)} nats from BF16"
    if low is None:
        return f"{sentence}; too few windows tell whether this run lies above."
    return (
        f"{sentence}: this run is indistinguishable from BF16." if low <= floor else f"{sentence}; this run lies above."
    )
