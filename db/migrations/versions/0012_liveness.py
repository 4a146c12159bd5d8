"""Who holds a slot, counters that show who is alive, and which deaths a run caused; runs by model and by corpus."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("worker", schema=None) as batch_op:
        batch_op.add_column(sa.Column("slot_key", sa.String(length=128), nullable=True))
        batch_op.add_column(sa.Column("process", sa.Text(), server_default="", nullable=False))
        batch_op.add_column(sa.Column("beats", sa.Integer(), server_default="0", nullable=False))
        batch_op.create_unique_constraint(batch_op.f("uq_worker_slot_key"), ["slot_key"])
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.add_column(sa.Column("deaths", sa.Integer(), server_default="0", nullable=False))
        batch_op.add_column(sa.Column("starts", sa.Integer(), server_default="0", nullable=False))
        batch_op.create_index(batch_op.f("ix_run_model_started_at"), ["model", "started_at"], unique=False)
        batch_op.create_index(batch_op.f("ix_run_corpus_started_at"), ["corpus", "started_at"], unique=False)


def downgrade() -> None:
    with op.batch_alter_table("run", schema=None) as batch_op:
        batch_op.drop_index(batch_op.f("ix_run_corpus_started_at"))
        batch_op.drop_index(batch_op.f("ix_run_model_started_at"))
        batch_op.drop_column("starts")
        batch_op.drop_column("deaths")
    with op.batch_alter_table("worker", schema=None) as batch_op:
        batch_op.drop_constraint(batch_op.f("uq_worker_slot_key"), type_="unique")
        batch_op.drop_column("beats")
        batch_op.drop_column("process")
        batch_op.drop_column("slot_key")
