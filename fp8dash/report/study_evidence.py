"""What is stored about a study: its own runs, those of other studies that answer the rest, and what is still missing.

No streamlit, no words: `study_report.py` makes an answer of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from db.rows import ACTIVE, FINISHED, STATES, Run
from db.store import Store
from fp8dash.choose.presets import preset_of, recipe_from
from fp8dash.choose.records import Measurement, Sensitivity, Window
from fp8dash.choose.request import Request
from fp8dash.choose.studies import Question, question_of
from fp8dash.report import comparison
from fp8dash.report.comparison import Standing


@dataclass(frozen=True, slots=True)
class Plan:
    """A question's requests: those that finished or active runs answer already, and those to queue."""

    known: tuple[Run, ...]
    missing: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All that is stored about a study: its question, the runs that answer it, and their rows."""

    question: Question
    rows: tuple[Standing, ...]
    reused: frozenset[str]  # runs of other studies
    missing: tuple[str, ...]  # names of recipes that no run answers
    windows: dict[str, list[Window]]
    extras: dict[str, list[Measurement]]
    parts: dict[str, list[Sensitivity]]
    unlike: tuple[str, ...]

    @property
    def active(self) -> int:
        """How many runs may still change."""
        return sum(row.state in ACTIVE for row in self.rows)

    @property
    def finished(self) -> int:
        """How many runs have their numbers."""
        return sum(row.state == FINISHED for row in self.rows)


def plan(store: Store, requests: Sequence[Request]) -> Plan:
    """What is there of these requests, so that nothing is measured twice."""
    found = [(request, store.last_like(request)) for request in requests]
    return Plan(tuple(run for _, run in found if run), tuple(request for request, run in found if run is None))


def of_study(store: Store, study_id: str) -> Evidence:
    """What a study has: its own runs, and those of other studies that answer the rest of its question.

    Raises StoreError where there is no such study.
    """
    own = store.study_runs(study_id)
    title = store.studies(ids=[study_id])[0].name
    question = question_of(title)
    if question is None or not own:
        return of_runs(store, Question("own", title, "", ()), [run.id for run in own])
    measured = {run.recipe for run in own}
    others = [request for request in question.requests(own[0].request) if request.recipe not in measured]
    reused = [run.id for run in plan(store, others).known]
    return of_runs(store, question, [run.id for run in own] + reused, reused=reused)


def of_runs(store: Store, question: Question, run_ids: Sequence[str], *, reused: Sequence[str] = ()) -> Evidence:
    """What these runs say on a question; ids of no run are passed over."""
    rows = comparison.standings(store, states=STATES, ids=run_ids)
    finished = [row for row in rows if row.state == FINISHED]
    facts = {run.id: run.facts for run in store.runs(ids=run_ids)}
    wanted = {extra.name for extra in question.extras}
    have = {row.recipe for row in rows}
    missing = [text for text in question.recipes if recipe_from(text).text not in have]
    return Evidence(
        question, tuple(rows), frozenset(reused), tuple(map(_name, missing)), store.windows(run_ids),
        store.measurements(run_ids, wanted) if wanted else {}, store.sensitivities(run_ids),
        comparison.unlike(finished, [facts[row.run] for row in finished]),
    )  # fmt: skip


def _name(text: str) -> str:
    return preset_of(recipe_from(text)) or text
