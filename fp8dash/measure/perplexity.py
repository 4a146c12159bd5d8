"""Perplexity of the scored tokens, and their divergence from the baseline: what llama.cpp's --kl-divergence lists.

Logits in float32, sums over tokens in float64. Means are over tokens; intervals resample windows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fp8dash.choose.casts import KvCast
from fp8dash.choose.records import BASELINE, HIGHER, LOWER, NEITHER, Better, Measurement, Progress, RanBy, Window
from fp8dash.errors import NotFinite
from fp8dash.measure.baseline import Baseline, hidden_states
from fp8dash.measure.corpora import Windows
from fp8dash.measure.divergence import Comparer, Scores, predictions_by
from fp8dash.model.head import full_head
from fp8dash.stats import CONFIDENCE, FEWEST_WINDOWS, Difference, look_confidence, looks, paired_difference

TAIL = {"90 %": 90.0, "95 %": 95.0, "99 %": 99.0, "99.9 %": 99.9, "maximum": 100.0}
FOOT = {"minimum": 0.0, "0.1 %": 0.1, "1 %": 1.0, "5 %": 5.0, "10 %": 10.0}
PERCENTILES = {  # labels of the measurements that end in _tokens: percentiles, by linear interpolation
    "kld": FOOT | {"median": 50.0} | TAIL,
    "kld_reverse": FOOT | {"median": 50.0} | TAIL,
    "delta_p": FOOT | {"25 %": 25.0, "median": 50.0, "75 %": 75.0} | TAIL,
}
KEPT = ("kld", "kld_reverse", "delta_p", "nll")  # of each token until the end, in float32


@dataclass(slots=True)
class Tally:
    """What a run has measured so far."""

    windows: list[Window] = field(default_factory=list)
    tokens: dict[str, list[Tensor]] = field(default_factory=lambda: {name: [] for name in KEPT})
    sums: dict[str, float] = field(default_factory=lambda: {name.name: 0.0 for name in fields(Scores)})
    base_tokens: list[Tensor] = field(default_factory=list)  # the baseline's NLL

    @property
    def count(self) -> int:
        """Scored tokens."""
        return sum(window.tokens for window in self.windows)

    def mean(self, name: str) -> float:
        """Mean over scored tokens."""
        return self.sums[name] / self.count

    def each(self, name: str) -> NDArray[np.float32]:
        """One score of every token."""
        scores: NDArray[np.float32] = torch.cat(self.tokens[name]).numpy()
        return scores

    def difference(self, seed: int, confidence: float = CONFIDENCE) -> Difference:
        """ln PPL minus the baseline's."""
        nlls, base_nlls = [w.nll for w in self.windows], [w.baseline_nll for w in self.windows]
        tokens = [w.tokens for w in self.windows]
        return paired_difference(nlls, base_nlls, weights=tokens, seed=seed, confidence=confidence)

    def divergence(self, seed: int, confidence: float = CONFIDENCE) -> Difference:
        """Mean KLD."""
        klds, tokens = [w.kld for w in self.windows], [w.tokens for w in self.windows]
        return paired_difference(klds, [0.0] * len(klds), weights=tokens, seed=seed, confidence=confidence)


def perplexity(
    model: Any,
    base_head: nn.Module,
    windows: Windows,
    baseline: Baseline,
    backend: RanBy,
    seed: int,
    kv: KvCast | None = None,
    until: float = 0.0,
) -> Iterator[Progress | Window | Measurement]:
    """Progress and a Window for each window, then the run's measurements; raises NotFinite, naming the window.

    With `kv` each window is read through a quantized cache of its own. With `until` the run ends at the first look
    (see `stats.looks`) at which the interval of Δ ln PPL reaches no further than this to either side.
    """
    scoring = Scoring(full_head(model), base_head, windows, baseline, backend, seed, until)
    for index, ids in enumerate(windows.ids):
        yield Progress("perplexity", 2 * index, 2 * len(windows), f"window {index + 1} of {len(windows)}")
        hidden = hidden_states(model, ids[None], kv)
        yield Progress("perplexity", 2 * index + 1, 2 * len(windows), f"window {index + 1} of {len(windows)}: scores")
        yield scoring.score(index, hidden)
        if scoring.is_over:
            break
    yield from scoring.measurements()


class Scoring:
    """A model's last hidden states, window by window, against the baseline's: what perplexity and KLD are made from."""

    def __init__(
        self,
        head: nn.Module,
        base_head: nn.Module,
        windows: Windows,
        baseline: Baseline,
        backend: RanBy,
        seed: int,
        until: float = 0.0,
    ) -> None:
        """Takes the model's head and the baseline's, and how `perplexity` reads."""
        self._comparer, self._windows, self._baseline = Comparer(head, base_head), windows, baseline
        self._backend, self._seed, self._until = backend, seed, until
        self._run = Tally()
        self.is_over = False  # the interval is as narrow as was asked for: what comes after does not count

    def score(self, index: int, hidden: Tensor) -> Window:
        """The next window's scores, from its last hidden states [L - 1, hidden]; raises NotFinite."""
        return self.score_rows(index, hidden[self._windows.rows(index)])

    def score_rows(self, index: int, hidden: Tensor) -> Window:
        """As `score`, from the states of the scored tokens alone, as a baseline keeps them."""
        base_hidden, base_predictions = self._baseline.window(index, hidden.device)
        targets = self._windows.targets(index).to(hidden.device)
        scores = self._comparer.compare(hidden, base_hidden, base_predictions, targets)
        window = _added(self._run, index, scores, base_predictions.nll.cpu())
        self.is_over = bool(self._until) and _narrow(self._run, len(self._windows), self._until, self._seed)
        return window

    def measurements(self) -> Iterator[Measurement]:
        """All that is measured of the run."""
        given = (self._windows, self._baseline, self._backend, self._seed, self._until)
        yield from _measurements(self._run, *given)


def perplexity_alone(
    model: Any, windows: Windows, backend: RanBy, kv: KvCast | None = None
) -> Iterator[Progress | Measurement]:
    """As `perplexity` for a model that has no baseline: no divergence, no difference, and no window's scores."""
    run, head = Tally(), full_head(model)
    for index, ids in enumerate(windows.ids):
        yield Progress("perplexity", index, len(windows), f"window {index + 1} of {len(windows)}")
        hidden = hidden_states(model, ids[None], kv)[windows.rows(index)]
        nll = predictions_by(head, hidden, windows.targets(index).to(hidden.device)).nll
        if not bool(torch.isfinite(nll).all()):
            raise NotFinite(f"Window {index + 1} gave NaN or infinity: the checkpoint overflows, or is damaged.")
        run.sums["nll"] += float(nll.sum())
        run.windows.append(Window(index, len(nll), float(nll.mean()), math.nan, math.nan, math.nan))

    def measured(name: str, value: float | None, unit: str, better: Better, note: str = "") -> Measurement:
        return Measurement(name, value, unit, better, windows.method, backend, note=note)

    yield measured("ppl", _exp(run.sums["nll"] / run.count), "", LOWER, "no baseline was named: no divergence")
    yield from _by_text(run, measured, windows)
    yield measured("scored_tokens", float(run.count), "tokens", NEITHER)
    yield measured("scored_windows", float(len(run.windows)), "windows", NEITHER)


def _added(run: Tally, index: int, scores: Scores, base_nll: Tensor) -> Window:
    """The window, added to the run."""
    means = {name.name: float(getattr(scores, name.name).mean()) for name in fields(Scores)}
    if not all(map(math.isfinite, means.values())):
        raise NotFinite(
            f"Window {index + 1} gave NaN or infinity: an activation left the format's range or the model overflowed. "
            "Try smaller tiles, or leave the layer out with skip=."
        )
    for name in KEPT:
        run.tokens[name].append(getattr(scores, name).float())
    for name, mean in means.items():
        run.sums[name] += mean * len(scores.nll)
    run.base_tokens.append(base_nll.float())
    base_mean = float(base_nll.mean())
    window = Window(index, len(scores.nll), means["nll"], base_mean, means["kld"], means["top1"])
    run.windows.append(window)
    return window


def _narrow(run: Tally, windows: int, until: float, seed: int) -> bool:
    """Whether this is a look, and the interval is narrow enough."""
    if len(run.windows) not in looks(windows):
        return False
    return run.difference(seed, look_confidence(windows)).half_width <= until


def _measurements(
    run: Tally, windows: Windows, baseline: Baseline, backend: RanBy, seed: int, until: float
) -> Iterator[Measurement]:
    """All that is measured of a run."""

    def measured(
        name: str, value: float | None, unit: str, better: Better, note: str = "", label: str = ""
    ) -> Measurement:
        return Measurement(name, value, unit, better, windows.method, backend, label, note)

    confidence = look_confidence(len(windows)) if until else CONFIDENCE
    yield from _perplexities(run, measured, windows, run.difference(seed, confidence), until)
    spread = run.divergence(seed, confidence)
    yield measured("kld", run.mean("kld"), "nats", LOWER)
    yield measured("kld_low", spread.low, "nats", NEITHER, _few(spread))
    yield measured("kld_high", spread.high, "nats", NEITHER, _few(spread))
    yield _floor(run, baseline, windows.method)
    yield measured("kld_reverse", run.mean("kld_reverse"), "nats", LOWER)
    yield measured("top1", run.mean("top1"), "share", HIGHER)
    yield measured("top5", run.mean("top5"), "share", HIGHER)
    yield measured("delta_p", run.mean("delta_p"), "share", NEITHER)
    moved = run.each("delta_p").astype(np.float64)
    yield measured("delta_p_rms", float(np.sqrt(np.mean(moved**2))), "share", LOWER)
    for name, labels in PERCENTILES.items():
        unit, better = ("share", NEITHER) if name == "delta_p" else ("nats", LOWER)
        for label, value in zip(labels, np.percentile(run.each(name), list(labels.values())), strict=True):
            yield measured(f"{name}_tokens", float(value), unit, better, label=label)
    yield measured("scored_tokens", float(run.count), "tokens", NEITHER)
    yield measured("scored_windows", float(len(run.windows)), "windows", NEITHER)


def _perplexities(
    run: Tally, measured: Any, windows: Windows, difference: Difference, until: float
) -> Iterator[Measurement]:
    """Perplexity by token, word and byte, and how it differs from the baseline's."""
    nll, count = run.sums["nll"], run.count
    base = sum(w.baseline_nll * w.tokens for w in run.windows) / count
    ppl, base_ppl = _exp(nll / count), _exp(base)
    yield measured("ppl", ppl, "", LOWER)
    yield measured("baseline_ppl", base_ppl, "", LOWER)
    yield measured("ln_ppl_diff", difference.mean, "nats", LOWER, _stopped(run, len(windows), until))
    yield measured("ln_ppl_diff_low", difference.low, "nats", NEITHER, _few(difference))
    yield measured("ln_ppl_diff_high", difference.high, "nats", NEITHER, _few(difference))
    yield measured("ppl_ratio", _exp(difference.mean), "", LOWER)
    yield measured("ppl_diff", ppl - base_ppl, "", LOWER)
    yield measured("ln_ppl_correlation", _correlation(run.each("nll"), torch.cat(run.base_tokens).numpy()), "", HIGHER)
    yield from _by_text(run, measured, windows)


def _by_text(run: Tally, measured: Any, windows: Windows) -> Iterator[Measurement]:
    """Perplexity by word and by byte; a text without white space has no words, and bytes all the same."""
    nll = run.sums["nll"]
    words, sizes = (sum(counts[: len(run.windows)]) for counts in (windows.words, windows.text_bytes))
    untold = "" if windows.text_bytes else "the tokenizer does not tell which text its tokens are"
    no_words = untold or ("" if words else "no word begins in the scored text: it has no white space")
    no_bytes = untold or ("" if sizes else "the scored tokens stand for no text")
    yield measured("word_ppl", None if no_words else _exp(nll / words), "", LOWER, no_words)
    yield measured("byte_ppl", None if no_bytes else _exp(nll / sizes), "", LOWER, no_bytes)
    yield measured("bits_per_byte", None if no_bytes else nll / sizes / math.log(2), "bits", LOWER, no_bytes)


def _floor(run: Tally, baseline: Baseline, method: str) -> Measurement:
    """The KLD of the unquantized weights in float32 over the same windows."""
    weights = np.array([w.tokens for w in run.windows], np.float64)
    value = float(np.average(baseline.floor[: len(run.windows)].numpy(), weights=weights))
    missing = "" if math.isfinite(value) else "the model does not run in float32 here"
    note = missing or "of the same weights in float32 from the baseline: rounding alone"
    return Measurement("kld_noise_floor", None if missing else value, "nats", NEITHER, method, BASELINE, note=note)


def _stopped(run: Tally, windows: int, until: float) -> str:
    if not until:
        return ""
    level = f"each look at {100 * look_confidence(windows):.2f} %, so that all hold with 95 %"
    at = ", ".join(str(look) for look in looks(windows))
    return f"read {len(run.windows)} of {windows} windows, until ±{until:g} nats; looks at {at}; {level}"


def _few(difference: Difference) -> str:
    return "" if difference.low is not None else f"fewer than {FEWEST_WINDOWS} windows: no interval"


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _correlation(own: Sequence[float] | NDArray[np.float32], base: NDArray[np.float32]) -> float | None:
    """Pearson's over tokens; None where either is constant."""
    a, b = np.asarray(own, np.float64), base.astype(np.float64)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else None
