"""Which parts of a model a mixed recipe keeps, from what casting each part alone costs. Values only: no torch.

Divergences of parts are added up: a first-order estimate, for choosing only. What is chosen is measured as a whole, and
both numbers are shown.
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from fp8dash.choose.recipe import Recipe
from fp8dash.errors import InvalidChoice

GRANULARITIES = {
    "kind": "each projection (q, k, v, o, gate, up, down) in all blocks at once",
    "block": "all Linears of one block at once",
    "linear": "every Linear by itself: finest and slowest",
}
HALF = "kld=50%"  # the budget where none is named


@dataclass(frozen=True, slots=True)
class Budget:
    """What a mixed recipe may cost: a limit on mean KLD (nats, or a share of the whole recipe's) or bits per weight."""

    of: str  # "kld", "share" or "bits"
    most: float


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a model's Linears, kept or cast together."""

    name: str
    pattern: str  # as skip= takes it
    parameters: int
    cast_bits: float  # of a weight, scales included
    kept_bits: float
    kld: float  # its share of the nats that casting all parts costs

    @property
    def worth(self) -> float:
        """Nats saved for each bit that keeping it costs; for each parameter where keeping it costs no bits."""
        return max(0.0, self.kld) / ((max(0.0, self.kept_bits - self.cast_bits) or 1.0) * self.parameters)


def parse_budget(text: str) -> Budget:
    """A budget from its text; raises InvalidChoice.

    >>> parse_budget("kld=0.01"), parse_budget("bits=9.5"), parse_budget("kld=50%")
    (Budget(of='kld', most=0.01), Budget(of='bits', most=9.5), Budget(of='share', most=0.5))
    """
    parts = re.fullmatch(r"(kld|bits)=(\d+(?:\.\d+)?)(%?)", text.strip())
    if not parts or (parts[1] == "bits" and parts[3]):
        raise InvalidChoice(
            f"“{text}” is not a budget: write the largest mean KLD in nats, as in kld=0.01, or as a share of the "
            "whole recipe’s, as in kld=50%, or the most bits per weight, as in bits=9.5."
        )
    return Budget("share", float(parts[2]) / 100) if parts[3] else Budget(parts[1], float(parts[2]))


def kept_parts(parts: Sequence[Part], budget: Budget, whole_kld: float) -> tuple[Part, ...]:
    """The parts to keep, greedily: those that save most nats per bit first. `whole_kld` is that of casting all.

    >>> parts = [Part("q", "*.q_proj", 10, 8, 16, 0.004), Part("down", "*.down_proj", 10, 8, 16, 0.02)]
    >>> [part.name for part in kept_parts(parts, parse_budget("kld=0.005"), 0.024)]
    ['down']
    >>> [part.name for part in kept_parts(parts, parse_budget("bits=12"), 0.024)]
    ['down']
    """
    order = sorted(parts, key=lambda part: part.worth, reverse=True)
    if budget.of == "bits":
        return _within_bits(order, budget.most)
    return _within_kld(order, budget.most * (whole_kld if budget.of == "share" else 1.0))


def predicted_kld(parts: Sequence[Part], kept: Sequence[Part]) -> float:
    """The sum of what the cast parts cost, nats."""
    names = {part.name for part in kept}
    return sum(part.kld for part in parts if part.name not in names)


def mean_bits(parts: Sequence[Part], kept: Sequence[Part]) -> float:
    """Bits of a weight over all parts, those kept included."""
    names = {part.name for part in kept}
    bits = sum(part.parameters * (part.kept_bits if part.name in names else part.cast_bits) for part in parts)
    return bits / sum(part.parameters for part in parts)


def mixed_recipe(recipe: Recipe, kept: Sequence[Part]) -> Recipe:
    """The recipe with these parts left out."""
    skip = tuple(dict.fromkeys([*recipe.skip, *(part.pattern for part in kept)]))
    return dataclasses.replace(recipe, skip=skip)


def _within_kld(order: Sequence[Part], most: float) -> tuple[Part, ...]:
    """Parts in order until the rest stays under; then what that made needless is cast again, the dearest bits first.

    A part whose saving alone would have done comes late where its bits are dear.
    """
    kept: list[Part] = []
    left = predicted_kld(order, kept)
    for part in order:
        if left <= most:
            break
        kept.append(part)
        left -= part.kld
    for part in sorted(kept, key=lambda p: p.parameters * (p.kept_bits - p.cast_bits), reverse=True):
        if left + part.kld <= most:
            kept.remove(part)
            left += part.kld
    return tuple(kept)


def _within_bits(order: Sequence[Part], most: float) -> tuple[Part, ...]:
    """Parts in order, each that still fits."""
    kept: list[Part] = []
    room = (most - mean_bits(order, kept)) * sum(part.parameters for part in order)  # bits
    for part in order:
        if part.kld > 0 and (more := part.parameters * (part.kept_bits - part.cast_bits)) <= room:
            kept.append(part)
            room -= more
    return tuple(kept)
