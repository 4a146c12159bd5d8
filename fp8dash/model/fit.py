"""Whether a recipe fits a loaded model, asked before anything is measured."""

from typing import Any

from torch import nn

from fp8dash.choose.models.fit import refuse_unloadable, refuse_unmatched
from fp8dash.choose.recipe import Recipe
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.model.parts import LINEAR
from fp8dash.model.swap import planned, why_kept


def check_fit(model: Any, recipe: Recipe, *, exported: bool) -> None:
    """Raises InvalidChoice or ModelError where a recipe casts nothing of a model, names what it does not have, or
    makes a checkpoint that nobody can load."""
    named = [name for name, module in model.named_modules() if any(True for _ in module.parameters(recurse=False))]
    refuse_unmatched(recipe, named)
    if recipe.attention and not _has_attention(model):
        raise ModelError(
            f"attn= is refused: {type(model).__name__} has no attention with operands to cast; closest alternative: "
            "the recipe without attn=."
        )
    if not recipe.casts_linears:
        return
    parts = planned(model, recipe)
    cast = [part for part in parts if not why_kept(recipe, part)]
    if not cast:
        raise InvalidChoice(_nothing(model, recipe, {why_kept(recipe, part) for part in parts if part.in_blocks}))
    if exported:
        linears = [(part.module, *part.shape) for part in cast if part.kind == LINEAR]
        refuse_unloadable(recipe, linears, tied=_is_tied(model))


def _nothing(model: Any, recipe: Recipe, reasons: set[str]) -> str:
    looked_for = "Linears of the blocks" + "".join(f", {group}" for group in recipe.also)
    why = "; ".join(sorted(reasons)) or "it has none"
    return (
        f"“{recipe.text}” casts nothing in {type(model).__name__}: it looks for {looked_for} ({why}). Choose a "
        "recipe whose patterns do not leave out everything, or another model."
    )


def _has_attention(model: Any) -> bool:
    return any("attention" in type(module).__name__.lower() for module in model.modules())


def _is_tied(model: Any) -> bool:
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    return isinstance(head, nn.Module) and table is not None and head.weight is table.weight
