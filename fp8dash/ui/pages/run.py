"""One run: its numbers with their provenance, its layers, stages and log."""

import math

import pandas as pd
import streamlit as st

from db.rows import FINISHED, Run
from db.standings import NOTE_LENGTH, Choice, Standing
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import Artefact, GemmPoint, Layer, Measurement, Sensitivity
from fp8dash.errors import InvalidChoice
from fp8dash.report.deploy import CHECKPOINT, deployments
from fp8dash.report.numbers import DASH, shown, signed, three
from fp8dash.report.tasks import PREFIX, TaskLine, task_lines
from fp8dash.ui.charts import coverage as charts_coverage
from fp8dash.ui.charts.gemm import gemm_bars, gemm_rates
from fp8dash.ui.charts.layers import layer_map, sqnr_maps
from fp8dash.ui.charts.looks import Look, look
from fp8dash.ui.charts.needles import needle_maps
from fp8dash.ui.charts.sensitivity import sensitivity_bars
from fp8dash.ui.frame import Frame, draw, glyph, guarded, is_dark, metric_help, zone
from fp8dash.ui.parts import decoding, needles
from fp8dash.ui.parts.answer import beside_loss, loss
from fp8dash.ui.parts.recipe_words import in_words
from fp8dash.ui.parts.stages import progress
from fp8dash.ui.words import lasted, many, moment, plain, setting, short

WORST = 10
LOG_LINES = 400
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
    "kld_tokens": "KLD, BF16 to run (nats)", "kld_reverse_tokens": "KLD, run to BF16 (nats)",
    "delta_p_tokens": "Δp of the true token",
}  # fmt: skip
BY_PLACE = {"activation_scale": "Scale", "activation_clipped": "Clipped", "kv_scale": "Scale"}  # of one layer each
GRADIENTS = {  # what is measured of each layer's gradient, and how the screen calls it
    "amax": "Largest", "rms": "RMS", "sqnr_db_e4m3fn": "SQNR in E4M3 (dB)", "sqnr_db_e5m2": "SQNR in E5M2 (dB)",
    "flushed_e4m3fn": "Flushed in E4M3", "flushed_e5m2": "Flushed in E5M2",
    "clipped_e4m3fn": "Clipped in E4M3", "clipped_e5m2": "Clipped in E5M2",
}  # fmt: skip
PLURALS = {"versions": "Version of {}", "methods": "Method of {}"}
FACTS = {"peak_rss_bytes": "Peak memory", "clocks_mhz": "Clocks (MHz)"}
NUMBERS_HEIGHT = 420  # pixels: the table of all numbers scrolls, so that the figures are in reach
BOUNDS = ("_low", "_high")  # how the ends of a number's interval are named


def page(frame: Frame, run_id: str) -> None:
    """The run in full."""
    run = frame.store.run(run_id)
    name = run.preset or run.recipe
    numbers = frame.store.measurements([run_id])[run_id]
    (row,) = frame.store.standings(Choice(ids=(run_id,)))
    st.title(_headline(run, row), anchor=False)
    if row.kld is not None and not row.is_baseline:
        st.markdown(f"{beside_loss(row)}.")
    st.markdown(f"`{run.recipe}` on {plain(short(run.model))}, {plain(short(run.corpus))}, {setting(run.request)}")
    _recipe(run.recipe)
    with st.container(horizontal=True, vertical_alignment="center"):
        if st.button("All runs", key="run_all"):
            frame.go("runs")
        if st.button("Again with changes", key="run_again"):
            frame.go("new_run", **{"from": run.id})
    st.fragment(guarded(_live), run_every=1.0 if run.is_active else None)(frame, run.id, run.state)
    if any(m.name == "kv_scales_at_one" and m.value == 1.0 for m in numbers):
        st.warning("Every KV scale is 1.0: nothing was calibrated, and keys and values beyond the format are clipped.")
    _note(frame, row)
    _numbers([m for m in numbers if not m.label or not _has_a_place_of_its_own(m)])
    if found := [m for m in numbers if m.name in OVER_TOKENS and run.backend != "baseline"]:
        _divergence(found, {m.name: m for m in numbers if not m.label})
    if made := [m for m in numbers if m.label and m.name in BY_PLACE]:
        _scales(made)
    if lines := task_lines(frame.store, [run_id]):
        _tasks(lines)
    layers = frame.store.layers([run_id])[run_id]
    if layers:
        _layers(layers, int(run.facts.get("parameters") or 0))
    if found := [m for m in numbers if _is_gradient(m)]:
        _gradients(found)
    if rows := frame.store.sensitivities([run_id])[run_id]:
        _sensitivity(frame, run, rows, {m.name: m for m in numbers if not m.label})
    looks = {name: look(run.recipe, run.backend)}
    points, cells = frame.store.gemm_points([run_id])[run_id], frame.store.needle_cells([run_id])[run_id]
    left, right = st.columns([1.7, 1], gap="large")
    if points:
        with left:
            st.header("GEMM time of all Linears", anchor=False)
            draw(gemm_bars({name: points}, looks), key="run_gemm", alt="GEMM times")
            _gemm_rates(name, points, looks, numbers)
    if cells:
        with right:
            st.header("Needles by length and depth", anchor=False)
            draw(needle_maps({name: cells}), key="run_needle", alt="Needle scores")
        needles.of_run(name, cells)
    decoding.of_run(frame, run, name)
    if run.backend != "baseline":
        _deploy(run, frame.store.artefacts([run_id])[run_id])
    _provenance(frame, run)


def _recipe(text: str) -> None:
    """What the recipe does to each operand, in a picture and in words."""
    try:
        recipe = parse_recipe(text)
    except InvalidChoice:  # written by another version
        return
    with st.container(horizontal=True, vertical_alignment="center"):
        glyph(recipe)
        st.markdown(f":small[{plain(' '.join(in_words(recipe)))}]")


def _headline(run: Run, row: Standing) -> str:
    name = plain(run.preset or run.recipe)
    if run.state != FINISHED:
        return f"{name} is {run.state}" + (f" at {run.stage}" if run.stage else "")
    if row.kld is None or row.is_baseline:
        return f"{name} is finished"
    return loss(row)


def _live(frame: Frame, run_id: str, state: str) -> None:
    run = frame.store.run(run_id)
    if run.state != state:
        st.rerun()  # the rest of the page has new rows
    progress(run, frame.store.stages([run_id])[run_id])
    if run.error:
        st.error(plain(run.error))


def _note(frame: Frame, row: Standing) -> None:
    """What people noted about the run, and whether it is kept in sight."""
    if row.note:
        st.info(plain(row.note))
        st.caption(f"{plain(row.note_by)}, {moment(row.note_at, zone())}")
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        st.toggle("Pinned", row.pinned, key="run_pinned", on_change=guarded(_pin), args=(frame, row.run),
                  help="Pinned runs bear a star on the leaderboard, for everyone.")  # fmt: skip
        with st.popover("Edit the note" if row.note else "Add a note", type="tertiary"):
            note = st.text_area("Note", row.note, max_chars=NOTE_LENGTH, key=f"run_note_{row.note_at}")
            owner = st.text_input("By", key="owner", bind="query-params", max_chars=60, placeholder="your name")
            if st.button("Save", key="run_note_save"):
                frame.store.annotate(row.run, note or "", owner or "")
                st.rerun()


def _pin(frame: Frame, run_id: str) -> None:
    (frame.store.pin if st.session_state["run_pinned"] else frame.store.unpin)(run_id)


def _numbers(numbers: list[Measurement]) -> None:
    st.header("Measurements", anchor=False)
    metric_help()
    if not numbers:
        st.info("Nothing is measured yet: the stages above say how far the run is.")
        return
    bounds = {(m.name, m.label): m.value for m in numbers if m.name.endswith(BOUNDS)}
    listed = [m for m in numbers if not m.name.endswith(BOUNDS)]
    table = pd.DataFrame(
        {
            "What": [_title(m.name) for m in listed],
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


def _scales(numbers: list[Measurement]) -> None:
    """Scales that were made beforehand, by the place that reads by them, and the share beyond their largest code."""
    by: dict[str, dict[str, float | None]] = {}
    for m in numbers:
        by.setdefault(BY_PLACE[m.name], {})[m.label] = m.value
    places = list(dict.fromkeys(m.label for m in numbers))
    with st.expander(f"{len(places)} scales made beforehand: {plain(numbers[0].note)}"):
        columns = {title: [found.get(place) for place in places] for title, found in by.items()}
        st.dataframe(pd.DataFrame({"Place": places, **columns}), hide_index=True, key="run_scales")


def _tasks(lines: list[TaskLine]) -> None:
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


def _title(name: str) -> str:
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


def _layers(layers: list[Layer], parameters: int) -> None:
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
                {"Layer": [x.name for x in layers], "Shape": [f"{x.rows} × {x.cols}" for x in layers],
                 "Cast": [x.cast or DASH for x in layers], "Backend": [x.backend for x in layers],
                 "Bits": [x.bits_per_weight for x in layers], "SQNR (dB)": [x.sqnr_db for x in layers],
                 "Flushed to zero": [x.flushed for x in layers], "Clipped": [x.clipped for x in layers],
                 "Why": [x.reason for x in layers]}
            ),
            hide_index=True, key="run_all_layers",
        )  # fmt: skip


def _divergence(percentiles: list[Measurement], by_name: dict[str, Measurement]) -> None:
    """How tokens differ from the baseline's: what llama.cpp's --kl-divergence lists, a row a percentile."""
    st.header("Divergence from BF16, token by token", anchor=False)
    said = [
        f"{TITLES.get(name, METRICS[name].title if name in METRICS else name)} {_value(by_name[name])}"
        for name in ("kld", "kld_reverse", "top1", "top5", "delta_p", "delta_p_rms")
        if name in by_name
    ]
    st.markdown(f"Means over tokens: {'; '.join(said)}. {_noise(by_name)}")
    table: dict[str, dict[str, str]] = {title: {} for title in OVER_TOKENS.values()}
    for m in percentiles:
        table[OVER_TOKENS[m.name]][m.label] = signed(m.value) if m.name == "delta_p_tokens" else three(m.value)
    order = [m.label for m in percentiles if m.name == "delta_p_tokens"]  # has the most of them
    columns = {title: [row.get(label, DASH) for label in order] for title, row in table.items()}
    st.dataframe(
        pd.DataFrame({"Tokens": order, **columns}), hide_index=True, key="run_divergence", height="content",
        column_config={title: st.column_config.TextColumn(alignment="right") for title in columns},
    )  # fmt: skip


def _noise(by_name: dict[str, Measurement]) -> str:
    """How the run's KLD lies to the noise floor."""
    floor, low = (by_name[name].value if name in by_name else None for name in ("kld_noise_floor", "kld_low"))
    if floor is None:
        return ""
    said = f"The same weights in float32 lie {three(floor)} nats from BF16"
    if low is None:
        return f"{said}; too few windows tell whether this run lies above."
    return f"{said}: this run is indistinguishable from BF16." if low <= floor else f"{said}; this run lies above."


def _has_a_place_of_its_own(m: Measurement) -> bool:
    return _is_gradient(m) or m.name in BY_PLACE or m.name.startswith(PREFIX) or m.name in OVER_TOKENS


def _is_gradient(m: Measurement) -> bool:
    return m.name.startswith("gradient_")


def _gradients(numbers: list[Measurement]) -> None:
    """What E4M3 and E5M2 would cost each layer's output gradient, from rows by layer and unlabelled medians."""
    by: dict[str, dict[str, float | None]] = {key: {} for key in GRADIENTS}
    for m in numbers:
        by.setdefault(m.name.removeprefix("gradient_"), {})[m.label] = m.value
    maps = {
        title: {layer: value for layer, value in by[f"sqnr_db_{fmt}"].items() if layer and value is not None}
        for title, fmt in (("E4M3", "e4m3fn"), ("E5M2", "e5m2"))
    }
    st.header("Gradients", anchor=False)
    st.markdown(_gradients_said(by, *maps.values()))
    if all(maps.values()):
        draw(sqnr_maps(maps), key="run_gradients", alt="SQNR of each layer’s gradient in E4M3 and E5M2")
    with st.expander("Every layer’s gradient"):
        table = {title: by[key] for key, title in GRADIENTS.items()}
        layers = dict.fromkeys(m.label for m in numbers if m.label)
        columns = {title: [found.get(layer) for layer in layers] for title, found in table.items()}
        st.dataframe(pd.DataFrame({"Layer": list(layers), **columns}), hide_index=True, key="run_all_gradients")


def _gradients_said(by: dict[str, dict[str, float | None]], e4m3: dict[str, float], e5m2: dict[str, float]) -> str:
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


def _deploy(run: Run, left: list[Artefact]) -> None:
    """What to type to serve the recipe, and the checkpoint where the run left one."""
    st.header("Serve it", anchor=False)
    for artefact in left:
        st.markdown(
            f"The run left a {artefact.format} checkpoint of {three(artefact.size_bytes / 1e6)} MB on its worker:"
        )
        st.code(artefact.path, language=None)
        st.caption(f"SHA-256 {artefact.sha256}")
    ways = deployments(parse_recipe(run.recipe), run.model, left[-1].path if left else None)
    if not left and any(CHECKPOINT in way.text for way in ways):
        st.caption(f"{CHECKPOINT} stands for the folder that a run writes when “Checkpoint” is among what it measures.")
    for way, tab in zip(ways, st.tabs([way.engine for way in ways]), strict=True):
        if way.text:
            tab.code(way.text, language=way.language)
        if way.note:
            tab.caption(plain(way.note))


def _sensitivity(frame: Frame, run: Run, rows: list[Sensitivity], numbers: dict[str, Measurement]) -> None:
    """The groups by what they cost, and the mixed recipe with a way to queue it."""
    whole, mixed = (numbers[name].value if name in numbers else None for name in ("sensitivity_kld", "mixed_kld"))
    worst = max(rows, key=lambda row: row.alone_kld)
    st.header("What each part costs", anchor=False)
    st.markdown(
        f"Of {many(len(rows), 'group')} of Linears, **{plain(worst.group)}** costs most: {three(worst.alone_kld)} nats "
        f"where nothing else is cast. All together cost {three(whole)}; added up, "
        f"{three(sum(row.alone_kld for row in rows))}."
    )
    draw(sensitivity_bars(rows, whole), key="run_sensitivity", alt="KLD of each group of Linears")
    if mixed is not None:
        _mixed(frame, run, [row for row in rows if row.kept], numbers)
    with st.expander("Every group"):
        columns = {"Group": [row.group for row in rows], "Linears": [row.linears for row in rows],
                   "Parameters": [row.parameters for row in rows], "Bits/weight": [row.bits_per_weight for row in rows],
                   "KLD, cast alone": [row.alone_kld for row in rows],
                   "KLD, all but it": [row.all_but_kld for row in rows],
                   "In the mixed recipe": ["kept" if row.kept else "cast" for row in rows]}  # fmt: skip
        st.dataframe(pd.DataFrame(columns), hide_index=True, key="run_all_groups")


def _mixed(frame: Frame, run: Run, kept: list[Sensitivity], numbers: dict[str, Measurement]) -> None:
    found, text = {name: three(m.value) for name, m in numbers.items()}, numbers["mixed_kld"].note
    if not kept:
        st.markdown(f"The budget {plain(run.request.sensitivity_budget)} asks for nothing to be kept.")
        return
    st.markdown(
        f"Suggested under the budget {plain(run.request.sensitivity_budget)}: keep "
        f"{plain(', '.join(row.group for row in kept))} in BF16. "
        f"Measured as a whole {found['mixed_kld']} nats, predicted from its parts {found['mixed_kld_predicted']}, at "
        f"{found['mixed_bits_per_weight']} bits a weight. Linears alone, on the first windows, emulated."
    )
    st.code(text, language=None, wrap_lines=True)
    if st.button("Queue the mixed recipe", key="run_mixed"):
        frame.go("new_run", **{"from": run.id, "recipe": text})


def _gemm_rates(
    name: str, points: list[GemmPoint], looks: dict[str, Look], numbers: list[Measurement]
) -> None:  # fmt: skip
    """TFLOPS by M and where the cast pays, and every shape in a table."""
    draw(gemm_rates({name: points}, looks), key="run_gemm_rates", alt="TFLOPS by M")
    if cross := next((m for m in numbers if m.name == "gemm_crossover_m"), None):
        said = f"from M = {cross.value:,.0f}" if cross.value is not None else "at no M"
        st.caption(f"Cast and product beat BF16 {said} ({plain(cross.note)}).")
    peaks = {m.label: m.value for m in numbers if m.name in ("peak_tflops", "peak_gb_per_s")}
    with st.expander("Every shape, cold caches and spread"):
        st.dataframe(pd.DataFrame([_shape_row(point, peaks) for point in points]), hide_index=True, key="run_shapes")


def _shape_row(p: GemmPoint, peaks: dict[str, float | None]) -> dict[str, object]:
    """A shape at one M; shares are of the rates that this run measured on one large product and one large copy."""
    base, product = p.tflops(p.baseline_us), p.tflops(p.matmul_us)
    moved = p.matmul_bytes / p.matmul_us / 1e3 if p.matmul_bytes and p.matmul_us else None
    return {
        "M": p.m, "N": p.n, "K": p.k, "Linears": p.count, "BF16 (µs)": p.baseline_us, "Cast (µs)": p.cast_us,
        "Product (µs)": p.matmul_us, "BF16, cold (µs)": p.baseline_cold_us, "Cast, cold (µs)": p.cast_cold_us,
        "Product, cold (µs)": p.matmul_cold_us, "BF16 TFLOPS": base, "TFLOPS": product,
        "BF16 of peak": _share(base, peaks.get("BF16")), "Of peak": _share(product, peaks.get(p.kernel)),
        "BF16 GB/s": p.baseline_bytes / p.baseline_us / 1e3, "GB/s": moved,
        "Of copy": _share(moved, peaks.get("copy")), "BF16 spread": p.baseline_iqr, "Cast spread": p.cast_iqr,
        "Product spread": p.matmul_iqr,
    }  # fmt: skip


def _share(value: float | None, peak: float | None) -> float | None:
    return value / peak if value is not None and peak else None


def _provenance(frame: Frame, run: Run) -> None:
    st.header("Provenance", anchor=False)
    here = zone()
    facts = {
        "Run": run.id,
        "Study": run.study or DASH,
        "Owner": run.owner,
        "State": run.state,
        "Attempt": str(run.attempt),
        "Created": moment(run.created_at, here),
        "Started": moment(run.started_at, here),
        "Finished": moment(run.finished_at, here),
        "Recipe": run.recipe,
        "Model": run.model,
        "Corpus": run.corpus,
        "Backend": run.backend or DASH,
        "Device": run.device or DASH,
        "Worker": run.worker_id or DASH,
        "Model hash": run.model_hash or DASH,
        "Corpus hash": run.corpus_hash or DASH,
    }
    for key, value in run.facts.items():
        facts |= _told(key, value)
    left, right = st.columns(2, gap="large")
    left.dataframe(
        pd.DataFrame({"What": list(facts), "Value": list(facts.values())}),
        hide_index=True,
        key="run_facts",
        height="content",
    )
    stages = frame.store.stages([run.id])[run.id]
    table = pd.DataFrame({"Stage": [s.stage for s in stages], "Time": [lasted(s.seconds) for s in stages],
                          "Finished": [moment(s.finished_at, here) for s in stages]})  # fmt: skip
    right.dataframe(table, hide_index=True, key="run_stages", height="content")
    with right.expander("Request"):
        st.json(run.request.to_json())
    with st.expander("Log"):
        st.code(frame.queue.log_tail(run.id, LOG_LINES) or "The log is empty.", language=None, height=320)


def _told(key: str, value: object) -> dict[str, str]:
    """A fact as rows: a version or a method each has one of its own."""
    if key in PLURALS and isinstance(value, dict):
        return {PLURALS[key].format(name): str(one) for name, one in value.items()}
    return {FACTS.get(key, key.replace("_", " ").capitalize()): _fact(key, value)}


def _fact(key: str, value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {version}" for name, version in value.items())
    if key.endswith("_bytes") and isinstance(value, int | float):
        return f"{three(value / 1e6)} MB"
    return str(value)
