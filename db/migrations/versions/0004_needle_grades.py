"""Needle cells have their kind, repeat, log-probability, the baseline's grades and their prompt's hash."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("needle_cell", schema=None) as batch_op:
        batch_op.add_column(sa.Column("kind", sa.Text(), server_default="single_1", nullable=False))
        batch_op.add_column(sa.Column("repeat", sa.Integer(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("logprob", sa.Float(), nullable=True))
        batch_op.add_column(sa.Column("baseline_score", sa.Float(), nullable=True))
        batch_op.add_column(sa.Column("baseline_logprob", sa.Float(), nullable=True))
        batch_op.add_column(sa.Column("prompt", sa.Text(), server_default="", nullable=False))


def downgrade() -> None:
    with op.batch_alter_table("needle_cell", schema=None) as batch_op:
        for name in ("prompt", "baseline_logprob", "baseline_score", "logprob", "repeat", "kind"):
            batch_op.drop_column(name)
