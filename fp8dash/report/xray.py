"""The X-ray of a checkpoint in words, for the command line, and as JSON."""

import json
from dataclasses import asdict

from fp8dash.model.xray.faults import FAULTS, Fault
from fp8dash.model.xray.original import RoundedShare
from fp8dash.model.xray.xray import Xray
from fp8dash.report.numbers import inert

MOST_PLACES = 3  # named of a fault


def to_text(result: Xray) -> str:
    """What a checkpoint is, line by line, and its faults last."""
    lines = [
        ("checkpoint", result.path),
        ("says", f"{result.method}, {result.scheme}" if result.method else "nothing of a quantization"),
        ("recipe", result.recipe or "not one that fp8dash can say"),
        *(("", f"beyond the recipe: {text}") for text in result.unsaid),
        ("size", f"{result.size_bytes / 1e6:,.1f} MB, {result.bits_per_weight:.2f} bits per matrix weight"),
        ("coverage", f"{result.coverage:.1%} of the matrix weights are cast, embeddings aside"),
        ("types", ", ".join(f"{dtype} {count:,}" for dtype, count in result.dtypes)),
    ]
    for casting in result.castings:
        cast = f"{casting.cast} as {casting.packing}" if casting.packing else "not cast"
        lines.append(("matrices", f"{casting.matrices:,}, {casting.elements:,} weights: {cast}"))
    lines += [("codes", rounding_words(result.rounding))] if result.rounding else []
    lines += [("fault", fault_words(fault)) for fault in result.faults] or [("faults", "none")]
    return "".join(f"{name:<12}{inert(text)}\n" for name, text in lines)


def rounding_words(rounding: RoundedShare) -> str:
    """What the codes are by the original's weights.

    >>> rounding_words(RoundedShare(14, 0.71, 0.65))
    'not plain rounding, as GPTQ, AutoRound or AWQ leave them: 71.0 % of codes are what rounding gives (14 matrices)'
    """
    what = "plain rounding" if rounding.is_plain else "not plain rounding, as GPTQ, AutoRound or AWQ leave them"
    return f"{what}: {100 * rounding.share:.1f} % of codes are what rounding gives ({rounding.matrices:,} matrices)"


def fault_words(fault: Fault) -> str:
    """A fault in one line.

    >>> fault_words(Fault("missing file", ("a", "b", "c", "d"), ""))
    'missing file: the index names a weight file that is not there (a, b, c and 1 more)'
    """
    more = f" and {len(fault.where) - MOST_PLACES:,} more" if len(fault.where) > MOST_PLACES else ""
    detail = f"; {fault.detail}" if fault.detail else ""
    return f"{fault.kind}: {FAULTS[fault.kind]} ({', '.join(fault.where[:MOST_PLACES])}{more}{detail})"


def to_json(result: Xray) -> str:
    """The same as JSON, with every module and place."""
    return json.dumps(asdict(result), indent=2) + "\n"
