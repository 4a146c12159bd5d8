"""The command line: one sentence and status 1 for what a person can mend, never a traceback."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
from pyarrow import parquet
from sqlalchemy import select, update

from db.store import Store
from db.tables import RunTable, WorkerTable
from db.workers import Workers
from fp8dash.cli import main
from fp8dash.places import database_url
from tests.seed import fill


@pytest.fixture(autouse=True)
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)


def printed(capsys):
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured


def test_submit_prints_ids_that_runs_and_report_know(capsys):
    assert main(["submit", "--recipe", "FP8_BLOCK", "--recipe", "w=int8/row", "--owner", "ada"]) == 0
    ids = printed(capsys).out.split()
    assert len(ids) == 2
    assert main(["runs"]) == 0
    listed = printed(capsys).out
    assert all(run_id in listed for run_id in ids) and "queued" in listed
    assert main(["report", "--json"]) == 0
    rows = json.loads(printed(capsys).out)
    assert {row["run"]: row["preset"] for row in rows} == {ids[0]: "FP8_BLOCK", ids[1]: None}
    assert all(row["owner"] == "ada" and row["state"] == "queued" for row in rows)
    assert main(["cancel", ids[0]]) == 0
    assert main(["cancel", ids[0]]) == 1
    assert "already cancelled" in printed(capsys).err
    assert main(["retry", ids[0]]) == 0


def test_windows_are_long_where_a_gpu_is_at_work_unless_a_length_is_said(capsys):
    def lengths():
        assert main(["submit", "--windows", str(5 + len(window_lengths))]) == 0
        assert main(["submit", "--windows", str(5 + len(window_lengths)), "--window-length", "64"]) == 0
        with store.session() as session:
            asked = session.scalars(select(RunTable.request).order_by(RunTable.created_at)).all()
        return [request.get("window_length", 512) for request in asked[-2:]]

    store, window_lengths = Store(database_url()), []
    window_lengths.append(lengths())
    Workers(store).register("w-gpu", host="h", slot=0, pid=1)
    with store.session() as session:
        session.execute(update(WorkerTable).values(device="NVIDIA H200", device_kind="cuda"))
    window_lengths.append(lengths())
    store.close()
    assert window_lengths == [[512, 64], [2048, 64]]


def test_the_report_is_a_parquet_file_or_a_sentence(capsys, tmp_path):
    assert main(["submit", "--recipe", "FP8_BLOCK", "--owner", "ada"]) == 0
    assert main(["report", "--parquet", str(tmp_path / "runs.parquet")]) == 0
    assert parquet.read_table(tmp_path / "runs.parquet")["preset"].to_pylist() == ["FP8_BLOCK"]
    assert main(["report", "--parquet", str(tmp_path / "none" / "runs.parquet")]) == 1
    assert "cannot be written: No such file" in printed(capsys).err


def test_a_kind_of_needle_brings_rulers_haystack_unless_one_is_named(capsys):
    kinds = [["--needle-kind", "multivalue"], ["--needle-kind", "single_3", "--haystack", "corpus"], []]
    for more in kinds:
        assert main(["submit", *more, "--needle-repeats", "2", "--needle-chat", "off"]) == 0
    with Store(database_url()).session() as session:
        asked = session.scalars(select(RunTable.request).order_by(RunTable.created_at)).all()
    needles = [(a["needle_kind"], a["haystack"], a["needle_repeats"], a["needle_chat"]) for a in asked]
    assert needles == [
        ("multivalue", "essay", 2, "off"),
        ("single_3", "corpus", 2, "off"),
        ("single_1", "noise", 2, "off"),
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["submit", "--needle-kind", "single_2", "--haystack", "noise"], "choose the haystack essay or corpus"),
        (["submit", "--recipe", "fp9"], "not part of a recipe"),
        (["submit", "--study", " "], "The study has no readable name"),
        (["submit", "--owner", ""], "The owner has no readable name"),
        (["submit", "--windows", "0"], "out of range"),
        (["submit", "--tasks", "/tmp/task.yaml"], "is not a task name"),
        (["submit", "--measures", "tasks"], "No task is given"),
        (["cancel", "nope"], "nope"),
        (["retry", "nope"], "nope"),
        (["submit", "--windows", "1000000000"], "choose 1 to 100,000"),
        (["submit", "--measures", ""], "choose at least one of gemm"),
        (["submit", "--device", "cuda;rm"], "choose auto, cpu, cuda or cuda:1"),
        (["submit", "--model", "./nonesuch"], "give its full path"),
        (["submit", "--model", "org/../x"], "give its full path"),
        (["submit", "--corpus", "nonesuch.txt"], "There is no corpus nonesuch.txt in"),
        (["submit", "--owner", "\u200b\u2060"], "The owner has no readable name"),
        (["submit", "--owner", "o" * 10_000_000], "at most 60"),
        (["submit", "--study", "s" * 10_000_000], "at most 400"),
        *(
            (["submit", f"--{name}", "/models/\udcff"], "in UTF-8")  # as a byte that is not UTF-8 arrives
            for name in ("owner", "study", "model", "corpus", "calibration")
        ),
        (["cancel", "\udcff"], "There is no run"),
        (["retry", "\udcff"], "There is no run"),
        (["report", "--study", "\udcff"], "There is no study"),
        (["study", "deploy", "--owner", "\udcff"], "in UTF-8"),
    ],
)
def test_bad_input_is_one_sentence(capsys, arguments, sentence):
    assert main(arguments) == 1
    *remarks, error = printed(capsys).err.splitlines()
    assert error.startswith("fp8dash: ") and sentence in error and len(error) < 500
    assert all("not on this machine" in remark for remark in remarks)


def asked(capsys, *arguments):
    """The request that a submission makes, and what is said beside it."""
    assert main(["submit", "--owner", "ada", *arguments]) == 0
    captured = printed(capsys)
    store = Store(database_url())
    request = store.run(captured.out.split()[0]).request
    store.close()
    return request, captured.err


def test_paths_are_made_whole_at_submit_and_said(capsys, tmp_path, monkeypatch):
    (tmp_path / "tiny").mkdir()
    (tmp_path / "text.txt").write_text("text")
    monkeypatch.chdir(tmp_path)
    places = ("--model", "./tiny", "--corpus", "text.txt", "--calibration", "../" + tmp_path.name + "/text.txt")
    request, remarks = asked(capsys, *places)
    monkeypatch.chdir("/")
    assert request.model == str(tmp_path / "tiny")
    assert request.corpus == request.calibration.corpus == str(tmp_path / "text.txt")
    assert f"The model ./tiny is {tmp_path / 'tiny'}\n" in remarks and remarks.count("\n") == 3


def test_what_a_folders_config_rules_out_is_refused_at_submit(capsys, tiny):
    for recipe, measures, sentence in (
        ("W4A16", "gemm,export", "64 columns are not a multiple of 128"),
        ("w=int8/row skip=down_proj", "gemm", "matches no module of this model; closest alternative: skip=*.down_proj"),
    ):
        assert main(["submit", "--model", str(tiny), "--recipe", recipe, "--measures", measures]) == 1
        assert sentence in printed(capsys).err
    assert main(["submit", "--model", str(tiny), "--recipe", "W4A16"]) == 0


def test_names_and_paths_of_other_machines_stay_as_they_are(capsys):
    request, remarks = asked(capsys)
    assert (request.model, request.corpus, remarks) == ("demo", "pydocs", "")
    request, remarks = asked(capsys, "--model", "/mnt/far/model", "--corpus", "~nobody-here/text.txt")
    assert (request.model, request.corpus) == ("/mnt/far/model", "~nobody-here/text.txt")
    assert "/mnt/far/model is not on this machine: the run's worker must have it" in remarks
    assert asked(capsys, "--model", "org/name")[0].model == "org/name"


def test_waiting_without_a_worker_says_so_and_how_to_start_one(capsys):
    statuses = []
    waiting = threading.Thread(target=lambda: statuses.append(main(["submit", "--wait", "--owner", "ada"])))
    waiting.start()
    store, remarks = Store(database_url()), ""
    while "No worker is alive" not in remarks and waiting.is_alive():
        remarks += capsys.readouterr().err
        time.sleep(0.05)
    (run,) = store.runs()
    assert main(["cancel", run.id]) == 0
    waiting.join()
    store.close()
    remarks += capsys.readouterr().err
    assert statuses == [1] and remarks.count("start one with `fp8dash worker`") == 1


def test_a_terminal_without_utf8_gets_every_command():
    code = """if True:
        from fp8dash.cli import main
        try:
            main(["submit", "--help"])
        except SystemExit as end:
            assert end.code == 0
        assert main(["submit", "--owner", "ada", "--study", "The night’s"]) == 0
        assert main(["report"]) == main(["report", "--csv"]) == main(["runs"]) == 0
        assert main(["submit", "--owner", "\\u200b’"[:1]]) == 1
    """
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.isascii() and b"Traceback" not in ended.stderr


def test_a_csvs_header_is_plain_ascii(capsys):
    assert main(["report", "--csv"]) == 0
    assert printed(capsys).out.isascii()


def test_submit_names_tasks_and_how_many_documents(capsys):
    assert main(["submit", "--tasks", "fp8dash_pydocs,arc_easy", "--task-limit", "100", "--owner", "ada"]) == 0
    (run_id,) = printed(capsys).out.split()
    store = Store(database_url())
    request = store.run(run_id).request
    store.close()
    assert (request.tasks.names, request.tasks.limit) == (("fp8dash_pydocs", "arc_easy"), 100)
    assert request.measures == ("gemm", "perplexity", "needle", "tasks")


def test_a_port_in_use_is_one_sentence(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["up", "--port", port]) == 1
        assert main(["demo", "--port", port]) == 1
    assert "choose another with --port" in printed(capsys).err


def test_a_database_that_cannot_be_opened_is_one_sentence(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("FP8DASH_DATABASE_URL", "sqlite:////proc/none/x.sqlite")
    assert main(["runs"]) == 1
    assert "cannot be created" in printed(capsys).err


def test_a_defect_is_an_internal_error_with_its_traceback_in_a_file(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("db.store.Store.runs", lambda *_, **__: 1 / 0)
    assert main(["runs"]) == 1
    assert "internal error: ZeroDivisionError" in printed(capsys).err
    assert "ZeroDivisionError" in (tmp_path / "data" / "fp8dash.log").read_text()


def test_doctor_says_what_runs_here_and_why_not_the_rest():
    completed = subprocess.run(
        [sys.executable, "-m", "fp8dash.cli", "doctor"], capture_output=True, text=True, check=True
    )
    for words in (
        "torch",
        "device",
        "FP8_DYNAMIC",
        "MXFP8",
        "no native kernel for 1x32",
        "start one with `fp8dash worker`",
    ):
        assert words in completed.stdout


def test_a_question_is_queued_once_and_its_study_written_up(capsys):
    assert main(["study", "deploy", "--owner", "ada", "--backend", "emulated"]) == 0
    assert printed(capsys).out.startswith("0 of 5 runs already existed; queued: ")
    assert main(["study", "deploy", "--owner", "ada", "--backend", "emulated"]) == 0
    assert printed(capsys).out == "5 of 5 runs already existed; queued: none\n"
    store = Store(database_url())
    (study,) = store.studies()
    store.close()
    assert (study.name, study.states) == ("BF16, FP8, INT8 or W4A16?", {"queued": 5})
    assert main(["report", "--study", study.id]) == 0
    assert printed(capsys).out.startswith(
        "# BF16, FP8, INT8 or W4A16?\n\n**No answer yet: 0 of 5 runs have finished.**"
    )
    assert main(["report", "--study", study.id, "--html"]) == 0
    assert printed(capsys).out.startswith("<!doctype html>")
    assert main(["report", "--html"]) == 1
    assert "writes one study" in printed(capsys).err


def test_ship_prints_the_decision_and_why_the_others_lost(capsys):
    store = Store(database_url())
    fill(store)
    store.close()
    assert main(["ship", "--model", "demo", "--budget", "kld=0.05"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Ship INT8 on CPU (x86-64, 2 threads): KLD 0.0303 nats, 1.71× BF16 measured.")
    assert "INT8_TENSOR: over budget: KLD 1.21 nats, limit 0.0500" in text
    assert main(["ship", "--model", "demo", "--target", "H200 SXM"]) == 0
    assert "predicted for decoding at batch 32" in capsys.readouterr().out
    for wrong in (["--budget", "0.05"], ["--model", "none"], ["--target", "H9000"]):
        assert main(["ship", *wrong]) == 1 and "Traceback" not in capsys.readouterr().err
