"""Servers for tests: the command in a process of its own, and the same parts in a thread."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import torch

from forerun.api import Model
from forerun.core.cost import Cost
from forerun.core.forward_batch import ForwardBatch
from forerun.core.records import Rows, Sequence, Verdict
from forerun.core.roles import Target
from forerun.core.tree import Tree
from forerun.models.tokenizer import Tokenizer

SOURCE = Path(__file__).parents[2] / "src"
TEXT = "one two three four five six seven eight nine ten "  # what a script says after "go"
JSON_TYPE = "Content-Type: application/json"
GO: dict[str, Any] = {"prompt": "go", "temperature": 0, "model": "tiny"}
SHORT = GO | {"max_tokens": 12}


@dataclass
class Served:
    """A server that runs, and ways to talk to it."""

    url: str
    process: subprocess.Popen[str] | None = None
    server: Any = None
    timeout: float | None = 60.0

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """The real client."""
        options = {"max_retries": 0, "timeout": 60.0} | options
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def post(self, path: str, **request: Any) -> httpx.Response:
        kind = {} if "json" in request else {"Content-Type": "application/json"}
        request["headers"] = kind | dict(request.get("headers") or {})
        return httpx.post(f"{self.url}{path}", timeout=self.timeout, verify=False, **request)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=self.timeout, verify=False)

    def metric(self, name: str) -> float:
        """The sum of all series of a metric."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def wait_until(self, holds: Callable[[], bool], seconds: float = 20.0) -> None:
        """Waits until something holds."""
        wait_until(holds, seconds)

    def wait_idle(self) -> None:
        """Waits until nothing runs and nothing waits."""

        def is_idle() -> bool:
            found = self.get("/health").json()
            return not (found["running"] or found["waiting"])

        self.wait_until(is_idle)


def wait_until(holds: Callable[[], bool], seconds: float = 20.0, nap: float = 0.02) -> None:
    """Waits until something holds. Naps are counted: while a process is stopped none goes by."""
    for _ in range(round(seconds / nap)):
        if holds():
            return
        time.sleep(nap)
    raise AssertionError("it did not come about in time")


def environment(**more: str) -> dict[str, str]:
    """Of a process that runs this checkout."""
    return os.environ | {"PYTHONPATH": str(SOURCE)} | more


@contextmanager
def command(*words: Any, **more: str) -> Iterator[Served]:
    """`forerun serve` in a process, on a free port."""
    call = [sys.executable, "-m", "forerun.cli.main", "serve", *map(str, words), "--port", "0"]
    process = subprocess.Popen(
        call,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env=environment(**more),
    )
    assert process.stderr is not None
    reader: threading.Thread | None = None
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"at (http://\S+)/v1", line):
                reader = threading.Thread(target=process.stderr.read)  # a full pipe would halt it
                reader.start()
                yield Served(found[1], process)
                break
        else:
            raise AssertionError("".join(lines))
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait()
            if reader is not None:
                reader.join()
            process.stderr.close()


@contextmanager
def thread(model: Any, keys: Any = None, verifier: Any = None, **settings: Any) -> Iterator[Served]:
    """The same server in a thread of this process, so that tests can reach into it."""
    from forerun.serving.server import Server, bind_sockets
    from forerun.serving.service import Service
    from forerun.serving.settings import Settings

    service = Service(model, Settings(**{"name": "tiny"} | settings), keys, verifier)
    up = threading.Event()
    server = Server(service, bind_sockets("127.0.0.1", 0), lambda url: up.set())
    runner = threading.Thread(target=server.run, daemon=True)
    runner.start()
    wait_until(up.is_set)
    try:
        yield Served(server.url, server=server)
    finally:
        service.worker.abort()
        server.should_exit = True
        wait_until(lambda: not runner.is_alive())


def check_clean(served: Served) -> None:
    """Of a server in a thread: nothing runs, and nothing is kept of what ran."""
    served.wait_idle()
    worker = served.server.service.worker
    assert not worker._batch._progress and not worker._batch._choices
    assert not +worker._admission._running


@contextmanager
def asked(served: Served, buffer: int | None = None, **fields: Any) -> Iterator[socket.socket]:
    """A connection on which a completion was asked for and nothing read; gone after the block.

    buffer: bytes that the system may receive for it.
    """
    body = json.dumps(GO | fields).encode()
    host, port = served.url.removeprefix("http://").split(":")
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {host}", JSON_TYPE]
    head = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""])
    with socket.socket() as client:
        if buffer is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        client.connect((host, int(port)))
        client.sendall(head.encode() + body)
        yield client


class Script(Target):
    """A target that says one text after a prompt, whatever was drawn before; slow if asked."""

    context = 4096

    def __init__(
        self, tokens: list[int], num_prompt: int, vocab: int, seconds: float = 0.0
    ) -> None:
        self.script, self.start, self.vocab_size = tokens, num_prompt, vocab
        self.seconds = seconds
        self.released = 0
        self.cost = Cost((1, 65), (1.0, 1.1))  # nothing is measured

    def forward(self, batch: ForwardBatch) -> list[Rows]:
        time.sleep(self.seconds)
        pairs = zip(batch.seqs, batch.trees, strict=True)
        return [Rows(self._logits(seq, tree)) for seq, tree in pairs]

    def _logits(self, seq: Sequence, tree: Tree) -> torch.Tensor:
        logits = torch.zeros(1 + len(tree), self.vocab_size)
        for row, depth in enumerate([0, *tree.depths.tolist()]):
            place = (len(seq.tokens) - self.start + depth) % len(self.script)
            logits[row, self.script[place]] = 20.0
        return logits

    def commit(self, seqs: Many[Sequence], trees: Many[Tree], verdicts: Many[Verdict]) -> None:
        """Nothing is kept."""

    def release(self, seq: Sequence) -> None:
        self.released += 1


def scripted(folder: Path, text: str, prompt: str = "go", seconds: float = 0.0) -> Model:
    """A model that continues `prompt` with `text`, over and over."""
    tokenizer = Tokenizer.load(folder)
    tokens, start = tokenizer.encode(text), len(tokenizer.encode(prompt))
    return Model(Script(tokens, start, tokenizer.vocab_size, seconds), tokenizer, "script")
