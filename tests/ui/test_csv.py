"""Every CSV that leaves the house: a spreadsheet finds as many rows as were written, and runs none of their text."""

import csv
import dataclasses
import io
import unicodedata

import pytest

from fp8dash.choose.metrics import METRICS
from fp8dash.report import export
from fp8dash.report.study import Bar
from fp8dash.ui.charts.figure_data import data_csv
from fp8dash.ui.charts.scatter import quality_scatter
from fp8dash.ui.charts.study import study_points
from tests.ui.test_charts import standing

NAMES = (
    "=1+1",
    "+1",
    "-1",
    "@SUM(A1)",
    " =1+1",
    "\u00a0=1+1",
    "\t=1+1",
    "\r=1+1",
    "a\r=1+1",
    "a\n=1+1",
    "a\r\n=1+1",
    "＝1+1",
    "＋1",
    "﹣1",
    "＠x",
    "\ufeff=1+1",
    "\u200b=1+1",
    "\u2028=1+1",
    "a\u2028=1+1",
    "a\x0b=1",
    '"=1+1',
    'a",\r=1+1',
)


def cells(text: str) -> list[list[str]]:
    """As a spreadsheet reads it: a lone CR ends a row, too."""
    return list(csv.reader(io.StringIO(text, newline="")))


def runs(cell: str) -> bool:
    """True where a spreadsheet takes a cell for a formula, however generous it is with what stands before the sign."""
    bare = "".join(char for char in cell if unicodedata.category(char)[0] not in "ZC")
    return unicodedata.normalize("NFKC", bare)[:1] in ("=", "+", "-", "@") and bool(bare) and not _number(cell)


def _number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_no_name_becomes_a_formula_or_a_row_in_the_leaderboards_csv(name: str) -> None:
    row = dataclasses.replace(standing(), owner=name, study=name, note=name, model=name, device=name)
    lines = cells(export.to_csv([row, row]))
    assert len(lines) == 3 and {len(line) for line in lines} == {len(export.COLUMNS)}
    assert not [cell for line in lines for cell in line if runs(cell)]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_no_name_becomes_a_formula_or_a_row_in_a_figures_csv(name: str) -> None:
    scatter = quality_scatter(
        [dataclasses.replace(standing(), preset=name)], METRICS["model_bytes"], front=(), intervals={}
    )
    bars = study_points([Bar(name, 0.02, None, None, "w=e4m3fn/row", "emulated")], name)
    for figure, width in ((scatter, 6), (bars, 6)):
        lines = cells(data_csv(figure))
        assert len(lines) >= 2 and {len(line) for line in lines} == {width}
        assert not [cell for line in lines for cell in line if runs(cell)]
