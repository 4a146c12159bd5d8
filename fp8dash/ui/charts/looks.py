"""How runs are told apart in every figure: colour, symbol and fill. Plain values, no plotly.

Colour = tile (Okabe-Ito), symbol = format, filled = native, hollow = emulated, grey = baseline.
"""

from dataclasses import dataclass

from fp8dash.choose.casts import Cast
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import NATIVE
from fp8dash.errors import InvalidChoice

GREY = "#7f8c92"
COLOURS = {
    "tensor": "#d55e00",
    "row": "#0072b2",
    "1x128": "#cc79a7",
    "128x128": "#009e73",
    "1x32": "#e69f00",
    "1x16": "#56b4e9",
    "column": "#8a6d3b",
}
SYMBOLS = {
    "e4m3fn": "circle",
    "e5m2": "square",
    "int8": "diamond",
    "e2m1": "triangle-up",
    "int4": "triangle-down",
    "e3m2": "pentagon",
    "e2m3": "hexagon",
    "e4m3fnuz": "star",
    "e5m2fnuz": "star-square",
    "e4m3": "octagon",
    "e3m4": "star-diamond",
}
TEAL = [[0.0, "#f4efe2"], [0.5, "#7fb8b0"], [1.0, "#0f6b6b"]]
AROUND_ZERO = [[0.0, "#b2182b"], [0.5, "#f7f7f7"], [1.0, "#2166ac"]]


@dataclass(frozen=True, slots=True)
class Look:
    """How a run is drawn."""

    colour: str
    symbol: str


def tile_colour(name: str) -> str:
    """The colour of a tile; grey for one that is unknown here."""
    return COLOURS.get(name, GREY)


def look(recipe: str, backend: str | None) -> Look:
    """How a run of this recipe is drawn.

    >>> look("w=e5m2/row a=e5m2/row", "emulated")
    Look(colour='#0072b2', symbol='square-open')
    """
    cast = main_cast(recipe)
    if cast is None:
        return Look(GREY, "x")
    symbol = SYMBOLS.get(cast.format.name, "cross")
    return Look(tile_colour(cast.tile.name), symbol if backend == NATIVE else f"{symbol}-open")


def main_cast(recipe: str) -> Cast | None:
    try:
        parsed = parse_recipe(recipe)
    except InvalidChoice:  # written by another version: drawn grey
        return None
    return parsed.weights or parsed.activations or parsed.attention or (parsed.kv.picture if parsed.kv else None)


def dash_of(symbol: str) -> str:
    return {"square": "dash", "diamond": "dot"}.get(symbol.removesuffix("-open"), "solid")
