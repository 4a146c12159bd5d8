"""How the code is kept: sizes that one can read, names that say what they hold, one meaning for a class name."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from tests.test_layers import FILES, ROOT, module

LONGEST_FILE, LONGEST_FUNCTION = 400, 50  # lines
EMPTY_NAMES = {"found", "said", "told", "known", "ours"}  # say that something was had, not what
TESTS = {str(file.relative_to(ROOT)): ast.parse(file.read_text("utf-8")) for file in (ROOT / "tests").rglob("*.py")}
TREES = {module(file): ast.parse(file.read_text("utf-8")) for file in FILES if "migrations" not in file.parts}


@pytest.mark.parametrize("file", FILES, ids=module)
def test_a_file_can_be_read_through(file: Path) -> None:
    assert len(file.read_text("utf-8").splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("name", TREES)
def test_a_function_can_be_read_at_a_glance(name: str) -> None:
    functions = [node for node in ast.walk(TREES[name]) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = {node.name: (node.end_lineno or 0) - node.lineno + 1 for node in functions}
    assert {name: count for name, count in lines.items() if count > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("name", [*TREES, *TESTS])
def test_a_local_is_named_by_its_content(name: str) -> None:
    nodes = list(ast.walk((TREES | TESTS)[name]))
    stored = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    arguments = {node.arg for node in nodes if isinstance(node, ast.arg)}
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    assert EMPTY_NAMES & (stored | arguments | functions) == set()


def test_a_class_name_means_one_thing() -> None:
    names = Counter(node.name for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert {name: count for name, count in names.items() if count > 1} == {}
    assert "Path" not in names  # is pathlib's
