"""How runs stand: a narrow row a run, and the one query that pages, reports and command line read. No torch, no pages.

The row is written again from what is stored, by `stand`, in each transaction that changes it. Numbers are ranked only
among runs of one `group`: model and corpus by the hashes of their contents, windows, method and device; and of one
backend. Baselines have no rank.
"""

import hashlib
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, and_, case, func, or_, select
from sqlalchemy.orm import Session, aliased

from db.board import MOST_UNCAST, Choice, Facets, Group, Standing
from db.rows import FINISHED, State
from db.tables import MeasurementTable, RunTable, StandingTable, StudyTable, WindowTable
from fp8dash.choose.casts import KvCast
from fp8dash.choose.recipe import Recipe, parse_recipe
from fp8dash.choose.records import BASELINE
from fp8dash.errors import InvalidChoice
from fp8dash.stats import paired_difference

COPIED = (  # the measurements that a row repeats, by the names of its columns
    "ppl", "ln_ppl_diff", "ln_ppl_diff_low", "ln_ppl_diff_high", "kld", "kld_low", "kld_high", "kld_noise_floor",
    "top1", "needle", "gemm_speedup", "bits_per_weight", "coverage", "uncast_share", "model_bytes", "weight_sqnr_db",
)  # fmt: skip
LARGEST = 1e308  # what is beyond is infinite, and never ranks
SORTS = ("kld", "ln_ppl_diff", "top1", "ppl", "needle", "gemm_speedup", "bits_per_weight", "model_bytes", "finished")
NOTE_LENGTH = 2_000  # characters


def first_standing(run: RunTable, study: str) -> StandingTable:
    """The row of a run that is queued: what was asked, no number yet."""
    row = StandingTable(
        run_id=run.id,
        created_at=run.created_at,
        model=run.model,
        recipe=run.recipe,
        preset=run.preset,
        owner=run.owner,
        study=study,
        corpus=run.corpus,
        pinned=False,
        note="",
        note_by="",
        words=_words(run, study),
        **_request_columns(run, ""),
    )
    row.formats, row.tiles = recipe_facets(run.recipe)
    return row


def stand(session: Session, run_id: str) -> None:
    """Write a run's row again, from the run, its unlabelled measurements and its windows."""
    session.flush()
    run = session.get_one(RunTable, run_id)
    row = session.get(StandingTable, run_id)
    if row is None:
        study = session.scalar(select(StudyTable.name).where(StudyTable.id == run.study_id)) or ""
        row = first_standing(run, study)
        session.add(row)
    measured = select(MeasurementTable).where(MeasurementTable.run_id == run_id, MeasurementTable.label == "")
    rows = {m.name: m for m in session.scalars(measured)}
    values = {name: _stored(rows[name]) for name in COPIED if name in rows}
    if "kld" in values and "kld_low" not in values:
        klds = session.scalars(select(WindowTable.kld).where(WindowTable.run_id == run_id).order_by(WindowTable.index))
        values |= kld_bounds(klds.all())
    scored = rows.get("kld") or rows.get("ppl")  # a checkpoint without a baseline has the second alone
    method = scored.method if scored else ""
    read = int(rows["scored_windows"].value or 0) if "scored_windows" in rows else None  # fewer where a run stopped
    changed = {
        "backend": run.backend,
        "device": run.device,
        "device_kind": run.device_kind,
        **_request_columns(run, method, read),
    }
    if row.recipe != run.recipe:  # what a checkpoint stores is known once it was read
        formats, tiles = recipe_facets(run.recipe)
        changed |= {"recipe": run.recipe, "formats": formats, "tiles": tiles, "words": _words(run, row.study)}
    changed["finished_at"] = run.finished_at if run.state == FINISHED else None
    for column, value in (values | changed).items():
        setattr(row, column, value)


def kld_bounds(klds: Sequence[float]) -> dict[str, float | None]:
    """The 95 % interval of the mean over windows; empty where there are none.

    >>> kld_bounds([0.5, 0.5, 0.5, 0.5])
    {'kld_low': 0.5, 'kld_high': 0.5}
    """
    if not klds:
        return {}
    spread = paired_difference(klds, [0.0] * len(klds))
    return {"kld_low": spread.low, "kld_high": spread.high}


def recipe_facets(recipe: str) -> tuple[str, str]:
    """The formats and the tiles of a recipe's casts, each name between spaces.

    >>> recipe_facets("w=e4m3fn/128x128 a=e4m3fn/1x128"), recipe_facets("BF16")
    ((' e4m3fn ', ' 128x128 1x128 '), (' ', ' '))
    """
    try:
        parsed = parse_recipe(recipe)
    except InvalidChoice:  # written by another version
        parsed = Recipe()
    casts = [cast for cast in (parsed.weights, parsed.activations, parsed.kv, parsed.attention) if cast]
    pictures = [cast.picture if isinstance(cast, KvCast) else cast for cast in casts]
    return _between(cast.format.name for cast in casts), _between(cast.tile.name for cast in pictures)


def rows(session: Session, choice: Choice) -> list[Standing]:
    """The rows of a choice, ranked among all their finished peers, whatever else narrows the choice."""
    ranks = _ranks(choice).subquery("ranks")
    wanted = select(StandingTable.run_id).where(*_where(choice))
    wanted = wanted.order_by(*_order(choice)).limit(choice.limit).offset(choice.offset or None)
    query = (
        select(*_ROW, RunTable.state, RunTable.error, ranks.c.rank)
        .select_from(StandingTable)
        .join(RunTable, RunTable.id == StandingTable.run_id)
        .outerjoin(ranks, ranks.c.run_id == StandingTable.run_id)
        .where(StandingTable.run_id.in_(wanted))
        .order_by(*_order(choice))
    )
    return [_standing(row, state=row.state, error=row.error, rank=row.rank) for row in session.execute(query)]


def count(session: Session, choice: Choice) -> int:
    """How many rows a choice has."""
    return session.scalar(select(func.count()).select_from(StandingTable).where(*_where(choice))) or 0


def newest_by_recipe(session: Session, groups: Sequence[str]) -> list[Standing]:
    """Of each backend and recipe in some groups the run that finished last: what may be shipped. Without ranks."""
    s = StandingTable
    kind = (s.group_key, s.backend, s.recipe)
    last = select(*kind, func.max(s.finished_at).label("finished_at")).where(s.group_key.in_(groups))
    newest = last.where(s.finished_at.is_not(None)).group_by(*kind).subquery("newest")
    same = [newest.c[column.key] == column for column in (*kind, s.finished_at)]
    query = select(*_ROW).select_from(s).join(RunTable, RunTable.id == s.run_id).join(newest, and_(*same))
    query = query.order_by(s.kld.nulls_last(), s.created_at)
    by_recipe: dict[tuple[str, str | None, str], Standing] = {}
    for row in session.execute(query):
        by_recipe.setdefault((row.group_key, row.backend, row.recipe), _standing(row))
    return list(by_recipe.values())


def groups(session: Session) -> list[Group]:
    """The groups that have finished runs, by backend; the largest first."""
    s, one = StandingTable, aliased(StandingTable)
    kind = (s.group_key, s.backend)
    sizes = select(*kind, func.count().label("size"), func.max(s.finished_at).label("newest"))
    sizes = sizes.where(s.finished_at.is_not(None)).group_by(*kind)
    counted = sizes.subquery("sizes")
    example = select(one.run_id).where(one.group_key == counted.c.group_key, one.backend == counted.c.backend).limit(1)
    query = select(counted.c.size, counted.c.newest, s, RunTable.model_hash, RunTable.corpus_hash)
    query = (
        query.select_from(counted)
        .join(s, s.run_id == example.scalar_subquery())
        .join(RunTable, RunTable.id == s.run_id)
    )
    query = query.order_by(counted.c.size.desc(), counted.c.newest.desc())
    return [
        Group(
            row.group_key,
            row.backend or "",
            size,
            _iso(newest),
            row.model,
            row.corpus,
            row.windows,
            row.window_length,
            row.device,
            row.method,
            model_hash or "",
            corpus_hash or "",
        )
        for size, newest, row, model_hash, corpus_hash in session.execute(query)
    ]


def facets(session: Session, groups: Sequence[str], *, studies: int) -> Facets:
    """What the rows of some groups can be narrowed by; of studies, only the newest ones."""
    s = StandingTable
    kind = (s.owner, s.formats, s.tiles)
    kinds = session.execute(select(*kind).where(s.group_key.in_(groups)).group_by(*kind)).all()
    named = select(StudyTable.name).order_by(StudyTable.created_at.desc()).limit(studies)
    return Facets(
        tuple(sorted({name for row in kinds for name in row.formats.split()})),
        tuple(sorted({name for row in kinds for name in row.tiles.split()})),
        tuple(sorted({row.owner for row in kinds})),
        tuple(dict.fromkeys(session.scalars(named))),
    )


def front(session: Session, choice: Choice, x: str, better: str) -> list[Standing]:
    """The Pareto front of a choice: rows that no other beats in both KLD and `x`, the lowest KLD first.

    At the noise floor all KLDs are equal. Baselines are left out: they are what the rest is measured against.
    """
    column = getattr(StandingTable, x)
    value = -column if better == "lower" else column
    before = func.max(value).over(order_by=(_divergence(), value.desc()), rows=(None, -1))
    rankable = (StandingTable.kld <= LARGEST, StandingTable.backend != BASELINE, column.is_not(None))
    judged = select(StandingTable.run_id, value.label("value"), before.label("before"))
    judged = judged.where(*_where(choice), *rankable)
    inner = judged.subquery("judged")
    best = select(inner.c.run_id).where(or_(inner.c.before.is_(None), inner.c.value > inner.c.before))
    query = select(*_ROW).select_from(StandingTable).join(RunTable, RunTable.id == StandingTable.run_id)
    query = query.where(StandingTable.run_id.in_(best)).order_by(StandingTable.kld)
    return [_standing(row) for row in session.execute(query)]


def _divergence() -> ColumnElement[float]:
    """`Standing.divergence`, in the database."""
    s = StandingTable
    floor = func.coalesce(s.kld_noise_floor, 0.0)
    return case((or_(s.kld <= floor, s.kld <= 0.0), 0.0), else_=s.kld)


def _leaving_out() -> list[ColumnElement[bool]]:
    """`board.leaves_out`, in the database: recipes' texts are canonical."""
    recipe = StandingTable.recipe
    return [recipe.contains(" skip="), recipe.contains("]=bf16"), recipe.startswith("kv="), recipe.startswith("attn=")]


def _ranks(choice: Choice) -> Select[str, int]:
    """Rank by KLD within group and backend, over the choice's groups."""
    s = StandingTable
    rank = func.rank().over(partition_by=(s.group_key, s.backend), order_by=_divergence()).label("rank")
    ranked: Select[str, int] = select(s.run_id, rank).where(
        s.finished_at.is_not(None), s.kld <= LARGEST, s.backend.is_not(None), s.backend != BASELINE
    )
    ranked = ranked.where(or_(s.uncast_share.is_(None), s.uncast_share <= MOST_UNCAST, *_leaving_out()))
    if choice.groups:
        return ranked.where(s.group_key.in_(choice.groups))
    if choice.ids is not None:
        return ranked.where(s.group_key.in_(select(s.group_key).where(s.run_id.in_(choice.ids))))
    return ranked


def _where(choice: Choice) -> list[ColumnElement[bool]]:
    s = StandingTable
    columns = {
        "groups": s.group_key,
        "backends": s.backend,
        "models": s.model,
        "devices": s.device,
        "owners": s.owner,
        "studies": s.study,
        "pins": s.pinned,
    }
    conditions: list[ColumnElement[bool]]
    conditions = [column.in_(wanted) for name, column in columns.items() if (wanted := getattr(choice, name))]
    for text, names in ((s.formats, choice.formats), (s.tiles, choice.tiles)):
        if names:
            conditions.append(or_(*(text.contains(f" {name} ", autoescape=True) for name in names)))
    conditions += [s.words.contains(word, autoescape=True) for word in choice.search.lower().split()]
    if choice.ids is not None:
        conditions.append(s.run_id.in_(choice.ids))
    if choice.states == (FINISHED,):
        conditions.append(s.finished_at.is_not(None))
    elif choice.states:
        conditions.append(s.run_id.in_(select(RunTable.id).where(RunTable.state.in_(choice.states))))
    return conditions


def _order(choice: Choice) -> tuple[Any, ...]:
    """By the chosen number, what is missing last; then the oldest first."""
    if choice.sort not in SORTS:
        raise InvalidChoice(f"Rows cannot be sorted by “{choice.sort}”: choose one of {', '.join(SORTS)}.")
    s = StandingTable
    column = s.finished_at if choice.sort == "finished" else getattr(s, choice.sort)
    way = column.desc() if choice.order == "descending" else column.asc()
    return (way.nulls_last(), s.created_at, s.run_id)


_SAME = (
    "model", "recipe", "preset", "owner", "backend", "device", "device_kind", "study", "corpus", "windows",
    "window_length", "method", "pinned", "note", "note_by", *COPIED,
)  # fmt: skip
_ROW = (
    *(getattr(StandingTable, name) for name in (*_SAME, "run_id", "group_key", "created_at", "finished_at", "note_at")),
    RunTable.model_hash,
    RunTable.corpus_hash,
)


def _standing(row: Any, state: State = FINISHED, error: str | None = None, rank: int | None = None) -> Standing:
    return Standing(
        run=row.run_id,
        state=state,
        error=error,
        rank=rank,
        group=row.group_key,
        created=_iso(row.created_at),
        finished=_iso(row.finished_at),
        note_at=_iso(row.note_at),
        model_hash=row.model_hash or "",
        corpus_hash=row.corpus_hash or "",
        **{name: getattr(row, name) for name in _SAME},
    )


def _request_columns(run: RunTable, method: str, read: int | None = None) -> dict[str, Any]:
    """What the request says of how it measures, how many windows were read, and the group that follows from it."""
    windows, length = read or int(run.request["windows"]), int(run.request["window_length"])
    parts = (run.model_hash or run.model, run.corpus_hash or run.corpus, windows, length, method, run.device)
    return {"windows": windows, "window_length": length, "method": method, "group_key": group_key(parts)}


def group_key(parts: Iterable[Any]) -> str:
    """The same for the same parts.

    >>> group_key(("m", "c", 8, 512, "kld/1", None))
    'f049dff8e4d381e8'
    """
    return hashlib.sha256(" · ".join(str(part) for part in parts).encode()).hexdigest()[:16]


def _stored(m: MeasurementTable) -> float | None:
    """A measurement's value; one that is not a number ranks as missing."""
    value = float(m.special) if m.special else m.value
    return None if value is None or math.isnan(value) else value


def _words(run: RunTable, study: str) -> str:
    return " ".join((run.preset or "", run.recipe, run.model, study, run.owner, run.id)).lower()


def _between(names: Iterable[str]) -> str:
    return f" {' '.join(dict.fromkeys(names))} " if (names := list(names)) else " "


def _iso(moment: datetime | None) -> str:
    return moment.isoformat(timespec="seconds") if moment else ""
