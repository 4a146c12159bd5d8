"""A recipe in words: what each operand is stored as, and who shares a scale. Knows no page."""

from fp8dash.choose.casts import Cast
from fp8dash.choose.recipe import Recipe

WEIGHTS, ACTIVATIONS, ATTENTION = range(3)  # operands, as `shared` knows them
OPERANDS = ("Weights", "Activations", "Attention")
SHARING = {
    "tensor": ("one scale for all", "one scale for all", "one scale per operand"),
    "row": ("one per output channel", "one per token", "one per token and head"),
    "column": ("one per input channel", "one per channel", "one per channel of a head"),
    "1x128": ("one per 128 of a row", "one per 128 of a token", "one per 128 of a head"),
    "128x128": ("one per 128×128 block", "one per 128 tokens × 128", "one per 128 rows × 128"),
    "1x32": ("one per 32 of a row", "one per 32 of a token", "one per 32 of a head"),
    "1x16": ("one per 16 of a row", "one per 16 of a token", "one per 16 of a head"),
}


def shared(tile: str, operand: int) -> str:
    """Who shares a scale.

    >>> shared("row", ACTIVATIONS), shared("4x64", WEIGHTS)
    ('one per token', 'one per 4×64 tile')
    """
    return SHARING[tile][operand] if tile in SHARING else f"one per {tile.replace('x', '×')} tile"


def in_words(recipe: Recipe) -> list[str]:
    """A sentence each for weights, activations and what else is said; none of it escaped.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> for sentence in in_words(parse_recipe("w=int8/row kv=e4m3fn/head skip=*.o_proj,lm_head")):
    ...     print(sentence)
    Weights: INT8, one per output channel, scales float32.
    Activations: not cast.
    KV cache: E4M3FN, one scale per head, dynamic.
    Left out: *.o_proj, lm_head.
    """
    if recipe.stored and not (recipe.weights or recipe.activations):
        return [f"What {recipe.stored} stores."]
    casts = ((WEIGHTS, recipe.weights), (ACTIVATIONS, recipe.activations))
    sentences = [f"What {recipe.stored} stores."] if recipe.stored else []
    sentences += [f"{OPERANDS[operand]}: {_operand(cast, operand)}." for operand, cast in casts]
    if recipe.kv:
        sentences.append(
            f"KV cache: {recipe.kv.format.name.upper()}, one scale per {recipe.kv.share}, {recipe.kv.scale}."
        )
    if recipe.attention:
        sentences.append(f"Attention: {_operand(recipe.attention, ATTENTION)}.")
    for override in recipe.overrides:
        operand = {"w": WEIGHTS, "a": ACTIVATIONS}[override.key]
        sentences.append(f"{OPERANDS[operand]} of {override.pattern}: {_operand(override.cast, operand)}.")
    if recipe.accumulator:
        sentences.append(f"Accumulation simulated as {recipe.accumulator.name}.")
    lists = (("Also cast", recipe.also), ("Left out", recipe.skip))
    return sentences + [f"{what}: {', '.join(names)}." for what, names in lists if names]


def _operand(cast: Cast | None, operand: int) -> str:
    if cast is None:
        return "not cast"
    when = "" if operand == WEIGHTS else f", {cast.when.text}"
    return f"{cast.format.name.upper()}, {shared(cast.tile.name, operand)}, scales {cast.rule.name}{when}"
