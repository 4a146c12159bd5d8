"""Where this installation keeps its data: the only reader of the environment's two settings.

FP8DASH_DATA_DIR      logs, caches and the default database (default: the platform's user data folder)
FP8DASH_DATABASE_URL  an SQLAlchemy URL; a team moves to Postgres with it (default: SQLite in the data folder)
"""

import os
from pathlib import Path

import platformdirs


def data_dir() -> Path:
    """The data folder, made if missing, readable by its owner alone."""
    folder = Path(os.environ.get("FP8DASH_DATA_DIR") or platformdirs.user_data_dir("fp8dash", appauthor=False))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder.resolve()


def database_url() -> str:
    """The product's database; a relative SQLite file is taken from the present folder, once and for all."""
    url = os.environ.get("FP8DASH_DATABASE_URL") or f"sqlite:///{data_dir() / 'fp8dash.sqlite'}"
    scheme, slashes, file = url.partition(":///")
    return (
        f"{scheme}{slashes}{Path(file).resolve()}"
        if scheme.startswith("sqlite") and file not in ("", ":memory:")
        else url
    )


def cache_dir() -> Path:
    """Converted models and cached baselines: safe to delete while no run is going."""
    return _made("cache")


def log_file(run_id: str) -> Path:
    """The log of a run: all that its process printed, over all its attempts."""
    return _made("logs") / f"{run_id}.log"


def tasks_dir() -> Path:
    """Where a team's own lm-eval tasks may lie, as YAML files."""
    return data_dir() / "tasks"


def _made(name: str) -> Path:
    folder = data_dir() / name
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder
