"""How runs come in, and which stored run answers a request already. Functions of one transaction; the store calls them.

A path is no identity: what lies there may have changed since a run read it. So a finished run answers a request only
while its hashes are the newest that are known of its model and corpus, and nothing on this machine was written since.
"""

import hashlib
import json
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sqlalchemy import Select, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from db.rows import ACTIVE, FINISHED, QUEUED
from db.standings import first_standing
from db.tables import RunTable, StudyTable
from fp8dash.choose.limits import LONGEST_OWNER, LONGEST_STUDY, readable_name
from fp8dash.choose.presets import name_of
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.request import Request
from fp8dash.choose.studies import Question

READ = {".safetensors", ".json", ".bin", ".pt", ".gguf", ".model", ".txt", ".jinja", ".tiktoken"}  # of a model's folder
AT_ONCE = 500  # values of one IN


def request_key(request: Request) -> str:
    """The same for the same request, whoever asks, and also once a request has more fields: defaults are left out."""
    return hashlib.sha256(json.dumps(request.unusual(), sort_keys=True).encode()).hexdigest()


def submit(
    session: Session, requests: Sequence[Request], owner: str, study: StudyTable | None
) -> list[tuple[str, bool]]:
    """Of each checked request its run's id, and whether it is new: one that is active is answered with its run."""
    keys = [request_key(request) for request in requests]
    ids = _active(session, keys)
    runs: list[RunTable] = []
    answers = []
    for key, request in zip(keys, requests, strict=True):
        if is_new := key not in ids:
            runs.append(_queued(request, key, owner, study))
            ids[key] = runs[-1].id
        answers.append((ids[key], is_new))
    session.add_all(runs)
    session.flush()
    session.add_all([first_standing(run, study.name if study else "") for run in runs])
    return answers


def last_like(session: Session, request: Request) -> str | None:
    """The newest run of the same checked request that is finished or will be, and that measured what lies there now."""
    return next((run.id for run in session.scalars(_like(request)) if _is_current(session, run)), None)


def newest_like(session: Session, request: Request) -> str | None:
    """The newest run of the same checked request that is finished or will be, whatever contents it measured."""
    run = session.scalar(_like(request).limit(1))
    return run.id if run else None


def _like(request: Request) -> Select[RunTable]:
    same = (RunTable.request_hash == request_key(request), RunTable.state.in_((*ACTIVE, FINISHED)))
    return select(RunTable).where(*same).order_by(RunTable.created_at.desc())


def changed_since(place: str, moment: datetime) -> bool:
    """Whether a file, or one that a model's folder is read from, was written after a moment.

    False for what is not on this machine: a name of the Hub's, a path of another machine's.
    """
    path = Path(place)
    if not path.is_absolute():
        return False
    try:
        files = [file for file in path.iterdir() if file.suffix in READ] if path.is_dir() else [path]
        return any(max(s.st_mtime, s.st_ctime) > moment.timestamp() for s in (file.stat() for file in files))
    except (OSError, ValueError):
        return False


def new_study(name: str, owner: str, question: Question | None = None) -> StudyTable:
    """A study's row, with what it asks; raises InvalidChoice where its name or owner cannot be."""
    name = readable_name(name, "study", LONGEST_STUDY, "FP8 tiles")
    grid = question.grid if question else None
    return StudyTable(
        id=_new_id(),
        name=name,
        owner=named_owner(owner),
        created_at=datetime.now(UTC),
        question=question.name if question and grid is None else None,
        grid=grid.to_json() if grid else None,
    )


def named_owner(owner: str) -> str:
    """The owner's name, trimmed; raises InvalidChoice where it cannot be."""
    return readable_name(owner, "owner", LONGEST_OWNER, "ada")


def _active(session: Session, keys: Sequence[str]) -> dict[str, str]:
    """The ids of queued and running runs by their requests' keys."""
    ids: dict[str, str] = {}
    for start in range(0, len(keys), AT_ONCE):
        asked = RunTable.request_key.in_(keys[start : start + AT_ONCE])
        rows = session.execute(select(RunTable.request_key, RunTable.id).where(asked))
        ids |= {str(key): run_id for key, run_id in rows}
    return ids


def _queued(request: Request, key: str, owner: str, study: StudyTable | None) -> RunTable:
    return RunTable(
        id=_new_id(),
        study_id=study.id if study else None,
        owner=owner,
        model=request.model,
        recipe=request.recipe,
        preset=name_of(parse_recipe(request.recipe)),
        corpus=request.corpus,
        request=request.to_json(),
        request_key=key,
        request_hash=key,
        state=QUEUED,
        facts={},
        created_at=datetime.now(UTC),
    )


def _is_current(session: Session, run: RunTable) -> bool:
    """Whether a run measured, or will measure, what its model's and its corpus's path hold now, as far as is known."""
    pairs = ((RunTable.model, RunTable.model_hash), (RunTable.corpus, RunTable.corpus_hash))
    for place, content in pairs:
        measured = getattr(run, content.key)
        if measured is not None and measured != _newest(session, place, content, getattr(run, place.key)):
            return False
    if run.state != FINISHED or run.started_at is None:
        return True
    places = (run.model, run.corpus, parse_recipe(run.recipe).stored)
    return not any(changed_since(place, run.started_at) for place in places)


def _newest(session: Session, place: InstrumentedAttribute[str], content: Any, path: str) -> str | None:
    """The hash that the run which started last found at a path."""
    hashes = select(content).where(place == path, content.is_not(None)).order_by(RunTable.started_at.desc()).limit(1)
    return session.scalar(hashes)


def _new_id() -> str:
    return uuid.uuid4().hex[:12]
