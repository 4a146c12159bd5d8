"""The first schema."""

import sqlalchemy as sa
from alembic import op

from db.tables import Instant

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "study",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("created_at", Instant(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_study")),
    )
    op.create_table(
        "worker",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("pid", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("device_facts", sa.JSON(), nullable=False),
        sa.Column("child_group", sa.Integer(), nullable=True),
        sa.Column("started_at", Instant(), nullable=False),
        sa.Column("heartbeat_at", Instant(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_worker")),
    )
    op.create_table(
        "run",
        sa.Column("id", sa.String(length=16), nullable=False),
        sa.Column("study_id", sa.String(length=16), nullable=True),
        sa.Column("owner", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("recipe", sa.Text(), nullable=False),
        sa.Column("preset", sa.Text(), nullable=True),
        sa.Column("corpus", sa.Text(), nullable=False),
        sa.Column("request", sa.JSON(), nullable=False),
        sa.Column("request_key", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("stage", sa.Text(), nullable=True),
        sa.Column("stage_share", sa.Float(), nullable=False),
        sa.Column("message", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.String(length=32), nullable=True),
        sa.Column("model_hash", sa.Text(), nullable=True),
        sa.Column("corpus_hash", sa.Text(), nullable=True),
        sa.Column("backend", sa.Text(), nullable=True),
        sa.Column("device", sa.Text(), nullable=True),
        sa.Column("facts", sa.JSON(), nullable=False),
        sa.Column("created_at", Instant(), nullable=False),
        sa.Column("started_at", Instant(), nullable=True),
        sa.Column("finished_at", Instant(), nullable=True),
        sa.ForeignKeyConstraint(["study_id"], ["study.id"], name=op.f("fk_run_study_id")),
        sa.ForeignKeyConstraint(["worker_id"], ["worker.id"], name=op.f("fk_run_worker_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_run")),
        sa.UniqueConstraint("request_key", name=op.f("uq_run_request_key")),
    )
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_run_created_at"), ["created_at"], unique=False)
        batch_op.create_index(batch_op.f("ix_run_state_created_at"), ["state", "created_at"], unique=False)
        batch_op.create_index(batch_op.f("ix_run_study_id"), ["study_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_run_worker_id"), ["worker_id"], unique=False)

    op.create_table(
        "gemm_point",
        sa.Column("m", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("k", sa.Integer(), nullable=False),
        sa.Column("count", sa.Integer(), nullable=False),
        sa.Column("baseline_us", sa.Float(), nullable=False),
        sa.Column("cast_us", sa.Float(), nullable=True),
        sa.Column("matmul_us", sa.Float(), nullable=True),
        sa.Column("kernel", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_gemm_point_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_gemm_point")),
    )
    with op.batch_alter_table("gemm_point", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_gemm_point_run_id"), ["run_id"], unique=False)

    op.create_table(
        "layer",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("cols", sa.Integer(), nullable=False),
        sa.Column("cast", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("bits_per_weight", sa.Float(), nullable=False),
        sa.Column("sqnr_db", sa.Float(), nullable=True),
        sa.Column("relative_error", sa.Float(), nullable=True),
        sa.Column("flushed", sa.Float(), nullable=True),
        sa.Column("clipped", sa.Float(), nullable=True),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_layer_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_layer")),
    )
    with op.batch_alter_table("layer", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_layer_run_id"), ["run_id"], unique=False)

    op.create_table(
        "measurement",
        sa.Column("name", sa.String(length=64), nullable=False),
        sa.Column("value", sa.Float(), nullable=True),
        sa.Column("special", sa.String(length=8), nullable=True),
        sa.Column("unit", sa.Text(), nullable=False),
        sa.Column("better", sa.String(length=8), nullable=False),
        sa.Column("method", sa.Text(), nullable=False),
        sa.Column("backend", sa.Text(), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("note", sa.Text(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_measurement_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_measurement")),
    )
    with op.batch_alter_table("measurement", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_measurement_name_run_id"), ["name", "run_id"], unique=False)
        batch_op.create_index(batch_op.f("ix_measurement_run_id"), ["run_id"], unique=False)

    op.create_table(
        "needle_cell",
        sa.Column("length", sa.Integer(), nullable=False),
        sa.Column("depth", sa.Integer(), nullable=False),
        sa.Column("score", sa.Float(), nullable=False),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column("expected", sa.Text(), nullable=False),
        sa.Column("answer", sa.Text(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_needle_cell_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_needle_cell")),
    )
    with op.batch_alter_table("needle_cell", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_needle_cell_run_id"), ["run_id"], unique=False)

    op.create_table(
        "stage",
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.Column("seconds", sa.Float(), nullable=False),
        sa.Column("finished_at", Instant(), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_stage_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run_id", "stage", name=op.f("pk_stage")),
    )
    op.create_table(
        "window_score",
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("tokens", sa.Integer(), nullable=False),
        sa.Column("nll", sa.Float(), nullable=False),
        sa.Column("baseline_nll", sa.Float(), nullable=False),
        sa.Column("kld", sa.Float(), nullable=False),
        sa.Column("top1", sa.Float(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_window_score_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_window_score")),
    )
    with op.batch_alter_table("window_score", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_window_score_run_id"), ["run_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("window_score", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_window_score_run_id"))

    op.drop_table("window_score")
    op.drop_table("stage")
    with op.batch_alter_table("needle_cell", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_needle_cell_run_id"))

    op.drop_table("needle_cell")
    with op.batch_alter_table("measurement", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_measurement_run_id"))
        batch_op.drop_index(batch_op.f("ix_measurement_name_run_id"))

    op.drop_table("measurement")
    with op.batch_alter_table("layer", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_layer_run_id"))

    op.drop_table("layer")
    with op.batch_alter_table("gemm_point", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_gemm_point_run_id"))

    op.drop_table("gemm_point")
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_run_worker_id"))
        batch_op.drop_index(batch_op.f("ix_run_study_id"))
        batch_op.drop_index(batch_op.f("ix_run_state_created_at"))
        batch_op.drop_index(batch_op.f("ix_run_created_at"))

    op.drop_table("run")
    op.drop_table("worker")
    op.drop_table("study")
