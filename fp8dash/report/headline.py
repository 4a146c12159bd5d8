"""Which recipe loses least, in one sentence: the same on the board, in a study's write-up and on the command line."""

from collections.abc import Sequence

from db.board import Standing
from fp8dash.report.contest import Contest, needed
from fp8dash.report.numbers import shown, three

NAMED = 4  # recipes that a sentence names, at most


def headline(contest: Contest) -> str:
    """The leader, its ties, those that the windows cannot tell from it, and the next one; without a full stop."""
    best = contest.leader
    if best is None:
        return "No cast recipe has been measured here yet"
    least = _number(contest, best)
    if not contest.rivals:
        return f"{best.name} costs {least} nats; no other recipe can be compared with it yet"
    if contest.of("open"):
        return _open(contest, best) + _next(contest)
    if contest.of("tied"):
        return _tied(contest, best) + (_next(contest) or _differing(contest))
    return f"{best.name} loses least: {least} nats{_next(contest)}"


def _number(contest: Contest, row: Standing) -> str:
    return f"{contest.metric.title} {shown(contest.metric, getattr(row, contest.metric.name))}"


def _open(contest: Contest, best: Standing) -> str:
    """A leader that the windows cannot tell from others is not called the best."""
    rivals, tied = contest.of("open"), contest.of("tied")
    names, least = listed([best.name, *(rival.row.name for rival in tied)]), _number(contest, best)
    who = f"{names} are tied at {least} nats" if tied else f"{names} has the lowest {least} nats"
    others = listed([rival.row.name for rival in rivals])
    if all(rival.difference is None for rival in rivals):
        return f"{who}, but no stored window was also read by {others}"
    whom = f"{'them' if tied else 'it'} from {others}"
    more = needed(max((rival.more for rival in rivals if rival.more), default=None))
    return f"{who}, but {best.windows} windows are too few to tell {whom}{f': {more}' if more else ''}"


def _tied(contest: Contest, best: Standing) -> str:
    tied = contest.of("tied")
    names, count = listed([best.name, *(rival.row.name for rival in tied)]), len(tied) + 1
    every = count == len(contest.rows)
    who = f"All {count} recipes are tied" if every and count > NAMED else f"{names} are tied"
    top = max(getattr(rival.row, contest.metric.name) for rival in tied)
    return f"{who}{'' if every else ' for the least loss'}: {_number(contest, best)} to {three(top)} nats"


def _differing(contest: Contest) -> str:
    """How far the tied ones may lie apart."""
    last = contest.of("tied")[-1]
    return "; all at the noise floor" if last.at_floor else f"; they differ by at most {last.spread} nats"


def _next(contest: Contest) -> str:
    """The best run that is known to lose more, and how much."""
    apart = contest.of("apart")
    return f"; next is {apart[0].row.name}, {apart[0].spread} nats" if apart else ""


def listed(names: Sequence[str]) -> str:
    """The first few names, joined by commas and "and".

    >>> listed(["a"]), listed(["a", "b"]), listed(list("abcdefg"))
    ('a', 'a and b', 'a, b, c, d and 3 more')
    """
    kept = list(names) if len(names) <= NAMED + 1 else [*names[:NAMED], f"{len(names) - NAMED} more"]
    return kept[0] if len(kept) == 1 else f"{', '.join(kept[:-1])} and {kept[-1]}"
