"""The tables of methods.md, made from the values they list: `python -m tests.docs.tables` writes them into the file.

A table is found by its header line, so that the document holds no marks. `test_tables.py` compares.
"""

from collections.abc import Sequence
from pathlib import Path

from fp8dash.choose.formats import FORMATS, FloatFormat
from fp8dash.choose.measurements import MEASUREMENTS
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.records import HIGHER, LOWER, NEITHER, STAGES
from fp8dash.choose.scaling import GUARDS, RULES
from fp8dash.measure import calibrated, gemm, harness, kv_cache, provenance

FILE = Path(__file__).parents[2] / "fp8dash" / "docs" / "methods.md"
DIRECTIONS = {LOWER: "lower", HIGHER: "higher", NEITHER: "neither"}
FURTHER = {  # methods of numbers that a stage measures beside its own
    "gemm, cold": gemm.METHOD_COLD,
    "gemm, peaks": gemm.METHOD_PEAK,
    "calibrated scales": calibrated.METHOD,
    "KV cache, bytes per token": kv_cache.METHOD,
    "tasks": harness.METHOD,
}

METHODS = provenance.METHODS | FURTHER

Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def tables() -> list[Table]:
    """Each table's header and rows."""
    return [
        (
            ("Name", "Title", "Unit", "Better", "What it is"),
            [(f"`{m.name}`", m.title, m.unit or "none", DIRECTIONS[m.better], m.help) for m in METRICS.values()],
        ),
        (
            ("Stage", "Name", "Title", "Unit", "Better", "Method", "What it is"),
            [_measurement(MEASUREMENTS[name]) for name in _by_stage() if name not in METRICS],
        ),
        (("Stage", "Method, as it is stored"), list(METHODS.items())),
        (
            ("Name", "Bits", "Largest", "Note"),
            [(f"`{f.name}`", str(f.bits), f"{f.max:,g}", _note(f)) for f in FORMATS.values()],
        ),
        (
            ("Name", "Stored as", "Bits", "Scale"),
            [(f"`{r.name}`", r.stored or "not stored", str(r.bits), r.meaning) for r in RULES.values()],
        ),
        (("Name", "What it does"), [(f"`{g.name}`", g.meaning) for g in GUARDS.values()]),
        (
            ("Preset", "Recipe", "What it is"),
            [(f"`{p.name}`", f"`{p.text}`", p.summary) for p in PRESETS.values()],
        ),
    ]


def filled(text: str) -> str:
    """The document with each table's rows as the values say; raises ValueError where a header is missing."""
    for header, rows in tables():
        head = _line(header)
        before, head_line, after = text.partition(f"{head}\n")
        if not head_line:
            raise ValueError(f"methods.md has no table with the header {head}")
        rule, _, rest = after.partition("\n")
        while rest.startswith("|"):
            rest = rest.partition("\n")[2]
        text = "".join([before, f"{head}\n{rule}\n", *(f"{_line(row)}\n" for row in rows), rest])
    return text


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _by_stage() -> list[str]:
    """All measurements but the ends of intervals, in the order of the stages that make them."""
    names = [name for name, metric in MEASUREMENTS.items() if not metric.end_of]
    return sorted(names, key=lambda name: STAGES.index(MEASUREMENTS[name].stage))


def _measurement(m: Metric) -> list[str]:
    own = f"{m.method}, " if m.method else ""
    version = METHODS[m.made_by].rpartition(", ")[2]
    return [m.stage, f"`{m.name}`", m.title, m.unit or "none", DIRECTIONS[m.better], f"{own}{version}", m.help]


def _note(fmt: object) -> str:
    if not isinstance(fmt, FloatFormat):
        return "integer, ties to even"
    infinity = "" if fmt.has_infinity else ", no infinity"
    return f"{fmt.exponent_bits} exponent and {fmt.mantissa_bits} mantissa bits{infinity}"


if __name__ == "__main__":
    FILE.write_text(filled(FILE.read_text("utf-8")), "utf-8")
