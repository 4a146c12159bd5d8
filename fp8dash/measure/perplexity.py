"""Token perplexity over disjoint windows, and the divergence from the baseline on the same tokens.

KLD is the exact sum over the full vocabulary, in float32, of p_base * (ln p_base - ln p); sums over tokens are float64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.recipe import KvCast
from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Measurement, Progress, Window
from fp8dash.errors import NotFinite
from fp8dash.measure.baseline import CHUNK, METHOD, Baseline, hidden_states, token_scores
from fp8dash.stats import FEWEST_WINDOWS, paired_difference


@dataclass(frozen=True, slots=True)
class Scores:
    """Per scored token of one window: NLL and KLD in nats, and whether the likeliest token is the baseline's."""

    nll: Tensor
    kld: Tensor
    agrees: Tensor


def perplexity(
    model: Any, base_head: nn.Module, windows: Tensor, baseline: Baseline, backend: str, seed: int,
    kv: KvCast | None = None,
) -> Iterator[Progress | Window | Measurement]:  # fmt: skip
    """Progress and a Window for each of [count, L] token ids, then the run's measurements; raises NotFinite.

    With `kv` each window is read through a quantized cache of its own.
    """
    found: list[Window] = []
    scorer = _Scorer(model.get_output_embeddings(), base_head, baseline, model.device)
    for index, ids in enumerate(windows):
        yield Progress("perplexity", index, len(windows), f"window {index + 1} of {len(windows)}")
        hidden = hidden_states(model, ids[None], kv)
        found.append(_window(index, scorer.window(index, hidden, ids[1:]), baseline.nll[index]))
        yield found[-1]
    yield from _measurements(found, backend, seed)


class _Scorer:
    """Scores windows against a baseline, chunk by chunk in three float32 blocks [CHUNK, vocabulary] of its own.

    Blocks made anew for each chunk would cost as much as the arithmetic: the kernel clears every page first.
    """

    def __init__(self, head: nn.Module, base_head: nn.Module, baseline: Baseline, device: torch.device) -> None:
        """Takes the cast model's head and the head as it was before casting."""
        self._head, self._base_head, self._baseline, self._device = head, base_head, baseline, device
        self._blocks: list[Tensor] = []

    @torch.no_grad()
    def window(self, index: int, hidden: Tensor, targets: Tensor) -> Scores:
        """The scores of one window's hidden states [L - 1, hidden] and next tokens [L - 1]."""
        starts = range(0, len(hidden), CHUNK)
        parts = [self._chunk(index, slice(i, min(i + CHUNK, len(hidden))), hidden, targets) for i in starts]
        return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _chunk(self, index: int, rows: slice, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """NLL, KLD and agreement of some rows, float64 and on the CPU."""
        base = self._baseline
        log_sum = base.log_sum[index, rows].to(self._device)
        logits = self._head(hidden[rows])
        theirs = self._base_head(base.hidden[index, rows].to(self._device))
        a, b, c = self._blocks_for(logits)
        ours, theirs = a.copy_(logits), b.copy_(theirs)
        chances = torch.sub(theirs, log_sum[:, None], out=c).exp_()
        divergence = torch.linalg.vecdot(chances, theirs.sub_(ours))
        nll, own_sum, top = token_scores(ours, targets[rows].to(self._device))
        kld, agrees = divergence + own_sum - log_sum, top.cpu() == base.top[index, rows]
        return nll.double().cpu(), kld.double().cpu(), agrees.double()

    def _blocks_for(self, logits: Tensor) -> list[Tensor]:
        if not self._blocks:
            shape = (CHUNK, logits.shape[-1])
            self._blocks = [torch.empty(shape, dtype=torch.float32, device=self._device) for _ in range(3)]
        return [block[: len(logits)] for block in self._blocks]


def _window(index: int, scores: Scores, baseline_nll: Tensor) -> Window:
    means = [float(values.mean()) for values in (scores.nll, scores.kld, scores.agrees)]
    if not all(map(math.isfinite, means)):
        raise NotFinite(
            f"Window {index + 1} gave NaN or infinity: an activation left the format's range or the model overflowed. "
            "Try smaller tiles, or leave the layer out with skip=."
        )
    return Window(index, len(scores.nll), means[0], float(baseline_nll.double().mean()), means[1], means[2])


def _measurements(windows: list[Window], backend: str, seed: int) -> Iterator[Measurement]:
    """Means over windows of equal length, so means over tokens too."""
    nll, base = [w.nll for w in windows], [w.baseline_nll for w in windows]
    difference = paired_difference(nll, base, seed=seed)
    few = "" if difference.low is not None else f"fewer than {FEWEST_WINDOWS} windows: no interval"

    def measured(name: str, value: float | None, unit: str, better: str, note: str = "") -> Measurement:
        return Measurement(name, value, unit, better, METHOD, backend, note=note)

    count = len(windows)
    yield measured("ppl", math.exp(sum(nll) / count), "", LOWER)
    yield measured("baseline_ppl", math.exp(sum(base) / count), "", LOWER)
    yield measured("ln_ppl_diff", difference.mean, "nats", LOWER)
    yield measured("ln_ppl_diff_low", difference.low, "nats", NEITHER, few)
    yield measured("ln_ppl_diff_high", difference.high, "nats", NEITHER, few)
    yield measured("kld", sum(w.kld for w in windows) / count, "nats", LOWER)
    yield measured("top1", sum(w.top1 for w in windows) / count, "share", HIGHER)
    yield measured("scored_tokens", float(sum(w.tokens for w in windows)), "tokens", NEITHER)
