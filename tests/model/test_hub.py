"""Models of the Hub, from a server that answers as the Hub does for the tiny model at two commits."""

import contextlib
import errno
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM

from fp8dash.choose.models.hub_id import HubId, hub_id
from fp8dash.choose.records import StageResult
from fp8dash.choose.request import Request
from fp8dash.errors import InvalidChoice, ModelError
from fp8dash.model.hub import commit_of, fetched
from fp8dash.model.load import load, locate
from fp8dash.pipeline import run_stages
from tests.model.imported.test_gguf_file import write_gguf
from tests.tiny import write_tiny_model

FIRST, SECOND = "1" * 40, "2" * 40
REVISIONS = {"main": SECOND, "v1": FIRST, FIRST: FIRST, SECOND: SECOND, FIRST[:7]: FIRST}


class Hub(BaseHTTPRequestHandler):
    """`org/tiny` with two commits, `org/gated`, and nothing else."""

    folders: dict[str, Path]

    def do_GET(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def answer(self):
        path, _, _ = self.path.partition("?")
        words = path.strip("/").split("/")
        if words[:2] == ["api", "models"]:
            repo, rest = "/".join(words[2:4]), words[4:]
        else:
            repo, rest = "/".join(words[:2]), words[2:]
        if repo == "org/gated":
            return self.refuse(403, "GatedRepo")
        if repo != "org/tiny":
            return self.refuse(401, "RepoNotFound")
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in REVISIONS:
            return self.refuse(404, "RevisionNotFound")
        commit = REVISIONS[revision]
        folder = self.folders[commit]
        files = sorted(file.name for file in folder.iterdir())
        if words[0] == "api" and rest[:1] == ["tree"]:
            entries = [
                {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": self.tag(folder / name)}
                for name in files
            ]
            return self.send(json.dumps(entries).encode())
        if words[0] == "api":
            body = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files], "private": False}
            return self.send(json.dumps(body | {"gated": False, "tags": [], "downloads": 0, "likes": 0}).encode())
        file = folder / rest[2]
        if not file.is_file():
            return self.refuse(404, "EntryNotFound")
        return self.send(file.read_bytes(), {"X-Repo-Commit": commit, "ETag": f'"{self.tag(file)}"'})

    def tag(self, file):
        return hashlib.sha1(file.read_bytes()).hexdigest()

    def send(self, body, headers=None, status=200):
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def refuse(self, status, code):
        self.send(b"{}", {"X-Error-Code": code}, status)

    def log_message(self, *_):
        """Nothing."""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folders = {commit: write_tiny_model(tmp_path_factory.mktemp("hub") / commit) for commit in (FIRST, SECOND)}
    config = json.loads((folders[FIRST] / "config.json").read_text()) | {"rms_norm_eps": 1e-3}
    (folders[FIRST] / "config.json").write_text(json.dumps(config))
    with serving(folders) as address:
        yield address


@contextlib.contextmanager
def serving(folders):
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Served", (Hub,), {"folders": folders}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(served, tmp_path, monkeypatch):
    """The Hub's own cache in a folder of the test, and its address that of the server."""
    return reached(served, tmp_path, monkeypatch)


def reached(served, tmp_path, monkeypatch):
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", served)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", served + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "hub"


@pytest.mark.parametrize(
    ("named", "commit"), [("org/tiny", SECOND), ("org/tiny@v1", FIRST), (f"org/tiny@{FIRST}", FIRST)]
)
def test_a_revision_is_the_commit_that_it_names(hub, tmp_path, named, commit):
    folder = locate(named, tmp_path)
    assert commit_of(folder) == commit
    loaded = load(folder, torch.device("cpu"))
    assert (loaded.model.config.rms_norm_eps == 1e-3) == (commit == FIRST)


def test_a_run_records_the_commit_and_two_commits_are_two_models(hub, tmp_path, corpus_file):
    facts = []
    for named in ("org/tiny@v1", "org/tiny"):
        request = Request.of(
            model=named, corpus=str(corpus_file), recipe="FP8_DYNAMIC", measures=("gemm",), gemm_m=(1,)
        )
        results = run_stages(request, frozenset(), tmp_path)
        facts.append(next(item for item in results if isinstance(item, StageResult)).facts)
    assert [of["revision"] for of in facts] == [FIRST, SECOND]
    assert facts[0]["model_hash"] != facts[1]["model_hash"]


def test_what_was_downloaded_once_needs_no_network(hub, tmp_path, monkeypatch):
    folder = locate("org/tiny@v1", tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert locate("org/tiny@v1", tmp_path) == folder
    with pytest.raises(ModelError, match=r"“org/tiny@main” is not in .*, and downloads are switched off"):
        locate("org/tiny@main", tmp_path)


@pytest.mark.parametrize(
    ("named", "sentence"),
    [
        ("org/gated", "“org/gated” is gated: accept its terms on the Hub, log in on the worker"),
        ("org/none", "The Hub has no model “org/none”, or it is private: check the id"),
        ("org/tiny@v9", "“org/tiny” has no revision “v9”: choose a branch, a tag or a commit of it."),
    ],
)
def test_what_the_hub_refuses_is_one_sentence_that_says_what_to_do(hub, tmp_path, named, sentence):
    with pytest.raises(ModelError, match=sentence) as error:
        locate(named, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model.gguf"])
def test_a_model_of_the_hub_without_safetensors_is_refused_by_its_id(tmp_path, monkeypatch, file):
    files = tmp_path / "files"
    files.mkdir()
    (files / "config.json").write_text('{"model_type": "llama"}')
    (files / file).write_bytes(b"anything")
    with serving({SECOND: files}) as address:
        cache = reached(address, tmp_path, monkeypatch)
        with pytest.raises(ModelError, match=r"^“org/tiny” has no \*\.safetensors files, and nothing else is loaded"):
            locate("org/tiny", tmp_path)
    assert not list(cache.rglob(file))  # never downloaded


def test_one_gguf_file_of_the_hub_is_a_model_or_a_checkpoint(tmp_path, monkeypatch, corpus_file):
    plain, files = write_tiny_model(tmp_path / "plain"), tmp_path / "files"
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    files.mkdir()
    write_gguf(model, files / "tiny-Q8_0.gguf", ["Q8_0"])
    write_gguf(model, files / "tiny-BF16.gguf", ["BF16"])
    with serving({SECOND: files}) as address:
        cache = reached(address, tmp_path, monkeypatch)
        asked = Request.of(model="org/tiny:tiny-BF16.gguf", recipe="stored=org/tiny@main:tiny-Q8_0.gguf")
        asked = asked.but(corpus=str(corpus_file), measures=("perplexity",), windows=2, window_length=64).checked()
        stages = [one for one in run_stages(asked, frozenset(), tmp_path) if isinstance(one, StageResult)]
        with pytest.raises(ModelError, match="“org/tiny” has no file “none.gguf”"):
            locate("org/tiny:none.gguf", tmp_path)
    facts = {key: fact for one in stages for key, fact in one.facts.items()}
    assert facts["checkpoint_revision"] == SECOND and facts["checkpoint_scheme"] == "14 of Q8_0, GGUF"
    assert sorted(file.name for file in cache.rglob("*.gguf")) == ["tiny-BF16.gguf", "tiny-Q8_0.gguf"]


def test_no_network_and_a_full_disk_are_told_apart(hub, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(huggingface_hub, "snapshot_download", full)
        with pytest.raises(ModelError, match="There is no space left for “org/tiny” in .*: free some, or set HF_HOME"):
            fetched(HubId("org/tiny"))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        huggingface_hub.constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/resolve/{revision}/{filename}",
    )
    with pytest.raises(ModelError, match="could not be downloaded from the Hub .* check the worker's network"):
        locate("org/tiny", tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "org/name@../x",
        "org/name@",
        "org/name@a b",
        "@v1",
        "org@v1/name",
        "org/name:x.bin",
        "org/name:../x.gguf",
        "a/b@c..d",
    ],
)
def test_what_is_no_revision_is_refused_before_a_worker_sees_it(text):
    assert hub_id(text) is None
    with pytest.raises(InvalidChoice, match="is not a model: choose"):
        Request.of(model=text).checked()
