"""Where a run's numbers come from: the commit as git itself says it, and what a device without NVML leaves out."""

import shutil
import subprocess

import pytest
import torch

from fp8dash.measure import nvml
from fp8dash.measure.provenance import METHODS, commit, made_with
from fp8dash.pipeline import STAGES


def git(folder, *words):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


@pytest.mark.skipif(not shutil.which("git"), reason="git itself is the oracle, and is not installed")
def test_the_commit_is_gits_own_on_a_branch_packed_detached_and_in_a_worktree(tmp_path):
    main, tree = tmp_path / "main", tmp_path / "tree"
    main.mkdir()
    git(main, "init", "-q", "-b", "work/one")
    assert commit(main) == ""  # a branch without a commit
    git(main, "commit", "-q", "--allow-empty", "-m", "one")
    head = git(main, "rev-parse", "HEAD")
    assert commit(main) == head
    git(main, "worktree", "add", "-q", "-b", "two", str(tree))
    git(tree, "commit", "-q", "--allow-empty", "-m", "two")
    assert commit(tree) == git(tree, "rev-parse", "HEAD") != head
    git(main, "pack-refs", "--all")
    assert commit(main) == head and commit(tree) == git(tree, "rev-parse", "HEAD")
    git(main, "checkout", "-q", "--detach")
    assert commit(main) == head


def test_what_is_no_checkout_has_no_commit(tmp_path):
    assert commit(tmp_path) == ""
    (tmp_path / ".git").write_bytes(b"\xff\xfe")
    assert commit(tmp_path) == ""
    (tmp_path / ".git").write_text("gitdir: /nowhere")
    assert commit(tmp_path) == ""


def test_a_cpu_has_no_clocks_and_no_energy_and_says_nothing_of_a_driver():
    cpu = torch.device("cpu")
    assert nvml.energy_joules(cpu) is None and nvml.clocks_mhz(cpu) == {}
    facts = made_with(cpu, ("gemm", "needle"))
    assert not {"driver", "clocks_mhz"} & set(facts) and set(facts["methods"]) == {"quantize", "gemm", "needle"}
    assert {"fp8dash", "torch", "transformers"} <= set(facts["versions"]) and facts["threads"] >= 1


def test_every_stage_that_measures_has_its_method_told():
    assert set(METHODS) == set(STAGES) - {"load", "baseline", "tasks", "export"}  # lm-eval's own, and no number
    assert all(method.rsplit(", ", 1)[1].startswith("v") for method in METHODS.values())
