"""What logits predict, and how two models' logits differ, token by token. Knows no model and no file.

Everything over the full vocabulary, in float32. Logarithms of sums are kept as a peak and a sum of exponentials above
it: the difference of two peaks is exact, where that of two rounded logarithms would put a floor of 1e-6 nats under a
KLD. A masked token (a logit of minus infinity) adds nothing where both models mask it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

CHUNK = 64  # rows of logits at a time: what a head needs to run at its speed
ROWS = 16  # of them at a time on a CPU: three float32 blocks of a 49k vocabulary stay in its cache
TOP = 5
BLOCK = 64  # tokens of the vocabulary whose largest logit stands for them while the five likeliest are sought

Head = Callable[[Tensor], Tensor]  # hidden states [rows, hidden] to logits [rows, vocabulary]


@dataclass(frozen=True, slots=True)
class Predictions:
    """A model's predictions for tokens, [tokens] each: all that a comparison needs beside its logits."""

    nll: Tensor  # float64, nats
    peak: Tensor  # float32, the largest logit
    total: Tensor  # float32, sum of exp(logit - peak)
    likeliest: Tensor  # int64; the lowest id of those that tie
    top: Tensor  # int64 [tokens, TOP], the five likeliest in no order


@dataclass(frozen=True, slots=True)
class Scores:
    """How a model differs from the baseline on tokens, [tokens] each, in float64 on the CPU."""

    nll: Tensor  # nats, the model's own
    kld: Tensor  # nats, of the model from the baseline: sum of p_base * (ln p_base - ln p)
    kld_reverse: Tensor  # nats, of the baseline from the model
    top1: Tensor  # 1.0 where the likeliest token is the baseline's
    top5: Tensor  # share of the baseline's five likeliest that are at least as likely as the model's fifth
    delta_p: Tensor  # the true token's probability minus the baseline's


def predictions(logits: Tensor, targets: Tensor) -> Predictions:
    """Predictions of float32 logits [rows, vocabulary] for targets [rows]; overwrites the logits."""
    likeliest, peak, leaders = _leaders(logits)
    truth = logits.gather(-1, targets[:, None])[:, 0]
    total = logits.sub_(peak[:, None]).exp_().sum(-1)
    return Predictions(total.double().log() + (peak - truth), peak, total, likeliest, leaders)


@torch.no_grad()
def predictions_by(head: Head, hidden: Tensor, targets: Tensor) -> Predictions:
    """Predictions of a head for [tokens, hidden] states and the tokens that follow, chunk by chunk."""
    starts = range(0, len(hidden), CHUNK)
    chunks = [predictions(head(hidden[i : i + CHUNK]).float(), targets[i : i + CHUNK]) for i in starts]
    return Predictions(*(torch.cat([getattr(chunk, field.name) for chunk in chunks]) for field in fields(Predictions)))


class Comparer:
    """Compares a model with a baseline chunk by chunk, in three float32 blocks [rows, vocabulary] of its own.

    Blocks made anew for each chunk would cost as much as the arithmetic: the kernel clears every page first.
    """

    def __init__(self, head: Head, base_head: Head) -> None:
        """Takes what makes the model's logits from its hidden states, and the baseline's from the baseline's."""
        self._head, self._base_head = head, base_head
        self._blocks: list[Tensor] = []

    @torch.no_grad()
    def compare(self, hidden: Tensor, base_hidden: Tensor, base: Predictions, targets: Tensor) -> Scores:
        """Scores of [tokens, hidden] states of both models, all on one device."""
        few, parts = ROWS if hidden.device.type == "cpu" else CHUNK, []
        for start in range(0, len(hidden), CHUNK):
            logits = self._head(hidden[start : start + CHUNK])
            base_logits = self._base_head(base_hidden[start : start + CHUNK])
            for i in range(0, len(logits), few):
                rows = slice(start + i, min(start + i + few, start + len(logits)))
                here = Predictions(*(getattr(base, field.name)[rows] for field in fields(Predictions)))
                parts.append(self._scored(logits[i : i + few], base_logits[i : i + few], here, targets[rows]))
        return Scores(*torch.cat(parts, dim=1).cpu())

    def _scored(self, logits: Tensor, base_logits: Tensor, base: Predictions, targets: Tensor) -> Tensor:
        """All scores of some rows, [6, rows] in float64."""
        logits, apart, chances = self._filled(logits, base_logits)
        likeliest, peak, top = _leaders(logits)
        overlap = (logits.gather(-1, base.top) >= logits.gather(-1, top).amin(-1, keepdim=True)).double().mean(-1)
        truth = logits.gather(-1, targets[:, None])[:, 0]
        torch.sub(apart, base.peak[:, None], out=chances).exp_()
        apart.sub_(logits)  # the baseline's logits minus the model’s
        own_chances = logits.sub_(peak[:, None]).exp_()
        total = own_chances.sum(-1)
        shift = (peak - base.peak).double() + (total.double().log() - base.total.double().log())
        forward = _mean(apart, chances).double() / base.total + shift
        reverse = -_mean(apart, own_chances).double() / total - shift
        nll = total.double().log() + (peak - truth)
        agrees = (likeliest == base.likeliest).double()
        return torch.stack([nll, forward, reverse, agrees, overlap, (-nll).exp() - (-base.nll).exp()])

    def _filled(self, logits: Tensor, base_logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Both models' logits in float32, and a block to work in."""
        if not self._blocks or len(self._blocks[0]) < len(logits):
            self._blocks = [torch.empty(logits.shape, dtype=torch.float32, device=logits.device) for _ in range(3)]
        own_block, base_block, free = (block[: len(logits)] for block in self._blocks)
        return own_block.copy_(logits), base_block.copy_(base_logits), free


def _mean(values: Tensor, chances: Tensor) -> Tensor:
    """The sum of each row's values by their chances; what has no chance counts nothing, be it infinite."""
    sums: Tensor = torch.linalg.vecdot(chances, values)
    if not bool(torch.isfinite(sums).all()):
        sums = torch.linalg.vecdot(chances, values.masked_fill(chances == 0, 0.0))
    return sums


def _leaders(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each row's likeliest token, the lowest of those that tie, its logit, and the TOP likeliest in no order.

    One pass over the vocabulary finds the largest logit of every block; none of the five lies outside the five blocks
    with the largest ones.
    """
    width = logits.shape[-1]
    whole = width // BLOCK * BLOCK
    if whole < BLOCK * TOP:
        likeliest = logits.argmax(-1)
        return likeliest, logits.gather(-1, likeliest[:, None])[:, 0], logits.topk(min(TOP, width)).indices
    blocks = logits[:, :whole].view(len(logits), -1, BLOCK)
    peaks = blocks.amax(-1)  # [rows, blocks]
    offsets = torch.arange(BLOCK, device=logits.device)
    rest = torch.arange(whole, width, device=logits.device).expand(len(logits), -1)
    chosen = (peaks.topk(TOP).indices[..., None] * BLOCK + offsets).flatten(1)
    chosen = torch.cat([chosen, rest], dim=1)  # ids
    top = chosen.gather(-1, logits.gather(-1, chosen).topk(TOP).indices)
    home = peaks.argmax(-1)  # the first of equals, as in a whole row's argmax
    likeliest = home * BLOCK + blocks[torch.arange(len(logits), device=logits.device), home].argmax(-1)
    return *_better(logits, likeliest, whole), top


def _better(logits: Tensor, likeliest: Tensor, whole: int) -> tuple[Tensor, Tensor]:
    """The likeliest token and its logit, where the tokens after the last whole block are counted in."""
    peak = logits.gather(-1, likeliest[:, None])[:, 0]
    if whole == logits.shape[-1]:
        return likeliest, peak
    value, last = logits[:, whole:].max(-1)
    return torch.where(value > peak, last + whole, likeliest), torch.maximum(value, peak)
