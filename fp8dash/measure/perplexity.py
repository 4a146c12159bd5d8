"""Token perplexity over disjoint windows, and the divergence from the baseline on the same tokens.

KLD is the exact sum over the full vocabulary, in float32, of p_base * (ln p_base - ln p); sums over tokens are float64.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fp8dash.choose.records import HIGHER, LOWER, NEITHER, Measurement, Progress, Window
from fp8dash.errors import NotFinite
from fp8dash.measure.baseline import CHUNK, METHOD, Baseline, hidden_states
from fp8dash.stats import FEWEST_WINDOWS, paired_difference


@dataclass(frozen=True, slots=True)
class Scores:
    """Per scored token of one window: NLL and KLD in nats, and whether the likeliest token is the baseline's."""

    nll: Tensor
    kld: Tensor
    agrees: Tensor


def perplexity(
    model: Any, base_head: nn.Module, windows: Tensor, baseline: Baseline, backend: str, seed: int
) -> Iterator[Progress | Window | Measurement]:
    """Progress and a Window for each of [count, L] token ids, then the run's measurements; raises NotFinite."""
    found: list[Window] = []
    for index, ids in enumerate(windows):
        yield Progress("perplexity", index, len(windows), f"window {index + 1} of {len(windows)}")
        hidden = hidden_states(model, ids[None])
        scores = _window_scores(model.get_output_embeddings(), base_head, hidden, ids[1:], baseline, index)
        found.append(_window(index, scores, baseline.nll[index]))
        yield found[-1]
    yield from _measurements(found, backend, seed)


def _window_scores(
    head: nn.Module, base_head: nn.Module, hidden: Tensor, targets: Tensor, baseline: Baseline, index: int
) -> Scores:
    parts = []
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        base = (baseline.hidden[index, rows], baseline.log_sum[index, rows], baseline.top[index, rows])
        parts.append(_chunk_scores(head, base_head, hidden[rows], targets[rows], *base))
    return Scores(*(torch.cat(column) for column in zip(*parts, strict=True)))


@torch.no_grad()
def _chunk_scores(
    head: nn.Module, base_head: nn.Module, hidden: Tensor, targets: Tensor,
    base_hidden: Tensor, base_log_sum: Tensor, base_top: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """NLL, KLD and agreement of each row, float64 and on the CPU."""
    device = hidden.device
    ours, theirs = head(hidden).float(), base_head(base_hidden.to(device)).float()
    log_sum, their_log_sum = torch.logsumexp(ours, dim=-1), base_log_sum.to(device)
    nll = log_sum - ours.gather(-1, targets.to(device)[:, None])[:, 0]
    agrees = ours.argmax(-1) == base_top.to(device)  # ties go to the lower token id, on both sides
    chances = (theirs - their_log_sum[:, None]).exp_()
    kld = torch.linalg.vecdot(chances, theirs.sub_(ours)) + log_sum - their_log_sum
    return nll.double().cpu(), kld.double().cpu(), agrees.double().cpu()


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
