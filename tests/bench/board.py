"""Server time of the pages on a large board: the script's run under Streamlit's AppTest, in one process, no browser.

`python -m tests.bench.board 10000 FOLDER` builds a seeded board; `pages()` builds both and times each page that exists.
None of the numbers on the board was measured. Models, owners and recipes come in unlike amounts: a quarter of all runs
are of one model on one device. Each run has 12 measurements, 8 windows, 6 needle cells and 12 GEMM points; the newest
200 also have 210 layers each.
"""

import dataclasses
import json
import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from db.standings import group_key, recipe_facets, stand
from db.store import Store
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.request import Request

SIZES = {"10k": 10_000, "100k": 100_000}
LIMITS_MS = {
    "leaderboard": 300,
    "compare": 500,
    "formats": 150,
}  # at 10,000 runs; twice that at 100,000: told, not held
PAGES = ("leaderboard", "new_run", "runs", "run", "compare", "formats", "planner")
REPEATS = 7
MODELS = tuple(f"/models/model-{i:02}" for i in range(12))
DEVICES = ("NVIDIA H200", "CPU (x86-64, 2 threads)")
OWNERS = tuple(f"engineer-{i:02}" for i in range(20))
WINDOWS, LAYERED, LAYERS, STUDY = 8, 200, 210, 8
SKIPPED = ("", " skip=*.down_proj", " skip=*.o_proj", " skip=*.gate_proj")
RECIPES = tuple(
    (preset.name if not skip else None, preset.recipe.text + skip)
    for skip in SKIPPED
    for preset in PRESETS.values()
    if preset.recipe.weights
)
STAGES = ("load", "baseline", "quantize", "gemm", "perplexity", "needle")
START = datetime(2026, 1, 1, tzinfo=UTC)


def pages() -> dict[str, float]:
    """Median milliseconds of each page at each size, and of a page with a title alone: the unit."""
    milliseconds = {"page.bare.ms": _median_ms(_bare, {})}
    for size, count in SIZES.items():
        with tempfile.TemporaryDirectory() as folder, _installed(Path(folder)):
            start = time.perf_counter()
            ids = build(Path(folder), count)
            print(f"{count:,} runs built in {time.perf_counter() - start:.0f} s", file=sys.stderr)
            milliseconds |= {f"page.{name}.ms_{size}": ms for name, ms in _timed(ids)}
    return milliseconds


def build(folder: Path, count: int) -> list[str]:
    """A database of this many finished runs in a folder; the ids of the newest."""
    store = Store(f"sqlite:///{folder / 'fp8dash.sqlite'}")
    ids = [f"{i:012x}" for i in range(count)]
    rng = np.random.default_rng(0)
    with sqlite3.connect(folder / "fp8dash.sqlite") as connection:
        connection.execute("PRAGMA foreign_keys=OFF")
        _runs(connection, ids, rng)
        _rows(connection, ids, rng)
    connection.close()
    _checked(store, ids[-1])
    store.close()
    return ids[-LAYERED:]


def _timed(ids: Sequence[str]) -> Iterator[tuple[str, float]]:
    import app

    present = {name for name in PAGES if hasattr(app, name)}
    queries = {"run": {"run": ids[-1]}, "compare": {"runs": ",".join(ids[-4:])}}
    for name in PAGES:
        if name in present or name == "run":
            yield name, _median_ms(_page, queries.get(name, {}), first={"run": "runs"}.get(name, name))


def _bare() -> None:
    import streamlit as st

    from tests.bench.board import clocked

    with clocked():
        st.title("A page")


def _page(first: str) -> None:
    from app import main
    from tests.bench.board import clocked

    with clocked():
        main(first)


@contextmanager
def clocked() -> Iterator[None]:
    """Notes how long the script took: AppTest itself waits in steps of a tenth of a second."""
    start = time.perf_counter()
    try:
        yield
    finally:
        _seconds.append(time.perf_counter() - start)


_seconds: list[float] = []


def _median_ms(script: Any, query: dict[str, str], **arguments: str) -> float:
    from streamlit.testing.v1 import AppTest

    times = []
    for _ in range(REPEATS + 1):  # the first run fills caches and opens the database
        app = AppTest.from_function(script, kwargs=arguments, default_timeout=120)
        for key, value in query.items():
            app.query_params[key] = value
        _seconds.clear()
        app.run()
        times.append(sum(_seconds) * 1000)  # a script that runs again is waited for twice
        if app.exception or app.error:
            raise RuntimeError(f"{arguments}: {[e.value for e in (*app.exception, *app.error)]}")
    return round(median(times[1:]), 1)


class _installed:
    """The app on a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        import streamlit as st

        self.before = os.environ.get("FP8DASH_DATA_DIR")
        os.environ["FP8DASH_DATA_DIR"] = str(self.folder)
        st.cache_resource.clear()

    def __exit__(self, *_: object) -> None:
        import streamlit as st

        st.cache_resource.clear()
        os.environ.pop("FP8DASH_DATA_DIR")
        if self.before is not None:
            os.environ["FP8DASH_DATA_DIR"] = self.before


def _insert(connection: sqlite3.Connection, table: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    names, marks = ", ".join(f'"{name}"' for name in columns), ", ".join("?" * len(columns))
    connection.executemany(f"INSERT INTO {table} ({names}) VALUES ({marks})", rows)


def _runs(connection: sqlite3.Connection, ids: Sequence[str], rng: np.random.Generator) -> None:
    """Studies, runs and standings."""
    count = len(ids)
    model = np.minimum(rng.geometric(0.29, count) - 1, len(MODELS) - 1)
    device, recipe, owner = (rng.integers(0, n, count) for n in (len(DEVICES), len(RECIPES), len(OWNERS)))
    studies = [(f"s{i:011x}", f"Study {i}", OWNERS[i % len(OWNERS)], _time(i)) for i in range(count // STUDY + 1)]
    _insert(connection, "study", ("id", "name", "owner", "created_at"), studies)
    baselines = rng.random(count) < 0.04
    made = [
        _run(i, ids[i], MODELS[model[i]], DEVICES[device[i]], ("BF16", "bf16") if baselines[i] else RECIPES[recipe[i]],
             OWNERS[owner[i]], rng)
        for i in range(count)
    ]  # fmt: skip
    for table, rows in (("run", [run for run, _ in made]), ("standing", [standing for _, standing in made])):
        _insert(connection, table, list(rows[0]), [tuple(row.values()) for row in rows])


def _run(
    i: int, run_id: str, model: str, device: str, recipe: tuple[str | None, str], owner: str, rng: np.random.Generator
) -> tuple[dict[str, Any], dict[str, Any]]:
    preset, text = recipe
    backend = "baseline" if preset == "BF16" else "native" if device.startswith("NVIDIA") else "emulated"
    request = dataclasses.replace(_REQUEST, model=model, recipe=text)
    kld = 0.0 if backend == "baseline" else float(np.exp(rng.normal(-3.5, 0.8)))
    same = {"owner": owner, "model": model, "recipe": text, "preset": preset, "corpus": "pydocs", "backend": backend,
            "device": device, "created_at": _time(i), "finished_at": _time(i + 1)}  # fmt: skip
    run = {
        "id": run_id, "study_id": f"s{i // STUDY:011x}", "request": json.dumps(request.to_json()), "state": "finished",
        "request_hash": f"{hash(text):x}", "attempt": 1, "stage": "needle", "stage_share": 1.0, "message": "",
        "model_hash": model[-8:], "corpus_hash": "c0ffee", "facts": json.dumps(_FACTS), "started_at": _time(i), **same,
    }  # fmt: skip
    parts = (model[-8:], "c0ffee", request.windows.count, request.windows.length, "kld/1", device)
    formats, tiles = recipe_facets(text)
    study = f"Study {i // STUDY}"
    standing = {
        "run_id": run_id, "study": study, "formats": formats, "tiles": tiles, "windows": request.windows.count,
        "window_length": request.windows.length, "method": "kld/1", "group_key": group_key(parts), "pinned": 0,
        "words": " ".join((preset or "", text, model, study, owner, run_id)).lower(), "note": "", "note_by": "",
        **same, **_numbers(kld, rng),
    }  # fmt: skip
    return run, standing


def _numbers(kld: float, rng: np.random.Generator) -> dict[str, float]:
    diff, noise = kld / 2, kld / 10
    return {
        "kld": kld, "kld_low": kld - noise, "kld_high": kld + noise, "ppl": 15.0 + kld, "ln_ppl_diff": diff,
        "ln_ppl_diff_low": diff - noise, "ln_ppl_diff_high": diff + noise, "top1": 1 - kld / 2, "needle": 1.0,
        "gemm_speedup": float(rng.normal(1.4, 0.2)), "bits_per_weight": 8.0 + float(rng.random()),
        "model_bytes": 160e6 * (1 + float(rng.random())), "coverage": 0.79, "weight_sqnr_db": 31.5,
    }  # fmt: skip


def _rows(connection: sqlite3.Connection, ids: Sequence[str], rng: np.random.Generator) -> None:
    """What was measured, as the standings say."""
    names = ("ppl", "kld", "top1", "ln_ppl_diff", "ln_ppl_diff_low", "ln_ppl_diff_high", "needle", "gemm_speedup",
             "bits_per_weight", "model_bytes", "coverage", "weight_sqnr_db")  # fmt: skip
    stands = connection.execute(f"SELECT run_id, backend, kld, {', '.join(names)} FROM standing ORDER BY run_id")
    own = set(ids)
    standings = [row for row in stands if row[0] in own]
    _insert(connection, "stage", ("run_id", "stage", "seconds", "finished_at"),
            ((run_id, stage, 5.0, _time(1)) for run_id in ids for stage in STAGES))  # fmt: skip
    measured = ("run_id", "stage", "name", "value", "unit", "better", "method", "backend", "label", "note")
    _insert(connection, "measurement", measured, (
        (run_id, "perplexity", name, value, "nats", "lower", "kld/1", backend, "", "")
        for run_id, backend, _, *values in standings for name, value in zip(names, values, strict=True)
    ))  # fmt: skip
    lifts = np.exp(rng.normal(0, 0.1, (len(ids), WINDOWS)))
    lifts /= lifts.mean(axis=1, keepdims=True)
    _insert(connection, "window_score", ("run_id", "stage", "index", "tokens", "nll", "baseline_nll", "kld", "top1"), (
        (run_id, "perplexity", w, 511, 2.5 + kld * lift / 2, 2.5, kld * lift, 0.9)
        for (run_id, _, kld, *_), row in zip(standings, lifts.tolist(), strict=True) for w, lift in enumerate(row)
    ))  # fmt: skip
    cells = ("run_id", "stage", "length", "depth", "score", "prompt_tokens", "expected", "answer")
    _insert(connection, "needle_cell", cells, (
        (run_id, "needle", n, depth, 1.0, n, "4817203", "4817203")
        for run_id in ids for n in (256, 1024) for depth in (0, 50, 100)
    ))  # fmt: skip
    points = ("run_id", "stage", "m", "n", "k", "count", "baseline_us", "cast_us", "matmul_us", "kernel", "reason")
    _insert(connection, "gemm_point", points, (
        (run_id, "gemm", m, n, k, 30, 60.0, 8.0, 36.0, "scaled_mm", "")
        for run_id in ids for m in (1, 16, 128) for n, k in ((576, 576), (192, 576), (1536, 576), (576, 1536))
    ))  # fmt: skip
    layers = ("run_id", "stage", "name", "rows", "cols", "cast", "backend", "reason", "bits_per_weight", "sqnr_db",
              "relative_error", "flushed", "clipped")  # fmt: skip
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    _insert(connection, "layer", layers, (
        (run_id, "quantize", f"model.layers.{i // 7}.{parts[i % 7]}", 576, 576, "e4m3fn/row", "native", "", 8.1,
         31.0 + i % 5, 0.03, 0.0004, 0.0) for run_id in ids[-LAYERED:] for i in range(LAYERS)
    ))  # fmt: skip


_REQUEST = Request()
_FACTS = {"versions": {"torch": "2.13.0", "transformers": "5.24.0", "fp8dash": "0.1.0"}, "python": "3.11.9", "seed": 0}


def _time(i: int) -> str:
    return (START + timedelta(minutes=i)).replace(tzinfo=None).isoformat(" ", "microseconds")


def _checked(store: Store, run_id: str) -> None:
    """The product writes the same row as this script did, or the board is not one that the product could have made."""
    from db.board import Choice

    before = store.standings(Choice(ids=(run_id,)))
    with store.session() as session:
        stand(session, run_id)
    after = store.standings(Choice(ids=(run_id,)))
    free = {"kld_low": None, "kld_high": None}  # here a normal interval, for speed
    if [dataclasses.replace(row, **free) for row in before] != [dataclasses.replace(row, **free) for row in after]:
        raise RuntimeError(f"the seeded standing is not what the product would write: {before}, {after}")


if __name__ == "__main__":
    print(build(Path(sys.argv[2]), int(sys.argv[1]))[-1])
