"""Whether a recipe fits a model: its patterns match, and a checkpoint can hold it. Values only: no torch.

The same questions are asked twice: at submit, of the models whose shapes are known beforehand, and of every model as
soon as it is loaded, before anything is measured.
"""

from collections.abc import Collection, Iterable
from difflib import get_close_matches
from fnmatch import fnmatchcase

from fp8dash.choose.architecture import CONFIGS, KNOWN
from fp8dash.choose.catalog import MODELS, ModelShape, shape_from_architecture
from fp8dash.choose.models.checkpoint import refuse_no_checkpoint
from fp8dash.choose.recipe import Recipe
from fp8dash.errors import InvalidChoice

HEAD_NAME = "lm_head"  # as recipes call it
Shape = tuple[str, int, int]  # a Linear's name, its rows and its columns


def known_shape(model: str) -> ModelShape | None:
    """The shape of a model that is known without its files: of the catalogue, or on the Hub; None for others."""
    if model in MODELS:
        return shape_from_architecture(MODELS[model].architecture)
    name = next((name for name, (_, hub) in CONFIGS.items() if model == hub), None)
    return shape_from_architecture(KNOWN[name]) if name else None


def refuse_misfit(recipe: Recipe, model: str, *, exported: bool) -> None:
    """Raises InvalidChoice where a model that is known beforehand has nothing that the recipe names, or where its
    checkpoint could not be loaded."""
    if shape := known_shape(model):
        refuse_misfit_of_shape(recipe, shape, exported=exported)


def refuse_misfit_of_shape(recipe: Recipe, shape: ModelShape, *, exported: bool) -> None:
    """As `refuse_misfit`, of a model whose Linears are all modules of their own."""
    refuse_unmatched(recipe, [*(name for weights in shape.weights for name in weights.modules), HEAD_NAME])
    if exported and recipe.casts_linears:
        linears = [(name, w.n, w.k) for w in shape.weights if w.is_linear for name in w.modules if w.cast(recipe, name)]
        refuse_unloadable(recipe, linears, tied=shape.tied)


def refuse_unmatched(recipe: Recipe, modules: Collection[str]) -> None:
    """Raises InvalidChoice for a pattern that matches none of these modules, with the closest that does.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> refuse_unmatched(parse_recipe("w=int8/row skip=up_proj"), ["model.layers.0.mlp.up_proj"])
    Traceback (most recent call last):
    fp8dash.errors.InvalidChoice: “skip=up_proj” matches no module of this model; closest alternative: skip=*.up_proj.
    """
    written = [("skip={}", pattern) for pattern in recipe.skip]
    written += [(f"{override.key}[{{}}]=", override.pattern) for override in recipe.overrides]
    for form, pattern in written:
        if not any(fnmatchcase(name, pattern) for name in modules):
            nearest = form.format(_nearest(pattern, modules)) if modules else "leave it out"
            raise InvalidChoice(
                f"“{form.format(pattern)}” matches no module of this model; closest alternative: {nearest}."
            )


def refuse_unloadable(recipe: Recipe, linears: Iterable[Shape], *, tied: bool) -> None:
    """Raises InvalidChoice where no checkpoint of a model can hold the recipe, whose `linears` it casts."""
    refuse_no_checkpoint(recipe)
    if tied and HEAD_NAME in recipe.also:
        raise InvalidChoice(
            "A checkpoint cannot hold also=lm_head of this model: its head is tied to the embedding and has no "
            "weight in its files (transformers); closest alternative: the recipe without also=lm_head."
        )
    for name, _, cols in linears:
        own = recipe.of(name)
        for key, cast in (("w", own.weights), ("a", own.activations)):
            if cast and cast.tile.cols > 1 and cols % cast.tile.cols:
                nearest = f"{key}={cast.format.name}/row, or skip={_of_kind(name)}"
                raise InvalidChoice(
                    f"A checkpoint cannot hold {key}={cast.text} of {name}: its {cols} columns are not a multiple of "
                    f"{cast.tile.cols} (compressed-tensors); closest alternative: {nearest}."
                )


def _of_kind(name: str) -> str:
    """The pattern of all modules of a name's kind.

    >>> _of_kind("model.layers.3.mlp.down_proj"), _of_kind("lm_head")
    ('*.down_proj', 'lm_head')
    """
    return f"*.{name.rpartition('.')[2]}" if "." in name else name


def _nearest(pattern: str, modules: Collection[str]) -> str:
    """The nearest pattern that matches: with stars around it, or of the kind that is spelled most alike."""
    core = pattern.strip("*.")
    for text in (f"*.{core}", f"{core}.*", f"*.{core}.*"):
        if core and any(fnmatchcase(name, text) for name in modules):
            return text
    kinds = {kind.removeprefix("*."): kind for kind in map(_of_kind, modules)}
    alike = get_close_matches(core.rpartition(".")[2], kinds, n=1, cutoff=0.0)
    return kinds[alike[0]]
