"""A server whose model has room for a few tokens, and one that was asked for more than there is."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import forerun
from served import GO, environment, thread


def test_a_context_of_sixteen_is_served_to_its_end(tiny_chat: Path) -> None:
    with thread(forerun.load(tiny_chat, context=16)) as served:
        reply = served.post(
            "/v1/completions", json=GO | {"prompt": [7], "ignore_eos": True, "max_tokens": 15}
        )
        usage = reply.json()["usage"]
        assert (reply.status_code, usage["prompt_tokens"], usage["completion_tokens"]) == (
            200,
            1,
            15,
        )
        reply = served.post("/v1/completions", json=GO | {"prompt": [7] * 17})
        assert reply.status_code == 400 and "16" in reply.json()["error"]["message"]


@pytest.mark.slow
def test_more_context_than_there_is_is_said_in_one_line(tiny_chat: Path) -> None:
    words = [sys.executable, "-m", "forerun.cli.main", "serve", str(tiny_chat), "--port", "0"]
    process = subprocess.Popen(
        [*words, "--context", "513"], stderr=subprocess.PIPE, text=True, env=environment()
    )
    with process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if re.search(r"at (http://\S+)/v1", line):
                break
        process.terminate()
        process.stderr.read()
    assert process.returncode == 0
    told = [line for line in said if "context" in line]
    assert len(told) == 1 and "context=513 exceeds the model's maximum of 512" in told[0]
