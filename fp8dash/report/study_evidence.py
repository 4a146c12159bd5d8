"""What is stored about a study: its own runs, those of other studies that answer the rest, and what is still missing.

No streamlit, no wording: `study.py` makes an answer of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from db.rows import ACTIVE, FINISHED, STATES, Run
from db.store import Store
from fp8dash.choose.presets import preset_of, recipe_from
from fp8dash.choose.records import Measurement, Sensitivity, Window
from fp8dash.choose.request import Request
from fp8dash.choose.studies import Question
from fp8dash.errors import InvalidChoice
from fp8dash.report import comparison
from fp8dash.report.comparison import Standing


@dataclass(frozen=True, slots=True)
class Content:
    """What a run measured: SHA-256 of the weights and of the text; empty where unknown."""

    model: str = ""
    corpus: str = ""

    def is_other(self, content: "Content") -> bool:
        """True where both are known in some part, and differ in it."""
        pairs = ((self.model, content.model), (self.corpus, content.corpus))
        return any(mine and theirs and mine != theirs for mine, theirs in pairs)


@dataclass(frozen=True, slots=True)
class StudyPlan:
    """A question's requests: those that finished or active runs answer already, and those to queue."""

    answered: tuple[Run, ...]
    missing: tuple[Request, ...]
    stale: tuple[Run, ...] = ()  # runs of some of the missing, which measured other weights or another text


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
    elsewhere: tuple[
        Standing, ...
    ] = ()  # finished rows that measured other weights or another text: never shown beside

    @property
    def active(self) -> int:
        """How many runs may still change."""
        return sum(row.state in ACTIVE for row in self.rows)

    @property
    def finished(self) -> int:
        """How many runs have their numbers."""
        return sum(row.state == FINISHED for row in self.rows)


def plan(store: Store, requests: Sequence[Request], present: Content = Content()) -> StudyPlan:
    """Which of these requests are answered already, so that nothing is measured twice and nothing is mistaken for
    another.

    `present` is what lies at the paths now, where the caller has read it; the store knows what runs found there. Runs
    of other contents are measured again.
    """
    answered, missing, stale = list[Run](), list[Request](), list[Run]()
    for request in requests:
        run = store.last_like(request)
        if run and not content_of(run).is_other(present):
            answered.append(run)
            continue
        missing.append(request)
        outdated = store.newest_like(request)
        stale += [outdated] if outdated else []
    return StudyPlan(tuple(answered), tuple(missing), tuple(stale))


def content_of(run: Run) -> Content:
    """What a run measured, as far as it got."""
    return Content(run.model_hash or "", run.corpus_hash or "")


def of_study(store: Store, study_id: str) -> Evidence:
    """What a study has: its own runs, and those of other studies that answer the rest of its question.

    Raises StoreError where there is no such study.
    """
    own = store.study_runs(study_id)
    (study,) = store.studies(ids=[study_id])
    question = study.question
    if question is None or not own:
        return of_runs(store, Question("own", study.name, "", ()), [run.id for run in own])
    reused = [run.id for run in _of_others(store, question, own)]
    return of_runs(store, question, [run.id for run in own] + reused, reused=reused)


def _of_others(store: Store, question: Question, own: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of other studies that answer what a study's own leave open; none where its requests are refused today."""
    measured = {run.recipe for run in own}
    try:
        requests = question.requests(own[0].request)
    except InvalidChoice:  # of a version that accepted more: a path that began nowhere, say
        return ()
    return plan(store, [request for request in requests if request.recipe not in measured]).answered


def of_runs(store: Store, question: Question, run_ids: Sequence[str], *, reused: Sequence[str] = ()) -> Evidence:
    """What these runs say about a question; unknown ids are skipped."""
    every = comparison.standings(store, states=STATES, ids=run_ids)
    rows, elsewhere = _of_one_content(every)
    finished = [row for row in rows if row.state == FINISHED]
    facts = {run.id: run.facts for run in store.runs(ids=run_ids)}
    wanted = {extra.name for extra in question.extras}
    have = {row.recipe for row in rows}
    missing = [text for text in question.recipes if recipe_from(text).text not in have]
    return Evidence(
        question,
        tuple(rows),
        frozenset(reused),
        tuple(map(_name, missing)),
        store.windows(run_ids),
        store.measurements(run_ids, wanted) if wanted else {},
        store.sensitivities(run_ids),
        comparison.unlike(finished, [facts[row.run] for row in finished]),
        tuple(elsewhere),
    )


def _of_one_content(rows: Sequence[Standing]) -> tuple[list[Standing], list[Standing]]:
    """The rows that measured what the last finished one did, with those that measured nothing yet; and the rest."""
    finished = [row for row in rows if row.state == FINISHED]
    if not finished:
        return list(rows), []
    last = max(finished, key=lambda row: row.finished)
    now = Content(last.model_content, last.corpus_content)
    others = [row for row in finished if Content(row.model_content, row.corpus_content).is_other(now)]
    return [row for row in rows if row not in others], others


def _name(text: str) -> str:
    return preset_of(recipe_from(text)) or text
