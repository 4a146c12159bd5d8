"""The store: one method per question or change, each one transaction, plain values in and out.

What a worker may change stands in `db/claims.py`. Errors of the database leave as StoreError with a sentence.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TypeVar

from sqlalchemy import func, or_, select, update
from sqlalchemy.engine import make_url
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from db import standings, submissions
from db.board import Choice, Facets, Group, Standing
from db.opened import engine_of, migrate, sentences
from db.pulse import Pulse, database_now
from db.records import ROW_TABLES, record_of, request_of
from db.rows import (
    FINISHED,
    STATES,
    Run,
    Stage,
    Study,
    Worker,
)
from db.standings import NOTE_LENGTH
from db.tables import (
    LayerTable,
    MeasurementTable,
    RunTable,
    StageTable,
    StandingTable,
    StudyTable,
    TensorProfileTable,
    WorkerTable,
)
from fp8dash.choose.limits import LONGEST_OWNER, readable_name
from fp8dash.choose.records import (
    CONVOLUTION,
    EMBEDDING,
    NORM,
    Artefact,
    GemmPoint,
    LadderPoint,
    Layer,
    Measurement,
    NeedleCell,
    Sensitivity,
    TaskItem,
    TensorProfile,
    Window,
)
from fp8dash.choose.request import Request
from fp8dash.choose.studies import Question, question_of
from fp8dash.errors import InvalidChoice, StoreError

TRIES = 3  # of a transaction that meets another's identical request
Found = TypeVar("Found")


class Store:
    """The database behind one URL, migrated when opened."""

    def __init__(self, url: str) -> None:
        """Open, create or migrate; raises StoreError where the database is newer, locked or out of reach."""
        self.url, self._pulse = url, Pulse()
        self._engine = engine_of(url)
        with sentences(url):
            migrate(self._engine, url)

    @property
    def place(self) -> str:
        """The database's URL, fit for the screen: without its password."""
        return make_url(self.url).render_as_string(hide_password=True)

    def close(self) -> None:
        """Give back all connections."""
        self._engine.dispose()

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One transaction; its errors leave as StoreError."""
        with sentences(self.url), Session(self._engine, expire_on_commit=False) as session, session.begin():
            yield session

    def add_study(self, name: str, owner: str, question: Question | None = None) -> str:
        """A new study's id; raises InvalidChoice where its name or owner is empty."""
        study = submissions.new_study(name, owner, question)
        with self.session() as session:
            session.add(study)
        return study.id

    def add_run(self, request: Request, *, owner: str, study_id: str | None = None) -> tuple[str, bool]:
        """A queued run's id, and whether it is new: an identical request still active is answered with its run."""
        checked, owner = request.checked(), submissions.named_owner(owner)

        def change(session: Session) -> tuple[str, bool]:
            study = session.get(StudyTable, study_id) if study_id else None
            return submissions.submit(session, [checked], owner, study)[0]

        return self._unless_taken(change)

    def add_runs(
        self, requests: Sequence[Request], *, owner: str, study: str, question: Question | None = None
    ) -> list[str]:
        """The runs of a new study, in order; a request that is queued or running already is answered with its run.

        Where all are, no study is made. `question` is what the study asks; None for one of somebody's own. Raises
        InvalidChoice where study or owner has no name.
        """
        checked = [request.checked() for request in requests]

        def change(session: Session) -> list[str]:
            made = submissions.new_study(study, owner, question)
            session.add(made)
            session.flush()
            answers = submissions.submit(session, checked, made.owner, made)
            if not any(is_new for _, is_new in answers):
                session.delete(made)
            return [run_id for run_id, _ in answers]

        return self._unless_taken(change)

    def _unless_taken(self, change: Callable[[Session], Found]) -> Found:
        """One transaction, begun again where somebody queued the same request in between."""
        for _ in range(TRIES - 1):
            try:
                with self.session() as session:
                    return change(session)
            except IntegrityError:
                continue
        with self.session() as session:
            return change(session)

    def run(self, run_id: str) -> Run:
        """One run; raises StoreError where there is none."""
        with self.session() as session:
            row = session.execute(_runs().where(RunTable.id == run_id)).first()
        if row is None:
            raise StoreError(f"There is no run {run_id}: `fp8dash runs` lists them.")
        return _run(*row)

    def runs(
        self,
        *,
        states: Sequence[str] = STATES,
        ids: Sequence[str] | None = None,
        search: str = "",
        model: str = "",
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Run]:
        """Runs, newest first; those of one submission in the order in which they were submitted."""
        query = _runs().where(*_wanted(states, search))
        if ids is not None:
            query = query.where(RunTable.id.in_(ids))
        if model:
            query = query.where(RunTable.model == model)
        query = query.order_by(RunTable.created_at.desc(), RunTable.id).limit(limit).offset(offset or None)
        with self.session() as session:
            return [_run(*row) for row in session.execute(query)]

    def count(self, *, states: Sequence[str] = STATES, search: str = "") -> int:
        """How many runs `runs` would find without a limit."""
        with self.session() as session:
            return session.scalar(select(func.count()).select_from(RunTable).where(*_wanted(states, search))) or 0

    def last_like(self, request: Request) -> Run | None:
        """The newest run of the same request that is finished or will be, None where there is none.

        One that measured another content of the same path than the newest known is not the same.
        """
        with self.session() as session:
            run_id = submissions.last_like(session, request.checked())
        return self.run(run_id) if run_id else None

    def newest_like(self, request: Request) -> Run | None:
        """The newest run of the same request that is finished or will be, whatever contents it measured."""
        with self.session() as session:
            run_id = submissions.newest_like(session, request.checked())
        return self.run(run_id) if run_id else None

    def standings(self, choice: Choice) -> list[Standing]:
        """The leaderboard's rows of a choice."""
        with self.session() as session:
            return standings.rows(session, choice)

    def standing_count(self, choice: Choice) -> int:
        """How many rows a choice has, whatever its limit."""
        with self.session() as session:
            return standings.count(session, choice)

    def newest_by_recipe(self, groups: Sequence[str]) -> list[Standing]:
        """Of each backend and recipe in some groups the run that finished last, the lowest KLD first."""
        with self.session() as session:
            return standings.newest_by_recipe(session, groups)

    def groups(self) -> list[Group]:
        """The groups of runs that may be ranked together, by backend, the largest first."""
        with self.session() as session:
            return standings.groups(session)

    def facets(self, groups: Sequence[str], *, studies: int) -> Facets:
        """What the rows of some groups can be narrowed by; of studies, only the newest ones."""
        with self.session() as session:
            return standings.facets(session, groups, studies=studies)

    def front(self, choice: Choice, x: str, better: str) -> list[Standing]:
        """The rows of a choice that no other beats in both KLD and `x`."""
        with self.session() as session:
            return standings.front(session, choice, x, better)

    def annotate(self, run_id: str, note: str, by: str) -> None:
        """Replace a run's note, an empty one deletes it; raises InvalidChoice for one too long or by nobody."""
        note = note.strip()
        if len(note) > NOTE_LENGTH:
            raise InvalidChoice(f"The note has {len(note):,} characters: at most {NOTE_LENGTH:,} are allowed.")
        by = readable_name(by, "author of the note", LONGEST_OWNER, "ada") if note else ""
        who = {"note_by": by, "note_at": datetime.now(UTC) if note else None}
        self._change_standing(run_id, note=note, **who)

    def pin(self, run_id: str) -> None:
        """Pin a run: rows can be filtered by their pins."""
        self._change_standing(run_id, pinned=True)

    def unpin(self, run_id: str) -> None:
        """Take a run's pin away."""
        self._change_standing(run_id, pinned=False)

    def _change_standing(self, run_id: str, **values: Any) -> None:
        with self.session() as session:
            changed = update(StandingTable).where(StandingTable.run_id == run_id).values(**values)
            if session.scalar(changed.returning(StandingTable.run_id)) is None:
                raise StoreError(f"There is no run {run_id}: `fp8dash runs` lists them.")

    def counts(self) -> dict[str, int]:
        """How many runs are in each state."""
        with self.session() as session:
            rows = session.execute(select(RunTable.state, func.count()).group_by(RunTable.state)).all()
        return {state: 0 for state in STATES} | {state: count for state, count in rows}

    def studies(self, *, ids: Sequence[str] | None = None, limit: int | None = None, offset: int = 0) -> list[Study]:
        """Studies, newest first."""
        query = select(StudyTable).order_by(StudyTable.created_at.desc(), StudyTable.id).limit(limit)
        query = query.offset(offset or None) if ids is None else query.where(StudyTable.id.in_(ids))
        counted = select(RunTable.study_id, RunTable.state, func.count()).group_by(RunTable.study_id, RunTable.state)
        with self.session() as session:
            rows = session.scalars(query).all()
            states: dict[str, dict[str, int]] = {study.id: {} for study in rows}
            for study_id, state, count in session.execute(counted.where(RunTable.study_id.in_(states))):
                states[str(study_id)][state] = count
        return [
            Study(row.id, row.name, row.owner, row.created_at, states[row.id], question_of(row.question, row.grid))
            for row in rows
        ]

    def study_count(self) -> int:
        """How many studies there are."""
        with self.session() as session:
            return session.scalar(select(func.count()).select_from(StudyTable)) or 0

    def study_runs(self, study_id: str) -> list[Run]:
        """The runs of a study, in the order in which they were submitted; raises StoreError where there is no study."""
        query = _runs().where(RunTable.study_id == study_id).order_by(RunTable.created_at, RunTable.id)
        with self.session() as session:
            if session.get(StudyTable, study_id) is None:
                raise StoreError(f"There is no study {study_id}: the page “Studies” lists them.")
            return [_run(*row) for row in session.execute(query)]

    def stages(self, run_ids: Sequence[str]) -> dict[str, list[Stage]]:
        """The finished stages of each run, in order."""
        query = select(StageTable).where(StageTable.run_id.in_(run_ids)).order_by(StageTable.finished_at)
        by_run: dict[str, list[Stage]] = {run_id: [] for run_id in run_ids}
        with self.session() as session:
            for row in session.scalars(query):
                by_run[row.run_id].append(Stage(row.stage, row.seconds, row.finished_at))
        return by_run

    def measurements(self, run_ids: Sequence[str], names: Iterable[str] | None = None) -> dict[str, list[Measurement]]:
        """The measurements of each run, or those of some names."""
        return self._rows(Measurement, run_ids, [MeasurementTable.name.in_(list(names))] if names else [])

    def windows(self, run_ids: Sequence[str]) -> dict[str, list[Window]]:
        """The window scores of each run, by index."""
        return {key: sorted(rows, key=lambda w: w.index) for key, rows in self._rows(Window, run_ids).items()}

    def layers(self, run_ids: Sequence[str]) -> dict[str, list[Layer]]:
        """The layers of each run, in the model's order."""
        return self._rows(Layer, run_ids)

    def linear_shapes(self, run_ids: Sequence[str]) -> dict[str, dict[tuple[int, int], int]]:
        """How many Linears of each shape [out, in] each run's model has, the head among them; none were recorded: {}.

        Embeddings, which are looked up, are left out unless they are the head too; so are norms and convolutions.
        """
        x = LayerTable
        is_product = or_(x.group.not_in((EMBEDDING, NORM, CONVOLUTION)), x.tied)
        query = select(x.run_id, x.rows, x.cols, func.count()).where(x.run_id.in_(run_ids), x.rows > 1, is_product)
        query = query.group_by(x.run_id, x.rows, x.cols)
        by_run: dict[str, dict[tuple[int, int], int]] = {run_id: {} for run_id in run_ids}
        with self.session() as session:
            for run_id, rows, cols, count in session.execute(query):
                by_run[run_id][rows, cols] = count
        return by_run

    def gemm_points(self, run_ids: Sequence[str]) -> dict[str, list[GemmPoint]]:
        """The GEMM times of each run."""
        return self._rows(GemmPoint, run_ids)

    def needle_cells(self, run_ids: Sequence[str]) -> dict[str, list[NeedleCell]]:
        """The needle cells of each run."""
        return self._rows(NeedleCell, run_ids)

    def artefacts(self, run_ids: Sequence[str]) -> dict[str, list[Artefact]]:
        """The files that each run left."""
        return self._rows(Artefact, run_ids)

    def task_items(self, run_ids: Sequence[str]) -> dict[str, list[TaskItem]]:
        """The scores of each run's tasks, by document."""
        return self._rows(TaskItem, run_ids)

    def sensitivities(self, run_ids: Sequence[str]) -> dict[str, list[Sensitivity]]:
        """What casting each group of Linears costs, of each run, in the model's order."""
        return self._rows(Sensitivity, run_ids)

    def profiled(self, limit: int) -> list[Run]:
        """The newest runs whose tensors were profiled."""
        query = _runs().where(RunTable.id.in_(select(TensorProfileTable.run_id).distinct()))
        with self.session() as session:
            return [_run(*row) for row in session.execute(query.order_by(RunTable.created_at.desc()).limit(limit))]

    def decoded(self, devices: Sequence[str], backends: Sequence[str], *, limit: int) -> list[Run]:
        """The newest finished runs of some devices and backends whose decoding was timed."""
        m = MeasurementTable
        timed = select(m.run_id).where(m.name == "decode_tokens_per_s", m.value.is_not(None))
        query = _runs().where(RunTable.id.in_(timed), RunTable.state == FINISHED, RunTable.device.in_(devices))
        query = query.where(RunTable.backend.in_(backends)).order_by(RunTable.created_at.desc()).limit(limit)
        with self.session() as session:
            return [_run(*row) for row in session.execute(query)]

    def tensor_profiles(self, run_ids: Sequence[str]) -> dict[str, list[TensorProfile]]:
        """How wide each run's tensors are, weights first, in the model's order."""
        return self._rows(TensorProfile, run_ids)

    def ladder_points(self, run_ids: Sequence[str]) -> dict[str, list[LadderPoint]]:
        """What casts do to a few of each run's tensors."""
        return self._rows(LadderPoint, run_ids)

    def workers(self) -> list[Worker]:
        """All workers that ever ran, the last started first."""
        with self.session() as session:
            rows = session.scalars(select(WorkerTable).order_by(WorkerTable.started_at.desc())).all()
            now = database_now(session)
        return [self._worker(row, now) for row in rows]

    def _worker(self, row: WorkerTable, now: datetime) -> Worker:
        is_alive = row.state == "alive" and self._pulse.is_felt(row.id, row.beats, now - row.heartbeat_at)
        stored = {f.name: getattr(row, f.name) for f in dataclasses.fields(Worker) if f.name != "is_alive"}
        return Worker(**stored, is_alive=is_alive)

    def _rows(self, kind: type[Any], run_ids: Sequence[str], where: Sequence[Any] = ()) -> dict[str, list[Any]]:
        table: Any = ROW_TABLES[kind]
        by_run: dict[str, list[Any]] = {run_id: [] for run_id in run_ids}
        with self.session() as session:
            for row in session.scalars(select(table).where(table.run_id.in_(run_ids), *where).order_by(table.id)):
                by_run[row.run_id].append(record_of(kind, row))
        return by_run


def _runs() -> Any:
    return select(RunTable, StudyTable.name).outerjoin(StudyTable, StudyTable.id == RunTable.study_id)


def _run(row: RunTable, study: str | None) -> Run:
    request, unreadable = request_of(row)
    derived: dict[str, Any] = {"study": study or "", "request": request, "unreadable": unreadable}
    stored = {f.name: getattr(row, f.name) for f in dataclasses.fields(Run) if f.name not in derived}
    return Run(**stored, **derived)


def _wanted(states: Sequence[str], search: str) -> list[Any]:
    words = [StandingTable.words.contains(word, autoescape=True) for word in search.lower().split()]
    conditions = [RunTable.id.in_(select(StandingTable.run_id).where(*words))] if words else []
    return conditions if tuple(states) == STATES else [RunTable.state.in_(states), *conditions]
