"""Made-up rows for tests and screenshots of the pages. None of these numbers was measured: never cite them.

`python -m tests.seed` fills the database of FP8DASH_DATA_DIR.
"""

import math
import sys
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import insert, update

from db.records import ROW_TABLES, row_values
from db.standings import stand
from db.store import Store
from db.tables import RunTable, StageTable, StandingTable, WorkerTable
from fp8dash import places
from fp8dash.choose.catalog import estimate, shape_of
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import (
    ACTIVATION,
    BINADES,
    HIGHER,
    LOWER,
    NEITHER,
    WEIGHT,
    GemmPoint,
    LadderPoint,
    Layer,
    Measurement,
    NeedleCell,
    Row,
    TensorProfile,
    Window,
)
from fp8dash.choose.request import Request

CPU, H200 = "CPU (x86-64, 2 threads)", "NVIDIA H200"
HOSTILE = "**x** [a](b) :red[c] <script>alert(1)</script> $y$ :smile: `z` -> www.a.example :material/home: # _i_ ~~s~~"
KLD = {
    "BF16": 0.0, "FP8_TENSOR": 0.0322, "FP8_DYNAMIC": 0.0291, "FP8_BLOCK": 0.0232, "MXFP8": 0.0172,
    "FP8_E5M2": 0.101, "INT8": 0.0303, "INT8_TENSOR": 1.21,
}  # fmt: skip
SPEED = {
    CPU: {"FP8_TENSOR": 0.42, "FP8_DYNAMIC": 0.39, "FP8_E5M2": 0.36, "INT8": 1.71, "INT8_TENSOR": 1.83},
    H200: {"FP8_TENSOR": 1.62, "FP8_DYNAMIC": 1.55},
}
SHAPES = ((576, 576, 60), (192, 576, 60), (1536, 576, 60), (576, 1536, 30))
LINEARS = (
    ("self_attn.q_proj", 576, 576), ("self_attn.k_proj", 192, 576), ("self_attn.v_proj", 192, 576),
    ("self_attn.o_proj", 576, 576), ("mlp.gate_proj", 1536, 576), ("mlp.up_proj", 1536, 576),
    ("mlp.down_proj", 576, 1536),
)  # fmt: skip
PERCENTILES = ("minimum", "1 %", "10 %", "median", "90 %", "99 %", "maximum")
SECONDS = {"load": 2.1, "baseline": 31.4, "quantize": 4.8, "gemm": 9.6, "perplexity": 28.3, "needle": 22.0}
DECODE = {"BF16": 1.0, "FP8_TENSOR": 1.30, "FP8_DYNAMIC": 1.26}  # times BF16's speed
ANSWERS = {"FP8_E5M2": (1024,), "INT8_TENSOR": (256, 1024)}  # lengths at which needles are lost


def fill(store: Store, *, now: datetime | None = None) -> dict[str, str]:
    """Run ids by name: eight finished runs, three on another device, and one in each other state."""
    now = now or datetime.now(UTC)
    _workers(store, now)
    demo = store.add_study("Demo: FP8 tiles", "ada")
    ids = {
        name: _finished(store, name, CPU, demo, "ada", now - timedelta(hours=3) + timedelta(seconds=i))
        for i, name in enumerate(KLD)
    }
    _profiled(store, ids["BF16"])
    big = store.add_study("H200 kernels", "grace")
    for name in ("BF16", "FP8_TENSOR", "FP8_DYNAMIC"):
        ids[f"H200 {name}"] = _finished(store, name, H200, big, "grace", now - timedelta(days=2))
    hostile = store.add_study(HOSTILE, "<b>mallory</b>")
    mine = store.add_study("Down projections kept", "ada")
    ids["failed"] = _other(
        store,
        Request.of(recipe="w=e5m2/tensor a=e5m2/tensor", backend="native"),
        "failed",
        hostile,
        "<b>mallory</b>",
        now,
        stage="quantize",
        stage_share=0.0,
        started_at=now - timedelta(minutes=9),
        finished_at=now - timedelta(minutes=8),
        error="No native kernel takes model.layers.0.mlp.down_proj: cuBLASLt refuses E5M2 × E5M2. Choose the backend "
        "“auto” or “emulated”.",
    )
    ids["cancelled"] = _other(
        store,
        Request.of(recipe="w=int8/1x128"),
        "cancelled",
        mine,
        "ada",
        now,
        stage="perplexity",
        stage_share=0.4,
        started_at=now - timedelta(minutes=7),
        finished_at=now - timedelta(minutes=6),
    )
    ids["running"] = _other(
        store,
        Request.of(recipe="w=e4m3fn/128x128 a=e4m3fn/1x128 skip=*.down_proj"),
        "running",
        mine,
        "ada",
        now,
        stage="perplexity",
        stage_share=0.42,
        message="window 14 of 32, 310 tokens/s",
        started_at=now - timedelta(minutes=1),
    )
    ids["queued"] = _other(
        store, Request.of(recipe="w=e4m3fn/1x32/rceil a=e4m3fn/1x32/rceil skip=*.down_proj"), "queued", mine, "ada", now
    )
    return ids


def rows_of(name: str, recipe: Recipe, device: str, *, kept: int = 0) -> dict[str, list[Row]]:
    """The rows of a run, by stage."""
    rng = np.random.default_rng(sum(map(ord, name)))
    backend = "baseline" if recipe.is_baseline else "emulated" if device == CPU else "native"
    stages: dict[str, list[Row]] = {
        "quantize": [*_size(recipe, backend), *_layers(recipe, backend, rng)],
        "gemm": _gemm(name, device, backend, rng),
        "perplexity": _perplexity(KLD[name], backend, rng),
        "needle": _needle(name, backend),
        "decode": _decode(name, device, backend),
    }
    return stages


def _measured(name: str, value: float | None, unit: str, better: str, backend: str, **more: Any) -> Measurement:
    return Measurement(name, value, unit, better, f"{name.split('_')[0]}/1", backend, **more)


def _size(recipe: Recipe, backend: str) -> list[Row]:
    shape = shape_of("demo")
    assert shape
    estimated = estimate(recipe, shape)
    rows: list[Row] = [
        _measured("bits_per_weight", estimated.bits_per_weight, "bits", LOWER, backend),
        _measured("model_bytes", float(estimated.size_bytes), "bytes", LOWER, backend),
        _measured("coverage", estimated.coverage, "share", NEITHER, backend),
    ]
    if not recipe.is_baseline:
        rows.append(_measured("weight_sqnr_db", _sqnr(recipe), "dB", HIGHER, backend))
    return rows


def _sqnr(recipe: Recipe) -> float:
    weights = recipe.weights
    assert weights
    base = {"e4m3fn": 31.5, "e5m2": 25.6, "int8": 40.0}[weights.format.name]
    return base - (9.0 if weights.text == "int8/tensor" else 0.0)


def _layers(recipe: Recipe, backend: str, rng: np.random.Generator) -> list[Row]:
    rows: list[Row] = []
    for block in range(30):
        for part, n, k in LINEARS:
            cast = recipe.weights
            sqnr = _sqnr(recipe) + float(rng.normal(0, 0.35)) - 2.5 * (block < 2) * ("down" in part) if cast else None
            rows.append(
                Layer(
                    f"model.layers.{block}.{part}", n, k, cast.text if cast else "", backend if cast else "kept",
                    "" if cast else "the recipe casts nothing", cast.bits_per_element(n, k) if cast else 16.0, sqnr,
                    10 ** (-sqnr / 20) if sqnr else None, 0.0004 if cast else None, 0.0 if cast else None,
                    group="attention" if "attn" in part else "mlp",
                )
            )  # fmt: skip
    rows.append(Layer("lm_head", 49152, 576, "", "kept", "lm_head is kept unless also= names it", 16.0, group="head"))
    return rows


def _gemm(name: str, device: str, backend: str, rng: np.random.Generator) -> list[Row]:
    speed = SPEED[device].get(name)
    rows: list[Row] = []
    for m in (1, 16, 128):
        for n, k, count in SHAPES:
            base = (6 if device == H200 else 60) * (1 + n * k / 4e5) * (1 + m / 90) * float(rng.normal(1, 0.02))
            total = base / speed / (1.25 if m == 1 else 1) if speed else None
            rows.append(
                GemmPoint(
                    m, n, k, count, base, total * 0.18 if total else None, total * 0.82 if total else None,
                    "scaled_mm" if speed else "", "" if speed else "no native kernel for these tiles",
                )
            )  # fmt: skip
    rows.append(_measured("gemm_speedup", speed, "× BF16", HIGHER, "native", note="" if speed else "no native kernel"))
    return rows


def _decode(name: str, device: str, backend: str) -> list[Row]:
    """Three batches where the run is timed, else why it is not."""
    method = "greedy loop over the model, random token ids, v1"
    if backend == "emulated":
        why = "layers are emulated, whose time says nothing about a kernel: measure on a device that runs them natively"
        return [Measurement("decode_tokens_per_s", None, "tokens/s", HIGHER, method, backend, note=why)]
    graph = "a CUDA graph, a static cache" if device == H200 else "eager, a cache that grows"
    rows: list[Row] = []
    for batch in (1, 8, 64):
        gap = (1.6 if device == H200 else 60.0) * (1 + batch / 40) / DECODE[name]  # ms
        numbers = {"prefill_tokens_per_s": (128e3 / gap, "tokens/s"), "ttft_ms": (gap * batch, "ms"),
                   "decode_tokens_per_s": (1e3 * batch / gap, "tokens/s"), "itl_ms": (gap, "ms"),
                   "itl_ms_p90": (1.04 * gap, "ms"), "itl_ms_p99": (1.2 * gap, "ms")}  # fmt: skip
        note = f"128 tokens in, 64 out; {graph}; 3 passes"
        rows += [
            Measurement(
                key, value, unit, HIGHER if "per_s" in key else LOWER, method, backend, f"batch {batch}", note,
                batch, 128, 64, graph,
            )
            for key, (value, unit) in numbers.items()
        ]  # fmt: skip
    return rows


def _perplexity(kld: float, backend: str, rng: np.random.Generator, count: int = 8) -> list[Row]:
    shared = np.random.default_rng(7)
    base, lift = 2.95 + shared.normal(0, 0.25, count), np.exp(shared.normal(0, 0.18, count))
    klds = kld * lift / lift.mean() * np.exp(rng.normal(0, 0.03, count))
    klds = klds * (kld / klds.mean()) if kld else np.zeros(count)
    nlls = base + 0.5 * klds + rng.normal(0, 0.12, count) * np.sqrt(klds / 10)
    top1 = 1 - np.minimum(0.9, 0.55 * np.sqrt(klds))
    windows = [
        Window(i, 511, float(n), float(b), float(d), float(t))
        for i, (n, b, d, t) in enumerate(zip(nlls, base, klds, top1, strict=True))
    ]
    spread = zip(PERCENTILES, np.exp(np.linspace(-9, 4, len(PERCENTILES))), strict=True)
    diff = nlls - base
    half = 2.36 * float(diff.std(ddof=1)) / math.sqrt(count)
    return [
        *windows,
        *(_measured("kld_tokens", kld * float(times), "nats", LOWER, backend, label=label) for label, times in spread),
        _measured("ppl", float(np.exp(nlls.mean())), "", LOWER, backend),
        _measured("kld", kld, "nats", LOWER, backend),
        _measured("top1", float(top1.mean()), "share", HIGHER, backend),
        _measured("ln_ppl_diff", float(diff.mean()), "nats", LOWER, backend),
        _measured("ln_ppl_diff_low", float(diff.mean()) - half, "nats", LOWER, backend),
        _measured("ln_ppl_diff_high", float(diff.mean()) + half, "nats", LOWER, backend),
    ]


def _needle(name: str, backend: str) -> list[Row]:
    lost = ANSWERS.get(name, ())
    cells = [
        NeedleCell(
            length, depth, float(length not in lost or (depth == 100 and name != "INT8_TENSOR")), length, "4817203",
            "4817203" if length not in lost else "<b>48</b>", baseline_score=1.0,
            logprob=-0.02 - 1e-5 * length - KLD[name] * (1 + depth / 99), baseline_logprob=-0.02 - 1e-5 * length,
        )
        for length in (256, 1024)
        for depth in (0, 50, 100)
    ]  # fmt: skip
    score = sum(cell.score for cell in cells) / len(cells)
    return [*cells, _measured("needle", score, "share", HIGHER, backend)]


def _profiled(store: Store, run_id: str) -> None:
    """A profile of the run's tensors, its down projections the widest."""
    rng, rows = np.random.default_rng(11), list[Row]()
    for kind, rms, wide in ((WEIGHT, 0.1, 0.0), (ACTIVATION, 1.0, 3.0)):
        rows += [
            _tensor(f"model.layers.{block}.{part}", kind, (n if kind == WEIGHT else 2048, k), rms, wide * rng.random())
            for block in range(30)
            for part, n, k in LINEARS
        ]
    for kind in (WEIGHT, ACTIVATION):
        for fmt, sqnr in (("e4m3fn", 31.5), ("e5m2", 25.5), ("int8", 30.0)):
            for i, scales in enumerate(("tensor", "row", "128x128", "1x128", "1x32/rceil")):
                now = sqnr + 0.2 * i * (8 if fmt == "int8" else 1)
                rows.append(LadderPoint("model.layers.3.mlp.down_proj", kind, f"{fmt}/{scales}", now, now - 1, 0.003,
                                        0.0, 8.25))  # fmt: skip
    with store.session() as session:
        for row in rows:
            session.execute(insert(ROW_TABLES[type(row)]).values(row_values(run_id, "profile", row)))


def _tensor(name: str, kind: str, shape: tuple[int, int], rms: float, wide: float) -> TensorProfile:
    """Magnitudes that fall off by halves below their RMS, and a channel `wide` powers of ten above the others."""
    top = math.floor(math.log2(rms)) + 2
    counts = tuple(max(0, shape[0] * shape[1] >> (top - b)) if b < top else 0 for b in BINADES)
    amax = 4 * rms * 10**wide
    ranked = tuple((37 * i % shape[1], amax / (i + 1), 10**wide / (i + 1)) for i in range(10))
    outliers = sum(ratio > 6 for *_, ratio in ranked)
    return TensorProfile(name, kind, *shape, amax, rms, 12, outliers, counts, ranked)


def _finished(store: Store, name: str, device: str, study: str, owner: str, when: datetime) -> str:
    recipe = PRESETS[name].recipe
    rows = rows_of(name, recipe, device)
    backend = "baseline" if recipe.is_baseline else "emulated" if device == CPU else "native"
    request = Request.of(recipe=recipe.text, backend="emulated" if device == CPU else "native")
    run_id, _ = store.add_run(request, owner=owner, study_id=study)
    took = sum(SECONDS.values())
    _change(
        store,
        run_id,
        state="finished",
        request_key=None,
        attempt=1,
        stage="needle",
        stage_share=1.0,
        backend=backend,
        device=device,
        device_kind="cpu" if device == CPU else "cuda",
        model_hash="5f1d3c0a9b7e",
        corpus_hash="c0ffee123456",
        worker_id="w-h200" if device == H200 else "w-cpu",
        created_at=when,
        started_at=when,
        finished_at=when + timedelta(seconds=took),
        facts={
            "versions": {"torch": "2.13.0", "transformers": "5.24.0", "fp8dash": "0.1.0"},
            "python": "3.11.9",
            "peak_rss_bytes": 1_412_000_000,
            "seed": 0,
        },
    )
    _stages(store, run_id, tuple(SECONDS), when)
    with store.session() as session:
        for stage, of_stage in rows.items():
            for kind, table in ROW_TABLES.items():
                if some := [row_values(run_id, stage, row) for row in of_stage if type(row) is kind]:
                    session.execute(insert(table), some)
        stand(session, run_id)
    return run_id


def _other(
    store: Store, request: Request, state: str, study: str, owner: str, now: datetime, **values: Any
) -> str:  # fmt: skip
    run_id, _ = store.add_run(request, owner=owner, study_id=study)
    ended = {"request_key": None} if state in ("failed", "cancelled") else {}
    order = ("failed", "cancelled", "running", "queued").index(state)
    created = now - timedelta(minutes=10) + timedelta(seconds=order)
    _change(store, run_id, state=state, created_at=created, **ended, **values)
    if stage := values.get("stage"):
        _stages(store, run_id, tuple(SECONDS)[: list(SECONDS).index(stage)], now - timedelta(minutes=2))
    return run_id


def _change(store: Store, run_id: str, **values: Any) -> None:
    with store.session() as session:
        session.execute(update(RunTable).where(RunTable.id == run_id).values(**values))
        stand(session, run_id)
        if "created_at" in values:  # made up here alone: a run's row bears the moment of its submission for ever
            moved = update(StandingTable).where(StandingTable.run_id == run_id)
            session.execute(moved.values(created_at=values["created_at"]))


def _stages(store: Store, run_id: str, names: tuple[str, ...], when: datetime) -> None:
    with store.session() as session:
        for name in names:
            when += timedelta(seconds=SECONDS[name])
            session.add(StageTable(run_id=run_id, stage=name, seconds=SECONDS[name], finished_at=when))


def _workers(store: Store, now: datetime) -> None:
    with store.session() as session:
        for key, host, device, state in (("w-cpu", "bench-1", CPU, "alive"), ("w-h200", "gpu-7", H200, "left")):
            session.add(
                WorkerTable(
                    id=key, host=host, slot=0, pid=4711, state=state, device=device, child_group=None,
                    device_kind="cpu" if device == CPU else "cuda", device_facts={"name": device},
                    started_at=now - timedelta(hours=5), heartbeat_at=now,
                )
            )  # fmt: skip


if __name__ == "__main__":
    for title, key in fill(Store(places.database_url())).items():
        sys.stdout.write(f"{key} {title}\n")
