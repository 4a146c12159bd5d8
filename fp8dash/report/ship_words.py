"""A decision in sentences, for the screen and the command line. Plain text: whoever draws it as markup escapes it."""

from db.board import Standing
from fp8dash.choose.metrics import METRICS
from fp8dash.report.contest import CLOSE, Contest, ln_ppl_change
from fp8dash.report.headline import listed
from fp8dash.report.numbers import shown, three
from fp8dash.report.ship import Board, Decision, Loser, Reason, SpeedUp, Target, candidates

REASONS: dict[Reason, str] = {
    "partly cast": "the recipe was applied to only a part of the model: its numbers are not the recipe’s",
    "not measured": "{metric} was not measured",
    "over budget": "over budget: {metric} {spent} nats, limit {limit}",
    "nothing fits": "",
    "no speed": "its speed on this target is not known",
    "slower": "slower: {times:.2f}× BF16, not {best_times:.2f}×",
    "larger": "larger: {size} MB",
    "loses more": "{near} within 5 %, but KLD {kld} nats instead of {best_kld}{tied}",
}


def title(decision: Decision, model: str, target: Target) -> str:
    """The decision in one line, without a full stop."""
    best, budget = decision.best, decision.budget
    if best is None and not decision.lost:  # no run that could be judged
        return f"{METRICS[budget.metric].title} of {model} was not measured"
    if best is None:
        return f"No recipe keeps {METRICS[budget.metric].title} of {model} within {three(budget.limit)} nats"
    speed = f", {decision.speed.times:.2f}× BF16 {basis(decision.speed)}" if decision.speed else ", speed not known"
    return f"Ship {best.name} on {target.name}: KLD {three(best.kld)} nats{speed}"


def basis(speed: SpeedUp) -> str:
    """Where a speed comes from.

    >>> basis(SpeedUp(1.4, "predicted", 32)), basis(SpeedUp(1.4, "measured"))
    ('predicted for decoding at batch 32', 'measured')
    """
    return "measured" if speed.basis == "measured" else f"predicted for decoding at batch {speed.batch:,}"


def evidence(decision: Decision) -> str:
    """The other numbers of the recipe to ship, and what decided."""
    best = decision.best
    if best is None:
        return "Raise the budget, or queue finer recipes: smaller tiles, or layers left out."
    if decision.by == "speed":
        how = f"fastest within the budget{', as predicted' if decision.basis == 'predicted' else ''}"
    else:
        none = {
            None: "no speed is known",
            "measured": "no timed recipe is faster than BF16",
            "predicted": "no recipe is predicted to be faster than BF16",
        }
        how = f"smallest within the budget, since {none[decision.basis]}"
    return f"{beside_loss(best)}. It is the {how}; among those within 5 % of that, it has the lowest KLD."


def beside_loss(row: Standing) -> str:
    """A run's other numbers in one line."""
    parts = [
        f"Δ ln PPL {ln_ppl_change(row)}" if row.ln_ppl_diff is not None else "",
        f"needles {shown(METRICS['needle'], row.needle)}" if row.needle is not None else "needles not measured",
        f"{shown(METRICS['model_bytes'], row.model_bytes)} MB" if row.model_bytes is not None else "",
        f"{row.bits_per_weight:.2f} bits per weight" if row.bits_per_weight is not None else "",
    ]
    return "; ".join(part for part in parts if part)


def why(decision: Decision, loser: Loser) -> str:
    """Why a recipe is not the one to ship, in one sentence."""
    row, best, budget = loser.row, decision.best, decision.budget
    metric, speeds = METRICS[budget.metric], decision.speeds
    return REASONS[loser.reason].format(
        metric=metric.title,
        spent=shown(metric, getattr(row, budget.metric)),
        limit=three(budget.limit),
        times=speeds[row.run].times if row.run in speeds else 0.0,
        best_times=decision.speed.times if decision.speed else 0.0,
        size=shown(METRICS["model_bytes"], row.model_bytes),
        near="as fast" if decision.by == "speed" else "as small",
        kld=three(row.kld),
        best_kld=three(best.kld if best else None),
        tied=", which these windows cannot tell apart" if loser.is_tied else "",
    )


def cautions(rows: list[Standing], judged: Contest) -> list[str]:
    """What else matters for a choice: what is as good as BF16, what is missing, what to avoid."""
    ranked = candidates(rows)
    if not ranked:
        return []
    sentences = []
    if judged.leader and judged.leader.is_within_noise:
        sentences.append(f"{judged.leader.name} is indistinguishable from BF16: its KLD reaches the noise floor.")
    if all(row.gemm_speedup is None for row in ranked):
        sentences.append("No native kernel was timed here: sizes and quality are exact, speeds are missing.")
    avoid = [row for row in ranked if _grows(row)]
    if avoid:
        names = listed(list(dict.fromkeys(row.name for row in avoid)))
        sentences.append(f"Avoid {names}: ln PPL grows by more than {CLOSE} nats.")
    partly = [
        f"{row.name} ({row.uncast_share:.0%} of the blocks’ weights left in BF16)" for row in rows if row.is_partly_cast
    ]
    if partly:
        sentences.append(f"Only partly cast, so not ranked: {listed(partly)}.")
    return sentences


def _grows(row: Standing) -> bool:
    """Whether perplexity certainly grows, and by more than is acceptable."""
    grown, low = row.ln_ppl_diff, row.ln_ppl_diff_low
    return grown is not None and low is not None and grown > CLOSE and low > 0.0


def to_text(board: Board, target: Target, headline: str) -> str:
    """The decision as the command line prints it: the answer, what it rests on, and why the others lost."""
    decision, group = board.decision, board.group
    where = (
        f"{group.windows} windows of {group.window_length} tokens of {group.corpus}, {group.device or 'device unknown'}"
    )
    lines = [f"{title(decision, group.model, target)}.", evidence(decision), "", f"{headline}."]
    lines += [*cautions(list(board.rows), board.contest), f"Measured on {where}, backend {group.backend}."]
    if decision.lost:
        lines += ["", "Why the others lost:"]
        lines += [f"  {loser.row.name}: {why(decision, loser)}" for loser in decision.lost]
    return "\n".join(lines) + "\n"
