"""A narrow row a run for the leaderboard, filled from what was measured; which runs asked for the same."""

import math
from collections import defaultdict
from typing import Any

import sqlalchemy as sa
from alembic import op

from db.columns import Instant
from db.standings import group_key, kld_bounds, recipe_facets
from db.submissions import request_key
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

VALUES = (
    "ppl", "ln_ppl_diff", "ln_ppl_diff_low", "ln_ppl_diff_high", "kld", "kld_low", "kld_high", "top1", "needle",
    "gemm_speedup", "bits_per_weight", "coverage", "model_bytes", "weight_sqnr_db",
)  # fmt: skip
BATCH = 500


def upgrade() -> None:
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.add_column(sa.Column("request_hash", sa.String(length=64), nullable=True))
        batch_op.create_index(batch_op.f("ix_run_request_hash"), ["request_hash"], unique=False)
    op.create_table(
        "standing",
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("created_at", Instant(), nullable=False),
        sa.Column("finished_at", Instant(), nullable=True),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("preset", sa.Text(), nullable=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("study", sa.Text(), nullable=False),
        sa.Column("corpus", sa.Text(), nullable=False),
        sa.Column("formats", sa.Text(), nullable=False),
        sa.Column("tiles", sa.Text(), nullable=False),
        sa.Column("words", sa.Text(), nullable=False),
        sa.Column("windows", sa.Integer(), nullable=False),
        sa.Column("window_length", sa.Integer(), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=True),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("group_key", sa.String(length=16), nullable=False),
        *(sa.Column(name, sa.Float(), nullable=True) for name in VALUES),
        sa.Column("pinned", sa.Boolean(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("note_by", sa.Text(), nullable=False),
        sa.Column("note_at", Instant(), nullable=True),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_standing_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_standing")),
    )
    with op.batch_alter_table("standing", schema=None) as batch_op:
        for columns in (
            ["group_key", "backend", "recipe", "finished_at"],
            ["group_key", "backend", "kld", "finished_at", "run_id"],
            ["group_key", "owner", "formats", "tiles"],
            ["created_at"],
        ):
            batch_op.create_index(batch_op.f(f"ix_standing_{'_'.join(columns)}"), columns, unique=False)
    _fill()


def downgrade() -> None:
    op.drop_table("standing")
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_run_request_hash"))
        batch_op.drop_column("request_hash")


def _fill() -> None:
    """One row a run, from tables as they are at this revision."""
    connection, tables = op.get_bind(), sa.MetaData()
    run, standing, study, measurement, window = (
        sa.Table(name, tables, autoload_with=connection)
        for name in ("run", "standing", "study", "measurement", "window_score")
    )
    names = {row.id: row.name for row in connection.execute(sa.select(study.c.id, study.c.name))}
    runs = connection.execute(sa.select(run)).mappings().all()
    for start in range(0, len(runs), BATCH):
        some = runs[start : start + BATCH]
        measured, klds = _numbers(connection, [one["id"] for one in some], measurement, window)
        for one in some:
            values = _row(one, names.get(one["study_id"], ""), measured[one["id"]], klds[one["id"]])
            connection.execute(standing.insert().values(values))
            connection.execute(run.update().where(run.c.id == one["id"]).values(_keys(one)))


def _numbers(
    connection: sa.Connection, ids: list[str], measurement: sa.Table, window: sa.Table
) -> tuple[dict[str, dict[str, Any]], dict[str, list[float]]]:
    m, w = measurement.c, window.c
    wanted = sa.select(m.run_id, m.name, m.value, m.special, m.method)
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in connection.execute(wanted.where(m.run_id.in_(ids), m.name.in_(VALUES), m.label == "")):
        value = float(row.special) if row.special else row.value
        found[row.run_id][row.name] = None if value is None or math.isnan(value) else value
        if row.name == "kld":
            found[row.run_id]["method"] = row.method
    klds: dict[str, list[float]] = defaultdict(list)
    for run_id, kld in connection.execute(sa.select(w.run_id, w.kld).where(w.run_id.in_(ids)).order_by(w.index)):
        klds[run_id].append(kld)
    return found, klds


def _row(run: Any, study: str, measured: dict[str, Any], klds: list[float]) -> dict[str, Any]:
    windows, length = int(run["request"]["windows"]), int(run["request"]["window_length"])
    method, (formats, tiles) = measured.get("method", ""), recipe_facets(run["recipe"])
    parts = (run["model_hash"] or run["model"], run["corpus_hash"] or run["corpus"], windows, length, method)
    same = ("created_at", "model", "recipe", "preset", "owner", "corpus", "backend", "device")
    said = (run["preset"] or "", run["recipe"], run["model"], study, run["owner"], run["id"])
    bounds = kld_bounds(klds) if "kld" in measured else {}
    return {
        "run_id": run["id"], "finished_at": run["finished_at"] if run["state"] == "finished" else None,
        "study": study, "formats": formats, "tiles": tiles, "words": " ".join(said).lower(), "windows": windows,
        "window_length": length, "group_key": group_key((*parts, run["device"])), "pinned": False, "note": "",
        "note_by": "", "method": method, **{name: run[name] for name in same}, **bounds, **measured,
    }  # fmt: skip


def _keys(run: Any) -> dict[str, str]:
    """The request's key, which leaves defaults out from now on."""
    try:
        key = request_key(Request.from_json(run["request"]))
    except (InvalidChoice, TypeError):  # a request of another version stays as it is, and is like no other
        return {"request_key": run["request_key"]}
    return {"request_hash": key, **({"request_key": key} if run["request_key"] else {})}
