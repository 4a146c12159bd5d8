"""What produced a run's numbers besides the request: versions, commit, driver, clocks, methods. Measures nothing."""

import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch

import fp8dash
from fp8dash.choose.windows import DISJOINT
from fp8dash.measure import decode, experts, gemm, gradients, kv_cache, profile, sensitivity, weight_error
from fp8dash.measure.needles import needle
from fp8dash.measure.nvml import clocks_mhz, driver
from fp8dash.model.load import runtime

METHODS = {  # by stage; that of tasks is lm-eval's and stands beside each number
    "gradients": gradients.METHOD,
    "sensitivity": sensitivity.METHOD,
    "profile": profile.METHOD,
    "quantize": weight_error.METHOD,
    "gemm": gemm.METHOD,
    "perplexity": DISJOINT.method,
    "kv": kv_cache.PATH_METHOD,
    "needle": needle.METHOD,
    "decode": decode.METHOD,
    "experts": experts.METHOD,
}


def made_with(where: torch.device, stages: tuple[str, ...], **chosen: str) -> dict[str, Any]:
    """Facts of this process and device; what is not known is left out. `chosen` are methods that a request chose."""
    facts: dict[str, Any] = {
        "versions": runtime(),
        "commit": commit(Path(fp8dash.__path__[0]).parent),
        "threads": torch.get_num_threads(),
        "methods": {stage: (METHODS | chosen)[stage] for stage in ("quantize", *stages) if stage in METHODS},
    }
    if where.type == "cuda":
        facts |= {"driver": driver(), "clocks_mhz": clocks_mhz(where)}
    return {name: value for name, value in facts.items() if value not in (None, "", {})}


def peak_rss() -> int:
    """The process's largest resident memory so far, bytes (Linux counts in KiB, macOS in bytes)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def commit(folder: Path) -> str:
    """The commit that a checkout has out, read from its files; empty where the folder is no checkout.

    A worktree's `.git` is a file that names its folder; branches live in the common folder, loose or packed.
    """
    try:
        git = folder / ".git"
        if git.is_file():
            git = (folder / git.read_text("utf-8").removeprefix("gitdir:").strip()).resolve()
        head = (git / "HEAD").read_text("utf-8").strip()
        if not head.startswith("ref:"):
            return _hash(head)
        common = git / (git / "commondir").read_text("utf-8").strip() if (git / "commondir").is_file() else git
        return _of_branch(common, head.removeprefix("ref:").strip())
    except (OSError, UnicodeDecodeError):
        return ""


def _of_branch(git: Path, name: str) -> str:
    if (git / name).is_file():
        return _hash((git / name).read_text("utf-8").strip())
    packed = (git / "packed-refs").read_text("utf-8").splitlines()
    return next((_hash(line.split()[0]) for line in packed if line.endswith(f" {name}")), "")


def _hash(text: str) -> str:
    return text if re.fullmatch(r"[0-9a-f]{40,64}", text) else ""
