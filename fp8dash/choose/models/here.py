"""What a path means on this machine, for the command line only: the web process reads no model folder."""

import os
from pathlib import Path

from fp8dash.choose.architecture import read_config
from fp8dash.choose.catalog import CORPORA, MODELS, shape_from_architecture
from fp8dash.choose.limits import shown
from fp8dash.choose.models.fit import refuse_misfit_of_shape
from fp8dash.choose.models.hub_id import hub_id
from fp8dash.choose.recipe import parse_recipe
from fp8dash.choose.request import Request, is_whole_path
from fp8dash.errors import InvalidChoice

LARGEST_CONFIG = 1_000_000  # bytes


def whole_place(what: str, given: str) -> str:
    """A path made whole where it leads to something here; names, and whole paths of other machines, as they are.

    Raises InvalidChoice for a path that would mean something else to a worker in another folder.
    """
    if not given or given in MODELS or given in CORPORA:
        return given
    if is_here(given):
        return os.path.abspath(Path(given).expanduser())
    if is_whole_path(given) or (what in ("model", "checkpoint") and hub_id(given)):
        return given
    raise InvalidChoice(f"There is no {what} {shown(given)} in {Path.cwd()}: check its name, or give its full path.")


def is_here(place: str) -> bool:
    """True where a path leads to something on this machine."""
    try:
        return Path(place).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, the home of a user whom nobody knows
        return False


def refuse_misfit_here(request: Request) -> None:
    """Raises InvalidChoice where the config of a folder on this machine tells that the recipe does not fit."""
    try:
        config = Path(request.model).expanduser() / "config.json"
        if not config.is_file() or config.stat().st_size > LARGEST_CONFIG:
            return
        architecture = read_config(config.read_text("utf-8"))
    except (OSError, ValueError, RuntimeError, InvalidChoice):  # of a kind whose Linears only a worker knows
        return
    if all(linear.copies == 1 for linear in architecture.linears):  # experts may lie together in one module
        shape, exported = shape_from_architecture(architecture), "export" in request.measures
        refuse_misfit_of_shape(parse_recipe(request.recipe), shape, exported=exported)
