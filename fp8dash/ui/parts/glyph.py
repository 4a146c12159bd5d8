"""A recipe's picture: small matrices cut into their tiles: weights, activations, and what attention reads where it
is cast. Plain SVG text.

Nothing a user typed enters the SVG. Widths are schematic: a 128×128 block is drawn as a quarter of the matrix's side.
"""

from fp8dash.choose.casts import Cast
from fp8dash.choose.recipe import Recipe
from fp8dash.ui.charts.looks import GREY, tile_colour

SIDE, GAP = 30, 8
HEIGHT = SIDE + 2
CUTS = {  # rows and columns drawn
    "tensor": (1, 1),
    "row": (8, 1),
    "column": (1, 8),
    "128x128": (2, 2),
    "1x128": (8, 2),
    "1x32": (8, 4),
    "1x16": (8, 6),
}


def glyph_width(recipe: Recipe) -> int:
    """Pixels across: two squares, or three where the KV cache or attention is cast."""
    squares = 3 if recipe.casts_attention else 2
    return squares * SIDE + (squares - 1) * GAP + 2


def recipe_glyph(recipe: Recipe) -> str:
    """An SVG of the weights' and the activations' tiles; an operand that is not cast is an empty grey square.

    A third square, there only where it is cast, is the KV cache, or else the attention path.
    """
    width = glyph_width(recipe)
    squares = _square(recipe.weights, 1) + _square(recipe.activations, SIDE + GAP + 1)
    if third := recipe.kv.picture if recipe.kv else recipe.attention:
        squares += _square(third, 2 * (SIDE + GAP) + 1)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" viewBox="0 0 {width} {HEIGHT}" '
        f'role="img" aria-label="{_spoken(recipe)}">{squares}</svg>'
    )


def _square(cast: Cast | None, left: int) -> str:
    colour = tile_colour(cast.tile.name) if cast else GREY
    fill = f'fill="{colour}" fill-opacity="0.18"' if cast else 'fill="none" stroke-dasharray="3 2"'
    box = f'<rect x="{left}" y="1" width="{SIDE}" height="{SIDE}" rx="2" {fill} stroke="{colour}" stroke-width="1.5"/>'
    rows, columns = CUTS.get(cast.tile.name, (1, 1)) if cast else (1, 1)
    lines: list[tuple[float, float, float, float]]
    lines = [(left, 1 + SIDE * i / rows, left + SIDE, 1 + SIDE * i / rows) for i in range(1, rows)]
    lines += [(left + SIDE * i / columns, 1, left + SIDE * i / columns, 1 + SIDE) for i in range(1, columns)]
    return box + "".join(
        f'<line x1="{a:g}" y1="{b:g}" x2="{c:g}" y2="{d:g}" stroke="{colour}" stroke-width="1"/>'
        for a, b, c, d in lines
    )


def _spoken(recipe: Recipe) -> str:
    casts = [("weights", recipe.weights), ("activations", recipe.activations)]
    operands = [f"{what} {cast.text if cast else 'not cast'}" for what, cast in casts]
    more = [("KV cache", recipe.kv), ("attention", recipe.attention)]
    return ", ".join(operands + [f"{what} {cast.text}" for what, cast in more if cast])
