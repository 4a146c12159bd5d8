"""The leaderboard's rows have the noise floor of their baseline."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("standing", schema=None) as batch_op:
        batch_op.add_column(sa.Column("kld_noise_floor", sa.Float(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("standing", schema=None) as batch_op:
        batch_op.drop_column("kld_noise_floor")
