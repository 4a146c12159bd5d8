"""Where this installation keeps its data: the only reader of the environment's settings.

FP8DASH_DATA_DIR      logs, caches and the default database (default: the platform's user data folder)
FP8DASH_DATABASE_URL  an SQLAlchemy URL; a team moves to Postgres with it (default: SQLite in the data folder)
FP8DASH_HOSTS         names by which browsers reach the dashboard, besides this machine's own, separated by commas
"""

import os
import shutil
import socket
import tempfile
from pathlib import Path
from urllib.parse import quote, unquote

import platformdirs

from fp8dash.errors import PlaceError


def data_dir() -> Path:
    """The data folder, made if missing, readable by its owner alone; raises PlaceError."""
    return _made(
        Path(os.environ.get("FP8DASH_DATA_DIR") or platformdirs.user_data_dir("fp8dash", appauthor=False))
    ).resolve()


def database_url() -> str:
    """The product's database; a relative SQLite file is taken from the present folder, once and for all.

    Raises PlaceError where the data folder is needed and cannot be made.
    """
    url = os.environ.get("FP8DASH_DATABASE_URL")
    if not url:
        return sqlite_url(data_dir() / "fp8dash.sqlite")
    scheme, slashes, rest = url.partition(":///")
    file, mark, query = rest.partition("?")
    if not scheme.startswith("sqlite") or file in ("", ":memory:") or file.startswith("file:"):
        return url
    return f"{sqlite_url(Path(unquote(file)).resolve(), scheme)}{mark}{query}"


def sqlite_url(file: Path, scheme: str = "sqlite") -> str:
    """A file as SQLAlchemy reads it from a URL, where %, ? and # would mean something else.

    >>> sqlite_url(Path("/data/100 % sure?/fp8dash.sqlite"))
    'sqlite:////data/100 %25 sure%3F/fp8dash.sqlite'
    """
    return f"{scheme}:///{quote(str(file), safe=' +/')}"


def allowed_hosts() -> list[str]:
    """Names by which browsers reach the dashboard, besides this machine's own."""
    return [name for part in os.environ.get("FP8DASH_HOSTS", "").split(",") if (name := part.strip())]


def cache_dir() -> Path:
    """Converted models and cached baselines: safe to delete while no run is active."""
    return _made(data_dir() / "cache")


def log_file(run_id: str) -> Path:
    """The log of a run: everything its process printed, over all its attempts."""
    return _made(data_dir() / "logs") / f"{run_id}.log"


def scratch(folder: Path) -> Path:
    """A new folder inside another, for what is not complete yet; it carries this process's number, by which it is found
    once the process is over."""
    return Path(tempfile.mkdtemp(prefix=_scratch_prefix(os.getpid()), dir=folder))


def clear_scratch(pid: int) -> None:
    """Remove what a process of this machine, which is over, left incomplete in the cache."""
    for folder in cache_dir().rglob(f"{_scratch_prefix(pid)}*"):
        shutil.rmtree(folder, ignore_errors=True)


def clear_abandoned() -> None:
    """Remove what processes of this machine that are over, or an earlier version's, left incomplete in the cache."""
    own = _scratch_prefix("")
    for folder in cache_dir().rglob(".*-*"):
        pid = folder.name.removeprefix(own).partition("-")[0] if folder.name.startswith(own) else ""
        if folder.name.startswith((".demo-", ".export-")) or (pid.isdigit() and not _is_running(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


def tasks_dir() -> Path:
    """Where a team's own lm-eval tasks may lie, as YAML files."""
    return data_dir() / "tasks"


def _made(folder: Path) -> Path:
    """A folder, made if missing, for its owner alone; raises PlaceError where it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        why = (
            "a file of that name is in the way"
            if isinstance(error, FileExistsError)
            else getattr(error, "strerror", error)
        )
        raise PlaceError(
            f"The folder {folder} cannot be created: {why}. Set FP8DASH_DATA_DIR to another one."
        ) from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PlaceError(f"The folder {folder} cannot be written to. Set FP8DASH_DATA_DIR to another one.")
    return folder


def _scratch_prefix(pid: int | str) -> str:
    return f".incomplete-{socket.gethostname()}-{pid}{'-' if pid else ''}"


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
