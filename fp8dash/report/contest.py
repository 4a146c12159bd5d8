"""Which run leads in a metric, and what the evidence says about each rival; boards, comparisons and studies all ask
here.

Plain values in and out. Rivals are judged by paired differences over the windows that both runs read, all of them
together with 95 % (Holm); the interval that is handed out with a verdict is the one that the verdict was taken at.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from db.board import Standing
from fp8dash.choose.metrics import METRICS, Metric
from fp8dash.choose.records import HIGHER, Window
from fp8dash.report.numbers import signed, three
from fp8dash.stats import Difference, Outcome, judged, paired_difference, pairs, windows_to_settle, windows_to_tell

BY_WINDOW = {"kld": "kld", "ln_ppl_diff": "nll", "ppl": "nll", "top1": "top1"}  # metrics, and a window's field of each
CLOSE = 0.05  # nats of ln PPL, or share of tokens: a difference that readers see
MOST_WINDOWS = 100_000  # that a request may ask for
TOO_FEW = "too few windows to tell"


@dataclass(frozen=True, slots=True)
class Rival:
    """A run beside the leader, and what can be said of the two."""

    row: Standing
    difference: Difference | None  # its value minus the leader's; None where no window was read by both
    outcome: Outcome
    more: int | None = None  # windows that would settle a tie, or tell an open comparison
    at_floor: bool = False  # both are at the noise floor, which makes them tied whatever their difference

    @property
    def spread(self) -> str:
        """The difference with the interval of its verdict, or why there is none."""
        if self.at_floor:
            return "at the noise floor"
        return spread(self.difference) if self.difference else "no window in common"


@dataclass(frozen=True, slots=True)
class Contest:
    """Runs that may be ranked together by one metric: the leader, and its rivals from the nearest value on."""

    metric: Metric
    leader: Standing | None
    rivals: tuple[Rival, ...] = ()

    @property
    def rows(self) -> tuple[Standing, ...]:
        """All of them, the best first."""
        return (self.leader, *(rival.row for rival in self.rivals)) if self.leader else ()

    def of(self, outcome: Outcome) -> list[Rival]:
        """The rivals of one outcome, nearest first."""
        return [rival for rival in self.rivals if rival.outcome == outcome]

    @property
    def more(self) -> int | None:
        """How many windows would settle all ties and open comparisons, as far as that is known."""
        return max((rival.more for rival in self.rivals if rival.more), default=None)

    def outcome_of(self, run: str) -> Outcome | None:
        """The verdict on one rival; None for the leader and for runs that do not take part."""
        return next((rival.outcome for rival in self.rivals if rival.row.run == run), None)


def contest(rows: Sequence[Standing], windows: Mapping[str, Sequence[Window]], metric: str = "kld") -> Contest:
    """The rows that have this metric, judged against the best of them. They are to be of one group and backend."""
    measured = sorted((row for row in rows if is_measured(row, metric)), key=lambda row: _place(row, metric))
    if not measured:
        return Contest(METRICS[metric], None)
    leader, others = measured[0], measured[1:]
    differences = [window_difference(leader, row, windows, BY_WINDOW[metric]) for row in others]
    paired = [difference for difference in differences if difference]
    verdicts = iter(judged(paired, family=pairs(len(paired) + 1)))
    rivals = [
        _rival(leader, row, next(verdicts) if difference else None, metric)
        for row, difference in zip(others, differences, strict=True)
    ]
    return Contest(METRICS[metric], leader, tuple(rivals))


def is_measured(row: Standing, metric: str) -> bool:
    """Whether a row has a finite value of a metric."""
    value = getattr(row, metric)
    return value is not None and math.isfinite(value)


def _place(row: Standing, metric: str) -> tuple[float, float, str]:
    """By the metric, the best first; KLDs at the noise floor before all others."""
    value: float = getattr(row, metric)
    if metric == "kld":
        return (row.divergence, value, row.run)
    return (-value if METRICS[metric].better == HIGHER else value, 0.0, row.run)


def _rival(leader: Standing, row: Standing, difference: Difference | None, metric: str) -> Rival:
    if metric == "kld" and leader.is_at_floor and row.is_at_floor:
        return Rival(row, difference, "tied", at_floor=True)
    if difference is None:
        return Rival(row, None, "open")
    margin = margin_of(leader, metric)
    outcome = difference.outcome(margin)
    more = {"apart": None, "tied": windows_to_settle(difference), "open": windows_to_tell(difference, margin)}
    return Rival(row, difference, outcome, more[outcome])


def margin_of(leader: Standing, metric: str) -> float:
    """The difference that matters beside a leader: as much KLD again as it loses, or what readers see of ln PPL."""
    if metric == "kld":
        return max(leader.kld or 0.0, leader.kld_noise_floor or 0.0)
    return CLOSE


def window_difference(
    a: Standing, b: Standing, windows: Mapping[str, Sequence[Window]], field: str
) -> Difference | None:
    """The mean of b minus a over the windows that both runs read; None where they read none alike.

    Alike: the same weights and the same text by their hashes, cut and scored in the same way.
    """
    if not read_alike(a, b):
        return None
    shared = list(zip(windows.get(a.run, ()), windows.get(b.run, ()), strict=False))
    if not shared:
        return None
    first, second = ([getattr(window, field) for window in side] for side in zip(*shared, strict=True))
    return paired_difference(second, first, weights=[window.tokens for window, _ in shared])


def read_alike(a: Standing, b: Standing) -> bool:
    """Whether two runs' windows are pairs: the same weights, text, length and method."""
    sides = ((row.model_content, row.corpus_content, row.window_length, row.method) for row in (a, b))
    return len(set(sides)) == 1


def spread(difference: Difference) -> str:
    """A difference with its interval, at the level at which it was judged.

    >>> spread(Difference(0.01, 0.002, 0.018, confidence=0.9975)), spread(Difference(0.01, None, None))
    ('+0.0100 [+0.00200, +0.0180]', '+0.0100, no interval')
    """
    if difference.low is None or difference.high is None:
        return f"{signed(difference.mean)}, no interval"
    return f"{signed(difference.mean)} [{signed(difference.low)}, {signed(difference.high)}]"


def needed(more: int | None) -> str:
    """How many more windows would settle it.

    >>> needed(1204), needed(10**7), needed(None)
    ('about 1,204 more windows would settle it', 'more than 100,000 windows would be needed', '')
    """
    if not more:
        return ""
    if more > MOST_WINDOWS:
        return f"more than {MOST_WINDOWS:,} windows would be needed"
    return f"about {more:,} more windows would settle it"


def interval_of(row: Standing) -> str:
    """The 95 % interval of a run's Δ ln PPL; where it holds zero and differences that matter, that windows are too few.

    >>> base = Standing("1", "m", "r", None, "finished", "a", None, None, windows=4)
    >>> import dataclasses
    >>> wide = dataclasses.replace(base, ln_ppl_diff=-0.4, ln_ppl_diff_low=-9.03, ln_ppl_diff_high=0.77)
    >>> interval_of(base), interval_of(wide)
    ('', 'too few windows to tell')
    >>> interval_of(dataclasses.replace(base, ln_ppl_diff=0.02, ln_ppl_diff_low=0.01, ln_ppl_diff_high=0.03))
    '[+0.0100, +0.0300]'
    """
    low, high = row.ln_ppl_diff_low, row.ln_ppl_diff_high
    if low is None or high is None:
        return ""
    if low <= 0.0 <= high and (high - low) / 2 > CLOSE:
        return TOO_FEW
    return f"[{signed(low)}, {signed(high)}]"


def ln_ppl_change(row: Standing) -> str:
    """A run's Δ ln PPL with its interval, if known.

    >>> row = Standing("1", "m", "r", None, "finished", "a", None, None, ln_ppl_diff=0.02)
    >>> ln_ppl_change(row)
    '+0.0200 nats, no interval from so few windows'
    """
    bounds = interval_of(row)
    if bounds == TOO_FEW or not bounds:
        return f"{signed(row.ln_ppl_diff)} nats, {bounds or 'no interval from so few windows'}"
    return f"{signed(row.ln_ppl_diff)} {bounds} nats"


def over(value: float | None, base: float | None) -> str:
    """A value as a multiple of another, in parentheses; empty where that is meaningless.

    >>> over(0.03, 0.02), over(0.03, 0.0), over(0.03, -1e-9)
    (' (1.50× as much)', '', '')
    """
    if value is None or base is None or not base > 0 or not value > 0:
        return ""
    return f" ({three(value / base)}× as much)"
