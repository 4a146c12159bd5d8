"""A model's blocks, and the progress of a forward pass through them, so that a long window does not seem to hang."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from fp8dash.choose.records import Progress

EVERY_SECONDS = 0.5


def blocks_of(model: Any) -> list[nn.Module]:
    """The model's blocks: the list that contains all Linears except the head; empty if there is none."""
    head = model.get_output_embeddings()
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head]
    places = {match[1] if (match := re.match(r"(.+?)\.\d+\.", name)) else "" for name in linears}
    blocks = model.get_submodule(places.pop()) if len(places) == 1 and "" not in places else None
    return list(blocks) if isinstance(blocks, nn.ModuleList) else []


class Passes:
    """Reports, from inside the model, the progress of the current step.

    A step is what happens between two Progresses of a stage. Its share grows with the deepest block that a pass
    reached; the modules inside a block, and a head, only show that the step is still running.
    """

    def __init__(self, tell: Callable[[Progress], None]) -> None:
        """Takes the function to report to; nothing is watched yet."""
        self._tell = tell
        self._models: tuple[nn.Module, ...] = ()
        self._blocks: list[nn.Module] = []
        self._step: Progress | None = None
        self._deepest, self._told_at = 0, 0.0

    def watch(self, model: Any, head: nn.Module) -> None:
        """Watches the unquantized model, whose blocks survive casting, and its head, which may be replaced."""
        self._models, self._blocks = (model, head), blocks_of(model)

    def hear(self, step: Progress) -> None:
        """A new step begins."""
        self._step, self._deepest, self._told_at = step, 0, time.monotonic()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Within, a step that takes longer than EVERY_SECONDS is reported once per interval."""
        leaves = {part for model in self._models for part in model.modules() if not list(part.children())}
        depths = [*((block, i + 1) for i, block in enumerate(self._blocks)), *((leaf, 0) for leaf in leaves)]
        hooks = [module.register_forward_hook(partial(self._passed, depth)) for module, depth in depths]
        try:
            yield
        finally:
            self._step = None
            for hook in hooks:
                hook.remove()

    def _passed(self, depth: int, *_: Any) -> None:
        self._deepest, now = max(self._deepest, depth), time.monotonic()
        if self._step is None or now - self._told_at < EVERY_SECONDS:
            return
        step, parts, self._told_at = self._step, len(self._blocks) + 1, now
        self._tell(Progress(step.stage, step.done * parts + self._deepest, step.total * parts, step.message))
