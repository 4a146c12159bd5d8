"""Sensitivity by group; of each GEMM point its spread, its times from a cold cache and the bytes it moves."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

POINT = (
    "baseline_iqr", "cast_iqr", "matmul_iqr", "baseline_cold_us", "cast_cold_us", "matmul_cold_us", "matmul_bytes",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "sensitivity",
        sa.Column("group", sa.Text(), nullable=False),
        sa.Column("pattern", sa.Text(), nullable=False),
        sa.Column("linears", sa.Integer(), nullable=False),
        sa.Column("parameters", sa.BigInteger(), nullable=False),
        sa.Column("bits_per_weight", sa.Float(), nullable=False),
        sa.Column("alone_kld", sa.Float(), nullable=False),
        sa.Column("all_but_kld", sa.Float(), nullable=False),
        sa.Column("kept", sa.Boolean(), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_sensitivity_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_sensitivity")),
    )
    with op.batch_alter_table("sensitivity", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_sensitivity_run_id"), ["run_id"], unique=False)
    for name in POINT:
        op.add_column("gemm_point", sa.Column(name, sa.Float(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("gemm_point", schema=None) as batch_op:
        for name in POINT:
            batch_op.drop_column(name)
    with op.batch_alter_table("sensitivity", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_sensitivity_run_id"))

    op.drop_table("sensitivity")
