"""`forerun serve` on a port that it cannot have, while it drains, and at a second signal."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from forerun.cli.main import main
from forerun.errors import ConfigError
from forerun.serving.server import bind_sockets
from served import GO, TEXT, asked, environment, scripted, thread

LONG = {"prompt": "the cat", "ignore_eos": True, "max_tokens": 8000, "n": 8}


@pytest.mark.parametrize("port", ["99999", "-1", "65536"])
def test_a_port_that_does_not_exist(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model", "--port", port]) == 2
    said = capsys.readouterr().err
    assert said == f"error: --port must be in 0..65535, got {port}; 0 selects a free one\n"


def test_a_port_in_use_is_told_once_and_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"error: cannot listen at 127.0.0.1:{port}: Address already in use")


def test_an_empty_host_is_not_everybody(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-model", "--host", ""]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("error: --host must be an address or a name, got ''")


@pytest.mark.parametrize("host", ["203.0.113.7", "no-such-host.invalid", "a" * 300])
def test_an_address_that_is_not_ours(host: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen at {host}:0: "):
        bind_sockets(host, 0)


def test_a_name_with_several_addresses_has_one_port() -> None:
    sockets = bind_sockets("localhost", 0)
    assert len({one.getsockname()[1] for one in sockets}) == 1
    for one in sockets:
        one.close()


def test_an_address_that_is_taken_while_the_model_loads(tiny_chat: Path) -> None:
    """Two that start at the same time are both bound; the second one to listen is told."""
    from forerun.serving.server import Server
    from forerun.serving.service import Service
    from forerun.serving.settings import Settings

    first = bind_sockets("127.0.0.1", 0)
    second = bind_sockets("127.0.0.1", first[0].getsockname()[1])
    first[0].listen()
    server = Server(Service(scripted(tiny_chat, TEXT), Settings()), second)
    with pytest.raises(ConfigError, match="Address already in use"):
        server.run()
    for one in (*first, *second):
        one.close()


def test_a_server_that_drains_answers_and_says_so(tiny_chat: Path) -> None:
    counts: list[int] = []
    with thread(scripted(tiny_chat, TEXT, seconds=0.02), drain=20.0) as served:
        served.server._on_drain = counts.append
        body = {"max_tokens": 60, "speculation": {"method": "none"}}
        with asked(served, **body) as client:
            served.wait_until(lambda: served.metric("vllm:num_requests_running") == 1)
            served.server.drain()
            health = httpx.get(f"{served.url}/health")
            assert health.status_code == 503 and health.json()["status"] == "shutting down"
            late = served.post("/v1/completions", json=GO | {"max_tokens": 2})
            assert late.status_code == 503 and late.json()["error"]["code"] == "shutting_down"
            assert int(late.headers["retry-after"]) > 0
            client.settimeout(20)
            assert client.recv(100).startswith(b"HTTP/1.1 200")
        worker = served.server.service.worker
        served.wait_until(lambda: not worker._thread.is_alive())
    assert counts == [1] and served.server.num_cut == 0


@contextmanager
def running(*words: Any) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command, and its URL once it listens; the test reads what it says from there on."""
    call = [sys.executable, "-m", "forerun.cli.main", "serve", *map(str, words), "--port", "0"]
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"at (http://\S+)/v1", line):
                    yield process, found[1]
                    break
        finally:
            process.kill()


def test_a_second_signal_ends_at_once_and_both_are_answered(tiny_long: Path) -> None:
    answers: list[httpx.Response] = []
    with running(tiny_long, "--max-seqs", 8, "--drain", 60) as (process, url):
        assert process.stderr is not None

        def ask() -> None:
            answers.append(httpx.post(f"{url}/v1/completions", json=LONG, timeout=120))

        asking = threading.Thread(target=ask)
        asking.start()
        while httpx.get(f"{url}/health").json()["running"] < 8:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said = process.stderr.readline()
        # the last look at /health may still be open
        assert re.match(r"finishing (1 request|2 requests), at most 60 s; Ctrl-C again ends", said)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
        assert process.stderr.read() == "1 request was not finished and got 503; goodbye\n"
        asking.join(120)
    (answer,) = answers
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"


@pytest.mark.slow
def test_what_the_drain_cuts_off_is_told(tiny_long: Path) -> None:
    with running(tiny_long, "--max-seqs", 8, "--drain", 0.2) as (process, url):
        assert process.stderr is not None
        call = LONG | {"stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=call, timeout=120) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert "shutting_down" in rest[-1]
        assert process.wait(120) == 0
        assert "at most 0.2 s" in process.stderr.readline()
        assert process.stderr.read() == "1 request was not finished and got 503; goodbye\n"


def test_ctrl_c_while_a_model_is_loaded(tiny_chat: Path) -> None:
    call = [sys.executable, "-m", "forerun.cli.main", "serve", str(tiny_chat), "--port", "0"]
    with subprocess.Popen(call, stderr=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline().startswith("loading ")
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
            (said,) = process.stderr.read().splitlines()
        finally:
            process.kill()
    assert said.startswith("interrupted")


@pytest.mark.parametrize(
    "place",
    [
        "cli.options.check_parts",
        pytest.param("serving.service.Service.__init__", marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_where_kernels_are_loaded(place: str, tiny_chat: Path) -> None:
    """Compilers call back from C, where an exception is dropped; what is missing then crashes."""
    code = f"""
import ctypes, signal, sys
from unittest.mock import patch
import forerun.serving.service, forerun.cli.options
from forerun.cli.main import main

called_back = ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))
with patch("forerun.{place}", lambda *args, **parts: called_back()):
    sys.exit(main(["serve", {str(tiny_chat)!r}, "--port", "0"]))
"""
    call = [sys.executable, "-c", code]
    done = subprocess.run(call, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "interrupted before anything was served"
