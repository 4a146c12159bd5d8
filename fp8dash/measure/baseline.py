"""What the unquantized model said, kept on disk: last hidden states, from which its head gives the exact logits again.

Stored log-probabilities of 16 bits would put a floor of about 5e-4 nats under every KLD; hidden states are exact and a
hundredth of the size. One file per (model, corpus, windows, method, torch and device), written beside its place and
renamed, verified by its digest when read, made anew when damaged.
"""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fp8dash.choose.recipe import KvCast
from fp8dash.choose.records import Progress
from fp8dash.errors import ModelError, NotFinite
from fp8dash.quant.kv_cache import quantized_cache

METHOD = "token perplexity over disjoint windows, no BOS, first token unscored, v1"
CHUNK = 64  # rows of logits at a time: three float32 blocks of a 49k vocabulary stay in a CPU's last cache


@dataclass(frozen=True, slots=True)
class Baseline:
    """The baseline's hidden states [windows, L - 1, hidden] and, per scored token [windows, L - 1], the rest."""

    hidden: Tensor
    nll: Tensor  # float32, nats
    log_sum: Tensor  # float32, log of the sum of exp(logits)
    top: Tensor  # int64, likeliest token


def baseline_of(model: Any, head: nn.Module, windows: Tensor, file: Path) -> Iterator[Progress | Baseline]:
    """Progress, then the baseline: read from `file`, or measured and kept there."""
    kept = read_baseline(file)
    if kept is not None:
        yield kept
        return
    parts: list[tuple[Tensor, ...]] = []
    for index, ids in enumerate(windows):
        yield Progress("baseline", index, len(windows), f"window {index + 1} of {len(windows)}")
        hidden = hidden_states(model, ids[None])
        if index == 0:
            _check_head(model, head, ids, hidden)
        scored = [_score(head, hidden[i : i + CHUNK], ids[1:][i : i + CHUNK]) for i in range(0, len(hidden), CHUNK)]
        parts.append((hidden.cpu(), *(torch.cat(column) for column in zip(*scored, strict=True))))
    made = Baseline(*(torch.stack(column) for column in zip(*parts, strict=True)))
    if not torch.isfinite(made.nll).all():
        raise NotFinite(
            "The unquantized model gives NaN or infinity on this corpus: it overflows in bfloat16, or is damaged."
        )
    write_baseline(made, file)
    yield made


def baseline_file(folder: Path, *, model_hash: str, corpus_hash: str, windows: Tensor, device: str) -> Path:
    """Where a baseline is kept: one name for everything that bears on its bits."""
    facts = (METHOD, model_hash, corpus_hash, tuple(windows.shape), device, torch.__version__, torch.get_num_threads())
    return folder / "baselines" / f"{hashlib.sha256(repr(facts).encode()).hexdigest()[:32]}.safetensors"


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor, kv: KvCast | None = None) -> Tensor:
    """Last hidden states [L - 1, hidden] of one window of token ids [1, L]; the last has no token to predict.

    With `kv` every token reads the keys and values of the earlier ones, and its own, from a quantized cache.
    """
    ids = ids.to(model.device)
    path = {"use_cache": True, "cache": quantized_cache(model, kv)} if kv else {"use_cache": False}
    states: Tensor = model.base_model(input_ids=ids, **path).last_hidden_state
    return states[0, :-1]


def read_baseline(file: Path) -> Baseline | None:
    """A kept baseline, or None where there is none or its bytes are not what was written."""
    try:
        with safe_open(file, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118 - not a dict
            digest = (stored.metadata() or {}).get("digest")
        found = Baseline(**tensors)
    except (OSError, SafetensorError, TypeError):
        return None
    return found if digest == _digest(found) else None


def write_baseline(baseline: Baseline, file: Path) -> None:
    """Keeps a baseline, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".baseline-", dir=file.parent)
    os.close(handle)
    try:
        tensors = {field.name: getattr(baseline, field.name).contiguous() for field in fields(baseline)}
        save_file(tensors, name, metadata={"digest": _digest(baseline)})
        os.replace(name, file)
    finally:
        Path(name).unlink(missing_ok=True)


def _digest(baseline: Baseline) -> str:
    digest = hashlib.sha256()
    for field in fields(baseline):
        tensor: Tensor = getattr(baseline, field.name).contiguous()
        digest.update(repr((field.name, tensor.dtype, tuple(tensor.shape))).encode())
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def token_scores(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """NLL in nats, log-sum and likeliest token of each row of float32 logits [rows, vocabulary], which it uses up.

    The baseline and the runs go through it alike, so that a model does not differ from itself by a bit.
    """
    top = logits.argmax(-1, keepdim=True)  # ties go to the lower token id
    peak, truth = logits.gather(-1, top), logits.gather(-1, targets[:, None])
    log_sum = logits.sub_(peak).exp_().sum(-1, keepdim=True).log_().add_(peak)
    return (log_sum - truth)[:, 0], log_sum[:, 0], top[:, 0]


@torch.no_grad()
def _score(head: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`token_scores` of each row of hidden states, on the CPU."""
    nll, log_sum, top = token_scores(head(hidden).float(), targets.to(hidden.device))
    return nll.cpu(), log_sum.cpu(), top.cpu()


@torch.no_grad()
def _check_head(model: Any, head: nn.Module, ids: Tensor, hidden: Tensor) -> None:
    """Raises ModelError where the model does more than its head to make logits: soft caps and logit scales."""
    few = min(16, len(hidden))
    own = model(input_ids=ids[None, : few + 1].to(model.device), use_cache=False).logits[0, :few].float()
    ours = head(hidden[:few]).float()
    if not torch.allclose(ours, own, rtol=0.05, atol=0.05 * float(own.abs().max())):
        raise ModelError(f"{type(model).__name__} changes its logits after the head, which is not supported yet.")
