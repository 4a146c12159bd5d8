"""The direction of imports, who owns which outside package, and that the web process never loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A room imports only rooms before it; files of one line may import each other.
ORDER = [
    ["fp8dash.errors"],
    ["fp8dash.places"],
    ["fp8dash.choose"],
    ["fp8dash.stats"],
    ["fp8dash.metrics"],
    ["fp8dash.quant"],
    ["fp8dash.model"],
    ["fp8dash.measure"],
    ["fp8dash.pipeline"],
    ["db"],
    ["jobs"],
    ["fp8dash.needle_report", "fp8dash.decode_report"],
    ["fp8dash.report", "fp8dash.task_report", "fp8dash.findings"],
    ["fp8dash.plan_report"],
    ["fp8dash.pace"],
    ["fp8dash.study_evidence"],
    ["fp8dash.study_report"],
    ["fp8dash.study_files"],
    ["fp8dash.ui"],
    ["fp8dash.serve"],
    ["fp8dash.cli", "app"],
]
OWNERS = {
    "streamlit": ("app", "fp8dash.ui"),
    "plotly": (
        "fp8dash.ui.charts",
        "fp8dash.ui.charts_coverage",
        "fp8dash.ui.charts_decode",
        "fp8dash.ui.charts_formats",
        "fp8dash.ui.charts_planner",
        "fp8dash.ui.charts_tensors",
    ),
    "sqlalchemy": ("db", "jobs.queue"),
    "alembic": ("db",),
    "dbos": ("jobs.queue", "jobs.worker"),
    "transformers": ("fp8dash.model", "fp8dash.measure", "fp8dash.quant.kv_cache"),
    "torch": ("fp8dash.quant", "fp8dash.model", "fp8dash.measure", "fp8dash.pipeline", "jobs.child"),
    "safetensors": ("fp8dash.model", "fp8dash.measure"),
    "lm_eval": ("fp8dash.measure.harness",),
    "datasets": ("fp8dash.measure.tasks",),
    "platformdirs": ("fp8dash.places",),
    "pandas": ("fp8dash.ui",),
    "pyarrow": ("fp8dash.report",),
}
FILES = [f for room in ("fp8dash", "db", "jobs") for f in sorted((ROOT / room).rglob("*.py"))] + [ROOT / "app.py"]


def module(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file):
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def within(name, rooms):
    return any(name == room or name.startswith(room + ".") for room in rooms)


def level(name):
    return next((i for i, rooms in enumerate(ORDER) if within(name, rooms)), None)


@pytest.mark.parametrize("file", FILES, ids=module)
def test_imports_go_only_backwards(file):
    if module(file) in ("fp8dash", "db.migrations.env"):
        return
    own = level(module(file))
    assert own is not None, "a new room: give it a place in ORDER"
    later = [name for name in imports(file) if (other := level(name)) is not None and other > own]
    assert not later


@pytest.mark.parametrize("file", FILES, ids=module)
def test_an_outside_package_has_one_owner(file):
    for name in imports(file):
        owners = OWNERS.get(name.split(".")[0])
        assert owners is None or within(module(file), owners), f"{name} belongs to {owners}"


def test_choosing_and_measuring_need_nothing_that_a_bare_gpu_machine_lacks():
    allowed = {"torch", "numpy", "transformers", "safetensors", "huggingface_hub", "fp8dash"} | sys.stdlib_module_names
    for room in ("choose", "quant", "model", "measure"):
        for file in (ROOT / "fp8dash" / room).rglob("*.py"):
            if within(module(file), ["fp8dash.measure.harness", "fp8dash.measure.tasks"]):
                continue  # loaded only where a run asks for tasks
            assert {name.split(".")[0] for name in imports(file)} <= allowed, file


def test_the_web_process_never_loads_torch():
    pages = [module(f) for f in FILES if within(module(f), ["fp8dash.ui"])] + [
        "jobs.queue",
        "fp8dash.report",
        "fp8dash.cli",
    ]
    heavy = "{'torch', 'transformers', 'lm_eval'}"
    code = f"import sys\nfor m in {pages!r}: __import__(m)\nassert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


def test_a_run_without_tasks_never_loads_lm_eval():
    code = "import sys, fp8dash.pipeline\nassert not {'lm_eval', 'datasets'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=ROOT)


def test_the_top_level_is_the_house():
    shown = {
        entry.name
        for entry in ROOT.iterdir()
        if not entry.name.startswith((".", "__")) and not entry.name.endswith(".egg-info")
    }
    assert shown == {
        "app.py", "fp8dash", "jobs", "db", "tests", "Dockerfile", "README.md", "pyproject.toml", "Makefile",
        "CHANGELOG.md", "LICENSE",
    }  # fmt: skip


def test_the_readmes_tree_names_every_file():
    readme = (ROOT / "README.md").read_text("utf-8")
    missing = [str(f.relative_to(ROOT)) for f in FILES if f.name != "__init__.py" and f.name not in readme]
    assert not missing
