"""How wide a model's tensors are, and what casts do to a few of them."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tensor_profile",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("rows", sa.Integer(), nullable=False),
        sa.Column("cols", sa.Integer(), nullable=False),
        sa.Column("amax", sa.Float(), nullable=False),
        sa.Column("rms", sa.Float(), nullable=False),
        sa.Column("zeros", sa.BigInteger(), nullable=False),
        sa.Column("outlier_channels", sa.Integer(), nullable=False),
        sa.Column("histogram", sa.JSON(), nullable=False),
        sa.Column("outliers", sa.JSON(), nullable=False),
        *_of_stage("tensor_profile"),
    )
    op.create_table(
        "ladder_point",
        sa.Column("tensor", sa.Text(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("cast", sa.Text(), nullable=False),
        sa.Column("sqnr_db", sa.Float(), nullable=True),
        sa.Column("bulk_sqnr_db", sa.Float(), nullable=True),
        sa.Column("flushed", sa.Float(), nullable=False),
        sa.Column("clipped", sa.Float(), nullable=False),
        sa.Column("bits", sa.Float(), nullable=False),
        *_of_stage("ladder_point"),
    )
    for table in ("tensor_profile", "ladder_point"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.create_index(batch_op.f(f"ix_{table}_run_id"), ["run_id"], unique=False)


def downgrade() -> None:
    for table in ("ladder_point", "tensor_profile"):
        with op.batch_alter_table(table, schema=None) as batch_op:
            batch_op.drop_index(batch_op.f(f"ix_{table}_run_id"))
        op.drop_table(table)


def _of_stage(table: str) -> tuple[sa.schema.SchemaItem, ...]:
    """What every row of a stage carries."""
    return (
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("run_id", sa.String(length=16), nullable=False),
        sa.Column("stage", sa.String(length=32), nullable=False),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name=op.f(f"fk_{table}_run_id"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f(f"pk_{table}")),
    )
