"""What earlier runs recorded about a model: the web process reads no model's folder, only what workers found there."""

from db.rows import FINISHED
from db.store import Store
from fp8dash.choose.catalog import ModelShape, Weights, shape_of
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.records import ATTENTION, EMBEDDING, HEAD, MLP, NORM, Layer
from fp8dash.errors import InvalidChoice

NEWEST = 8  # runs of the model that are looked at for one that cast something
GROUPS = {ATTENTION: "blocks", MLP: "blocks", HEAD: "lm_head", EMBEDDING: "embeddings", NORM: "norms"}
KEPT = "kept"  # a group that no recipe casts


def known_shape(store: Store, model: str) -> ModelShape | None:
    """The weights of a model of the catalogue, or of one that was run before; None for any other."""
    return shape_of(model) or _recorded_shape(store, model)


def _recorded_shape(store: Store, model: str) -> ModelShape | None:
    runs = store.runs(states=(FINISHED,), model=model, limit=NEWEST) if model else []
    for run in sorted(runs, key=lambda run: not _casts(run.recipe)):  # those that cast say what can be cast
        layers = store.layers([run.id])[run.id]
        if layers:
            tied = any(layer.tied for layer in layers)
            return ModelShape(tuple(_weights(layer) for layer in layers), 0, tied)
    return None


def _weights(layer: Layer) -> Weights:
    """A layer as the estimate counts it; what stands in no known place counts as cast only where it was."""
    group = "norms" if layer.rows == 1 else GROUPS.get(layer.group, "blocks" if layer.cast else KEPT)
    return Weights(group, layer.rows, layer.cols, modules=(layer.name,))


def _casts(recipe: str) -> bool:
    try:
        return parse_recipe(recipe).weights is not None
    except InvalidChoice:  # written by a newer version
        return False
