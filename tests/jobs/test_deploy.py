"""The templates of deployment start what there is: each command line parses, and each setting is one that is read."""

import configparser
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from fp8dash import places
from fp8dash.cli import _parser
from jobs.processes import SLOT_TAKEN

DEPLOY = Path(__file__).parent.parent.parent / "jobs" / "deploy"
TEMPLATES = sorted(file for file in DEPLOY.iterdir() if file.suffix in (".service", ".sbatch"))


def command_lines(file: Path) -> list[list[str]]:
    """What a template runs of ours, its place-holders filled in."""
    text = re.sub(r'%i|"\$SLURM_LOCALID"', "3", file.read_text("utf-8"))
    lines = [line for line in text.splitlines() if not line.startswith("#") and re.search(r"\bfp8dash worker\b", line)]
    return [
        shlex.split(re.split(r"\bfp8dash (?=worker\b)", line)[1].rstrip("'"))
        for line in lines
        if "Description" not in line
    ]


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_what_a_template_starts_is_a_command_of_ours(file: Path) -> None:
    (arguments,) = command_lines(file)
    options = _parser().parse_args(arguments)
    assert (options.slot, options.command.__name__) == (3, "_work")


@pytest.mark.parametrize("file", TEMPLATES, ids=lambda file: file.name)
def test_every_setting_that_a_template_names_is_one_that_is_read(file: Path) -> None:
    named = set(re.findall(r"FP8DASH_\w+", file.read_text("utf-8")))
    assert named == {"FP8DASH_DATABASE_URL", "FP8DASH_DATA_DIR"} and all(name in str(places.__doc__) for name in named)


def test_the_unit_restarts_a_worker_that_crashed_and_not_one_that_was_refused() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "fp8dash-worker@.service", "utf-8")
    service = unit["Service"]
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == str(SLOT_TAKEN)
    assert service["KillMode"] == "mixed"  # SIGTERM reaches the worker alone, which ends its child in order


def test_the_batch_script_is_shell_and_has_a_worker_for_each_gpu() -> None:
    script = DEPLOY / "fp8dash-workers.sbatch"
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text("utf-8"), re.MULTILINE))
    assert asked["gpus-per-node"] == asked["ntasks-per-node"] and asked["signal"].startswith("TERM")
