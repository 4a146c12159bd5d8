"""Runs calibration text through an uncast model, and gives its Linears the scales that are made from it.

Activations come from the unquantized model: every scale is made before anything is cast.
"""

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.casts import Cast
from fp8dash.choose.recipe import Recipe
from fp8dash.choose.records import Progress
from fp8dash.errors import NotFinite
from fp8dash.model.head import body_of
from fp8dash.model.parts import linears_of
from fp8dash.quant.activations import ActivationCast
from fp8dash.quant.calibrate import DelayedScale, Observer, StaticScale
from fp8dash.quant.kv_cache import kv_amaxes, observing_cache


@dataclass(frozen=True, slots=True)
class Observed:
    """What a model's Linears read and its cache was given. Linears that read one tensor share one observer."""

    inputs: Mapping[str, Observer] = field(default_factory=dict)  # by module name
    kv: tuple[tuple[Tensor, Tensor], ...] = ()  # amax of keys and of values, [heads] each, by layer


NOTHING, UNSEEN = Observed(), Observer()


@torch.no_grad()
def observe(
    model: Any, recipe: Recipe, windows: Tensor, stage: str = "quantize"
) -> Generator[Progress, None, Observed]:
    """A stage's Progress for each of [count, L] token ids; returns what was observed. Raises NotFinite naming the
    layer."""
    inputs = _Inputs()
    kv: tuple[tuple[Tensor, Tensor], ...] = ()
    names = [name for name, _ in linears_of(model) if _asks(recipe, name)]
    head = model.get_output_embeddings()
    with _hooked(model, recipe, names, inputs):
        for index, ids in enumerate(windows):
            yield Progress(stage, index, len(windows), f"calibrating, window {index + 1} of {len(windows)}")
            cache = observing_cache(model.config) if recipe.calibrates_kv else None
            hidden = body_of(model)(input_ids=ids[None].to(model.device), use_cache=bool(cache), cache=cache)[0]
            if "lm_head" in recipe.also and any(model.get_submodule(name) is head for name in names):
                head(hidden)  # seen by its hook
            if cache:
                kv = kv_amaxes(cache, kv)
    return Observed(inputs.by_name, kv)


class Casters:
    """One caster for all Linears that read the same tensor by the same cast."""

    def __init__(self, observed: Observed) -> None:
        """Takes what was observed on calibration text."""
        self._observed = observed
        self._made: dict[tuple[int, Cast], ActivationCast] = {}

    def of(self, name: str, cast: Cast | None, device: torch.device) -> ActivationCast | None:
        """The caster of a Linear's input on a device; None where it is not cast."""
        if cast is None:
            return None
        observer = self._observed.inputs.get(name, UNSEEN) if cast.is_observed else UNSEEN
        key = (id(observer), cast)
        if key not in self._made:
            self._made[key] = ActivationCast(cast, _scale_of(observer, cast, device))
        return self._made[key]

    def caveat(self, name: str, cast: Cast | None) -> str:
        """What there is to say of a Linear's scale: that it rests on nothing, where calibration never reached it."""
        is_unseen = cast is not None and cast.is_observed and name not in self._observed.inputs
        return "; no calibration text reached it, so the scale of its input is 1" if is_unseen else ""

    def rewind(self) -> None:
        """Puts delayed scales back to where calibration left them."""
        for caster in self._made.values():
            if caster.scale is not None:
                caster.scale.rewind()


def _scale_of(observer: Observer, cast: Cast, device: torch.device) -> StaticScale | None:
    """The scale that was made beforehand; None where each tensor makes its own. Without observations it is 1."""
    if cast.when.name == "delayed":
        return DelayedScale(observer.amaxes, cast, device)
    return StaticScale(observer.static_scale(cast).to(device), cast) if cast.is_observed else None


def scales(model: Any) -> Iterator[tuple[str, StaticScale]]:
    """Each scale that was made beforehand, once, by the first module that reads by it."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        caster = getattr(module, "activations", None)
        if isinstance(caster, ActivationCast) and caster.scale is not None and id(caster.scale) not in seen:
            seen.add(id(caster.scale))
            yield name, caster.scale


def rewind(model: Any) -> None:
    """Puts delayed scales back to where calibration left them, so that no stage's numbers depend on the one before."""
    for _, scale in scales(model):
        scale.rewind()


class _Inputs:
    """Observers by module name; modules that read the same tensor are found out and given the same one."""

    def __init__(self) -> None:
        self.by_name: dict[str, Observer] = {}
        self._owners: dict[int, str] = {}  # the first module of each observer: the only one that records
        self._last: tuple[Tensor, int, Observer] | None = None

    def see(self, name: str, x: Tensor, *, counts_magnitudes: bool) -> None:
        observer = self.by_name.get(name)
        if observer is None:
            if self._last and self._last[0] is x and self._last[1] == x._version:
                self.by_name[name] = self._last[2]
                return
            observer = self.by_name[name] = Observer(counts_magnitudes=counts_magnitudes)
            self._owners[id(observer)] = name
        if self._owners[id(observer)] == name:
            observer.see(x.reshape(-1, x.shape[-1]))
        self._last = (x, x._version, observer)


@contextmanager
def _hooked(model: Any, recipe: Recipe, names: list[str], inputs: _Inputs) -> Iterator[None]:
    """Each module's input is shown to `inputs` while this lasts."""
    handles = []
    for name in names:

        def see(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
            cast = recipe.of(name).activations
            try:
                inputs.see(name, args[0], counts_magnitudes=cast is not None and cast.when.by not in ("amax", "max"))
            except NotFinite as error:
                raise NotFinite(f"{name}: {error}") from error

        handles.append(model.get_submodule(name).register_forward_pre_hook(see))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _asks(recipe: Recipe, name: str) -> bool:
    """True if a Linear's activations must be observed, even if it turns out not to be cast."""
    cast = recipe.of(name).activations
    return cast is not None and cast.is_observed and recipe.skips(name) is None
