"""What this database's runs say about the guide's claims: standings in, sentences out. No streamlit.

Two runs are set side by side only within one group (model, corpus, windows, method, device) and one backend. Numbers
are reported, not judged: whether a difference is a tie is up to the comparison that each finding links to.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from db.rows import FINISHED
from fp8dash.choose.formats import INT8
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.presets import PRESETS
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.records import BASELINE, NATIVE
from fp8dash.errors import InvalidChoice
from fp8dash.report.comparison import Standing
from fp8dash.report.numbers import DASH, signed, three

GRADIENTS = ("gradient_sqnr_db_e4m3fn", "gradient_sqnr_db_e5m2")
KV_BYTES = "kv_bytes_per_token"
EXTRAS = (*GRADIENTS, KV_BYTES)  # measurements that no column of the leaderboard shows

Extras = Mapping[str, Mapping[str, float]]  # by run, then by name


@dataclass(frozen=True, slots=True)
class Finding:
    """What some runs say about a claim."""

    claim: int
    text: str
    runs: tuple[str, ...]
    where: str  # model and device


def findings(rows: Sequence[Standing], extras: Extras) -> dict[int, Finding]:
    """The newest finding for each claim on which the rows are evidence."""
    findings: dict[int, Finding] = {}
    for peers in _peers(rows):
        where = f"{peers[0].model} on {peers[0].device or 'an unknown device'}"
        for claim, look in LOOKS.items():
            if sentence := look(peers, extras):
                text, runs = sentence
                findings[claim] = Finding(claim, text, tuple(row.run for row in runs), where)
    return findings


Said = tuple[str, list[Standing]] | None


def _peers(rows: Sequence[Standing]) -> Iterator[list[Standing]]:
    """Finished rows that may be compared, each baseline in every group of its own; the newest group last."""
    kept = sorted(
        (row for row in rows if row.state == FINISHED and not row.is_partly_cast), key=lambda row: row.created
    )
    groups: dict[tuple[str, str], list[Standing]] = {}
    for row in kept:
        groups.setdefault((row.group, str(row.backend)), []).append(row)
    bases = {key[0]: peers for key, peers in groups.items() if key[1] == BASELINE}
    cast = {key[0] for key, _ in groups.items() if key[1] != BASELINE}
    for (group, backend), peers in sorted(groups.items(), key=lambda item: item[1][-1].created):
        if backend != BASELINE:
            yield bases.get(group, []) + peers
        elif group not in cast:
            yield peers


def _named(peers: Sequence[Standing], *names: str) -> list[Standing] | None:
    """The newest run of each preset, or None where one is missing."""
    named = [next((row for row in reversed(peers) if row.recipe == PRESETS[name].recipe.text), None) for name in names]
    return [row for row in named if row] if all(named) else None


def _klds(peers: Sequence[Standing], *names: str) -> list[Standing] | None:
    named = _named(peers, *names)
    return named if named and all(row.kld is not None and math.isfinite(row.kld) for row in named) else None


def _times(a: float | None, b: float | None) -> str:
    """a over b, with a × sign; a dash where that is not a number, as beside a loss of zero."""
    return f"{a / b:.2f}×" if a is not None and b is not None and a > 0 and b > 0 else DASH


def _compared(first: str, second: str) -> Callable[[Sequence[Standing], Extras], Said]:
    """The KLD of one preset against another's."""

    def look(peers: Sequence[Standing], _: Extras) -> Said:
        pair = _klds(peers, first, second)
        if not pair:
            return None
        a, b = pair
        ratio = _times(a.kld, b.kld)
        beside = f"{ratio} {second}’s {three(b.kld)}" if ratio != DASH else f"{second} {three(b.kld)}"
        return f"{first} loses {three(a.kld)} nats (KLD), {beside}.", pair

    return look


def _overhead(name: str) -> Callable[[Sequence[Standing], Extras], Said]:
    """What a preset's scales add to its eight bits."""

    def look(peers: Sequence[Standing], _: Extras) -> Said:
        named = _named(peers, name)
        bits = named[0].bits_per_weight if named else None
        if not named or not bits:
            return None
        return f"{name} stores {bits:#.4g} bits per cast weight: scales add {three(100 * (bits / 8 - 1))} %.", named

    return look


def _tiles(peers: Sequence[Standing], _: Extras) -> Said:
    """What one scale per tensor costs INT8 and E4M3."""
    four = _klds(peers, "INT8_TENSOR", "INT8", "FP8_TENSOR", "FP8_DYNAMIC")
    if not four:
        return None
    whole8, row8, whole, row = (r.kld for r in four)
    return (
        f"One scale per tensor instead of per row: {_times(whole8, row8)} the KLD for INT8, {_times(whole, row)} for "
        "E4M3."
    ), four


def _integers(peers: Sequence[Standing], _: Extras) -> Said:
    pair = _named(peers, "INT8", "FP8_DYNAMIC")
    if not pair or any(row.weight_sqnr_db is None for row in pair):
        return None
    a, b = pair
    text = f"Weights per channel: INT8 {three(a.weight_sqnr_db)} dB SQNR, E4M3 {three(b.weight_sqnr_db)} dB"
    return text + (f"; KLD {three(a.kld)} against {three(b.kld)} nats." if None not in (a.kld, b.kld) else "."), pair


def _parsed(row: Standing) -> Recipe | None:
    try:
        return parse_recipe(row.recipe)
    except InvalidChoice:  # written by another version
        return None


def _head(peers: Sequence[Standing], _: Extras) -> Said:
    """A recipe with the head cast beside the same without."""
    for row in reversed(peers):
        recipe = _parsed(row)
        if recipe and "lm_head" in recipe.also and row.kld is not None:
            bare = _without_head(recipe).text
            plain = next((p for p in reversed(peers) if p.recipe == bare and p.kld is not None), None)
            if plain:
                return f"Casting the head too: KLD {three(row.kld)} instead of {three(plain.kld)} nats.", [
                    row,
                    plain,
                ]
    return None


def _without_head(recipe: Recipe) -> Recipe:
    also = tuple(name for name in recipe.also if name != "lm_head")
    return dataclasses.replace(recipe, also=also)


def _attention(peers: Sequence[Standing], _: Extras) -> Said:
    attention = [r for r in peers if (p := _parsed(r)) and p.attention and not p.casts_linears and not p.kv]
    attention = [row for row in attention if row.kld is not None]
    return (
        (f"Attention’s products alone in {attention[-1].recipe}: KLD {three(attention[-1].kld)} nats.", attention[-1:])
        if attention
        else None
    )


def _speed(peers: Sequence[Standing], _: Extras) -> Said:
    """The fastest native FP8 run; on a CPU FP8 is widened first, which says nothing about the claim."""
    faster = [
        row
        for row in peers
        if row.backend == NATIVE
        and row.gemm_speedup
        and row.device_kind == "cuda"
        and (recipe := _parsed(row))
        and recipe.weights
        and recipe.weights.format != INT8
    ]
    if not faster:
        return None
    best = max(faster, key=lambda row: row.gemm_speedup or 0.0)
    return f"The fastest is {best.name}: {best.gemm_speedup:.2f}× BF16 in GEMMs, casts included, measured.", [best]


def _perplexity(peers: Sequence[Standing], _: Extras) -> Said:
    """The range of what FP8 Linears cost."""
    compared = [
        row
        for row in peers
        if row.ln_ppl_diff is not None
        and (p := _parsed(row))
        and p.weights
        and p.activations
        and p.weights.format.name == p.activations.format.name == "e4m3fn"
    ]
    if not compared:
        return None
    ordered = sorted(compared, key=lambda row: row.ln_ppl_diff or 0.0)
    low, high = (signed(100 * math.expm1(row.ln_ppl_diff or 0.0)) for row in (ordered[0], ordered[-1]))
    least, most = ordered[0].name, ordered[-1].name
    span = f"{low} % ({least})" if len(compared) == 1 else f"between {low} % ({least}) and {high} % ({most})"
    return f"E4M3 changes perplexity by {span}.", list(dict.fromkeys([ordered[0], ordered[-1]]))


def _kv_bytes(peers: Sequence[Standing], extras: Extras) -> Said:
    kept = [row for row in peers if KV_BYTES in extras.get(row.run, {})]
    cast = [row for row in kept if (p := _parsed(row)) and p.kv and p.kv.format.bits == 8]
    plain = [row for row in kept if (p := _parsed(row)) and not p.kv]
    if not cast or not plain:
        return None
    cast_bytes, plain_bytes = (extras[rows[-1].run][KV_BYTES] for rows in (cast, plain))
    ratio = _times(cast_bytes, plain_bytes)
    return (
        f"A token takes {cast_bytes:,.0f} bytes with {cast[-1].name}, {plain_bytes:,.0f} without: {ratio}.",
        [cast[-1]],
    )


def _kv_needles(peers: Sequence[Standing], _: Extras) -> Said:
    cast = [row for row in peers if (p := _parsed(row)) and p.kv and not p.casts_linears and row.needle is not None]
    base = next((row for row in peers if row.is_baseline and row.needle is not None), None)
    if not cast or not base:
        return None
    name, share = cast[-1].name, METRICS["needle"].title.lower()
    return (
        f"{name} finds {cast[-1].needle:.2f} of the {share}s, BF16 {base.needle:.2f}, at these lengths.",
        [
            cast[-1],
            base,
        ],
    )


def _gradients(peers: Sequence[Standing], extras: Extras) -> Said:
    profiled = [row for row in peers if all(name in extras.get(row.run, {}) for name in GRADIENTS)]
    if not profiled:
        return None
    e4m3, e5m2 = (extras[profiled[-1].run][name] for name in GRADIENTS)
    medians = f"E4M3 {three(e4m3)} dB, E5M2 {three(e5m2)} dB, medians over layers"
    return f"Gradients with one dynamic scale per tensor: {medians}.", profiled[-1:]


LOOKS: dict[int, Callable[[Sequence[Standing], Extras], Said]] = {  # by claim
    6: _compared("FP8_E5M2", "FP8_DYNAMIC"),
    8: _overhead("MXFP8"),
    9: _overhead("FP8_DYNAMIC"),
    10: _overhead("FP8_BLOCK"),
    11: _tiles,
    13: _head,
    15: _attention,
    19: _speed,
    21: _perplexity,
    22: _kv_bytes,
    23: _kv_needles,
    27: _compared("MXFP8_FLOOR", "MXFP8"),
    28: _gradients,
    30: _compared("MOSS", "MXFP8"),
    31: _integers,
    32: _compared("MXFP8", "FP8_TENSOR"),
    33: _compared("FP8_BLOCK_UE8M0", "FP8_BLOCK"),
}
