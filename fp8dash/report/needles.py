"""Graded needles compared: paired differences of the values' log-probabilities. Plain rows in, plain values out.

Two cells are a pair where they ask the same question, to the token.
"""

from collections.abc import Sequence

from fp8dash.choose.records import NeedleCell
from fp8dash.stats import Difference, paired_difference


def graded_difference(cells: Sequence[NeedleCell], others: Sequence[NeedleCell]) -> Difference | None:
    """Mean log-probability of `cells` minus that of `others`, nats per token, over shared cells; None without any."""
    base = {cell.key: cell.logprob for cell in others}
    return _difference([(cell.logprob, base.get(cell.key)) for cell in cells])


def baseline_difference(cells: Sequence[NeedleCell]) -> Difference | None:
    """The mean of the log-probability minus the unquantized model's, nats per token; None where nothing is graded."""
    return _difference([(cell.logprob, cell.baseline_logprob) for cell in cells])


def mean_grade(cells: Sequence[NeedleCell]) -> float | None:
    """The mean log-probability of the values' tokens over cells, nats per token; None where nothing is graded."""
    graded = [cell.logprob for cell in cells if cell.logprob is not None]
    return sum(graded) / len(graded) if graded else None


def _difference(pairs: Sequence[tuple[float | None, float | None]]) -> Difference | None:
    graded = [(a, b) for a, b in pairs if a is not None and b is not None]
    return paired_difference([a for a, _ in graded], [b for _, b in graded], neighbours=0) if graded else None
