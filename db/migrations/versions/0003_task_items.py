"""Scores of lm-eval tasks, document by document."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "task_item",
        sa.Column("task", sa.Text(), nullable=False),
        sa.Column("metric", sa.Text(), nullable=False),
        sa.Column("index", sa.Integer(), nullable=False),
        sa.Column("digest", sa.String(length=16), nullable=False),
        sa.Column("value", sa.Float(), nullable=False),
        sa.Column("weight", sa.Float(), nullable=False),
        sa.Column("unit", sa.String(length=8), nullable=False),
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f("fk_task_item_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_task_item")),
    )
    with op.batch_alter_table("task_item", schema=None) as batch_op:
        batch_op.create_index(batch_op.f("ix_task_item_run_id"), ["run_id"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("task_item", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_task_item_run_id"))

    op.drop_table("task_item")
