"""The house: the direction of imports, who owns which outside package, and that the web process never loads torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A room imports itself and rooms of earlier tiers; rooms of one tier do not know each other.
TIERS = [
    ["choose"],
    ["explain", "predict"],
    ["quant"],
    ["model"],
    ["measure"],
    ["db"],
    ["jobs"],
    ["report"],
    ["ui"],
]
# Files that are no room of their own, and the tier that each comes after; 0: it knows no room at all.
LOOSE = {
    "errors": 0,
    "places": 0,
    "stats": 0,
    "bench": 5,
    "streamed": 5,
    "pipeline": 5,
    "options": 9,
    "serve": 9,
    "cli": 9,
    "app": 9,
}
LAZY = (  # whose packages are loaded only where a run asks for tasks, or for a GGUF file
    "fp8dash.measure.harness", "fp8dash.measure.tasks", "fp8dash.model.imported.gguf_file",
)  # fmt: skip
OWNERS = {
    "streamlit": ("app", "fp8dash.ui"),
    "plotly": ("fp8dash.ui.charts",),
    "sqlalchemy": ("db", "jobs.queue"),
    "alembic": ("db",),
    "dbos": ("jobs.queue", "jobs.worker"),
    "transformers": ("fp8dash.model", "fp8dash.measure", "fp8dash.quant.kv_cache"),
    "torch": (
        "fp8dash.quant",
        "fp8dash.model",
        "fp8dash.measure",
        "fp8dash.bench",
        "fp8dash.streamed",
        "fp8dash.pipeline",
        "jobs.child",
    ),
    "safetensors": ("fp8dash.model", "fp8dash.measure"),
    "lm_eval": ("fp8dash.measure.harness",),
    "datasets": ("fp8dash.measure.tasks",),
    "platformdirs": ("fp8dash.places",),
    "pandas": ("fp8dash.ui",),
    "pyarrow": ("fp8dash.report",),
}
MOST_FILES = 20
FILES = [f for room in ("fp8dash", "db", "jobs") for f in sorted((ROOT / room).rglob("*.py"))] + [ROOT / "app.py"]


def module(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file):
    """What a file imports, as modules where the imported name is one."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            modules = {module(f) for f in FILES if f.name != "__init__.py"} & names
            yield from modules or {node.module or ""}


def room(name):
    """The folder that a module of the house lives in, the name of a loose file, or None outside the house."""
    parts = name.split(".")
    if parts[0] == "fp8dash":
        return parts[1] if len(parts) > 1 else None
    return parts[0] if parts[0] in ("db", "jobs", "app") else None


def tier(name):
    """A module's tier: rooms count from 1; a loose file stands between two of them."""
    own = room(name)
    if own in LOOSE:
        return LOOSE[own] + 0.5
    return next((i for i, rooms in enumerate(TIERS, 1) if own in rooms), None)


def within(name, rooms):
    return any(name == other or name.startswith(other + ".") for other in rooms)


def test_every_folder_is_a_room_with_a_tier():
    folders = {f.parent.name for f in (ROOT / "fp8dash").glob("*/*.py")} | {"db", "jobs"}
    assert folders == {name for rooms in TIERS for name in rooms}
    assert {f.stem for f in (ROOT / "fp8dash").glob("*.py")} - {"__init__"} == set(LOOSE) - {"app"}


@pytest.mark.parametrize("file", FILES, ids=module)
def test_imports_go_only_backwards(file):
    own = module(file)
    if own == "fp8dash":
        return
    ahead = []
    for name in imports(file):
        if (other := tier(name)) is not None and room(name) != room(own) and other >= tier(own):
            ahead.append(name)
    assert [name for name in ahead if not (room(name) in LOOSE and room(own) in LOOSE)] == []


def test_no_two_files_import_each_other_by_any_way_round():
    graph = {module(f): set(imports(f)) for f in FILES}
    settled, walked = set(), []

    def visit(name):
        if name in settled or name not in graph:
            return
        assert name not in walked, f"a circle: {' → '.join([*walked[walked.index(name) :], name])}"
        walked.append(name)
        for other in sorted(graph[name]):
            visit(other)
        settled.add(walked.pop())

    for name in sorted(graph):
        visit(name)


@pytest.mark.parametrize("file", FILES, ids=module)
def test_an_outside_package_has_one_owner(file):
    for name in imports(file):
        owners = OWNERS.get(name.split(".")[0])
        assert owners is None or within(module(file), owners), f"{name} belongs to {owners}"


def test_no_folder_holds_more_files_than_one_can_read_through():
    folders = {f.parent for f in FILES} | {f.parent for f in (ROOT / "tests").rglob("*.py")}
    crowded = {str(folder.relative_to(ROOT)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: count for name, count in crowded.items() if count > MOST_FILES} == {}


def test_choosing_and_measuring_need_nothing_that_a_bare_gpu_machine_lacks():
    allowed = {"torch", "numpy", "transformers", "safetensors", "huggingface_hub", "fp8dash"} | sys.stdlib_module_names
    for name in ("choose", "quant", "model", "measure"):
        for file in (ROOT / "fp8dash" / name).rglob("*.py"):
            if within(module(file), LAZY):
                continue
            assert {name.split(".")[0] for name in imports(file)} <= allowed, file


def test_the_web_process_never_loads_torch():
    pages = [module(f) for f in FILES if room(module(f)) in ("ui", "report", "explain", "predict")]
    heavy = "{'torch', 'transformers', 'lm_eval'}"
    names = [*pages, "jobs.queue", "fp8dash.cli"]
    code = f"import sys\nfor m in {names!r}: __import__(m)\nassert not {heavy} & set(sys.modules)"
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
    files = {"app.py", "Dockerfile", "README.md", "pyproject.toml", "Makefile", "CHANGELOG.md", "LICENSE"}
    assert shown == files | {"fp8dash", "jobs", "db", "tests"}


def written_tree():
    """The paths that the architecture document's tree names, from its indents."""
    document = ROOT / "fp8dash" / "docs" / "architecture.md"
    block = document.read_text("utf-8").partition("## The tree")[2].split("```")[1]
    above, paths = [], set()
    for line in block.splitlines()[1:]:
        name = line.strip().split(" ")[0].rstrip()
        depth = (len(line) - len(line.lstrip())) // 2
        if name and (name.endswith("/") or "." in name):
            above[depth:] = [name.rstrip("/")]
            paths.add("/".join(above))
    return paths


def test_the_tree_in_the_architecture_names_every_file_and_no_other():
    files = {str(f.relative_to(ROOT)) for f in FILES if f.name != "__init__.py" and "migrations" not in f.parts}
    shown = {path for path in written_tree() if path.endswith(".py") and not path.startswith("tests")}
    assert shown == files
