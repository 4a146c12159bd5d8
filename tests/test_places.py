"""Where data goes: any folder name is meant as it is written, and one that cannot be created is said in a sentence."""

import pytest

from db.store import Store
from fp8dash.choose.request import Request
from fp8dash.cli import main
from fp8dash.errors import PlaceError
from fp8dash.places import cache_dir, database_url, log_file
from jobs.queue import Queue

NAMES = ["100% sure", "really?", "a?b=c&d", "run #1", "%41", "p:/q@r", "日本 語", "a+b"]


@pytest.fixture(autouse=True)
def no_database(monkeypatch):
    monkeypatch.delenv("FP8DASH_DATABASE_URL", raising=False)


@pytest.mark.parametrize("name", NAMES)
def test_both_databases_lie_in_the_data_folder_whatever_its_name(tmp_path, monkeypatch, name):
    folder = tmp_path / name
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(folder))
    store = Store(database_url())
    queue = Queue(store)
    run_id = queue.submit_one(Request(), owner="ada")
    queue.close()
    store.close()
    assert {"fp8dash.sqlite", "fp8dash-queue.sqlite"} <= {file.name for file in folder.iterdir()}
    again = Store(store.url)
    assert again.run(run_id).owner == "ada"
    again.close()
    assert [entry.name for entry in tmp_path.iterdir()] == [folder.relative_to(tmp_path).parts[0]]


def test_a_relative_file_in_the_setting_is_taken_from_the_present_folder_and_keeps_its_options(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FP8DASH_DATABASE_URL", "sqlite:///100%25/runs.sqlite?timeout=3")
    assert database_url() == f"sqlite:///{tmp_path}/100%25/runs.sqlite?timeout=3"
    Store(database_url()).close()
    assert (tmp_path / "100%" / "runs.sqlite").exists()


@pytest.mark.parametrize("url", ["postgresql+psycopg://u:p%40ss@host/db?sslmode=require", "sqlite://"])
def test_other_urls_are_left_alone(monkeypatch, url):
    monkeypatch.setenv("FP8DASH_DATABASE_URL", url)
    assert database_url() == url


@pytest.mark.parametrize("inner", [(), ("deeper",)])
@pytest.mark.parametrize("command", [["runs"], ["submit"], ["doctor"], ["up"], ["demo"]])
def test_a_file_in_the_data_folders_way_is_one_sentence(tmp_path, monkeypatch, capsys, command, inner):
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path.joinpath("taken", *inner)))
    assert main(command) == 1
    message = capsys.readouterr().err
    assert "cannot be created" in message and "Set FP8DASH_DATA_DIR to another one." in message
    assert message.count("\n") == 1 and "Traceback" not in message


@pytest.mark.parametrize("name", ["cache", "logs"])
def test_a_file_in_the_way_of_an_inner_folder_is_a_sentence_too(tmp_path, monkeypatch, name):
    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    (tmp_path / name).write_text("")
    with pytest.raises(PlaceError, match=f"{name} cannot be created: a file of that name is in the way"):
        cache_dir() if name == "cache" else log_file("abc")
