"""A study holds what it asks, a question or a grid; until now its name was read for that."""

import re

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

QUESTIONS = {  # names by the titles that studies had
    "How fine must FP8’s scales be?": "granularity",
    "E4M3 or E5M2?": "e4m3-e5m2",
    "lm_head: in or out?": "lm-head",
    "Which KV cache format?": "kv-cache",
    "Which MX scale rule?": "mx-rules",
    "Does the accumulator’s width show?": "accumulator",
    "Static, delayed or dynamic scales?": "when",
    "BF16, FP8, INT8 or W4A16?": "deploy",
    "Which layers are sensitive?": "sensitivity",
}
GRID = re.compile(r"Grid: ([\w, ]+) × ([\w, ]+) × ([\w, ]+)")


def upgrade() -> None:
    with op.batch_alter_table("study", schema=None) as batch_op:
        batch_op.add_column(sa.Column("question", sa.Text(), nullable=True))
        batch_op.add_column(sa.Column("grid", sa.JSON(none_as_null=True), nullable=True))
    study = sa.table(
        "study",
        sa.column("id", sa.Text()),
        sa.column("name", sa.Text()),
        sa.column("question", sa.Text()),
        sa.column("grid", sa.JSON(none_as_null=True)),
    )
    connection = op.get_bind()
    for key, name in connection.execute(sa.select(study.c.id, study.c.name)).all():
        if filled := _asked(name):
            connection.execute(study.update().where(study.c.id == key).values(**filled))


def _asked(name: str) -> dict[str, object]:
    """What a study of that name asks; nothing for one of somebody's own."""
    if name in QUESTIONS:
        return {"question": QUESTIONS[name]}
    if grid := GRID.fullmatch(name):
        parts = zip(("formats", "tiles", "rules"), grid.groups(), strict=True)
        return {"grid": {part: names.split(", ") for part, names in parts}}
    return {}


def downgrade() -> None:
    with op.batch_alter_table("study", schema=None) as batch_op:
        batch_op.drop_column("grid")
        batch_op.drop_column("question")
