"""Each layer says in which part of the model it stands; a standing how much of the blocks was left uncast.

Rows of before are grouped by their names, as they were understood: an embedding is what is called so.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

GROUPS = (  # the first whose word is in a name holds
    ("embed", "embedding"), ("lm_head", "head"), ("norm", "norm"), ("experts", "experts"), ("attn", "attention"),
    ("attention", "attention"), ("mlp", "mlp"),
)  # fmt: skip


def upgrade() -> None:
    with op.batch_alter_table("layer", schema=None) as batch_op:
        batch_op.add_column(sa.Column("group", sa.String(length=16), server_default="other", nullable=False))
        batch_op.add_column(sa.Column("tied", sa.Boolean(), server_default=sa.false(), nullable=False))
    with op.batch_alter_table("standing", schema=None) as batch_op:
        batch_op.add_column(sa.Column("uncast_share", sa.Float(), nullable=True))
    name, group = sa.column("name", sa.Text), sa.column("group", sa.String)
    layer = sa.table("layer", name, group)
    named = sa.case(*((name.contains(word), value) for word, value in GROUPS), else_="other")
    op.execute(layer.update().values(group=named))


def downgrade() -> None:
    with op.batch_alter_table("standing", schema=None) as batch_op:
        batch_op.drop_column("uncast_share")
    with op.batch_alter_table("layer", schema=None) as batch_op:
        batch_op.drop_column("tied")
        batch_op.drop_column("group")
