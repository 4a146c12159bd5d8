"""What a measured speed of decoding is of, in columns: batch, tokens of each request, and the way of decoding."""

import re

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

COLUMNS = ("batch", "prompt_tokens", "output_tokens")
LABEL = re.compile(r"batch (\d+)")
NOTE = re.compile(r"(?:.*; )?(\d+) tokens in, (\d+) out; (.+); \d+ passes")  # energy's says first of what it is


def upgrade() -> None:
    with op.batch_alter_table("measurement", schema=None) as batch_op:
        for name in COLUMNS:
            batch_op.add_column(sa.Column(name, sa.Integer(), nullable=True))
        batch_op.add_column(sa.Column("way", sa.Text(), server_default="", nullable=False))
    _fill()


def downgrade() -> None:
    with op.batch_alter_table("measurement", schema=None) as batch_op:
        for name in ("way", *reversed(COLUMNS)):
            batch_op.drop_column(name)


def _fill() -> None:
    """The columns of older rows, from the sentences that said it until now."""
    connection = op.get_bind()
    table = sa.Table("measurement", sa.MetaData(), autoload_with=connection)
    c = table.c
    rows = connection.execute(sa.select(c.id, c.label, c.note).where(c.stage == "decode", c.label != "")).all()
    for row_id, label, note in rows:
        if labelled := LABEL.fullmatch(label):
            values = {"batch": int(labelled[1])}
            if noted := NOTE.fullmatch(note):
                values |= {"prompt_tokens": int(noted[1]), "output_tokens": int(noted[2]), "way": noted[3]}
            connection.execute(table.update().where(c.id == row_id).values(values))
