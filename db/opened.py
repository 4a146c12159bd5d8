"""The database behind a URL: opened, created or migrated, with its errors said in sentences."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError, SQLAlchemyError

from fp8dash.errors import StoreError

BUSY_SECONDS = 30
RETRY_SECONDS = 0.05


DRIVER_ERRORS = (SQLAlchemyError, OSError)  # of whoever shares this database: the queue's engine


def sqlite_file(url: str) -> Path | None:
    """The file of an SQLite URL, ":memory:" where it has none; None on other databases."""
    parsed = make_url(url)
    return Path(parsed.database or ":memory:") if parsed.get_backend_name() == "sqlite" else None


def beside(url: str, ending: str) -> str:
    """The URL of a file beside an SQLite database, its name lengthened before the suffix.

    >>> beside("sqlite:////data/100%25/fp8dash.sqlite", "-queue")
    'sqlite:////data/100%25/fp8dash-queue.sqlite'
    """
    parsed = make_url(url)
    file = Path(parsed.database or "")
    own = parsed.set(database=str(file.with_name(f"{file.stem}{ending}{file.suffix}")))
    return own.render_as_string(hide_password=False)


def may_pass(error: StoreError) -> bool:
    """True where the database is out of reach, locked or full, and False where it refuses what it was told."""
    return isinstance(error.__cause__, (OperationalError, InterfaceError))


def engine_of(url: str) -> Engine:
    try:
        parsed = make_url(url)
        if parsed.get_backend_name() != "sqlite":
            return create_engine(parsed, pool_pre_ping=True)
        engine = create_engine(parsed, connect_args={"timeout": BUSY_SECONDS})
    except (SQLAlchemyError, ImportError, ValueError) as error:
        raise StoreError(f"FP8DASH_DATABASE_URL is not a database that can be opened: {error}") from error
    if parsed.database and parsed.database != ":memory:":
        _private(Path(parsed.database))

    @event.listens_for(engine, "connect")
    def _pragmas(connection: Any, _record: Any) -> None:
        _use_wal(connection)
        for pragma in ("synchronous=NORMAL", "foreign_keys=ON"):
            connection.execute(f"PRAGMA {pragma}")

    return engine


def _use_wal(connection: sqlite3.Connection) -> None:
    """Write-ahead logging. Of several that open a new database at once, SQLite refuses some without waiting."""
    until = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
            time.sleep(RETRY_SECONDS)


def _private(file: Path) -> None:
    """The database file, readable by its owner alone, made before SQLite makes it with the umask's mode."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT, 0o600))
    except OSError as error:
        raise StoreError(
            f"The database {file} cannot be created: {error.strerror}. Set FP8DASH_DATA_DIR elsewhere."
        ) from error


def migrate(engine: Engine, url: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    scripts = ScriptDirectory.from_config(config)
    with engine.connect() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
        if current == scripts.get_current_head():
            return
        if current is not None and current not in {script.revision for script in scripts.walk_revisions()}:
            raise StoreError(
                f"The database was written by a newer fp8dash (revision {current}): update fp8dash. Nothing changed."
            )
        connection.rollback()
        if engine.dialect.name == "sqlite":
            connection.execute(text("PRAGMA foreign_keys=OFF"))  # a batch migration drops and renames tables
            connection.commit()
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # of two that start at once, one waits
        else:
            connection.execute(text("SELECT pg_advisory_xact_lock(8448)"))
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
        connection.commit()


@contextmanager
def sentences(url: str) -> Iterator[None]:
    try:
        yield
    except IntegrityError:
        raise
    except UnicodeEncodeError as error:  # a lone surrogate: what a byte that is not UTF-8 becomes in an argument
        raise StoreError(
            "Text that is not valid Unicode can be neither stored nor searched: write it in UTF-8."
        ) from error
    except DBAPIError as error:
        reason, place = str(error.orig), make_url(url).render_as_string(hide_password=True)
        if "locked" in reason:
            raise StoreError(
                f"The database {place} has been locked by another program for over {BUSY_SECONDS} s: close that "
                "program and try again."
            ) from error
        if "full" in reason or "No space" in reason:
            raise StoreError(
                f"The disk that holds {place} is full: free some space and try again; nothing was lost."
            ) from error
        raise StoreError(f"The database {place} could not be used: {reason}") from error
