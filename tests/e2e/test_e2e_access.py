"""Who may open a session with the dashboard, over real sockets: the browser's Host and Origin decide."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fp8dash.serve import answered_names
from tests.e2e.conftest import free_port, served


@contextmanager
def proxy() -> Iterator[tuple[str, list[str]]]:
    """A proxy's address, and the first lines of all requests that were to leave the machine through it."""
    asked: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def listen() -> None:
            while True:
                try:
                    caller, _ = listener.accept()
                except OSError:  # closed: the test is over
                    return
                with caller:
                    asked.append(caller.recv(4096).decode("latin-1").partition("\r\n")[0])

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", asked


def handshake(port: int, host: str, origin: str) -> int:
    """The status with which a WebSocket is answered."""
    head = [
        "GET /_stcore/stream HTTP/1.1", f"Host: {host}", f"Origin: {origin}", "Connection: Upgrade",
        "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
    ]  # fmt: skip
    with socket.create_connection(("127.0.0.1", port), timeout=30) as caller:
        caller.sendall(("\r\n".join(head) + "\r\n\r\n").encode())
        return int(caller.recv(4096).split()[1])


def test_only_the_dashboards_own_names_open_a_session_and_nothing_outside_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with proxy() as (address, asked):
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, address)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")
        with served(tmp_path) as (own, _):
            port = int(own.rpartition(":")[2])
            here, foreign = f"127.0.0.1:{port}", f"evil.example:{port}"
            assert handshake(port, here, f"http://{here}") == 101
            assert handshake(port, f"localhost:{port}", f"http://localhost:{port}") == 101
            assert handshake(port, foreign, f"http://{foreign}") == 403  # a name that was pointed here
            assert handshake(port, foreign, f"http://{here}") == 403
            assert handshake(port, here, f"http://{foreign}") == 403
            assert handshake(port, here, "null") == 403
        assert not asked


@pytest.mark.parametrize(
    ("host", "named", "unnamed"),
    [
        ("127.0.0.1", {"localhost", "127.0.0.1", "::1"}, {"0.0.0.0", "*"}),
        ("gpu7.lab", {"localhost", "gpu7.lab"}, {"*"}),
        ("0.0.0.0", {"localhost", socket.gethostname().lower()}, {"0.0.0.0", "*"}),
    ],
)
def test_the_answered_names_follow_from_where_it_listens(host: str, named: set[str], unnamed: set[str]) -> None:
    names = set(answered_names(host))
    assert named <= names and not unnamed & names


def test_an_administrator_adds_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8DASH_HOSTS", "fp8.example.com, *.lab")
    assert {"fp8.example.com", "*.lab"} <= set(answered_names("0.0.0.0"))


def test_the_command_line_passes_the_names_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8dash.serve import end, start_web

    monkeypatch.setenv("FP8DASH_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("FP8DASH_HOSTS", "fp8.example.com")
    port = free_port()
    web = start_web("127.0.0.1", port)
    try:
        assert status_when_up(port, "fp8.example.com") == 101
        assert handshake(port, f"evil.example:{port}", f"http://evil.example:{port}") == 403
    finally:
        end([web])


def status_when_up(port: int, name: str) -> int:
    """The answer to a session from `name`, once the server answers at all."""
    for _ in range(300):
        try:
            return handshake(port, f"{name}:{port}", f"http://{name}:{port}")
        except OSError:
            threading.Event().wait(0.3)
    raise AssertionError("the server did not start")
