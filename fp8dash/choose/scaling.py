"""Who shares a scale (Tile) and how a scale is rounded and stored (ScaleRule). Values only: no torch.

A scale is always the factor that undoes the cast: value = code * scale.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """The rows and columns of a 2-D operand that share one scale; 0 spans the axis.

    Operands are [out_features, in_features] weights and [tokens, in_features] activations, so `row` is one scale
    per output channel of a weight and one per token of an activation. A ragged edge is a smaller tile.
    """

    name: str
    rows: int
    cols: int

    def grid(self, rows: int, cols: int) -> tuple[int, int]:
        """Shape of the scales of a [rows, cols] operand.

        >>> BLOCK_128X128.grid(576, 1536), ROW.grid(576, 1536), TENSOR.grid(576, 1536)
        ((5, 12), (576, 1), (1, 1))
        """
        return math.ceil(rows / (self.rows or rows)), math.ceil(cols / (self.cols or cols))


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How amax / max becomes the stored scale."""

    name: str
    bits: int
    power_of_two: bool
    meaning: str


TENSOR, ROW = Tile("tensor", 0, 0), Tile("row", 1, 0)
GROUP_1X128, BLOCK_128X128, GROUP_1X32 = Tile("1x128", 1, 128), Tile("128x128", 128, 128), Tile("1x32", 1, 32)

FLOAT32 = ScaleRule("float32", 32, False, "amax / max, kept as float32")
RCEIL = ScaleRule("rceil", 8, True, "amax / max rounded up to a power of two, kept as E8M0: never clips")

TILES = {t.name: t for t in (TENSOR, ROW, GROUP_1X128, BLOCK_128X128, GROUP_1X32)}
RULES = {r.name: r for r in (FLOAT32, RCEIL)}
