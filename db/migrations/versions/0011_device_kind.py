"""Of which kind a device is, CPU or GPU, in a column: of a worker, of a run and of its row on the leaderboard."""

import json

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

TABLES = ("worker", "run", "standing")


def upgrade() -> None:
    for name in TABLES:
        with op.batch_alter_table(name, schema=None) as batch_op:
            batch_op.add_column(sa.Column("device_kind", sa.String(length=8), nullable=True))
    _fill()


def downgrade() -> None:
    for name in reversed(TABLES):
        with op.batch_alter_table(name, schema=None) as batch_op:
            batch_op.drop_column("device_kind")


def _fill() -> None:
    """What older rows told by the device's name alone; a worker's facts, where it told them, say it better."""
    connection, tables = op.get_bind(), sa.MetaData()
    for name in TABLES:
        table = sa.Table(name, tables, autoload_with=connection)
        is_cpu = sa.func.lower(table.c.device).startswith("cpu")
        kind = sa.case((is_cpu, "cpu"), else_="cuda")
        connection.execute(table.update().where(table.c.device.is_not(None)).values(device_kind=kind))
    worker = tables.tables["worker"]
    for worker_id, facts in connection.execute(sa.select(worker.c.id, worker.c.device_facts)).all():
        kind = (json.loads(facts) if isinstance(facts, str) else facts or {}).get("kind")
        if isinstance(kind, str):
            connection.execute(worker.update().where(worker.c.id == worker_id).values(device_kind=kind))
