"""What earlier runs recorded about a model: the web process reads no model folder, only what workers found there."""

import dataclasses
from collections.abc import Sequence

from db.rows import FINISHED
from db.store import Store
from fp8dash.choose.catalog import ModelShape, Weights, shape_of
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.records import CONVOLUTION, ROUTER, Layer
from fp8dash.errors import InvalidChoice

NEWEST = 8  # runs of the model that are looked at for one that cast weights
BIAS = ".bias"
UNTYING = {"lm_head", "embeddings"}  # casts that leave two tensors where a tied head and embedding were one


def recorded_shape(store: Store, model: str) -> ModelShape | None:
    """The weights of a model of the catalogue, or of one whose weights a run has cast; None for any other."""
    return shape_of(model) or _newest_shape(store, model)


def shape_of_layers(layers: Sequence[Layer], recipe: Recipe) -> ModelShape:
    """A model's shape by what a run made of its parameters, whose recipe casts weights and nothing of UNTYING."""
    return ModelShape(tuple(_weights(layer, recipe) for layer in layers), 0)


def _newest_shape(store: Store, model: str) -> ModelShape | None:
    for run in store.runs(states=(FINISHED,), model=model, limit=NEWEST) if model else []:
        recipe = _recipe(run.recipe)
        if recipe is None or recipe.weights is None or UNTYING & set(recipe.also):
            continue  # does not say which parameters a recipe reaches, or what was stored before
        if layers := store.layers([run.id])[run.id]:
            return shape_of_layers(layers, recipe)
    return None


def _weights(layer: Layer, recipe: Recipe) -> Weights:
    """A layer as the estimate counts it: what the recipe was meant for and did not reach, no other reaches either."""
    weights = Weights(layer.group, layer.rows, layer.cols, modules=(layer.name,), tied=layer.tied)
    never = layer.group in (ROUTER, CONVOLUTION) or layer.name.endswith(BIAS)
    missed = never or weights.cast(recipe, layer.name) is not None
    return dataclasses.replace(weights, fixed=missed and not layer.cast)


def _recipe(text: str) -> Recipe | None:
    try:
        return parse_recipe(text)
    except InvalidChoice:  # written by a newer version
        return None
