"""Worker processes for texts."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

import pytest

from forerun.serving import text_workers
from forerun.serving.text_workers import TextWorkers, Worker


@pytest.mark.skipif(sys.platform != "linux", reason="workers are processes on Linux only")
def test_the_answer_of_an_interrupted_call_does_not_reach_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(worker: Worker, message: Any, seconds: float) -> NoReturn:
        text_workers._send(worker._link, message)
        raise KeyboardInterrupt

    workers = TextWorkers({"echo": lambda text: text}, seconds=30)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Worker, "call", interrupted)
            workers.call("echo", "text of one tenant")
        assert workers.call("echo", "text of another") == "text of another"
    finally:
        workers.abort()
