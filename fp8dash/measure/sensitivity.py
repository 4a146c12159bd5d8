"""Which parts of a model suffer from a recipe: each is cast alone, then all others without it; then a mixed recipe is
tried.

A probe casts Linears emulated (weights and, where the recipe casts them, inputs), runs a few windows and restores them.
Blocks before the first one that changed are not run: they return what they returned when nothing, or everything, was
cast. The KV cache, attention and a simulated accumulator are no part of it; nor are embeddings and norms.
"""

import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.casts import Cast
from fp8dash.choose.mixed import Budget, Part, kept_parts, mean_bits, mixed_recipe, predicted_kld
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import ARITHMETIC, EMULATED, LOWER, Measurement, Progress, Sensitivity
from fp8dash.errors import NotFinite
from fp8dash.measure.baseline import Baseline, hidden_states
from fp8dash.measure.corpora import Windows
from fp8dash.measure.divergence import CHUNK
from fp8dash.model.calibration import NOTHING, Casters, Observed
from fp8dash.model.head import full_head
from fp8dash.model.outer import Outers
from fp8dash.model.parts import linears_of
from fp8dash.model.passes import blocks_of
from fp8dash.quant.cast import round_trip

METHOD = "KLD from the baseline over the first windows, Linears of a part cast emulated and restored, v1"
WINDOWS = 2  # at most: parts differ by far more than windows do
BACKEND = EMULATED


@dataclass(frozen=True, slots=True)
class CastGroup:
    """Linears that are cast together, and the first block that they change."""

    part: Part  # its kld not known yet
    names: tuple[str, ...]
    first: int  # the number of blocks where only the head is in it


def sensitivity(
    model: Any,
    base_head: nn.Module,
    windows: Windows,
    baseline: Baseline,
    recipe: Recipe,
    granularity: str,
    budget: Budget,
    observed: Observed = NOTHING,
) -> Iterator[Progress | Sensitivity | Measurement]:
    """Progress, a Sensitivity for each group, the whole recipe and a mixed one under the budget; raises NotFinite.

    Takes the unquantized model, which is unquantized again at the end, and what was `observed`
    where the recipe's scales come from calibration.
    """
    groups = groups_of(model, recipe, granularity)
    if not groups:
        yield _measured("sensitivity_kld", None, "no Linear is cast, so none costs anything")
        return
    probe = Probe(model, base_head, windows.few(WINDOWS), baseline, recipe, observed)
    clock = _Clock(2 * len(groups) + 2)
    try:
        yield from _probed(probe, groups, recipe, budget, clock)
    finally:
        probe.restore(list(probe.cast_now))


def _probed(
    probe: "Probe", groups: Sequence[CastGroup], recipe: Recipe, budget: Budget, clock: "_Clock"
) -> Iterator[Progress | Sensitivity | Measurement]:
    """The two sweeps, the choice, and the whole of what was chosen."""
    alone: list[float] = []
    probe.keep_outputs()
    for group in groups:
        yield clock.progress(f"{group.part.name} alone")
        probe.cast(group.names)
        alone.append(probe.kld(group.first, group.part.name))
        probe.restore(group.names)
    yield clock.progress("all")
    probe.cast([name for group in groups for name in group.names])
    whole = probe.keep_outputs()
    but: list[float] = []
    for group in groups:
        yield clock.progress(f"all but {group.part.name}")
        probe.restore(group.names)
        but.append(probe.kld(group.first, f"all but {group.part.name}"))
        probe.cast(group.names)
    parts = [replace(group.part, kld=kld) for group, kld in zip(groups, scaled(alone, whole), strict=True)]
    kept = kept_parts(parts, budget, whole)
    yield clock.progress("the mixed recipe")
    left_out = [group for group in groups if group.part.name in {part.name for part in kept}]
    probe.restore([name for group in left_out for name in group.names])
    mixed = probe.kld(min((group.first for group in left_out), default=len(probe.blocks)), "the mixed recipe")
    for group, part, own, all_but in zip(groups, parts, alone, but, strict=True):
        yield Sensitivity(
            part.name, part.pattern, len(group.names), part.parameters, part.cast_bits, own, all_but, part in kept
        )
    yield _measured("sensitivity_kld", whole, f"Linears alone, {probe.tokens:,} tokens")
    yield _measured("sensitivity_kld_sum", sum(alone), "the parts' KLDs, each cast alone, added up")
    yield from _of_mixed(parts, kept, recipe, mixed)


def groups_of(model: Any, recipe: Recipe, granularity: str) -> list[CastGroup]:
    """The Linears that the recipe casts, by kind, block or one by one, in the model's order; the head by itself."""
    head = model.get_output_embeddings()
    members: dict[tuple[str, str], list[tuple[str, nn.Linear]]] = {}
    for name, module in linears_of(model):
        if recipe.skips(name) or not recipe.of(name).casts_linears:
            continue
        if module is head and "lm_head" not in recipe.also:
            continue
        members.setdefault(_named(name, granularity), []).append((name, module))
    labels, count = [label for label, _ in members], len(blocks_of(model))
    return [
        _group(label if labels.count(label) == 1 else pattern.removeprefix("*."), pattern, linears, recipe, count)
        for (label, pattern), linears in members.items()
    ]


class Probe:
    """A model whose Linears are cast and restored at will, and its divergence from the baseline on a few windows.

    A Linear's other weight, the one that is not in use, waits on the CPU, so a GPU holds the model once.
    """

    def __init__(
        self,
        model: Any,
        base_head: nn.Module,
        windows: Windows,
        baseline: Baseline,
        recipe: Recipe,
        observed: Observed = NOTHING,
    ) -> None:
        """Takes the unquantized model and the first of the windows that the baseline was made of."""
        self.blocks = blocks_of(model)
        self.cast_now: dict[str, Callable[[], None]] = {}  # by Linear, what takes its activations' cast off again
        self.tokens = windows.bounds[-1]
        self._model, self._windows, self._baseline, self._recipe = model, windows, baseline, recipe
        self._device: torch.device = model.device
        self._casters = Casters(observed)
        cast = [name for name, _ in linears_of(model) if not recipe.skips(name)]
        self._outers = Outers(recipe, cast, lambda name: model.get_submodule(name).weight.detach())
        self._waiting: dict[str, nn.Parameter] = {}
        self._outputs: list[list[Any]] = []  # [window][block]
        self._logits = [self._base_logits(base_head, index) for index in range(len(windows))]
        predictions = [baseline.window(index, self._device)[1] for index in range(len(windows))]
        self._log_sums = [tokens.peak + tokens.total.log() for tokens in predictions]
        self._buffers = [torch.empty(CHUNK, self._logits[0].shape[-1], device=self._device) for _ in range(3)]

    def cast(self, names: Sequence[str]) -> None:
        """Casts these Linears, which are not cast."""
        for name in names:
            linear = self._model.get_submodule(name)
            if weights := self._recipe.of(name).weights:
                self._swap(name, linear, weights)
            self.cast_now[name] = self._watch(name, linear)

    def restore(self, names: Sequence[str]) -> None:
        """Gives these Linears, which are cast, their own weights back."""
        for name in names:
            self.cast_now.pop(name)()
            if weights := self._recipe.of(name).weights:
                self._swap(name, self._model.get_submodule(name), weights)

    @torch.no_grad()
    def keep_outputs(self) -> float:
        """The mean KLD of the model as it is, in nats; later probes replay what its blocks return now."""
        self._outputs, total = [], 0.0
        self._casters.rewind()
        for index, ids in enumerate(self._windows.ids):
            with _recorded(self.blocks) as outputs:
                hidden = hidden_states(self._model, ids[None])
            self._outputs.append(outputs)
            total += self._divergence(index, hidden)
        if self.blocks and not self._replays(hidden):
            self.blocks = []  # blocks that tell each other more than they return: each probe runs them all
        return _finite(total / self.tokens, "the whole recipe" if self.cast_now else "nothing")

    @torch.no_grad()
    def kld(self, first: int, what: str) -> float:
        """The mean KLD in nats where blocks before the `first` are as when outputs were kept; raises NotFinite."""
        total = 0.0
        self._casters.rewind()
        for index, ids in enumerate(self._windows.ids):
            with _replayed(self.blocks[:first], self._outputs[index]):
                total += self._divergence(index, hidden_states(self._model, ids[None]))
        return _finite(total / self.tokens, what)

    def _replays(self, hidden: Tensor) -> bool:
        """True where replaying all blocks of the last window gives its hidden states again, bit by bit."""
        with _replayed(self.blocks, self._outputs[-1]):
            return torch.equal(hidden, hidden_states(self._model, self._windows.ids[-1:]))

    def _swap(self, name: str, linear: nn.Linear, cast: Cast) -> None:
        """The other weight in place of this one, cast the first time; its own parameter, so a tied embedding stays."""
        present: Any = linear.weight
        other = self._waiting.get(name)
        if other is None:
            other = nn.Parameter(round_trip(present.detach(), cast, self._outers.of(name)), requires_grad=False)
        tied = present is self._model.get_input_embeddings().weight
        self._waiting[name] = present if tied else _at(present, torch.device("cpu"))
        linear.weight = _at(other, self._device)

    def _watch(self, name: str, linear: nn.Linear) -> Callable[[], None]:
        caster = self._casters.of(name, self._recipe.of(name).activations, self._device)
        if caster is None:
            return lambda: None
        return linear.register_forward_pre_hook(lambda _module, args: (caster.emulated(args[0]), *args[1:])).remove

    @torch.no_grad()
    def _base_logits(self, head: nn.Module, index: int) -> Tensor:
        """A window's scored logits [tokens, vocabulary] as the unquantized head gives them, in its precision."""
        hidden, _ = self._baseline.window(index, self._device)
        return torch.cat([head(hidden[i : i + CHUNK]) for i in range(0, len(hidden), CHUNK)])

    def _divergence(self, index: int, hidden: Tensor) -> float:
        """The sum over a window's tokens of their KLD in nats, full vocabulary, float32; the sum in float64."""
        head, total = full_head(self._model), torch.zeros((), dtype=torch.float64, device=self._device)
        log_sums, hidden = self._log_sums[index], hidden[self._windows.rows(index)]
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, min(start + CHUNK, len(hidden)))
            a, b, c = (buffer[: rows.stop - start] for buffer in self._buffers)
            logits, base_logits = a.copy_(head(hidden[rows])), b.copy_(self._logits[index][rows])
            chances = torch.sub(base_logits, log_sums[rows, None], out=c).exp_()
            divergence = torch.linalg.vecdot(chances, base_logits.sub_(logits))
            peak = logits.amax(-1, keepdim=True)
            own_sums = logits.sub_(peak).exp_().sum(-1).log_().add_(peak[:, 0])  # in place: new blocks cost as much
            total += (divergence + own_sums - log_sums[rows]).sum(dtype=torch.float64)
        return float(total)


class _Clock:
    """Progress with the rate of the probes behind it."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.perf_counter()

    def progress(self, what: str) -> Progress:
        """The next probe's."""
        done, each = self._done, (time.perf_counter() - self._start) / max(1, self._done)
        self._done += 1
        return Progress("sensitivity", done, self._total, f"{what}; {each:.2g} s per probe" if done else what)


@contextmanager
def _recorded(blocks: Sequence[nn.Module]) -> Iterator[list[Any]]:
    """Within, what each block returns is kept, in order."""
    outputs: list[Any] = []
    hooks = [block.register_forward_hook(lambda _module, _args, out: outputs.append(out)) for block in blocks]
    try:
        yield outputs
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _replayed(blocks: Sequence[nn.Module], outputs: Sequence[Any]) -> Iterator[None]:
    """Within, these blocks are not run: they return what they returned."""
    for block, out in zip(blocks, outputs, strict=False):
        block.forward = lambda *_args, _out=out, **_kwargs: _out
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def _named(name: str, granularity: str) -> tuple[str, str]:
    """A Linear's group by its usual name, and the pattern of its members.

    >>> _named("model.layers.3.mlp.down_proj", "kind"), _named("model.layers.3.mlp.down_proj", "block")
    (('down', '*.mlp.down_proj'), ('block 3', 'model.layers.3.*'))
    >>> _named("lm_head", "block"), _named("model.layers.3.mlp.experts.7.w1", "kind")
    (('lm_head', 'lm_head'), ('experts.w1', '*.mlp.experts.*.w1'))
    """
    match = re.match(r"(.+?\.(\d+))\.(.+)$", name)
    if granularity == "linear" or not match:
        return name, name
    if granularity == "block":
        return f"block {match[2]}", f"{match[1]}.*"
    inside = re.sub(r"\.\d+\.", ".*.", match[3])
    words = [word for word in inside.split(".")[-3:] if word != "*"] if "*" in inside else inside.split(".")[-1:]
    return ".".join(words[-2:]).removesuffix("_proj"), f"*.{inside}"


def _group(label: str, pattern: str, linears: Sequence[tuple[str, nn.Linear]], recipe: Recipe, count: int) -> CastGroup:
    size = sum(linear.weight.numel() for _, linear in linears)
    kept = sum(8.0 * linear.weight.nbytes for _, linear in linears) / size
    bits = sum(_bits(linear.weight, recipe.of(name).weights) for name, linear in linears) / size
    names = tuple(name for name, _ in linears)
    blocks = [int(match[1]) if (match := re.match(r".+?\.(\d+)\.", name)) else count for name in names]
    return CastGroup(Part(label, pattern, size, bits, kept, math.nan), names, min(blocks))


def _bits(weight: Tensor, cast: Cast | None) -> float:
    """All bits of a [rows, cols] weight, its scales included."""
    return weight.numel() * (cast.bits_per_element(*weight.shape) if cast else 8.0 * weight.element_size())


def _at(weight: Tensor, where: torch.device) -> nn.Parameter:
    """The weight there: itself where it lies there already."""
    if isinstance(weight, nn.Parameter) and weight.device == where:
        return weight
    return nn.Parameter(weight.detach().to(where), requires_grad=False)


def _finite(kld: float, what: str) -> float:
    if not math.isfinite(kld):
        raise NotFinite(
            f"With {what} cast the model gave NaN or infinity: an activation left the format's range. Try smaller "
            "tiles, or leave the layer out with skip=."
        )
    return kld


def scaled(alone: Sequence[float], whole: float) -> list[float]:
    """What parts cost alone, scaled so that they add up to the whole.

    In bfloat16 the least change flips roundings downstream, so each part alone pays a floor that all of them share:
    thirty blocks of SmolLM2-135M add up to over twice the whole.

    >>> scaled([0.25, 0.75], 0.5)
    [0.125, 0.375]
    """
    total = sum(alone)
    return [kld * whole / total for kld in alone] if total > 0 else list(alone)


def _of_mixed(parts: Sequence[Part], kept: Sequence[Part], recipe: Recipe, mixed: float) -> Iterator[Measurement]:
    """The mixed recipe as measured, its text as the note, and as predicted."""
    yield _measured("mixed_kld", mixed, mixed_recipe(recipe, kept).text)
    scale = "the cast parts' KLDs, each cast alone, scaled so that all parts give the whole recipe's"
    yield _measured("mixed_kld_predicted", predicted_kld(parts, kept), scale)
    yield Measurement(
        "mixed_bits_per_weight",
        mean_bits(parts, kept),
        "bits",
        LOWER,
        METHOD,
        ARITHMETIC,
        note=f"the mixed recipe, over the weights that “{recipe.text}” casts",
    )


def _measured(name: str, value: float | None, note: str) -> Measurement:
    return Measurement(name, value, "nats", LOWER, METHOD, BACKEND, note=note)
