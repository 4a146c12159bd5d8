"""Studies to queue in one go: named questions, and grids of formats, tiles and scale rules. Values only: no torch.

A study is stored with what it asks: a question of QUESTIONS by its name, a grid by its parts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from fp8dash.choose.casts import Cast
from fp8dash.choose.formats import FORMATS
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.request import Request
from fp8dash.choose.scaling import BLOCK_128X128, GROUP_1X128, RULES, TENSOR, TILES, ScaleRule, Tile
from fp8dash.errors import InvalidChoice

MOST_RUNS = 48  # of a grid, its baseline not counted
CARRIED = ("model", "corpus", "backend", "device", "seed")  # what a question leaves to whoever asks it
SIZES = ("bits_per_weight", "model_bytes")
LOSSES = ("ln_ppl_diff", "top1")


@dataclass(frozen=True, slots=True)
class Extra:
    """A measurement that the leaderboard does not show, as a column of the answer."""

    title: str  # with its unit
    name: str
    label: str = ""


GRID = "grid"  # the name of a question that a grid asks


@dataclass(frozen=True, slots=True)
class RecipeGrid:
    """Every combination of some formats, tiles and scale rules, weights and activations alike."""

    formats: tuple[str, ...]
    tiles: tuple[str, ...]
    rules: tuple[str, ...]

    @property
    def title(self) -> str:
        """What a study of it is called."""
        return f"Grid: {', '.join(self.formats)} × {', '.join(self.tiles)} × {', '.join(self.rules)}"

    def to_json(self) -> dict[str, list[str]]:
        """Plain JSON values.

        >>> RecipeGrid.from_json(RecipeGrid(("int8",), ("row",), ("float32",)).to_json()).formats
        ('int8',)
        """
        return {name: list(names) for name, names in asdict(self).items()}

    @classmethod
    def from_json(cls, values: Mapping[str, Sequence[str]]) -> "RecipeGrid":
        """A grid from its JSON form."""
        return cls(tuple(values["formats"]), tuple(values["tiles"]), tuple(values["rules"]))

    @property
    def question(self) -> "Question":
        """The grid as a question; raises InvalidChoice where a part has no such name, or for no recipe or too many."""
        for what, names, there in (
            ("format", self.formats, FORMATS),
            ("tile", self.tiles, TILES),
            ("scale rule", self.rules, RULES),
        ):
            if strange := sorted(set(names) - set(there)):
                raise InvalidChoice(f"“{strange[0]}” is not a {what}: choose from {', '.join(there)}.")
        recipes = tuple(recipe.text for recipe in self.cells().recipes)
        if not recipes:
            raise InvalidChoice("The grid has no recipe: choose at least one format, one tile and one scale rule.")
        if len(recipes) > MOST_RUNS:
            raise InvalidChoice(f"The grid has {len(recipes)} recipes: at most {MOST_RUNS} can be queued at once.")
        return Question(GRID, self.title, "", ("BF16", *recipes), grid=self)

    def cells(self) -> "Cells":
        """The recipes, in order, and a sentence for each combination that is left out."""
        recipes, left_out = [], []
        for name in self.formats:
            for tile, rule in ((TILES[t], RULES[r]) for t in self.tiles for r in self.rules):
                if why := _refused(tile, rule):
                    left_out.append(f"{name}/{tile.name}/{rule.name}: {why}")
                else:
                    shared = GROUP_1X128 if tile == BLOCK_128X128 else tile
                    weights, activations = (Cast(FORMATS[name], own, rule) for own in (tile, shared))
                    recipes.append(Recipe(weights=weights, activations=activations))
        return Cells(tuple(dict.fromkeys(recipes)), tuple(left_out))


@dataclass(frozen=True, slots=True)
class Cells:
    """A grid's recipes, and why some combinations are none."""

    recipes: tuple[Recipe, ...]
    left_out: tuple[str, ...]


def _refused(tile: Tile, rule: ScaleRule) -> str:
    """Why a combination says nothing of its own; empty where it does."""
    if not rule.stored and tile != TENSOR:
        return f"{rule.name} stores no scale, so tiles make no difference; tensor covers them all."
    if rule.outer and tile == TENSOR:
        return (
            f"{rule.name} has one scale per tile beneath one for the tensor, so its tiles must be smaller than the "
            "tensor."
        )
    return ""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, the recipes that answer it, how they are measured, and which numbers to look at."""

    name: str
    question: str
    why: str
    recipes: tuple[str, ...]  # presets or texts, the baseline first
    request: Request = Request()
    metric: str = "kld"  # of METRICS, or "sensitivity": what decides
    beside: tuple[str, ...] = (*LOSSES, "needle", "bits_per_weight")  # metrics shown too
    extras: tuple[Extra, ...] = ()
    cost: str = "Each run takes as long as a typical one."
    grid: RecipeGrid | None = None  # whose recipes these are; None for one of QUESTIONS

    def requests(self, base: Request) -> list[Request]:
        """One request a recipe, in canonical form; model, corpus, backend, device and seed are those of `base`, and its
        windows' length where the question has none of its own. Raises InvalidChoice.
        """
        own = self.request.windows.length != Request().windows.length
        carried = {name: base.flat[name] for name in (*CARRIED, *(() if own else ("window_length",)))}
        return [self.request.but(recipe=recipe, **carried).checked() for recipe in self.recipes]


ACCUMULATED = "w=e4m3fn/row a=e4m3fn/row"
MEASURED_FEW = Request.of(windows=4, window_length=64, measures=("perplexity",))  # the fewest that give an interval

QUESTIONS = {
    question.name: question
    for question in (
        Question(
            "granularity",
            "How fine must FP8’s scales be?",
            "Finer tiles keep one outlier from spoiling its neighbours, but need more scales and special kernels. "
            "Float32 scales from coarse to fine, and MXFP8’s powers of two beside the finest.",
            ("BF16", "FP8_TENSOR", "FP8_DYNAMIC", "w=e4m3fn/1x128 a=e4m3fn/1x128", "FP8_BLOCK",
             "w=e4m3fn/1x32 a=e4m3fn/1x32", "MXFP8"),
        ),
        Question(
            "e4m3-e5m2",
            "E4M3 or E5M2?",
            "E5M2 has the range of FP16 and one mantissa bit less. With one scale per tile, range is rarely the "
            "problem.",
            ("BF16", "FP8_DYNAMIC", "FP8_E5M2", "w=e4m3fn/row a=e5m2/row", "FP8_TENSOR",
             "w=e5m2/tensor a=e5m2/tensor"),
        ),
        Question(
            "lm-head",
            "lm_head: in or out?",
            "The head is a large share of a small model’s weights, and its error goes straight into the logits. Most "
            "libraries leave it out.",
            ("BF16", "FP8_DYNAMIC", f"{ACCUMULATED} also=lm_head", f"{ACCUMULATED} also=lm_head,embeddings", "INT8",
             "w=int8/row a=int8/row also=lm_head"),
            beside=(*LOSSES, "coverage", *SIZES),
        ),
        Question(
            "kv-cache",
            "Which KV cache format?",
            "An 8-bit cache doubles the context or the batch. Its loss shows only where the cache is read: in "
            "chunked prefill and in decoding. Scale 1.0 is what engines fall back to without calibration.",
            ("BF16", "KV_FP8", "KV_FP8_STATIC", "kv=e4m3fn/tensor/unit", "kv=e4m3fn/head", "kv=e5m2/tensor",
             "kv=int8/token"),
            Request(measures=("perplexity", "needle", "kv")),
            beside=(*LOSSES, "needle"),
            extras=(
                Extra("KLD, chunked prefill (nats)", "kv_kld", "chunked prefill"),
                Extra("KLD, decode (nats)", "kv_kld", "decode"),
                Extra("Cache (bytes per token)", "kv_bytes_per_token"),
            ),
            cost="Longer than a typical run: each cache is read in prefill and in decoding.",
        ),
        Question(
            "mx-rules",
            "Which MX scale rule?",
            "MXFP8’s scales are powers of two. Rounded down they clip the top of a block, rounded up they waste part "
            "of the range; libraries differ under one name.",
            ("BF16", "MXFP8", "MXFP8_FLOOR", "MXFP8_EVEN", "MXFP8_CEIL", "MXFP8_ONEBIT",
             "w=e4m3fn/1x32 a=e4m3fn/1x32"),
        ),
        Question(
            "accumulator",
            "Does the accumulator’s width show?",
            "Hopper’s tensor cores keep 13 fraction bits of the running sum. DeepSeek adds to float32 every 128 of "
            "K; whether that shows depends on K and on the model.",
            ("BF16", *(f"{ACCUMULATED} acc={name}" for name in ("fp32", "hopper", "hopper-128", "ada", "blackwell"))),
            MEASURED_FEW,
            beside=LOSSES,
            cost="Very slow: products are simulated bit by bit, so only perplexity over four windows of 64 tokens.",
        ),
        Question(
            "when",
            "Static, delayed or dynamic scales?",
            "A scale made beforehand saves the amax of each activation at run time, but clips what calibration did "
            "not see. Delayed scales come from earlier passes, as in training.",
            ("BF16", "FP8_TENSOR", "FP8", "w=e4m3fn/tensor a=e4m3fn/tensor/static:p99.9",
             "w=e4m3fn/tensor a=e4m3fn/tensor/static:mse", "w=e4m3fn/tensor a=e4m3fn/tensor/delayed"),
        ),
        Question(
            "deploy",
            "BF16, FP8, INT8 or W4A16?",
            "The four most often shipped. Quality decides among those that fit; size and speed show what you gain.",
            ("BF16", "FP8_DYNAMIC", "FP8_BLOCK", "INT8", "W4A16"),
            beside=(*LOSSES, "needle", "gemm_speedup", *SIZES),
        ),
        Question(
            "sensitivity",
            "Which layers are sensitive?",
            "A few projections cause most of the loss. Leaving them uncast buys back quality for few bits.",
            ("BF16", "FP8_DYNAMIC", "FP8_E5M2", "INT8", "W4A16"),
            Request(measures=("sensitivity",)),
            metric="sensitivity",
            cost="Longer than a typical run: each kind of projection is cast alone, then all others without it.",
        ),
    )
}  # fmt: skip


def question_of(name: str | None, grid: Mapping[str, Sequence[str]] | None) -> Question | None:
    """The question that a study asks, by what is stored of it; None for a study of somebody's own.

    None, too, where another version of fp8dash knows the question, or a part of the grid, and this one does not.

    >>> question_of("e4m3-e5m2", None).question, question_of(None, None), question_of("of-2031", None)
    ('E4M3 or E5M2?', None, None)
    """
    if grid is None:
        return QUESTIONS.get(name or "")
    try:
        return RecipeGrid.from_json(grid).question
    except (InvalidChoice, KeyError, TypeError):
        return None
