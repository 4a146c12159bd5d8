"""Which recipe to ship: the answer for each model in words, quality against speed or size, the table to check it."""

from collections.abc import Callable, Sequence
from typing import Any

import streamlit as st

from db.board import Choice, Group, Standing
from db.rows import FINISHED, QUEUED, RUNNING
from db.standings import SORTS
from fp8dash.choose.metrics import METRICS
from fp8dash.choose.records import BASELINE, HIGHER
from fp8dash.predict.accelerators import ACCELERATORS
from fp8dash.report.contest import CLOSE
from fp8dash.report.headline import headline
from fp8dash.report.numbers import DASH, three
from fp8dash.report.ship import BUDGETED, Decision, QualityBudget, Target, board, decide, speeds
from fp8dash.report.ship_words import basis, cautions, evidence, title, why
from fp8dash.ui import linked
from fp8dash.ui.frame import Frame, metric_help
from fp8dash.ui.parts.board_figure import figure
from fp8dash.ui.parts.board_table import table
from fp8dash.ui.words import many, plain, reading, short

FINISHED_RUNS = (FINISHED,)
MOST_MODELS = 6  # with an answer of their own on the first screen
MOST_STUDIES = 50  # offered as a filter: the newest
BUDGETS = {METRICS[name].title: name for name in BUDGETED}
SORTED = {"finished": "Newest", **{name: METRICS[name].title for name in SORTS if name in METRICS}}
FORETOLD = ", predicted"
WELCOME = (
    "A **run** quantizes one model with one recipe and measures that same artefact: its quality against the BF16 "
    "baseline, and the speed of its GEMMs.  \n"
    "Set how much quality you can give up and where you will serve; the first line then says what to ship, and why "
    "the others lost.  \n"
    "Only numbers measured the same way are ranked together. Recipes that the evidence cannot separate are called tied."
)


def page(frame: Frame) -> None:
    """The leaderboard."""
    groups = [group for group in frame.store.groups() if group.backend]
    if not any(group.backend != BASELINE for group in groups):
        _empty(frame)
        _active(frame)
        return
    _welcome()
    top, cards = st.container(), st.container()
    group, mates, budget, target = _asked(frame, groups)
    ranking = board(frame.store, group, mates, budget, target)
    with top:
        st.title(plain(title(ranking.decision, short(group.model), target)), anchor=False)
        st.markdown(plain(evidence(ranking.decision)))
        st.markdown(plain(" ".join([f"{headline(ranking.contest)}.", *cautions(list(ranking.rows), ranking.contest)])))
        _why(ranking.decision)
    with cards:
        _other_models(frame, groups, group, budget, target)
        _active(frame)
    choice = _filtered(frame, group)
    base = [] if choice.search else [row for row in ranking.rows if row.is_baseline][:1]
    count = frame.store.standing_count(choice)
    if not count:
        st.info("No run matches these filters. Clear the search or a filter above.")
        return
    figure(frame, choice, base, ranking.decision.speeds, "" if target.name == group.device else target.name)
    table(frame, choice, count, base, ranking.contest)


def _welcome() -> None:
    """Three lines for a first visit without a link; gone once read."""
    if st.session_state.get("welcomed") or linked.given():
        st.session_state["welcomed"] = True
        return
    with st.container(border=True, horizontal=True, vertical_alignment="center", key="leaderboard_welcome"):
        st.markdown(WELCOME)
        st.button("Got it", on_click=_welcomed, key="leaderboard_welcomed")


def _welcomed() -> None:
    st.session_state["welcomed"] = True


def _active(frame: Frame) -> None:
    counts = frame.store.counts()
    if active := counts[QUEUED] + counts[RUNNING]:
        frame.link(
            "runs", f"{many(active, 'unfinished run')}: {counts['running']} running, {counts['queued']} queued →"
        )


def _empty(frame: Frame) -> None:
    st.title("No finished run yet", anchor=False)
    st.markdown(
        "A run quantizes a model with one recipe and measures that same artefact. Two ways to fill this page: `make "
        "demo` queues eight recipes on a small model that needs no network, or queue your own."
    )
    if st.button("New run", type="primary", key="leaderboard_new_run"):
        frame.go("new_run")


def _asked(frame: Frame, groups: Sequence[Group]) -> tuple[Group, list[Group], QualityBudget, Target]:
    """What the reader set: comparable runs of one backend, the model's other groups, the budget and the target."""
    cast = [group for group in groups if group.backend != BASELINE]
    with st.container(horizontal=True, vertical_alignment="bottom", key="leaderboard_asked"):
        names = _contents(cast)
        mates = _narrowed("Model", "model", cast, lambda group: names[group.key], 230)
        here = _narrowed("Measured on", "device", mates, lambda group: group.device or "device unknown", 230)
        here = _narrowed("Setting", "setting", here, _settings(frame, here).__getitem__, 250)
        group = _narrowed("Backend", "backend", here, lambda group: group.backend, 130)[0]
        what = linked.segmented_control(
            "Budget",
            list(BUDGETS),
            default="KLD",
            required=True,
            key="budget",
            help="How much quality you can give up against the baseline, in nats.",
        )
        limit = linked.number_input("At most (nats)", 0.0, 10.0, CLOSE, 0.01, "%.3f", key="limit", width=130)
        target = _target([str(group.device), *(str(mate.device) for mate in mates)])
    return group, mates, QualityBudget(BUDGETS[str(what)], float(limit)), target


def _target(devices: Sequence[str]) -> Target:
    """A device that something was measured on, or an accelerator that is predicted."""
    planned = {f"{name}{FORETOLD}": accelerator for name, accelerator in ACCELERATORS.items()}
    name = str(
        linked.selectbox(
            "Serve on",
            [*dict.fromkeys(devices), *planned],
            key="target",
            width=230,
            help="For a device, GEMM speeds measured on it. For an accelerator, the planner’s upper bound on decode "
            "speed from data sheets: nothing was measured on it.",
        )
    )
    if name not in planned:
        return Target(name)
    batch = linked.number_input("Concurrent requests", 1, 1 << 16, 32, key="batch", width=130)
    return Target(planned[name].name, planned[name], int(batch))


def _narrowed(
    label: str, key: str, groups: Sequence[Group], name_of: Callable[[Group], str], width: int
) -> list[Group]:
    """The groups of one choice; asked only where there is more than one."""
    names = list(dict.fromkeys(name_of(group) for group in groups))
    if len(names) < 2:
        return list(groups)
    chosen = linked.selectbox(
        label,
        names,
        key=key,
        width=width,
        help="Rows are ranked only against rows with the same model, corpus, windows, method, device and backend.",
    )
    return [group for group in groups if name_of(group) == chosen]


def _settings(frame: Frame, groups: Sequence[Group]) -> dict[Group, str]:
    """What each group was measured on, and how; the group's key tells apart those that are otherwise alike."""
    written = {}
    for group in groups if len(groups) > 1 else ():
        (row,) = frame.store.standings(Choice(FINISHED_RUNS, groups=(group.key,), limit=1))
        run = frame.store.run(row.run)
        way = reading(run.request, run.facts).short
        tokens = f"{group.windows} × {group.window_length} tokens{f', {way}' if way else ''}"
        written[group] = f"{short(group.corpus)} · {tokens} · {group.key[:4]}"
    return written or dict.fromkeys(groups, "")


def _contents(groups: Sequence[Group]) -> dict[str, str]:
    """A name for each model's contents, told apart by its hash where one name stands for several."""
    hashes: dict[str, set[str]] = {}
    for group in groups:
        hashes.setdefault(group.model, set()).add(group.model_hash)
    return {
        group.key: short(group.model)
        + (f" ({group.model_hash[:8] or 'unread'})" if len(hashes[group.model]) > 1 else "")
        for group in groups
    }


def _why(decision: Decision) -> None:
    lines = [
        f"| {plain(loser.row.name)} | {three(loser.row.kld)} | {_times(decision, loser.row)} | "
        f"{plain(why(decision, loser))} |"
        for loser in decision.lost
    ]
    with st.container(horizontal=True, gap="small"):
        with st.popover(f"Why the others lost ({len(lines)})", type="tertiary", disabled=not lines):
            origin = next((f", {basis(speed)}" for speed in decision.speeds.values()), "")
            head = f"| Recipe | KLD (nats) | × BF16{origin} | Reason |\n|:--|--:|--:|:--|\n"
            st.markdown(head + "\n".join(lines))
        metric_help()


def _times(decision: Decision, row: Standing) -> str:
    return f"{decision.speeds[row.run].times:.2f}" if row.run in decision.speeds else DASH


def _other_models(
    frame: Frame, groups: Sequence[Group], shown_group: Group, budget: QualityBudget, target: Target
) -> None:
    """One line for each further model, from its largest group."""
    largest: dict[str, Group] = {}
    names = _contents(groups)
    for group in groups:
        if group.backend != BASELINE:
            largest.setdefault(names[group.key], group)
    largest.pop(names[shown_group.key], None)
    if not largest:
        return
    first = dict(list(largest.items())[: MOST_MODELS - 1])
    rows = frame.store.newest_by_recipe([group.key for group in first.values()])
    lines = []
    for name, group in first.items():
        mine = [row for row in rows if row.group == group.key and row.backend == group.backend]
        own = target if target.accelerator else Target(str(group.device))
        decision = decide(mine, budget, speeds(frame.store, group, mine, [], own))
        lines.append(f"- **{plain(name)}**: {plain(title(decision, name, own))}.")
    left = len(largest) - len(first)
    with st.expander(f"{many(len(largest), 'further model')}: what to ship", expanded=len(largest) < MOST_MODELS):
        st.markdown("\n".join(lines))
        if left:
            st.caption(f"{many(left, 'more model')}: choose one under “Model”.")


def _filtered(frame: Frame, group: Group) -> Choice:
    """The rows of the group that the reader wants, in which order; each filter lives in the address."""
    facets = frame.store.facets([group.key], studies=MOST_STUDIES)
    with st.container(horizontal=True, vertical_alignment="bottom"):
        search = linked.text_input("Search", key="q", placeholder="recipe, study, owner or run", width=230)
        sort = linked.selectbox(
            "Order",
            list(SORTED),
            format_func=SORTED.__getitem__,
            index=list(SORTED).index("kld"),
            key="sort",
            width=170,
            help="Best first; runs without this number come last.",
        )
        kept: dict[str, Any] = {
            name: tuple(linked.multiselect(label, options, key=name, placeholder="any", width=width))
            for name, label, options, width in (
                ("formats", "Format", facets.formats, 150),
                ("tiles", "Tile", facets.tiles, 150),
                ("owners", "Owner", facets.owners, 170),
                ("studies", "Study", facets.studies, 200),
            )
        }
        pins = linked.segmented_control("Pins", ["Pinned"], key="pins")
    metric = METRICS.get(sort)
    order = "descending" if metric is None or metric.better == HIGHER else "ascending"
    return Choice(
        FINISHED_RUNS,
        groups=(group.key,),
        backends=(group.backend,),
        search=search or "",
        sort=sort,
        order=order,
        pins=(True,) if pins else (),
        **kept,
    )
